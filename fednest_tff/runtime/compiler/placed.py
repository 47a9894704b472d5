"""Converts arguments and results of a computation to flat lists of tensors.

A computation's parameter and result may be placed. Values that differ between
clients have the form that the cohort gives them. All others, at the server, the
same at all clients or not placed at all, are converted as single values.

The parameter of a computation without arguments is `None`.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
import itertools

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import values
from fednest_tff.runtime.compiler.broadcast import Broadcast, broadcast_value
from fednest_tff.runtime.compiler.cohort import Cohort
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
    cohort: Cohort,
    parameter: tff.Type | None,
    unused: Container[int] = frozenset(),
) -> list[tf.TensorSpec]:
  """Lists the specs of the tensors that `feed_tensors` returns."""
  if parameter is None:
    return []
  found = cohort.size_specs()
  for number, value_type in enumerate(structures.leaves(parameter)):
    if number in unused:
      continue
    found += value_specs(cohort, value_type)
  return found


def value_specs(cohort: Cohort, value_type: tff.Type) -> list[tf.TensorSpec]:
  """Lists the specs of the tensors that `unpack_value` takes."""
  if _is_per_client(value_type):
    return cohort.argument_specs(value_type.member)
  return values.leaf_specs(_member(value_type))


def feed_tensors(
    cohort: Cohort,
    parameter: tff.Type | None,
    argument: Value,
    unused: Container[int] = frozenset(),
) -> list[tf.Tensor]:
  """Converts a Python argument to tensors.

  Args:
    cohort: The clients.
    parameter: The type of `argument`.
    argument: The argument.
    unused: The numbers of leaves of `parameter` that are left out.

  Returns:
    The tensors.
  """
  if parameter is None:
    return []
  found = cohort.size_tensors()
  names = _leaf_names(parameter)
  pairs = structures.typed_leaves(argument, parameter)
  for number, (value, value_type) in enumerate(pairs):
    if number in unused:
      continue
    is_per_client = _is_per_client(value_type)
    try:
      if is_per_client:
        found += cohort.feed_tensors(value, value_type.member)
      else:
        found += values.to_tensors(value, _member(value_type))
    except (TypeError, ValueError) as error:
      where = f'`{names[number]}`' if names[number] else 'The argument'
      if is_per_client:
        where += _find_client(cohort, value, value_type.member)
      kind = ValueError if isinstance(error, ValueError) else TypeError
      raise kind(f'{where} does not fit: {error}') from error
  return found


def _leaf_names(value_type: tff.Type, prefix: str = '') -> list[str]:
  """The names of a parameter's leaves, such as 'state.outer'."""
  if not isinstance(value_type, tff.StructType):
    return [prefix]
  found = []
  pairs = tff.structure.iter_elements(value_type)
  for k, (name, element) in enumerate(pairs):
    part = f'{prefix}[{k}]' if name is None else f'{prefix}.{name}'.lstrip('.')
    found += _leaf_names(element, part)
  return found


def _find_client(
    cohort: Cohort, clients: Sequence[Value], member: tff.Type
) -> str:
  """Says which client's value does not fit."""
  for k, value in enumerate(clients):
    try:
      values.to_tensors(value, member)
    except (TypeError, ValueError):
      return f' of client {k} (of {cohort.size}, from 0)'
  return ''


def unpack_argument(
    cohort: Cohort,
    parameter: tff.Type,
    tensors: Iterator[tf.Tensor],
    unused: Container[int] = frozenset(),
) -> Value:
  """Converts tensors to an argument, inside of the function.

  Args:
    cohort: The clients.
    parameter: The type of the argument.
    tensors: Tensors as `feed_tensors` returns them come next.
    unused: The numbers of leaves that were left out.

  Returns:
    A TFF value. Its parts at the clients are values of the cohort, and those
    that were left out are `None`.
  """
  cohort.unpack_sizes(tensors)
  numbers = itertools.count()

  def unpack(value_type: tff.Type) -> Value:
    if next(numbers) in unused:
      return None
    return unpack_value(cohort, value_type, tensors)

  return structures.fold(parameter, unpack, tff.structure.Struct)


def unpack_value(
    cohort: Cohort, value_type: tff.Type, tensors: Iterator[tf.Tensor]
) -> Value:
  """Converts tensors to a value, inside of the function.

  Args:
    cohort: The clients.
    value_type: The type of the value; at most all of it is placed.
    tensors: Tensors as `flatten_result` returns them come next.

  Returns:
    A TFF value, or one of the cohort.
  """
  if _is_per_client(value_type):
    return cohort.unpack_argument(tensors, value_type.member)
  value = structures.pack(_member(value_type), tensors)
  return Broadcast(value) if _is_broadcast(value_type) else value


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
