"""Local SGD and SVRG against loops in NumPy, and the work of a client."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff.local import derivatives, descent
from tests.helpers.one_client import (
    PROBLEM,
    V,
    X,
    Y,
    assert_close,
    local_form,
    read_client,
)

DIM = 3
SEED = (11, 12)


def _seed(*numbers):
  return tf.constant(numbers or SEED, tf.int64)


def _rate(value):
  return tf.constant(value, tf.float64)


class Noisy:
  """Examples with a gradient A_j v - c_j each, where A_j may vary with j."""

  def __init__(self, n, varying=True, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(n, DIM, DIM))
    self.a = np.einsum('nij,nkj->nik', a, a) / DIM + np.eye(DIM)
    if not varying:
      self.a[:] = self.a[0]
    self.c = 3 * rng.normal(size=(n, DIM))
    self.start = rng.normal(size=DIM)
    self.q = rng.normal(size=DIM)
    self.features = collections.OrderedDict(
        a=tf.constant(self.a), c=tf.constant(self.c), row=tf.range(n)
    )

  def gradient(self, v, batch):
    product = tf.linalg.matvec(batch['a'], v[tf.newaxis])
    return tf.reduce_mean(product - batch['c'], axis=0)

  def gradient_at(self, v, rows):
    return np.mean(self.a[rows] @ v - self.c[rows], axis=0)

  def stream(self, work, tau, seed=SEED):
    """The rows of each minibatch that the same seed leads to."""
    batches = work.minibatches(self.features, tf.constant(tau), _seed(*seed))
    return [batches[tf.constant(nu)]['row'].numpy() for nu in range(tau)]


def _sgd(noisy, stream, rate):
  v = noisy.start
  for rows in stream:
    v = v - rate * noisy.gradient_at(v, rows)
  return v


def _svrg(noisy, stream, rate, anchor_stream=None):
  v = noisy.start
  for rows, anchor_rows in zip(stream, anchor_stream or stream, strict=True):
    correction = noisy.gradient_at(v, rows)
    correction = correction - noisy.gradient_at(noisy.start, anchor_rows)
    v = v - rate * (correction + noisy.q)
  return v


def _run_sgd(noisy, work, tau, rate, seed=SEED):
  return descent.sgd(
      noisy.gradient,
      tf.constant(noisy.start),
      noisy.features,
      work,
      tf.constant(tau),
      _rate(rate),
      _seed(*seed),
  )


def _run_svrg(noisy, work, tau, rate, seed=SEED):
  return descent.svrg(
      noisy.gradient,
      tf.constant(noisy.start),
      tf.constant(noisy.q),
      noisy.features,
      work,
      tf.constant(tau),
      _rate(rate),
      _seed(*seed),
  )


CASES = [(7, 3, 5), (6, 2, 7), (4, 9, 3), (5, None, 4), (1, 1, 2), (5, 2, 1)]


@pytest.mark.parametrize(('n', 'batch_size', 'tau'), CASES)
def test_sgd_is_the_numpy_loop(n, batch_size, tau):
  noisy = Noisy(n)
  work = descent.LocalWork(steps=tau, batch_size=batch_size)
  expected = _sgd(noisy, noisy.stream(work, tau), 0.1)
  actual = _run_sgd(noisy, work, tau, 0.1)
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(('n', 'batch_size', 'tau'), CASES)
def test_svrg_is_the_numpy_loop(n, batch_size, tau):
  noisy = Noisy(n)
  work = descent.LocalWork(steps=tau, batch_size=batch_size)
  expected = _svrg(noisy, noisy.stream(work, tau), 0.1)
  actual = _run_svrg(noisy, work, tau, 0.1)
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def test_traced_loops_are_the_eager_ones():
  noisy = Noisy(7)
  work = descent.LocalWork(steps=5, batch_size=3)
  for run in (_run_sgd, _run_svrg):
    traced = tf.function(lambda run=run: run(noisy, work, 5, 0.1))()
    eager = run(noisy, work, 5, 0.1)
    np.testing.assert_allclose(traced, eager, rtol=0, atol=1e-14)


@pytest.mark.parametrize('batch_size', [1, 2, 4])
def test_svrg_has_the_same_minibatch_in_both_terms(batch_size):
  """Where the noise is additive it cancels, so no minibatch matters.

  Every seed then gives the loop with all examples; a fresh minibatch for the
  anchor would leave the difference of two noises in each step.
  """
  noisy = Noisy(8, varying=False)
  tau, rate = 6, 0.1
  work = descent.LocalWork(steps=tau, batch_size=batch_size)
  everything = [np.arange(8)] * tau
  expected = _svrg(noisy, everything, rate)
  for seed in ((1, 2), (3, 4), (5, 6)):
    actual = _run_svrg(noisy, work, tau, rate, seed)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
    # The data are noisy enough to tell.
    other = _svrg(
        noisy,
        noisy.stream(work, tau, seed),
        rate,
        noisy.stream(work, tau, (7, 8)),
    )
    assert np.linalg.norm(other - expected) > 0.01


def test_svrg_evaluates_each_minibatch_at_the_iterate_and_at_the_anchor():
  noisy = Noisy(7)
  work = descent.LocalWork(steps=4, batch_size=2)
  calls = []

  def gradient(v, batch):
    calls.append((v.numpy(), batch['row'].numpy().tolist()))
    return noisy.gradient(v, batch)

  descent.svrg(
      gradient, tf.constant(noisy.start), tf.constant(noisy.q), noisy.features,
      work, tf.constant(4), _rate(0.1), _seed(),
  )  # fmt: skip
  # The first step, at the anchor itself, needs no minibatch.
  assert len(calls) == 6
  stream = noisy.stream(work, 4)
  for nu in range(1, 4):
    pair = calls[2 * nu - 2 : 2 * nu]
    assert [rows for _, rows in pair] == [stream[nu].tolist()] * 2
    at_anchor = [np.array_equal(v, noisy.start) for v, _ in pair]
    assert sum(at_anchor) == 1


def test_a_client_without_steps_stays_at_the_anchor():
  noisy = Noisy(7)
  for divide_by_steps in (False, True):
    work = descent.LocalWork(
        steps=lambda _: tf.constant(0), divide_by_steps=divide_by_steps
    )
    end = _run_svrg(noisy, work, 0, 0.25)
    np.testing.assert_array_equal(end, noisy.start)


def test_first_svrg_step_is_along_the_anchor_direction():
  noisy = Noisy(7)
  work = descent.LocalWork(steps=1, batch_size=2)
  end = _run_svrg(noisy, work, 1, 0.25)
  np.testing.assert_allclose(end, noisy.start - 0.25 * noisy.q, atol=1e-14)


def test_seeds_choose_the_minibatches():
  noisy = Noisy(9)
  work = descent.LocalWork(steps=4, batch_size=2)
  for run in (_run_sgd, _run_svrg):
    first = run(noisy, work, 4, 0.1, (1, 1)).numpy()
    np.testing.assert_array_equal(run(noisy, work, 4, 0.1, (1, 1)), first)
    assert np.linalg.norm(run(noisy, work, 4, 0.1, (1, 2)) - first) > 1e-3


def test_one_epoch_of_sgd_uses_all_examples():
  """A gradient that is the row itself sums up what was seen."""
  features = {'row': tf.range(5, dtype=tf.float64)}
  work = descent.LocalWork(epochs=2, batch_size=1)
  tau = work.num_steps(features)
  end = descent.sgd(
      lambda v, batch: tf.reduce_sum(batch['row']), _rate(0.0), features, work,
      tau, _rate(1.0), _seed(),
  )  # fmt: skip
  assert end.numpy() == -20.0


@pytest.mark.parametrize('tau', [1, 2, 5])
def test_step_sizes_are_divided_by_the_steps(tau):
  noisy = Noisy(6)
  plain = descent.LocalWork(steps=tau, batch_size=2)
  divided = descent.LocalWork(steps=tau, batch_size=2, divide_by_steps=True)
  for run in (_run_sgd, _run_svrg):
    np.testing.assert_allclose(
        run(noisy, divided, tau, 0.4),
        run(noisy, plain, tau, 0.4 / tau),
        rtol=0,
        atol=1e-14,
    )


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
def test_step_size_keeps_its_type(dtype):
  rate = tf.constant(0.3, dtype)
  for divide, expected in ((False, 0.3), (True, 0.3 / 7)):
    work = descent.LocalWork(steps=7, divide_by_steps=divide)
    step_size = work.step_size(rate, tf.constant(7))
    assert step_size.dtype == dtype
    np.testing.assert_allclose(step_size, expected, rtol=1e-6)
    # No step at all: whatever its size, it must not poison what it meets.
    assert np.isfinite(work.step_size(rate, tf.constant(0)))


def test_variables_of_several_leaves_and_types():
  start = {'a': (tf.constant([1.0, 2.0]),), 'b': tf.constant(3.0, tf.float64)}
  q = {'a': (tf.constant([0.5, -0.5]),), 'b': tf.constant(2.0, tf.float64)}

  def gradient(v, batch):
    scale = tf.reduce_mean(batch)
    return {
        'a': (tf.cast(scale, tf.float32) * v['a'][0],), 'b': scale * v['b']
    }  # fmt: skip

  features = tf.ones([4], tf.float64)
  work = descent.LocalWork(steps=2, batch_size=3)
  arguments = (features, work, tf.constant(2), _rate(0.1), _seed())
  end = descent.sgd(gradient, start, *arguments)
  tf.nest.assert_same_structure(end, start)
  np.testing.assert_allclose(end['a'][0], [0.81, 1.62], rtol=1e-6)
  np.testing.assert_allclose(end['b'], 3 * 0.81, rtol=1e-14)
  end = descent.svrg(gradient, start, q, *arguments)
  # v1 = v0 - 0.1 q; v2 = v1 - 0.1 (v1 - v0 + q) = v0 - 0.19 q.
  np.testing.assert_allclose(end['a'][0], [0.905, 2.095], rtol=1e-6)
  np.testing.assert_allclose(end['b'], 3 - 0.38, rtol=1e-14)


def test_descend_counts_its_steps_from_zero():
  end = descent.descend(
      lambda v, nu: tf.cast(10**nu, tf.float64), _rate(0.0), tf.constant(4),
      _rate(1.0), lambda v: v,
  )  # fmt: skip
  assert end.numpy() == -1111.0
  end = descent.descend(
      lambda v, nu: tf.cast(10**nu, tf.float64), _rate(0.0), tf.constant(4),
      _rate(1.0), lambda v: v, first_step=2,
  )  # fmt: skip
  assert end.numpy() == -1100.0


# How much work.


@pytest.mark.parametrize('batch_size', [None, 1, 3, 10])
def test_steps_are_taken_as_given(batch_size):
  work = descent.LocalWork(steps=4, batch_size=batch_size)
  tau = work.num_steps(tf.zeros([7]))
  assert tau.dtype == tf.int32
  assert tau.numpy() == 4


@pytest.mark.parametrize(
    ('n', 'batch_size', 'epochs', 'expected'),
    [
        (7, 3, 1, 3), (7, 3, 4, 12), (6, 3, 2, 4), (2, 3, 5, 5),
        (7, None, 3, 3), (1, 1, 1, 1),
    ],
)  # fmt: skip
def test_epochs_are_passes_over_the_examples(n, batch_size, epochs, expected):
  work = descent.LocalWork(epochs=epochs, batch_size=batch_size)
  tau = work.num_steps({'a': tf.zeros([n, 2]), 'b': tf.zeros([n])})
  assert tau.dtype == tf.int32
  assert tau.numpy() == expected


@pytest.mark.parametrize('dtype', [tf.int32, tf.int64, tf.float32])
def test_steps_as_a_function_of_the_examples(dtype):
  work = descent.LocalWork(
      steps=lambda examples: tf.cast(2 * tf.shape(examples)[0], dtype)
  )
  tau = work.num_steps(tf.zeros([3, 2]))
  assert tau.dtype == tf.int32
  assert tau.numpy() == 6


@pytest.mark.parametrize('batch_size', [None, 2])
@pytest.mark.parametrize('divide_by_steps', [False, True])
@pytest.mark.parametrize('traced', [False, True])
def test_no_steps_leave_the_start(batch_size, divide_by_steps, traced):
  noisy = Noisy(5)
  work = descent.LocalWork(
      steps=lambda examples: tf.constant(0), batch_size=batch_size,
      divide_by_steps=divide_by_steps,
  ).at_level('inner')  # fmt: skip

  def run(method, *directions):
    return method(
        noisy.gradient, tf.constant(noisy.start), *directions, noisy.features,
        work, work.num_steps(noisy.features), _rate(0.5), _seed(),
    )  # fmt: skip

  call = tf.function(run) if traced else run
  np.testing.assert_array_equal(call(descent.sgd), noisy.start)
  np.testing.assert_array_equal(
      call(descent.svrg, tf.constant(noisy.q)), noisy.start
  )


def test_defaults_of_the_levels():
  inner = descent.LocalWork(batch_size=3).at_level('inner')
  assert inner == descent.LocalWork(epochs=1, batch_size=3)
  outer = descent.LocalWork(divide_by_steps=True).at_level('outer')
  assert outer == descent.LocalWork(steps=1, divide_by_steps=True)


def test_what_is_given_stays():
  def steps(examples):
    del examples
    return 2

  for given in ((5, None), (None, 6), (steps, None)):
    for level in ('inner', 'outer'):
      work = descent.LocalWork(0.3, *given, 7, True)
      assert work.at_level(level) == work


@pytest.mark.parametrize('level', ['inner', 'outer'])
@pytest.mark.parametrize('bad', [0, -1, 1.0, '2', True, tf.constant(2)])
def test_bad_work_is_named(level, bad):
  with pytest.raises(ValueError, match=f'`{level}_local_steps` must'):
    descent.LocalWork(steps=bad).at_level(level)
  with pytest.raises(ValueError, match=f'`{level}_local_epochs` must'):
    descent.LocalWork(epochs=bad).at_level(level)
  with pytest.raises(ValueError, match='`batch_size` must'):
    descent.LocalWork(steps=1, batch_size=bad).at_level(level)


@pytest.mark.parametrize('level', ['inner', 'outer'])
def test_only_steps_may_be_a_function(level):
  with pytest.raises(ValueError, match=f'`{level}_local_epochs` must'):
    descent.LocalWork(epochs=lambda examples: 1).at_level(level)
  with pytest.raises(ValueError, match='`batch_size` must'):
    descent.LocalWork(steps=1, batch_size=lambda examples: 1).at_level(level)


@pytest.mark.parametrize('level', ['inner', 'outer'])
def test_steps_and_epochs_exclude_each_other(level):
  with pytest.raises(
      ValueError,
      match=f'`{level}_local_steps` or `{level}_local_epochs`.*2 and 3',
  ):
    descent.LocalWork(steps=2, epochs=3).at_level(level)


# Projected steps.


def _box(v):
  return tf.clip_by_value(v, _rate(-0.5), _rate(0.5))


def _numpy_box(v):
  return np.clip(v, -0.5, 0.5)


@pytest.mark.parametrize('tau', [0, 1, 2, 5])
@pytest.mark.parametrize('known', [True, False])
def test_every_step_is_projected(tau, known):
  """Also the first step of SVRG, and a number of steps known only later."""
  noisy = Noisy(6)
  noisy.start = _numpy_box(noisy.start)
  noisy.q = 4 * noisy.q
  work = descent.LocalWork(steps=max(tau, 1), batch_size=2)
  stream = noisy.stream(work, tau)
  plain = corrected = noisy.start
  touched = 0
  for rows in stream:
    anchor = noisy.gradient_at(noisy.start, rows)
    plain = _numpy_box(plain - 0.3 * noisy.gradient_at(plain, rows))
    free = corrected - 0.3 * (
        noisy.gradient_at(corrected, rows) - anchor + noisy.q
    )
    corrected = _numpy_box(free)
    touched += np.any(corrected != free)
  assert touched or tau == 0

  @tf.function
  def run(count):
    arguments = (
        noisy.features, work, tf.constant(tau) if known else count,
        _rate(0.3), _seed(), _box,
    )  # fmt: skip
    start = tf.constant(noisy.start)
    return (
        descent.sgd(noisy.gradient, start, *arguments),
        descent.svrg(noisy.gradient, start, tf.constant(noisy.q), *arguments),
    )

  sgd, svrg = run(tf.constant(tau))
  np.testing.assert_allclose(sgd, plain, rtol=0, atol=1e-12)
  np.testing.assert_allclose(svrg, corrected, rtol=0, atol=1e-12)


@pytest.mark.parametrize('tau', [1, 3])
def test_svrg_stays_at_a_constrained_solution(tau):
  """Of the mean of two clients; each client alone would go elsewhere."""
  clients = [Noisy(3, seed=seed) for seed in (1, 2)]

  def mean_gradient(v):
    rows = np.arange(3)
    return np.mean([c.gradient_at(v, rows) for c in clients], axis=0)

  v = np.zeros(DIM)
  for _ in range(2000):
    v = _numpy_box(v - 0.1 * mean_gradient(v))
  q = mean_gradient(v)
  assert np.linalg.norm(q) > 0.1  # The solution is on the boundary.
  for client in clients:
    client.start, client.q = v, q
    work = descent.LocalWork(steps=tau, batch_size=2)
    end = descent.svrg(
        client.gradient, tf.constant(v), tf.constant(q), client.features, work,
        tf.constant(tau), _rate(0.1), _seed(), _box,
    )  # fmt: skip
    np.testing.assert_allclose(end, v, rtol=0, atol=1e-12)
    own = descent.sgd(
        client.gradient, tf.constant(v), client.features, work,
        tf.constant(tau), _rate(0.1), _seed(), _box,
    )  # fmt: skip
    assert np.linalg.norm(own - v) > 1e-3


# What a client reports, and the drift.


def test_change_and_its_square():
  end = {'a': tf.constant([1.0, 2.0]), 'b': tf.constant(3.0, tf.float64)}
  start = {'a': tf.constant([0.5, 4.0]), 'b': tf.constant(0.0, tf.float64)}
  difference, metrics = descent.change(end, start, tf.float64)
  np.testing.assert_array_equal(difference['a'], [0.5, -2.0])
  np.testing.assert_array_equal(difference['b'], 3.0)
  assert list(metrics) == ['squared_change']
  assert metrics['squared_change'].dtype == tf.float64
  assert metrics['squared_change'].numpy() == 0.25 + 4 + 9


def test_drift_is_the_root_mean_square_distance_from_the_mean():
  changes = np.random.default_rng(0).normal(size=(5, DIM))
  mean = changes.mean(axis=0)
  expected = np.sqrt(np.mean(np.sum((changes - mean) ** 2, axis=1)))
  actual = descent.drift(
      _rate(np.mean(np.sum(changes**2, axis=1))), tf.constant(mean)
  )
  np.testing.assert_allclose(actual, expected, rtol=1e-12)
  # Rounding must not make it the root of a negative number.
  assert descent.drift(_rate(1.0), _rate([1.0 + 1e-9])).numpy() == 0.0


# The steps of both levels on a quadratic problem.


def test_inner_steps_are_the_numpy_loop():
  client, form = read_client(), local_form()
  q, rate = V, 0.2
  y = Y
  for _ in range(3):
    correction = form.inner_gradient(X, y) - form.inner_gradient(X, Y)
    y = y - rate * (correction + q)

  def gradient(at, z):
    return derivatives.inner_gradient(PROBLEM, tf.constant(X), at, z)[1]

  work = descent.LocalWork(steps=3)
  arguments = client.inner, work, tf.constant(3), _rate(rate), _seed()
  actual = descent.svrg(gradient, tf.constant(Y), tf.constant(q), *arguments)
  assert_close(actual, y)
  y = Y
  for _ in range(3):
    y = y - rate * form.inner_gradient(X, y)
  assert_close(descent.sgd(gradient, tf.constant(Y), *arguments), y)


def test_outer_svrg_corrects_the_direct_gradient_only():
  client, form = read_client(), local_form()
  h, rate = np.array([1.0, -2.0, 0.5]), 0.2
  x = X
  for _ in range(3):
    correction = form.direct_gradient(x, Y) - form.direct_gradient(X, Y)
    x = x - rate * (correction + h)
  work = descent.LocalWork(steps=3)
  actual = descent.svrg(
      lambda at, xi: derivatives.direct_gradient(PROBLEM, at, Y, xi)[1],
      tf.constant(X), tf.constant(h), client.outer, work, tf.constant(3),
      _rate(rate), _seed(),
  )  # fmt: skip
  assert_close(actual, x)
