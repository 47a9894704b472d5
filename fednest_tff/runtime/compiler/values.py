"""Converts unplaced Python values to flat lists of tensors and back.

A TFF type says how. A tensor is one tensor, a sequence is the variant tensor of
a dataset, and a struct is the tensors of its elements in order.
"""

import collections
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.structures import Value


def tensor_spec(value_type: tff.TensorType) -> tf.TensorSpec:
  """Converts a tensor type to a `tf.TensorSpec`."""
  dtype = tf.string if value_type.dtype is np.str_ else value_type.dtype
  return tf.TensorSpec(value_type.shape, dtype)


def _leaf_spec(leaf_type: tff.Type) -> tf.TensorSpec:
  if isinstance(leaf_type, tff.TensorType):
    return tensor_spec(leaf_type)
  if isinstance(leaf_type, tff.SequenceType):
    return tf.TensorSpec([], tf.variant)
  raise NotImplementedError(f'Cannot take a value of type {leaf_type}.')


def leaf_specs(value_type: tff.Type) -> list[tf.TensorSpec]:
  """Lists the specs of the tensors that `to_tensors` returns."""
  return [_leaf_spec(leaf) for leaf in structures.leaves(value_type)]


def _to_container(elements: list[tuple[str | None, Value]]) -> Value:
  """Makes the container that tf.data has for a struct's elements."""
  if elements and all(name is not None for name, _ in elements):
    return collections.OrderedDict(elements)
  return tuple(element for _, element in elements)


def element_spec(element_type: tff.Type) -> Value:
  """Converts the type of a sequence's elements to what tf.data calls a spec."""
  return structures.fold(element_type, tensor_spec, _to_container)


def to_dataset(
    variant: tf.Tensor, sequence_type: tff.SequenceType
) -> tf.data.Dataset:
  """Converts a variant tensor to the dataset that it stands for."""
  return tf.data.experimental.from_variant(
      variant, element_spec(sequence_type.element)
  )


def from_dataset_element(element: Value, element_type: tff.Type) -> Value:
  """Converts an element of a dataset to a TFF value.

  Args:
    element: A tensor, or tensors in the containers of `element_spec`.
    element_type: Its type.

  Returns:
    A tensor, or a `tff.structure.Struct` of tensors.
  """
  pairs = structures.typed_leaves(element, element_type)
  return structures.pack(element_type, [tensor for tensor, _ in pairs])


def _to_tensor(value: Value, value_type: tff.TensorType) -> tf.Tensor:
  spec = tensor_spec(value_type)
  tensor = tf.convert_to_tensor(value, spec.dtype)
  if not spec.shape.is_compatible_with(tensor.shape):
    raise TypeError(
        f'Expected a tensor of type {value_type}; got shape'
        f' {list(tensor.shape)}.'
    )
  return tensor


def _column_to_dataset(
    column: list[tf.Tensor], spec: tf.TensorSpec
) -> tf.data.Dataset:
  """Makes a dataset of tensors, which may differ in shape."""
  if not column:
    # No element has a shape, so any will do for the sizes that are open.
    shape = [0 if size is None else size for size in spec.shape]
    empty = tf.zeros([0, *shape], spec.dtype)
    return tf.data.Dataset.from_tensor_slices(empty)
  if all(tensor.shape == column[0].shape for tensor in column):
    return tf.data.Dataset.from_tensor_slices(tf.stack(column))
  flat = tf.ragged.stack([tf.reshape(tensor, [-1]) for tensor in column])
  shapes = tf.ragged.stack([tf.shape(tensor) for tensor in column])
  return tf.data.Dataset.from_tensor_slices((flat, shapes)).map(
      lambda values, shape: tf.ensure_shape(
          tf.reshape(values, shape), spec.shape
      )
  )


def _list_to_dataset(
    values: list[Value], element_type: tff.Type
) -> tf.data.Dataset:
  """Makes a dataset of a list of elements, which may be empty."""
  rows = [to_tensors(value, element_type) for value in values]
  columns = iter([
      _column_to_dataset([row[k] for row in rows], spec)
      for k, spec in enumerate(leaf_specs(element_type))
  ])
  return tf.data.Dataset.zip(
      structures.fold(element_type, lambda _: next(columns), _to_container)
  )


