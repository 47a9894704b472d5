"""Refuses aggregators that are known to sum over clients and not to average.

The algorithms need a mean over clients. A sum has the same type, so it would
run, but with steps that grow with the cohort.
"""

from collections.abc import Iterator
import inspect
from typing import Any

import tensorflow_federated as tff

_FACTORIES = (
    tff.aggregators.UnweightedAggregationFactory,
    tff.aggregators.WeightedAggregationFactory,
)
# Factories that divide the sum that the factories inside them compute.
_MEANS = (tff.aggregators.MeanFactory, tff.aggregators.UnweightedMeanFactory)
_SUMS = (
    tff.aggregators.EncodedSumFactory,
    tff.aggregators.SecureModularSumFactory,
    tff.aggregators.SecureSumFactory,
    tff.aggregators.SumFactory,
)


def _inside(factory: Any) -> Iterator[object]:
  """The factories that a factory passes values on to.

  They are attributes, or, in those that TFF makes inside a function, variables
  of that function.
  """
  yield from vars(factory).values()
  yield from inspect.getclosurevars(type(factory).create).nonlocals.values()


def find_sum(factory: Any) -> str | None:
  """The name of the sum that a factory ends in; `None` if it may average."""
  if isinstance(factory, _MEANS):
    return None
  if isinstance(factory, tff.aggregators.DifferentiallyPrivateFactory):
    query = type(factory._query).__name__  # pylint: disable=protected-access
    # A normalized query divides by the number of clients.
    return query if query.endswith('SumQuery') else None
  if isinstance(factory, _SUMS):
    return type(factory).__name__
  for part in _inside(factory):
    if isinstance(part, _FACTORIES):
      found = find_sum(part)
      if found is not None:
        return found
  return None


def check(argument: str, factory: object) -> None:
  """Refuses a factory that sums.

  Args:
    argument: The name of the argument that holds the factory.
    factory: A `tff.aggregators` factory, maybe around others.

  Raises:
    ValueError: If it is known not to average.
  """
  found = find_sum(factory)
  if found is not None:
    raise ValueError(
        f'`{argument}` ends in {found}, a sum, and the method needs a mean over'
        ' clients: use tff.aggregators.UnweightedMeanFactory(value_sum_factory='
        '...) or MeanFactory.'
    )


def check_type(
    argument: str, value_type: tff.Type, result_type: tff.Type
) -> None:
  """Refuses an aggregator whose result is not of the type of the values."""
  if not value_type.is_assignable_from(result_type):
    raise ValueError(
        f'`{argument}` makes {result_type.compact_representation()} of values'
        f' of type {value_type.compact_representation()}: it must average them.'
    )
