"""Means over clients: `tff.federated_mean`, or a `tff.aggregators` factory."""

from typing import Any, NamedTuple

import tensorflow_federated as tff

Factory = (
    tff.aggregators.WeightedAggregationFactory
    | tff.aggregators.UnweightedAggregationFactory
)


class Mean(NamedTuple):
  """A mean at the server.

  Attributes:
    state: The aggregator's new state.
    value: The mean.
    metrics: Plain means of the clients' metrics, by name.
    measurements: What a factory's aggregator measured; empty otherwise.
  """

  state: tff.Value
  value: tff.Value
  metrics: dict[str, tff.Value]
  measurements: tff.Value | None


class Aggregation:
  """How one quantity is averaged over the clients of a round.

  By default that is one `tff.federated_mean` of the value together with its
  metrics, so that a round has exactly one aggregation. With a factory, the
  value goes through its process and the metrics through a plain mean beside it.
  """

  def __init__(
      self,
      name: str,
      factory: Factory | None,
      value_type: tff.Type,
      weight_type: tff.Type,
      uniform: bool,
  ):
    """Creates the aggregation.

    Args:
      name: The argument that `factory` came through, for error messages.
      factory: A weighted or unweighted factory, or `None` for the plain mean.
      value_type: Type of the value, unplaced.
      weight_type: Type of the weight, unplaced.
      uniform: Whether the weights of this mean are all equal.
    """
    self._is_weighted = True
    if factory is None:
      self._process = None
      self.initialize = tff.federated_computation(
          lambda: tff.federated_value((), tff.SERVER)
      )
      return
    if isinstance(factory, tff.aggregators.WeightedAggregationFactory):
      self._process = factory.create(value_type, weight_type)
    elif isinstance(factory, tff.aggregators.UnweightedAggregationFactory):
      if not uniform:
        raise ValueError(
            f'`{name}` is an unweighted factory, but clients are weighted or'
            ' sub-sampled: use a weighted one.'
        )
      self._is_weighted = False
      self._process = factory.create(value_type)
    else:
      raise ValueError(
          f'`{name}` must be a tff.aggregators factory; got {factory!r}.'
      )
    self.initialize = self._process.initialize

  def __call__(
      self,
      state: tff.Value,
      value: tff.Value,
      weight: tff.Value,
      metrics: tff.Value | None = None,
  ) -> Mean:
    """Averages `value` and `metrics` over the clients, inside a computation."""
    if self._process is None:
      if metrics is None:
        return Mean(state, tff.federated_mean(value, weight), {}, None)
      both = tff.federated_mean(tff.federated_zip((value, metrics)), weight)
      return Mean(state, both[0], _by_name(both[1]), None)
    arguments = (value, weight) if self._is_weighted else (value,)
    output = self._process.next(state, *arguments)
    means = {}
    if metrics is not None:
      means = _by_name(tff.federated_mean(metrics, weight))
    return Mean(output.state, output.result, means, output.measurements)


def _by_name(value: tff.Value) -> dict[str, tff.Value]:
  """The fields of a federated struct."""
  fields = tff.structure.iter_elements(value.type_signature.member)
  return {name: getattr(value, name) for name, _ in fields}


def initial_states(aggregations: dict[str, Aggregation]) -> Any:
  """The states of all `aggregations` by name, at the server."""
  return tff.federated_zip({
      name: aggregation.initialize()
      for name, aggregation in aggregations.items()
  })
