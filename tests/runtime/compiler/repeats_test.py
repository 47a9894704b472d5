"""Rounds that are repeated become a loop, with the numbers of no loop."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import in_process
from fednest_tff.runtime.compiler import (
    call_dominant,
    chunks,
    cohort,
    invariants,
    repeats,
    steps,
)
from fednest_tff.runtime.compiler.loops import Loop
from tests.helpers import processes, quadratic, reference
from tests.runtime.comparison import (
    RUNTIMES,
    assert_same,
    at_clients,
    at_server,
    run_in_process,
)
from tests.runtime.vectorised_test import (
    ONE_BY_ONE,
    assert_close,
    make_datasets,
    run_epochs,
)

SERVER, CLIENTS = tff.SERVER, tff.CLIENTS
NUMBER = tff.TensorType(np.float64)
VECTOR = tff.TensorType(np.float64, [3])
ROUNDS = 6


def tensorflow(*types):
  return lambda function: tff.tensorflow.computation(function, *types)


def parts_of(computation):
  """The steps and loops of a computation."""
  rewritten = call_dominant.to_call_dominant(computation)
  given = [reading.name for reading in rewritten.readings.calls]
  found = steps.to_steps(rewritten.block, given)
  return repeats.find_loops(found.steps, found.result)


def loops_of(computation):
  return [part for part in parts_of(computation) if isinstance(part, Loop)]


def assert_like_step_by_step(function):
  expected = run_in_process(ONE_BY_ONE, function)
  for kind in ('vectorised', 'unrolled', 'looped'):
    found = run_in_process(RUNTIMES[kind], function)
    assert_same(found, expected, rtol=1e-12)


add = tensorflow(NUMBER, NUMBER)(lambda a, b: a + tf.sin(b))
shrink = tensorflow(NUMBER, NUMBER)(lambda a, b: (a / 2 + b, a * b))


def at_server_map(function, *arguments):
  return tff.federated_map(function, arguments)


@tff.federated_computation(at_server(NUMBER), at_server(NUMBER))
def own_and_carried(x, y):
  """A result of the same round, and one of the round before."""
  for _ in range(ROUNDS):
    doubled = at_server_map(add, x, x)
    pair = at_server_map(shrink, doubled, y)
    x = pair[0]
  return x, pair[1], y


@tff.federated_computation(at_server(NUMBER), at_server([NUMBER] * ROUNDS))
def differing(x, seeds):
  """A value from outside that differs from round to round, and one not."""
  for k in range(ROUNDS):
    x = at_server_map(add, x, seeds[k])
    x = at_server_map(shrink, x, seeds[1])[0]
  return x


@tff.federated_computation(at_server(NUMBER), at_server(NUMBER))
def swapped(x, y):
  """What is carried to one place comes from another, and starts differently."""
  for _ in range(ROUNDS):
    pair = at_server_map(shrink, x, y)
    x, y = pair[1], pair[0]
  return x, y


@tff.federated_computation(at_server(NUMBER))
def escaping(x):
  """Results of several rounds are needed, one is carried and one is not."""
  pairs = []
  for _ in range(ROUNDS):
    pair = at_server_map(shrink, x, x)
    pairs.append(pair)
    x = pair[0]
  return x, pairs[0][1], pairs[2][0], pairs[2][1], pairs[-1][1]


drift = tensorflow(NUMBER, VECTOR)(lambda a, v: (v * a + 1, tf.reduce_sum(v)))


@tff.federated_computation(at_clients(VECTOR), at_server(NUMBER))
def at_the_clients(vectors, x):
  """Clients keep values from round to round, and send others."""
  history = []
  for _ in range(ROUNDS):
    sent = tff.federated_broadcast(x)
    kept = tff.federated_map(drift, (sent, vectors))
    vectors = kept[0]
    history.append(kept[1])
    x = at_server_map(add, x, tff.federated_sum(kept[1]))
  return vectors, x, history[0], history[-1]


@tff.federated_computation(at_server(NUMBER), [at_clients(VECTOR)] * ROUNDS)
def differing_at_clients(x, vectors):
  for own in vectors:
    kept = tff.federated_map(drift, (tff.federated_broadcast(x), own))
    x = at_server_map(add, x, tff.federated_max(kept[1]))
  return x


@tff.federated_computation(at_server(NUMBER), at_server(NUMBER))
def unequal_ends(x, y):
  """Other steps are before and after the rounds."""
  x = at_server_map(shrink, x, x)[1]
  for _ in range(ROUNDS):
    x = at_server_map(add, x, y)
  return at_server_map(add, x, x)


CLIENTS_VECTORS = [np.arange(3.0) / (k + 1) for k in range(3)]
# By rounds.
OTHER_VECTORS = [[(k + 1) * v for v in CLIENTS_VECTORS] for k in range(ROUNDS)]
SEEDS = [0.1 * k for k in range(ROUNDS)]


@pytest.mark.parametrize(['computation', 'arguments', 'moved'], [
    # How many values are carried, stacked, and results.
    (own_and_carried, (0.5, 0.2), (1, 0, 2)),
    (differing, (0.5, SEEDS), (1, 1, 1)),
    (swapped, (0.5, 0.2), (2, 0, 2)),
    (escaping, (0.5,), (1, 0, 5)),
    (at_the_clients, (CLIENTS_VECTORS, 0.3), (2, 0, 4)),
    (differing_at_clients, (0.3, OTHER_VECTORS), (1, 1, 1)),
    (unequal_ends, (0.5, 0.2), (1, 0, 1)),
])
def test_loops(computation, arguments, moved):
  (loop,) = loops_of(computation)
  assert loop.num_blocks == ROUNDS
  assert moved == (len(loop.carried), len(loop.stacked), len(loop.results))
  assert_like_step_by_step(lambda: computation(*arguments))


def test_chunks(monkeypatch):
  """What clients keep is computed when it is carried."""
  monkeypatch.setattr(cohort, 'choose_chunk', lambda *_: 2)
  monkeypatch.setattr(chunks, '_LARGE', 0)

  def run():
    return at_the_clients(CLIENTS_VECTORS, 0.3)

  expected = run_in_process(ONE_BY_ONE, run)
  for unroll in (None, 0):
    runtime = in_process.InProcessRuntime(unroll=unroll)
    assert_same(run_in_process(runtime, run), expected, rtol=1e-12)


# What is left as it is.

OPEN = tff.TensorType(np.float64, [None])
NUMBERS = tff.SequenceType(np.int64)


@tff.federated_computation(at_server(OPEN))
def growing(x):
  grow = tensorflow(OPEN)(lambda v: tf.concat([v, v[:1]], 0))
  for _ in range(ROUNDS):
    x = tff.federated_map(grow, x)
  return x


@tff.federated_computation(at_server(NUMBER))
def few(x):
  for _ in range(repeats._MIN_BLOCKS - 1):
    x = at_server_map(add, x, x)
  return x


@tff.federated_computation(at_server(NUMBER))
def fibonacci(x):
  """Each round needs the two before it."""
  values = [x, x]
  for _ in range(ROUNDS):
    values.append(at_server_map(add, values[-1], values[-2]))
  return values[-1]


def build_shift(k):
  return lambda v: v + k


@tff.federated_computation(at_server(NUMBER))
def all_different(x):
  for k in range(ROUNDS):
    x = tff.federated_map(tensorflow(NUMBER)(build_shift(k)), x)
  return x


@tff.federated_computation(at_server(NUMBERS))
def datasets(x):
  double = tensorflow(NUMBERS)(lambda d: d.map(lambda v: 2 * v))
  for _ in range(ROUNDS):
    x = tff.federated_map(double, x)
  return x


@pytest.mark.parametrize(['computation', 'argument'], [
    (growing, np.arange(3.0)),
    (few, 0.5),
    (fibonacci, 0.5),
    (all_different, 0.5),
    (datasets, tf.data.Dataset.range(3)),
])
def test_no_loop(computation, argument):
  assert not loops_of(computation)
  assert_like_step_by_step(lambda: computation(argument))


def test_random_numbers_are_not_drawn_in_a_loop():
  @tff.federated_computation(at_server(NUMBER))
  def noisy(x):
    disturb = tensorflow(NUMBER)(
        lambda v: v + tf.random.uniform([], dtype=tf.float64)
    )
    for _ in range(ROUNDS):
      x = tff.federated_map(disturb, x)
    return x

  assert not loops_of(noisy)


def test_rounds_that_begin_differently_are_left_out():
  """The first round takes a value from itself that others take from before."""
  @tff.federated_computation(at_server(NUMBER))
  def peeled(x):
    before = None
    for _ in range(ROUNDS + 1):
      own = at_server_map(add, x, x)
      x = at_server_map(shrink, own, own if before is None else before)[0]
      before = own
    return x

  loops = loops_of(peeled)
  assert [loop.num_blocks for loop in loops] == [ROUNDS]
  assert_like_step_by_step(lambda: peeled(0.5))


def test_many_steps_take_little_time():
  """Steps are compared by their hashes, a bounded number of times each."""
  @tff.federated_computation(at_server(NUMBER))
  def long(x):
    for k in range(40):
      for _ in range(k % 3 + 1):
        x = at_server_map(add, x, x)
      x = at_server_map(shrink, x, x)[0]
    return x

  parts = parts_of(long)
  assert sum(isinstance(part, Loop) for part in parts) == 1
  assert_like_step_by_step(lambda: long(0.5))


# Epochs.

SETTINGS = reference.Settings(
    alpha=0.1, beta=0.15, inner_rounds=6, inner_steps=2, outer_steps=2,
    neumann_terms=8, smoothness=4.0,
)


@functools.cache
def fednest_and_epochs(ihgp):
  """A process, cohorts, and the process's outputs client by client."""
  process = processes.build(
      quadratic.build_problem(), 'fednest', SETTINGS, ihgp=ihgp, batch_size=2
  )
  # Two groups of clients are another function, which one solver shows.
  groups = [[3, 2, 3]] if ihgp == 'truncated' else []
  cohorts = [make_datasets(sizes) for sizes in ([3] * 4, *groups, [2])]
  return process, cohorts, run_epochs(ONE_BY_ONE, process, cohorts)


