"""Gradients and products are counted as the formulas of the methods say."""

import pytest

import fednest_tff
from fednest_tff import simulation
from fednest_tff.simulation import tuned_runs
from tests.helpers import quadratic

RUNTIME = 'in_process'
TAU, TAU_X, T, N = 3, 2, 2, 3


def count(method, **options):
  datasets = quadratic.to_datasets(
      quadratic.make_clients(num_clients=2, examples=(4,))
  )
  return simulation.count_client_work(
      lambda: fednest_tff.build(
          quadratic.build_problem(), method, inner_learning_rate=0.1,
          outer_learning_rate=0.1, **options,
      ),
      lambda epoch: datasets,
  )


def test_simfbo():
  work = count('simfbo', linear_learning_rate=0.1, local_steps=TAU)
  # A step has a gradient of f, and a pass over g with both products.
  assert work == (TAU, TAU, 4 * TAU, 4 * TAU)
  assert work.example_gradients == 4 * TAU + 2 * 4 * TAU


def test_fednest():
  work = count(
      'fednest', inner_local_steps=TAU, outer_local_steps=TAU_X,
      inner_rounds=T, neumann_terms=N, ihgp='truncated', batch_size=2,
  )
  # FedInn: q, and two gradients in all steps but the first. FedIHGP: grad_y f
  # and N - 1 products. FedOut: grad_x f and a product, then like FedInn.
  inner, outer = 2 * (TAU - 1), 2 * (TAU_X - 1)
  assert work.gradients == T * (1 + inner) + 1 + 1 + outer
  assert work.products == N - 1 + 1
  # Minibatches have two examples, all else has four.
  assert work.gradient_examples == T * (4 + 2 * inner) + 4 + 4 + 2 * outer
  assert work.product_examples == 4 * N


def test_random_work_is_counted_for_longer():
  """FedIHGP draws N' from 0 to N - 1, the same for all clients."""
  seen = []
  datasets = quadratic.to_datasets(
      quadratic.make_clients(num_clients=2, examples=(4,))
  )

  def count_epochs(ihgp):
    seen.clear()
    return simulation.count_client_work(
        lambda: fednest_tff.build(
            quadratic.build_problem(), 'fednest', inner_learning_rate=0.01,
            outer_learning_rate=0.01, inner_local_steps=TAU, neumann_terms=8,
            outer_local_steps=TAU_X, inner_rounds=T, ihgp=ihgp, seed=1,
        ),
        lambda epoch: seen.append(epoch) or datasets,
        epochs=3,
        epochs_if_random=30,
    )

  assert count_epochs('truncated').products == 8
  assert seen == [1, 2, 3]
  # A product of FedOut, and N' of FedIHGP, 3.5 on average; the standard
  # deviation of the mean of 30 draws is 0.42.
  assert count_epochs('stochastic').products == pytest.approx(4.5, abs=1.2)
  assert seen == [*range(1, 31)]


def test_unequal_cohorts_are_counted_for_longer():
  """The mean is over clients, not over epochs."""
  clients = [
      quadratic.to_datasets(
          quadratic.make_clients(num_clients=k, examples=(examples,))
      )
      for k, examples in [(1, 8), (3, 4)]
  ]
  seen = []
  work = simulation.count_client_work(
      lambda: fednest_tff.build(
          quadratic.build_problem(), 'simfbo', inner_learning_rate=0.01,
          linear_learning_rate=0.01, outer_learning_rate=0.01, local_steps=TAU,
      ),
      lambda epoch: seen.append(epoch) or clients[epoch % 2],
      epochs=2,
      epochs_if_random=6,
  )
  assert seen == [*range(1, 7)]
  mean = (8 + 3 * 4) / 4
  assert work == (TAU, TAU, mean * TAU, mean * TAU)


def test_an_epoch_without_clients_is_refused():
  with pytest.raises(ValueError, match='Epoch 1 has no clients'):
    simulation.count_client_work(
        lambda: fednest_tff.build(
            quadratic.build_problem(), 'simfbo', inner_learning_rate=0.1,
            linear_learning_rate=0.1, outer_learning_rate=0.1,
        ),
        lambda epoch: [],
    )


def test_random_work_of_tuned_runs_is_counted_for_longer():
  datasets = quadratic.to_datasets(
      quadratic.make_clients(num_clients=2, examples=(4,))
  )
  seen = []
  trial = simulation.Trial(
      lambda method: fednest_tff.build(
          quadratic.build_problem(), method, inner_learning_rate=0.01,
          outer_learning_rate=0.01, neumann_terms=8, ihgp='stochastic', seed=1,
      ),
      lambda epoch: seen.append(epoch) or datasets,
      lambda weights: {},
      2,
  )
  found = tuned_runs.TunedRuns(trial, 'fednest').client_work
  assert seen == [*range(1, 21)]
  # As above; the standard deviation of the mean of 20 draws is 0.51.
  assert found.products == pytest.approx(4.5, abs=1.5)


def test_work_of_tuned_runs_is_counted_whatever_the_steps():
  """Steps of a schedule are as large as it says until they are tuned."""
  datasets = quadratic.to_datasets(
      quadratic.make_clients(num_clients=2, examples=(4,))
  )
  huge = dict.fromkeys(
      ['inner_learning_rate', 'linear_learning_rate', 'outer_learning_rate'],
      lambda epoch: 1e200,
  )
  trial = simulation.Trial(
      lambda method: fednest_tff.build(
          quadratic.build_problem(), method, local_steps=TAU, **huge
      ),
      lambda epoch: datasets,
      lambda weights: {},
      2,
  )
  found = tuned_runs.TunedRuns(trial, 'simfbo').client_work
  assert found == (TAU, TAU, 4 * TAU, 4 * TAU)
