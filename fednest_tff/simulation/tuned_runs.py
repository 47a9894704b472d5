"""Runs of one process with different hyper-parameters.

Step sizes are numbers in the state: the process is built and compiled once.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import os
from typing import cast

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.communication import communication_cost
from fednest_tff.simulation import (
    client_work,
    records,
    tables,
    training,
)
from fednest_tff.simulation.manifest import Manifest
from fednest_tff.simulation.tables import Row
from fednest_tff.simulation.training import Process, Trial
from fednest_tff.simulation.weights import has_weights
from fednest_tff.structures import Value

# Epochs in which work is counted; more if it is not the same in all of them.
_COUNTED_EPOCHS = 4
_COUNTED_IF_RANDOM = 20


class WithHparams:
  """A process whose initial state has certain hyper-parameters.

  Attributes:
    process: The process.
  """

  def __init__(self, process: Process, hparams: Mapping[str, float]):
    self.process = process
    self._hparams = hparams

  def initialize(self) -> Value:
    state = self.process.initialize()
    return set_hparams(self.process, state, self._hparams)

  def next(self, state: Value, cohort: Sequence[tf.data.Dataset]) -> Value:
    return self.process.next(state, cohort)

  def get_model_weights(self, state: Value) -> Value:
    return self.process.get_model_weights(state)


def tunable(process: Process) -> tff.learning.templates.LearningProcess:
  """The process that has hyper-parameters, also if a driver wraps it."""
  return getattr(process, 'process', process)


def set_hparams(
    process: Process, state: Value, hparams: Mapping[str, float]
) -> Value:
  """The state with these hyper-parameters changed.

  Args:
    process: A process with `get_hparams` and `set_hparams`.
    state: Its state.
    hparams: New values, by name.

  Returns:
    The new state.

  Raises:
    ValueError: If the process lacks one of them.
  """
  if not hparams:
    return state
  whole = tunable(process)
  known = whole.get_hparams(state)
  for name, value in hparams.items():
    if name not in known:
      raise ValueError(
          f'`{name}` is no hyper-parameter of the process, which has'
          f' {", ".join(known)}.'
      )
    known[name] = type(known[name])(value)
  return whole.set_hparams(state, known)


def epochs_of(rounds: int, rounds_per_epoch: int) -> int:
  """The epochs that fit into so many rounds; at least one."""
  return max(1, rounds // max(1, rounds_per_epoch))


def is_done(path: str, epochs: int) -> bool:
  """Whether a final run has all of its rows and its weights, undamaged.

  Args:
    path: The directory of the run.
    epochs: How many it is to have.

  Returns:
    Whether it has ended.

  Raises:
    NonFiniteError: If its last row is not finite: it was killed before it could
      say so.
    RunError: If it has more epochs than it is to have.
  """
  metrics = os.path.join(path, tables.METRICS)
  if not os.path.exists(metrics):
    return False
  if tables.is_complete(metrics, epochs):
    records.check_finite(tables.read_rows(metrics)[-1], metrics)
    return has_weights(path, epochs)
  table, _ = tables.read_table(path, Manifest(path))
  tables.check_length(path, table, epochs)
  return False


class TunedRuns:
  """Runs of one method on one trial, with hyper-parameters given to each.

  Attributes:
    trial: The trial.
    process: The method's process.
    rounds_per_epoch: Its communication rounds.
  """

  def __init__(self, trial: Trial, method: str):
    self.trial = trial
    self._method = method
    self.process = trial.build(method)
    self.rounds_per_epoch = communication_cost(tunable(self.process)).rounds

  @functools.cached_property
  def client_work(self) -> client_work.ClientWork:
    """What a client computes in an epoch, counted."""

    def build() -> Process:
      process = self.trial.build(self._method)
      known = tunable(process).get_hparams(process.initialize())
      # With step sizes of 0, clients stay where they are and compute as much.
      # With those of the initial state they may diverge: where step sizes are
      # functions of the epoch, the numbers in that state are 1.
      steps = {name: 0.0 for name in known if name.endswith('learning_rate')}
      return cast(Process, WithHparams(process, steps))

    return client_work.count_client_work(
        build, self.trial.cohort, _COUNTED_EPOCHS, _COUNTED_IF_RANDOM
    )

  def epochs(self, rounds: int) -> int:
    """The epochs that fit into so many rounds."""
    return epochs_of(rounds, self.rounds_per_epoch)

  def train(
      self,
      hparams: Mapping[str, float],
      rounds: int,
      rounds_per_evaluation: int,
      directory: str,
      method: str,
      seed: int,
      title: str,
      report: Callable[[int, dict[str, float]], None] | None = None,
  ) -> list[Row]:
    """Trains with these hyper-parameters; see `training.train`.

    Args:
      hparams: By name.
      rounds: Communication rounds.
      rounds_per_evaluation: From one evaluation to the next.
      directory: Of the run.
      method: For the records.
      seed: For the records.
      title: Of the progress bar.
      report: Is told the round and the numbers of each evaluation; may raise.

    Returns:
      The rows.
    """
    epoch = 0

    def cohort(number: int) -> Sequence[tf.data.Dataset]:
      nonlocal epoch
      epoch = number
      return self.trial.cohort(number)

    def evaluate(weights: Value) -> dict[str, float]:
      numbers = self.trial.evaluate(weights)
      if report is not None:
        report(epoch * self.rounds_per_epoch, numbers)
      return numbers

    process = cast(Process, WithHparams(self.process, hparams))
    period = self.epochs(rounds_per_evaluation)
    return training.train(
        self.trial._replace(
            build=lambda _: process, cohort=cohort, evaluate=evaluate
        ),
        method,
        self.epochs(rounds),
        directory,
        seed=seed,
        epochs_per_evaluation=period,
        epochs_per_checkpoint=max(period, self.epochs(100)),
        title=title,
    )
