"""Arguments and results of a computation as flat lists of tensors.

A value at the server, or one that all clients share, is a value; a value at the
clients is whatever the cohort makes of one value per client.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import graphs, values
from fednest_tff.runtime.cohort import Everywhere, Mapped, Unrolled, shared

Cohort = Unrolled | Mapped


def parts(parameter: tff.Type | None) -> list[tff.Type]:
  """The types of a computation's arguments."""
  if parameter is None:
    return []
  if isinstance(parameter, tff.StructType):
    return [t for _, t in tff.structure.iter_elements(parameter)]
  return [parameter]


def arguments(parameter: tff.Type | None, argument: Any) -> list[tuple]:
  """Pairs of type and value, one per argument."""
  if parameter is None:
    return []
  if isinstance(parameter, tff.StructType):
    found = values.fields(argument, parameter)
    return list(zip(parts(parameter), found, strict=True))
  return [(parameter, argument)]


def _is_per_client(value_type: tff.FederatedType) -> bool:
  """Whether every client has a value of its own."""
  return value_type.placement is tff.CLIENTS and not value_type.all_equal


def _struct(value_type: tff.StructType, element: Callable[[tff.Type], Any]):
  """A struct of what `element` makes of each element's type, in order."""
  return tff.structure.Struct(
      (name, element(t)) for name, t in tff.structure.iter_elements(value_type)
  )


def _client_lists(value_type: tff.Type, value: Any) -> list:
  """The lists of clients' values in an argument."""
  if isinstance(value_type, tff.FederatedType):
    if _is_per_client(value_type):
      if not isinstance(value, (list, tuple)):
        raise TypeError(
            f'Expected a list with a value per client for {value_type}; got'
            f' {type(value).__name__}.'
        )
      return [value]
    return []
  if isinstance(value_type, tff.StructType):
    types = parts(value_type)
    found = values.fields(value, value_type)
    return [
        clients
        for t, v in zip(types, found, strict=True)
        for clients in _client_lists(t, v)
    ]
  return []


def cohort_size(arguments: list[tuple]) -> int | None:
  """How many clients there are; `None` if no argument tells."""
  sizes = {
      len(clients) for t, v in arguments for clients in _client_lists(t, v)
  }
  if len(sizes) > 1:
    raise ValueError(
        f'Arguments at the clients differ in their number: {sorted(sizes)}.'
    )
  return sizes.pop() if sizes else None


def specs(cohort: Cohort, value_type: tff.Type) -> list[tf.TensorSpec]:
  """The signature of an argument."""
  if isinstance(value_type, tff.FederatedType):
    if _is_per_client(value_type):
      return cohort.specs(value_type.member)
    return values.leaf_specs(value_type.member)
  if isinstance(value_type, tff.StructType):
    return [s for t in parts(value_type) for s in specs(cohort, t)]
  return values.leaf_specs(value_type)


def feed(cohort: Cohort, value_type: tff.Type, value: Any) -> list[tf.Tensor]:
  """The tensors of an argument, to go with `specs`."""
  if isinstance(value_type, tff.FederatedType):
    if _is_per_client(value_type):
      return cohort.feed(value, value_type.member)
    return values.leaves(value, value_type.member)
  if isinstance(value_type, tff.StructType):
    found = values.fields(value, value_type)
    return [
        leaf
        for t, v in zip(parts(value_type), found, strict=True)
        for leaf in feed(cohort, t, v)
    ]
  return values.leaves(value, value_type)


def take(cohort: Cohort, value_type: tff.Type, leaves: list) -> Any:
  """The argument inside the function; uses its leaves up from the left."""
  if isinstance(value_type, tff.FederatedType):
    if _is_per_client(value_type):
      return cohort.take(leaves, value_type.member)
    value = graphs.pack(value_type.member, leaves)
    is_server = value_type.placement is tff.SERVER
    return value if is_server else Everywhere(value)
  if isinstance(value_type, tff.StructType):
    return _struct(value_type, lambda t: take(cohort, t, leaves))
  return graphs.pack(value_type, leaves)


def give(cohort: Cohort, value_type: tff.Type, value: Any) -> list[tf.Tensor]:
  """The leaves of a result, inside the function."""
  if isinstance(value_type, tff.FederatedType):
    if _is_per_client(value_type):
      return cohort.give(value, value_type.member)
    is_server = value_type.placement is tff.SERVER
    return graphs.flatten(value if is_server else shared(value))
  if isinstance(value_type, tff.StructType):
    types = parts(value_type)
    return [
        leaf
        for k, t in enumerate(types)
        for leaf in give(cohort, t, value[k])
    ]
  return graphs.flatten(value)


def result(cohort: Cohort, value_type: tff.Type, found: list) -> Any:
  """The Python value of `give`; uses the leaves up from the left."""
  if isinstance(value_type, tff.FederatedType):
    if _is_per_client(value_type):
      return cohort.results(found, value_type.member)
    return values.to_python(found, value_type.member)
  if isinstance(value_type, tff.StructType):
    return _struct(value_type, lambda t: result(cohort, t, found))
  return values.to_python(found, value_type)
