"""Communication of a computation, read off its compiled form.

TFF's call-dominant form lists every intrinsic that a computation runs, with its
types. Broadcasts are what each client receives and aggregations what each
sends. An aggregation belongs to the round after the last one it depends on, so
two that do not depend on each other, such as an update and the number of
clients, share a round. Nothing here knows the algorithms, so it holds for
aggregators from elsewhere and for other TFF processes, too.
"""

import math
from typing import NamedTuple

import numpy as np
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import call_dominant

_BROADCASTS = frozenset(['federated_broadcast'])
_AGGREGATIONS = frozenset([
    'federated_aggregate',
    'federated_max',
    'federated_mean',
    'federated_min',
    'federated_secure_modular_sum',
    'federated_secure_sum',
    'federated_secure_sum_bitwidth',
    'federated_sum',
    'federated_weighted_mean',
])
_UNPRICED = frozenset(['federated_select', 'federated_secure_select'])


class CommunicationCost(NamedTuple):
  """Communication of one call, per client that takes part in all of it.

  Attributes:
    rounds: Communication rounds: the longest chain of aggregations that depend
      on each other, those that may be skipped included.
    bytes_up: Bytes that a client sends, metrics and weights included.
    bytes_down: Bytes that a client receives.
    expected_rounds: The mean of `rounds` when rounds that turn out not to be
      wanted, such as FedIHGP's beyond N', are not run.
    expected_bytes_up: Likewise.
    expected_bytes_down: Likewise.
  """

  rounds: int
  bytes_up: int
  bytes_down: int
  expected_rounds: float
  expected_bytes_up: float
  expected_bytes_down: float


class _Total(NamedTuple):
  rounds: int
  bytes_up: int
  bytes_down: int


def _num_bytes(value_type: tff.Type) -> int:
  """Size of a value of that type, placed or not."""
  if isinstance(value_type, tff.FederatedType):
    return _num_bytes(value_type.member)
  if isinstance(value_type, tff.StructType):
    return sum(
        _num_bytes(element)
        for _, element in tff.structure.iter_elements(value_type)
    )
  if isinstance(value_type, tff.TensorType):
    if value_type.shape is None or None in value_type.shape:
      raise ValueError(
          f'Cannot price {value_type}: what clients send and receive must have'
          ' known shapes.'
      )
    if value_type.dtype is np.str_:
      raise ValueError('Cannot price a string: its length is not in its type.')
    return int(np.prod(value_type.shape)) * np.dtype(value_type.dtype).itemsize
  raise ValueError(f'Cannot price a value of type {value_type}.')


def _references(block: tff.framework.ComputationBuildingBlock) -> set[str]:
  """The names that `block` refers to."""
  names = set()

  def visit(
      inner: tff.framework.ComputationBuildingBlock,
  ) -> tuple[tff.framework.ComputationBuildingBlock, bool]:
    if isinstance(inner, tff.framework.Reference):
      names.add(inner.name)
    return inner, False

  tff.framework.transform_postorder(block, visit)
  return names


def _sent_type(call: tff.framework.Call) -> tff.Type:
  """Type of what a client sends for an aggregation."""
  argument = call.argument.type_signature
  if call.function.uri == 'federated_aggregate':
    return argument[0]  # value, zero, accumulate, merge, report
  if call.function.uri.startswith('federated_secure'):
    return argument[0]  # value, bound
  return argument  # the value, or the value and its weight


def _measure(computation: tff.Computation) -> _Total:
  """Rounds and bytes of one call of `computation`."""
  body = call_dominant.to_call_dominant(computation).block
  if isinstance(body, tff.framework.Lambda):
    body = body.result
  if not isinstance(body, tff.framework.Block):
    return _Total(0, 0, 0)
  # From the name of a value to the rounds it takes to have it.
  finished: dict[str, int] = {}
  bytes_up = bytes_down = 0
  for name, value in body.locals:
    depth = max((finished.get(n, 0) for n in _references(value)), default=0)
    function = getattr(value, 'function', None)
    if isinstance(function, tff.framework.Intrinsic):
      if function.uri in _UNPRICED:
        raise ValueError(f'Cannot price {function.uri}.')
      if function.uri in _BROADCASTS:
        bytes_down += _num_bytes(value.argument.type_signature)
      elif function.uri in _AGGREGATIONS:
        bytes_up += _num_bytes(_sent_type(value))
        depth += 1
    finished[name] = depth
  return _Total(max(finished.values(), default=0), bytes_up, bytes_down)


def communication_cost(
    process: tff.templates.IterativeProcess | tff.Computation,
) -> CommunicationCost:
  """Rounds and bytes per client of one `next`, or of one computation.

  Args:
    process: An iterative process, of this library or not, or a computation.

  Returns:
    A `CommunicationCost`.
  """
  if isinstance(process, tff.Computation):
    total = _measure(process)
    return CommunicationCost(*total, *total)
  total = _measure(process.next)
  rounds, up, down = [], [], []
  for sent in getattr(process, 'sent_rounds', ()):
    spared = 1 - sent.chance
    if spared:
      rounds.append(spared)
      up.append(spared * _measure(process.rounds[sent.round.name]).bytes_up)
      # Within an epoch, a round sends only values that are new.
      down.append(spared * sum(map(_num_bytes, sent.sent)))
  return CommunicationCost(
      *total,
      total.rounds - math.fsum(rounds),
      total.bytes_up - math.fsum(up),
      total.bytes_down - math.fsum(down),
  )
