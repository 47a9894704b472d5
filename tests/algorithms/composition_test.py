"""How processes compose: their rounds, their weights, nested variables."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff import vector_space
from fednest_tff.algorithms.fed_inn import DescentMessage
from fednest_tff.algorithms.fed_out import HypergradientMessage
from fednest_tff.algorithms.product_rounds import ProductMessage
from fednest_tff.federated.rounds import PointMessage
from fednest_tff.local import descent, inverse_hessian
from tests.helpers import nested_variables, processes
from tests.helpers.processes import assert_equal

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


@pytest.fixture(scope='module')
def problem():
  return nested_variables.build_problem()


@pytest.fixture(scope='module')
def cohort():
  return nested_variables.build_cohort()


@pytest.fixture(scope='module')
def build(problem):
  """From a method to its process, built once."""
  built = {}

  def build(method):
    if method not in built:
      options = dict(
          inner_learning_rate=BETA, outer_learning_rate=ALPHA,
          inner_rounds=T, neumann_terms=N, smoothness=SMOOTHNESS,
          inner_local_steps=2, outer_local_steps=2, batch_size=2,
          gradient_batch_size=2, participation=0.7,
          client_weighting='num_examples',
      )  # fmt: skip
      known = processes.options_of(method)
      options = {k: v for k, v in options.items() if k in known}
      built[method] = fednest_tff.build(problem, method, **options)
    return built[method]

  return build


# ---- Nested variables -------------------------------------------------------

COMMON = {
    'inner_loss', 'client_drift', 'inner_update_norm', 'outer_loss',
    'outer_drift', 'outer_update_norm', 'num_clients', 'num_examples',
    'client_work',
}  # fmt: skip
Q = {'inner_gradient_norm'}
H = {
    'hypergradient_norm', 'ihgp_residual', 'ihgp_largest_curvature',
    'ihgp_smallest_curvature', 'smoothness',
}
METRICS = {
    'fednest': COMMON | Q | H,
    'lfednest': COMMON,
    'fednest_sgd': COMMON | H,
    'lfednest_svrg': COMMON | Q,
    'lfednest_nonalt': COMMON,
    'fedavg_s': COMMON,
}


@pytest.mark.parametrize('method', METRICS)
def test_epoch_of_nested_variables(build, cohort, method):
  process = build(method)
  start = process.initialize()
  output = process.next(start, cohort)
  for state in (start, output.state):
    assert isinstance(state, fednest_tff.NestedState)
    assert type(state.outer) is dict
    assert type(state.inner) is nested_variables.Head
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
  assert_equal(weights, fednest_tff.NestedWeights(state.outer, state.inner))

  start = light.initialize()
  moved = light.set_model_weights(start, weights)
  assert isinstance(moved, fednest_tff.NestedState)
  assert_equal(light.get_model_weights(moved), weights)
  for name in ('epoch', 'seed', 'hparams', 'aggregators', 'method'):
    assert_equal(getattr(moved, name), getattr(start, name))
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


def _add(one, other):
  return tf.nest.map_structure(np.add, one, other)


def _neumann(rounds, x, y, seed, stop, cohort):
  """p by the rounds of FedIHGP if N' were `stop`."""
  solver = inverse_hessian.build_solver('stochastic', N)
  gradient = rounds['ihgp_gradient']((), PointMessage(x, y, seed), cohort)
  smoothness = tf.constant(SMOOTHNESS, tf.float64)
  b = tf.nest.map_structure(tf.constant, gradient.value)
  state = solver.start(b, smoothness, seed)
  state = state._replace(products_left=tf.constant(stop))
  for n in range(1, stop + 1):
    message = ProductMessage(x, y, solver.vector(state), n, seed)
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
        states['inner_gradient'], PointMessage(x, y, seed), cohort
    )
    update = rounds['inner_update'](
        states['inner_update'],
        DescentMessage(x, y, gradient.value, BETA, seed),
        cohort,
    )
    y = _add(y, update.value)
  assert_equal(y, output.state.inner)
  metrics = dict(gradient.metrics) | dict(
      inner_gradient_norm=vector_space.norm(gradient.value),
      inner_update_norm=vector_space.norm(
          vector_space.subtract(y, start.inner)
      ),
      client_drift=descent.drift(
          update.metrics['squared_change'], update.value
      ),
  )

  seed = _fold_in(epoch_seed, T)
  matches = []
  for stop in range(N):  # Only FedIHGP's server knows N'.
    p = _neumann(rounds, x, y, seed, stop, cohort)
    gradient = rounds['hypergradient'](
        states['hypergradient'], HypergradientMessage(x, y, p, seed), cohort
    )
    update = rounds['outer_update'](
        states['outer_update'],
        DescentMessage(x, y, gradient.value, ALPHA, seed),
        cohort,
    )
    x_next = {name: x[name] + update.value[name] for name in x}
    if all(np.all(x_next[k] == output.state.outer[k]) for k in x):
      matches.append(stop)
      metrics |= dict(gradient.metrics) | dict(
          hypergradient_norm=vector_space.norm(gradient.value)
      )
  assert len(matches) == 1
  for name, value in metrics.items():
    assert output.metrics[name] == value, name


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


