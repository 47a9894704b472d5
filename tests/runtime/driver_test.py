"""The driver against `next` with one cohort, and NumPy with many."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.runtime import driver
from tests.helpers import mlp, personal, processes, quadratic, reference
from tests.helpers.processes import build_flat

RUNTIME = 'in_process'
CLIENTS = quadratic.make_clients()
SETTINGS = reference.Settings(
    alpha=0.1,
    beta=0.15,
    inner_rounds=2,
    inner_steps=2,
    outer_steps=2,
    neumann_terms=3,
    smoothness=4.0,
)


def build(problem, method='fednest', **options):
  """With the options that the method has, and FedIHGP that stops at random."""
  options = dict(ihgp='stochastic', linear_learning_rate=0.1) | options
  known = processes.options_of(method)
  return processes.build(
      problem,
      method,
      SETTINGS,
      **{name: value for name, value in options.items() if name in known},
  )


build_driver = functools.cache(driver.build_driver)


def assert_same(actual, expected, rtol=1e-10):
  """The same structure, types and numbers."""
  tf.nest.assert_same_structure(actual, expected)
  pairs = zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True)
  for one, other in pairs:
    assert type(one) is type(other)
    np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-12)


def assert_equal_to_next(process, datasets, epochs=2, rtol=1e-10):
  """Returns the number of rounds in each epoch."""
  driven = build_driver(process)
  state = other = driven.initialize()
  num_rounds = []
  for _ in range(epochs):
    expected = process.next(state, datasets)
    output = driven.next(other, datasets)
    metrics = dict(output.metrics)
    num_rounds.append(metrics.pop('communication_rounds'))
    for name in ('bytes_up', 'bytes_down'):
      assert metrics.pop(name) > 0
    assert_same(output.state, expected.state, rtol)
    assert list(metrics) == list(expected.metrics)
    assert_same(metrics, dict(expected.metrics), rtol)
    state, other = expected.state, output.state
  return num_rounds


# N. With more terms of FedIHGP, epochs differ in their number of rounds.
TERMS = collections.defaultdict(lambda: 3, fednest=6)


@functools.cache
def sampling_process(method):
  """Draws minibatches and N', so that all seeds matter.

  The methods since FedNest have factories on all their messages; those of
  FedNest's family do in `tests/federated/aggregation_test.py`.
  """
  problems = personal if method == 'personal' else quadratic
  factories = {}
  if method not in reference.METHODS:
    factories = {
        name: tff.aggregators.MeanFactory()
        for name in processes.options_of(method)
        if name.endswith('aggregator')
    }
    assert factories
  return build(
      problems.build_problem(),
      method,
      batch_size=1,
      neumann_terms=TERMS[method],
      outer_learning_rate=lambda epoch: 0.1 / tf.cast(epoch + 1, tf.float64),
      **factories,
  )


@pytest.mark.parametrize('method', fednest_tff.METHODS)
def test_every_method_equals_next(method):
  process = sampling_process(method)
  datasets = quadratic.to_datasets(CLIENTS)
  num_rounds = assert_equal_to_next(process, datasets)
  # The same state and data give the same bytes.
  start = process.initialize()
  processes.assert_equal(
      process.next(start, datasets).state, process.next(start, datasets).state
  )
  most = fednest_tff.communication_cost(process).rounds
  skippable = TERMS[method] - 1 if 'ihgp_product' in process.rounds else 0
  least = most - skippable
  assert all(least <= number <= most for number in num_rounds)


def test_states_of_optimizer_and_aggregator_equal_next():
  process = build(
      quadratic.build_problem(tf.float32),
      'lfednest',
      inner_rounds=1,
      outer_optimizer=tff.learning.optimizers.build_sgdm(1.0, momentum=0.5),
      inner_aggregator=tff.learning.robust_aggregator(),
  )
  clients = quadratic.make_clients(dtype=np.float32)
  datasets = quadratic.to_datasets(clients)
  assert assert_equal_to_next(process, datasets, rtol=1e-5) == [2, 2]


SPEC = collections.OrderedDict(
    a=tf.TensorSpec([2, 2], tf.float64), b=tf.TensorSpec([2], tf.float64)
)


def _small_datasets():
  rng = np.random.default_rng(0)
  return [
      tf.data.Dataset.from_tensor_slices(
          collections.OrderedDict(
              a=rng.normal(size=(n, 2, 2)), b=rng.normal(size=(n, 2))
          )
      )
      for n in (1, 2, 3)
  ]


def _ones(seed):
  return tf.ones([2], tf.float64) * (seed + 1)


@functools.cache
def _small_problem(kind):
  def product(x, batch):
    return tf.linalg.matvec(batch['a'], x) - batch['b']

  if kind == 'minimax':
    return fednest_tff.minimax(
        lambda x, y, batch: tf.reduce_mean(product(x, batch) * y)
        + tf.reduce_sum(x**2) / 2 - tf.reduce_sum(y**2) / 2,
        _ones, _ones, SPEC,
    )
  if kind == 'compositional':
    return fednest_tff.compositional(
        lambda y, batch: tf.reduce_mean((y - batch['b']) ** 2),
        lambda x, batch: tf.reduce_mean(product(x, batch), axis=0),
        _ones, _ones, SPEC,
    )
  return fednest_tff.single_level(
      lambda x, batch: tf.reduce_mean(product(x, batch) ** 2), _ones, SPEC
  )


@pytest.mark.parametrize(
    ['kind', 'num_rounds'],
    [('minimax', 6), ('compositional', 7), ('single_level', 2)],
)
def test_every_kind_of_problem_equals_next(kind, num_rounds):
  process = build(_small_problem(kind), inner_learning_rate=0.1)
  assert assert_equal_to_next(process, _small_datasets(), 1) == [num_rounds]


def test_one_round_method_without_inner_problem_equals_next():
  process = build(_small_problem('single_level'), 'fedavg_s')
  assert assert_equal_to_next(process, _small_datasets(), 1) == [1]


def test_ihgp_stops_at_its_random_number():
  """With N = 6 some epochs stop early, and each at its own N'."""
  process = sampling_process('fednest')
  datasets = quadratic.to_datasets(CLIENTS)
  num_rounds = assert_equal_to_next(process, datasets, 3)
  names = collections.Counter()

  def cohort(epoch, name, index):
    assert index == sum(names.values())
    assert epoch == 0
    names[name] += 1
    return datasets

  output = build_driver(process).next(process.initialize(), cohort)
  assert output.metrics['communication_rounds'] == sum(names.values())
  assert sum(names.values()) == num_rounds[0]
  assert set(names) == set(process.rounds)
  # 2 T rounds of FedInn, then ihgp_gradient, hypergradient, outer_update.
  assert names['ihgp_product'] == num_rounds[0] - 7
  assert len(set(num_rounds)) > 1
  assert min(num_rounds) < 4 + 6 + 2


