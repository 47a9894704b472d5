"""The solutions of `closed_form` against derivatives and long runs."""

import numpy as np
import pytest

from experiments import closed_form
import fednest_tff

RUNTIME = 'in_process'


def _run(case, epochs, method='fednest', **options):
  process = fednest_tff.build(case.problem, method, **options)
  state = process.initialize()
  for _ in range(epochs):
    state = process.next(state, case.datasets).state
  return process.get_model_weights(state)


def _elements(case, name):
  """A leaf of all examples, [clients, examples, ...]."""
  return np.array([
      dataset.batch(10**6).get_single_element()[name]
      for dataset in case.datasets
  ])


def _slope(function, at, size=1e-5):
  """The gradient by central differences."""
  return np.array([
      (function(at + size * unit) - function(at - size * unit)) / (2 * size)
      for unit in np.eye(len(at))
  ])


def _saddle_value(case, ridge):
  """The paper's mean_i f_i, with A_i as matrices."""
  b, t = (_elements(case, name)[:, 0] for name in 'bt')

  def value(x, y):
    total = 0.0
    for b_i, t_i in zip(b, t, strict=True):
      a_i = t_i * np.eye(len(x))
      total -= y @ y / 2 - b_i @ y + y @ a_i @ x
    return total / len(b) + ridge / 2 * x @ x

  return value


@pytest.mark.parametrize('centred', [True, False])
def test_saddle_point(centred):
  case = closed_form.saddle(7, 4, 3.0, 2.0, 1.0, centred, seed=1)
  assert len(case.datasets) == 7
  assert case.outer.shape == case.inner.shape == (4,)
  value = _saddle_value(case, ridge=2.0)
  slope_x = _slope(lambda x: value(x, case.inner), case.outer)
  slope_y = _slope(lambda y: value(case.outer, y), case.inner)
  np.testing.assert_allclose(slope_x, 0, atol=1e-8)
  np.testing.assert_allclose(slope_y, 0, atol=1e-8)
  if centred:
    np.testing.assert_allclose(case.inner, 0, atol=1e-14)
    np.testing.assert_allclose(case.outer, 0, atol=1e-14)
  else:
    assert np.linalg.norm(case.outer) > 0.1


def test_saddle_loss_is_the_papers():
  case = closed_form.saddle(5, 3, 2.0, seed=3)
  value = _saddle_value(case, ridge=10.0)
  x, y = np.random.default_rng(0).normal(size=(2, 3))
  losses = [
      case.problem.outer_loss(x, y, batch)
      for dataset in case.datasets for batch in dataset.batch(1)
  ]
  np.testing.assert_allclose(np.mean(losses), value(x, y), rtol=1e-12)


def test_saddle_data_follow_their_parameters():
  case = closed_form.saddle(200, 50, spread=4.0, seed=2)
  b, t = (_elements(case, name)[:, 0] for name in 'bt')
  np.testing.assert_allclose(b.std(), 4.0, rtol=0.03)
  np.testing.assert_allclose(b.mean(axis=0), 0, atol=1e-12)
  assert 0 < t.min() and t.max() < 0.1 and abs(t.mean() - 0.05) < 0.005


@pytest.mark.usefixtures('compiled')
def test_fednest_goes_to_a_saddle_point_away_from_zero():
  case = closed_form.saddle(coupling=1.0, ridge=2.0, centred=False)
  weights = _run(
      case,
      60,
      outer_learning_rate=0.2,
      inner_learning_rate=0.3,
      inner_local_steps=3,
  )
  np.testing.assert_allclose(weights.outer, case.outer, atol=1e-9)
  np.testing.assert_allclose(weights.inner, case.inner, atol=1e-9)


def _portfolio_value(case):
  """The clients' mean lambda times the variance, minus the mean, of R."""
  returns = _elements(case, 'returns')
  aversion = _elements(case, 'aversion').mean()

  def value(x):
    gains = (returns @ x).ravel()
    return aversion * np.var(gains) - np.mean(gains)

  return value


@pytest.mark.parametrize('spread', [0.0, 1.0])
def test_portfolio_solution(spread):
  case = closed_form.portfolio(4, 3, 20, 2.0, spread, seed=5)
  value = _portfolio_value(case)
  assert np.linalg.norm(case.outer) > 0.05
  np.testing.assert_allclose(_slope(value, case.outer), 0, atol=1e-8)
  for other in case.outer + 0.01 * np.eye(3):
    assert value(other) > value(case.outer)
  gains = (_elements(case, 'returns') @ case.outer).ravel()
  np.testing.assert_allclose(
      case.inner, [np.mean(gains), np.mean(gains**2)], rtol=1e-12
  )


def test_portfolio_clients_differ_in_mean_covariance_and_aversion():
  case = closed_form.portfolio(3, 4, 2000, 1.5, seed=1)
  returns = _elements(case, 'returns')
  aversion = _elements(case, 'aversion')[:, 0]
  np.testing.assert_allclose(aversion.mean(), 1.5)
  assert np.ptp(aversion) > 0.2
  means = returns.mean(axis=1)
  covariances = np.array([np.cov(client.T) for client in returns])
  assert np.ptp(means, axis=0).max() > 0.3
  assert np.abs(covariances[0] - covariances[1]).max() > 0.3


def test_fednest_solves_the_portfolio_and_lfednest_does_not():
  case = closed_form.portfolio(3, 3, 20)
  # With this step few epochs do.
  options = dict(
      outer_learning_rate=0.55, inner_learning_rate=1.0, inner_local_steps=1
  )
  weights = _run(case, 30, **options)
  np.testing.assert_allclose(weights.outer, case.outer, atol=1e-8)
  np.testing.assert_allclose(weights.inner, case.inner, atol=1e-8)
  # Each client with its own aversion and moments: another portfolio.
  weights = _run(case, 30, 'lfednest', **options)
  assert np.linalg.norm(weights.outer - case.outer) > 0.02
