"""FedIHGP and the power iteration against closed forms."""

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
B = FORM.gradient_in_inner(X, Y)
EIGENVALUES = np.linalg.eigvalsh(FORM.A)
L = EIGENVALUES[-1]
EXACT = np.linalg.solve(FORM.A, B)


def _solutions(process, steps, state=None):
  """p after each of `steps` calls of `next`."""
  state = process.initialize() if state is None else state
  solutions = []
  for _ in range(steps):
    state = process.next(state, DATASETS).state
    solutions.append(state.solver.p)
  return solutions, state


def test_truncated_sum_converges_at_the_predicted_rate():
  terms = 40
  process = fednest_tff.build_fed_ihgp(
      quadratic.build_problem(),
      smoothness=L,
      neumann_terms=terms,
      ihgp='truncated',
  )
  solutions, state = _solutions(process, terms)
  for count in (1, 2, 5, terms):
    np.testing.assert_allclose(
        solutions[count - 1], reference.neumann(FORM.A, B, L, count), rtol=1e-10
    )
  errors = [np.linalg.norm(p - EXACT) for p in solutions]
  # N terms leave (I - A/l)^N A^-1 b, where 1 - mu/l dominates in the end.
  rate = 1 - EIGENVALUES[0] / L
  np.testing.assert_allclose(errors[-1] / errors[-2], rate, rtol=1e-3)
  # Lemma 2.2 as a bound on p: (1/mu) (1 - 1/kappa)^N ||b||.
  for count, error in enumerate(errors, start=1):
    assert error <= rate**count / EIGENVALUES[0] * np.linalg.norm(B)
  # Nothing is left to do: a further round leaves p as it is.
  assert state.solver.products_left == 0
  more, _ = _solutions(process, 1, state)
  np.testing.assert_array_equal(more[0], solutions[-1])


def test_conjugate_gradient_is_exact_after_as_many_steps_as_dimensions():
  process = fednest_tff.build_fed_ihgp(
      quadratic.build_problem(),
      smoothness=1.0,  # Not used.
      neumann_terms=quadratic.DY + 1,
      ihgp='cg',
  )
  solutions, _ = _solutions(process, quadratic.DY + 1)
  np.testing.assert_allclose(solutions[-1], EXACT, rtol=1e-9)
  kappa = L / EIGENVALUES[0]
  contraction = (np.sqrt(kappa) - 1) / (np.sqrt(kappa) + 1)

  def energy(error):
    return np.sqrt(error @ FORM.A @ error)

  for step, p in enumerate(solutions):
    bound = 2 * contraction**step * energy(EXACT)
    assert energy(p - EXACT) <= bound + 1e-9


def test_stochastic_product_and_its_exact_expectation():
  """p for every N' is the paper's product; their mean is the truncated sum."""
  terms = 4
  process = fednest_tff.build_fed_ihgp(
      quadratic.build_problem(), smoothness=L, neumann_terms=terms
  )
  state = process.initialize()
  by_stop = {}
  factor = np.eye(quadratic.DY) - FORM.A / L
  while len(by_stop) < terms:
    first = process.next(state, DATASETS).state
    stop = int(first.solver.products_left)
    if stop not in by_stop:
      assert 0 <= stop < terms
      p, last = first.solver.p, first
      for _ in range(terms - 1):  # Those beyond N' change nothing.
        last = process.next(last, DATASETS).state
      p = last.solver.p
      expected = terms / L * np.linalg.matrix_power(factor, stop) @ B
      np.testing.assert_allclose(p, expected, rtol=1e-10)
      by_stop[stop] = p
    state = first.at(X, Y)  # N' is drawn anew.
    assert state.epoch < 60
  mean = np.mean([by_stop[stop] for stop in range(terms)], axis=0)
  np.testing.assert_allclose(
      mean, reference.neumann(FORM.A, B, L, terms), rtol=1e-10
  )


def test_a_fresh_cohort_per_round():
  """Each round sees only the clients it is given."""
  process = fednest_tff.build_fed_ihgp(
      quadratic.build_problem(), smoothness=L, neumann_terms=3,
      ihgp='truncated',
  )
  state = process.initialize()
  for cohort in ([0], [1, 2], [2]):
    state = process.next(state, [DATASETS[i] for i in cohort]).state
  forms = FORM.locals
  term = forms[0].gradient_in_inner(X, Y) / L
  p = term
  for matrix in ((forms[1].A + forms[2].A) / 2, forms[2].A):
    term = term - matrix @ term / L
    p = p + term
  np.testing.assert_allclose(state.solver.p, p, rtol=1e-10)


def test_power_iteration_finds_the_largest_eigenvalue():
  process = fednest_tff.build_power_iteration(quadratic.build_problem())
  state = process.initialize()
  np.testing.assert_allclose(np.linalg.norm(state.vector), 1.0)
  estimates = []
  for _ in range(60):
    output = process.next(state, DATASETS)
    state = output.state
    estimates.append(output.metrics['smoothness'])
  assert all(np.diff(estimates) > -1e-12)  # From below, never back.
  np.testing.assert_allclose(estimates[-1], L, rtol=1e-6)
  assert estimates[-1] <= L * (1 + 1e-12)
  assert abs(estimates[-1] - L) <= output.metrics['residual'] + 1e-12
  # The Hessian of this problem does not depend on the point.
  elsewhere = state._replace(outer=X + 1.0, inner=Y - 1.0)
  again = process.next(elsewhere, DATASETS).state
  np.testing.assert_allclose(again.smoothness, L, rtol=1e-6)


@pytest.mark.parametrize('build', [
    lambda problem: fednest_tff.build_fed_ihgp(problem, smoothness=1.0),
    lambda problem: fednest_tff.build_power_iteration(problem),
])
def test_single_level_problems_are_refused(build):
  problem = fednest_tff.single_level(
      lambda x, batch: tf.reduce_mean((x - batch) ** 2),
      lambda seed: tf.zeros([]),
      tf.TensorSpec([], tf.float32),
  )
  with pytest.raises(ValueError, match='`problem` is single'):
    build(problem)
