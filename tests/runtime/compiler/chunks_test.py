"""Cohorts by chunks: the numbers of whole cohorts, and little is kept."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import in_process
from fednest_tff.runtime.compiler import chunks, cohort
from tests.runtime.comparison import at_clients, run_in_process


def tensorflow(*types):
  return lambda function: tff.tensorflow.computation(function, *types)


VECTOR = tff.TensorType(np.float32, [3])
triple = tensorflow(np.float32)(lambda x: (x * [1.0, 2.0, 3.0], -x))
square = tensorflow(VECTOR)(lambda v: v**2)
zero = tensorflow()(lambda: tf.zeros([3]))
# Neither a sum nor a mean: the order of the clients matters.
halve_and_add = tensorflow(VECTOR, VECTOR)(lambda a, b: a / 2 + b)
add = tensorflow(VECTOR, VECTOR)(lambda a, b: a + b)
same = tensorflow(VECTOR)(lambda v: v)


@tff.federated_computation(at_clients(np.float32), at_clients(np.float32))
def all_uses(values, weights):
  """A large result that is used in every way that there is."""
  mapped = tff.federated_map(triple, values)
  vectors, negative = mapped[0], mapped[1]
  squares = tff.federated_map(square, vectors)
  return (
      tff.federated_sum(squares),
      tff.federated_mean(vectors, weights),
      tff.federated_max(negative),
      tff.federated_aggregate(vectors, zero(), halve_and_add, add, same),
      squares,
  )


@pytest.mark.parametrize('unroll', [None, 0])
@pytest.mark.parametrize('size', [1, 2, 5])
def test_all_uses(small_chunks, size, unroll):
  values = np.arange(1, size + 1, dtype=np.float32)
  weights = values**2
  runtime = in_process.InProcessRuntime(unroll=unroll)
  total, mean, largest, halved, squares = run_in_process(
      runtime, lambda: all_uses(list(values), list(weights))
  )
  vectors = values[:, np.newaxis] * [1, 2, 3]
  np.testing.assert_allclose(total, np.sum(vectors**2, axis=0), rtol=1e-6)
  np.testing.assert_allclose(
      mean, np.average(vectors, axis=0, weights=weights), rtol=1e-6
  )
  assert largest == -1
  expected = np.zeros(3)
  for vector in vectors:
    expected = expected / 2 + vector
  np.testing.assert_allclose(halved, expected, rtol=1e-6)
  np.testing.assert_allclose(squares, vectors**2, rtol=1e-6)


def test_chunks_by_memory():
  types = tff.to_type([
      tff.FederatedType((np.float32, [2**18]), tff.SERVER),
      at_clients(tff.SequenceType(np.float32)),
  ])
  # A client has read 1 MiB and receives 1 MiB: 256 of them are 512 MiB.
  read = [[[tf.zeros([2**18])]] * 300]
  assert cohort.choose_chunk(types, read, 300) == 32
  assert cohort.choose_chunk(types, read, 257) == 32
  assert cohort.choose_chunk(types, read, 256) is None
  # A power of two, also if nearly twice as many would do.
  assert cohort.choose_chunk(types, [[[tf.zeros([1])]] * 600], 600) == 32
  assert cohort.choose_chunk(types[1], [], 300) is None
  assert cohort.choose_chunk(None, [], 0) is None


def test_what_is_large():
  number = tf.TensorSpec([], tf.float32)
  assert not chunks.is_large([number])
  assert chunks.is_large([number, tf.TensorSpec([2**12], tf.float32)])
  # It depends on the data, which are in memory, too.
  assert not chunks.is_large([number, tf.TensorSpec([None, 2**12])])


def test_a_chunk_is_computed_once():
  """Whatever the number of leaves, and by no more than its clients."""
  calls = []

  def compute(begin, end):
    calls.append((begin, end))
    rows = tf.range(begin, end)
    return [rows, 2 * rows]

  results = chunks.Results(compute, lambda i: [i, 2 * i])
  leaves = [chunks.Postponed(results, k) for k in range(2)]

  def step(begin, end, total):
    one, other = (tf.reduce_sum(leaf.rows(begin, end)) for leaf in leaves)
    return [total[0] + one, total[1] + other, tf.maximum(total[2], end - begin)]

  found = tf.function(
      lambda size: chunks.fold(size, 4, step, [0, 0, 0])
  )(tf.constant(10))
  assert [int(value) for value in found] == [45, 90, 4]
  assert len(calls) == 1
