"""What `experiments.reproduce.theory` measures, against NumPy."""

import json
import os

import numpy as np
import pytest
import tensorflow as tf

from experiments.reproduce import quadratics, theory, theory_report
from experiments.reproduce.quadratics import KINDS, Quadratics, multiply
import fednest_tff

pytestmark = pytest.mark.usefixtures('compiled')


@pytest.fixture(scope='module')
def bias(compiled_context):
  import tensorflow_federated as tff

  with tff.framework.get_context_stack().install(compiled_context):
    return theory.ihgp_bias(
        terms=(1, 2, 4, 8, 16), sampled_terms=(2,), num_draws=200
    )


@pytest.fixture(scope='module')
def inner(compiled_context):
  import tensorflow_federated as tff

  with tff.framework.get_context_stack().install(compiled_context):
    return theory.inner_convergence()


def _client_losses(case, problem):
  """f and g of x and y: the problem's own losses, the mean over clients."""
  batches = [
      {'A': A, 'b': b, 'c': c}
      for A, b, c in zip(case.A, case.b, case.c, strict=True)
  ]

  def mean(loss):
    return lambda x, y: sum(loss(x, y, v) for v in batches) / len(batches)

  return mean(problem.outer_loss), mean(problem.inner_loss)


def _inner_minimum(g, x):
  """y*(x) of a g that is quadratic in y: a Newton step from y = 0."""

  def gradient(y):
    with tf.GradientTape() as tape:
      tape.watch(y)
      value = g(x, y)
    return tf.reshape(tape.gradient(value, y), [-1])

  size = x.shape.num_elements()
  units = np.eye(size).reshape(-1, *x.shape)
  at_zero = gradient(tf.zeros_like(x))
  H = tf.stack([gradient(tf.constant(e)) - at_zero for e in units])
  assert np.linalg.eigvalsh(H).min() > 0
  return tf.reshape(tf.linalg.solve(H, -at_zero[:, None]), x.shape)


@pytest.mark.parametrize('kind', KINDS)
def test_gradients_are_those_of_the_losses(kind):
  """f(x, y*(x)) of the losses that clients hold, differentiated as a whole."""
  case = Quadratics(num_clients=3, num_examples=2, dim=3, lanes=2)
  f, g = _client_losses(case, case.problem(kind))
  x = tf.constant(np.random.default_rng(1).normal(size=(2, 3)))
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = None if kind == 'single_level' else _inner_minimum(g, x)
    value = f(x, y)
  np.testing.assert_allclose(
      case.gradient(kind, x.numpy()), tape.gradient(value, x), rtol=1e-9
  )
  if kind in ('bilevel', 'minimax'):
    np.testing.assert_allclose(case.inner_solution(x.numpy()), y, rtol=1e-9)


def test_truncated_bias_is_that_of_the_sum(bias):
  case = quadratics.bias_case()
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


def test_mean_of_calls_on_single_examples_is_exact(bias):
  """Every entry within 4 standard errors, and the size within a tenth."""
  case = quadratics.bias_case()
  A, _, c = (v[0] for v in case.means)
  (found,) = bias['sampled']['means']
  expected = (A / case.smoothness - 2 * np.eye(len(c))) @ c / case.smoothness
  errors = np.abs(np.array(found['p']) - expected)
  assert np.all(errors <= 4 * np.sqrt(found['squares']))
  np.testing.assert_allclose(
      np.dot(found['p'], expected) / np.dot(expected, expected), 1, atol=0.1
  )
  np.testing.assert_allclose(
      bias['sampled']['bias'][0],
      np.linalg.norm(found['p'] + np.linalg.solve(A, c)),
  )


def test_variance_in_closed_form_is_that_of_all_calls(bias):
  exact = bias['exact']
  assert exact['N'][: len(bias['N'])] == bias['N']
  np.testing.assert_allclose(
      exact['variance'][: len(bias['N'])], bias['variance'], rtol=1e-9,
      atol=1e-9,
  )


def test_slope_of_a_power_law():
  epochs = [16, 32, 64, 128]
  values = [3 * k**-0.5 for k in epochs]
  np.testing.assert_allclose(theory.slope(epochs, values), -0.5)


@pytest.mark.parametrize(
    'kind, calls',
    (('bilevel', 2), ('minimax', 2), ('compositional', 1), ('single_level', 0)),
)
def test_step_sizes_and_terms_of_every_kind(kind, calls, monkeypatch):
  """alpha = 0.6 / sqrt(K), beta = 4 alpha / T, and b <= K^-1/4."""
  monkeypatch.setattr(
      fednest_tff, 'build', lambda problem, **given: (problem, given)
  )
  case = quadratics.slopes_case(2)
  (problem, given), terms = theory.build_slopes_process(case, kind, 256)
  assert problem.kind == kind
  bias = case.condition * case.lipschitz * (1 - 1 / case.condition) ** terms
  assert bias <= 0.25 < bias / (1 - 1 / case.condition)
  alpha = given.pop('outer_learning_rate')
  beta = given.pop('inner_learning_rate') if calls else None
  for epoch, expected in ((4 * 2**16 + 15, 0.15), (8 * 2**16, 0.0375)):
    np.testing.assert_allclose(alpha(tf.constant(epoch)), expected)
    if calls:
      np.testing.assert_allclose(
          beta(tf.constant(epoch)), 4 * expected / calls
      )
  inner = {'inner_rounds': calls, 'inner_local_steps': 2} if calls else {}
  assert given == inner | dict(
      outer_local_steps=2, divide_by_local_steps=True, batch_size=1,
      gradient_batch_size=1, neumann_terms=terms, smoothness=case.smoothness,
  )


