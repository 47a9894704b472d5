"""The method `personal` against closed forms and NumPy, and its refusals."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from tests.helpers import (
    personal,
    processes,
    quadratic,
    reference,
    small_problems,
)
from tests.helpers.one_client import numpy_losses

CLIENTS = quadratic.make_clients()
COHORT = quadratic.to_datasets(CLIENTS)
SIZES = [len(client['b']) for client in CLIENTS]
FORM = personal.ClosedForm(CLIENTS)
X = quadratic.init_outer(0).numpy()
Y = quadratic.init_inner(0).numpy()
SETTINGS = reference.Settings(
    alpha=0.1,
    beta=0.15,
    inner_rounds=0,
    inner_steps=3,
    outer_steps=2,
    neumann_terms=3,
    smoothness=4.0,
)
EPOCHS = 3


@functools.cache
def exact():
  """Inner solutions and p_i to machine precision."""
  return fednest_tff.build_personal(
      personal.build_problem(),
      inner=fednest_tff.LocalWork(learning_rate=0.55, steps=100),
      outer=fednest_tff.LocalWork(learning_rate=0.3),
      solver=fednest_tff.InverseHessian(kind='cg', terms=quadratic.DY + 1),
  )


@functools.cache
def truncated(batch_size=None, **options):
  """Two outer steps, unequal weights; every error of y_i and p_i counts."""
  return processes.build(
      personal.build_problem(),
      'personal',
      SETTINGS,
      batch_size=batch_size,
      client_weighting='num_examples',
      **options,
  )


def build_plain(dtype=tf.float64, **options):
  """One outer step, equal weights."""
  settings = reference.Settings(0.1, 0.15, 0, 3, 1, 3, 4.0)
  return processes.build(
      personal.build_problem(dtype), 'personal', settings, **options
  )


def sampled():
  return truncated(1, ihgp='stochastic')


# Closed forms.


def test_a_step_is_along_the_mean_of_exact_hypergradients():
  state, metrics = processes.run(exact(), COHORT, 1)
  h = FORM.total_gradient(X)
  np.testing.assert_allclose((X - state.outer) / 0.3, h, rtol=0, atol=1e-10)
  np.testing.assert_array_equal(state.inner, Y)

  solutions = FORM.inner_solutions(X)
  losses = [
      numpy_losses(client, X, y)
      for client, y in zip(CLIENTS, solutions, strict=True)
  ]
  f, g = np.mean(losses, axis=0)
  distance = np.mean([np.linalg.norm(y - Y) for y in solutions])
  steps = [
      0.3 * form.hypergradient(X, y)
      for form, y in zip(FORM.locals, solutions, strict=True)
  ]
  drift = np.sqrt(
      np.mean([np.sum((step - np.mean(steps, 0)) ** 2) for step in steps])
  )
  expected = dict(
      outer_loss=f, inner_loss=g, inner_distance=distance, outer_drift=drift,
      outer_update_norm=0.3 * np.linalg.norm(h), num_clients=3, num_examples=6,
  )
  # The last one is what TFF's training program reads.
  assert set(metrics) == {*expected, 'client_work'}
  assert metrics['client_work']['train']['loss'] == metrics['outer_loss']
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-10, err_msg=name)
  np.testing.assert_allclose(f, FORM.objective(X), rtol=1e-12)


def test_the_step_is_the_slope_of_the_objective():
  """Central differences of a quadratic are exact but for rounding."""
  state, _ = processes.run(exact(), COHORT, 1)
  slopes = [
      (FORM.objective(X + unit / 100) - FORM.objective(X - unit / 100)) * 50
      for unit in np.eye(quadratic.DX)
  ]
  np.testing.assert_allclose((X - state.outer) / 0.3, slopes, atol=1e-10)


def test_converges_to_the_personal_solution():
  state, metrics = processes.run(exact(), COHORT, 60)
  x = FORM.solution()
  np.testing.assert_allclose(state.outer, x, rtol=0, atol=1e-10)
  np.testing.assert_allclose(
      metrics['outer_loss'], FORM.objective(x), rtol=1e-10
  )
  # It is a minimum, and not the solution with a shared y.
  for unit in np.eye(quadratic.DX):
    assert FORM.objective(x) < min(
        FORM.objective(x + unit / 10), FORM.objective(x - unit / 10)
    )
  shared, _ = quadratic.ClosedForm(CLIENTS).solution()
  assert np.linalg.norm(x - shared) > 1e-2


def test_equal_clients_have_the_shared_solution():
  clients = CLIENTS[2:] * 2
  shared, _ = quadratic.ClosedForm(clients).solution()
  state, metrics = processes.run(exact(), quadratic.to_datasets(clients), 100)
  np.testing.assert_allclose(state.outer, shared, rtol=0, atol=1e-10)
  np.testing.assert_allclose(metrics['outer_drift'], 0, atol=1e-7)


# NumPy.


@pytest.mark.parametrize('batch_size', [None, 1])
def test_epochs_equal_numpy(batch_size):
  process = truncated(batch_size)
  outputs = processes.outputs(process, COHORT, EPOCHS)
  states = [process.initialize(), *(output.state for output in outputs)]

  @functools.cache
  def draws_of(number, epoch):
    client = CLIENTS[number]
    if batch_size is None:
      return personal.full_batches(client)
    seed = personal.client_seed(client, states[epoch].seed, epoch)
    return personal.minibatches(client, batch_size, SETTINGS, seed)

  def draws(client, epoch):
    return draws_of([c is client for c in CLIENTS].index(True), epoch)

  for epochs in range(1, EPOCHS + 1):
    x = personal.run(CLIENTS, SIZES, X, Y, SETTINGS, draws, epochs)
    np.testing.assert_allclose(
        states[epochs].outer, x, rtol=0, atol=1e-10
    )
    np.testing.assert_array_equal(states[epochs].inner, Y)
  unweighted = personal.run(
      CLIENTS, [1, 1, 1], X, Y, SETTINGS, draws, EPOCHS
  )
  assert np.linalg.norm(x - unweighted) > 1e-3


def test_clients_take_unequal_numbers_of_steps():
  """tau_i = n_i, and alpha_i = alpha / tau_i as in the theory."""

  def count(examples):
    return tf.shape(examples['b'])[0]

  process = processes.build(
      personal.build_problem(),
      'personal',
      SETTINGS,
      inner_local_steps=lambda examples: 2 * count(examples),
      outer_local_steps=count,
      divide_by_local_steps=True,
  )
  state, _ = processes.run(process, COHORT, 1)
  ends = []
  for client, size in zip(CLIENTS, SIZES, strict=True):
    own = reference.Settings(
        SETTINGS.alpha / size, SETTINGS.beta / (2 * size), 0, 2 * size, size,
        SETTINGS.neumann_terms, SETTINGS.smoothness,
    )
    ends.append(personal.steps(personal.full_batches(client), X, Y, own))
  np.testing.assert_allclose(
      state.outer, np.mean(ends, axis=0), rtol=0, atol=1e-10
  )


def test_a_client_without_examples_changes_nothing():
  process = truncated()
  empty = quadratic.map_arrays(CLIENTS[0], lambda value: value[:0])
  expected, _ = processes.run(process, COHORT, 1)
  state, metrics = processes.run(
      process, [*quadratic.to_datasets([empty]), *COHORT], 1
  )
  processes.assert_equal(state, expected)
  assert metrics['num_clients'] == 4


def test_a_sub_cohort_counts_alone():
  process = truncated()
  state, _ = processes.run(process, COHORT[1:], 1)
  x = personal.run(
      CLIENTS[1:], SIZES[1:], X, Y, SETTINGS,
      lambda client, epoch: personal.full_batches(client), 1,
  )
  np.testing.assert_allclose(state.outer, x, rtol=0, atol=1e-10)


# Hyper-parameters, schedules, aggregators, optimizers.


def test_numbers_of_the_state_are_those_of_the_builder():
  assert dict(exact().get_hparams(exact().initialize())) == {
      'outer_learning_rate': 0.3, 'inner_learning_rate': 0.55
  }
  process = truncated()
  state = process.initialize()
  hparams = process.get_hparams(state)
  assert dict(hparams) == {
      'outer_learning_rate': 0.1, 'inner_learning_rate': 0.15, 'smoothness': 4.0
  }
  for name, value in dict(
      outer_learning_rate=0.05, inner_learning_rate=0.2, smoothness=0.0
  ).items():
    hparams[name] = np.float64(value)
  state = process.set_hparams(state, hparams)
  output = process.next(state, COHORT)
  # l = 0 stands for 1 / beta.
  changed = reference.Settings(0.05, 0.2, 0, 3, 2, 3, 5.0)
  x = personal.run(
      CLIENTS, SIZES, X, Y, changed,
      lambda client, epoch: personal.full_batches(client), 1,
  )
  np.testing.assert_allclose(output.state.outer, x, rtol=0, atol=1e-10)


def test_schedules_are_functions_of_the_epoch():
  process = build_plain(
      outer_learning_rate=lambda epoch: 0.1 / tf.cast(epoch + 1, tf.float64),
      inner_learning_rate=lambda epoch: 0.1 + 0.1 * tf.cast(epoch, tf.float64),
  )
  state, _ = processes.run(process, COHORT, 3)
  x = X
  for epoch in range(3):
    s = reference.Settings(
        0.1 / (epoch + 1), 0.1 + 0.1 * epoch, 0, 3, 1, 3, 4.0
    )
    x = personal.run(
        CLIENTS, [1, 1, 1], x, Y, s,
        lambda client, epoch: personal.full_batches(client), 1,
    )
  np.testing.assert_allclose(state.outer, x, rtol=0, atol=1e-10)


def test_an_aggregator_clips_the_updates():
  process = build_plain(
      outer_aggregator=tff.aggregators.clipping_factory(
          0.01, tff.aggregators.MeanFactory()
      )
  )
  output = processes.run(process, COHORT, 1)
  s = reference.Settings(0.1, 0.15, 0, 3, 1, 3, 4.0)
  changes = [
      personal.steps(personal.full_batches(client), X, Y, s) - X
      for client in CLIENTS
  ]
  assert min(map(np.linalg.norm, changes)) > 0.01
  clipped = [0.01 * change / np.linalg.norm(change) for change in changes]
  # The clipping norm is a float32.
  np.testing.assert_allclose(
      output.state.outer - X, np.mean(clipped, axis=0), rtol=1e-6
  )
  assert 'outer_aggregator' in output.metrics


def test_the_server_has_an_optimizer():
  """In float32, as TFF's optimizers keep their numbers."""
  process = build_plain(
      tf.float32,
      outer_optimizer=tff.learning.optimizers.build_sgdm(0.5, momentum=0.5),
  )
  cohort = quadratic.to_datasets(quadratic.make_clients(dtype=np.float32))
  states = [output.state for output in processes.outputs(process, cohort, 2)]
  s = reference.Settings(0.1, 0.15, 0, 3, 1, 3, 4.0)
  start = process.initialize()
  x, velocity = start.outer, 0
  for state in states:
    mean = personal.run(
        CLIENTS, [1, 1, 1], x, start.inner, s,
        lambda client, epoch: personal.full_batches(client), 1,
    )
    velocity = 0.5 * velocity - (mean - x)
    x = x - 0.5 * velocity
    assert state.outer.dtype == np.float32
    np.testing.assert_allclose(state.outer, x, rtol=1e-5)
  hparams = process.get_hparams(states[-1])
  assert hparams['outer_optimizer']['learning_rate'] == 0.5


