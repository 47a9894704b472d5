"""FedInn and LFedInn at a fixed x, against NumPy and closed forms."""

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from tests import quadratic, reference

CLIENTS = quadratic.make_clients(heterogeneity=1.5)
FORM = quadratic.ClosedForm(CLIENTS)
X = quadratic.init_outer(0).numpy()
Y = quadratic.init_inner(0).numpy()
BETA, STEPS = 0.1, 4
SETTINGS = reference.Settings(
    alpha=0.0, beta=BETA, inner_rounds=1, inner_steps=STEPS, outer_steps=0,
    neumann_terms=0, smoothness=0.0,
)


def _build(builder, dtype=tf.float64, **options):
  options = dict(inner_learning_rate=BETA, inner_local_steps=STEPS) | options
  return builder(quadratic.build_problem(dtype), **options)


@pytest.fixture(scope='module')
def fed_inn():
  return _build(fednest_tff.build_fed_inn)


@pytest.fixture(scope='module')
def lfed_inn():
  return _build(fednest_tff.build_lfed_inn)


def _run(process, clients, epochs):
  state, states = process.initialize(), []
  for _ in range(epochs):
    state = process.next(state, quadratic.to_datasets(clients)).state
    states.append(state)
  return states


def test_fed_inn_step_equals_numpy(fed_inn):
  states = _run(fed_inn, CLIENTS, 2)
  y = Y
  for state in states:
    y = reference.fed_inn(FORM, X, y, SETTINGS)
    np.testing.assert_allclose(state.inner, y, rtol=1e-10)
    np.testing.assert_array_equal(state.outer, X)
  assert states[-1].epoch == 2


def test_fed_inn_step_equals_numpy_in_float32():
  process = _build(fednest_tff.build_fed_inn, tf.float32)
  clients = quadratic.make_clients(heterogeneity=1.5, dtype=np.float32)
  state = _run(process, clients, 1)[0]
  y = reference.fed_inn(
      quadratic.ClosedForm(clients),
      quadratic.init_outer(0, tf.float32).numpy(),
      quadratic.init_inner(0, tf.float32).numpy(),
      SETTINGS,
  )
  np.testing.assert_allclose(state.inner, y, rtol=1e-5)


def test_lfed_inn_step_equals_numpy(lfed_inn):
  state = _run(lfed_inn, CLIENTS, 1)[0]
  y = reference.lfed_inn(FORM, X, Y, SETTINGS)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)


def test_single_client_is_gradient_descent(fed_inn, lfed_inn):
  form = quadratic.local_form(CLIENTS[2])
  y = Y
  for _ in range(STEPS):
    y = y - BETA * form.inner_gradient(X, y)
  for process in (fed_inn, lfed_inn):
    state = _run(process, CLIENTS[2:3], 1)[0]
    np.testing.assert_allclose(state.inner, y, rtol=1e-10)


def test_fed_inn_converges_linearly_and_lfed_inn_does_not(fed_inn, lfed_inn):
  """FedLin's point: with tau > 1, only SVRG removes the clients' drift."""
  solution = FORM.inner_solution(X)
  epochs = 40
  errors = [
      np.linalg.norm(state.inner - solution)
      for state in _run(fed_inn, CLIENTS, epochs)
  ]
  ratios = np.array(errors[1:]) / np.array(errors[:-1])
  # The error operator of one call on a quadratic is
  #   I - mean_i [sum_{nu < tau} (I - beta A_i)^nu] beta A.
  eye = np.eye(quadratic.DY)
  weights = [
      sum(
          np.linalg.matrix_power(eye - BETA * form.A, nu)
          for nu in range(STEPS)
      )
      for form in FORM.locals
  ]
  operator = eye - BETA * FORM.mean(weights) @ FORM.A
  rate = max(abs(np.linalg.eigvals(operator)))
  assert rate < 1
  np.testing.assert_allclose(ratios[-5:], rate, rtol=1e-3)
  assert errors[-1] < 1e-5 * errors[0]

  # LFedInn's fixed point, from its own affine map, is not the solution.
  local = [np.linalg.matrix_power(eye - BETA * form.A, STEPS) for form in
           FORM.locals]
  shift = FORM.mean([
      (eye - power) @ form.inner_solution(X)
      for power, form in zip(local, FORM.locals, strict=True)
  ])
  fixed_point = np.linalg.solve(eye - FORM.mean(local), shift)
  assert np.linalg.norm(fixed_point - solution) > 1e-2
  state = _run(lfed_inn, CLIENTS, epochs)[-1]
  np.testing.assert_allclose(state.inner, fixed_point, rtol=1e-4)
