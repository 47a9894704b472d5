"""Clients made of datasets, and what they compute, against closed forms."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.local import client as client_lib
from fednest_tff.local import (
    descent,
    inner_level,
    inverse_hessian,
    joint_levels,
    outer_level,
    sampling,
)
from tests import quadratic


def _seed(*numbers):
  return tf.constant(numbers or (7, 8), tf.int64)


def _double(value):
  return tf.constant(value, tf.float64)


def _uniform(examples):
  del examples
  return tf.constant(1.0)


# Clients from datasets.


SPEC = collections.OrderedDict(
    a=tf.TensorSpec([2], tf.float64),
    b=(tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.string)),
    c=tf.TensorSpec([], tf.bool),
)


def _rows(n, offset=0):
  ids = np.arange(offset, offset + n)
  return collections.OrderedDict(
      a=np.stack([ids, ids + 0.5], axis=1).reshape(n, 2),
      b=(ids.astype(np.int64), np.array([f'{i}' for i in ids], dtype='S4')),
      c=ids % 2 == 1,
  )


def _dataset(n, offset=0):
  return tf.data.Dataset.from_tensor_slices(_rows(n, offset))


def _problem(split='same', dtype=tf.float64):
  def loss(x, y, batch):
    return tf.reduce_mean(tf.cast(batch['a'], dtype)) * tf.reduce_sum(x * y)

  def one(seed):
    del seed
    return tf.ones([1], dtype)

  return fednest_tff.bilevel(loss, loss, one, one, SPEC, split=split)


def _assert_rows(examples, expected):
  tf.nest.assert_same_structure(examples, expected)
  for leaf, value in zip(
      tf.nest.flatten(examples), tf.nest.flatten(expected), strict=True
  ):
    np.testing.assert_array_equal(leaf, value)


@pytest.mark.parametrize('n', [1, 2, 5])
def test_a_client_holds_its_examples_densely(n):
  client = client_lib.from_dataset(_problem(), _uniform, _dataset(n))
  _assert_rows(client.inner, _rows(n))
  _assert_rows(client.outer, _rows(n))
  assert client.num_examples.dtype == tf.int64
  assert client.num_examples.numpy() == n
  assert client.weight.numpy() == 1.0
  assert client.seed.dtype == tf.int64
  assert client.seed.shape == []


@pytest.mark.parametrize('n', [1, 2, 7])
def test_a_client_splits_its_examples(n):
  problem = _problem(0.4)
  client = client_lib.from_dataset(problem, _uniform, _dataset(n))
  inner, outer = problem.split(tf.nest.map_structure(tf.constant, _rows(n)))
  _assert_rows(client.inner, inner)
  _assert_rows(client.outer, outer)
  assert client.num_examples.numpy() == n
  assert client.weight.numpy() == 1.0


@pytest.mark.parametrize('split', ['same', 0.5])
def test_a_client_without_examples_has_one_of_zeros_and_no_weight(split):
  def weighting(examples):
    count = sampling.num_examples(examples)
    assert count.numpy() == 0
    return 1.0 / tf.cast(count, tf.float64)  # Infinite.

  empty = _dataset(3).take(0)
  client = client_lib.from_dataset(_problem(split), weighting, empty)
  zero = collections.OrderedDict(
      a=np.zeros([1, 2]), b=(np.zeros(1), np.array([b''])), c=np.zeros(1, bool)
  )
  _assert_rows(client.inner, zero)
  _assert_rows(client.outer, zero)
  assert client.weight.numpy() == 0.0
  assert client.num_examples.numpy() == 0


def test_splits_never_see_a_client_without_examples():
  def split(examples):
    # Fails on no rows.
    best = tf.argmax(examples['a'][:, 0])
    part = tf.nest.map_structure(lambda t: tf.gather(t, [best]), examples)
    return part, examples

  empty = _dataset(3).take(0)
  client = client_lib.from_dataset(_problem(split), _uniform, empty)
  np.testing.assert_array_equal(client.inner['a'], np.zeros([1, 2]))
  assert client.weight.numpy() == 0.0


@pytest.mark.parametrize('level', ['inner', 'outer'])
def test_a_split_that_gives_a_level_nothing_leaves_no_weight(level):
  def split(examples):
    nothing = tf.nest.map_structure(lambda t: t[:0], examples)
    parts = (nothing, examples)
    return parts if level == 'inner' else parts[::-1]

  client = client_lib.from_dataset(_problem(split), _uniform, _dataset(3))
  assert client.weight.numpy() == 0.0
  assert client.num_examples.numpy() == 3
  other = 'outer' if level == 'inner' else 'inner'
  _assert_rows(getattr(client, other), _rows(3))
  padded = getattr(client, level)
  np.testing.assert_array_equal(padded['a'], np.zeros([1, 2]))


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
def test_weights_are_of_the_examples(dtype):
  def weighting(examples):
    _assert_rows(examples, _rows(4))
    return tf.shape(examples['a'])[0] * 3

  problem = _problem(0.5, dtype)
  client = client_lib.from_dataset(problem, weighting, _dataset(4))
  assert client.weight.dtype == dtype
  assert client.weight.numpy() == 12.0


def test_seeds_tell_clients_apart():
  def seed_of(dataset):
    return int(client_lib.from_dataset(_problem(), _uniform, dataset).seed)

  seeds = {seed_of(_dataset(n, offset)) for n in (0, 1, 4) for offset in (0, 1)}
  # Without examples, the offset makes no difference.
  assert len(seeds) == 5
  assert seed_of(_dataset(4)) == seed_of(_dataset(4))

  common = _seed()
  derived = set()
  for offset in (0, 1):
    client = client_lib.from_dataset(_problem(), _uniform, _dataset(4, offset))
    for purpose in (0, 1, tf.constant(2)):
      seed = client_lib.seed_of(client, common, purpose)
      assert seed.dtype == tf.int64
      assert seed.shape == [2]
      derived.add(tuple(seed.numpy()))
  assert len(derived) == 6


@pytest.mark.parametrize('n', [0, 1, 5])
def test_clients_inside_a_tf_function(n):
  problem = _problem(0.4)
  dataset = _dataset(5).take(n)
  traced = tf.function(
      lambda dataset: client_lib.from_dataset(problem, _uniform, dataset)
  )(dataset)
  eager = client_lib.from_dataset(problem, _uniform, dataset)
  for a, b in zip(
      tf.nest.flatten(traced), tf.nest.flatten(eager), strict=True
  ):
    np.testing.assert_array_equal(a, b)


# The two levels on a quadratic problem.


CLIENTS = quadratic.make_clients(seed=3)
FORM = quadratic.ClosedForm(CLIENTS)
PROBLEM = quadratic.build_problem()
_RNG = np.random.default_rng(4)
X, Y, V = (
    _RNG.normal(size=dim) for dim in (quadratic.DX, quadratic.DY, quadratic.DY)
)


def _client(index=2, problem=PROBLEM):
  dataset = quadratic.to_datasets(CLIENTS)[index]
  return client_lib.from_dataset(problem, _uniform, dataset)


def _local(index=2):
  return quadratic.local_form(CLIENTS[index])


def _close(actual, expected, tolerance=1e-10):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def _numpy_losses(client, x, y):
  """f_i and g_i, example by example."""
  outer, inner = [], []
  for j in range(len(client['A'])):
    e = {name: value[j] for name, value in client.items()}
    dy, dx = y - e['c'], x - e['e']
    outer.append(
        dy @ e['M'] @ dy / 2 + dx @ e['P'] @ dx / 2 + x @ e['Q'] @ y
    )
    inner.append(y @ e['A'] @ y / 2 - y @ (e['B'] @ x + e['b']))
  return np.mean(outer), np.mean(inner)


@pytest.mark.parametrize('index', range(3))
def test_levels_have_the_gradients_of_the_closed_form(index):
  client, form = _client(index), _local(index)
  outer, inner = _numpy_losses(CLIENTS[index], X, Y)
  value, gradient = inner_level.gradient(PROBLEM, X, Y, client.inner)
  _close(value, inner)
  _close(gradient, form.inner_gradient(X, Y))
  product = inner_level.hessian_product(PROBLEM, X, Y, V, client.inner)
  _close(product, form.A @ V)
  value, gradient = outer_level.direct_gradient(PROBLEM, X, Y, client.outer)
  _close(value, outer)
  _close(outer_level.loss(PROBLEM, X, Y, client.outer), outer)
  _close(gradient, form.direct_gradient(X, Y))
  _close(
      outer_level.gradient_in_inner(PROBLEM, X, Y, client.outer),
      form.gradient_in_inner(X, Y),
  )


def test_hypergradients_with_the_exact_product_average_to_the_closed_form():
  p = np.linalg.solve(FORM.A, FORM.gradient_in_inner(X, Y))
  results = []
  for index in range(3):
    client = _client(index)
    results.append(
        outer_level.hypergradient(
            PROBLEM, X, Y, tf.constant(p), client.outer, client.inner
        )
    )
  _close(FORM.mean([h for _, h in results]), FORM.hypergradient(X, Y))
  losses = [_numpy_losses(client, X, Y)[0] for client in CLIENTS]
  _close(FORM.mean([value for value, _ in results]), np.mean(losses))


def test_the_hypergradient_is_the_derivative_of_the_nested_loss():
  """At y*(x), by central differences of f(x, y*(x)) in NumPy."""
  def nested(x):
    y = FORM.inner_solution(x)
    return np.mean([_numpy_losses(client, x, y)[0] for client in CLIENTS])

  step = 1e-5
  expected = [
      (nested(X + step * unit) - nested(X - step * unit)) / (2 * step)
      for unit in np.eye(quadratic.DX)
  ]
  y = FORM.inner_solution(X)
  p = tf.constant(np.linalg.solve(FORM.A, FORM.gradient_in_inner(X, y)))
  clients = map(_client, range(3))
  actual = np.mean(
      [
          outer_level.hypergradient(PROBLEM, X, y, p, c.outer, c.inner)[1]
          for c in clients
      ],
      axis=0,
  )
  _close(actual, expected, 1e-8)


def test_hypergradient_takes_each_part_from_its_own_batch():
  """f from the outer examples, the mixed product from the inner ones."""
  p = np.linalg.solve(FORM.A, FORM.gradient_in_inner(X, Y))
  outer_batch, inner_batch = _client(1).outer, _client(2).inner
  value, h = outer_level.hypergradient(
      PROBLEM, X, Y, tf.constant(p), outer_batch, inner_batch
  )
  expected = _local(1).direct_gradient(X, Y) - _local(2).mixed_product(p)
  _close(h, expected)
  _close(value, _numpy_losses(CLIENTS[1], X, Y)[0])


def _minimax_problem():
  return fednest_tff.minimax(
      quadratic.outer_loss,
      quadratic.init_outer,
      quadratic.init_inner,
      quadratic.element_spec(),
  )


def test_hypergradient_of_minimax_is_the_direct_one():
  client = _client()
  _, h = outer_level.hypergradient(
      _minimax_problem(), X, Y, None, client.outer, client.inner
  )
  _close(h, _local().direct_gradient(X, Y))


def _local_hypergradient(
    name, terms, index=2, smoothness=None, seed=(7, 8), work=None, tau=1, nu=0
):
  if smoothness is None:
    smoothness = np.linalg.eigvalsh(_local(index).A)[-1]
  work = work or descent.LocalWork(steps=tau)
  hypergradient = outer_level.LocalHypergradient(
      PROBLEM,
      inverse_hessian.build_solver(name, terms),
      _client(index),
      work,
      tf.constant(tau),
      _double(smoothness),
      _seed(*seed),
  )
  return hypergradient(tf.constant(X), tf.constant(Y), tf.constant(nu))


@pytest.mark.parametrize('index', range(3))
def test_local_hypergradient_by_conjugate_gradient(index):
  h = _local_hypergradient('cg', quadratic.DY + 1, index)
  _close(h, _local(index).hypergradient(X, Y))


def test_local_hypergradient_by_a_long_series():
  h = tf.function(lambda: _local_hypergradient('truncated', 200))()
  _close(h, _local().hypergradient(X, Y))


@pytest.mark.parametrize('terms', [1, 2, 5])
def test_local_hypergradient_by_a_short_series(terms):
  form, smoothness = _local(), 6.0
  factor = np.eye(quadratic.DY) - form.A / smoothness
  series = sum(np.linalg.matrix_power(factor, n) for n in range(terms))
  p = series @ form.gradient_in_inner(X, Y) / smoothness
  h = _local_hypergradient('truncated', terms, smoothness=smoothness)
  _close(h, form.direct_gradient(X, Y) - form.mixed_product(p))


def test_local_hypergradient_by_the_stochastic_product():
  """Each outcome is one of the N products, and N' is drawn anew per step."""
  form, smoothness, terms = _local(), 6.0, 4
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


