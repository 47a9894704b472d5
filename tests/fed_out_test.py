"""FedOut and LFedOut at a fixed y, and federated SVRG, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from tests import quadratic, reference

CLIENTS = quadratic.make_clients()
DATASETS = quadratic.to_datasets(CLIENTS)
FORM = quadratic.ClosedForm(CLIENTS)
X = quadratic.init_outer(0).numpy()
Y = quadratic.init_inner(0).numpy()
SETTINGS = reference.Settings(
    alpha=0.2, beta=0.0, inner_rounds=0, inner_steps=0, outer_steps=3,
    neumann_terms=4, smoothness=4.0,
)


def _build(builder, problem, **options):
  options = dict(
      outer_learning_rate=SETTINGS.alpha,
      outer_local_steps=SETTINGS.outer_steps,
      neumann_terms=SETTINGS.neumann_terms,
      smoothness=SETTINGS.smoothness,
      ihgp='truncated',
  ) | options
  return builder(problem, **options)


def test_fed_out_step_equals_numpy():
  process = _build(fednest_tff.build_fed_out, quadratic.build_problem())
  output = process.next(process.initialize(), DATASETS)
  x = reference.fed_out(FORM, X, Y, SETTINGS)
  np.testing.assert_allclose(output.state.outer, x, rtol=1e-10)
  np.testing.assert_array_equal(output.state.inner, Y)
  h = reference.hypergradient(FORM, X, Y, SETTINGS)
  np.testing.assert_allclose(
      output.metrics['hypergradient_norm'], np.linalg.norm(h), rtol=1e-10
  )


def test_fed_out_step_equals_numpy_in_float32():
  clients = quadratic.make_clients(dtype=np.float32)
  process = _build(
      fednest_tff.build_fed_out, quadratic.build_problem(tf.float32)
  )
  state = process.next(
      process.initialize(), quadratic.to_datasets(clients)
  ).state
  x = reference.fed_out(
      quadratic.ClosedForm(clients),
      quadratic.init_outer(0, tf.float32).numpy(),
      quadratic.init_inner(0, tf.float32).numpy(),
      SETTINGS,
  )
  np.testing.assert_allclose(state.outer, x, rtol=1e-5)


def test_exact_solver_gives_the_closed_form_hypergradient():
  process = _build(
      fednest_tff.build_fed_out,
      quadratic.build_problem(),
      ihgp='cg',
      neumann_terms=quadratic.DY + 1,
      smoothness=None,
      outer_local_steps=1,
  )
  state = process.next(process.initialize(), DATASETS).state
  h = (X - state.outer) / SETTINGS.alpha
  np.testing.assert_allclose(h, FORM.hypergradient(X, Y), rtol=1e-9)


def test_lfed_out_step_equals_numpy():
  process = _build(fednest_tff.build_lfed_out, quadratic.build_problem())
  state = process.next(process.initialize(), DATASETS).state
  x = reference.lfed_out(FORM, X, Y, SETTINGS)
  np.testing.assert_allclose(state.outer, x, rtol=1e-10)


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
      fednest_tff.build_fed_out(case.problem, **options),
      fednest_tff.build_fed_nest(case.problem, **options),
  ):
    state = process.initialize()
    for _ in range(2):
      state = process.next(state, case.datasets).state
    np.testing.assert_allclose(state.outer, x, rtol=1e-10)


@pytest.mark.parametrize('method,reaches', [
    ('fednest', True), ('lfednest', False)
])
def test_federated_svrg_reaches_the_optimum_with_minibatches(method, reaches):
  """Local steps on minibatches: SVRG's noise vanishes at x*, SGD's does not."""
  case = LeastSquares()
  process = fednest_tff.build_fed_nest(
      case.problem,
      method,
      outer_learning_rate=0.05,
      outer_local_epochs=2,
      batch_size=2,
  )
  state = process.initialize()
  for _ in range(60):
    state = process.next(state, case.datasets).state
  error = np.linalg.norm(state.outer - case.solution())
  assert (error < 1e-3) if reaches else (error > 1e-2), error
