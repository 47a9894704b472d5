"""Runs: signals, event loop, rounds under the driver."""

import asyncio
import functools
import signal

import numpy as np
import pytest

from experiments import minimax
import fednest_tff
from fednest_tff import simulation
from fednest_tff.simulation import training
from tests.helpers import processes, quadratic


def test_signals_are_noted_and_handlers_come_back():
  before = signal.getsignal(signal.SIGTERM)
  with training._Signals() as signals:
    assert signal.getsignal(signal.SIGTERM) == before
    signals.start()
    signal.raise_signal(signal.SIGTERM)
    assert signals.received == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt) as raised:
      signal.raise_signal(signal.SIGHUP)
    assert raised.value.signal_number == signal.SIGHUP
  assert signal.getsignal(signal.SIGTERM) == before
  # What nohup ignores stays ignored.
  old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with training._Signals() as signals:
      signals.start()
      signal.raise_signal(signal.SIGHUP)
      assert signals.received is None
  finally:
    signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize(
    'error', [simulation.NonFiniteError('x is inf'), KeyError('other')]
)
def test_a_signal_counts_if_the_epoch_ends_with_an_error(error):
  """A comparison goes on after a run that diverged."""
  with pytest.raises(simulation.StoppedError) as stopped:
    with training._Signals() as signals:
      signals.start()
      signal.raise_signal(signal.SIGTERM)
      raise error
  assert stopped.value.signal_number == signal.SIGTERM
  assert str(error) in str(stopped.value)
  with pytest.raises(type(error)):
    with training._Signals() as signals:
      signals.start()
      raise error


def test_event_loop_comes_back():
  mine = asyncio.new_event_loop()
  asyncio.set_event_loop(mine)
  try:
    with training._event_loop() as loop:
      assert asyncio.get_event_loop() is loop is not mine
    assert asyncio.get_event_loop() is mine
  finally:
    mine.close()
    # As it was: the main thread makes a loop when it is asked for one.
    asyncio.set_event_loop_policy(None)


def test_signal_in_the_last_epoch_stops_what_follows(
    in_process, tmp_path, monkeypatch
):
  resolved = minimax.EXPERIMENT.resolve(
      dict(num_clients=2, dimension=2, epochs=2)
  )
  trial = minimax.EXPERIMENT.make_trial(resolved, 0)

  def cohort(epoch):
    if epoch == 2:
      signal.raise_signal(signal.SIGINT)
    return trial.cohort(epoch)

  with pytest.raises(simulation.StoppedError, match='epoch 2 of 2') as stopped:
    simulation.train(
        trial._replace(cohort=cohort), 'fedavg_s', 2, str(tmp_path)
    )
  assert stopped.value.signal_number == signal.SIGINT
  assert simulation.is_complete(str(tmp_path / 'metrics.csv'), 2)
  assert (tmp_path / 'checkpoints' / 'program_state_2.npz').exists()


class _Counting:
  """A driver that notes the rounds that it ran, and with how many clients.

  Not all clients take part in FedIHGP's rounds.
  """

  def __init__(self, process):
    self._driver = fednest_tff.build_driver(process)
    self.process = process
    self.initialize = process.initialize
    self.get_model_weights = process.get_model_weights
    self.epochs = []

  def next(self, state, cohort):
    rounds = []

    def sample(epoch, name, index):
      del epoch, index
      clients = cohort[:2] if name == 'ihgp_product' else cohort
      rounds.append((name, len(clients)))
      return clients

    output = self._driver.next(state, sample)
    self.epochs.append(rounds)
    return output


N = 4


@functools.cache
def _fed_out():
  """FedOut, whose FedIHGP stops at N' < N."""
  return processes.build_flat(
      fednest_tff.build_fed_out,
      quadratic.build_problem(),
      outer_learning_rate=0.1,
      smoothness=4.0,
      neumann_terms=N,
  )


def test_rounds_of_the_driver_are_on_record(in_process, tmp_path):
  """A random stop: `metrics.csv` has the rounds that were really run."""
  process = _fed_out()
  driver = _Counting(process)
  datasets = quadratic.to_datasets(quadratic.make_clients())
  trial = simulation.Trial(
      lambda method: driver, lambda epoch: datasets, lambda weights: {}, 3
  )
  rows = simulation.train(trial, 'fed_out', 5, str(tmp_path / 'whole'))
  numbers = [len(rounds) for rounds in driver.epochs]
  # Three rounds and N' products; the compiled epoch always has N - 1.
  assert len(set(numbers)) > 1
  assert all(3 <= number <= 3 + N - 1 for number in numbers)
  assert fednest_tff.communication_cost(process).rounds == 3 + N - 1
  assert [row['communication_rounds'] for row in rows] == list(
      np.cumsum(numbers)
  )
  costs = {
      name: fednest_tff.communication_cost(computation)
      for name, computation in process.rounds.items()
  }
  for column in ('bytes_up', 'bytes_down'):
    sent = [
        sum(getattr(costs[name], column) * count for name, count in rounds)
        for rounds in driver.epochs
    ]
    assert [row[column] for row in rows] == list(np.cumsum(sent))
  # Stopped and started again, it counts on.
  for epochs in (2, 5):
    again = simulation.train(trial, 'fed_out', epochs, str(tmp_path / 'parts'))
  for row in (*rows, *again):
    del row['seconds']
  assert again == rows


def test_what_one_round_of_the_driver_sends():
  """Bytes of vectors of float64 and of single numbers, counted by hand."""
  costs = {
      name: fednest_tff.communication_cost(computation)
      for name, computation in _fed_out().rounds.items()
  }
  assert all(cost.rounds == 1 for cost in costs.values())
  x, y, number, seed, index = 8 * quadratic.DX, 8 * quadratic.DY, 8, 16, 4
  weight, loss, squared_change = number, number, number
  assert {name: cost.bytes_up for name, cost in costs.items()} == {
      'ihgp_gradient': y + weight,
      'ihgp_product': y + weight,
      'hypergradient': x + weight + loss,
      'outer_update': x + weight + squared_change,
  }
  p = v = y
  h, step_size = x, number
  assert {name: cost.bytes_down for name, cost in costs.items()} == {
      'ihgp_gradient': x + y + seed,
      'ihgp_product': x + y + v + index + seed,
      'hypergradient': x + y + p + seed,
      'outer_update': x + y + h + step_size + seed,
  }


def test_other_step_sizes_are_told(in_process, tmp_path, caplog):
  """The run goes on with its own; the same ones cause no warning."""
  resolved = minimax.EXPERIMENT.resolve(dict(num_clients=2, dimension=2))

  def train(epochs, **settings):
    vars(resolved).update(settings)
    trial = minimax.EXPERIMENT.make_trial(resolved, 0)
    return simulation.train(trial, 'fedavg_s', epochs, str(tmp_path))

  caplog.set_level('WARNING')
  before = train(2)
  assert train(2) == before and not caplog.messages
  assert train(2, outer_learning_rate=0.25) == before
  (message,) = caplog.messages
  assert f'{str(tmp_path)!r} holds a run' in message
  assert '`outer_learning_rate` was 0.05 and is 0.25' in message
  assert 'inner' not in message
