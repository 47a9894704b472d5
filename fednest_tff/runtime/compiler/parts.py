"""Clients in parts: how their values enter and leave the function.

A part is the clients of a cohort that are on one device and, if it is *even*,
have tensors of the same shapes. Tensors of an even part are stacked. Those of
an uneven part whose shapes are not known are joined to one vector, with a list
of their shapes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import chunks, values
from fednest_tff.runtime.compiler import rows as rows_lib
from fednest_tff.runtime.compiler.broadcast import Broadcast
from fednest_tff.runtime.compiler.rows import Leaf, Rows
from fednest_tff.structures import Value


class Part(NamedTuple):
  """Some clients of a cohort.

  Attributes:
    clients: Their numbers in the cohort.
    device: The device on which they run.
    is_even: Whether their tensors have the same shapes.
  """

  clients: list[int]
  device: str
  is_even: bool


def _stacked_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
  return tf.TensorSpec([None, *spec.shape], spec.dtype)


def is_flat(spec: tf.TensorSpec, part: Part) -> bool:
  """Tells whether clients' tensors enter and leave flat, with their shapes."""
  return not part.is_even and not spec.shape.is_fully_defined()


class Parts:
  """Clients in parts, at least one client.

  A value at the clients is a `Leaf`, a `Broadcast`, or a struct of them.

  Attributes:
    size: The number of clients. It does not enter the function.
  """

  def __init__(self, parts: Sequence[Part]):
    """Takes the parts, none of them empty."""
    self._parts = list(parts)
    self.size = sum(len(part.clients) for part in parts)
    self._sizes: list[tf.Tensor] = []

  def size_specs(self) -> list[tf.TensorSpec]:
    """Lists the specs of `size_tensors`."""
    return [tf.TensorSpec([], tf.int32) for _ in self._parts]

  def size_tensors(self) -> list[tf.Tensor]:
    """Lists the number of clients in each part."""
    return [tf.constant(len(part.clients)) for part in self._parts]

  def unpack_sizes(self, tensors: Iterator[tf.Tensor]) -> None:
    """Takes the next `tensors`, those of `size_tensors`."""
    self._sizes = [next(tensors) for _ in self._parts]

  def argument_specs(self, member: tff.Type) -> list[tf.TensorSpec]:
    """Lists the specs of a flat argument, part by part and leaf by leaf."""
    found = []
    for part in self._parts:
      for spec in values.leaf_specs(member):
        if is_flat(spec, part):
          found.append(tf.TensorSpec([None], spec.dtype))
          found.append(tf.TensorSpec([None, spec.shape.rank], tf.int32))
        else:
          found.append(_stacked_spec(spec))
    return found

  def feed_tensors(
      self, arguments: list[Value], member: tff.Type
  ) -> list[tf.Tensor]:
    """Flattens an argument: Python values, one per client."""
    rows = [values.to_tensors(argument, member) for argument in arguments]
    return self.stack_tensors(rows, member)

  def stack_tensors(
      self, rows: list[list[tf.Tensor]], member: tff.Type
  ) -> list[tf.Tensor]:
    """Flattens an argument: tensors of all leaves, client by client."""
    found = []
    for part in self._parts:
      for k, spec in enumerate(values.leaf_specs(member)):
        column = [rows[i][k] for i in part.clients]
        if is_flat(spec, part):
          found.append(tf.concat([tf.reshape(t, [-1]) for t in column], 0))
          found.append(tf.constant([t.shape for t in column], tf.int32))
        else:
          found.append(tf.stack(column))
    return found

  def unpack_argument(
      self, tensors: Iterator[tf.Tensor], member: tff.Type
  ) -> Value:
    """Makes a value at the clients of the next `tensors`."""
    specs = values.leaf_specs(member)
    columns: list[list[Rows]] = [[] for _ in specs]
    for part in self._parts:
      for column, spec in zip(columns, specs, strict=True):
        if is_flat(spec, part):
          column.append(rows_lib.unflatten(next(tensors), next(tensors), spec))
        else:
          column.append(next(tensors))
    return self._pack(member, columns)

  def _pack(self, member: tff.Type, columns: list[list[Rows]]) -> Value:
    specs = values.leaf_specs(member)
    return structures.pack(
        member,
        [
            Leaf(column, spec.shape)
            for column, spec in zip(columns, specs, strict=True)
        ],
    )

  def flatten_result(self, value: Value) -> list[tf.Tensor]:
    """Flattens a value at the clients, part by part and leaf by leaf."""
    found = []
    for k, size in enumerate(self._sizes):
      for leaf in structures.leaves(value):
        if isinstance(leaf, Broadcast):
          for tensor in structures.leaves(leaf.value):
            found.append(rows_lib.repeat(tensor, size))
        elif isinstance(leaf.parts[k], tf.TensorArray):
          found += rows_lib.flatten(leaf.parts[k], size)
        elif isinstance(leaf.parts[k], chunks.Postponed):
          found.append(self._stack_postponed(leaf, k))
        else:
          found.append(leaf.parts[k])
    return found

  def to_python(
      self, tensors: Iterator[tf.Tensor], member: tff.Type
  ) -> list[Value]:
    """Makes Python values, one per client, of the next `tensors`."""
    found: list[Value] = [None] * self.size
    specs = values.leaf_specs(member)
    for part in self._parts:
      columns = []
      for spec in specs:
        if is_flat(spec, part):
          vector, shapes = next(tensors), next(tensors).numpy()
          sizes = np.prod(shapes, axis=1, dtype=np.int64)
          pieces = tf.split(vector, sizes)
          columns.append([
              tf.reshape(piece, shape)
              for piece, shape in zip(pieces, shapes, strict=True)
          ])
        else:
          columns.append(tf.unstack(next(tensors), len(part.clients)))
      for row, i in enumerate(part.clients):
        tensors_of_client = iter([column[row] for column in columns])
        found[i] = values.to_python(tensors_of_client, member)
    return found

  def _stack_postponed(self, leaf: Leaf, part: int) -> tf.Tensor:
    """Computes a postponed leaf for all clients of a part."""
    raise NotImplementedError
