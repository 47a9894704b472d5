"""Divides the clients of a round among several workers, and counts examples."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.structures import Value


def has_clients(type_spec: tff.Type | None) -> bool:
  """Tells whether a value of that type has a part at the clients."""
  return type_spec is not None and tff.types.contains(
      type_spec, structures.is_at_clients
  )


def is_per_client(value_type: tff.Type) -> bool:
  """Tells whether clients may have different values of that type."""
  return structures.is_at_clients(value_type) and not value_type.all_equal


def cut(values: Sequence[Value], part: int, num_parts: int) -> list[Value]:
  """Returns one of `num_parts` parts of almost equal size."""
  begin = part * len(values) // num_parts
  return list(values[begin : (part + 1) * len(values) // num_parts])


def without_clients(value: Value, type_spec: tff.Type) -> Value:
  """Removes all clients from an argument of a computation.

  Args:
    value: The argument.
    type_spec: Its type.

  Returns:
    `value`, with an empty list wherever it has values of clients.
  """
  return structures.pack(
      type_spec,
      [
          [] if is_per_client(leaf_type) else leaf
          for leaf, leaf_type in structures.typed_leaves(value, type_spec)
      ],
  )


def count_elements(sequence: tf.data.Dataset | Sequence[object]) -> int:
  """Counts the elements of a client's sequence."""
  if not isinstance(sequence, tf.data.Dataset):
    return len(sequence)
  count = int(sequence.cardinality().numpy())
  if count >= 0:
    return count
  return int(sequence.reduce(np.int64(0), lambda total, _: total + 1).numpy())
