"""Communication rounds: what goes down, what comes up, what the server does.

A round is one broadcast, one computation at the clients and one aggregation.
Algorithms describe a round as a function of what the clients have been sent, so
that it can be used in two ways: inside an epoch, where a client keeps what it
was sent before (x is sent once), or as a computation of its own with exactly
one broadcast of everything that it needs and one aggregation, to run on a
cohort of its own or spread over several workers.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import aggregation
from fednest_tff.algorithms.federation import (
    Federation,
    at_clients,
    at_server,
)
from fednest_tff.local import inverse_hessian
from fednest_tff.vector_space import Structure


class Point(NamedTuple):
  """Where clients take a derivative: (x, y), and the call's seed."""

  outer: Structure
  inner: Structure
  seed: tf.Tensor


class Descent(NamedTuple):
  """What clients need for their local steps.

  Attributes:
    outer: x.
    inner: y.
    direction: The global direction at (x, y): q or h; empty for local SGD.
    learning_rate: beta or alpha.
    seed: The call's seed.
  """

  outer: Structure
  inner: Structure
  direction: Structure
  learning_rate: tf.Tensor
  seed: tf.Tensor


class RoundOutput(NamedTuple):
  """What a round leaves at the server.

  Attributes:
    state: The aggregator's new state.
    value: What the round was for.
    metrics: Scalars by name.
  """

  state: tff.Value
  value: tff.Value
  metrics: dict[str, tff.Value]


def change(
    end: Structure, start: Structure, dtype: tf.DType
) -> tuple[Structure, tf.Tensor]:
  """A client's report of its local steps: the change and its squared norm."""
  difference = vector_space.subtract(end, start)
  return difference, tf.cast(vector_space.squared_norm(difference), dtype)


def drift(mean_squared_change: tf.Tensor, mean_change: Structure) -> tf.Tensor:
  """Root mean square over clients of ||y_i - y+||.

  mean ||y_i - y+||^2 = mean ||y_i - y||^2 - ||y+ - y||^2 when y+ is the mean,
  so it costs no further round. Mean ||y_i - y+|| itself would: clients do not
  know y+ yet.
  """
  squared = tf.cast(
      vector_space.squared_norm(mean_change), mean_squared_change.dtype
  )
  return tf.sqrt(tf.maximum(mean_squared_change - squared, 0))


def build_apply_change(
    federated: Federation, value_type: tff.Type, what: str, advice: str
) -> tff.Computation:
  """The server's step: `(v, mean change, mean squared change) -> ...`.

  Args:
    federated: The problem and its types.
    value_type: Type of the variable.
    what: What is updated, for the error message.
    advice: What to try if it is not finite.

  Returns:
    A computation that returns the new variable, the clients' drift and the norm
    of the change.
  """

  @tff.tensorflow.computation(value_type, value_type, federated.scalar_type)
  def apply_change(value, mean_change, mean_squared_change):
    mean_change = vector_space.check_finite(
        mean_change, f'{what} is not finite. {advice}'
    )
    return (
        vector_space.add(value, mean_change),
        drift(mean_squared_change, mean_change),
        vector_space.norm(mean_change),
    )

  return apply_change


def with_measurements(
    metrics: dict[str, tff.Value], name: str, mean: aggregation.Mean
) -> dict[str, tff.Value]:
  """`metrics` with those of the aggregator, if it has any."""
  if mean.measurements is None:
    return metrics
  return metrics | {f'{name}_aggregator': mean.measurements}


# (aggregator state, message at the clients, clients) -> what the server has.
OuterUpdate = Callable[[tff.Value, tff.Value, tff.Value], RoundOutput]
# The same with y at the server and the clients' features.
InnerUpdate = Callable[
    [tff.Value, tff.Value, tff.Value, tff.Value, tff.Value], RoundOutput
]


def build_outer_update(
    client_update: tff.Computation, aggregated: aggregation.Aggregation
) -> OuterUpdate:
  """The mean change of the clients; its mean square is in the metrics.

  Args:
    client_update: `(message, client) -> (change, metrics)`.
    aggregated: How changes are averaged.

  Returns:
    What runs inside a federated computation.
  """

  def update(state, message, clients):
    changes = tff.federated_map(client_update, (message, clients))
    mean = aggregated(state, changes[0], clients.weight, changes[1])
    metrics = with_measurements(mean.metrics, 'outer', mean)
    return RoundOutput(mean.state, mean.value, metrics)

  return update


def build_inner_update(
    client_update: tff.Computation,
    apply_change: tff.Computation,
    aggregated: aggregation.Aggregation,
) -> InnerUpdate:
  """y+ from y at the server and the clients' mean change.

  Args:
    client_update: `(message, features, client) -> (change, metrics)`.
    apply_change: From `build_apply_change`.
    aggregated: How changes are averaged.

  Returns:
    What runs inside a federated computation.
  """

  def update(state, y, message, features, clients):
    changes = tff.federated_map(client_update, (message, features, clients))
    mean = aggregated(state, changes[0], clients.weight, changes[1])
    metrics = dict(mean.metrics)
    applied = tff.federated_map(
        apply_change, (y, mean.value, metrics.pop('squared_change'))
    )
    metrics |= dict(client_drift=applied[1], inner_update_norm=applied[2])
    metrics = with_measurements(metrics, 'inner', mean)
    return RoundOutput(mean.state, applied[0], metrics)

  return update


def build_round(
    federated: Federation,
    aggregated: aggregation.Aggregation,
    message_type: tff.Type,
    run: Callable[[tff.Value, tff.Value, tff.Value, tff.Value], RoundOutput],
) -> tff.Computation:
  """One communication round as a computation of its own.

  Args:
    federated: The problem and its types.
    aggregated: The round's aggregation.
    message_type: Type of what clients are sent.
    run: (aggregator state, message at the server, message at the clients,
      clients) -> `RoundOutput`.

  Returns:
    `(<state@SERVER, message@SERVER, {datasets}@CLIENTS> -> RoundOutput@SERVER)`
    with one broadcast and, with the default aggregation, one aggregation.
  """
  state_type = aggregated.initialize.type_signature.result

  @tff.federated_computation(
      state_type, at_server(message_type), at_clients(federated.dataset_type)
  )
  def communication_round(state, message, datasets):
    there = tff.federated_broadcast(message)
    clients = tff.federated_map(federated.read_client, datasets)
    return tff.federated_zip(run(state, message, there, clients))

  return communication_round


class RoundsProcess(tff.templates.IterativeProcess):
  """An iterative process whose communication rounds can be run one by one.

  `next` does everything in one computation. `rounds` has the same rounds as
  computations of their own, by name; `build_round` has their type. `server` has
  what the server does between them, likewise by name. `solver` is FedIHGP's, if
  `next` runs FedIHGP.
  """

  def __init__(
      self,
      initialize_fn: tff.Computation,
      next_fn: tff.Computation,
      rounds: dict[str, tff.Computation],
      server: dict[str, tff.Computation] | None = None,
      solver: inverse_hessian.Solver | None = None,
  ):
    super().__init__(initialize_fn, next_fn)
    self._rounds = rounds
    self._server = server or {}
    self._solver = solver

  @property
  def rounds(self) -> dict[str, tff.Computation]:
    return dict(self._rounds)

  @property
  def server(self) -> dict[str, tff.Computation]:
    return dict(self._server)

  @property
  def solver(self) -> inverse_hessian.Solver | None:
    return self._solver
