"""Means over clients: `tff.federated_mean`, or a `tff.aggregators` factory."""

import dataclasses
import functools
from typing import NamedTuple, TypeAlias

import tensorflow_federated as tff

from fednest_tff import options
from fednest_tff.federated import averaging
from fednest_tff.federated.types import ProblemTypes
from fednest_tff.options import option

Factory: TypeAlias = (
    tff.aggregators.WeightedAggregationFactory
    | tff.aggregators.UnweightedAggregationFactory
)


@dataclasses.dataclass(frozen=True)
class GlobalGradients:
  """How the global directions q, h and FedIHGP's vectors are formed.

  Attributes:
    batch_size: Size of the samples outside the local loops (xi_i, zeta_i,
      xi_{i,0}, zeta_{i,n}); all of a client's examples if it is not given.
    aggregator: A `tff.aggregators` factory for q, h and FedIHGP's vectors in
      place of the plain mean. An aggregator that gives privacy gives it only
      together with those of the updates; losses and norms are plain means in
      any case.
  """

  batch_size: int | None = option('gradient_batch_size')
  aggregator: Factory | None = option('gradient_aggregator')

  def __post_init__(self) -> None:
    if self.batch_size is not None:
      options.check_count('gradient_batch_size', self.batch_size)


class Mean(NamedTuple):
  """A mean at the server.

  Attributes:
    state: The aggregator's new state.
    value: The mean.
    metrics: Plain means of the clients' metrics, by name.
    measurements: Measurements of the factory's aggregator; `None` without one.
  """

  state: tff.Value
  value: tff.Value
  metrics: dict[str, tff.Value]
  measurements: tff.Value | None


@functools.cache
def _build_no_state() -> tff.Computation:
  """`( -> <>@SERVER)`: the state of a plain mean."""
  return tff.federated_computation(
      lambda: tff.federated_value((), tff.SERVER)
  )


class Aggregation:
  """How one quantity is averaged over the clients of a round.

  By default that is one `tff.federated_mean` of the value together with its
  metrics, so that a round has exactly one aggregation. With a factory, the
  value goes through its process and the metrics through a plain mean beside it.

  Attributes:
    name: The name of the aggregator's state.
    argument: The name of the argument that holds the factory.
    initialize: `( -> state@SERVER)`.
  """

  def __init__(
      self,
      name: str,
      types: ProblemTypes,
      value_type: tff.Type,
      argument: str,
      factory: Factory | None,
      uniform: bool = True,
  ):
    """Creates the aggregation.

    Args:
      name: The name of the aggregator's state.
      types: The problem's types.
      value_type: Type of the value, unplaced.
      argument: The name of the argument that holds `factory`, for errors.
      factory: A weighted or unweighted factory, or `None` for the plain mean.
      uniform: Whether a round leaves the clients' weights as they are.
    """
    self.name = name
    self.argument = argument
    self._is_weighted = True
    if factory is None:
      self._process = None
      self.initialize = _build_no_state()
      return
    if isinstance(factory, tff.aggregators.WeightedAggregationFactory):
      self._process = factory.create(value_type, types.scalar)
    elif isinstance(factory, tff.aggregators.UnweightedAggregationFactory):
      if not (uniform and types.uniform):
        raise ValueError(
            f'`{argument}` is an unweighted factory, but clients are weighted'
            ' or sub-sampled: use a weighted one.'
        )
      self._is_weighted = False
      self._process = factory.create(value_type)
    else:
      raise ValueError(
          f'`{argument}` must be a tff.aggregators factory; got {factory!r}.'
      )
    averaging.check(argument, factory)
    averaging.check_type(
        argument,
        value_type,
        self._process.next.type_signature.result.result.member,
    )
    self.initialize = self._process.initialize

  def __call__(
      self,
      state: tff.Value,
      value: tff.Value,
      weight: tff.Value,
      metrics: tff.Value,
  ) -> Mean:
    """Averages `value` and `metrics` over the clients, inside a computation."""
    names = tff.structure.name_list(metrics.type_signature.member)
    if self._process is None:
      if not names:
        return Mean(state, tff.federated_mean(value, weight), {}, None)
      both = tff.federated_mean(tff.federated_zip((value, metrics)), weight)
      return Mean(
          state, both[0], {name: both[1][name] for name in names}, None
      )
    arguments = (value, weight) if self._is_weighted else (value,)
    output = self._process.next(state, *arguments)
    means = {}
    if names:
      mean = tff.federated_mean(metrics, weight)
      means = {name: mean[name] for name in names}
    return Mean(output.state, output.result, means, output.measurements)
