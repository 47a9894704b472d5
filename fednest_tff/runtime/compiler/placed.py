"""Converts arguments and results of a computation to flat lists of tensors.

A computation's parameter and result may be placed. Values that differ between
clients have the form that the cohort gives them. All others, at the server, the
same at all clients or not placed at all, are converted as single values.

The parameter of a computation without arguments is `None`.
"""

from collections.abc import Iterable

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import values
from fednest_tff.runtime.compiler.cohort import (
    Broadcast,
    Cohort,
    broadcast_value,
)
from fednest_tff.structures import Value


def _is_per_client(value_type: tff.Type) -> bool:
  """Tells whether clients may have different values."""
  return structures.is_at_clients(value_type) and not value_type.all_equal


def _is_broadcast(value_type: tff.Type) -> bool:
  """Tells whether the value is at the clients and the same at all of them."""
  return structures.is_at_clients(value_type) and value_type.all_equal


def _member(value_type: tff.Type) -> tff.Type:
  """Returns a type without its placement, if it has one."""
  if isinstance(value_type, tff.FederatedType):
    return value_type.member
  return value_type


def cohort_size(parameter: tff.Type | None, argument: Value) -> int | None:
  """Counts the clients.

  Args:
    parameter: The type of `argument`.
    argument: The argument of a computation.

  Returns:
    The number of clients; `None` if no argument has values per client.

  Raises:
    TypeError: If what should be one value per client is not a list.
    ValueError: If two lists of clients' values differ in length.
  """
  if parameter is None:
    return None
  sizes = set()
  for value, value_type in structures.typed_leaves(argument, parameter):
    if _is_per_client(value_type):
      if not isinstance(value, (list, tuple)):
        raise TypeError(
            f'Expected a list with a value per client for {value_type}; got'
            f' {type(value).__name__}.'
        )
      sizes.add(len(value))
  if len(sizes) > 1:
    raise ValueError(
        f'Arguments at the clients differ in their number: {sorted(sizes)}.'
    )
  return sizes.pop() if sizes else None


def argument_specs(
    cohort: Cohort, parameter: tff.Type | None
) -> list[tf.TensorSpec]:
  """Lists the specs of the tensors that `feed_tensors` returns."""
  if parameter is None:
    return []
  found = []
  for value_type in structures.leaves(parameter):
    if _is_per_client(value_type):
      found += cohort.argument_specs(value_type.member)
    else:
      found += values.leaf_specs(_member(value_type))
  return found


def feed_tensors(
    cohort: Cohort, parameter: tff.Type | None, argument: Value
) -> list[tf.Tensor]:
  """Converts a Python argument of type `parameter` to tensors."""
  if parameter is None:
    return []
  found = []
  for value, value_type in structures.typed_leaves(argument, parameter):
    if _is_per_client(value_type):
      found += cohort.feed_tensors(value, value_type.member)
    else:
      found += values.to_tensors(value, _member(value_type))
  return found


def unpack_argument(
    cohort: Cohort, parameter: tff.Type, tensors: Iterable[tf.Tensor]
) -> Value:
  """Converts tensors to an argument, inside of the function.

  Args:
    cohort: The clients.
    parameter: The type of the argument.
    tensors: Tensors as `feed_tensors` returns them.

  Returns:
    A TFF value. Its parts at the clients are values of the cohort.
  """
  remaining = iter(tensors)

  def unpack(value_type: tff.Type) -> Value:
    if _is_per_client(value_type):
      return cohort.unpack_argument(remaining, value_type.member)
    value = structures.pack(_member(value_type), remaining)
    return Broadcast(value) if _is_broadcast(value_type) else value

  return structures.fold(parameter, unpack, tff.structure.Struct)


def flatten_result(
    cohort: Cohort, result_type: tff.Type, result: Value
) -> list[tf.Tensor]:
  """Converts a result to tensors, inside of the function."""
  found = []
  for value, value_type in structures.typed_leaves(result, result_type):
    if _is_per_client(value_type):
      found += cohort.flatten_result(value)
    elif _is_broadcast(value_type):
      found += structures.leaves(broadcast_value(value))
    else:
      found += structures.leaves(value)
  return found


def to_python(
    cohort: Cohort, result_type: tff.Type, tensors: Iterable[tf.Tensor]
) -> Value:
  """Converts the tensors of `flatten_result` to a Python result.

  Args:
    cohort: The clients.
    result_type: The type of the result.
    tensors: What the function returned.

  Returns:
    NumPy values and datasets, in lists for clients, in a
    `tff.structure.Struct` if the result is a struct.
  """
  remaining = iter(tensors)

  def convert(value_type: tff.Type) -> Value:
    if _is_per_client(value_type):
      return cohort.to_python(remaining, value_type.member)
    return values.to_python(remaining, _member(value_type))

  return structures.fold(result_type, convert, tff.structure.Struct)
