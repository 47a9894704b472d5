"""The driver: runs a process round by round.

`process.next` runs a whole epoch as one computation on one cohort. Algorithms 2
to 4 draw a new cohort for every round instead, and a runtime on several
machines takes one round at a time. Given the same cohort in every round, the
driver returns what `next` returns: both run the method's own `epoch`.
"""

from collections.abc import Callable, Sequence
import functools

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.federated.process import (
    NestedProcess,
    NestedState,
    client_work_metrics,
    run_epoch,
)
from fednest_tff.federated.rounds import Averaged, Message, Round, ServerValue
from fednest_tff.runtime.communication import (
    CommunicationCost,
    communication_cost,
)
from fednest_tff.runtime.shares import count_elements

# Datasets, or the names of clients whose data the nodes of a cluster have.
Cohort = Sequence[tf.data.Dataset | str | int | bytes]
# (epoch, name of the round, its number in the epoch from 0) -> datasets.
Sampler = Callable[[int, str, int], Cohort]


class RoundByRound:
  """Runs an epoch from Python, each round on its cohort.

  Attributes:
    aggregators: The aggregators' states, by name.
    metrics: The epoch's metrics, by name.
    num_rounds: Rounds that were run.
    bytes_up: Bytes that all clients have sent.
    bytes_down: Bytes that all clients have received.
    counts: Numbers of clients and examples of the first round.
  """

  def __init__(
      self,
      rounds: dict[str, tff.Computation],
      aggregators: dict[str, ServerValue],
      cohort: Sampler,
      epoch: int,
      cost: Callable[[str], CommunicationCost],
  ):
    """Prepares an epoch.

    Args:
      rounds: The rounds as computations, by name.
      aggregators: The aggregators' states, by name.
      cohort: The clients of each round.
      epoch: The number of the epoch, for `cohort`.
      cost: From the name of a round to its cost for one client.
    """
    self._cost = cost
    self._rounds = rounds
    self._cohort = cohort
    self._epoch = epoch
    self.aggregators = dict(aggregators)
    self.metrics: dict[str, ServerValue] = {}
    self.num_rounds = 0
    self.bytes_up = 0
    self.bytes_down = 0
    self.counts: dict[str, np.int64] = {}

  def round(
      self, round_: Round, message: Message, chance: float = 1.0
  ) -> Averaged:
    del chance  # It is wanted, or else the epoch would not ask.
    clients = list(self._cohort(self._epoch, round_.name, self.num_rounds))
    if not self.counts:
      self.counts = dict(
          num_clients=np.int64(len(clients)),
          num_examples=np.int64(_count_examples(clients)),
      )
    name = round_.aggregation.name
    output = self._rounds[round_.name](
        self.aggregators[name], message, clients
    )
    self.num_rounds += 1
    cost = self._cost(round_.name)
    self.bytes_up += cost.bytes_up * len(clients)
    self.bytes_down += cost.bytes_down * len(clients)
    self.aggregators[name] = output.state
    self.measure(**output.measurements)
    return Averaged(output.value, dict(output.metrics))

  def server(
      self, computation: tff.Computation, *arguments: ServerValue
  ) -> ServerValue:
    return computation(*arguments)

  def measure(self, **metrics: ServerValue) -> None:
    self.metrics |= metrics

  def is_zero(self, number: ServerValue) -> bool:
    return int(number) == 0


def _count_examples(clients: Cohort) -> int:
  """The number of all clients' examples."""
  context = tff.framework.get_context_stack().current
  if hasattr(context, 'count_examples'):
    return context.count_examples(clients)
  return sum(map(count_elements, clients))


class Driver:
  """Runs a process round by round; see `build_driver`.

  Attributes:
    process: The process.
  """

  def __init__(self, process: NestedProcess):
    self.process = process
    self._cost = functools.cache(
        lambda name: communication_cost(process.rounds[name])
    )

  @property
  def get_model_weights(self) -> tff.Computation:
    return self.process.get_model_weights

  def initialize(self) -> NestedState:
    """The process's initial state."""
    return self.process.initialize()

  def next(
      self, state: NestedState, cohort: Cohort | Sampler
  ) -> tff.learning.templates.LearningProcessOutput:
    """One epoch.

    Args:
      state: From `initialize`, or from `next` of this or of the process.
      cohort: Clients' datasets for all rounds, or a function `(epoch, name of
        the round, its number in the epoch) -> datasets` that is asked before
        every round. For runs that can be repeated, it should depend on nothing
        else.

    Returns:
      The new state and the metrics, as the process's `next` gives them, and
      `communication_rounds`, `bytes_up` and `bytes_down`: the rounds that were
      run, and the bytes of all their clients. Losses, norms
      and drifts are those of the cohorts that they were measured on, the
      numbers of clients and examples those of the first round.
    """
    sampler = cohort if callable(cohort) else lambda *_: cohort
    do = RoundByRound(
        self.process.rounds,
        dict(state.aggregators),
        sampler,
        int(state.epoch),
        self._cost,
    )
    after = run_epoch(do, self.process.method, self.process.plan, state)
    do.measure(**do.counts)
    do.measure(
        client_work=client_work_metrics(do.metrics),
        communication_rounds=np.int64(do.num_rounds),
        bytes_up=np.int64(do.bytes_up),
        bytes_down=np.int64(do.bytes_down),
    )
    return tff.learning.templates.LearningProcessOutput(
        after._replace(aggregators=type(state.aggregators)(do.aggregators)),
        do.metrics,
    )


def build_driver(process: NestedProcess) -> Driver:
  """A driver for a process of any method and problem.

  It runs in TFF's current context. FedIHGP stops at N'; the rounds beyond it,
  which `next` runs with vectors of zeros, are not run. An aggregator that keeps
  a state, if one is given for gradients, does not see those zeros, and that is
  the only difference from `next`.

  Args:
    process: From `fednest_tff.build` or from a builder of this library.

  Returns:
    A `Driver`, with `initialize` and `next`.
  """
  if not isinstance(process, NestedProcess):
    raise ValueError(
        '`process` must come from `fednest_tff.build` or a builder of'
        f' fednest_tff; got {process!r}.'
    )
  return Driver(process)
