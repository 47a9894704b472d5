"""Decides how the clients of one call are held inside the function.

A cohort is the clients of one call. There are two kinds:

- `Batched` is compiled once for any number of clients. Clients whose tensors
  have the same shapes are computed at once.
- `Unrolled` writes every client's computation into the graph.

Both hold a value that is the same at all clients, a `Broadcast`, only once.

Their methods use the following words. A *member* is the type of one client's
value. A value at the clients is *flat* when it is a list of tensors, which is
how it enters and leaves the function.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import values
from fednest_tff.runtime.compiler.batched import Batched
from fednest_tff.runtime.compiler.parts import Part
from fednest_tff.runtime.compiler.unrolled import Unrolled
from fednest_tff.structures import Value

Cohort: TypeAlias = Unrolled | Batched

# A cohort whose clients need more memory than this, by a rough count, is
# computed by chunks. Measured on two cores, compared with a program written by
# hand: 100 clients of 600 images take 1.5 times as long in chunks of 16, and
# 1.2 times as long at once. In chunks, 1,000 clients of 60 images take 1.7 GB
# in place of 2.8, and as long as they take at once.
_LIMIT_BYTES = 2**29
_CHUNK_BYTES = 2**26


def _shape(value: Value, value_type: tff.Type) -> Hashable:
  """Returns what the shapes of a client's tensors depend on.

  For a dataset that is its number of elements, if it is known. Elements may
  still differ in shape: then the function fails, and the cohort has to be
  uneven.
  """
  if isinstance(value_type, tff.TensorType):
    if tf.TensorShape(value_type.shape).is_fully_defined():
      return None
    return tuple(np.shape(value))
  if isinstance(value, tf.data.Dataset):
    return int(value.cardinality())
  return len(value)


def shapes_of_clients(
    parameter: tff.Type | None,
    argument: Value,
    read: Sequence[Sequence[Sequence[tf.Tensor]]],
    size: int,
) -> list[Hashable]:
  """Lists what the shapes of clients' tensors depend on, client by client.

  Args:
    parameter: The type of `argument`.
    argument: The argument of a computation.
    read: The results of readings, if there are any: tensors, client by client.
    size: The number of clients.

  Returns:
    Something for each client. It is equal for two clients whose tensors are
    expected to have the same shapes.
  """
  if parameter is None:
    return []
  if read:
    # These tell more than the datasets from which they were read.
    return [
        tuple(
            tuple(tensor.shape)
            for results in read
            for tensor in results[i]
        )
        for i in range(size)
    ]
  found: list[list[Hashable]] = [[] for _ in range(size)]
  for value, value_type in structures.typed_leaves(argument, parameter):
    if structures.is_at_clients(value_type) and not value_type.all_equal:
      for i, member in enumerate(value):
        found[i] += [
            _shape(leaf, leaf_type)
            for leaf, leaf_type in structures.typed_leaves(
                member, value_type.member
            )
        ]
  return [tuple(shapes) for shapes in found]


def _divide(
    clients: list[int], devices: Sequence[str], is_even: bool
) -> list[Part]:
  """Divides clients evenly among devices, consecutive ones on one device."""
  count = min(len(devices), len(clients))
  bounds = [len(clients) * k // count for k in range(count + 1)]
  return [
      Part(clients[bounds[k] : bounds[k + 1]], devices[k], is_even)
      for k in range(count)
  ]


def _num_bytes(specs: Iterable[tf.TensorSpec | tf.Tensor]) -> int:
  """Adds the bytes of tensors, of those whose shapes are known."""
  return sum(
      spec.shape.num_elements() * spec.dtype.size
      for spec in specs
      if spec.shape.is_fully_defined()
  )


def choose_chunk(
    parameter: tff.Type | None,
    read: Sequence[Sequence[Sequence[tf.Tensor]]],
    size: int,
) -> int | None:
  """Decides how many clients are computed at once.

  A client needs memory for what it has read and for copies of what the server
  sends, of which the server's argument gives the size.

  Args:
    parameter: The type of a computation's argument.
    read: The results of readings: tensors, client by client.
    size: The number of clients.

  Returns:
    The number of clients, a power of two; `None` for all of them.
  """
  if parameter is None or size == 0:
    return None
  bytes_of_client = sum(
      max(_num_bytes(tensors) for tensors in results) for results in read
  )
  for leaf in structures.leaves(parameter):
    member = leaf.member if isinstance(leaf, tff.FederatedType) else leaf
    bytes_of_client += _num_bytes(values.leaf_specs(member))
  if size * bytes_of_client <= _LIMIT_BYTES:
    return None
  count = max(1, _CHUNK_BYTES // bytes_of_client)
  chunk = 2 ** (count.bit_length() - 1)
  return chunk if chunk < size else None


def build_looped(
    size: int, devices: Sequence[str], chunk: int | None = None
) -> Batched:
  """Builds a cohort in which all is a loop over the clients.

  Args:
    size: The number of clients.
    devices: The clients are divided evenly among them.
    chunk: From `choose_chunk`.

  Returns:
    The cohort.
  """
  return Batched(_divide(list(range(size)), devices, is_even=False), chunk)


def build_vectorised(
    shapes: Sequence[Hashable],
    devices: Sequence[str],
    chunk: int | None = None,
) -> Batched:
  """Builds a cohort of groups of clients that are computed at once.

  Args:
    shapes: From `shapes_of_clients`. Clients for which it is equal are a group.
    devices: Each group is divided evenly among them.
    chunk: From `choose_chunk`.

  Returns:
    The cohort.
  """
  groups: dict[Hashable, list[int]] = {}
  for i, shape in enumerate(shapes):
    groups.setdefault(shape, []).append(i)
  parts = []
  for clients in groups.values():
    parts += _divide(clients, devices, is_even=True)
  return Batched(parts, chunk)
