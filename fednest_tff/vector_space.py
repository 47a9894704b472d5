"""Vector-space operations on nested structures of tensors.

The outer variable x, the inner variable y and everything that lives in the same
spaces (gradients, Neumann iterates, updates) are nested structures as
`tf.nest` understands them: dicts, tuples, lists, named tuples or one tensor.
The leaves may differ in shape and in float type.
"""

from typing import Any, TypeAlias

import tensorflow as tf

# A nested structure of tensors; `tf.nest` decides what is a leaf. Python cannot
# write its type, and TensorFlow declares none for tensors.
Structure: TypeAlias = Any


def identity(a: Structure) -> Structure:
  """`a`: the projection on the whole space."""
  return a


def specs(a: Structure) -> Structure:
  """The structure of `tf.TensorSpec`s that describes `a`."""

  def spec(leaf: Any) -> tf.TensorSpec:
    tensor = leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
    return tf.TensorSpec(tensor.shape, tensor.dtype)

  return tf.nest.map_structure(spec, a)


def _tensor(leaf: Any) -> tf.Tensor:
  found = tf.convert_to_tensor(leaf)
  if found is None:  # For a class of tensors, which is no tensor itself.
    raise TypeError(f'{leaf!r} is no tensor')
  return found


def tensors(a: Structure) -> Structure:
  """`a` with every leaf (a NumPy array, a Python number) made a tensor."""
  return tf.nest.map_structure(_tensor, a)


def constants(a: Structure) -> Structure:
  """`a` as tensors of the current graph, even if its leaves are eager ones."""
  return tf.nest.map_structure(
      lambda leaf: tf.convert_to_tensor(
          leaf.numpy() if hasattr(leaf, 'numpy') else leaf
      ),
      a,
  )


def scalar_dtype(a: Structure) -> tf.DType:
  """The float type of scalars that go with `a`: that of its widest leaf.

  Never narrower than float32, so that step sizes and norms of half-precision
  variables keep their digits.
  """
  widths = [leaf.dtype for leaf in tf.nest.flatten(a)]
  return tf.float64 if tf.float64 in widths else tf.float32


def zeros_like(a: Structure) -> Structure:
  """The zero of the space that `a`, tensors or specs, lives in."""
  return tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), a)


def add(a: Structure, b: Structure) -> Structure:
  """a + b."""
  return tf.nest.map_structure(tf.add, a, b)


def subtract(a: Structure, b: Structure) -> Structure:
  """a - b."""
  return tf.nest.map_structure(tf.subtract, a, b)


def scalar(value: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
  """A number or a scalar tensor as a scalar of type `dtype`."""
  # tf.cast takes a Python float through float32.
  if tf.is_tensor(value):
    return tf.cast(value, dtype)
  return tf.constant(value, dtype)


def scale(factor: tf.Tensor | float, a: Structure) -> Structure:
  """factor * a, the scalar cast to each leaf's type."""
  return tf.nest.map_structure(lambda t: scalar(factor, t.dtype) * t, a)


def add_scaled(
    a: Structure, factor: tf.Tensor | float, b: Structure
) -> Structure:
  """a + factor * b."""
  return tf.nest.map_structure(
      lambda s, t: s + scalar(factor, t.dtype) * t, a, b
  )


def dot(a: Structure, b: Structure) -> tf.Tensor:
  """The Euclidean inner product, in `scalar_dtype(a)`; 0 if `a` is empty."""
  dtype = scalar_dtype(a)
  products = tf.nest.map_structure(
      lambda s, t: tf.reduce_sum(tf.cast(s, dtype) * tf.cast(t, dtype)), a, b
  )
  return tf.add_n([tf.zeros([], dtype), *tf.nest.flatten(products)])


def squared_norm(a: Structure) -> tf.Tensor:
  """<a, a>."""
  return dot(a, a)


def norm(a: Structure) -> tf.Tensor:
  """The Euclidean norm over all leaves."""
  return tf.sqrt(squared_norm(a))


def where(condition: tf.Tensor, a: Structure, b: Structure) -> Structure:
  """`a` where the scalar `condition` holds, else `b`."""
  return tf.nest.map_structure(lambda s, t: tf.where(condition, s, t), a, b)


def check_finite(a: Structure, message: str) -> Structure:
  """`a` itself; running it fails with `message` unless it is all finite."""
  return tf.nest.map_structure(
      lambda t: tf.debugging.check_numerics(t, message), a
  )
