"""Sums over clients whose values are stacked.

A leaf of a value is a tensor with one row per client, or a `Broadcast`.
"""

import tensorflow as tf

from fednest_tff import structures
from fednest_tff.runtime.compiler.broadcast import Broadcast
from fednest_tff.structures import Value


def sum_rows(value: Value, size: tf.Tensor) -> Value:
  """Adds the values of `size` clients that are stacked."""

  def add(leaf: Value) -> tf.Tensor:
    if isinstance(leaf, Broadcast):
      return leaf.value * tf.cast(size, leaf.value.dtype)
    return tf.reduce_sum(leaf, axis=0)

  return structures.map_leaves(add, value)


def weighted_sum(leaf: Value, weights: tf.Tensor) -> tf.Tensor:
  """Adds rows times weights; a `Broadcast` stands for equal rows."""
  if isinstance(leaf, Broadcast):
    weights = tf.cast(weights, leaf.value.dtype)
    return leaf.value * tf.reduce_sum(weights)
  weights = tf.cast(weights, leaf.dtype)
  shape = tf.shape(leaf)
  # As a matrix product all is read only once.
  matrix = tf.reshape(leaf, [shape[0], tf.reduce_prod(shape[1:])])
  if leaf.dtype in (tf.float32, tf.float64):
    total = tf.linalg.matvec(matrix, weights, transpose_a=True)
  else:
    total = tf.reduce_sum(matrix * weights[:, tf.newaxis], axis=0)
  return tf.ensure_shape(tf.reshape(total, shape[1:]), leaf.shape[1:])
