"""What `experiments.reproduce.theory` measures, against NumPy."""

import json
import os

import numpy as np
import pytest

from experiments.reproduce import theory
from experiments.reproduce.quadratics import KINDS, Quadratics

pytestmark = pytest.mark.usefixtures('in_process')


@pytest.fixture(scope='module')
def bias(in_process_context):
  import tensorflow_federated as tff

  with tff.framework.get_context_stack().install(in_process_context):
    return theory.ihgp_bias(
        terms=(1, 2, 4, 8, 16), sampled_terms=(2,), num_draws=60
    )


@pytest.fixture(scope='module')
def inner(in_process_context):
  import tensorflow_federated as tff

  with tff.framework.get_context_stack().install(in_process_context):
    return theory.inner_convergence()


def test_gradients_are_those_of_the_losses():
  """f by its definition, y* from the closed form, differences in x."""
  case = Quadratics(num_clients=3, num_examples=2, dim=3, lanes=2)
  A, b, c = (v.mean(axis=1) for v in (case.A, case.b, case.c))
  A_, b_, _ = case.means

  def value(kind, x):
    def mean_square(v):
      return np.mean(np.sum(v**2, axis=-1), axis=0) / 2

    y = np.linalg.solve(A_, (x + b_)[..., None])[..., 0]
    inner = np.einsum('rij,ri,rj->r', A_, y, y) / 2 - np.sum(
        y * (x + b_), axis=-1
    )
    if kind == 'bilevel':
      return mean_square(y - c) + np.sum(x**2, axis=-1) / 2
    if kind == 'minimax':
      return mean_square(x - c) - inner
    if kind == 'compositional':
      mapped = (np.einsum('mrij,rj->mri', A, x) + b).mean(axis=0)
      return mean_square(mapped - c)
    return np.einsum('rij,ri,rj->r', A_, x, x) / 2 - np.sum(x * b_, axis=-1)

  x = np.random.default_rng(1).normal(size=(2, 3))
  for kind in KINDS:
    expected = np.zeros_like(x)
    for k in range(3):
      step = np.zeros_like(x)
      step[:, k] = 1e-4
      difference = value(kind, x + step) - value(kind, x - step)
      expected[:, k] = difference / 2e-4
    np.testing.assert_allclose(
        case.gradient(kind, x), expected, rtol=1e-6, err_msg=kind
    )


def test_truncated_bias_is_that_of_the_sum(bias):
  case = theory.bias_case()
  A, _, c = (v[0] for v in case.means)
  residual = np.eye(len(c)) - A / case.smoothness
  for k, N in enumerate(bias['N']):
    expected = np.linalg.norm(
        np.linalg.matrix_power(residual, N) @ np.linalg.solve(A, c)
    )
    np.testing.assert_allclose(bias['truncated'][k], expected, rtol=1e-9)
    # The mean over N' of the stochastic product is that sum.
    np.testing.assert_allclose(bias['stochastic'][k], expected, rtol=1e-9)
    power = [
        np.linalg.matrix_power(residual, n) @ c / case.smoothness
        for n in range(N)
    ]
    second = N * np.sum(np.square(power))
    np.testing.assert_allclose(
        bias['variance'][k],
        second - np.sum(np.square(np.sum(power, axis=0))),
        rtol=1e-9,
        atol=1e-9,
    )


def test_bounds_hold_and_conjugate_gradient_is_better(bias):
  assert np.all(np.array(bias['stochastic']) <= bias['bound'])
  assert max(bias['mean_error']) <= bias['error_bound']
  assert bias['cg'][-1] < 1e-3 * bias['truncated'][-1]
  # No draw of N' or of examples moves the mean: 4 standard errors.
  sampled = bias['sampled']
  exact = bias['stochastic'][bias['N'].index(2)]
  assert abs(sampled['bias'][0] - exact) <= 4 * sampled['error'][0]


def test_slope_of_a_power_law():
  epochs = [16, 32, 64, 128]
  values = [3 * k**-0.5 for k in epochs]
  np.testing.assert_allclose(theory.slope(epochs, values), -0.5)


def test_every_k_has_its_step_size_and_its_draws():
  case = theory.slopes_case(2)
  process, _ = theory.build_slopes_process(case, 'single_level', 64)
  datasets = case.datasets()
  moves = {}
  for exponent in (2, 4):
    state = process.initialize()._replace(
        epoch=np.int32(exponent * 2**16)
    )
    output = process.next(state, datasets)
    moves[exponent] = (
        np.linalg.norm(output.state.outer - state.outer)
        / float(output.metrics['hypergradient_norm'])
    )
  # alpha = 0.6 / sqrt(K) along h, up to a local correction of order alpha^2.
  np.testing.assert_allclose(moves[2], 0.3, rtol=0.15)
  np.testing.assert_allclose(moves[4], 0.15, rtol=0.08)


def test_slopes_of_single_level_problems():
  results = theory.gradient_slopes((4, 5, 6, 7), 4, ('single_level',))
  fitted = results['kinds']['single_level']['means']
  assert np.shape(fitted['values']) == (4, 4)
  assert -0.8 < fitted['slope'] < -0.25


def test_fed_inn_is_linear_and_fed_avg_stops_at_its_fixed_point(inner):
  assert inner['rate'] < 1
  np.testing.assert_allclose(inner['rate'], inner['predicted_rate'], rtol=1e-2)
  np.testing.assert_allclose(
      inner['floor'], inner['predicted_floor'], rtol=1e-6
  )
  assert inner['fed_inn'][-1] < 1e-6 * inner['floor']


def test_figure_and_claims(bias, inner, tmp_path):
  kinds = {}
  for kind, power in zip(KINDS, (-0.5, -0.4, -0.2, -1.0), strict=True):
    values = [[k**power for k in (16, 32)]] * 2
    fitted = {'values': values, 'slope': power, 'error': 0.01}
    kinds[kind] = {'means': fitted, 'late': fitted}
  results = {
      'bias': bias, 'slopes': {'K': [16, 32], 'kinds': kinds}, 'inner': inner
  }
  results = json.loads(json.dumps(results))
  found = theory.claims(results)
  assert all(
      set(claim) == {'figure', 'claim', 'measured', 'published', 'verdict'}
      for claim in found
  )
  assert [claim['verdict'] for claim in found] == [
      'holds', 'holds', 'holds weakly',
      'holds', 'holds weakly', 'does not hold', 'holds',
      'holds',
  ]
  path = theory.draw(results, os.path.join(tmp_path, 'theory'))
  assert 0 < os.path.getsize(path) < 200_000
