"""Communication rounds, and the operations that an epoch is written in.

A round is one broadcast, one computation at the clients and one mean. A method
declares its rounds and writes its epoch once, as a function of an executor:

  mean = do.round(self.gradient, PointMessage(x, y, seed))
  q, norm = do.server(self.check, mean.value)
  do.measure(inner_gradient_norm=norm)

`InOneComputation` runs it while a `tff.federated_computation` is being traced:
values are `tff.Value`s, all rounds have the same clients, and a value that was
sent to them before is not sent again. `runtime.driver` runs it from Python, one
computation per round: values are numbers, and every round may have a different
cohort.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.federated.aggregation import Aggregation, Factory, Mean
from fednest_tff.federated.types import ProblemTypes, at_clients, at_server
from fednest_tff.vector_space import Structure

# A value at the server. `InOneComputation` has a `tff.Value`, `runtime.driver`
# numbers or a structure of them; both are used alike, and TFF declares no type.
ServerValue: TypeAlias = Any
# A message to the clients, a named tuple: of values at the server where it is
# sent, of tensors in the clients' computation.
Message: TypeAlias = Any
# The result of a client's computation: a value and metrics by name.
Answer: TypeAlias = tuple[Structure, Mapping[str, tf.Tensor]]
# The same, with the client's weight in this round.
WeightedAnswer: TypeAlias = tuple[
    Structure, Mapping[str, tf.Tensor], tf.Tensor
]


class PointMessage(NamedTuple):
  """A message with a point: (x, y), and the call's seed."""

  outer: Structure
  inner: Structure
  seed: tf.Tensor


class Round:
  """One communication round: a message down, local work, a mean up.

  Attributes:
    name: Unique among the rounds of a method.
    client_work: `(<message, client> -> <value, metrics>)`, or with the client's
      features at `message.outer` in the middle: `<message, features, client>`.
      A third result is the client's weight in this round, in place of
      `client.weight`.
    takes_features: Whether `client_work` takes features.
    message_type: Type of the message, unplaced.
    aggregation: How values are averaged.
  """

  def __init__(
      self,
      name: str,
      types: ProblemTypes,
      client_work: tff.Computation,
      argument: str = 'aggregator',
      factory: Factory | None = None,
      aggregation: Aggregation | None = None,
  ):
    """Declares a round.

    Args:
      name: Its name.
      types: The problem's types.
      client_work: The clients' computation.
      argument: The name of the argument that holds `factory`.
      factory: A `tff.aggregators` factory; `None` for the plain mean.
      aggregation: One that several rounds share, in place of `factory`.
    """
    self.name = name
    self.client_work = client_work
    signature = client_work.type_signature
    self.takes_features = len(signature.parameter) == 3
    self.message_type: tff.Type = signature.parameter[0]
    self.aggregation = aggregation or Aggregation(
        name, types, signature.result[0], argument, factory
    )

  def at_clients(
      self,
      state: tff.Value,
      message: Message,
      features: tff.Value | None,
      clients: tff.Value,
  ) -> Mean:
    """The local work and the mean, inside a federated computation."""
    arguments: tuple[tff.Value, ...] = (message, features, clients)
    if not self.takes_features:
      arguments = (message, clients)
    answers = list(tff.federated_map(self.client_work, arguments))
    weight = answers[2] if len(answers) == 3 else clients.weight
    return self.aggregation(state, answers[0], weight, answers[1])


class RoundOutput(NamedTuple):
  """The result of a round run by itself.

  Attributes:
    state: The aggregator's new state.
    value: The mean of the clients' values.
    metrics: Means of the clients' metrics, by name.
    measurements: Measurements of the aggregator by its argument's name; empty
      if it makes none.
  """

  state: ServerValue
  value: ServerValue
  metrics: dict[str, ServerValue]
  measurements: dict[str, ServerValue]


def build_round(types: ProblemTypes, round_: Round) -> tff.Computation:
  """A round as a computation with one broadcast and one aggregation.

  Args:
    types: The problem's types.
    round_: The round.

  Returns:
    `(<aggregator state@SERVER, message@SERVER, {datasets}@CLIENTS> ->
    RoundOutput@SERVER)`.
  """

  @tff.federated_computation(
      round_.aggregation.initialize.type_signature.result,
      at_server(round_.message_type),
      at_clients(types.dataset),
  )
  def communication_round(
      state: tff.Value, message: tff.Value, datasets: tff.Value
  ) -> tff.Value:
    sent = tff.federated_broadcast(message)
    clients = tff.federated_map(types.read_client, datasets)
    features = None
    if round_.takes_features:
      features = types.features_at_clients(sent.outer, clients)
    mean = round_.at_clients(state, sent, features, clients)
    return tff.federated_zip(
        RoundOutput(
            mean.state, mean.value, mean.metrics, _measurements(round_, mean)
        )
    )

  return communication_round


