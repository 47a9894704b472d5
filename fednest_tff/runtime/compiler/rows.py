"""Tensors of several clients: stacked, in an array, or postponed."""

from typing import NamedTuple, TypeAlias

import tensorflow as tf

from fednest_tff.runtime.compiler import chunks

# The tensors of one part's clients, one for each client: stacked, or, if their
# shapes differ, in an array, or not yet computed.
Rows: TypeAlias = tf.Tensor | tf.TensorArray | chunks.Postponed


class Leaf(NamedTuple):
  """One tensor per client.

  Attributes:
    parts: The rows of each part.
    shape: The shape of all the tensors, with `None` where they differ.
  """

  parts: list[Rows]
  shape: tf.TensorShape

  def row(self, part: int, i: tf.Tensor) -> tf.Tensor:
    rows = self.parts[part]
    if isinstance(rows, tf.TensorArray):
      return tf.ensure_shape(rows.read(i), self.shape)
    if isinstance(rows, chunks.Postponed):
      return rows.row(i)
    return rows[i]

  def rows(self, part: int, begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    rows = self.parts[part]
    if isinstance(rows, chunks.Postponed):
      return rows.rows(begin, end)
    return rows[begin:end]


def new_array(spec: tf.TensorSpec, size: tf.Tensor) -> tf.TensorArray:
  """Creates an array of tensors, which may differ where `spec` is open."""
  return tf.TensorArray(
      spec.dtype,
      size=size,
      element_shape=spec.shape,
      infer_shape=False,
      clear_after_read=False,
  )


def flatten(rows: tf.TensorArray, size: tf.Tensor) -> list[tf.Tensor]:
  """Makes one vector of tensors of different shapes, and lists the shapes."""
  # Not empty, so there is a row that tells the rank.
  rank = tf.rank(rows.read(0))
  vectors = tf.TensorArray(
      rows.dtype, size=size, element_shape=[None], infer_shape=False
  )
  shapes = tf.TensorArray(tf.int32, size=size, infer_shape=False)

  def step(
      i: tf.Tensor, vectors: tf.TensorArray, shapes: tf.TensorArray
  ) -> tuple[tf.Tensor, tf.TensorArray, tf.TensorArray]:
    row = rows.read(i)
    return (
        i + 1,
        vectors.write(i, tf.reshape(row, [-1])),
        shapes.write(i, tf.shape(row)),
    )

  _, vectors, shapes = tf.while_loop(
      lambda i, *_: i < size, step, (tf.constant(0), vectors, shapes)
  )
  return [vectors.concat(), tf.reshape(shapes.concat(), [size, rank])]


def unflatten(
    vector: tf.Tensor, shapes: tf.Tensor, spec: tf.TensorSpec
) -> tf.TensorArray:
  """The inverse of `flatten`: makes the tensors of its vector."""
  size = tf.shape(shapes)[0]
  ends = tf.cumsum(tf.reduce_prod(shapes, axis=1))

  def step(
      i: tf.Tensor, begin: tf.Tensor, rows: tf.TensorArray
  ) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray]:
    row = tf.reshape(vector[begin : ends[i]], shapes[i])
    return i + 1, ends[i], rows.write(i, row)

  _, _, rows = tf.while_loop(
      lambda i, *_: i < size,
      step,
      (tf.constant(0), tf.constant(0), new_array(spec, size)),
  )
  return rows


def repeat(tensor: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
  """Stacks `size` copies of a tensor."""
  shape = tf.concat([[size], tf.shape(tensor)], axis=0)
  repeated = tf.broadcast_to(tensor, shape)
  return tf.ensure_shape(repeated, [None, *tensor.shape])
