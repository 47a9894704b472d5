"""How processes compose: their rounds, their weights, nested variables."""

import collections
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.algorithms.fed_ihgp import Product
from fednest_tff.algorithms.fed_out import Hyperpoint
from fednest_tff.algorithms.rounds import Descent, Point

T, N = 1, 2  # Inner calls and Neumann terms.
BETA, ALPHA, SMOOTHNESS = 0.2, 0.1, 4.0
AGGREGATIONS = (
    'federated_aggregate',
    'federated_mean',
    'federated_secure_sum',
    'federated_secure_sum_bitwidth',
    'federated_sum',
    'federated_weighted_mean',
)


# ---- A problem with nested variables ----------------------------------------


class Head(NamedTuple):
  slope: tf.Tensor
  offset: tf.Tensor


def _predict(slope, offset, batch):
  slope = tf.cast(slope, tf.float64)
  return tf.linalg.matvec(batch['u'], slope) + offset


def _inner_loss(x, y, batch):
  target = _predict(x['a'], x['b'] * x['b'], batch)
  error = _predict(*y, batch) - target
  penalty = tf.reduce_sum(tf.cast(y.slope, tf.float64) ** 2) + y.offset**2
  return tf.reduce_mean(error**2) / 2 + penalty / 20


def _outer_loss(x, y, batch):
  error = _predict(*y, batch) - batch['t']
  own = _predict(x['a'], x['b'], batch)
  return tf.reduce_mean(error**2) / 2 + tf.reduce_mean(own**2) / 10


@pytest.fixture(scope='module')
def problem():
  """x is a dict and y a named tuple, each of a float32 and a float64 leaf."""
  return fednest_tff.bilevel(
      _outer_loss,
      _inner_loss,
      lambda seed: dict(
          b=tf.constant(0.5 + seed, tf.float64), a=tf.ones([3], tf.float32)
      ),
      lambda seed: Head(tf.zeros([3], tf.float32), tf.zeros([], tf.float64)),
      collections.OrderedDict(
          t=tf.TensorSpec([], tf.float64), u=tf.TensorSpec([3], tf.float64)
      ),
  )


@pytest.fixture(scope='module')
def cohort():
  rng = np.random.default_rng(0)
  return [
      tf.data.Dataset.from_tensor_slices(
          collections.OrderedDict(
              t=rng.normal(size=n), u=rng.normal(size=(n, 3))
          )
      )
      for n in (4, 5, 6)
  ]


@pytest.fixture(scope='module')
def build(problem):
  """From a method to its process, built once."""
  built = {}

  def build(method):
    if method not in built:
      built[method] = fednest_tff.build_fed_nest(
          problem, method, inner_learning_rate=BETA, outer_learning_rate=ALPHA,
          inner_rounds=T, neumann_terms=N, smoothness=SMOOTHNESS,
          inner_local_steps=2, outer_local_steps=2, batch_size=2,
          gradient_batch_size=2, participation=0.7,
          client_weighting='num_examples',
      )  # fmt: skip
    return built[method]

  return build


def _assert_equal(one, other):
  tf.nest.map_structure(np.testing.assert_array_equal, one, other)


# ---- Nested variables -------------------------------------------------------

COMMON = {
    'inner_loss', 'client_drift', 'inner_update_norm', 'outer_loss',
    'outer_drift', 'outer_update_norm', 'num_clients', 'num_examples',
}  # fmt: skip
Q, H = {'inner_gradient_norm'}, {'hypergradient_norm'}
METRICS = {
    'fednest': COMMON | Q | H,
    'lfednest': COMMON,
    'fednest_sgd': COMMON | H,
    'lfednest_svrg': COMMON | Q,
    'lfednest_nonalt': COMMON,
    'fedavg_s': COMMON,
}


@pytest.mark.parametrize('method', fednest_tff.METHODS)
def test_epoch_of_nested_variables(build, cohort, method):
  process = build(method)
  start = process.initialize()
  output = process.next(start, cohort)
  for state in (start, output.state):
    assert isinstance(state, fednest_tff.NestedState)
    assert type(state.outer) is dict
    assert type(state.inner) is Head
    dtypes = [state.outer['a'].dtype, state.inner.slope.dtype]
    assert dtypes == [np.float32, np.float32]
    dtypes = [state.outer['b'].dtype, state.inner.offset.dtype]
    assert dtypes == [np.float64, np.float64]
  for before, after in zip(
      tf.nest.flatten((dict(start.outer), start.inner)),
      tf.nest.flatten((dict(output.state.outer), output.state.inner)),
      strict=True,
  ):
    assert np.all(np.isfinite(after))
    assert np.all(after != before)
  assert set(output.metrics) == METRICS[method]
  assert output.metrics['num_clients'] == 3
  assert output.metrics['num_examples'] == 15
  assert output.metrics['client_drift'] > 0
  assert output.metrics['outer_drift'] > 0


