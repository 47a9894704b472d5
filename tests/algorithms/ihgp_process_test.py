"""FedIHGP, one round per `next`, against closed forms."""

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.algorithms.product_rounds import ProductMessage
from fednest_tff.local import sampling
from tests.helpers import (
    nested_variables,
    processes,
    quadratic,
    reference,
    small_problems,
)

CLIENTS = quadratic.make_clients()
COHORT = quadratic.to_datasets(CLIENTS)
FORM = quadratic.ClosedForm(CLIENTS)
X = quadratic.init_outer(0).numpy()
Y = quadratic.init_inner(0).numpy()
B = FORM.gradient_in_inner(X, Y)
EIGENVALUES = np.linalg.eigvalsh(FORM.A)
L = EIGENVALUES[-1]
EXACT = np.linalg.solve(FORM.A, B)


def _build(kind, terms, smoothness=L):
  return fednest_tff.build_fed_ihgp(
      quadratic.build_problem(),
      solver=fednest_tff.FederatedInverseHessian(
          kind=kind, terms=terms, smoothness=smoothness
      ),
  )


@pytest.fixture(scope='module')
def truncated():
  return _build('truncated', 40)


def _solutions(process, steps, state=None):
  """p after each of `steps` calls of `next`, and the last state."""
  outputs = processes.outputs(process, COHORT, steps, state)
  return [o.state.method.solver.p for o in outputs], outputs[-1].state


def test_truncated_sum_converges_at_the_predicted_rate(truncated):
  terms = 40
  solutions, state = _solutions(truncated, terms)
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
  assert state.method.solver.products_left == 0
  more, _ = _solutions(truncated, 1, state)
  np.testing.assert_array_equal(more[0], solutions[-1])


def test_conjugate_gradient_is_exact_after_as_many_steps_as_dimensions():
  process = _build('cg', quadratic.DY + 1, smoothness=1.0)  # l is not used.
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
  process = _build('stochastic', terms)
  state = process.initialize()
  by_stop = {}
  factor = np.eye(quadratic.DY) - FORM.A / L
  while len(by_stop) < terms:
    first = process.next(state, COHORT).state
    stop = int(first.method.solver.products_left)
    if stop not in by_stop:
      assert 0 <= stop < terms
      p, last = first.method.solver.p, first
      for _ in range(terms - 1):  # Those beyond N' change nothing.
        last = process.next(last, COHORT).state
      p = last.method.solver.p
      expected = terms / L * np.linalg.matrix_power(factor, stop) @ B
      np.testing.assert_allclose(p, expected, rtol=1e-10)
      by_stop[stop] = p
    state = fednest_tff.move_ihgp(first, X, Y)  # N' is drawn anew.
    assert state.epoch < 60
  mean = np.mean([by_stop[stop] for stop in range(terms)], axis=0)
  np.testing.assert_allclose(
      mean, reference.neumann(FORM.A, B, L, terms), rtol=1e-10
  )


def test_a_fresh_cohort_per_round(truncated):
  """Each round sees only the clients it is given."""
  state = truncated.initialize()
  for cohort in ([0], [1, 2], [2]):
    state = truncated.next(state, [COHORT[i] for i in cohort]).state
  forms = FORM.locals
  term = forms[0].gradient_in_inner(X, Y) / L
  p = term
  for matrix in ((forms[1].A + forms[2].A) / 2, forms[2].A):
    term = term - matrix @ term / L
    p = p + term
  np.testing.assert_allclose(state.method.solver.p, p, rtol=1e-10)


@pytest.mark.parametrize(
    'problem', [small_problems.single_level(), small_problems.minimax()],
    ids=lambda problem: problem.kind,
)
def test_problem_without_an_inverse_hessian_is_refused(problem):
  with pytest.raises(ValueError, match=f'`problem` is {problem.kind}'):
    fednest_tff.build_fed_ihgp(
        problem, solver=fednest_tff.FederatedInverseHessian(smoothness=1.0)
    )


def test_first_term_that_is_not_finite(truncated):
  bad = [client.copy() for client in CLIENTS]
  for client in bad:
    client['M'] = client['M'] * 1e200
  start = truncated.initialize()
  state = truncated.set_hparams(start, dict(smoothness=1e-200))
  with pytest.raises(Exception, match='FedIHGP: p, .* larger smoothness'):
    truncated.next(state, quadratic.to_datasets(bad))
  p = truncated.next(state, COHORT).state.method.solver.p
  assert np.all(np.isfinite(p))


def _call_seed(state):
  epoch_seed = sampling.fold_in(state.seed, state.epoch)
  return sampling.fold_in(epoch_seed, 0)


def test_rounds_alone_reproduce_the_steps_of_nested_variables():
  terms, smoothness = 2, 4.0
  cohort = nested_variables.build_cohort()
  process = fednest_tff.build_fed_ihgp(
      nested_variables.build_problem(),
      solver=fednest_tff.FederatedInverseHessian(
          terms=terms, smoothness=smoothness
      ),
  )
  state = process.initialize()
  for _ in range(20):  # To the first point whose N' asks for all products.
    seed = _call_seed(state)
    state = process.next(state, cohort).state
    if state.method.solver.products_left == terms - 1:
      break
    state = fednest_tff.move_ihgp(state, state.outer, state.inner)
  else:
    pytest.fail('All N\' are less than N - 1.')
  x, y = state.outer, state.inner

  def run(vector, index, seed):
    message = ProductMessage(x, y, vector, index, seed)
    return process.rounds['ihgp_step']((), message, cohort).value

  b = run(y, 0, seed)  # The vector is of no use yet.
  p = tf.nest.map_structure(lambda b: terms / smoothness * b, b)
  tf.nest.map_structure(np.testing.assert_allclose, state.method.solver.p, p)
  for n in range(1, terms):
    seed = _call_seed(state)
    product = run(state.method.solver.p, n, seed)
    p = tf.nest.map_structure(
        lambda p, v: p - v / smoothness, state.method.solver.p, product
    )
    output = process.next(state, cohort)
    state = output.state
    assert state.method.solver.products_left == terms - 1 - n
    assert output.metrics['step'] == n
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        state.method.solver.p,
        p,
    )
  # Beyond N' nothing happens, and clients are not even asked to multiply.
  done = state.method.solver
  processes.assert_equal(process.next(state, cohort).state.method.solver, done)
  idle = run(done.p, -1, seed)
  assert not any(np.any(leaf) for leaf in tf.nest.flatten(idle))
