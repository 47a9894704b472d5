"""FedOut at a fixed y, and federated SVRG, against NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from tests.helpers import processes, quadratic, reference

CLIENTS = quadratic.make_clients()
COHORT = quadratic.to_datasets(CLIENTS)
FORM = quadratic.ClosedForm(CLIENTS)
X = quadratic.init_outer(0).numpy()
Y = quadratic.init_inner(0).numpy()
SETTINGS = reference.Settings(
    alpha=0.2, beta=0.0, inner_rounds=0, inner_steps=0, outer_steps=3,
    neumann_terms=4, smoothness=4.0,
)


def _build(dtype=tf.float64, **options):
  options = dict(
      outer_learning_rate=SETTINGS.alpha,
      outer_local_steps=SETTINGS.outer_steps,
      neumann_terms=SETTINGS.neumann_terms,
      smoothness=SETTINGS.smoothness,
      ihgp='truncated',
  ) | options
  return processes.build_flat(
      fednest_tff.build_fed_out, quadratic.build_problem(dtype), **options
  )


def test_step_equals_numpy():
  state, metrics = processes.run(_build(), COHORT, 1)
  x = reference.fed_out(FORM, X, Y, SETTINGS)
  np.testing.assert_allclose(state.outer, x, rtol=1e-10)
  np.testing.assert_array_equal(state.inner, Y)
  h = reference.hypergradient(FORM, X, Y, SETTINGS)
  np.testing.assert_allclose(
      metrics['hypergradient_norm'], np.linalg.norm(h), rtol=1e-10
  )


def test_step_equals_numpy_in_float32():
  clients = quadratic.make_clients(dtype=np.float32)
  state, _ = processes.run(
      _build(tf.float32), quadratic.to_datasets(clients), 1
  )
  x = reference.fed_out(
      quadratic.ClosedForm(clients),
      quadratic.init_outer(0, tf.float32).numpy(),
      quadratic.init_inner(0, tf.float32).numpy(),
      SETTINGS,
  )
  np.testing.assert_allclose(state.outer, x, rtol=1e-5)


def test_exact_solver_gives_the_closed_form_hypergradient():
  process = _build(
      ihgp='cg',
      neumann_terms=quadratic.DY + 1,
      smoothness=None,
      outer_local_steps=1,
  )
  state, _ = processes.run(process, COHORT, 1)
  h = (X - state.outer) / SETTINGS.alpha
  np.testing.assert_allclose(h, FORM.hypergradient(X, Y), rtol=1e-9)


def test_each_round_samples_anew():
  """The result is that of exactly one of all possible draws."""
  process = _build(
      outer_learning_rate=1.0, outer_local_steps=1, neumann_terms=2,
      gradient_batch_size=1,
  )
  smoothness = SETTINGS.smoothness
  forms, drawn = quadratic.one_example_each(CLIENTS), []
  state = process.initialize()
  for _ in range(6):
    output = process.next(state, COHORT)
    x, y = state.outer, state.inner
    change = output.state.outer - x
    matches = []
    for b, hessian in itertools.product(forms, repeat=2):
      term = forms[b].gradient_in_inner(x, y) / smoothness
      p = 2 * term - forms[hessian].A @ term / smoothness
      for direct, mixed in itertools.product(forms, repeat=2):
        h = forms[direct].direct_gradient(x, y)
        h = h - forms[mixed].mixed_product(p)
        if np.max(np.abs(change + h)) < 1e-10:
          matches.append((b, hessian, direct, mixed))
    assert len(matches) == 1
    drawn += matches
    state = output.state._replace(outer=x)
  # All four samples, and all epochs, are drawn apart.
  assert len(set(drawn)) > 4
  for one, other in itertools.combinations(range(4), 2):
    assert any(samples[one] != samples[other] for samples in drawn)


class LeastSquares:
  """f_i(x) = mean over the client's examples of 1/2 (a'x - b)^2."""

  def __init__(self, num_clients=3, dim=4, seed=0):
    rng = np.random.default_rng(seed)
    self.clients = [
        (rng.normal(size=(5 + i, dim)), rng.normal(size=5 + i))
        for i in range(num_clients)
    ]
    self.problem = fednest_tff.single_level(
        lambda x, batch: tf.reduce_mean(
            (tf.linalg.matvec(batch[0], x) - batch[1]) ** 2
        ) / 2,
        lambda seed: tf.ones([dim], tf.float64),
        (tf.TensorSpec([dim], tf.float64), tf.TensorSpec([], tf.float64)),
    )
    self.datasets = [
        tf.data.Dataset.from_tensor_slices(client) for client in self.clients
    ]

  def gradient(self, i, x):
    a, b = self.clients[i]
    return a.T @ (a @ x - b) / len(b)

  def mean_gradient(self, x):
    return np.mean(
        [self.gradient(i, x) for i in range(len(self.clients))], axis=0
    )

  def solution(self):
    hessian = np.mean([a.T @ a / len(b) for a, b in self.clients], axis=0)
    moment = np.mean([a.T @ b / len(b) for a, b in self.clients], axis=0)
    return np.linalg.solve(hessian, moment)


def test_single_level_is_federated_svrg():
  """FedNest without an inner problem, FedOut and NumPy are one algorithm."""
  case, alpha, tau = LeastSquares(), 0.1, 3
  x = np.ones(4)
  for _ in range(2):
    h = case.mean_gradient(x)
    ends = []
    for i in range(len(case.clients)):
      x_i = x
      for _ in range(tau):
        x_i = x_i - alpha * (case.gradient(i, x_i) - case.gradient(i, x) + h)
      ends.append(x_i)
    x = np.mean(ends, axis=0)
  options = dict(outer_learning_rate=alpha, outer_local_steps=tau)
  for process in (
      processes.build_flat(
          fednest_tff.build_fed_out, case.problem, **options
      ),
      fednest_tff.build(case.problem, **options),
  ):
    state, _ = processes.run(process, case.datasets, 2)
    np.testing.assert_allclose(state.outer, x, rtol=1e-10)


@pytest.mark.parametrize('method,reaches', [
    ('fednest', True), ('lfednest', False)
])
def test_federated_svrg_reaches_the_optimum_with_minibatches(method, reaches):
  """Local steps on minibatches: SVRG's noise vanishes at x*, SGD's does not."""
  case = LeastSquares()
  process = fednest_tff.build(
      case.problem,
      method,
      outer_learning_rate=0.05,
      outer_local_epochs=2,
      batch_size=2,
  )
  state, _ = processes.run(process, case.datasets, 60)
  error = np.linalg.norm(state.outer - case.solution())
  assert (error < 1e-3) if reaches else (error > 1e-2), error