# ---- Weights ----------------------------------------------------------------


def test_weights_move_between_processes(build, cohort):
  fednest, light = build('fednest'), build('lfednest')
  state = fednest.next(fednest.initialize(), cohort).state
  weights = fednest.get_model_weights(state)
  assert isinstance(weights, fednest_tff.NestedWeights)
  _assert_equal(weights, fednest_tff.NestedWeights(state.outer, state.inner))

  start = light.initialize()
  moved = light.set_model_weights(start, weights)
  assert isinstance(moved, fednest_tff.NestedState)
  _assert_equal(light.get_model_weights(moved), weights)
  for name in ('epoch', 'seed', 'smoothness', 'aggregators', 'optimizer'):
    _assert_equal(getattr(moved, name), getattr(start, name))
  # It is the point that counts: the next epoch starts there.
  output = light.next(moved, cohort)
  assert output.metrics['inner_loss'] != (
      light.next(start, cohort).metrics['inner_loss']
  )


# ---- Rounds one by one ------------------------------------------------------


def _fold_in(seed, number):
  return tf.random.experimental.stateless_fold_in(
      seed, tf.constant(number, tf.int64)
  )


def _neumann(rounds, solver, x, y, seed, stop, cohort):
  """p by the rounds of FedIHGP if N' were `stop`."""
  gradient = rounds['ihgp_gradient']((), Point(x, y, seed), cohort)
  smoothness = tf.constant(SMOOTHNESS, tf.float64)
  b = tf.nest.map_structure(tf.constant, gradient.value)
  state = solver.start(b, smoothness, seed)
  state = state._replace(products_left=tf.constant(stop))
  for n in range(1, stop + 1):
    message = Product(x, y, solver.vector(state), n, seed)
    product = rounds['ihgp_product']((), message, cohort).value
    state = solver.advance(state, product, smoothness)
  return state.p


def test_rounds_of_fednest_reproduce_its_epoch(build, cohort):
  process = build('fednest')
  rounds, start = process.rounds, process.initialize()
  output = process.next(start, cohort)
  states = start.aggregators
  epoch_seed = _fold_in(start.seed, start.epoch)
  x, y = start.outer, start.inner

  for t in range(T):
    seed = _fold_in(epoch_seed, t)
    gradient = rounds['inner_gradient'](
        states['inner_gradient'], Point(x, y, seed), cohort
    )
    update = rounds['inner_update'](
        states['inner_update'], Descent(x, y, gradient.value, BETA, seed),
        cohort,
    )  # fmt: skip
    y = update.value
  _assert_equal(y, output.state.inner)
  metrics = gradient.metrics | update.metrics

  seed = _fold_in(epoch_seed, T)
  matches = []
  for stop in range(N):  # Only FedIHGP's server knows N'.
    p = _neumann(rounds, process.solver, x, y, seed, stop, cohort)
    gradient = rounds['hypergradient'](
        states['hypergradient'], Hyperpoint(x, y, p, seed), cohort
    )
    update = rounds['outer_update'](
        states['outer_update'], Descent(x, y, gradient.value, ALPHA, seed),
        cohort,
    )  # fmt: skip
    x_next = {name: x[name] + update.value[name] for name in x}
    if all(np.all(x_next[k] == output.state.outer[k]) for k in x):
      matches.append(stop)
      metrics |= gradient.metrics
  assert len(matches) == 1
  for name, value in metrics.items():
    assert output.metrics[name] == value, name


@pytest.fixture(scope='module')
def fed_ihgp(problem):
  return fednest_tff.build_fed_ihgp(
      problem, smoothness=SMOOTHNESS, neumann_terms=N
  )


