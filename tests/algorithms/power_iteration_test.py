"""The power iteration against the eigenvalues of the mean Hessian."""

import numpy as np
import pytest

import fednest_tff
from tests.helpers import processes, quadratic, small_problems

CLIENTS = quadratic.make_clients()
COHORT = quadratic.to_datasets(CLIENTS)
L = np.linalg.eigvalsh(quadratic.ClosedForm(CLIENTS).A)[-1]
X = quadratic.init_outer(0).numpy()
Y = quadratic.init_inner(0).numpy()


@pytest.fixture(scope='module')
def power_iteration():
  return fednest_tff.build_power_iteration(quadratic.build_problem())


def test_finds_the_largest_eigenvalue(power_iteration):
  process = power_iteration
  start = process.initialize()
  np.testing.assert_allclose(np.linalg.norm(start.method.vector), 1.0)
  outputs = processes.outputs(process, COHORT, 60, start)
  estimates = [output.metrics['smoothness'] for output in outputs]
  assert all(np.diff(estimates) > -1e-12)  # From below, never back.
  np.testing.assert_allclose(estimates[-1], L, rtol=1e-6)
  assert estimates[-1] <= L * (1 + 1e-12)
  residual = outputs[-1].metrics['residual']
  assert abs(estimates[-1] - L) <= residual + 1e-12
  # The Hessian of this problem does not depend on the point.
  elsewhere = outputs[-1].state._replace(outer=X + 1.0, inner=Y - 1.0)
  again = process.next(elsewhere, COHORT).state
  np.testing.assert_allclose(again.method.smoothness, L, rtol=1e-6)


def test_product_that_is_not_finite(power_iteration):
  bad = [client.copy() for client in CLIENTS]
  with np.errstate(over='ignore'):
    for client in bad:
      client['A'] = client['A'] * 1e308
  state = power_iteration.initialize()
  with pytest.raises(Exception, match='H v is not finite. Try another point'):
    power_iteration.next(state, quadratic.to_datasets(bad))
  assert power_iteration.next(state, COHORT).state.method.smoothness > 0


def test_single_level_problem_is_refused():
  with pytest.raises(ValueError, match='`problem` is single'):
    fednest_tff.build_power_iteration(small_problems.single_level())
