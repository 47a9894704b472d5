"""Holds values at clients, and computes with them, inside one function.

A cohort is the clients of one call. There are two kinds:

- `Unrolled` writes every client's computation into the graph. It is the faster
  one, because TensorFlow can run clients at the same time.
- `Looped` writes the computation into the graph once, inside a loop over the
  clients, so the graph does not grow with their number.

Both hold a value that is the same at all clients, a `Broadcast`, only once.
Both aggregate in the order of the clients, as TFF's own runtime does.

Their methods use the following words. A *member* is the type of one client's
value. A value at the clients is *flat* when it is a list of tensors, which is
how it enters and leaves the function.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import values
from fednest_tff.structures import Value

# A function of one TFF value.
Function = Callable[[Value], Value]


class Broadcast(NamedTuple):
  """A value that is the same at all clients."""

  value: Value


def is_broadcast(value: Value) -> bool:
  """Tells whether all leaves of a value at the clients are `Broadcast`s."""
  return all(isinstance(v, Broadcast) for v in structures.leaves(value))


def broadcast_value(value: Value) -> Value:
  """Returns what each client has of a value for which `is_broadcast` holds."""
  return structures.map_leaves(lambda v: v.value, value)


def split_broadcasts(value: Value) -> Value:
  """Replaces each `Broadcast` of a struct by a struct of `Broadcast`s."""

  def split(leaf: Value) -> Value:
    if isinstance(leaf, Broadcast):
      return structures.map_leaves(Broadcast, leaf.value)
    return leaf

  return structures.map_leaves(split, value)


class Unrolled:
  """A cohort whose clients are written out one after the other.

  A value at the clients is a list with one TFF value per client, a `Broadcast`,
  or a struct of such lists and `Broadcast`s.

  Attributes:
    size: The number of clients.
  """

  def __init__(self, size: int, devices: list[str]):
    """Creates the cohort.

    Args:
      size: The number of clients.
      devices: Client i runs on device i, counted round and round.
    """
    self.size = size
    self._devices = devices

  def argument_specs(self, member: tff.Type) -> list[tf.TensorSpec]:
    """Lists the specs of a flat argument: all leaves, client by client."""
    return values.leaf_specs(member) * self.size

  def feed_tensors(
      self, arguments: list[Value], member: tff.Type
  ) -> list[tf.Tensor]:
    """Flattens an argument: Python values, one per client."""
    return [
        tensor
        for argument in arguments
        for tensor in values.to_tensors(argument, member)
    ]

  def unpack_argument(
      self, tensors: Iterator[tf.Tensor], member: tff.Type
  ) -> list[Value]:
    """Makes a value at the clients of the next `tensors`."""
    return [structures.pack(member, tensors) for _ in range(self.size)]

  def flatten_result(self, value: Value) -> list[tf.Tensor]:
    """Flattens a value at the clients: all leaves, client by client."""
    return [
        tensor
        for i in range(self.size)
        for tensor in structures.leaves(self._client_value(value, i))
    ]

  def to_python(
      self, tensors: Iterator[tf.Tensor], member: tff.Type
  ) -> list[Value]:
    """Makes Python values, one per client, of the next `tensors`."""
    return [values.to_python(tensors, member) for _ in range(self.size)]

  def _client_value(self, value: Value, i: int) -> Value:
    return structures.map_leaves(
        lambda v: v.value if isinstance(v, Broadcast) else v[i], value
    )

  def map(
      self, function: Function, value: Value, result_member: tff.Type
  ) -> list[Value]:
    """Applies `function` to each client's value."""
    del result_member  # Only the other kind of cohort needs it.
    results = []
    for i in range(self.size):
      with tf.device(self._devices[i % len(self._devices)]):
        results.append(function(self._client_value(value, i)))
    return results

  def reduce(
      self, value: Value, zero: Value, accumulate: Function, merge: Function
  ) -> Value:
    """Aggregates a value at the clients.

    Args:
      value: The value.
      zero: The aggregate of no clients.
      accumulate: Maps (aggregate, client's value) to an aggregate.
      merge: Maps two aggregates to one.

    Returns:
      The aggregate of all clients.
    """
    del merge  # There is only one aggregate.
    total = zero
    for i in range(self.size):
      total = accumulate(
          tff.structure.Struct.unnamed(total, self._client_value(value, i))
      )
    return total