# Rounds, bytes, driver, seeds.


def test_driver_equals_next():
  process = sampled()
  driver = fednest_tff.build_driver(process)
  expected = processes.run(process, COHORT, 1)
  output = driver.next(driver.initialize(), COHORT)
  processes.assert_equal(output.state, expected.state)
  metrics = dict(output.metrics)
  assert metrics.pop('communication_rounds') == 1
  assert metrics.pop('bytes_up') > 0
  assert metrics.pop('bytes_down') > 0
  processes.assert_equal(metrics, dict(expected.metrics))


def test_communication_is_one_round():
  x, y, scalar, seed, counts = 8 * quadratic.DX, 8 * quadratic.DY, 8, 16, 16
  cost = fednest_tff.communication_cost(truncated())
  assert cost.rounds == cost.expected_rounds == 1
  # x, y_0, alpha, beta and l; x_i - x, its weight and four metrics.
  assert cost.bytes_down == x + y + 3 * scalar + seed
  assert cost.bytes_up == x + 5 * scalar + counts
  # Conjugate gradient needs no l.
  assert fednest_tff.communication_cost(exact()).bytes_down == (
      cost.bytes_down - scalar
  )
  assert list(truncated().rounds) == ['personal_update']
  assert fednest_tff.get_method('personal').rounds == '1'