def _two_and_rest(examples):
  return (
      tf.nest.map_structure(lambda t: t[:2], examples),
      tf.nest.map_structure(lambda t: t[2:], examples),
  )


@pytest.mark.parametrize('batch_size', [None, 8])
def test_local_hypergradient_keeps_the_levels_apart(batch_size):
  """f and its gradients from the outer examples, g from the inner ones."""
  (data,) = quadratic.make_clients(1, (7,), seed=6)
  problem = quadratic.build_problem(split=_two_and_rest)
  client = client_lib.from_dataset(
      problem, _uniform, quadratic.to_datasets([data])[0]
  )
  g, f = (
      quadratic.local_form({name: rows[part] for name, rows in data.items()})
      for part in (slice(2), slice(2, None))
  )
  hypergradient = outer_level.LocalHypergradient(
      problem,
      inverse_hessian.build_solver('cg', quadratic.DY + 1),
      client,
      descent.LocalWork(steps=2, batch_size=batch_size),
      tf.constant(2),
      _double(1.0),
      _seed(),
  )
  p = np.linalg.solve(g.A, f.gradient_in_inner(X, Y))
  expected = f.direct_gradient(X, Y) - g.mixed_product(p)
  for nu in range(2):
    h = hypergradient(tf.constant(X), tf.constant(Y), tf.constant(nu))
    _close(h, expected)


