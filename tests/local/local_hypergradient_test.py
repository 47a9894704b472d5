"""Local steps along a client's own hypergradient, against closed forms."""

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff import projections
from fednest_tff.local import client as client_lib
from fednest_tff.local import (
    derivatives,
    descent,
    inverse_hessian,
    local_hypergradient,
    sampling,
)
from tests.helpers import mlp, quadratic
from tests.helpers.one_client import (
    CLIENTS,
    PROBLEM,
    X,
    Y,
    assert_close,
    double,
    local_form,
    minimax_problem,
    read_client,
    seed_pair,
    two_and_rest,
    uniform,
)

WORK = descent.LocalWork(steps=3)


def _exact_solver():
  return inverse_hessian.build_solver('cg', quadratic.DY + 1)


# The hypergradient.


def _local_hypergradient(
    name, terms, index=2, smoothness=None, seed=(7, 8), work=None, tau=1, nu=0
):
  if smoothness is None:
    smoothness = np.linalg.eigvalsh(local_form(index).A)[-1]
  work = work or descent.LocalWork(steps=tau)
  hypergradient = local_hypergradient.LocalHypergradient(
      PROBLEM,
      inverse_hessian.build_solver(name, terms),
      read_client(index),
      work,
      tf.constant(tau),
      double(smoothness),
      seed_pair(*seed),
  )
  return hypergradient(tf.constant(X), tf.constant(Y), tf.constant(nu))


@pytest.mark.parametrize('index', range(3))
def test_local_hypergradient_by_conjugate_gradient(index):
  h = _local_hypergradient('cg', quadratic.DY + 1, index)
  assert_close(h, local_form(index).hypergradient(X, Y))


def test_local_hypergradient_by_a_long_series():
  h = tf.function(lambda: _local_hypergradient('truncated', 200))()
  assert_close(h, local_form().hypergradient(X, Y))


@pytest.mark.parametrize('terms', [1, 2, 5])
def test_local_hypergradient_by_a_short_series(terms):
  form, smoothness = local_form(), 6.0
  factor = np.eye(quadratic.DY) - form.A / smoothness
  series = sum(np.linalg.matrix_power(factor, n) for n in range(terms))
  p = series @ form.gradient_in_inner(X, Y) / smoothness
  h = _local_hypergradient('truncated', terms, smoothness=smoothness)
  assert_close(h, form.direct_gradient(X, Y) - form.mixed_product(p))


def test_local_hypergradient_by_the_stochastic_product():
  """Each outcome is one of the N products, and N' is drawn anew per step."""
  form, smoothness, terms = local_form(), 6.0, 4
  factor = np.eye(quadratic.DY) - form.A / smoothness
  b = form.gradient_in_inner(X, Y)
  candidates = [
      form.direct_gradient(X, Y)
      - form.mixed_product(
          terms / smoothness * np.linalg.matrix_power(factor, n) @ b
      )
      for n in range(terms)
  ]
  drawn = []
  for nu in range(12):
    h = _local_hypergradient(
        'stochastic', terms, smoothness=smoothness, tau=12, nu=nu
    )
    distances = [np.linalg.norm(h - candidate) for candidate in candidates]
    assert min(distances) < 1e-10
    drawn.append(int(np.argmin(distances)))
  assert len(set(drawn)) > 1


def test_local_hypergradient_draws_a_minibatch_per_factor():
  """With B = 1 each step is made of single examples, all of them known."""
  terms, smoothness, tau = 3, 6.0, 4
  examples = CLIENTS[2]
  singles = [
      quadratic.local_form({k: v[j : j + 1] for k, v in examples.items()})
      for j in range(3)
  ]
  work = descent.LocalWork(steps=tau, batch_size=1)
  rows = set()
  for nu in range(tau):
    h = _local_hypergradient(
        'truncated', terms, smoothness=smoothness, work=work, tau=tau, nu=nu
    )
    matches = []
    for first in range(3):
      b = singles[first].gradient_in_inner(X, Y) / smoothness
      for i, j, k in np.ndindex(3, 3, 3):
        term = b - singles[i].A @ b / smoothness
        p = b + term + term - singles[j].A @ term / smoothness
        value = singles[first].direct_gradient(X, Y)
        value = value - singles[k].mixed_product(p)
        if np.linalg.norm(h - value) < 1e-10:
          matches.append((first, i, j, k))
    assert len(matches) == 1
    # N = n: the N minibatches of a step are one epoch, each example once.
    assert sorted(matches[0][1:]) == [0, 1, 2]
    rows.add(matches[0])
  assert len(rows) > 1


