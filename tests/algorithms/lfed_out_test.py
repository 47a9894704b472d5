"""LFedOut at a fixed y, against NumPy."""

import numpy as np
import pytest

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


@pytest.fixture(scope='module')
def lfed_out():
  return fednest_tff.build_lfed_out(
      quadratic.build_problem(),
      outer=fednest_tff.LocalWork(
          learning_rate=SETTINGS.alpha, steps=SETTINGS.outer_steps
      ),
      solver=fednest_tff.InverseHessian(
          kind='truncated',
          terms=SETTINGS.neumann_terms,
          smoothness=SETTINGS.smoothness,
      ),
  )


def test_step_equals_numpy(lfed_out):
  state, metrics = processes.run(lfed_out, COHORT, 1)
  x = reference.lfed_out(FORM, X, Y, SETTINGS)
  np.testing.assert_allclose(state.outer, x, rtol=1e-10)
  np.testing.assert_array_equal(state.inner, Y)
  losses = [quadratic.outer_loss(X, Y, client).numpy() for client in CLIENTS]
  np.testing.assert_allclose(
      metrics['outer_loss'], np.mean(losses), rtol=1e-10
  )


def test_conjugate_gradient_gives_local_hypergradients_without_smoothness():
  """In as many steps as dimensions p is exact, with the client's Hessian."""
  process = fednest_tff.build_lfed_out(
      quadratic.build_problem(),
      outer=fednest_tff.LocalWork(learning_rate=0.1),
      solver=fednest_tff.InverseHessian(kind='cg', terms=quadratic.DY + 1),
  )
  assert dict(process.get_hparams(process.initialize())) == {
      'outer_learning_rate': 0.1
  }
  state, _ = processes.run(process, COHORT, 1)
  h = FORM.mean([form.hypergradient(X, Y) for form in FORM.locals])
  np.testing.assert_allclose((X - state.outer) / 0.1, h, rtol=1e-9)
  # It is not the hypergradient of the mean problem: that is the bias.
  assert np.linalg.norm(h - FORM.hypergradient(X, Y)) > 1e-2
