"""Aggregators: `tff.aggregators` factories in place of the plain means."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from tests.helpers import quadratic
from tests.helpers.processes import build_flat

EXAMPLES = (1, 2, 3)
CLIENTS = quadratic.make_clients(examples=EXAMPLES)
ALL_THREE = ('inner_aggregator', 'outer_aggregator', 'gradient_aggregator')


class CountingFactory(tff.aggregators.WeightedAggregationFactory):
  """`MeanFactory` that counts its calls, in its state and its measurements."""

  def create(self, value_type, weight_type):
    mean = tff.aggregators.MeanFactory().create(value_type, weight_type)

    @tff.federated_computation
    def initialize():
      return tff.federated_value(0, tff.SERVER)

    @tff.tensorflow.computation(np.int32)
    def increment(count):
      return count + 1

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      result = mean.next(mean.initialize(), value, weight).result
      count = tff.federated_map(increment, state)
      return tff.templates.MeasuredProcessOutput(count, result, count)

    return tff.templates.AggregationProcess(initialize, next_fn)


@pytest.fixture(scope='module')
def problem():
  return quadratic.build_problem()


@pytest.fixture(scope='module')
def cohort():
  return quadratic.to_datasets(CLIENTS)


@pytest.fixture(scope='module')
def small_cohort():
  """In float32: DP and quantisation know no other type."""
  return quadratic.to_datasets(
      quadratic.make_clients(examples=EXAMPLES, dtype=np.float32)
  )


@pytest.fixture(scope='module')
def small_minimax():
  """max over y of y'(B x + b) - y'A y / 2, and a little of x itself."""
  def loss(x, y, batch):
    return tf.reduce_sum(x * x) / 4 - quadratic.inner_loss(x, y, batch)

  return fednest_tff.minimax(
      loss,
      lambda seed: quadratic.init_outer(seed, tf.float32),
      lambda seed: quadratic.init_inner(seed, tf.float32),
      quadratic.element_spec(tf.float32),
  )


def _epoch(form, x, y, beta, alpha, inner_rounds, smoothness, neumann_terms):
  """One epoch of FedNest with one local step each and the truncated sum."""
  for _ in range(inner_rounds):
    y = y - beta * form.inner_gradient(x, y)
  term = form.gradient_in_inner(x, y) / smoothness
  p = term
  for _ in range(1, neumann_terms):
    term = term - form.A @ term / smoothness
    p = p + term
  h = form.direct_gradient(x, y) - form.mixed_product(p)
  return x - alpha * h, y


def _changed(before, after):
  return any(
      np.any(a != b)
      for a, b in zip(
          tf.nest.flatten(before), tf.nest.flatten(after), strict=True
      )
  )


def _run(process, cohort, epochs=2):
  """States and metrics of the first epochs."""
  states, metrics = [process.initialize()], []
  for _ in range(epochs):
    output = process.next(states[-1], cohort)
    states.append(output.state)
    metrics.append(output.metrics)
  return states, metrics


# ---- Means ------------------------------------------------------------------
#
# TFF's means sum in the value's own type and divide once, as the plain mean
# does: they agree with NumPy as closely.


def test_unweighted_mean(problem, cohort):
  factory = tff.aggregators.UnweightedMeanFactory()
  process = fednest_tff.build(
      problem, inner_learning_rate=0.3, outer_learning_rate=0.2,
      ihgp='truncated', neumann_terms=1, smoothness=3.0,
      **dict.fromkeys(ALL_THREE, factory),
  )  # fmt: skip
  form = quadratic.ClosedForm(CLIENTS)
  (start, state), _ = _run(process, cohort, epochs=1)
  x, y = _epoch(form, start.outer, start.inner, 0.3, 0.2, 1, 3.0, 1)
  np.testing.assert_allclose(state.outer, x, rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(state.inner, y, rtol=1e-12, atol=1e-12)


def test_weighted_mean_in_every_round(problem, cohort):
  process = fednest_tff.build(
      problem, inner_learning_rate=0.3, outer_learning_rate=0.2,
      inner_rounds=2, ihgp='truncated', neumann_terms=3, smoothness=3.0,
      client_weighting='num_examples',
      **dict.fromkeys(ALL_THREE, CountingFactory()),
  )  # fmt: skip
  form = quadratic.ClosedForm(CLIENTS, EXAMPLES)
  states, metrics = _run(process, cohort)

  x, y = states[0].outer, states[0].inner
  for state in states[1:]:
    x, y = _epoch(form, x, y, 0.3, 0.2, 2, 3.0, 3)
    np.testing.assert_allclose(state.outer, x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state.inner, y, rtol=1e-12, atol=1e-12)
  # Each goes on from where the last round left it: T = 2 and N = 3.
  rounds = dict(
      inner_gradient=2, inner_update=2, ihgp=3, hypergradient=1,
      outer_update=1,
  )  # fmt: skip
  for epoch, state in enumerate(states):
    assert state.aggregators == {
        name: epoch * count for name, count in rounds.items()
    }
  assert [epoch['inner_aggregator'] for epoch in metrics] == [2, 4]
  assert [epoch['outer_aggregator'] for epoch in metrics] == [1, 2]
  # Of the last round that it is for: the hypergradient.
  assert [epoch['gradient_aggregator'] for epoch in metrics] == [1, 2]


def test_joint_methods_carry_their_state(problem, cohort):
  process = fednest_tff.build(
      problem, 'lfednest_nonalt', inner_learning_rate=0.3,
      outer_learning_rate=0.2, neumann_terms=1, smoothness=3.0,
      client_weighting='num_examples', outer_aggregator=CountingFactory(),
  )  # fmt: skip
  states, metrics = _run(process, cohort)
  assert states[2].aggregators == dict(joint_update=2)
  assert metrics[1]['outer_aggregator'] == 2
  # The weighted means of x_i and of y_i, and of the metrics beside them.
  form = quadratic.ClosedForm(CLIENTS, EXAMPLES)
  x, y = states[0].outer, states[0].inner
  np.testing.assert_allclose(
      metrics[0]['inner_loss'],
      y @ form.A @ y / 2 - y @ (form.B @ x + form.b),
      rtol=1e-12,
  )
  ends = [
      _epoch(client, x, y, 0.3, 0.2, 1, 3.0, 1) for client in form.locals
  ]
  np.testing.assert_allclose(
      states[1].outer, form.mean([x_i for x_i, _ in ends]), rtol=1e-12
  )
  np.testing.assert_allclose(
      states[1].inner, form.mean([y_i for _, y_i in ends]), rtol=1e-12
  )


def test_fed_ihgp_carries_its_state(problem, cohort):
  process = build_flat(
      fednest_tff.build_fed_ihgp, problem, smoothness=3.0, neumann_terms=3,
      ihgp='truncated', gradient_aggregator=CountingFactory(),
  )  # fmt: skip
  states, metrics = _run(process, cohort, epochs=3)
  assert [state.aggregators['ihgp'] for state in states] == [0, 1, 2, 3]
  assert [epoch['gradient_aggregator'] for epoch in metrics] == [1, 2, 3]


# ---- TFF's recommended aggregators ------------------------------------------


def test_robust_private_and_compressed(small_minimax, small_cohort):
  process = fednest_tff.build(
      small_minimax,
      inner_learning_rate=0.3,
      outer_learning_rate=0.1,
      inner_aggregator=tff.learning.robust_aggregator(),
      outer_aggregator=tff.learning.dp_aggregator(
          noise_multiplier=0.1, clients_per_round=len(CLIENTS)
      ),
      gradient_aggregator=tff.learning.compression_aggregator(),
  )
  states, metrics = _run(process, small_cohort)
  for before, after in zip(states, states[1:], strict=False):
    for name, state in after.aggregators.items():
      assert _changed(before.aggregators[name], state), name
    for name in ('outer', 'inner'):
      assert np.all(np.isfinite(getattr(after, name)))
      assert np.any(getattr(after, name) != getattr(before, name))

  # All three clients' gradients are longer than the first clipping norm, 1:
  # it clips them, and then grows.
  def clipping_norm(state):
    compressed = state.aggregators['inner_gradient']
    return compressed['inner_agg']['clipping_norm'][0].current_estimate

  assert metrics[0]['inner_gradient_norm'] <= 1.0 + 1e-5
  assert clipping_norm(states[0]) == 1.0
  assert 1.0 < clipping_norm(states[1]) < clipping_norm(states[2])

  robust = [epoch['inner_aggregator'] for epoch in metrics]
  assert robust[0]['zeroed_count'] == 0
  assert robust[0]['zeroing']['clipping_norm'] == 1.0
  assert robust[1]['zeroing']['clipping_norm'] != 1.0

  # Privacy clips to norm 0.1 at first; its noise is 0.1 * 0.1 / 3 or so.
  assert 0 < metrics[0]['outer_update_norm'] < 0.15
  for epoch in metrics:
    private = epoch['outer_aggregator']['zeroing']['dp_query_metrics']
    assert 0 < private['clip'] < 1


def test_quantized_gradients(small_cohort):
  # `compression_aggregator` leaves tensors of less than 20,000 elements as they
  # are; this is its quantisation.
  factory = tff.aggregators.MeanFactory(
      tff.aggregators.EncodedSumFactory.quantize_above_threshold(
          quantization_bits=8, threshold=0
      )
  )
  process = build_flat(
      fednest_tff.build_fed_inn, quadratic.build_problem(tf.float32),
      inner_learning_rate=0.3, gradient_aggregator=factory,
  )  # fmt: skip
  states, metrics = _run(process, small_cohort, epochs=1)
  form = quadratic.ClosedForm(CLIENTS)
  expected = form.inner_gradient(states[0].outer, states[0].inner)
  # Eight bits of q: near the plain mean, but not equal to it.
  error = metrics[0]['inner_gradient_norm'] / np.linalg.norm(expected) - 1
  assert 1e-6 < abs(error) < 0.02


# ---- Clipping ---------------------------------------------------------------

BOUND = 1e-3


def _clipping_factory():
  return tff.aggregators.clipping_factory(BOUND, CountingFactory())


def test_clipping_bounds_both_updates_of_the_light_method(problem, cohort):
  process = fednest_tff.build(
      problem, 'lfednest', inner_learning_rate=0.3, outer_learning_rate=0.2,
      inner_rounds=2, neumann_terms=1, outer_aggregator=_clipping_factory(),
      inner_aggregator=_clipping_factory(),
  )  # fmt: skip
  states, metrics = _run(process, cohort)
  for name, rounds in (('inner', 2), ('outer', 1)):
    norms = [
        np.linalg.norm(getattr(after, name) - getattr(before, name))
        for before, after in zip(states, states[1:], strict=False)
    ]
    for epoch, norm in enumerate(norms):
      assert 0 < norm <= rounds * BOUND * (1 + 1e-6)
      measured = metrics[epoch][f'{name}_aggregator']
      assert measured['clipped_count'] == len(CLIENTS)
      assert measured['clipping'] == (epoch + 1) * rounds
    state = states[2].aggregators[f'{name}_update']
    assert state['inner_agg'] == 2 * rounds
  np.testing.assert_allclose(metrics[1]['outer_update_norm'], norms[1])


def test_clipping_bounds_the_gradient(problem, cohort):
  process = build_flat(
      fednest_tff.build_fed_inn,
      problem,
      inner_learning_rate=0.5,
      gradient_aggregator=_clipping_factory(),
  )
  states, metrics = _run(process, cohort, epochs=1)
  assert 0 < metrics[0]['inner_gradient_norm'] <= BOUND * (1 + 1e-6)
  np.testing.assert_allclose(
      np.linalg.norm(states[1].inner - states[0].inner),
      0.5 * metrics[0]['inner_gradient_norm'],
  )
  measured = metrics[0]['gradient_aggregator']
  assert measured['clipped_count'] == len(CLIENTS)
  assert measured['clipping'] == 1


# ---- Refusals ---------------------------------------------------------------


@pytest.mark.parametrize(
    'build, name',
    [
        (fednest_tff.build_fed_inn, 'inner_aggregator'),
        (fednest_tff.build_fed_inn, 'gradient_aggregator'),
        (fednest_tff.build_lfed_inn, 'inner_aggregator'),
    ],
)
def test_unweighted_factory_for_weighted_clients(problem, build, name):
  options = {name: tff.aggregators.UnweightedMeanFactory()}
  with pytest.raises(ValueError, match=f'`{name}` is an unweighted factory'):
    build_flat(
        build, problem, inner_learning_rate=0.1,
        client_weighting='num_examples', **options,
    )  # fmt: skip


@pytest.mark.parametrize('name', ['outer_aggregator', 'gradient_aggregator'])
def test_unweighted_factory_for_weighted_outer_clients(problem, name):
  options = {name: tff.aggregators.UnweightedMeanFactory()}
  with pytest.raises(ValueError, match=f'`{name}` is an unweighted factory'):
    build_flat(
        fednest_tff.build_fed_out, problem, outer_learning_rate=0.1,
        smoothness=2.0, client_weighting=lambda examples: tf.constant(2.0),
        **options,
    )  # fmt: skip


def test_unweighted_factory_for_sub_cohorts(problem):
  with pytest.raises(ValueError, match='`gradient_aggregator` is an unw'):
    build_flat(
        fednest_tff.build_fed_out, problem, outer_learning_rate=0.1,
        smoothness=2.0, participation=0.5,
        gradient_aggregator=tff.aggregators.UnweightedMeanFactory(),
    )  # fmt: skip


@pytest.mark.parametrize('wrong', ['mean', tff.aggregators.MeanFactory, 0.5])
def test_something_that_is_no_factory(problem, wrong):
  with pytest.raises(
      ValueError, match='`inner_aggregator` must be a tff.aggregators factory'
  ):
    build_flat(
        fednest_tff.build_lfed_inn, problem, inner_learning_rate=0.1,
        inner_aggregator=wrong,
    )  # fmt: skip


@pytest.mark.parametrize('method', ['lfednest_nonalt', 'fedavg_s'])
def test_inner_aggregator_of_a_one_round_method(problem, method):
  with pytest.raises(
      ValueError, match=f'`inner_aggregator` is no option of {method}'
  ):
    fednest_tff.build(
        problem, method, inner_learning_rate=0.1, outer_learning_rate=0.1,
        inner_aggregator=tff.aggregators.MeanFactory(),
    )  # fmt: skip


def test_unweighted_factory_of_uniform_weights_is_fine(problem):
  # 'uniform' by either name.
  build_flat(
      fednest_tff.build_lfed_inn, problem, inner_learning_rate=0.1,
      client_weighting=tff.learning.ClientWeighting.UNIFORM,
      inner_aggregator=tff.aggregators.UnweightedMeanFactory(),
  )  # fmt: skip


# ---- The classes themselves -------------------------------------------------


@pytest.mark.parametrize('bad', [0, -1, 1.5, True, '2'])
def test_bad_sample_sizes_are_named(bad):
  with pytest.raises(ValueError, match='`gradient_batch_size` must be a pos'):
    fednest_tff.GlobalGradients(batch_size=bad)


@pytest.mark.parametrize('factory', [None, CountingFactory()])
@pytest.mark.parametrize('has_metrics', [False, True])
def test_an_aggregation_alone(problem, factory, has_metrics):
  """A mean of values and of metrics, with or without each of the two."""
  types = fednest_tff.ProblemTypes(problem)
  aggregation = fednest_tff.Aggregation(
      'name', types, types.outer, 'some_aggregator', factory
  )
  metrics_type = collections.OrderedDict(loss=np.float64) if has_metrics else ()
  seen = []

  @tff.federated_computation(
      aggregation.initialize.type_signature.result,
      tff.FederatedType(types.outer, tff.CLIENTS),
      tff.FederatedType(types.scalar, tff.CLIENTS),
      tff.FederatedType(metrics_type, tff.CLIENTS),
  )
  def average(state, value, weight, metrics):
    mean = aggregation(state, value, weight, metrics)
    seen.append(mean)
    return mean.state, mean.value, mean.metrics

  values, weights = np.arange(6.0).reshape(2, 3), [1.0, 3.0]
  losses = [{'loss': 1.0}, {'loss': 2.0}] if has_metrics else [(), ()]
  start = aggregation.initialize()
  state, value, metrics = average(start, list(values), weights, losses)
  np.testing.assert_allclose(value, values[0] / 4 + 3 * values[1] / 4)
  assert dict(metrics or {}) == ({'loss': 1.75} if has_metrics else {})
  (mean,) = seen
  if factory is None:
    assert state == start == ()
    assert mean.measurements is None
  else:
    assert (start, state) == (0, 1)
    assert mean.measurements is not None
