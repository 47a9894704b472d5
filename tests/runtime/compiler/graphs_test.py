"""TensorFlow computations as functions, and their fingerprints."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import fingerprints, graphs
from tests.runtime import comparison


@tff.tensorflow.computation(np.float32, np.float32, np.float32)
def arguments_in_every_role(given_back, waited_for, ignored):
  tf.raw_ops.Assert(condition=ignored < 0.0, data=[ignored])  # Never runs.
  with tf.control_dependencies([waited_for]):
    return given_back, tf.constant(2.0), given_back


@tff.tensorflow.computation(np.float32)
def colocated_with_an_argument(x):
  with tf.compat.v1.colocate_with(x):
    y = tf.constant(2.0) + 1.0
  with tf.compat.v1.colocate_with(y):
    return x * y + tf.constant(1.0)


@tff.tensorflow.computation(np.int32)
def unplaced(x):
  return collections.OrderedDict(
      integer=x,
      float=tf.cast(x, tf.float32),
      strings=tf.constant(['a', 'b']),
      string=tf.constant('s'),
      truth=tf.constant(True),
      vector=tf.ones([2]),
      dataset=tf.data.Dataset.range(tf.cast(x, tf.int64)),
      empty=(),
  )


@pytest.mark.parametrize('function', [
    lambda: unplaced(3),
    lambda: arguments_in_every_role(1.0, 2.0, 3.0),
    lambda: colocated_with_an_argument(3.0),
])
def test_small_computations(function):
  comparison.assert_like_native(function)


def _power(exponent):
  """A computation whose graph has a function, which TensorFlow numbers."""

  @tff.tensorflow.computation(np.float32)
  def computation(x):
    return tf.while_loop(
        lambda k, _: k < exponent, lambda k, y: (k + 1, y * x), (0, 1.0)
    )[1]

  return computation.to_building_block()


def test_fingerprint_does_not_depend_on_the_time_of_tracing():
  first, again, other = _power(3), _power(3), _power(4)
  assert fingerprints.fingerprint(first) == fingerprints.fingerprint(again)
  assert fingerprints.fingerprint(first) != fingerprints.fingerprint(other)


def test_nodes_of_functions_count():
  proto = tf.compat.v1.GraphDef()
  block = _power(3)
  block.proto.tensorflow.graph_def.Unpack(proto)
  assert len(proto.library.function) > 0
  assert fingerprints.num_nodes(block) > len(proto.node)


def test_each_call_has_its_own_variables():
  @tff.tensorflow.computation(np.float32)
  def count(x):
    variable = tf.Variable(10.0)
    with tf.control_dependencies([variable.assign_add(x)]):
      return variable.read_value()

  function = graphs.ImportedGraph(count.to_building_block())

  @tf.function(autograph=False)
  def call_three_times():
    return [function(tf.constant(x)) for x in (1.0, 2.0, 3.0)]

  for _ in range(2):
    assert [v.numpy() for v in call_three_times()] == [11.0, 12.0, 13.0]


def test_tables_are_filled_before_they_are_used():
  @tff.tensorflow.computation(np.str_)
  def number(name):
    entries = tf.lookup.KeyValueTensorInitializer(['one', 'two'], [1, 2])
    table = tf.lookup.StaticHashTable(entries, default_value=-1)
    return table.lookup(name)

  @tff.federated_computation(comparison.at_clients(np.str_))
  def numbers(names):
    return tff.federated_map(number, names)

  for runtime in comparison.RUNTIMES.values():
    for _ in range(2):
      found = comparison.run_in_process(
          runtime, lambda: numbers(['two', 'one', 'three'])
      )
      assert found == [2, 1, -1]


def test_only_tensorflow():
  @tff.jax.computation(np.float32)
  def in_jax(x):
    return x + 1

  block = in_jax.to_building_block()
  assert fingerprints.num_nodes(block) == 0
  with pytest.raises(NotImplementedError, match='not xla'):
    graphs.ImportedGraph(block)


INTEGER = tff.TensorType(np.int64)


@tff.tensorflow.computation(INTEGER)
def static_table(x):
  initializer = tf.lookup.KeyValueTensorInitializer([x], [10 * x])
  table = tf.lookup.StaticHashTable(initializer, -1)
  return table.lookup(tf.range(3, dtype=tf.int64))


@tff.tensorflow.computation(INTEGER)
def mutable_table(x):
  table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
  with tf.control_dependencies([table.insert([x], [x])]):
    return table.size()


@tff.tensorflow.computation(INTEGER)
def dense_table(x):
  table = tf.lookup.experimental.DenseHashTable(
      tf.int64, tf.float32, default_value=-1.0, empty_key=-1, deleted_key=-2
  )
  with tf.control_dependencies([table.insert([x], [0.5])]):
    return table.size()


@pytest.mark.parametrize('kind', comparison.RUNTIMES)
def test_each_call_has_its_own_tables(kind):
  @tff.federated_computation(comparison.at_clients(INTEGER))
  def look_up(keys):
    return [
        tff.federated_map(table, keys)
        for table in (static_table, mutable_table, dense_table)
    ]

  runtime = comparison.RUNTIMES[kind]
  for keys in ([0, 1, 2], [2, 1]):
    static, mutable, dense = comparison.run_in_process(
        runtime, lambda keys=keys: look_up(keys)
    )
    np.testing.assert_array_equal(
        static, [[10 * k if k == i else -1 for i in range(3)] for k in keys]
    )
    assert list(mutable) == list(dense) == [1] * len(keys)