def without_curvatures(output):
  left_out = {'ihgp_largest_curvature', 'ihgp_smallest_curvature'}
  assert left_out < set(output.metrics)
  return output._replace(metrics=type(output.metrics)(
      (k, value) for k, value in output.metrics.items() if k not in left_out
  ))


@pytest.mark.parametrize(['ihgp', 'kind'], [
    ('truncated', 'vectorised'),
    ('stochastic', 'vectorised'),
    ('cg', 'vectorised'),
    ('truncated', 'looped'),
    ('stochastic', 'unrolled'),
])
def test_epochs(ihgp, kind):
  process, cohorts, expected = fednest_and_epochs(ihgp)
  # T rounds on y and N - 1 products with the Hessian.
  assert [loop.num_blocks for loop in loops_of(process.next)] == [6, 7]
  found = run_epochs(RUNTIMES[kind], process, cohorts)
  if ihgp == 'cg':
    # It has converged before the last round, and goes on along rounding errors.
    found, expected = (
        list(map(without_curvatures, outputs)) for outputs in (found, expected)
    )
  assert_close(found, expected, 1e-12)


# What does not change from round to round.


def operations(graph):
  return [operation.type for operation in graph.get_operations()]


def test_what_is_known_is_computed_before():
  @tf.function(autograph=False)
  def compute(x, y):
    def double_and_add(z):
      # As a function, which is written out.
      inner = tf.function(lambda v: tf.exp(v) @ tf.exp(v), autograph=False)
      return [inner(x) + z, x]

    rest = invariants.separate(double_and_add, [tf.TensorSpec([2, 2])])
    outside = operations(tf.compat.v1.get_default_graph())
    assert 'MatMul' in outside and 'AddV2' not in outside
    inside = tf.function(rest, autograph=False).get_concrete_function(
        tf.TensorSpec([2, 2])
    )
    assert 'AddV2' in operations(inside.graph)
    assert 'MatMul' not in operations(inside.graph)
    return rest(y)

  x = tf.constant([[0.1, 0.2], [0.3, 0.4]])
  found, same = compute(x, x)
  np.testing.assert_allclose(found, tf.exp(x) @ tf.exp(x) + x, rtol=1e-6)
  np.testing.assert_array_equal(same, x)