def test_bilevel_epochs_are_those_of_their_k(in_process):
  """Two epochs of exact clients, by hand; N' may be any."""
  case = Quadratics(num_clients=2, num_examples=1, noise=0.0, lanes=2)
  process, terms = theory.build_slopes_process(case, 'bilevel', 16)
  A, b, c = case.means
  for exponent, alpha in ((2, 0.3), (4, 0.15)):
    state = process.initialize()._replace(epoch=np.int32(exponent * 2**16))
    x, y = state.outer, state.inner
    for _ in range(4):  # T = 2 calls of tau = 2 steps of beta / 2 = alpha
      y = y - alpha * (multiply(A, y) - x - b)
    p, distances = terms / case.smoothness * (y - c), []
    found = process.next(state, case.datasets()).state
    for _ in range(terms):
      first = x - alpha / 2 * (x + p)
      expected = first - alpha / 2 * (first + p)
      distances.append(np.abs(found.outer - expected).max())
      p = p - multiply(A, p) / case.smoothness
    assert min(distances) < 1e-12
    np.testing.assert_allclose(found.inner, y, rtol=1e-12)


def test_slopes_of_single_level_problems():
  results = theory.gradient_slopes((4, 7), 4, ('single_level',))
  fitted = results['kinds']['single_level']['means']
  assert np.shape(fitted['values']) == (4, 2)
  assert -0.55 < fitted['slope'] < -0.3


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
      'holds', 'holds', 'does not hold',
      'holds', 'holds weakly', 'does not hold', 'holds',
      'holds',
  ]
  path = theory.draw(results, os.path.join(tmp_path, 'theory'))
  assert 0 < os.path.getsize(path) < 200_000


def _bias_rows(**changes):
  """Measurements for which every claim holds, but for `changes`."""
  rows = {
      'N': [1, 2],
      'rate': 0.5,
      'bound': [1.0, 0.5],
      'stochastic': [0.9, 0.4],
      'error_bound': 2.0,
      'mean_error': [1.0, 1.9],
      'variance': [0.0, 1.0],
      'variance_bound': 4.0,
      'printed_variance_bound': 8.0,
      'exact': {'N': [1, 2, 4, 8], 'variance': [0.0, 1.0, 1.5, 1.6]},
      'sampled': {'N': [2], 'bias': [0.7], 'error': [0.1]},
  }
  return rows | changes


def _exact(*variance):
  return {'N': [1, 2, 4, 8], 'variance': list(variance)}


@pytest.mark.parametrize(
    'changes, verdicts',
    (
        ({}, 'holds, holds, holds'),
        ({'stochastic': [1.1, 0.4]}, 'does not hold, holds, holds'),
        (
            {'sampled': {'N': [2], 'bias': [0.9], 'error': [0.1]}},
            'does not hold, holds, holds',
        ),
        ({'mean_error': [1.0, 2.1]}, 'holds, does not hold, holds'),
        ({'variance': [0.0, 4.1]}, 'holds, holds, does not hold'),
        ({'exact': _exact(0, 1, 2, 3.9)}, 'holds, holds, holds weakly'),
        ({'exact': _exact(0, 1, 4.1, 4.2)}, 'holds, holds, does not hold'),
        ({'exact': _exact(0, 3, 6, 12)}, 'holds, holds, does not hold'),
    ),
)
def test_verdicts_on_the_bias(changes, verdicts):
  found = theory_report._judge_bias(_bias_rows(**changes))
  assert ', '.join(claim['verdict'] for claim in found) == verdicts


def test_the_least_n_above_the_bound_is_named():
  rows = _bias_rows(exact=_exact(0, 3, 6, 12))
  measured = theory_report._judge_bias(rows)[-1]['measured']
  assert measured == pytest.approx({
      'variance/bound at N = 2': 0.25,
      'at N = 4 (computed, the least N tried above it)': 1.5,
      'at N = 8 (with l_g1 as printed)': 1.5,
      'variance grows as N to the power': 1.0,
  })


@pytest.mark.parametrize(
    'rate, end, verdict',
    (
        (0.5, 1e-9, 'holds'),
        (0.5, 1e-3, 'holds weakly'),  # not far enough below the floor
        (0.6, 1e-9, 'holds weakly'),  # not the rate computed
        (0.5, 2.0, 'does not hold'),
        (1.0, 1e-9, 'does not hold'),
    ),
)
def test_verdicts_on_the_inner_problem(rate, end, verdict):
  inner = {
      'rate': rate, 'predicted_rate': 0.5, 'floor': 1.0,
      'predicted_floor': 1.0, 'fed_inn': [5.0, end],
  }
  assert theory_report._judge_inner(inner)['verdict'] == verdict