def test_the_same_seeds_give_the_same_bytes():
  process = sampled()
  first, second = processes.outputs(process, COHORT, 2)
  again = processes.run(process, COHORT, 1)
  processes.assert_equal(again, first)
  # A state goes on the same, wherever it comes from.
  copied = tf.nest.map_structure(np.copy, first.state)
  processes.assert_equal(process.next(copied, COHORT), second)
  # Epochs and seeds draw anew.
  at_start = first.state._replace(
      outer=process.initialize().outer, epoch=np.int32(1)
  )
  later = process.next(at_start, COHORT)
  assert np.any(later.state.outer != first.state.outer)
  other = process.initialize()._replace(seed=np.array([1, 0], np.int64))
  assert np.any(process.next(other, COHORT).state.outer != first.state.outer)


# Personalisation.


@functools.cache
def personalize():
  return fednest_tff.build_personalize(
      personal.build_problem(),
      inner=fednest_tff.LocalWork(learning_rate=0.55, steps=100),
  )


def test_personalize_gives_each_client_its_solution():
  process = exact()
  weights = process.get_model_weights(processes.run(process, COHORT, 2).state)
  for client, form in zip(CLIENTS, FORM.locals, strict=True):
    y = personalize()(weights, client, np.array([0, 0]))
    np.testing.assert_allclose(
        y, form.inner_solution(weights.outer), rtol=0, atol=1e-10
    )
  # Clients of all sizes share a trace.
  assert personalize().experimental_get_tracing_count() == 1


