"""FedInn at a fixed x, against NumPy and closed forms."""

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from tests.helpers import processes, quadratic, reference

CLIENTS = quadratic.make_clients(heterogeneity=1.5)
COHORT = quadratic.to_datasets(CLIENTS)
FORM = quadratic.ClosedForm(CLIENTS)
X = quadratic.init_outer(0).numpy()
Y = quadratic.init_inner(0).numpy()
BETA, STEPS = 0.1, 4
SETTINGS = reference.Settings(
    alpha=0.0, beta=BETA, inner_rounds=1, inner_steps=STEPS, outer_steps=0,
    neumann_terms=0, smoothness=0.0,
)
EXACT = dict(rtol=1e-10, atol=1e-10)


def _build(dtype=tf.float64, **options):
  options = dict(inner_learning_rate=BETA, inner_local_steps=STEPS) | options
  return processes.build_flat(
      fednest_tff.build_fed_inn, quadratic.build_problem(dtype), **options
  )


@pytest.fixture(scope='module')
def fed_inn():
  return _build()


def test_step_equals_numpy(fed_inn):
  outputs = processes.outputs(fed_inn, COHORT, 2)
  y = Y
  for output in outputs:
    y = reference.fed_inn(FORM, X, y, SETTINGS)
    np.testing.assert_allclose(output.state.inner, y, rtol=1e-10)
    np.testing.assert_array_equal(output.state.outer, X)
  assert outputs[-1].state.epoch == 2


def test_step_equals_numpy_in_float32():
  process = _build(tf.float32)
  clients = quadratic.make_clients(heterogeneity=1.5, dtype=np.float32)
  state, _ = processes.run(process, quadratic.to_datasets(clients), 1)
  y = reference.fed_inn(
      quadratic.ClosedForm(clients),
      quadratic.init_outer(0, tf.float32).numpy(),
      quadratic.init_inner(0, tf.float32).numpy(),
      SETTINGS,
  )
  np.testing.assert_allclose(state.inner, y, rtol=1e-5)


def test_single_client_is_gradient_descent(fed_inn):
  form = quadratic.local_form(CLIENTS[2])
  y = Y
  for _ in range(STEPS):
    y = y - BETA * form.inner_gradient(X, y)
  state, _ = processes.run(fed_inn, COHORT[2:3], 1)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)


def test_converges_linearly_although_clients_differ(fed_inn):
  """FedLin's point: with tau > 1, only SVRG removes the clients' drift."""
  solution = FORM.inner_solution(X)
  errors = [
      np.linalg.norm(output.state.inner - solution)
      for output in processes.outputs(fed_inn, COHORT, 40)
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


def test_gradient_at_the_anchor_is_sampled():
  """The result is that of exactly one of all possible draws."""
  process = _build(
      inner_learning_rate=0.3, inner_local_steps=None, gradient_batch_size=1
  )
  forms, drawn = quadratic.one_example_each(CLIENTS), []
  state = process.initialize()
  for _ in range(6):
    output = process.next(state, COHORT)
    again = process.next(state, COHORT)
    np.testing.assert_array_equal(output.state.inner, again.state.inner)
    x, y = state.outer, state.inner
    matches = [
        choice
        for choice, form in forms.items()
        if np.allclose(
            output.state.inner, y - 0.3 * form.inner_gradient(x, y), **EXACT
        )
    ]
    assert len(matches) == 1
    drawn += matches
    state = output.state
  assert len(set(drawn)) > 1