# Local steps of both levels.


WORK = descent.LocalWork(steps=3)


def test_inner_steps_are_the_numpy_loop():
  client, form = _client(), _local()
  q, rate = V, 0.2
  start = Y
  y = start
  for _ in range(3):
    correction = form.inner_gradient(X, y) - form.inner_gradient(X, start)
    y = y - rate * (correction + q)
  actual = inner_level.svrg_steps(
      PROBLEM, tf.constant(X), tf.constant(Y), tf.constant(q), client.inner,
      WORK, tf.constant(3), _double(rate), _seed(),
  )  # fmt: skip
  _close(actual, y)
  y = start
  for _ in range(3):
    y = y - rate * form.inner_gradient(X, y)
  actual = inner_level.sgd_steps(
      PROBLEM, tf.constant(X), tf.constant(Y), client.inner, WORK,
      tf.constant(3), _double(rate), _seed(),
  )  # fmt: skip
  _close(actual, y)


def test_outer_svrg_corrects_the_direct_gradient_only():
  client, form = _client(), _local()
  h, rate = np.array([1.0, -2.0, 0.5]), 0.2
  x = X
  for _ in range(3):
    correction = form.direct_gradient(x, Y) - form.direct_gradient(X, Y)
    x = x - rate * (correction + h)
  actual = outer_level.svrg_steps(
      PROBLEM, tf.constant(X), tf.constant(Y), tf.constant(h), client.outer,
      WORK, _double(rate), _seed(),
  )  # fmt: skip
  _close(actual, x)


