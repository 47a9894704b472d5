"""Clients that differ: in weight, in the number of local steps, or empty.

The expected numbers are loops over `quadratic.LocalForm`, which knows nothing
of the library.
"""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from tests.helpers import processes, quadratic

EXACT = dict(rtol=1e-10, atol=1e-10)
EXAMPLES = (1, 2, 3)
CLIENTS = quadratic.make_clients(examples=EXAMPLES)


def num_examples(examples):
  return tf.shape(examples['b'])[0]


@pytest.fixture(scope='module')
def problem():
  return quadratic.build_problem()


@pytest.fixture(scope='module')
def cohort():
  return quadratic.to_datasets(CLIENTS)


# ---- NumPy ------------------------------------------------------------------


def descend(direction, start, tau, step):
  v = start
  for _ in range(tau):
    v = v - step * direction(v)
  return v


def fed_inn(form, x, y, taus, steps):
  """y+ of Algorithm 4 with all of a client's examples in every minibatch."""
  q = form.inner_gradient(x, y)

  def local(client, tau, step):
    anchor = client.inner_gradient(x, y)
    return descend(
        lambda v: client.inner_gradient(x, v) - anchor + q, y, tau, step
    )

  return form.mean([
      local(client, tau, step)
      for client, tau, step in zip(form.locals, taus, steps, strict=True)
  ])


def fed_out(form, x, y, h, taus, steps):
  """x+ of Algorithm 2, lines 9-14, likewise."""

  def local(client, tau, step):
    anchor = client.direct_gradient(x, y)
    return descend(
        lambda v: client.direct_gradient(v, y) - anchor + h, x, tau, step
    )

  return form.mean([
      local(client, tau, step)
      for client, tau, step in zip(form.locals, taus, steps, strict=True)
  ])


def first_term(client, smoothness, x, y):
  """The hypergradient of a client, or of all, with p = b / l: N = 1."""
  p = client.gradient_in_inner(x, y) / smoothness
  return client.direct_gradient(x, y) - client.mixed_product(p)


def inner_loss(form, x, y):
  return y @ form.A @ y / 2 - y @ (form.B @ x + form.b)


# ---- Weights ----------------------------------------------------------------


@pytest.fixture(scope='module')
def weighted_processes(problem):
  """Processes by name, each with weights n_i: by the two names of that."""
  options = dict(client_weighting='num_examples')
  by_enum = dict(client_weighting=tff.learning.ClientWeighting.NUM_EXAMPLES)
  return dict(
      fed_inn=processes.build_flat(
          fednest_tff.build_fed_inn, problem, inner_learning_rate=0.2,
          inner_local_steps=2, **options,
      ),  # fmt: skip
      fed_out=processes.build_flat(
          fednest_tff.build_fed_out, problem, outer_learning_rate=0.3,
          outer_local_steps=3, ihgp='cg', neumann_terms=quadratic.DY + 1,
          participation=1.0, **options,
      ),  # fmt: skip
      lfednest=fednest_tff.build(
          problem, 'lfednest', inner_learning_rate=0.2, inner_local_steps=2,
          outer_learning_rate=0.3, smoothness=2.5, neumann_terms=1, **by_enum,
      ),  # fmt: skip
      fedavg_s=fednest_tff.build(
          problem, 'fedavg_s', inner_learning_rate=0.2,
          inner_local_steps=num_examples, outer_learning_rate=0.3,
          divide_by_local_steps=True, smoothness=2.5, neumann_terms=1,
          **options,
      ),  # fmt: skip
  )  # fmt: skip