def test_rounds_of_fed_ihgp_reproduce_its_steps(fed_ihgp, cohort):
  process, state = fed_ihgp, fed_ihgp.initialize()
  for _ in range(20):  # To the first point whose N' asks for all products.
    state = process.next(state, cohort).state
    if state.solver.products_left == N - 1:
      break
    state = state.at(state.outer, state.inner)
  else:
    pytest.fail('All N\' are less than N - 1.')
  rounds, seed = process.rounds, _fold_in(state.seed, state.epoch)
  x, y = state.outer, state.inner

  gradient = rounds['ihgp_gradient']((), Point(x, y, seed), cohort)
  p = tf.nest.map_structure(lambda b: N / SMOOTHNESS * b, gradient.value)
  tf.nest.map_structure(np.testing.assert_allclose, state.solver.p, p)
  for n in range(1, N):
    product = rounds['ihgp_product'](
        (), Product(x, y, state.solver.p, n, seed), cohort
    )
    p = tf.nest.map_structure(
        lambda p, v: p - v / SMOOTHNESS, state.solver.p, product.value
    )
    output = process.next(state, cohort)
    state = output.state
    assert state.solver.products_left == N - 1 - n
    assert output.metrics['step'] == n
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        state.solver.p,
        p,
    )
  # Beyond N' nothing happens, and clients are not even asked to multiply.
  _assert_equal(process.next(state, cohort).state.solver, state.solver)
  idle = rounds['ihgp_product'](
      (), Product(x, y, state.solver.p, -1, seed), cohort
  )
  assert not any(np.any(leaf) for leaf in tf.nest.flatten(idle.value))


# ---- What is sent -----------------------------------------------------------


def _intrinsics(computation):
  """How often each intrinsic appears, as it was written."""
  uris = collections.Counter()

  def visit(block):
    if isinstance(block, tff.framework.Intrinsic):
      uris[block.uri] += 1
    return block, False

  tff.framework.transform_postorder(computation.to_building_block(), visit)
  return uris


def _assert_single_rounds(process, names):
  assert set(process.rounds) == set(names)
  for name, computation in process.rounds.items():
    uris = _intrinsics(computation)
    assert uris['federated_broadcast'] == 1, name
    assert sum(uris[uri] for uri in AGGREGATIONS) == 1, name
    assert uris['federated_weighted_mean'] == 1, name


INNER = ('inner_gradient', 'inner_update')
IHGP = ('ihgp_gradient', 'ihgp_product')
OUTER = (*IHGP, 'hypergradient', 'outer_update')


@pytest.mark.parametrize(
    'method, names, means, broadcasts',
    [
        # Besides the rounds themselves, x is sent once, and p.
        ('fednest', INNER + OUTER, 2 * T + N + 2, 2 * T + N + 3),
        ('lfednest', ('inner_update', 'outer_update'), T + 1, T + 2),
        ('fednest_sgd', ('inner_update', *OUTER), T + N + 2, T + N + 3),
        ('lfednest_svrg', (*INNER, 'outer_update'), 2 * T + 1, 2 * T + 2),
        ('lfednest_nonalt', ('joint_update',), 1, 2),
        ('fedavg_s', ('joint_update',), 1, 2),
    ],
)
def test_default_is_broadcasts_and_means(
    build, method, names, means, broadcasts
):
  process = build(method)
  _assert_single_rounds(process, names)
  uris = _intrinsics(process.next)
  assert uris['federated_weighted_mean'] == means
  assert uris['federated_broadcast'] == broadcasts
  # The numbers of clients and examples ride along.
  assert uris['federated_sum'] == 1
  assert sum(uris[uri] for uri in AGGREGATIONS) == means + 1


def test_single_processes_have_single_rounds(problem, fed_ihgp):
  _assert_single_rounds(
      fednest_tff.build_lfed_inn(problem, inner_learning_rate=BETA),
      ('inner_update',),
  )
  # These two take one round per `next`, metrics included.
  power_iteration = fednest_tff.build_power_iteration(problem)
  for process, names in (
      (fed_ihgp, IHGP),
      (power_iteration, ('ihgp_product',)),
  ):
    _assert_single_rounds(process, names)
    uris = _intrinsics(process.next)
    assert uris['federated_broadcast'] == 1
    assert sum(uris[uri] for uri in AGGREGATIONS) == 1


def test_aggregator_of_a_round_has_a_state_of_its_own(problem, cohort):
  process = fednest_tff.build_fed_inn(
      problem,
      inner_learning_rate=BETA,
      inner_aggregator=tff.aggregators.clipping_factory(
          0.01, tff.aggregators.MeanFactory()
      ),
  )
  start = process.initialize()
  assert set(process.rounds) == set(start.aggregators) == set(INNER)
  output = process.next(start, cohort)
  seed = _fold_in(_fold_in(start.seed, 0), 0)
  x, y = start.outer, start.inner
  q = process.rounds['inner_gradient'](
      start.aggregators['inner_gradient'], Point(x, y, seed), cohort
  ).value
  update = process.rounds['inner_update'](
      start.aggregators['inner_update'], Descent(x, y, q, BETA, seed), cohort
  )
  _assert_equal(update.value, output.state.inner)
  _assert_equal(update.state, output.state.aggregators['inner_update'])
  _assert_equal(
      update.metrics['inner_aggregator'], output.metrics['inner_aggregator']
  )