def test_outer_sgd_follows_the_local_hypergradient():
  form, rate = _local(), 0.1
  x = X
  for _ in range(3):
    x = x - rate * form.hypergradient(x, Y)
  solver = inverse_hessian.build_solver('cg', quadratic.DY + 1)
  actual = outer_level.sgd_steps(
      PROBLEM, solver, tf.constant(X), tf.constant(Y), _client(), WORK,
      _double(rate), _double(1.0), _seed(),
  )  # fmt: skip
  _close(actual, x)


def test_alternating_steps_take_y_first():
  form, beta, alpha = _local(), 0.2, 0.1
  x, y = X, Y
  for _ in range(2 * 3):
    y = y - beta * form.inner_gradient(x, y)
  for _ in range(2):
    x = x - alpha * form.hypergradient(x, y)
  solver = inverse_hessian.build_solver('cg', quadratic.DY + 1)
  actual = joint_levels.alternating_steps(
      PROBLEM, solver, tf.constant(X), tf.constant(Y), _client(), WORK,
      descent.LocalWork(steps=2), 2, _double(beta), _double(alpha),
      _double(1.0), _seed(),
  )  # fmt: skip
  _close(actual[0], x)
  _close(actual[1], y)


@pytest.mark.parametrize('kind', ['bilevel', 'minimax'])
@pytest.mark.parametrize('divide', [False, True])
def test_simultaneous_steps_move_both_from_the_old_point(kind, divide):
  form, beta, alpha, tau = _local(), 0.2, 0.1, 3
  is_bilevel = kind == 'bilevel'
  x, y = X, Y
  share = 1 / tau if divide else 1.0
  for _ in range(tau):
    if is_bilevel:
      h, g = form.hypergradient(x, y), form.inner_gradient(x, y)
    else:
      h, g = form.direct_gradient(x, y), -form.gradient_in_inner(x, y)
    x, y = x - share * alpha * h, y - share * beta * g
  problem = PROBLEM if is_bilevel else _minimax_problem()
  solver = inverse_hessian.build_solver('cg', quadratic.DY + 1)
  actual = joint_levels.simultaneous_steps(
      problem, solver if is_bilevel else None, tf.constant(X), tf.constant(Y),
      _client(problem=problem),
      descent.LocalWork(steps=tau, divide_by_steps=divide), _double(beta),
      _double(alpha), _double(1.0), _seed(),
  )  # fmt: skip
  _close(actual[0], x)
  _close(actual[1], y)


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
      split=_two_and_rest,
  )
  (dataset,) = quadratic.to_datasets(quadratic.make_clients(1, (7,)))
  client = client_lib.from_dataset(problem, _uniform, dataset)
  x = tf.zeros([quadratic.DX], tf.float64)
  y = tf.zeros([quadratic.DY], tf.float64)
  one = _double(1.0)
  solver = inverse_hessian.build_solver('truncated', 2)
  for end in (
      outer_level.svrg_steps(
          problem, x, y, x + 1, client.outer, work, one, _seed()
      ),
      outer_level.sgd_steps(
          problem, solver, x, y, client, work, one, one, _seed()
      ),
  ):
    np.testing.assert_array_equal(end, x - 5)
  ends = joint_levels.alternating_steps(
      problem, solver, x, y, client, work, work, 3, one, one, one, _seed()
  )
  np.testing.assert_array_equal(ends[0], x - 5)
  np.testing.assert_array_equal(ends[1], y - 3 * 2)
  ends = joint_levels.simultaneous_steps(
      problem, solver, x, y, client, work, one, one, one, _seed()
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
  client = client_lib.from_dataset(problem, _uniform, dataset)
  work = descent.LocalWork(steps=1, batch_size=1)
  rates = (tf.constant(1.0),) * 3
  if method == 'alternating':
    x, y = joint_levels.alternating_steps(
        problem, None, zero(0), zero(0), client, work, work, 2, *rates, seed
    )
  else:
    x, y = joint_levels.simultaneous_steps(
        problem, None, zero(0), zero(0), client, work, *rates, seed
    )
  return (np.flatnonzero(x).tolist(), np.flatnonzero(y).tolist()), (x, y)


@pytest.mark.parametrize(('method', 'calls'), [
    ('alternating', 2), ('simultaneous', 1)
])  # fmt: skip
def test_levels_and_calls_draw_their_own_minibatches(method, calls):
  results = [_drawn_rows(method, _seed(i, 0)) for i in range(12)]
  for _, (x, y) in results:
    assert tf.reduce_sum(x).numpy() == -1.0
    assert tf.reduce_sum(y).numpy() == -calls
  rows = [rows for rows, _ in results]
  # Not always the same example in x and y, nor in both calls for y.
  assert any(not set(x) <= set(y) for x, y in rows)
  assert len({tuple(y) for _, y in rows}) > 2
  assert any(len(y) == calls for _, y in rows)


# A representation that is declared, or not.


_INPUT, _HIDDEN, _CLASSES = 3, 4, 3
_MLP_SPEC = collections.OrderedDict(
    image=tf.TensorSpec([_INPUT], tf.float64), label=tf.TensorSpec([], tf.int64)
)


def _normal(shape, seed, index):
  return tf.random.stateless_normal(shape, [seed, index], dtype=tf.float64)


def _body(seed):
  return {
      'w': _normal([_INPUT, _HIDDEN], seed, 0), 'b': _normal([_HIDDEN], seed, 1)
  }  # fmt: skip


def _head(seed):
  return _normal([_HIDDEN, _CLASSES], seed, 2), _normal([_CLASSES], seed, 3)


def _features(x, batch):
  hidden = tf.tanh(batch['image'] @ x['w'] + x['b'])
  return {'hidden': hidden, 'label': batch['label']}


def _head_loss(y, features):
  logits = features['hidden'] @ y[0] + y[1]
  return tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(features['label'], logits)
  )