INNER = dict(inner_learning_rate=0.1, inner_local_steps=2, batch_size=1)
OUTER = dict(outer_learning_rate=0.1, outer_local_steps=2, batch_size=1)
SERIES = dict(neumann_terms=3, smoothness=4.0)


@pytest.mark.parametrize(
    ['builder', 'options', 'num_rounds'],
    [
        (fednest_tff.build_fed_inn, INNER, 2),
        (fednest_tff.build_lfed_inn, INNER, 1),
        (fednest_tff.build_fed_out, OUTER | SERIES | dict(ihgp='cg'), 5),
        (fednest_tff.build_lfed_out, OUTER | SERIES, 1),
        (fednest_tff.build_fed_ihgp, SERIES, 1),
        (fednest_tff.build_power_iteration, {}, 1),
    ],
    ids=lambda value: getattr(value, '__name__', None),
)
def test_stages_alone_equal_next(builder, options, num_rounds):
  process = build_flat(builder, quadratic.build_problem(), **options)
  datasets = quadratic.to_datasets(CLIENTS)
  found = assert_equal_to_next(process, datasets)
  assert found == [num_rounds] * 2


def test_bytes_of_the_rounds_that_were_run():
  """All of a message, for every client of its round, and its answer."""
  process = sampling_process('fednest')
  datasets = quadratic.to_datasets(CLIENTS)
  names = collections.Counter()

  def cohort(epoch, name, index):
    del epoch, index
    names[name] += 1
    # As many clients as the name of the round has, of the three.
    return datasets[: 1 + len(name) % 3]

  output = build_driver(process).next(process.initialize(), cohort)
  x, y, scalar, seed, index = 8 * quadratic.DX, 8 * quadratic.DY, 8, 16, 4
  down = dict(
      inner_gradient=x + y + seed,
      inner_update=x + y + y + scalar + seed,
      ihgp_gradient=x + y + seed,
      ihgp_product=x + y + y + index + seed,
      hypergradient=x + y + y + seed,
      outer_update=x + y + x + scalar + seed,
  )
  # A loss or a mean square, if any, and the client's weight.
  up = dict(
      inner_gradient=y + 2 * scalar,
      inner_update=y + 2 * scalar,
      ihgp_gradient=y + scalar,
      ihgp_product=y + scalar,
      hypergradient=x + 2 * scalar,
      outer_update=x + 2 * scalar,
  )
  for metric, expected in (('bytes_down', down), ('bytes_up', up)):
    assert output.metrics[metric] == sum(
        count * (1 + len(name) % 3) * expected[name]
        for name, count in names.items()
    )


