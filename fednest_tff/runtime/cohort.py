"""Values at the clients of a cohort, inside one TensorFlow function.

`Unrolled` writes every client's computation into the graph: the fastest, and
TensorFlow runs clients side by side. `Mapped` writes it once into a loop, so
that the graph does not grow with the cohort. Both hold a value that all clients
share (`Everywhere`) once.

Aggregations add up in the order of the clients, as TFF's own runtime does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import graphs, values

Function = Callable[[Any], Any]


class Everywhere(NamedTuple):
  """A value that all clients share."""

  value: Any


def _zipped(value: Any, pick: Function) -> Any:
  """One client's view of nested structs of client values."""
  if isinstance(value, tff.structure.Struct):
    return tff.structure.Struct(
        (name, _zipped(element, pick))
        for name, element in tff.structure.iter_elements(value)
    )
  return pick(value)


class Unrolled:
  """A cohort whose clients are all written out; values are lists."""

  def __init__(self, size: int, devices: list[str]):
    self.size = size
    self._devices = devices

  def _client(self, i: int):
    return tf.device(self._devices[i % len(self._devices)])

  def specs(self, member: tff.Type) -> list[tf.TensorSpec]:
    """Signature of an argument at the clients: leaves, client by client."""
    return values.leaf_specs(member) * self.size

  def feed(self, arguments: list, member: tff.Type) -> list[tf.Tensor]:
    """The tensors of an argument, to go with `specs`."""
    return [leaf for a in arguments for leaf in values.leaves(a, member)]

  def take(self, leaves: list, member: tff.Type) -> list:
    """The value at the clients from the leaves of `specs`; uses them up."""
    return [graphs.pack(member, leaves) for _ in range(self.size)]

  def give(self, value: Any, member: tff.Type) -> list[tf.Tensor]:
    """The leaves of a result at the clients, client by client."""
    return [
        leaf
        for i in range(self.size)
        for leaf in graphs.flatten(self._pick(value, i))
    ]

  def results(self, found: list, member: tff.Type) -> list:
    """The Python values of `give`; uses the leaves up."""
    return [values.to_python(found, member) for _ in range(self.size)]

  def _pick(self, value: Any, i: int) -> Any:
    return _zipped(
        value, lambda v: v.value if isinstance(v, Everywhere) else v[i]
    )

  def map(self, function: Function, value: Any, result_type: tff.Type) -> list:
    """`function` at every client."""
    del result_type
    found = []
    for i in range(self.size):
      with self._client(i):
        found.append(function(self._pick(value, i)))
    return found

  def reduce(
      self, value: Any, zero: Any, accumulate: Function, merge: Function
  ) -> Any:
    """`zero` with every client's value accumulated into it."""
    del merge
    total = zero
    for i in range(self.size):
      total = accumulate(
          tff.structure.Struct.unnamed(total, self._pick(value, i))
      )
    return total


class _Array(NamedTuple):
  """One tensor per client, of possibly different shapes, per part of a cohort.

  Attributes:
    parts: A `tf.TensorArray` per device.
    shape: What is known of the shape.
  """

  parts: list[tf.TensorArray]
  shape: tf.TensorShape

  def read(self, part: int, i: tf.Tensor) -> tf.Tensor:
    tensor = self.parts[part].read(i)
    return tf.ensure_shape(tensor, self.shape)


