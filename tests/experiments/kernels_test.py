"""Executed operations are counted, and products have the right FLOPs."""

import os

import pytest
import tensorflow as tf

from experiments import kernels


@tf.function(autograph=False)
def with_loop(x, steps):
  def step(k, v):
    return k + 1, tf.tanh(v @ x)

  _, y = tf.while_loop(lambda k, _: k < steps, step, (tf.constant(0), x @ x))
  return tf.reduce_sum(y)


@pytest.mark.parametrize('calls', [1, 60])
def test_every_execution_counts(calls):
  """Also of operations that TensorFlow has come to know as cheap."""
  x = tf.eye(4)
  for _ in range(calls):
    with_loop(x, tf.constant(7))
  counts = kernels.count_operations(lambda: with_loop(x, tf.constant(7)))
  assert counts['MatMul'] == 8
  assert counts['Tanh'] == 7
  assert counts['Less'] == 8
  assert counts['Sum'] == 1
  # k + 1, and TensorFlow's own count of the iterations.
  assert counts['AddV2'] == 14
  assert counts.total() == 38


@pytest.mark.parametrize(
    'name', ['MatMul', '_MklMatMul', '_MklNativeMatMul']
)
def test_operations_of_one_dnn_have_their_usual_names(name):
  assert kernels._without_library(name) == 'MatMul'


def test_nothing_is_executed():
  assert kernels.count_operations(lambda: None).total() == 0


@tf.function(autograph=False)
def transposed(a, b):
  return tf.matmul(a, b, transpose_a=True)


def test_flops_of_products():
  a, b = tf.TensorSpec([3, 5]), tf.TensorSpec([3, 7])
  function = transposed.get_concrete_function(a, b)
  assert kernels.count_flops(function, 1) == 2 * 5 * 3 * 7

  @tf.function(autograph=False)
  def repeated(a, b, steps):
    _, end = tf.while_loop(
        lambda k, _: k < steps,
        lambda k, v: (k + 1, v + transposed(a, b)),
        (tf.constant(0), tf.zeros([5, 7])),
    )
    tf.ones([5, 5]) @ end  # Nothing needs it, and TensorFlow does not run it.
    # Batches: two products of [5, 7] and [7, 4].
    return tf.stack([end, end]) @ tf.ones([2, 7, 4])

  steps = tf.TensorSpec([], tf.int32)
  function = repeated.get_concrete_function(a, b, steps)
  assert kernels.count_flops(function, 4) == 4 * 210 + 2 * 2 * 5 * 7 * 4


def test_unknown_shapes_are_refused():
  unknown = tf.TensorSpec([3, None])
  function = transposed.get_concrete_function(unknown, unknown)
  with pytest.raises(ValueError, match='The shape of MatMul is not known'):
    kernels.count_flops(function, 1)


def test_rate_of_products():
  rate = kernels.matmul_rate(size=256, repeats=3)
  # A core does some 10^8 to 10^12 per second.
  assert 1e8 < rate < 1e12 * os.cpu_count()