# What each round of an epoch sends, T = 1 and N = 2: x once in the epoch, and
# nothing that the clients have already.
INNER = [('inner_gradient', 'x y seed'), ('inner_update', 'q beta')]
LIGHT_INNER = [('inner_update', 'x y beta seed')]
OUTER = [
    ('ihgp_gradient', 'y seed'),
    ('ihgp_product', 'v index'),
    ('hypergradient', 'p'),
    ('outer_update', 'h alpha'),
]
LIGHT_OUTER = [('outer_update', 'y alpha l seed')]
SENT = {
    'fednest': INNER + OUTER,
    'lfednest': LIGHT_INNER + LIGHT_OUTER,
    'fednest_sgd': LIGHT_INNER + OUTER,
    'lfednest_svrg': INNER + LIGHT_OUTER,
    'lfednest_nonalt': [('joint_update', 'x y beta alpha l seed')],
    'fedavg_s': [('joint_update', 'x y beta alpha l seed')],
}


@pytest.mark.parametrize(
    'method, means',
    [
        ('fednest', 2 * T + N + 2),
        ('lfednest', T + 1),
        ('fednest_sgd', T + N + 2),
        ('lfednest_svrg', 2 * T + 1),
        ('lfednest_nonalt', 1),
        ('fedavg_s', 1),
    ],
)
def test_default_is_broadcasts_and_means(build, method, means):
  process = build(method)
  rounds = [(name, len(what.split())) for name, what in SENT[method]]
  _assert_single_rounds(process, [name for name, _ in rounds])
  assert rounds == [
      (sent.round.name, len(sent.sent)) for sent in process.sent_rounds
  ]
  uris = _intrinsics(process.next)
  assert uris['federated_weighted_mean'] == means == len(rounds)
  assert uris['federated_broadcast'] == sum(size for _, size in rounds)
  # The numbers of clients and examples ride along.
  assert uris['federated_sum'] == 1
  assert sum(uris[uri] for uri in AGGREGATIONS) == means + 1


def _to_one_round(computation):
  """TFF's form for one broadcast and one aggregation; fails if there are more.

  Several broadcasts, or aggregations, that do not depend on each other count as
  one.
  """
  return tff.backends.mapreduce.get_distribute_aggregate_form_for_computation(
      computation
  )


def test_single_processes_have_single_rounds(build, problem):
  lfed_inn = processes.build_flat(
      fednest_tff.build_lfed_inn, problem, inner_learning_rate=BETA
  )
  fed_ihgp = processes.build_flat(
      fednest_tff.build_fed_ihgp, problem, smoothness=SMOOTHNESS
  )
  power_iteration = fednest_tff.build_power_iteration(problem)
  for process, name in (
      (lfed_inn, 'inner_update'),
      (fed_ihgp, 'ihgp_step'),
      (power_iteration, 'ihgp_product'),
      (build('fedavg_s'), 'joint_update'),
  ):
    _assert_single_rounds(process, [name])
    # They take one round per `next`, metrics included.
    assert len(process.sent_rounds) == 1
    uris = _intrinsics(process.next)
    assert uris['federated_weighted_mean'] == 1
    assert sum(uris[uri] for uri in AGGREGATIONS) == 2
    form = _to_one_round(process.next)
    assert form.type_signature.result == process.next.type_signature.result
  with pytest.raises(ValueError, match='broadcast dependent on aggregate'):
    _to_one_round(build('lfednest').next)


def test_aggregator_of_a_round_has_a_state_of_its_own(problem, cohort):
  process = fednest_tff.build_fed_inn(
      problem,
      inner=fednest_tff.LocalWork(learning_rate=BETA),
      inner_aggregator=tff.aggregators.clipping_factory(
          0.01, tff.aggregators.MeanFactory()
      ),
  )
  start = process.initialize()
  assert set(process.rounds) == set(start.aggregators) == set(dict(INNER))
  output = process.next(start, cohort)
  seed = _fold_in(_fold_in(start.seed, 0), 0)
  x, y = start.outer, start.inner
  q = process.rounds['inner_gradient'](
      start.aggregators['inner_gradient'], PointMessage(x, y, seed), cohort
  ).value
  update = process.rounds['inner_update'](
      start.aggregators['inner_update'],
      DescentMessage(x, y, q, BETA, seed),
      cohort,
  )
  assert_equal(_add(y, update.value), output.state.inner)
  assert_equal(update.state, output.state.aggregators['inner_update'])
  assert_equal(
      update.measurements['inner_aggregator'],
      output.metrics['inner_aggregator'],
  )