def _ridge(y):
  return 0.1 * sum(tf.reduce_sum(leaf**2) for leaf in y)


def _mlp_problem(kind, declared):
  """The same problem, with its representation declared or inside the losses."""
  def outer(x, y, features):
    return _head_loss(y, features) + 0.01 * tf.reduce_sum(x['w'] ** 2)

  def inner(x, y, features):
    # Also depends on x beside the features.
    strength = 1 + tf.reduce_sum(x['b'] ** 2)
    return _head_loss(y, features) + strength * _ridge(y)

  def through(loss):
    if declared:
      return loss
    return lambda x, y, batch: loss(x, y, _features(x, batch))

  options = {'representation': _features} if declared else {}
  if kind == 'minimax':
    return fednest_tff.minimax(
        through(lambda x, y, features: outer(x, y, features) - _ridge(y)),
        _body, _head, _MLP_SPEC, **options,
    )  # fmt: skip
  return fednest_tff.bilevel(
      through(outer), through(inner), _body, _head, _MLP_SPEC, **options
  )


def _mlp_client(problem):
  rng = np.random.default_rng(7)
  data = collections.OrderedDict(
      image=rng.normal(size=(9, _INPUT)), label=rng.integers(_CLASSES, size=9)
  )
  dataset = tf.data.Dataset.from_tensor_slices(data)
  return client_lib.from_dataset(problem, _uniform, dataset)