def test_personalize_takes_the_inner_steps_of_the_method():
  """The metrics of an epoch are those of the y_i that it gives."""
  process = truncated()
  few = fednest_tff.build_personalize(
      personal.build_problem(),
      inner=fednest_tff.LocalWork(
          learning_rate=SETTINGS.beta, steps=SETTINGS.inner_steps
      ),
  )
  _, metrics = processes.run(process, COHORT, 1)
  weights = process.get_model_weights(process.initialize())
  own = [few(weights, client, np.array([0, 0])).numpy() for client in CLIENTS]
  losses = [
      numpy_losses(client, X, y) for client, y in zip(CLIENTS, own, strict=True)
  ]
  f, g = np.average(losses, axis=0, weights=SIZES)
  np.testing.assert_allclose(metrics['outer_loss'], f, rtol=1e-10)
  np.testing.assert_allclose(metrics['inner_loss'], g, rtol=1e-10)
  distances = [np.linalg.norm(y - Y) for y in own]
  np.testing.assert_allclose(
      metrics['inner_distance'], np.average(distances, weights=SIZES),
      rtol=1e-10,
  )


def test_personalize_fits_a_shared_inner_variable():
  shared = fednest_tff.build_personalize(
      quadratic.build_problem(),
      inner=fednest_tff.LocalWork(learning_rate=0.55, steps=100),
  )
  y = shared(fednest_tff.NestedWeights(X, Y), CLIENTS[2], np.array([0, 0]))
  np.testing.assert_allclose(
      y, FORM.locals[2].inner_solution(X), rtol=0, atol=1e-10
  )


def test_personalize_refuses_what_does_not_fit():
  build = fednest_tff.build_personalize
  with pytest.raises(ValueError, match='single-level'):
    build(
        small_problems.single_level(),
        inner=fednest_tff.LocalWork(learning_rate=0.1),
    )
  for rate in (None, lambda epoch: 0.1, -1.0):
    with pytest.raises(ValueError, match='`inner_learning_rate` must be'):
      build(
          small_problems.personal(),
          inner=fednest_tff.LocalWork(learning_rate=rate),
      )


# Refusals.


@pytest.mark.parametrize(
    'builder',
    [
        *(
            fednest_tff.get_method(name).builder
            for name in fednest_tff.METHODS if name != 'personal'
        ),
        functools.partial(
            fednest_tff.build_fed_ihgp,
            solver=fednest_tff.FederatedInverseHessian(smoothness=1.0),
        ),
        fednest_tff.build_fed_inn,
        fednest_tff.build_fed_out,
        fednest_tff.build_lfed_inn,
        fednest_tff.build_lfed_out,
        fednest_tff.build_power_iteration,
    ],
    ids=lambda builder: getattr(builder, '__name__', 'build_fed_ihgp'),
)
def test_other_methods_refuse_a_personal_problem(builder):
  with pytest.raises(ValueError, match='`problem` is personal: ') as refused:
    builder(small_problems.personal())
  assert '\n' not in str(refused.value)


@pytest.mark.parametrize(
    'build', [b for b in small_problems.ALL if b is not small_problems.personal]
)
def test_personal_refuses_other_problems(build):
  problem = build()
  with pytest.raises(ValueError, match=f'`problem` is {problem.kind}: '):
    fednest_tff.build_personal(problem)


def test_personal_refuses_bad_options():
  def refuses(message, **options):
    with pytest.raises(ValueError, match=message):
      fednest_tff.build(small_problems.personal(), 'personal', **options)

  refuses('`inner_learning_rate` is missing', outer_learning_rate=0.1)
  refuses('`outer_learning_rate` is missing', inner_learning_rate=0.1)
  both = dict(inner_learning_rate=0.1, outer_learning_rate=0.1)
  refuses('`inner_local_steps` must be', inner_local_steps=0, **both)
  refuses('`smoothness` must be', smoothness=-1.0, **both)
  refuses('`neumann_terms` must be', neumann_terms=0, **both)
  refuses('`outer_optimizer` must be', outer_optimizer=0.1, **both)
  refuses('is no option of personal', inner_rounds=2, **both)


def test_what_is_not_finite_is_refused():
  process = truncated()
  state = process.initialize()
  hparams = process.get_hparams(state)
  hparams['outer_learning_rate'] = np.float64(np.inf)
  error = tf.errors.InvalidArgumentError
  with pytest.raises(error, match='Personal: x\\+ is not finite'):
    process.next(process.set_hparams(state, hparams), COHORT)
