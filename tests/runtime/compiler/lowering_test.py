"""Computations traced into one function: intrinsics and building blocks."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import call_dominant, graphs, lowering
from fednest_tff.runtime.compiler.unrolled import Unrolled
from tests.runtime.comparison import (
    assert_like_native,
    at_clients,
    at_server,
    run_in_process,
)

SERVER, CLIENTS = tff.SERVER, tff.CLIENTS


@tff.federated_computation(at_clients(np.int32))
def integers(x):
  return (
      x,
      tff.federated_sum(x),
      tff.federated_min(x),
      tff.federated_max(x),
      tff.federated_value(3, SERVER),
      tff.federated_value(4, CLIENTS),
  )


@tff.federated_computation(at_clients(np.float32))
def means(x):
  return tff.federated_mean(x), tff.federated_mean(x, x)


@tff.federated_computation(at_clients(np.str_), at_server(np.str_))
def strings(x, y):
  return x, y, tff.federated_broadcast(y)


@tff.federated_computation(at_clients(tff.SequenceType(np.int32)))
def sequences(x):
  return x


@tff.federated_computation(at_clients(tff.TensorType(np.float32, [None])))
def ragged(x):
  add = tff.tensorflow.computation(
      lambda v: tf.reduce_sum(v), tff.TensorType(np.float32, [None])
  )
  return x, tff.federated_sum(tff.federated_map(add, x))


@tff.federated_computation(at_clients(tff.TensorType(np.int32, [2])))
def select(keys):
  pick = tff.tensorflow.computation(
      lambda value, key: value[0] * tf.cast(key, tf.float32),
      [(np.float32,), np.int32],
  )
  value = tff.federated_value((np.float32(2.0),), SERVER)
  return tff.federated_select(keys, tff.federated_value(9, SERVER), value, pick)


@tff.federated_computation(at_clients(np.float32))
def evaluated(x):
  one = tff.tensorflow.computation(lambda: tf.constant(1.0))
  return tff.federated_eval(one, CLIENTS), tff.federated_eval(one, SERVER), x


def _range(stop):
  return tf.data.Dataset.range(stop, output_type=tf.int32)


@pytest.mark.parametrize('function', [
    lambda: integers([3, 1, 2]),
    lambda: means([1.0, 2.0, 4.0]),
    lambda: strings(['a', 'bc'], 'd'),
    lambda: sequences([_range(3), _range(0)]),
    lambda: sequences([[1, 2, 3], [4]]),
    lambda: ragged([np.ones(2, np.float32), np.ones(3, np.float32)]),
    lambda: select([np.int32([1, 2]), np.int32([5, 6])]),
    lambda: evaluated([1.0, 2.0]),
])
def test_small_computations(function):
  assert_like_native(function)


def test_what_the_native_runtime_cannot_do(runtime):
  """Clients' values without clients, and sequences outside TensorFlow."""
  @tff.federated_computation
  def no_argument():
    return tff.federated_value(5, SERVER), tff.federated_value(4, CLIENTS)

  @tff.federated_computation(tff.SequenceType(np.int32))
  def sequence(x):
    increment = tff.tensorflow.computation(lambda v: v + 1, np.int32)
    fold = tff.tensorflow.computation(
        lambda a, v: a * v + 1, [np.int32, np.int32]
    )
    total = tff.sequence_sum(tff.sequence_map(increment, x))
    return total, tff.sequence_reduce(x, 0, fold)

  assert run_in_process(runtime, no_argument) == (5, 4)
  assert run_in_process(runtime, lambda: sequence([1, 2, 3])) == (9, 10)
  assert run_in_process(runtime, lambda: integers([]))[:2] == ([], 0)


@pytest.mark.parametrize(['element', 'rows', 'keys'], [
    # Names that are not in alphabetic order: tf.nest would sort them.
    ([('b', np.int32), ('a', np.int32)],
     [dict(b=10, a=1), dict(a=2, b=20)], ('b', 'a')),
    ([np.int32, np.int32], [(10, 1), (20, 2)], (0, 1)),
    ([np.int32], [(10,), (20,)], (0, 0)),
])
def test_sequences_of_structs(runtime, element, rows, keys):
  element = tff.to_type(element)
  first, last = keys
  same = tff.tensorflow.computation(lambda row: row, element)
  weigh = tff.tensorflow.computation(
      lambda total, row: 2 * total + row[first] - row[last],
      [np.int32, element],
  )

  @tff.federated_computation(tff.SequenceType(element))
  def sums(x):
    return (
        tff.sequence_sum(tff.sequence_map(same, x)),
        tff.sequence_reduce(x, 0, weigh),
    )

  total, weighed = run_in_process(runtime, lambda: sums(rows))
  assert total[first] == 30
  assert total[last] == (30 if first == last else 3)
  assert weighed == (0 if first == last else 2 * 9 + 18)


def test_refused_by_name_before_anything_runs(runtime):
  in_jax = tff.jax.computation(lambda x: x + 1, np.int32)

  @tff.federated_computation(at_clients(np.int32))
  def mapped(x):
    return tff.federated_map(in_jax, x)

  with pytest.raises(NotImplementedError, match='not xla'):
    run_in_process(runtime, lambda: mapped([1, 2]))


DEVICE = '/device:CPU:0'
PAIR = tff.framework.Reference('x', tff.to_type([('a', np.int32), np.int32]))


def _evaluate(block, **names):
  evaluator = lowering.Lowering(
      Unrolled(2, [DEVICE]), lambda compiled: compiled, DEVICE
  )
  return evaluator.evaluate(block, names)


def test_building_blocks():
  framework = tff.framework
  value = tff.structure.Struct([('a', 7), (None, 8)])
  by_name = framework.Selection(PAIR, name='a')
  by_index = framework.Selection(PAIR, index=1)
  swapped = framework.Struct([(None, by_index), ('b', by_name)])
  expected = tff.structure.Struct([(None, 8), ('b', 7)])
  assert _evaluate(PAIR, x=value) is value
  assert _evaluate(swapped, x=value) == expected

  swap = framework.Lambda('x', PAIR.type_signature, swapped)
  assert _evaluate(swap)(value) == expected
  y = framework.Reference('y', PAIR.type_signature)
  assert _evaluate(framework.Call(swap, y), y=value) == expected

  # A name inside hides the same name outside.
  inner = framework.Reference('x', by_name.type_signature)
  block = framework.Block([('x', by_name)], inner)
  assert _evaluate(block, x=value) == 7
  literal = framework.Literal(3, tff.TensorType(np.int32))
  assert _evaluate(literal).numpy() == 3


def test_unknown_building_block():
  block = tff.framework.Placement(tff.CLIENTS)
  with pytest.raises(NotImplementedError, match='cannot run a Placement'):
    _evaluate(block)


def test_function_of_flat_tensors():
  function = lowering.build_function(
      call_dominant.to_call_dominant(integers),
      Unrolled(2, [DEVICE]),
      DEVICE,
      graphs.Importer(),
  )
  found = function(tf.constant(5), tf.constant(6))
  # Each client's value, sum, minimum, maximum, and the two constants.
  assert [v.numpy() for v in found] == [5, 6, 11, 5, 6, 3, 4]