@pytest.mark.parametrize('method', ['fednest', 'lfednest'])
def test_declared_representation_changes_nothing(method):
  """Whole epochs in `next` and in the driver, up to rounding in float64."""
  datasets = [mlp.make_dataset(n, seed=n) for n in (4, 7)]
  states = []
  for is_declared in (True, False):
    process = build(
        mlp.build_problem('bilevel', is_declared), method, inner_rounds=1,
        inner_local_steps=1, batch_size=2,
    )  # fmt: skip
    assert process.method.types.problem.has_representation == is_declared
    for executor in (process, build_driver(process)):
      state = process.initialize()
      for _ in range(2):
        state = executor.next(state, datasets).state
      states.append(fednest_tff.NestedWeights(state.outer, state.inner))
  start = process.get_model_weights(process.initialize())
  for leaf, before in zip(
      tf.nest.flatten(states[0]), tf.nest.flatten(start), strict=True
  ):
    assert np.max(np.abs(leaf - before)) > 1e-4
  for other in states[1:]:
    assert_same(other, states[0], rtol=1e-11)


def test_every_round_has_a_cohort_of_its_own():
  """Algorithms 2 to 4 with a different S in each round, in NumPy."""
  s = SETTINGS
  clients = quadratic.make_clients(num_clients=6)
  form = quadratic.ClosedForm(clients)
  datasets = quadratic.to_datasets(clients)
  process = build(
      quadratic.build_problem(), ihgp='truncated', inner_rounds=1,
      neumann_terms=2,
  )

  def members(epoch, index):
    return [(epoch + index) % 6, (epoch + 2 * index + 1) % 6]

  def cohort(epoch, name, index):
    # A round's datasets may also be of unknown size.
    return [
        datasets[i].filter(lambda row: True) for i in members(epoch, index)
    ]

  driven = driver.build_driver(process)
  state = driven.initialize()
  x, y = np.array(state.outer), np.array(state.inner)
  for epoch in range(2):

    def mean(index, function, epoch=epoch):
      chosen = [form.locals[i] for i in members(epoch, index)]
      return np.mean([function(c) for c in chosen], axis=0)

    q = mean(0, lambda c, x=x, y=y: c.inner_gradient(x, y))

    def inner_steps(c, y=y, q=q):
      y_i = y
      for _ in range(s.inner_steps):
        y_i = y_i - s.beta * (c.A @ (y_i - y) + q)
      return y_i

    y = mean(1, inner_steps)
    p = mean(2, lambda c, x=x, y=y: c.gradient_in_inner(x, y)) / s.smoothness
    p = 2 * p - mean(3, lambda c, p=p: c.A @ p) / s.smoothness
    h = mean(
        4,
        lambda c, x=x, y=y, p=p: c.direct_gradient(x, y) - c.mixed_product(p),
    )

    def outer_steps(c, x=x, h=h):
      x_i = x
      for _ in range(s.outer_steps):
        x_i = x_i - s.alpha * (c.P @ (x_i - x) + h)
      return x_i

    x = mean(5, outer_steps)
    output = driven.next(state, cohort)
    state = output.state
    np.testing.assert_allclose(state.inner, y, rtol=1e-10)
    np.testing.assert_allclose(state.outer, x, rtol=1e-10)
    first = [len(clients[i]['b']) for i in members(epoch, 0)]
    assert output.metrics['num_examples'] == sum(first)
    assert output.metrics['num_clients'] == 2


@pytest.mark.parametrize('process', [None, driver, 'fednest'])
def test_something_that_is_no_process_is_refused(process):
  with pytest.raises(ValueError, match='`process` must come from'):
    driver.build_driver(process)


def test_process_of_another_kind_is_refused():
  sampled = tff.simulation.compose_dataset_computation_with_iterative_process(
      tff.tensorflow.computation(
          lambda data: data,
          tff.SequenceType(tff.types.tensorflow_to_type(SPEC)),
      ),
      build(_small_problem('single_level')),
  )
  with pytest.raises(ValueError, match='`process` must come from'):
    driver.build_driver(sampled)