class _Array(NamedTuple):
  """One tensor per client. The clients' tensors may differ in shape.

  Attributes:
    parts: A `tf.TensorArray` per device, of the clients on that device.
    shape: The shape of all the tensors, with `None` where they differ.
  """

  parts: list[tf.TensorArray]
  shape: tf.TensorShape

  def read(self, part: int, i: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(self.parts[part].read(i), self.shape)


def _new_array(spec: tf.TensorSpec, size: int) -> tf.TensorArray:
  return tf.TensorArray(
      spec.dtype,
      size=size,
      element_shape=spec.shape,
      infer_shape=False,
      clear_after_read=False,
  )


class Looped:
  """A cohort as one loop per device.

  Each device has one part of the clients, consecutive ones. A value at the
  clients is an `_Array`, a `Broadcast`, or a struct of them.

  Attributes:
    size: The number of clients.
  """

  def __init__(self, size: int, devices: list[str]):
    """Creates the cohort.

    Args:
      size: The number of clients.
      devices: The clients are divided evenly among them.
    """
    self.size = size
    self._devices = devices[:max(1, min(len(devices), size))]
    count = len(self._devices)
    self._bounds = [size * k // count for k in range(count + 1)]

  def _parts(self) -> range:
    return range(len(self._devices))

  def _length(self, part: int) -> int:
    return self._bounds[part + 1] - self._bounds[part]

  def argument_specs(self, member: tff.Type) -> list[tf.TensorSpec]:
    """Lists the specs of a flat argument, leaf by leaf.

    A leaf of fully known shape is one tensor, stacked over the clients. Any
    other leaf is one tensor per client.
    """
    found = []
    for spec in values.leaf_specs(member):
      if spec.shape.is_fully_defined():
        found.append(tf.TensorSpec([self.size, *spec.shape], spec.dtype))
      else:
        found += [spec] * self.size
    return found

  def feed_tensors(
      self, arguments: list[Value], member: tff.Type
  ) -> list[tf.Tensor]:
    """Flattens an argument: Python values, one per client."""
    rows = [values.to_tensors(argument, member) for argument in arguments]
    found = []
    for k, spec in enumerate(values.leaf_specs(member)):
      column = [row[k] for row in rows]
      if spec.shape.is_fully_defined():
        found.append(tf.stack(column))
      else:
        found += column
    return found

  def unpack_argument(
      self, tensors: Iterator[tf.Tensor], member: tff.Type
  ) -> Value:
    """Makes a value at the clients of the next `tensors`."""
    arrays = []
    for spec in values.leaf_specs(member):
      if spec.shape.is_fully_defined():
        column = next(tensors)
      else:
        column = [next(tensors) for _ in range(self.size)]
      arrays.append(self._to_array(column, spec))
    return structures.pack(member, arrays)

  def _to_array(
      self, column: tf.Tensor | list[tf.Tensor], spec: tf.TensorSpec
  ) -> _Array:
    parts = []
    for part in self._parts():
      array = _new_array(spec, self._length(part))
      rows = column[self._bounds[part] : self._bounds[part + 1]]
      if isinstance(column, list):
        for i, row in enumerate(rows):
          array = array.write(i, row)
      else:
        array = array.unstack(rows)
      parts.append(array)
    return _Array(parts, spec.shape)

  def flatten_result(self, value: Value) -> list[tf.Tensor]:
    """Flattens a value at the clients: all leaves, client by client."""
    return [
        tensor
        for part in self._parts()
        for i in range(self._length(part))
        for tensor in structures.leaves(
            self._client_value(value, part, tf.constant(i))
        )
    ]

  def to_python(
      self, tensors: Iterator[tf.Tensor], member: tff.Type
  ) -> list[Value]:
    """Makes Python values, one per client, of the next `tensors`."""
    return [values.to_python(tensors, member) for _ in range(self.size)]

  def _client_value(self, value: Value, part: int, i: tf.Tensor) -> Value:
    return structures.map_leaves(
        lambda v: v.value if isinstance(v, Broadcast) else v.read(part, i),
        value,
    )

  def map(
      self, function: Function, value: Value, result_member: tff.Type
  ) -> Value:
    """Applies `function`, which returns a `result_member`, to each value."""
    specs = values.leaf_specs(result_member)
    columns: list[list[tf.TensorArray]] = [[] for _ in specs]
    for part in self._parts():
      length = self._length(part)
      with tf.device(self._devices[part]):

        def step(
            i: tf.Tensor, arrays: list[tf.TensorArray], part: int = part
        ) -> tuple[tf.Tensor, list[tf.TensorArray]]:
          result = function(self._client_value(value, part, i))
          return i + 1, [
              array.write(i, leaf)
              for array, leaf in zip(
                  arrays, structures.leaves(result), strict=True
              )
          ]

        _, arrays = tf.while_loop(
            lambda i, _, length=length: i < length,
            step,
            (tf.constant(0), [_new_array(spec, length) for spec in specs]),
        )
      for column, array in zip(columns, arrays, strict=True):
        column.append(array)
    return structures.pack(
        result_member,
        [
            _Array(column, spec.shape)
            for column, spec in zip(columns, specs, strict=True)
        ],
    )

  def reduce(
      self, value: Value, zero: Value, accumulate: Function, merge: Function
  ) -> Value:
    """Aggregates a value at the clients; see `Unrolled.reduce`."""
    totals = []
    for part in self._parts():
      with tf.device(self._devices[part]):

        def step(
            i: tf.Tensor, total: list[tf.Tensor], part: int = part
        ) -> tuple[tf.Tensor, list[tf.Tensor]]:
          pair = tff.structure.Struct.unnamed(
              structures.pack(zero, total), self._client_value(value, part, i)
          )
          return i + 1, structures.leaves(accumulate(pair))

        _, total = tf.while_loop(
            lambda i, _, part=part: i < self._length(part),
            step,
            (tf.constant(0), structures.leaves(zero)),
        )
      totals.append(structures.pack(zero, total))
    result = totals[0]
    for total in totals[1:]:
      result = merge(tff.structure.Struct.unnamed(result, total))
    return result


Cohort = Unrolled | Looped
