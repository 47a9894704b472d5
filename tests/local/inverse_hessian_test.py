"""The solvers of H p = b against dense linear algebra in NumPy.

Lemma 2.2 of the paper bounds the bias and the mean error of the stochastic
product, taken as an operator. The Neumann solvers are linear in b, so with the
identity as b their p is that operator; its columns stand for one vector each.
"""

import collections

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff.local import inverse_hessian

DIM = 5
TERMS = [1, 2, 3, 7, 20]
NAMES = ['stochastic', 'truncated', 'cg']


def _spd(spectrum, seed=0):
  rng = np.random.default_rng(seed)
  basis, _ = np.linalg.qr(rng.normal(size=(len(spectrum),) * 2))
  return (basis * np.asarray(spectrum)) @ basis.T


H = _spd(np.linspace(0.4, 3.0, DIM))
L, MU = 3.0, 0.4
B = np.random.default_rng(1).normal(size=DIM)
EYE = np.eye(DIM)


def _seed(*numbers):
  return tf.constant(numbers or (5, 6), tf.int64)


def _smoothness(value=L):
  return tf.constant(value, tf.float64)


def _start(solver, b=B, smoothness=L, seed=(5, 6)):
  return solver.start(tf.constant(b), _smoothness(smoothness), _seed(*seed))


def _finish(solver, state, h=H, smoothness=L):
  """The p of `state` run to its end, and how many products that took."""
  count = 0
  while state.products_left.numpy() > 0:
    product = tf.constant(h @ solver.vector(state).numpy())
    state = solver.advance(state, product, _smoothness(smoothness))
    count += 1
  return state.p.numpy(), count


def _run(name, terms, b=B, h=H, smoothness=L, seed=(5, 6)):
  solver = inverse_hessian.build_solver(name, terms)
  return _finish(solver, _start(solver, b, smoothness, seed), h, smoothness)


def _factor(power, h=H, smoothness=L):
  return np.linalg.matrix_power(np.eye(len(h)) - h / smoothness, power)


def _series(terms, h=H, smoothness=L):
  return sum(_factor(n, h, smoothness) for n in range(terms)) / smoothness


@pytest.mark.parametrize('terms', TERMS)
@pytest.mark.parametrize('smoothness', [L, 7.0])
def test_truncated_is_the_explicit_sum(terms, smoothness):
  p, products = _run('truncated', terms, smoothness=smoothness)
  expected = _series(terms, smoothness=smoothness) @ B
  np.testing.assert_allclose(p, expected, rtol=0, atol=1e-12)
  assert products == terms - 1


@pytest.mark.parametrize('terms', TERMS)
@pytest.mark.parametrize('smoothness', [L, 7.0])
def test_stochastic_is_the_explicit_product(terms, smoothness):
  solver = inverse_hessian.build_solver('stochastic', terms)
  for seed in range(5):
    state = _start(solver, smoothness=smoothness, seed=(seed, 0))
    drawn = int(state.products_left)
    assert 0 <= drawn < terms
    p, products = _finish(solver, state, smoothness=smoothness)
    power = _factor(drawn, smoothness=smoothness)
    expected = terms / smoothness * power @ B
    np.testing.assert_allclose(p, expected, rtol=0, atol=1e-12)
    assert products == drawn


def _stochastic_operators(terms, h=H, smoothness=L):
  """The operator for each N' in 0..N-1, whichever was drawn."""
  solver = inverse_hessian.build_solver('stochastic', terms)
  state = _start(solver, np.eye(len(h)), smoothness)
  return [
      _finish(
          solver,
          state._replace(products_left=tf.constant(drawn)),
          h,
          smoothness,
      )[0]
      for drawn in range(terms)
  ]


@pytest.mark.parametrize('terms', TERMS)
def test_the_mean_of_the_stochastic_product_is_the_truncated_sum(terms):
  mean = np.mean(_stochastic_operators(terms), axis=0)
  np.testing.assert_allclose(
      mean, _run('truncated', terms, EYE)[0], rtol=0, atol=1e-12
  )


@pytest.mark.parametrize('terms', [1, 2, 5])
def test_the_number_of_factors_is_uniform(terms):
  solver = inverse_hessian.build_solver('stochastic', terms)

  @tf.function
  def draw(seed):
    return solver.start(tf.constant(B), _smoothness(), seed).products_left

  draws = 200 * terms
  counts = np.bincount(
      [draw(_seed(i, 3)).numpy() for i in range(draws)], minlength=terms
  )
  assert len(counts) == terms  # 0..N-1, and not one beyond.
  statistic = np.sum((counts - 200) ** 2 / 200)
  assert statistic < 20  # At most 4 degrees of freedom.