@pytest.mark.parametrize('batch_size', [None, 8])
def test_local_hypergradient_keeps_the_levels_apart(batch_size):
  """f and its gradients from the outer examples, g from the inner ones."""
  (data,) = quadratic.make_clients(1, (7,), seed=6)
  problem = quadratic.build_problem(split=two_and_rest)
  client = client_lib.from_dataset(
      problem, uniform, quadratic.to_datasets([data])[0]
  )
  g, f = (
      quadratic.local_form({name: rows[part] for name, rows in data.items()})
      for part in (slice(2), slice(2, None))
  )
  hypergradient = local_hypergradient.LocalHypergradient(
      problem,
      _exact_solver(),
      client,
      descent.LocalWork(steps=2, batch_size=batch_size),
      tf.constant(2),
      double(1.0),
      seed_pair(),
  )
  p = np.linalg.solve(g.A, f.gradient_in_inner(X, Y))
  expected = f.direct_gradient(X, Y) - g.mixed_product(p)
  for nu in range(2):
    h = hypergradient(tf.constant(X), tf.constant(Y), tf.constant(nu))
    assert_close(h, expected)


# Local steps.


def test_outer_steps_follow_the_local_hypergradient():
  form, rate = local_form(), 0.1
  x = X
  for _ in range(3):
    x = x - rate * form.hypergradient(x, Y)
  actual = local_hypergradient.outer_steps(
      PROBLEM, _exact_solver(), tf.constant(X), tf.constant(Y), read_client(),
      WORK, double(rate), double(1.0), seed_pair(),
  )  # fmt: skip
  assert_close(actual, x)


def test_alternating_steps_take_y_first():
  form, beta, alpha = local_form(), 0.2, 0.1
  x, y = X, Y
  for _ in range(2 * 3):
    y = y - beta * form.inner_gradient(x, y)
  for _ in range(2):
    x = x - alpha * form.hypergradient(x, y)
  actual = local_hypergradient.alternating_steps(
      PROBLEM, _exact_solver(), tf.constant(X), tf.constant(Y), read_client(),
      WORK, descent.LocalWork(steps=2), 2, double(beta), double(alpha),
      double(1.0), seed_pair(),
  )  # fmt: skip
  assert_close(actual[0], x)
  assert_close(actual[1], y)


@pytest.mark.parametrize('kind', ['bilevel', 'minimax'])
@pytest.mark.parametrize('divide', [False, True])
def test_simultaneous_steps_move_both_from_the_old_point(kind, divide):
  form, beta, alpha, tau = local_form(), 0.2, 0.1, 3
  is_bilevel = kind == 'bilevel'
  x, y = X, Y
  share = 1 / tau if divide else 1.0
  for _ in range(tau):
    if is_bilevel:
      h, g = form.hypergradient(x, y), form.inner_gradient(x, y)
    else:
      h, g = form.direct_gradient(x, y), -form.gradient_in_inner(x, y)
    x, y = x - share * alpha * h, y - share * beta * g
  problem = PROBLEM if is_bilevel else minimax_problem()
  actual = local_hypergradient.simultaneous_steps(
      problem, _exact_solver() if is_bilevel else None, tf.constant(X),
      tf.constant(Y), read_client(problem=problem),
      descent.LocalWork(steps=tau, divide_by_steps=divide), double(beta),
      double(alpha), double(1.0), seed_pair(),
  )  # fmt: skip
  assert_close(actual[0], x)
  assert_close(actual[1], y)


def _clip(v):
  return np.clip(v, -0.3, 0.3)


