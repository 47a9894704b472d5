"""Python values to flat tensors and back, by their TFF types."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


def tensor_spec(value_type: tff.TensorType) -> tf.TensorSpec:
  """The `tf.TensorSpec` of a tensor type."""
  dtype = tf.string if value_type.dtype is np.str_ else value_type.dtype
  return tf.TensorSpec(value_type.shape, dtype)


def element_spec(value_type: tff.Type) -> Any:
  """The structure of `tf.TensorSpec`s of a sequence's element."""
  if isinstance(value_type, tff.StructType):
    elements = [
        (name, element_spec(t))
        for name, t in tff.structure.iter_elements(value_type)
    ]
    if elements and all(name is not None for name, _ in elements):
      return collections.OrderedDict(elements)
    return tuple(element for _, element in elements)
  return tensor_spec(value_type)


def to_dataset(
    variant: tf.Tensor, sequence_type: tff.SequenceType
) -> tf.data.Dataset:
  """The dataset behind a variant tensor."""
  return tf.data.experimental.from_variant(
      variant, element_spec(sequence_type.element)
  )


def fields(value: Any, value_type: tff.StructType) -> list:
  """The elements of a Python container, in the order of its type."""
  elements = list(tff.structure.iter_elements(value_type))
  names = [name for name, _ in elements]
  if isinstance(value, tff.structure.Struct):
    found = list(value)
  elif attrs.has(type(value)):
    found = [getattr(value, name) for name in names]
  elif isinstance(value, Mapping):
    if set(value) != set(names):
      raise TypeError(f'Expected the keys {names}; got {list(value)}.')
    found = [value[name] for name in names]
  elif isinstance(value, (Sequence, np.ndarray)):
    found = list(value)
  else:
    raise TypeError(f'Expected a value of type {value_type}; got {value!r}.')
  if len(found) != len(elements):
    raise TypeError(
        f'Expected {len(elements)} elements for {value_type}; got'
        f' {len(found)}.'
    )
  return found


def _tensor(value: Any, value_type: tff.TensorType) -> tf.Tensor:
  spec = tensor_spec(value_type)
  tensor = tf.convert_to_tensor(value, spec.dtype)
  if not spec.shape.is_compatible_with(tensor.shape):
    raise TypeError(
        f'Expected a tensor of type {value_type}; got shape'
        f' {list(tensor.shape)}.'
    )
  return tensor


def _variant(value: Any, value_type: tff.SequenceType) -> tf.Tensor:
  """The variant tensor of a dataset, or of a list of elements."""
  spec = element_spec(value_type.element)
  if not isinstance(value, tf.data.Dataset):
    rows = [leaves(element, value_type.element) for element in value]
    columns = iter([
        tf.stack([row[k] for row in rows])
        if rows
        else tf.zeros([0, *leaf.shape], leaf.dtype)
        for k, leaf in enumerate(leaf_specs(value_type.element))
    ])
    # In the order of TFF, which is not that of tf.nest.
    value = tf.data.Dataset.from_tensor_slices(
        _map_leaves(lambda _: next(columns), spec)
    )
  expected = tf.nest.flatten(spec)
  found = tf.nest.flatten(value.element_spec)
  if len(expected) != len(found) or not all(
      a.is_compatible_with(b) for a, b in zip(expected, found, strict=True)
  ):
    raise TypeError(
        f'Expected a dataset of {value_type.element}; got elements of'
        f' {value.element_spec}.'
    )
  return tf.data.experimental.to_variant(value)


def ordered_leaves(structure: Any) -> list:
  """Leaves in the order of the containers, as TFF counts them."""
  if isinstance(structure, Mapping):
    return [leaf for v in structure.values() for leaf in ordered_leaves(v)]
  if attrs.has(type(structure)):
    parts = [getattr(structure, f.name) for f in attrs.fields(type(structure))]
    return [leaf for v in parts for leaf in ordered_leaves(v)]
  if isinstance(structure, (tuple, list)):
    return [leaf for v in structure for leaf in ordered_leaves(v)]
  return [structure]


def _map_leaves(function, structure: Any) -> Any:
  """`structure` with each leaf replaced, visited in the order of TFF."""
  if isinstance(structure, Mapping):
    return type(structure)(
        (k, _map_leaves(function, v)) for k, v in structure.items()
    )
  if isinstance(structure, tuple) and hasattr(structure, '_fields'):
    return type(structure)(*(_map_leaves(function, v) for v in structure))
  if isinstance(structure, (tuple, list)):
    return type(structure)(_map_leaves(function, v) for v in structure)
  return function(structure)


def leaves(value: Any, value_type: tff.Type) -> list[tf.Tensor]:
  """The tensors of an unplaced Python value of `value_type`."""
  if isinstance(value_type, tff.TensorType):
    return [_tensor(value, value_type)]
  if isinstance(value_type, tff.SequenceType):
    return [_variant(value, value_type)]
  if isinstance(value_type, tff.StructType):
    types = [t for _, t in tff.structure.iter_elements(value_type)]
    return [
        leaf
        for element, t in zip(fields(value, value_type), types, strict=True)
        for leaf in leaves(element, t)
    ]
  raise NotImplementedError(f'Cannot take a value of type {value_type}.')


def leaf_specs(value_type: tff.Type) -> list[tf.TensorSpec]:
  """The specs of `leaves`."""
  if isinstance(value_type, tff.TensorType):
    return [tensor_spec(value_type)]
  if isinstance(value_type, tff.SequenceType):
    return [tf.TensorSpec([], tf.variant)]
  if isinstance(value_type, tff.StructType):
    return [
        spec
        for _, t in tff.structure.iter_elements(value_type)
        for spec in leaf_specs(t)
    ]
  raise NotImplementedError(f'Cannot take a value of type {value_type}.')


def to_python(found: list[tf.Tensor], value_type: tff.Type) -> Any:
  """The Python value of `value_type` from its leaves; uses them up."""
  if isinstance(value_type, tff.StructType):
    return tff.structure.Struct(
        (name, to_python(found, t))
        for name, t in tff.structure.iter_elements(value_type)
    )
  leaf = found.pop(0)
  if isinstance(value_type, tff.SequenceType):
    return to_dataset(leaf, value_type)
  return leaf.numpy()
