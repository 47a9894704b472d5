"""Divides the clients of a round among several workers."""


import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.structures import Value


def has_clients(type_spec: tff.Type | None) -> bool:
  """Tells whether a value of that type has a part at the clients."""
  return type_spec is not None and tff.types.contains(
      type_spec, structures.is_at_clients
  )


def lists_at_clients(value: Value, type_spec: tff.Type) -> list[list[Value]]:
  """Finds the lists of clients' values in a value.

  Args:
    value: An argument of a computation.
    type_spec: The type of `value`.

  Returns:
    The lists, each with one element per client.
  """
  return [
      part
      for part, part_type in structures.typed_leaves(value, type_spec)
      if structures.is_at_clients(part_type) and not part_type.all_equal
  ]


def share(
    value: Value, type_spec: tff.Type, part: int, num_parts: int
) -> Value:
  """Reduces a value to a part of its clients.

  Args:
    value: An argument of a computation.
    type_spec: The type of `value`.
    part: The part, from 0.
    num_parts: How many parts there are, of almost equal size; 0 for a value
      without any client.

  Returns:
    `value` with only that part of each list of clients' values.
  """

  def keep(leaf: Value, leaf_type: tff.Type) -> Value:
    if not structures.is_at_clients(leaf_type) or leaf_type.all_equal:
      return leaf
    if num_parts == 0:
      return []
    begin = part * len(leaf) // num_parts
    return list(leaf[begin : (part + 1) * len(leaf) // num_parts])

  kept = [keep(*pair) for pair in structures.typed_leaves(value, type_spec)]
  return structures.pack(type_spec, kept)