@pytest.mark.parametrize('weighting', ['num_examples', 'function'])
def test_fed_inn_step_is_that_of_the_weighted_problem(
    problem, cohort, weighted_processes, weighting
):
  if weighting == 'num_examples':
    process, weights = weighted_processes['fed_inn'], EXAMPLES
  else:
    process, weights = processes.build_flat(
        fednest_tff.build_fed_inn, problem,
        inner_learning_rate=0.2, inner_local_steps=2,
        client_weighting=lambda examples: num_examples(examples) ** 2,
    ), [n**2 for n in EXAMPLES]  # fmt: skip
  form = quadratic.ClosedForm(CLIENTS, weights)
  state = process.initialize()
  x, y = state.outer, state.inner

  output = process.next(state, cohort)

  expected = fed_inn(form, x, y, [2] * 3, [0.2] * 3)
  np.testing.assert_allclose(output.state.inner, expected, **EXACT)
  np.testing.assert_array_equal(output.state.outer, x)
  metrics = output.metrics
  np.testing.assert_allclose(
      metrics['inner_loss'], inner_loss(form, x, y), **EXACT
  )
  np.testing.assert_allclose(
      metrics['inner_gradient_norm'],
      np.linalg.norm(form.inner_gradient(x, y)),
      **EXACT,
  )
  # The weights matter: this is not the step of the plain mean.
  plain = fed_inn(quadratic.ClosedForm(CLIENTS), x, y, [2] * 3, [0.2] * 3)
  assert np.linalg.norm(plain - expected) > 1e-3


def test_fed_out_step_is_that_of_the_weighted_problem(
    cohort, weighted_processes
):
  form = quadratic.ClosedForm(CLIENTS, EXAMPLES)
  process = weighted_processes['fed_out']
  state = process.initialize()
  x, y = state.outer, state.inner

  output = process.next(state, cohort)

  h = form.hypergradient(x, y)
  expected = fed_out(form, x, y, h, [3] * 3, [0.3] * 3)
  np.testing.assert_allclose(output.state.outer, expected, **EXACT)
  np.testing.assert_array_equal(output.state.inner, y)
  np.testing.assert_allclose(
      output.metrics['hypergradient_norm'],
      np.linalg.norm(h),
      **EXACT,
  )


def test_light_methods_weight_their_means(cohort, weighted_processes):
  form = quadratic.ClosedForm(CLIENTS, EXAMPLES)
  process = weighted_processes['lfednest']
  state = process.initialize()
  x, y = state.outer, state.inner

  output = process.next(state, cohort)

  def local(client):
    return descend(lambda v: client.inner_gradient(x, v), y, 2, 0.2)

  y_next = form.mean([local(client) for client in form.locals])
  x_next = form.mean([
      x - 0.3 * first_term(client, 2.5, x, y_next) for client in form.locals
  ])
  np.testing.assert_allclose(output.state.inner, y_next, **EXACT)
  np.testing.assert_allclose(output.state.outer, x_next, **EXACT)


def test_joint_method_weights_its_mean_and_divides_both_steps(
    cohort, weighted_processes
):
  form = quadratic.ClosedForm(CLIENTS, EXAMPLES)
  process = weighted_processes['fedavg_s']
  state = process.initialize()
  x, y = state.outer, state.inner

  output = process.next(state, cohort)

  def local(client, tau):  # both variables at once, from the old pair
    u, v = x, y
    for _ in range(tau):
      u, v = (
          u - 0.3 / tau * first_term(client, 2.5, u, v),
          v - 0.2 / tau * client.inner_gradient(u, v),
      )
    return u, v

  ends = [local(*pair) for pair in zip(form.locals, EXAMPLES, strict=True)]
  np.testing.assert_allclose(
      output.state.outer, form.mean([u for u, _ in ends]), **EXACT
  )
  np.testing.assert_allclose(
      output.state.inner, form.mean([v for _, v in ends]), **EXACT
  )


# ---- Numbers of local steps, and their sizes --------------------------------


def test_epochs_give_each_client_its_own_number_of_steps(problem):
  # A client's examples are copies of one, so that all its minibatches agree:
  # tau_i = 2 ceil(n_i / 2) is 2, 2 and 6 for n_i = 1, 2 and 5.
  clients = [
      quadratic.map_arrays(client, lambda v, n=n: np.repeat(v, n, axis=0))
      for client, n in zip(
          quadratic.make_clients(examples=(1,)), (1, 2, 5), strict=True
      )
  ]
  process = processes.build_flat(
      fednest_tff.build_fed_inn, problem,
      inner_learning_rate=0.2, inner_local_epochs=2, batch_size=2,
  )
  state = process.initialize()

  output = process.next(state, quadratic.to_datasets(clients))

  form = quadratic.ClosedForm(clients)
  expected = fed_inn(form, state.outer, state.inner, (2, 2, 6), [0.2] * 3)
  np.testing.assert_allclose(output.state.inner, expected, **EXACT)