def check_dataset(value: Value, value_type: tff.SequenceType) -> None:
  """Refuses what is no dataset or list of the type, and what has no end.

  Args:
    value: What was given for a sequence.
    value_type: The type of the sequence.

  Raises:
    TypeError: If it is neither a dataset nor a list, or of other elements.
    ValueError: If it has no end, as after `repeat()`.
  """
  if not isinstance(value, tf.data.Dataset):
    if not isinstance(value, (list, tuple)):
      raise TypeError(
          f'Expected a dataset of {value_type.element}; got'
          f' {type(value).__name__}. `tf.data.Dataset.from_tensor_slices` makes'
          ' one from arrays.'
      )
    return
  if value.cardinality() == tf.data.INFINITE_CARDINALITY:
    raise ValueError(
        'The dataset has no end: limit it, as by `take`, or leave out'
        ' `repeat`.'
    )
  expected = tf.nest.flatten(element_spec(value_type.element))
  found = tf.nest.flatten(value.element_spec)
  if len(expected) != len(found) or not all(
      a.is_compatible_with(b) for a, b in zip(expected, found, strict=True)
  ):
    is_batched = len(expected) == len(found) and all(
        b.shape.rank and a.shape.is_compatible_with(b.shape[1:])
        for a, b in zip(expected, found, strict=True)
    )
    raise TypeError(
        f'Expected a dataset of {value_type.element}; got elements of'
        f' {value.element_spec}.'
        f'{" Leave out `batch`, or add `unbatch()`." if is_batched else ""}'
    )


def _to_variant(value: Value, value_type: tff.SequenceType) -> tf.Tensor:
  """Converts a dataset, or a list of elements, to a variant tensor."""
  check_dataset(value, value_type)
  if not isinstance(value, tf.data.Dataset):
    value = _list_to_dataset(value, value_type.element)
    check_dataset(value, value_type)
  return tf.data.experimental.to_variant(value)


def _leaf_to_tensor(value: Value, leaf_type: tff.Type) -> tf.Tensor:
  if isinstance(leaf_type, tff.TensorType):
    return _to_tensor(value, leaf_type)
  if isinstance(leaf_type, tff.SequenceType):
    return _to_variant(value, leaf_type)
  raise NotImplementedError(f'Cannot take a value of type {leaf_type}.')


def to_tensors(value: Value, value_type: tff.Type) -> list[tf.Tensor]:
  """Converts a Python value to tensors.

  Args:
    value: A number, array, dataset or list of a dataset's elements, or
      containers of them.
    value_type: The type of `value`, without a placement.

  Returns:
    A tensor per leaf of `value_type`.

  Raises:
    TypeError: If `value` does not have that type.
  """
  return [
      _leaf_to_tensor(leaf, leaf_type)
      for leaf, leaf_type in structures.typed_leaves(value, value_type)
  ]


def to_python(tensors: Iterator[tf.Tensor], value_type: tff.Type) -> Value:
  """Converts tensors to a Python value.

  Args:
    tensors: The tensors of the value come next; only they are taken.
    value_type: The type of the value, without a placement.

  Returns:
    A NumPy value or a dataset, or a `tff.structure.Struct` of them.
  """

  def convert(leaf_type: tff.Type) -> Value:
    tensor = next(tensors)
    if isinstance(leaf_type, tff.SequenceType):
      return to_dataset(tensor, leaf_type)
    return tensor.numpy()

  return structures.fold(value_type, convert, tff.structure.Struct)


def fill(
    value_type: tff.Type, make: Callable[[tf.TensorSpec], tf.Tensor]
) -> Value:
  """Makes a TFF value with `make` of each leaf's spec."""
  return structures.pack(value_type, map(make, leaf_specs(value_type)))


def zeros(value_type: tff.Type) -> Value:
  """Makes a TFF value of zeros."""
  return fill(value_type, lambda spec: tf.zeros(spec.shape, spec.dtype))


def add(pair: tff.structure.Struct) -> Value:
  """Adds two TFF values."""
  return structures.map_leaves(tf.add, pair[0], pair[1])


def to_container(value: Value, value_type: tff.Type) -> Value:
  """Converts a TFF value to the Python containers that its type names."""
  return tff.types.type_to_py_container(value, value_type)