def _measurements(round_: Round, mean: Mean) -> dict[str, tff.Value]:
  if mean.measurements is None:
    return {}
  return {round_.aggregation.argument: mean.measurements}


class Averaged(NamedTuple):
  """The answer to a round: the mean value, and mean metrics by name."""

  value: ServerValue
  metrics: dict[str, ServerValue]


class Executor(Protocol):
  """The operations that a method's epoch is written in."""

  def round(
      self, round_: Round, message: Message, chance: float = 1.0
  ) -> Averaged:
    """Sends `message` to the clients and averages their answers.

    Args:
      round_: The round.
      message: A named tuple of values at the server.
      chance: The probability that the round is wanted, if it may be skipped
        (see `is_zero`).
    """
    ...

  def server(
      self, computation: tff.Computation, *arguments: ServerValue
  ) -> ServerValue:
    """The result of a computation at the server."""
    ...

  def measure(self, **metrics: ServerValue) -> None:
    """Adds values at the server to the epoch's metrics."""
    ...

  def is_zero(self, number: ServerValue) -> bool:
    """Whether `number`, at the server, is known to be 0.

    While a computation is being traced it is not known, so the answer is no:
    all rounds are traced, and those that are not wanted do no work.
    """
    ...


class SentRound(NamedTuple):
  """A round of a traced epoch.

  Attributes:
    round: The round.
    chance: The probability that it is wanted.
    sent: Types of the fields that clients had not been sent before.
  """

  round: Round
  chance: float
  sent: list[tff.Type]


class InOneComputation:
  """Runs an epoch inside a `tff.federated_computation`.

  Attributes:
    aggregators: The aggregators' states, by name.
    metrics: The epoch's metrics, by name.
    sent_rounds: The rounds so far.
  """

  def __init__(
      self,
      types: ProblemTypes,
      aggregators: dict[str, tff.Value],
      datasets: tff.Value,
  ):
    self._types = types
    self.aggregators = dict(aggregators)
    self.metrics: dict[str, tff.Value] = {}
    self.sent_rounds: list[SentRound] = []
    self.clients = tff.federated_map(types.read_client, datasets)
    # What clients were sent, by the id of the value at the server. The value is
    # kept as well, so that no other object gets its id.
    self._at_clients: dict[int, tuple[ServerValue, tff.Value]] = {}
    self._features: dict[int, tff.Value] = {}

  def _send(self, value: ServerValue, sent: list[tff.Type]) -> tff.Value:
    """Broadcasts `value`, unless clients have it already."""
    if isinstance(value, tuple) and not value:
      return value
    if id(value) not in self._at_clients:
      at_clients_ = tff.federated_broadcast(value)
      self._at_clients[id(value)] = (value, at_clients_)
      sent.append(at_clients_.type_signature.member)
    return self._at_clients[id(value)][1]

  def _features_at(self, x: tff.Value) -> tff.Value:
    if id(x) not in self._features:
      self._features[id(x)] = self._types.features_at_clients(x, self.clients)
    return self._features[id(x)]

  def round(
      self, round_: Round, message: Message, chance: float = 1.0
  ) -> Averaged:
    sent: list[tff.Type] = []
    at_clients_ = type(message)(*(self._send(v, sent) for v in message))
    self.sent_rounds.append(SentRound(round_, chance, sent))
    features = None
    if round_.takes_features:
      features = self._features_at(at_clients_.outer)
    name = round_.aggregation.name
    mean = round_.at_clients(
        self.aggregators[name], at_clients_, features, self.clients
    )
    self.aggregators[name] = mean.state
    self.measure(**_measurements(round_, mean))
    return Averaged(mean.value, mean.metrics)

  def server(
      self, computation: tff.Computation, *arguments: ServerValue
  ) -> ServerValue:
    if len(arguments) == 1:
      return tff.federated_map(computation, arguments[0])
    return tff.federated_map(computation, arguments)

  def measure(self, **metrics: ServerValue) -> None:
    self.metrics |= metrics

  def is_zero(self, number: ServerValue) -> bool:
    del number  # It is not known yet.
    return False
