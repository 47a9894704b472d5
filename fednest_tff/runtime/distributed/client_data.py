"""Clients' data as plain arrays, which travel to a node once.

A dataset is read into arrays, and identified by a hash of them. Whoever sees a
hash for the first time asks for the arrays; afterwards the hash is enough.
"""

import collections
from collections.abc import Callable, Hashable
import hashlib
import pickle
from typing import Any, Generic, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import values
from fednest_tff.structures import Value

Array: TypeAlias = np.ndarray[Any, Any]
# The name of a client whose data are on the nodes.
ClientId: TypeAlias = str | int | bytes

_CHUNK = 4096
_Kept = TypeVar('_Kept')


def is_client_id(value: Value) -> TypeGuard[ClientId]:
  """Tells whether a value is the name of a client."""
  return isinstance(value, (str, int, bytes))


def digest(*parts: Any) -> bytes:
  """Hashes bytes and arrays of bytes."""
  found = hashlib.blake2b(digest_size=16)
  for part in parts:
    found.update(part)
  return found.digest()


class Elements(NamedTuple):
  """The elements of a sequence.

  Attributes:
    groups: Elements that follow each other and have the same shapes, stacked:
      for each group an array per component of an element.
  """

  groups: list[list[Array]]

  @property
  def num_bytes(self) -> int:
    """The size of all arrays."""
    return sum(array.nbytes for group in self.groups for array in group)

  def digest(self) -> bytes:
    """A hash of the content."""
    parts: list[object] = []
    for group in self.groups:
      for array in group:
        parts.append(repr((array.dtype.str, array.shape)).encode())
        if array.dtype.hasobject:  # Strings.
          parts.append(pickle.dumps(array.tolist()))
        else:
          parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
      parts.append(b'group')
    return digest(*parts)


class Stored(NamedTuple):
  """A sequence that is in the object store.

  Attributes:
    digest: The hash of its content.
    reference: Ray's reference to its `Elements`, in a list, so that Ray does
      not fetch them for whoever has them already.
  """

  digest: bytes
  reference: list[Any]


class Named(NamedTuple):
  """A client whose data the nodes open.

  Attributes:
    client_id: Its name.
  """

  client_id: ClientId


def _leaves(element: Value) -> list[Array]:
  return [np.asarray(leaf) for leaf in tf.nest.flatten(element)]


def _read_by_chunks(dataset: tf.data.Dataset) -> list[list[Array]]:
  """Reads elements whose shapes are known."""
  chunks = [
      _leaves(chunk)
      for chunk in dataset.batch(_CHUNK).as_numpy_iterator()
  ]
  if not chunks:
    return []
  return [[np.concatenate(arrays) for arrays in zip(*chunks, strict=True)]]


def _read_one_by_one(dataset: tf.data.Dataset) -> list[list[Array]]:
  """Reads elements whose shapes may differ, such as batches."""
  runs: list[list[list[Array]]] = []
  for element in dataset.as_numpy_iterator():
    leaves = _leaves(element)
    shapes = [leaf.shape for leaf in leaves]
    if not runs or [leaf.shape for leaf in runs[-1][0]] != shapes:
      runs.append([])
    runs[-1].append(leaves)
  return [
      [np.stack(arrays) for arrays in zip(*run, strict=True)] for run in runs
  ]


def read(value: Value, sequence_type: tff.SequenceType) -> Elements:
  """Reads a sequence.

  Args:
    value: A dataset, or a list of elements.
    sequence_type: Its type.

  Returns:
    Its elements.

  Raises:
    TypeError: If it has another type.
    ValueError: If it does not end.
  """
  # The conversion that the runtime does; it also checks the type.
  spec = values.element_spec(sequence_type.element)
  (variant,) = values.to_tensors(value, sequence_type)
  dataset = tf.data.experimental.from_variant(variant, spec)
  if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
    raise ValueError(
        "The runtime 'ray' cannot send a dataset that does not end; use"
        ' `take`.'
    )
  are_known = all(
      leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(spec)
  )
  return Elements(
      _read_by_chunks(dataset) if are_known else _read_one_by_one(dataset)
  )


def to_dataset(
    elements: Elements, sequence_type: tff.SequenceType
) -> tf.data.Dataset:
  """Makes a dataset of elements, in their order."""
  spec = values.element_spec(sequence_type.element)
  if not elements.groups:
    empty = [
        tf.zeros([0, *[size or 0 for size in leaf.shape]], leaf.dtype)
        for leaf in tf.nest.flatten(spec)
    ]
    elements = Elements([empty])
  whole: tf.data.Dataset | None = None
  for group in elements.groups:
    tensors = [
        tf.convert_to_tensor(array, leaf.dtype)
        for array, leaf in zip(group, tf.nest.flatten(spec), strict=True)
    ]
    part = tf.data.Dataset.from_tensor_slices(
        tf.nest.pack_sequence_as(spec, tensors)
    )
    whole = part if whole is None else whole.concatenate(part)
  return whole


class Shelf(Generic[_Kept]):
  """Keeps what was used last, up to a number of bytes."""

  def __init__(self, max_bytes: int):
    self._max_bytes = max_bytes
    self._num_bytes = 0
    self._kept: collections.OrderedDict[Hashable, tuple[_Kept, int]] = (
        collections.OrderedDict()
    )

  def get(
      self, key: Hashable, make: Callable[[], tuple[_Kept, int]]
  ) -> _Kept:
    """Returns what is kept under a key; makes it, with its size, if need be."""
    if key not in self._kept:
      made = make()
      self._kept[key] = made
      self._num_bytes += made[1]
      while self._num_bytes > self._max_bytes and len(self._kept) > 1:
        _, (_, num_bytes) = self._kept.popitem(last=False)
        self._num_bytes -= num_bytes
    self._kept.move_to_end(key)
    return self._kept[key][0]

  def clear(self) -> None:
    """Forgets everything."""
    self._kept.clear()
    self._num_bytes = 0
