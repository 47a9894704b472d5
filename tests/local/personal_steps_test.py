"""A client's steps with an inner solution of its own, against closed forms."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff import projections
from fednest_tff.local import client as client_lib
from fednest_tff.local import (
    derivatives,
    descent,
    inverse_hessian,
    personal_steps,
)
from tests.helpers import mlp, personal, quadratic, reference
from tests.helpers.one_client import (
    CLIENTS,
    X,
    Y,
    assert_close,
    double,
    local_form,
    read_client,
    seed_pair,
    two_and_rest,
    uniform,
)

PROBLEM = personal.build_problem()
SETTINGS = reference.Settings(
    alpha=0.1,
    beta=0.15,
    inner_rounds=0,
    inner_steps=3,
    outer_steps=2,
    neumann_terms=3,
    smoothness=4.0,
)


def _inner(steps=3, **options):
  return descent.LocalWork(steps=steps, **options)


def _personalize(problem, examples, work, beta=0.15, seed=(7, 8)):
  run = tf.function(
      lambda: personal_steps.personalize(
          problem, tf.constant(X), tf.constant(Y), examples, work,
          double(beta), seed_pair(*seed),
      )
  )
  return run()


def _steps(
    client, problem=PROBLEM, s=SETTINGS, solver=None, batch_size=None,
    seed=(7, 8), outer_steps=None,
):
  """(x_i, y_i) from (X, Y), with the truncated series unless told otherwise."""
  solver = solver or inverse_hessian.build_solver('truncated', s.neumann_terms)
  work = functools.partial(descent.LocalWork, batch_size=batch_size)
  run = tf.function(
      lambda: personal_steps.personal_steps(
          problem, solver, tf.constant(X), tf.constant(Y), client,
          work(steps=s.inner_steps), work(steps=outer_steps or s.outer_steps),
          double(s.beta), double(s.alpha), double(s.smoothness),
          seed_pair(*seed),
      )
  )
  return run()


# Inner steps.


@pytest.mark.parametrize('index', range(3))
def test_personalize_takes_inner_steps_from_the_start(index):
  form, y = local_form(index), Y
  for _ in range(3):
    y = y - 0.15 * form.inner_gradient(X, y)
  assert_close(_personalize(PROBLEM, CLIENTS[index], _inner()), y)


@pytest.mark.parametrize('index', range(3))
def test_personalize_ends_at_the_inner_solution(index):
  y = _personalize(PROBLEM, CLIENTS[index], _inner(100), beta=0.55)
  assert_close(y, local_form(index).inner_solution(X), 1e-12)


def test_personalize_draws_minibatches_from_the_seed():
  singles = [
      quadratic.local_form({k: v[j : j + 1] for k, v in CLIENTS[2].items()})
      for j in range(3)
  ]
  orders = set()
  for number in range(6):
    y = _personalize(
        PROBLEM, CLIENTS[2], _inner(batch_size=1), seed=(number, 1)
    )
    matches = []
    for order in np.ndindex(3, 3, 3):
      expected = Y
      for j in order:
        expected = expected - 0.15 * singles[j].inner_gradient(X, expected)
      if np.linalg.norm(y - expected) < 1e-10:
        matches.append(order)
    (order,) = matches
    assert sorted(order) == [0, 1, 2]
    orders.add(order)
  assert len(orders) > 1


# Outer steps.


@pytest.mark.parametrize('index', range(3))
def test_one_step_is_along_the_exact_hypergradient(index):
  s = reference.Settings(
      alpha=1.0, beta=0.55, inner_rounds=0, inner_steps=100, outer_steps=1,
      neumann_terms=0, smoothness=1.0,
  )
  solver = inverse_hessian.build_solver('cg', quadratic.DY + 1)
  x, y = _steps(read_client(index, PROBLEM), s=s, solver=solver)
  form = local_form(index)
  solution = form.inner_solution(X)
  assert_close(y, solution, 1e-12)
  assert_close(X - x, form.hypergradient(X, solution))
  # Both parts of it count.
  assert np.linalg.norm((X - x) - form.direct_gradient(X, solution)) > 0.1


@pytest.mark.parametrize('index', range(3))
def test_steps_equal_numpy(index):
  x, y = _steps(read_client(index, PROBLEM))
  draws = personal.full_batches(CLIENTS[index])
  assert_close(x, personal.steps(draws, X, Y, SETTINGS))
  # The y that is returned belongs to the x before the steps.
  expected = Y
  for _ in range(SETTINGS.inner_steps):
    expected = expected - SETTINGS.beta * local_form(index).inner_gradient(
        X, expected
    )
  assert_close(y, expected)


def test_minibatch_steps_equal_numpy():
  found = []
  for seed in ((7, 8), (7, 9)):
    x, _ = _steps(read_client(2, PROBLEM), batch_size=1, seed=seed)
    draws = personal.minibatches(CLIENTS[2], 1, SETTINGS, seed_pair(*seed))
    assert_close(x, personal.steps(draws, X, Y, SETTINGS))
    found.append(x)
  assert np.linalg.norm(found[0] - found[1]) > 1e-3


def test_steps_of_x_are_projected():
  starts = np.stack([X, quadratic.init_outer(0).numpy()])
  bound = float(np.max(np.abs(starts)))
  s = dataclasses.replace(
      SETTINGS, alpha=2.0, project_outer=lambda v: np.clip(v, -bound, bound)
  )
  problem = personal.build_problem(
      project_outer=projections.box(-bound, bound)
  )
  x, _ = _steps(read_client(2, problem), problem, s)
  draws = personal.full_batches(CLIENTS[2])
  assert_close(x, personal.steps(draws, X, Y, s))
  assert np.any(np.abs(x) == bound)


def test_levels_see_their_own_examples():
  """g of two inner examples, f of five outer ones."""
  (data,) = quadratic.make_clients(1, (7,), seed=6)
  problem = personal.build_problem(split=two_and_rest)
  client = client_lib.from_dataset(
      problem, uniform, quadratic.to_datasets([data])[0]
  )
  inner, outer = (
      quadratic.local_form(quadratic.map_arrays(data, part))
      for part in (lambda value: value[:2], lambda value: value[2:])
  )
  draws = personal.Draws(
      lambda nu, k: inner, lambda nu: outer, lambda nu, n: inner
  )
  x, _ = _steps(client, problem)
  assert_close(x, personal.steps(draws, X, Y, SETTINGS))


def test_no_step_returns_the_start():
  x, y = _steps(
      read_client(2, PROBLEM), outer_steps=lambda examples: tf.constant(0)
  )
  np.testing.assert_array_equal(x, X)
  np.testing.assert_array_equal(y, Y)


# A network: the inner solution is not linear in x.


def _network_steps(problem, client, inner_steps, solver, alpha=1.0):
  x, y = mlp.body(3), mlp.head(3)
  run = tf.function(
      lambda: personal_steps.personal_steps(
          problem, solver, x, y, client, descent.LocalWork(steps=inner_steps),
          descent.LocalWork(steps=1), double(0.5), double(alpha), double(4.0),
          seed_pair(),
      )
  )
  return x, *run()


def test_hypergradient_of_a_network_against_differences():
  """d/dx of f_i(x, y_i*(x)), with y_i* by a long descent at every x."""
  problem = mlp.build_problem('personal', True)
  client = client_lib.from_dataset(problem, uniform, mlp.make_dataset())
  dimension = mlp.HIDDEN * mlp.CLASSES + mlp.CLASSES
  solver = inverse_hessian.build_solver('cg', 2 * dimension)
  x, x_i, _ = _network_steps(problem, client, 500, solver)
  h = tf.nest.map_structure(lambda a, b: (a - b).numpy(), x, x_i)

  @tf.function
  def objective(x):
    y = personal_steps.personalize(
        problem, x, mlp.head(3), client.inner, descent.LocalWork(steps=500),
        double(0.5), seed_pair(),
    )
    _, g = derivatives.inner_gradient(
        problem, x, y, problem.representation(x, client.inner)
    )
    residual = tf.norm(tf.concat([tf.reshape(t, [-1]) for t in g], 0))
    return derivatives.outer_loss(problem, x, y, client.outer), residual

  assert objective(x)[1] < 1e-12
  rng = np.random.default_rng(0)
  for _ in range(4):
    along = {name: rng.normal(size=t.shape) for name, t in x.items()}
    ends = [
        objective({name: x[name] + sign * 1e-5 * along[name] for name in x})[0]
        for sign in (1, -1)
    ]
    slope = (ends[0] - ends[1]) / 2e-5
    expected = sum(np.sum(h[name] * along[name]) for name in x)
    assert abs(slope - expected) < 1e-8 * max(1, abs(expected))


def test_representation_declared_or_not_gives_the_same_steps():
  solver = inverse_hessian.build_solver('truncated', 3)
  ends = []
  for declared in (True, False):
    problem = mlp.build_problem('personal', declared)
    assert problem.has_representation == declared
    client = client_lib.from_dataset(problem, uniform, mlp.make_dataset())
    ends.append(_network_steps(problem, client, 3, solver)[1:])
  tf.nest.map_structure(lambda a, b: assert_close(a, b, 1e-12), *ends)