def test_all_local_steps_are_projected():
  """Of a minimax problem in a box, with a start on its boundary."""
  problem = fednest_tff.minimax(
      quadratic.outer_loss,
      lambda seed: tf.zeros([quadratic.DX], tf.float64),
      lambda seed: tf.zeros([quadratic.DY], tf.float64),
      quadratic.element_spec(),
      project_outer=projections.box(-0.3, 0.3),
      project_inner=projections.box(-0.3, 0.3),
  )
  form, client = local_form(), read_client(problem=problem)
  alpha, beta = 0.4, 0.5
  start = _clip(X), _clip(Y)
  arguments = tf.constant(start[0]), tf.constant(start[1]), client
  rates = double(beta), double(alpha), double(1.0), seed_pair()

  x, y = start
  for _ in range(3):
    x = _clip(x - alpha * form.direct_gradient(x, y))
  actual = local_hypergradient.outer_steps(
      problem, None, *arguments, WORK, double(alpha), double(1.0), seed_pair()
  )
  assert_close(actual, x)

  x, y = start
  for _ in range(2 * 3):
    y = _clip(y + beta * form.gradient_in_inner(x, y))
  for _ in range(2):
    x = _clip(x - alpha * form.direct_gradient(x, y))
  actual = local_hypergradient.alternating_steps(
      problem, None, *arguments, WORK, descent.LocalWork(steps=2), 2, *rates
  )
  assert_close(actual[0], x)
  assert_close(actual[1], y)

  x, y = start
  for _ in range(3):
    x, y = (
        _clip(x - alpha * form.direct_gradient(x, y)),
        _clip(y + beta * form.gradient_in_inner(x, y)),
    )
  actual = local_hypergradient.simultaneous_steps(
      problem, None, *arguments, WORK, *rates
  )
  assert_close(actual[0], x)
  assert_close(actual[1], y)
  # The constraints matter.
  assert np.sum(np.abs(x) == 0.3) + np.sum(np.abs(y) == 0.3) > 1


@pytest.mark.parametrize(
    'work',
    [
        descent.LocalWork(epochs=1, batch_size=1),
        descent.LocalWork(steps=sampling.num_examples, batch_size=1),
    ],
)
def test_steps_are_counted_on_the_examples_of_the_level(work):
  """tau_i of a client with 2 inner and 5 outer examples."""
  # Each step of size 1 subtracts 1.
  problem = fednest_tff.bilevel(
      lambda x, y, batch: tf.reduce_sum(x),
      lambda x, y, batch: tf.reduce_sum(y),
      quadratic.init_outer,
      quadratic.init_inner,
      quadratic.element_spec(),
      split=two_and_rest,
  )
  (dataset,) = quadratic.to_datasets(quadratic.make_clients(1, (7,)))
  client = client_lib.from_dataset(problem, uniform, dataset)
  x = tf.zeros([quadratic.DX], tf.float64)
  y = tf.zeros([quadratic.DY], tf.float64)
  one = double(1.0)
  solver = inverse_hessian.build_solver('truncated', 2)
  for end in (
      descent.svrg(
          lambda at, xi: derivatives.direct_gradient(problem, at, y, xi)[1],
          x, x + 1, client.outer, work, work.num_steps(client.outer), one,
          seed_pair(),
      ),
      local_hypergradient.outer_steps(
          problem, solver, x, y, client, work, one, one, seed_pair()
      ),
  ):  # fmt: skip
    np.testing.assert_array_equal(end, x - 5)
  ends = local_hypergradient.alternating_steps(
      problem, solver, x, y, client, work, work, 3, one, one, one, seed_pair()
  )
  np.testing.assert_array_equal(ends[0], x - 5)
  np.testing.assert_array_equal(ends[1], y - 3 * 2)
  ends = local_hypergradient.simultaneous_steps(
      problem, solver, x, y, client, work, one, one, one, seed_pair()
  )
  np.testing.assert_array_equal(ends[0], x - 2)
  np.testing.assert_array_equal(ends[1], y - 2)


def _drawn_rows(method, seed):
  """The example that x, and those that y, moved along, with B = 1."""
  def loss(x, y, batch):
    return tf.reduce_mean(tf.linalg.matvec(tf.one_hot(batch, 6), x - y))

  def zero(seed):
    del seed
    return tf.zeros([6])

  problem = fednest_tff.minimax(
      loss, zero, zero, tf.TensorSpec([], tf.int32)
  )
  dataset = tf.data.Dataset.range(6).map(lambda row: tf.cast(row, tf.int32))
  client = client_lib.from_dataset(problem, uniform, dataset)
  work = descent.LocalWork(steps=1, batch_size=1)
  rates = (tf.constant(1.0),) * 3
  if method == 'alternating':
    x, y = local_hypergradient.alternating_steps(
        problem, None, zero(0), zero(0), client, work, work, 2, *rates, seed
    )
  else:
    x, y = local_hypergradient.simultaneous_steps(
        problem, None, zero(0), zero(0), client, work, *rates, seed
    )
  return (np.flatnonzero(x).tolist(), np.flatnonzero(y).tolist()), (x, y)