def test_inputs_do_not_take_the_names_of_nodes():
  """TensorFlow would rename 'a' to 'a_1', which there is already."""
  @tf.function(autograph=False)
  def compute(x):
    def double_and_add(z):
      with tf.name_scope('a') as scope:
        known = tf.exp(x, name='b')
        first = tf.raw_ops.AddV2(x=known, y=z, name=scope)
      return [tf.raw_ops.Mul(x=first, y=z, name='a_1')]

    rest = invariants.separate(double_and_add, [tf.TensorSpec([])])
    return tf.while_loop(
        lambda k, _: k < 2, lambda k, z: (k + 1, *rest(z)), (0, x)
    )[1]

  x = tf.constant(0.5)
  once = (tf.exp(x) + x) * x
  np.testing.assert_allclose(compute(x), (tf.exp(x) + once) * once, rtol=1e-6)


def test_a_check_still_fails():
  """Also one that is done before the loop."""
  @tff.federated_computation(at_server(NUMBER), at_server(NUMBER))
  def checked(x, y):
    divide = tensorflow(NUMBER, NUMBER)(
        lambda a, b: a + tf.debugging.check_numerics(1 / b, 'not finite')
    )
    for _ in range(ROUNDS):
      x = at_server_map(divide, x, y)
      y = at_server_map(add, y, y)
    return x

  @tff.federated_computation(at_server(NUMBER), at_server(NUMBER))
  def checked_before(x, y):
    divide = tensorflow(NUMBER, NUMBER)(
        lambda a, b: a + tf.debugging.check_numerics(1 / b, 'not finite')
    )
    for _ in range(ROUNDS):
      x = at_server_map(divide, x, y)
    return x

  for computation in (checked, checked_before):
    assert loops_of(computation)
    assert_like_step_by_step(lambda c=computation: c(0.5, 2.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match='not finite'):
      run_in_process(
          RUNTIMES['vectorised'], lambda c=computation: c(0.5, 0.0)
      )