def test_the_seed_decides_the_number_of_factors():
  solver = inverse_hessian.build_solver('stochastic', 1000)

  def draw(seed):
    return int(_start(solver, seed=seed).products_left)

  assert draw((1, 2)) == draw((1, 2))
  assert len({draw((i, 2)) for i in range(20)}) > 15


# Lemma 2.2.


@pytest.mark.parametrize('kappa', [2.0, 7.5, 40.0])
def test_bias_obeys_the_lemma_and_attains_it(kappa):
  mu = 0.4
  spectrum = np.linspace(mu, kappa * mu, DIM)
  h = _spd(spectrum, seed=2)
  inverse = np.linalg.inv(h)
  slow = np.linalg.eigh(h)[1][:, 0]  # The eigenvector to mu.
  for terms in range(1, 31):
    expected, _ = _run('truncated', terms, np.eye(DIM), h, kappa * mu)
    bias = inverse - expected
    bound = ((kappa - 1) / kappa) ** terms / mu
    assert np.linalg.norm(bias, 2) <= bound * (1 + 1e-9) + 1e-13
    along = np.linalg.norm(bias @ slow)
    np.testing.assert_allclose(along, bound, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize('terms', [1, 3, 10, 30])
def test_bias_of_the_stochastic_product_obeys_the_lemma(terms):
  mean = np.mean(_stochastic_operators(terms), axis=0)
  bias = np.linalg.norm(np.linalg.inv(H) - mean, 2)
  assert bias <= (1 - MU / L) ** terms / MU * (1 + 1e-9)


@pytest.mark.parametrize('terms', [1, 3, 10, 30])
@pytest.mark.parametrize('kappa', [2.0, 40.0])
def test_mean_error_of_the_stochastic_product_obeys_the_lemma(terms, kappa):
  mu = 0.4
  h = _spd(np.linspace(mu, kappa * mu, DIM), seed=3)
  errors = [
      np.linalg.norm(np.linalg.inv(h) - operator, 2)
      for operator in _stochastic_operators(terms, h, kappa * mu)
  ]
  assert np.mean(errors) <= 2 / mu


# Conjugate gradient.


def test_cg_reaches_the_solution_after_as_many_products_as_dimensions():
  p, products = _run('cg', DIM + 1)
  assert products == DIM
  np.testing.assert_allclose(p, np.linalg.solve(H, B), rtol=0, atol=1e-10)


def test_cg_does_not_use_the_smoothness():
  p, _ = _run('cg', DIM + 1, smoothness=1e-3)
  np.testing.assert_allclose(p, np.linalg.solve(H, B), rtol=0, atol=1e-10)


@pytest.mark.parametrize('products', range(DIM))
def test_cg_is_the_best_in_its_krylov_space(products):
  """It minimises 1/2 p'Hp - p'b over span(b, Hb, ...)."""
  p, count = _run('cg', products + 1)
  assert count == products
  expected = np.zeros(DIM)
  if products:
    krylov = np.stack(
        [np.linalg.matrix_power(H, k) @ B for k in range(products)], axis=1
    )
    krylov, _ = np.linalg.qr(krylov)
    reduced = np.linalg.solve(krylov.T @ H @ krylov, krylov.T @ B)
    expected = krylov @ reduced
  np.testing.assert_allclose(p, expected, rtol=0, atol=1e-10)


def test_cg_error_is_below_the_chebyshev_bound():
  dim = 12
  h = _spd(np.geomspace(0.1, 10.0, dim), seed=4)
  b = np.random.default_rng(5).normal(size=dim)
  solution = np.linalg.solve(h, b)

  def energy(error):
    return np.sqrt(error @ h @ error)

  rate = (np.sqrt(100.0) - 1) / (np.sqrt(100.0) + 1)
  for products in range(dim + 1):
    p, _ = _run('cg', products + 1, b, h)
    bound = 2 * rate**products * energy(solution)
    assert energy(solution - p) <= bound


@pytest.mark.parametrize('name', NAMES)
def test_a_zero_right_hand_side_has_a_zero_solution(name):
  p, _ = _run(name, 8, np.zeros(DIM))
  np.testing.assert_array_equal(p, np.zeros(DIM))


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
@pytest.mark.parametrize('terms', [DIM + 2, 100])
def test_cg_survives_more_products_than_dimensions(dtype, terms):
  solver = inverse_hessian.build_solver('cg', terms)
  h = tf.constant(H, dtype)
  p = inverse_hessian.solve(
      solver,
      lambda v, n: tf.linalg.matvec(h, v),
      tf.constant(B, dtype),
      tf.constant(L, dtype),
      _seed(),
  )
  tolerance = 1e-5 if dtype == np.float32 else 1e-12
  np.testing.assert_allclose(
      p, np.linalg.solve(H, B), rtol=0, atol=tolerance
  )


@pytest.mark.parametrize(
    'h',
    [np.zeros((DIM, DIM)), -H, _spd([-1.0, -0.1, 0.0, 0.5, 2.0]), -EYE],
    ids=['zero', 'negative', 'indefinite', 'minus one'],
)
@pytest.mark.parametrize('terms', [2, 6, 40])
def test_cg_survives_directions_without_positive_curvature(h, terms):
  p, products = _run('cg', terms, h=h)
  assert products == terms - 1
  assert np.all(np.isfinite(p))


@pytest.mark.parametrize('h', [np.zeros((DIM, DIM)), -H])
def test_cg_takes_no_step_where_no_curvature_is_positive(h):
  p, _ = _run('cg', 4, h=h)
  np.testing.assert_array_equal(p, np.zeros(DIM))


# All solvers.


@pytest.mark.parametrize('name', NAMES)
def test_a_finished_state_does_not_change(name):
  solver = inverse_hessian.build_solver(name, 4)
  state = _start(solver)
  while state.products_left.numpy() > 0:
    product = tf.linalg.matvec(tf.constant(H), solver.vector(state))
    state = solver.advance(state, product, _smoothness())
  for product in (B, np.full(DIM, np.nan)):
    after = solver.advance(state, tf.constant(product), _smoothness())
    assert type(after) is inverse_hessian.SolverState
    tf.nest.assert_same_structure(after, state)
    tf.nest.map_structure(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize('name', NAMES)
def test_one_term_needs_no_product(name):
  p, products = _run(name, 1)
  assert products == 0
  expected = np.zeros(DIM) if name == 'cg' else B / L
  np.testing.assert_allclose(p, expected, rtol=1e-15)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('terms', [1, 2, 6])
@pytest.mark.parametrize('traced', [False, True])
def test_solve_runs_to_the_end(name, terms, traced):
  solver = inverse_hessian.build_solver(name, terms)
  assert solver.num_terms == terms
  for seed in ((1, 0), (2, 0), (3, 0)):

    def solve(seed=seed, solver=solver):
      return inverse_hessian.solve(
          solver,
          lambda v, n: tf.linalg.matvec(tf.constant(H), v),
          tf.constant(B),
          _smoothness(),
          _seed(*seed),
      )

    p = (tf.function(solve) if traced else solve)()
    expected, _ = _run(name, terms, seed=seed)
    np.testing.assert_allclose(p, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize('name', ['truncated', 'cg'])
def test_solve_counts_products_from_one(name):
  """LFedOut draws a sample of its own for each Neumann factor."""
  numbers = []

  def product(v, n):
    numbers.append(int(n))
    return tf.linalg.matvec(tf.constant(H), v)

  solver = inverse_hessian.build_solver(name, 5)
  inverse_hessian.solve(
      solver, product, tf.constant(B), _smoothness(), _seed()
  )
  assert numbers == [1, 2, 3, 4]


def test_solve_multiplies_by_the_factors_in_their_order():
  """With Hessians that differ per product, p is a product of matrices."""
  hessians = np.stack([_spd(np.linspace(0.4, 3.0, DIM), k) for k in range(4)])
  solver = inverse_hessian.build_solver('truncated', 4)
  p = inverse_hessian.solve(
      solver,
      lambda v, n: tf.linalg.matvec(tf.gather(hessians, n), v),
      tf.constant(B),
      _smoothness(),
      _seed(),
  )
  term = B / L
  expected = term
  for n in (1, 2, 3):
    term = term - hessians[n] @ term / L
    expected = expected + term
  np.testing.assert_allclose(p, expected, rtol=0, atol=1e-12)


Leaves = collections.namedtuple('Leaves', ['first', 'second'])


@pytest.mark.parametrize('name', NAMES)
def test_structures_are_vectors_like_any_other(name):
  def pack(v):
    return {'a': Leaves(v[0], tf.reshape(v[1:3], [2, 1])), 'b': v[3:]}

  def product(v, n):
    del n
    leaves = [tf.reshape(leaf, [-1]) for leaf in tf.nest.flatten(v)]
    return pack(tf.linalg.matvec(tf.constant(H), tf.concat(leaves, axis=0)))

  solver = inverse_hessian.build_solver(name, 4)
  for seed in ((1, 0), (2, 0), (3, 0)):
    p = inverse_hessian.solve(
        solver, product, pack(tf.constant(B)), _smoothness(), _seed(*seed)
    )
    tf.nest.assert_same_structure(p, pack(tf.constant(B)))
    flat = np.concatenate([np.ravel(leaf) for leaf in tf.nest.flatten(p)])
    expected, _ = _run(name, 4, seed=seed)
    np.testing.assert_allclose(flat, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize('bad', ['neumann', '', None, 3])
def test_unknown_solvers_are_refused(bad):
  with pytest.raises(ValueError, match='`ihgp` must be one of') as error:
    inverse_hessian.build_solver(bad, 3)
  for name in NAMES:
    assert name in str(error.value)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('bad', [0, -1, 2.0, '3', None, True])
def test_bad_numbers_of_terms_are_refused(name, bad):
  with pytest.raises(ValueError, match='`neumann_terms` must'):
    inverse_hessian.build_solver(name, bad)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_product_that_is_not_finite_is_not_hidden(name, bad):
  """The callers refuse a p that is not finite; that must be able to fail."""
  solver = inverse_hessian.build_solver(name, 2)
  state = _start(solver)._replace(products_left=tf.constant(1))
  product = np.where(np.arange(DIM) == 1, bad, 1.0)
  state = solver.advance(state, tf.constant(product), _smoothness())
  assert not np.all(np.isfinite(state.p))


# What callers need to know of a solver.


@pytest.mark.parametrize('terms', [1, 2, 5])
def test_the_chance_of_a_product_is_how_often_it_is_wanted(terms):
  """P(N' >= n), N' uniform in {0..N-1}, over all N' there are."""
  solver = inverse_hessian.build_solver('stochastic', terms)
  for n in range(1, terms):
    wanted = np.mean([stop >= n for stop in range(terms)])
    np.testing.assert_allclose(solver.chance(n), wanted, rtol=1e-15)
  for name in ('truncated', 'cg'):
    solver = inverse_hessian.build_solver(name, terms)
    assert [solver.chance(n) for n in range(1, terms)] == [1.0] * (terms - 1)


def test_who_needs_the_smoothness_and_who_stops_at_random():
  solvers = {name: inverse_hessian.build_solver(name, 3) for name in NAMES}
  solvers['identity'] = inverse_hessian.identity_solver()
  needs = {name for name, solver in solvers.items() if solver.needs_smoothness}
  assert needs == {'stochastic', 'truncated'}
  random = {name for name, solver in solvers.items() if solver.stops_at_random}
  assert random == {'stochastic'}


def test_solvers_that_do_not_need_the_smoothness_do_without():
  for solver, expected in (
      (inverse_hessian.build_solver('cg', DIM + 1), np.linalg.solve(H, B)),
      (inverse_hessian.identity_solver(), B),
  ):
    p = inverse_hessian.solve(
        solver,
        lambda v, n: tf.linalg.matvec(tf.constant(H), v),
        tf.constant(B),
        (),
        _seed(),
    )
    np.testing.assert_allclose(p, expected, rtol=0, atol=1e-10)


def test_the_identity_needs_no_product():
  solver = inverse_hessian.identity_solver()
  assert solver.num_terms == 1
  state = solver.start(tf.constant(B), (), _seed())
  assert state.products_left.numpy() == 0
  np.testing.assert_array_equal(state.p, B)


@pytest.mark.parametrize('name', NAMES)
def test_products_are_counted(name):
  solver = inverse_hessian.build_solver(name, 6)
  state = _start(solver)
  total = int(state.products_left)
  for done in range(total + 2):
    assert int(state.products_done) == min(done, total)
    assert int(state.products_left) == max(total - done, 0)
    product = tf.linalg.matvec(tf.constant(H), solver.vector(state))
    state = solver.advance(state, product, _smoothness())