@pytest.mark.parametrize(('method', 'calls'), [
    ('alternating', 2), ('simultaneous', 1)
])  # fmt: skip
def test_levels_and_calls_draw_their_own_minibatches(method, calls):
  results = [_drawn_rows(method, seed_pair(i, 0)) for i in range(12)]
  for _, (x, y) in results:
    assert tf.reduce_sum(x).numpy() == -1.0
    assert tf.reduce_sum(y).numpy() == -calls
  rows = [rows for rows, _ in results]
  # Not always the same example in x and y, nor in both calls for y.
  assert any(not set(x) <= set(y) for x, y in rows)
  assert len({tuple(y) for _, y in rows}) > 2
  assert any(len(y) == calls for _, y in rows)


# A representation that is declared, or not.


def _mlp_client(problem):
  return client_lib.from_dataset(problem, uniform, mlp.make_dataset())


def _all_results(problem):
  client = _mlp_client(problem)
  x, y = problem.init_outer(1), problem.init_inner(2)
  h, v = problem.init_outer(3), problem.init_inner(4)
  work = descent.LocalWork(steps=2, batch_size=2)
  rate, smoothness, seed = double(0.1), double(5.0), seed_pair()
  solver = inverse_hessian.build_solver('truncated', 3)
  features = client_lib.features_at(problem, x, client)
  steps = work, tf.constant(2), rate, seed

  def inner_gradient(at, z):
    return derivatives.inner_gradient(problem, x, at, z)[1]

  def direct_gradient(at, xi):
    return derivatives.direct_gradient(problem, at, y, xi)[1]

  return {
      'inner': derivatives.inner_gradient(problem, x, y, features.inner),
      'product': derivatives.inner_hessian_product(
          problem, x, y, v, features.inner
      ),
      'outer loss': derivatives.outer_loss(problem, x, y, client.outer),
      'direct': derivatives.direct_gradient(problem, x, y, client.outer),
      'in inner': derivatives.outer_gradient_in_inner(
          problem, x, y, features.outer
      ),
      'hypergradient': derivatives.hypergradient(
          problem, x, y, v, client.outer, client.inner
      ),
      'inner svrg': descent.svrg(
          inner_gradient, y, v, features.inner, *steps
      ),
      'inner sgd': descent.sgd(inner_gradient, y, features.inner, *steps),
      'outer svrg': descent.svrg(direct_gradient, x, h, client.outer, *steps),
      'outer sgd': local_hypergradient.outer_steps(
          problem, solver, x, y, client, work, rate, smoothness, seed
      ),
      'alternating': local_hypergradient.alternating_steps(
          problem, solver, x, y, client, work, work, 2, rate, rate, smoothness,
          seed,
      ),
      'simultaneous': local_hypergradient.simultaneous_steps(
          problem, solver, x, y, client, work, rate, rate, smoothness, seed
      ),
  }  # fmt: skip


@pytest.mark.parametrize('kind', ['bilevel', 'minimax'])
def test_declaring_the_representation_changes_no_result(kind):
  inside, declared = (
      _all_results(mlp.build_problem(kind, declared))
      for declared in (False, True)
  )
  for name, expected in inside.items():
    actual = declared[name]
    tf.nest.assert_same_structure(actual, expected)
    leaves = zip(
        tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True
    )
    for a, b in leaves:
      np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name)


def test_the_representation_is_evaluated_once_for_all_inner_steps():
  calls = []

  def counted(x, batch):
    calls.append(None)
    return mlp.features(x, batch)

  problem = fednest_tff.minimax(
      lambda x, y, features: mlp.head_loss(y, features) - mlp.ridge(y),
      mlp.body, mlp.head, mlp.SPEC, representation=counted,
  )  # fmt: skip
  client = _mlp_client(problem)
  x, y = problem.init_outer(1), problem.init_inner(2)
  rate = double(0.1)
  calls.clear()
  local_hypergradient.alternating_steps(
      problem, None, x, y, client, descent.LocalWork(steps=4, batch_size=2),
      descent.LocalWork(steps=1, batch_size=2), 3, rate, rate, rate,
      seed_pair(),
  )  # fmt: skip
  # Once for the 3 x 4 inner steps, and once in the outer step.
  assert len(calls) == 2
