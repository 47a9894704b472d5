"""Forward accumulators against TensorFlow's own."""

import re

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import forwardprop

from fednest_tff.local import derivatives, forward

AT = tf.constant([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]], tf.float64)
ALONG = tf.constant([[1.0, 2.0, -1.0], [0.5, -0.5, 3.0]], tf.float64)
VARIABLE = tf.Variable(2.0, dtype=tf.float64)


def _chosen(a):
  rows = tf.gather(a, [1, 0, 1])
  return tf.where(rows > 0, tf.exp(rows), rows**3) @ tf.transpose(a)


def _looped(a):
  """A loop, which TensorFlow differentiates with lists behind handles."""
  return tf.while_loop(
      lambda k, _: k < 3,
      lambda k, b: (k + 1, tf.sin(b) * a),
      (tf.constant(0), a),
  )[1]


def _with_variable(a):
  return VARIABLE.read_value() * a**2


@pytest.mark.parametrize('is_traced', [True, False])
@pytest.mark.parametrize(
    'function', [tf.sin, _chosen, _looped, _with_variable]
)
def test_derivatives_are_those_of_tensorflow(function, is_traced):
  def derivative(accumulator):
    with accumulator(AT, ALONG) as found:
      value = function(AT)
    return found.jvp(value)

  def products():
    return (
        derivative(forward.accumulator),
        derivative(tf.autodiff.ForwardAccumulator),
    )

  if is_traced:
    products = tf.function(products)
  found, expected = products()
  assert np.any(found != 0)
  np.testing.assert_array_equal(found, expected)


def _traced_product():
  """The lines of a product's graph, sorted, without numbers of functions."""
  with tf.Graph().as_default() as graph:
    at = [tf.zeros([n]) for n in (2, 3, 4)]
    derivatives.hessian_vector_product(
        lambda a: tf.add_n([tf.reduce_sum(tf.exp(v) * v) for v in a]), at, at
    )
  return sorted(re.sub(r'_\d+', '', str(graph.as_graph_def())).splitlines())


def test_graph_of_a_product_does_not_depend_on_earlier_ones(monkeypatch):
  # TensorFlow relaxes shapes after so many traces of an operation.
  monkeypatch.setattr(forwardprop, '_TRACE_COUNT_LIMIT', 4)
  first = _traced_product()
  kept = len(forward._OPTIONS.function_cache)
  assert kept > 0
  for _ in range(3):
    assert _traced_product() == first
  # All graphs share what was traced, and TensorFlow kept nothing.
  assert len(forward._OPTIONS.function_cache) == kept
  assert len(forwardprop._jvp_function_cache) == 0


def test_tensorflows_counts_begin_anew(monkeypatch):
  """It still takes the derivatives of handles, and counts those."""
  counts = {'TensorListSetItem': 40}
  monkeypatch.setattr(forwardprop, '_TRACE_COUNT', counts)
  with forward.accumulator(AT, ALONG):
    assert not counts


def test_what_is_kept_is_limited(monkeypatch):
  monkeypatch.setattr(forward, '_MAX_KEPT', 2)
  first = _traced_product()
  kept = len(forward._OPTIONS.function_cache)
  with forward.accumulator(AT, ALONG):
    tf.cosh(AT)
  assert len(forward._OPTIONS.function_cache) == 1
  assert _traced_product() == first
  assert len(forward._OPTIONS.function_cache) == kept + 1


def test_programs_own_accumulators_are_left_alone():
  before = len(forward._OPTIONS.function_cache)
  with pytest.raises(ZeroDivisionError):
    with forward.accumulator(AT, ALONG):
      raise ZeroDivisionError
  with tf.autodiff.ForwardAccumulator(AT, ALONG) as found:
    value = tf.atan(AT)  # In no other test.
  np.testing.assert_allclose(found.jvp(value), ALONG / (1 + AT**2))
  assert len(forward._OPTIONS.function_cache) == before


def test_operations_on_handles_are_left_to_tensorflow():
  rows = tf.Variable(AT)

  @tf.function
  def derivative():
    with forward.accumulator(rows, ALONG) as found:
      value = tf.gather(rows, [1, 0, 1]) ** 2
    assert len(forwardprop._jvp_function_cache) > 0
    return found.jvp(value)

  expected = tf.gather(2 * AT * ALONG, [1, 0, 1])
  np.testing.assert_allclose(derivative(), expected)


def _moving_second_factor(images, weights, x):
  """The mixed derivative of a two-layer network, whose images do not move."""

  def loss(x, y):
    return tf.reduce_sum(tf.nn.relu(images @ x) @ y)

  return derivatives.mixed_product(loss, x, weights, tf.ones_like(weights))


