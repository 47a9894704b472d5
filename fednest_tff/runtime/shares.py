"""Which clients' values go where, when several workers share a round."""

from collections.abc import Iterator
from typing import Any

import tensorflow_federated as tff


def is_at_clients(type_spec: tff.Type) -> bool:
  """Whether a value of that type is placed at the clients."""
  return (
      isinstance(type_spec, tff.FederatedType)
      and type_spec.placement is tff.CLIENTS
  )


def has_clients(type_spec: tff.Type | None) -> bool:
  """Whether a value of that type has a part at the clients."""
  return type_spec is not None and tff.types.contains(type_spec, is_at_clients)


def lists_at_clients(value: Any, type_spec: tff.Type) -> Iterator[list]:
  """Every list of clients' values in `value`."""
  if is_at_clients(type_spec):
    if not type_spec.all_equal:
      yield value
  elif has_clients(type_spec):
    value = tff.structure.from_container(value)
    for k, (_, element_type) in enumerate(
        tff.structure.iter_elements(type_spec)
    ):
      yield from lists_at_clients(value[k], element_type)


def share(value: Any, type_spec: tff.Type, part: int, num_parts: int) -> Any:
  """`value` with only one part of its clients, or none if `num_parts` is 0."""
  if not has_clients(type_spec):
    return value
  if isinstance(type_spec, tff.StructType):
    value = tff.structure.from_container(value)
    return tff.structure.Struct(
        (name, share(value[k], element_type, part, num_parts))
        for k, (name, element_type) in enumerate(
            tff.structure.iter_elements(type_spec)
        )
    )
  if type_spec.all_equal:
    return value
  if num_parts == 0:
    return []
  begin = part * len(value) // num_parts
  return list(value[begin : (part + 1) * len(value) // num_parts])
