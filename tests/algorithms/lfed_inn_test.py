"""LFedInn at a fixed x, against NumPy and its own fixed point."""

import numpy as np
import pytest

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


@pytest.fixture(scope='module')
def lfed_inn():
  return fednest_tff.build_lfed_inn(
      quadratic.build_problem(),
      inner=fednest_tff.LocalWork(learning_rate=BETA, steps=STEPS),
  )


def test_step_equals_numpy(lfed_inn):
  state, metrics = processes.run(lfed_inn, COHORT, 1)
  y = reference.lfed_inn(FORM, X, Y, SETTINGS)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)
  np.testing.assert_array_equal(state.outer, X)
  losses = [quadratic.inner_loss(X, Y, client).numpy() for client in CLIENTS]
  np.testing.assert_allclose(
      metrics['inner_loss'], np.mean(losses), rtol=1e-10
  )


def test_single_client_is_gradient_descent(lfed_inn):
  form = quadratic.local_form(CLIENTS[2])
  y = Y
  for _ in range(STEPS):
    y = y - BETA * form.inner_gradient(X, y)
  state, _ = processes.run(lfed_inn, COHORT[2:3], 1)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)


def test_stops_at_a_biased_point_if_clients_differ(lfed_inn):
  """The fixed point of its affine map, which is not the solution."""
  solution = FORM.inner_solution(X)
  eye = np.eye(quadratic.DY)
  local = [
      np.linalg.matrix_power(eye - BETA * form.A, STEPS)
      for form in FORM.locals
  ]
  shift = FORM.mean([
      (eye - power) @ form.inner_solution(X)
      for power, form in zip(local, FORM.locals, strict=True)
  ])
  fixed_point = np.linalg.solve(eye - FORM.mean(local), shift)
  assert np.linalg.norm(fixed_point - solution) > 1e-2
  state, _ = processes.run(lfed_inn, COHORT, 40)
  np.testing.assert_allclose(state.inner, fixed_point, rtol=1e-4)