RATES = np.array([(0.4, 0.2), (0.1, 0.5), (0.3, 0.1)])  # (beta, alpha)


@pytest.fixture(scope='module')
def scheduled(problem):
  return fednest_tff.build(
      problem,
      inner_learning_rate=lambda epoch: tf.gather(RATES[:, 0], epoch),
      outer_learning_rate=lambda epoch: tf.gather(RATES[:, 1], epoch),
      inner_local_steps=lambda examples: num_examples(examples) + 1,
      outer_local_steps=num_examples,
      divide_by_local_steps=True,
      inner_rounds=2,
      ihgp='truncated',
      neumann_terms=1,
      client_weighting='num_examples',
  )


def _smoothness(process, state):
  """l in the next epoch."""
  numbers, *_ = process.plan(state.seed, state.epoch, state.hparams)
  return numbers['smoothness']


def test_each_epoch_and_each_client_has_its_own_steps(scheduled, cohort):
  form = quadratic.ClosedForm(CLIENTS, EXAMPLES)
  state = scheduled.initialize()
  x, y = state.outer, state.inner
  # The default l is 1 / beta at epoch 0, and stays.
  smoothness = 1 / 0.4

  for epoch, (beta, alpha) in enumerate(RATES):
    assert state.epoch == epoch
    np.testing.assert_allclose(
        _smoothness(scheduled, state), smoothness, **EXACT
    )
    state = scheduled.next(state, cohort).state

    for _ in range(2):  # T
      y = fed_inn(form, x, y, (2, 3, 4), (beta / 2, beta / 3, beta / 4))
    h = first_term(form, smoothness, x, y)
    x = fed_out(form, x, y, h, (1, 2, 3), (alpha, alpha / 2, alpha / 3))
    np.testing.assert_allclose(state.inner, y, **EXACT)
    np.testing.assert_allclose(state.outer, x, **EXACT)


# ---- Clients without examples -----------------------------------------------


def _without_examples():
  return quadratic.to_datasets(
      [quadratic.map_arrays(CLIENTS[0], lambda value: value[:0])]
  )


def _assert_same_variables(state, expected):
  np.testing.assert_array_equal(state.outer, expected.outer)
  np.testing.assert_array_equal(state.inner, expected.inner)


def _assert_ignores_empty_client(process, cohort):
  state = process.initialize()
  expected = process.next(state, cohort)
  output = process.next(state, [*cohort[:1], *_without_examples(), *cohort[1:]])
  _assert_same_variables(output.state, expected.state)
  counts = dict(num_clients=4, num_examples=6)
  assert output.metrics == expected.metrics | counts


@pytest.mark.parametrize(
    'name', ['fed_inn', 'fed_out', 'lfednest', 'fedavg_s', 'scheduled']
)
def test_empty_client_changes_nothing(
    weighted_processes, scheduled, cohort, name
):
  process = scheduled if name == 'scheduled' else weighted_processes[name]
  _assert_ignores_empty_client(process, cohort)


def test_empty_part_of_a_split_changes_nothing():
  def split(examples):
    def where(keep):
      return quadratic.map_arrays(
          examples, lambda value: tf.boolean_mask(value, keep)
      )

    inner = where(examples['b'][:, 0] < 100)
    outer = where(examples['c'][:, 0] < 100)
    return inner, outer

  process = fednest_tff.build(
      quadratic.build_problem(split=split), 'lfednest',
      inner_learning_rate=0.3, outer_learning_rate=0.3, neumann_terms=1,
  )  # fmt: skip
  state = process.initialize()
  # Some examples serve one level only.
  clients = [client.copy() for client in CLIENTS]
  clients[2]['b'] = clients[2]['b'] + np.array([[200.0], [0.0], [0.0]])
  cohort = quadratic.to_datasets(clients)
  expected = process.next(state, cohort)
  for name in ('b', 'c'):
    # All of this client's are outer ones only, or inner ones only.
    incomplete = CLIENTS[1].copy()
    incomplete[name] = incomplete[name] + 200.0
    output = process.next(
        state, [*quadratic.to_datasets([incomplete]), *cohort]
    )
    _assert_same_variables(output.state, expected.state)
    assert output.metrics['outer_loss'] == expected.metrics['outer_loss']
    assert output.metrics['num_examples'] == 8
