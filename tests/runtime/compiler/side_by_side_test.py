"""Loops side by side: results as of one loop, and no loop waits for another."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import in_process
from fednest_tff.runtime.compiler import graphs, side_by_side
from tests.runtime.comparison import at_clients, run_in_process

FLOATS = tff.SequenceType(np.float32)


@tff.tensorflow.computation(FLOATS)
def train(dataset):
  """A client's work as TFF's models do it: a variable, and a dataset."""
  weight = tf.Variable(1.0)

  @tf.function
  def work(dataset):
    for x in dataset:
      weight.assign(weight / 2 + x)
    return weight.read_value(), tf.range(weight.read_value())

  return work(dataset)


@tff.federated_computation(at_clients(FLOATS))
def train_all(datasets):
  return tff.federated_map(train, datasets)


def _trained(data):
  weight = 1.0
  for x in data:
    weight = weight / 2 + x
  return weight


@pytest.fixture(params=[1, 2, 3])
def num_loops(request, monkeypatch):
  monkeypatch.setattr(side_by_side, '_num_loops', lambda: request.param)
  return request.param


@pytest.mark.parametrize('unroll', [None, 0, 10])
@pytest.mark.parametrize('size', [1, 2, 3, 7])
def test_results_in_the_order_of_the_clients(num_loops, size, unroll):
  data = [[float(i), 2.0 * i] for i in range(size)]
  runtime = in_process.InProcessRuntime(unroll=unroll)
  results = run_in_process(
      runtime,
      lambda: train_all([
          tf.data.Dataset.from_tensor_slices(np.float32(rows)) for rows in data
      ]),
  )
  assert [result[0] for result in results] == list(map(_trained, data))
  for result in results:  # As long as the client's weight says.
    np.testing.assert_array_equal(result[1], np.arange(result[0]))


def _waits_for(op):
  """All that an operation waits for."""
  found, stack = set(), [op]
  while stack:
    current = stack.pop()
    before = [tensor.op for tensor in current.inputs] + current.control_inputs
    new = set(before) - found
    found |= new
    stack += new
  return found


def _graph(computation, num_clients=4):
  """Maps a computation of one number to the numbers 0, 1, ... in a graph."""
  function = graphs.ImportedGraph(computation.to_building_block())

  @tf.function(autograph=False)
  def mapped():
    arrays = side_by_side.map_clients(
        lambda i: [function(tf.cast(i, tf.float32))],
        tf.constant(num_clients),
        [tf.TensorSpec([], tf.float32)],
        function.is_repeatable,
    )
    return arrays[0].stack()

  return mapped.get_concrete_function()


def _loops(concrete):
  """The loops that compute something, not those that copy results."""
  return [
      op for op in concrete.graph.get_operations()
      if op.type in ('While', 'StatelessWhile')
      and not any(found.type.endswith('While') for found in _waits_for(op))
  ]


@tff.tensorflow.computation(np.float32)
def add_to_variable(x):
  variable = tf.Variable(1.0)
  with tf.control_dependencies([variable.assign_add(x)]):
    return variable.read_value()


def test_no_loop_waits_for_another(num_loops):
  concrete = _graph(add_to_variable)
  assert len(_loops(concrete)) == num_loops
  np.testing.assert_array_equal(concrete(), [1, 2, 3, 4])


@pytest.mark.parametrize(['threads', 'expected'], [
    (-1, 1), (1, 1), (3, 3), (1000, side_by_side._MAX_LOOPS)
])
def test_there_is_always_a_loop(monkeypatch, threads, expected):
  monkeypatch.setattr(
      tf.config.threading, 'get_inter_op_parallelism_threads', lambda: threads
  )
  assert side_by_side._num_loops() == expected


@tff.tensorflow.computation(np.float32)
def add_random(x):
  return x + tf.random.uniform([], seed=1)


def test_random_numbers_are_drawn_in_the_order_of_the_clients(num_loops):
  """Two loops would begin with the same random number."""
  concrete = _graph(add_random)
  assert len(_loops(concrete)) == 1
  assert len(set(concrete().numpy() - np.arange(4))) == 4
