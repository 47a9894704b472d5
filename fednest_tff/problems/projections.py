"""Euclidean projections on feasible sets, for constrained problems.

A projection is a function of a variable, a nested structure of tensors. These
builders make the common ones; `minimax(..., project_inner=simplex())` keeps the
inner variable on the probability simplex.
"""

from collections.abc import Callable

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.vector_space import Structure

Projection = Callable[[Structure], Structure]


def _on_simplex(v: tf.Tensor, total: float) -> tf.Tensor:
  """argmin ||u - v|| over u >= 0 with sum u = total, along the last axis.

  u = max(v - theta, 0), where theta is such that the sum is right: with v in
  decreasing order, theta = (v_1 + ... + v_k - total) / k for the largest k
  whose v_k exceeds it.
  """
  total = tf.constant(total, v.dtype)
  # The projection of v + c is that of v: small numbers keep their digits.
  v -= tf.reduce_max(v, axis=-1, keepdims=True)
  ordered = tf.sort(v, axis=-1, direction='DESCENDING')
  excess = tf.cumsum(ordered, axis=-1) - total
  counts = tf.range(1, tf.shape(v)[-1] + 1)
  thresholds = excess / tf.cast(counts, v.dtype)
  num_positive = tf.reduce_sum(
      tf.cast(ordered > thresholds, tf.int32), axis=-1, keepdims=True
  )
  # At least 1, unless v is not finite; then the result is not, either.
  index = tf.maximum(num_positive, 1) - 1
  theta = tf.gather(thresholds, index, axis=-1, batch_dims=v.shape.rank - 1)
  return tf.maximum(v - theta, 0)


def simplex(total: float = 1.0) -> Projection:
  """The projection on entries >= 0 that sum to `total` along the last axis.

  Each tensor is projected by itself.
  """
  if not 0 < total < float('inf'):
    raise ValueError(f'`total` must be positive and finite; got {total}.')
  return lambda a: tf.nest.map_structure(lambda v: _on_simplex(v, total), a)


def box(low: float, high: float) -> Projection:
  """The projection of every entry on the interval from `low` to `high`."""
  if not low <= high:
    raise ValueError(f'`low` must not exceed `high`; got {low} and {high}.')
  return lambda a: tf.nest.map_structure(
      lambda v: tf.clip_by_value(
          v, tf.constant(low, v.dtype), tf.constant(high, v.dtype)
      ),
      a,
  )


def ball(radius: float) -> Projection:
  """The projection on the ball: norm over all tensors at most `radius`."""
  if not 0 < radius < float('inf'):
    raise ValueError(f'`radius` must be positive and finite; got {radius}.')

  return lambda a: to_ball(a, radius)


def to_ball(a: Structure, radius: tf.Tensor | float) -> Structure:
  """`a` projected on the ball of that radius, which may be infinite."""
  norm = vector_space.norm(a)
  radius = vector_space.scalar(radius, norm.dtype)
  return vector_space.scale(
      tf.where(norm > radius, radius / norm, tf.ones_like(norm)), a
  )


def non_negative() -> Projection:
  """The projection of every entry on the numbers that are at least 0."""
  return lambda a: tf.nest.map_structure(tf.nn.relu, a)