def _all_results(problem):
  client = _mlp_client(problem)
  x, y = problem.init_outer(1), problem.init_inner(2)
  h, v = problem.init_outer(3), problem.init_inner(4)
  work = descent.LocalWork(steps=2, batch_size=2)
  rate, smoothness, seed = _double(0.1), _double(5.0), _seed()
  solver = inverse_hessian.build_solver('truncated', 3)
  inner = problem.representation(x, client.inner)
  outer = problem.representation(x, client.outer)
  tau = tf.constant(2)
  return {
      'inner': inner_level.gradient(problem, x, y, inner),
      'product': inner_level.hessian_product(problem, x, y, v, inner),
      'outer loss': outer_level.loss(problem, x, y, client.outer),
      'direct': outer_level.direct_gradient(problem, x, y, client.outer),
      'in inner': outer_level.gradient_in_inner(problem, x, y, outer),
      'hypergradient': outer_level.hypergradient(
          problem, x, y, v, client.outer, client.inner
      ),
      'inner svrg': inner_level.svrg_steps(
          problem, x, y, v, inner, work, tau, rate, seed
      ),
      'inner sgd': inner_level.sgd_steps(
          problem, x, y, inner, work, tau, rate, seed
      ),
      'outer svrg': outer_level.svrg_steps(
          problem, x, y, h, client.outer, work, rate, seed
      ),
      'outer sgd': outer_level.sgd_steps(
          problem, solver, x, y, client, work, rate, smoothness, seed
      ),
      'alternating': joint_levels.alternating_steps(
          problem, solver, x, y, client, work, work, 2, rate, rate, smoothness,
          seed,
      ),
      'simultaneous': joint_levels.simultaneous_steps(
          problem, solver, x, y, client, work, rate, rate, smoothness, seed
      ),
  }  # fmt: skip


@pytest.mark.parametrize('kind', ['bilevel', 'minimax'])
def test_declaring_the_representation_changes_no_result(kind):
  inside, declared = (
      _all_results(_mlp_problem(kind, declared)) for declared in (False, True)
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
    return _features(x, batch)

  problem = fednest_tff.minimax(
      lambda x, y, features: _head_loss(y, features) - _ridge(y), _body, _head,
      _MLP_SPEC, representation=counted,
  )  # fmt: skip
  client = _mlp_client(problem)
  x, y = problem.init_outer(1), problem.init_inner(2)
  rate = _double(0.1)
  calls.clear()
  joint_levels.alternating_steps(
      problem, None, x, y, client, descent.LocalWork(steps=4, batch_size=2),
      descent.LocalWork(steps=1, batch_size=2), 3, rate, rate, rate, _seed(),
  )  # fmt: skip
  # Once for the 3 x 4 inner steps, and once in the outer step.
  assert len(calls) == 2