class Mapped:
  """A cohort in loops, one per device; values are structs of `_Array`s."""

  def __init__(self, size: int, devices: list[str]):
    self.size = size
    self._devices = devices[:max(1, min(len(devices), size))]
    count = len(self._devices)
    self._bounds = [size * k // count for k in range(count + 1)]

  def _parts(self):
    return range(len(self._devices))

  def _length(self, part: int) -> int:
    return self._bounds[part + 1] - self._bounds[part]

  def specs(self, member: tff.Type) -> list[tf.TensorSpec]:
    """Signature of an argument at the clients.

    A leaf of known shape comes stacked over the clients, any other once per
    client.
    """
    found = []
    for spec in values.leaf_specs(member):
      if spec.shape.is_fully_defined():
        found.append(tf.TensorSpec([self.size, *spec.shape], spec.dtype))
      else:
        found += [spec] * self.size
    return found

  def feed(self, arguments: list, member: tff.Type) -> list[tf.Tensor]:
    """The tensors of an argument, to go with `specs`."""
    rows = [values.leaves(a, member) for a in arguments]
    found = []
    for k, spec in enumerate(values.leaf_specs(member)):
      column = [row[k] for row in rows]
      if spec.shape.is_fully_defined():
        found.append(tf.stack(column))
      else:
        found += column
    return found

  def take(self, leaves: list, member: tff.Type) -> Any:
    """The value at the clients from the leaves of `specs`; uses them up."""
    arrays = []
    for spec in values.leaf_specs(member):
      if spec.shape.is_fully_defined():
        column = leaves.pop(0)
      else:
        column = [leaves.pop(0) for _ in range(self.size)]
      arrays.append(self._to_array(column, spec))
    return graphs.pack(member, arrays)

  def _to_array(self, column: Any, spec: tf.TensorSpec) -> _Array:
    parts = []
    for part in self._parts():
      array = self._new_array(spec, self._length(part))
      rows = column[self._bounds[part] : self._bounds[part + 1]]
      if isinstance(column, list):
        for i, row in enumerate(rows):
          array = array.write(i, row)
      else:
        array = array.unstack(rows)
      parts.append(array)
    return _Array(parts, spec.shape)

  def _new_array(self, spec: tf.TensorSpec, size: int) -> tf.TensorArray:
    return tf.TensorArray(
        spec.dtype,
        size=size,
        element_shape=spec.shape,
        infer_shape=False,
        clear_after_read=False,
    )

  def give(self, value: Any, member: tff.Type) -> list[tf.Tensor]:
    """The leaves of a result at the clients, client by client."""
    return [
        leaf
        for part in self._parts()
        for i in range(self._length(part))
        for leaf in graphs.flatten(self._pick(value, part, tf.constant(i)))
    ]

  def results(self, found: list, member: tff.Type) -> list:
    """The Python values of `give`; uses the leaves up."""
    return [values.to_python(found, member) for _ in range(self.size)]

  def _pick(self, value: Any, part: int, i: tf.Tensor) -> Any:
    return _zipped(
        value,
        lambda v: v.value if isinstance(v, Everywhere) else v.read(part, i),
    )

  def map(self, function: Function, value: Any, result_type: tff.Type) -> Any:
    """`function` at every client."""
    specs = values.leaf_specs(result_type)
    columns = [[] for _ in specs]
    for part in self._parts():
      length = self._length(part)
      with tf.device(self._devices[part]):

        def step(i, arrays, part=part):
          leaves = graphs.flatten(function(self._pick(value, part, i)))
          return i + 1, [
              array.write(i, leaf)
              for array, leaf in zip(arrays, leaves, strict=True)
          ]

        _, arrays = tf.while_loop(
            lambda i, _, length=length: i < length,
            step,
            (tf.constant(0), [self._new_array(s, length) for s in specs]),
        )
      for column, array in zip(columns, arrays, strict=True):
        column.append(array)
    return graphs.pack(
        result_type,
        [
            _Array(column, spec.shape)
            for column, spec in zip(columns, specs, strict=True)
        ],
    )

  def reduce(
      self, value: Any, zero: Any, accumulate: Function, merge: Function
  ) -> Any:
    """`zero` with every client's value accumulated into it."""
    totals = []
    for part in self._parts():
      with tf.device(self._devices[part]):

        def step(i, total, part=part):
          pair = tff.structure.Struct.unnamed(
              _repack(zero, total), self._pick(value, part, i)
          )
          return i + 1, graphs.flatten(accumulate(pair))

        _, total = tf.while_loop(
            lambda i, _, part=part: i < self._length(part),
            step,
            (tf.constant(0), graphs.flatten(zero)),
        )
      totals.append(_repack(zero, total))
    result = totals[0]
    for total in totals[1:]:
      result = merge(tff.structure.Struct.unnamed(result, total))
    return result


def _repack(like: Any, leaves: list) -> Any:
  """A value of the structure of `like` from flat leaves."""
  remaining = list(leaves)

  def build(value):
    if isinstance(value, tff.structure.Struct):
      return tff.structure.Struct(
          (name, build(element))
          for name, element in tff.structure.iter_elements(value)
      )
    return remaining.pop(0)

  return build(like)


def is_shared(value: Any) -> bool:
  """Whether a value at the clients is the same everywhere."""
  if isinstance(value, tff.structure.Struct):
    return all(is_shared(element) for element in value)
  return isinstance(value, Everywhere)


def shared(value: Any) -> Any:
  """The value that all clients share."""
  return _zipped(value, lambda v: v.value)
