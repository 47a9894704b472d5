"""First derivatives, and products with second derivatives.

Second derivatives are only ever needed in products with a vector. Both kinds
are taken forward-over-back: a `tf.autodiff.ForwardAccumulator` along the vector
around the `tf.GradientTape` that takes the gradient. Neither a Hessian nor a
Jacobian is formed; a product costs a small multiple of a gradient.
"""

from collections.abc import Callable

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.vector_space import Structure


def _gradient(
    function: Callable[[Structure], tf.Tensor], at: Structure
) -> tuple[tf.Tensor, Structure]:
  with tf.GradientTape(watch_accessed_variables=False) as tape:
    tape.watch(tf.nest.flatten(at))
    value = tf.convert_to_tensor(function(at))
  gradient = tape.gradient(
      value, at, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )
  # A gather has a sparse gradient; it is dense everywhere else.
  return value, vector_space.tensors(gradient)


def _fresh(a: Structure) -> Structure:
  # A copy of its own identity: a tape must not watch a tensor that the function
  # holds by other means, such as the anchor of an SVRG direction.
  return tf.nest.map_structure(tf.identity, a)


def value_and_gradient(
    function: Callable[[Structure], tf.Tensor], at: Structure
) -> tuple[tf.Tensor, Structure]:
  """The scalar `function(at)` and its gradient, zero where unconnected."""
  return _gradient(function, _fresh(at))


def gradient(
    function: Callable[[Structure], tf.Tensor], at: Structure
) -> Structure:
  """The gradient of the scalar `function` at `at`."""
  return value_and_gradient(function, at)[1]


def hessian_vector_product(
    function: Callable[[Structure], tf.Tensor],
    at: Structure,
    vector: Structure,
) -> Structure:
  """The Hessian of the scalar `function` at `at`, times `vector`."""
  at = _fresh(at)
  with tf.autodiff.ForwardAccumulator(
      tf.nest.flatten(at), tf.nest.flatten(vector)
  ) as accumulator:
    _, gradient_at = _gradient(function, at)
  return _tangent(accumulator, gradient_at)


def mixed_product(
    function: Callable[[Structure, Structure], tf.Tensor],
    x: Structure,
    y: Structure,
    vector: Structure,
) -> Structure:
  """d/dx <d/dy function(x, y), vector>, of x's shape.

  This is the paper's grad^2_xy g(x, y) p: the change of the gradient in x when
  y moves along `vector`.
  """
  x, y = _fresh(x), _fresh(y)
  with tf.autodiff.ForwardAccumulator(
      tf.nest.flatten(y), tf.nest.flatten(vector)
  ) as accumulator:
    _, gradient_x = _gradient(lambda at: function(at, y), x)
  return _tangent(accumulator, gradient_x)


def _tangent(accumulator, a: Structure) -> Structure:
  tangent = tf.nest.map_structure(
      lambda t: accumulator.jvp(
          t, unconnected_gradients=tf.UnconnectedGradients.ZERO
      ),
      a,
  )
  return vector_space.tensors(tangent)
