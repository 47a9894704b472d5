"""Datasets that stay the same, and clients that share a dataset's state."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import in_process
from fednest_tff.runtime.compiler import datasets
from tests.runtime.comparison import at_clients, at_server, run_in_process

INTEGERS = tff.SequenceType(np.int64)


def dataset_of(*numbers):
  return tf.data.Dataset.from_tensor_slices(np.float32(numbers))


@pytest.mark.parametrize(['change', 'expected'], [
    (lambda d: d, True),
    (lambda d: d.map(lambda x: 2 * x).take(1).batch(2).skip(0), True),
    (lambda d: d.concatenate(dataset_of(1)).shard(2, 0), True),
    (lambda d: d.shuffle(10), False),
    (lambda d: d.shuffle(10).take(1), False),
    (lambda d: d.map(lambda x: x + tf.random.uniform([])), False),
    (lambda d: d.filter(lambda x: x > 1), False),
    (lambda d: tf.data.Dataset.zip((d, d.shuffle(3))), False),
], ids=range(8))
def test_constant_datasets(change, expected):
  assert datasets.is_constant(change(dataset_of(1, 2))) == expected


def test_a_variable_is_a_state():
  factor = tf.Variable(2.0)
  assert not datasets.is_constant(dataset_of(1).map(lambda x: factor * x))


def test_files_may_change():
  paths = tf.data.Dataset.from_tensor_slices(['a', 'b'])
  assert datasets.is_constant(paths)
  assert not datasets.is_constant(paths.map(tf.io.read_file))


@tff.tensorflow.computation(np.int64, INTEGERS)
def digits(start, dataset):
  """The elements as digits of a number, so that their order matters."""
  return dataset.reduce(start, lambda a, b: 10 * a + b)


@tff.federated_computation(at_server(np.int64), at_clients(INTEGERS))
def digits_of_all(start, datasets):
  return tff.federated_map(digits, (tff.federated_broadcast(start), datasets))


@pytest.mark.parametrize('unroll', [None, 0, 10])
def test_clients_that_share_a_shuffle_do_not_depend_on_each_other(unroll):
  runtime = in_process.InProcessRuntime(unroll=unroll)

  def run(count):
    shuffled = tf.data.Dataset.range(8).shuffle(8, seed=5)
    shards = [shuffled.shard(2, i % 2) for i in range(count)]
    return run_in_process(runtime, lambda: digits_of_all(0, shards))

  found = run(6)
  assert found[:2] * 3 == found
  # A permutation's halves.
  assert sorted(''.join(str(n).zfill(4) for n in found[:2])) == list('01234567')
  assert run(6) == found


def test_only_clients_with_a_common_state_get_copies():
  parameter = at_clients(INTEGERS)
  numbers = tf.data.Dataset.range(3)
  shuffled = numbers.shuffle(3)
  for clients in (
      [numbers, numbers],
      [shuffled, numbers],
      [numbers.shuffle(3), shuffled],
      [[1, 2], [1, 2]],
  ):
    assert datasets.separate(clients, parameter) is clients
  copies = datasets.separate([shuffled.take(2), shuffled], parameter)
  assert shuffled not in copies
  assert [int(copy.cardinality()) for copy in copies] == [2, 3]
  assert datasets.separate(None, None) is None


def test_generators_stay_as_they_are():
  made = tf.data.Dataset.from_generator(
      lambda: iter([1, 2]), output_signature=tf.TensorSpec([], tf.int64)
  )
  runtime = in_process.InProcessRuntime()
  found = run_in_process(runtime, lambda: digits_of_all(0, [made, made]))
  assert found == [12, 12]
