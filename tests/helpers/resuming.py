"""Runs that are stopped and go on where they stopped."""

import functools
import signal
from unittest import mock

import pytest

from fednest_tff import simulation
from fednest_tff.simulation import training
from tests.helpers import processes
from tests.helpers.killable import without_seconds

EPOCHS = 3
STOP = 2  # The epoch during which a signal comes.


class _Noting:
  """A process that notes its states."""

  def __init__(self, process):
    self.process = process
    self.initialize = process.initialize
    self.get_model_weights = process.get_model_weights
    self.states = []

  def next(self, state, cohort):
    output = self.process.next(state, cohort)
    self.states.append(output.state)
    return output


def _train(trial, method, directory):
  """The states that a run computes, until it ends or is stopped."""
  noting = _Noting(trial.build(method))
  trial = trial._replace(build=lambda _: noting)
  try:
    simulation.train(trial, method, EPOCHS, str(directory))
  except simulation.StoppedError:
    assert len(noting.states) == STOP
  return noting.states


def assert_goes_on(trial, method, directory):
  """A run that was stopped and started again ends like one that was not.

  Args:
    trial: What is run. Its process may be the same whenever it is built.
    method: The method.
    directory: An empty one.
  """
  def cohort(epoch):
    if epoch == STOP:
      signal.raise_signal(signal.SIGINT)
    return trial.cohort(epoch)

  whole, parts = directory / 'whole', directory / 'parts'
  # The cost of the same process is read off three times.
  cost = functools.cache(training.communication_cost)
  with mock.patch.object(training, 'communication_cost', cost):
    _assert_goes_on(trial, trial._replace(cohort=cohort), method, whole, parts)


def _assert_goes_on(trial, stopped, method, whole, parts):
  expected = _train(trial, method, whole)
  assert len(expected) == EPOCHS
  _train(stopped, method, parts)
  with pytest.raises(AssertionError):
    processes.assert_equal(expected[STOP - 1], expected[-1])
  assert without_seconds(parts / 'metrics.csv') != without_seconds(
      whole / 'metrics.csv'
  )
  found = _train(trial, method, parts)
  assert len(found) == EPOCHS - STOP
  processes.assert_equal(found[-1], expected[-1])
  assert without_seconds(parts / 'metrics.csv') == without_seconds(
      whole / 'metrics.csv'
  )