@pytest.mark.parametrize('num_images', [5, None])
def test_nothing_is_multiplied_by_zeros(num_images):
  rng = np.random.default_rng(0)
  shapes = [5, 4], [3, 2], [4, 3]
  arrays = [tf.constant(rng.normal(size=shape)) for shape in shapes]
  specs = [tf.TensorSpec(array.shape, array.dtype) for array in arrays]
  specs[0] = tf.TensorSpec([num_images, 4], tf.float64)
  function = tf.function(_moving_second_factor, specs, autograph=False)
  nodes = function.get_concrete_function().graph.as_graph_def().node
  # TensorFlow's own derivatives of products are functions.
  calls = [node for node in nodes if node.op == 'PartitionedCall']
  assert not [node.name for node in calls if 'matmul' in node.name]
  factors = {
      name for node in nodes if node.op == 'MatMul' for name in node.input
  }
  assert len(factors) > 4 and not [name for name in factors if 'zeros' in name]
  # By hand: relu' is a mask, and d/dx <d/dy sum(relu(A x) y), 1> is A^T mask 2.
  image, _, at = (array.numpy() for array in arrays)
  mask = (image @ at > 0).astype(float)
  np.testing.assert_allclose(function(*arrays), image.T @ (2 * mask))


def test_nothing_is_multiplied_by_many_zeros():
  """TensorFlow writes those of a large matrix in another way."""

  @tf.function(autograph=False)
  def mixed(x, y):
    def loss(x, y):
      features = tf.nn.relu(tf.nn.relu(x[0]) @ x[1])
      return tf.reduce_sum(features @ y**2)

    return derivatives.mixed_product(loss, x, y, tf.ones_like(y))

  x = tf.ones([2, 40]), tf.ones([40, 30])
  y = tf.ones([30, 5])
  nodes = mixed.get_concrete_function(x, y).graph.as_graph_def().node
  factors = {
      name for node in nodes if node.op == 'MatMul' for name in node.input
  }
  assert len(factors) > 4 and not [name for name in factors if 'zeros' in name]
  # d/dy <d/dx loss, 1> = 2 y, summed over the 5 columns: 10 for each feature.
  found = mixed(x, y)
  np.testing.assert_allclose(found[1], np.full([40, 30], 2 * 10))
  np.testing.assert_allclose(found[0], np.full([2, 40], 30 * 10))


@pytest.mark.parametrize('operation', sorted(forward._LINEAR))
def test_product_rule(operation):
  """Both arguments move, or one of them; against TensorFlow's own."""
  rng = np.random.default_rng(1)

  def draw(*shape):
    return tf.constant(rng.normal(size=shape))

  options = dict(strides=[1, 2, 2, 1], padding='SAME')
  image, kernel, result = draw(2, 6, 5, 3), draw(3, 2, 3, 4), draw(2, 3, 3, 4)
  run = getattr(tf.raw_ops, operation)
  cases = {
      'MatMul': (
          lambda a, b: run(a=a, b=b, transpose_b=True), draw(3, 4), draw(2, 4)
      ),
      'BatchMatMulV2': (
          lambda a, b: run(x=a, y=b, adj_x=True), draw(5, 4, 3), draw(4, 2)
      ),
      'BiasAddGrad': (lambda a, _: run(out_backprop=a), draw(3, 4), draw(2)),
      'ReluGrad': (
          lambda a, b: run(gradients=a, features=b), draw(3, 4), draw(3, 4)
      ),
      'Conv2D': (lambda a, b: run(input=a, filter=b, **options), image, kernel),
      'Conv2DBackpropFilter': (
          lambda a, b: run(
              input=a, filter_sizes=kernel.shape, out_backprop=b, **options
          ), image, result,
      ),
      'Conv2DBackpropInput': (
          lambda a, b: run(
              input_sizes=image.shape, filter=a, out_backprop=b, **options
          ), kernel, result,
      ),
  }
  function, a, b = cases[operation]
  along = draw(*a.shape), draw(*b.shape)

  @tf.function(autograph=False)
  def both():
    found = []
    one_each = [[k] for k in range(len(forward._LINEAR[operation]))]
    for which in (*one_each, [0, 1]):
      for kind in (forward.accumulator, tf.autodiff.ForwardAccumulator):
        points = [tf.identity(a), tf.identity(b)]
        with kind(
            [points[k] for k in which], [along[k] for k in which]
        ) as accumulator:
          value = function(*points)
        found.append(accumulator.jvp(value))
    return found

  found = both()
  for mine, theirs in zip(found[::2], found[1::2], strict=True):
    assert np.any(mine != 0)
    np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)
