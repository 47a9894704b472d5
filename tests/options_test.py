"""The options of the builders against NumPy: weights, tau_i, steps, cohorts.

The expected numbers are loops over `quadratic.LocalForm`, which knows nothing
of the library. Random draws are checked by enumeration: the result must be that
of exactly one of all possible draws.
"""

import collections
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from tests import quadratic

EXACT = dict(rtol=1e-10, atol=1e-10)
EXAMPLES = (1, 2, 3)
CLIENTS = quadratic.make_clients(examples=EXAMPLES)
SMOOTHNESS = 3.0


def num_examples(examples):
  return tf.shape(examples['b'])[0]


def _map(client, function):
  return collections.OrderedDict((k, function(v)) for k, v in client.items())


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
      fed_inn=fednest_tff.build_fed_inn(
          problem, inner_learning_rate=0.2, inner_local_steps=2, **options
      ),
      fed_out=fednest_tff.build_fed_out(
          problem, outer_learning_rate=0.3, outer_local_steps=3, ihgp='cg',
          neumann_terms=quadratic.DY + 1, participation=1.0, **options,
      ),  # fmt: skip
      lfednest=fednest_tff.build_fed_nest(
          problem, 'lfednest', inner_learning_rate=0.2, inner_local_steps=2,
          outer_learning_rate=0.3, smoothness=2.5, neumann_terms=1, **by_enum,
      ),  # fmt: skip
      fedavg_s=fednest_tff.build_fed_nest(
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
    process, weights = fednest_tff.build_fed_inn(
        problem, inner_learning_rate=0.2, inner_local_steps=2,
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


# ---- Local work -------------------------------------------------------------


def test_epochs_give_each_client_its_own_number_of_steps(problem):
  # A client's examples are copies of one, so that all its minibatches agree:
  # tau_i = 2 ceil(n_i / 2) is 2, 2 and 6 for n_i = 1, 2 and 5.
  clients = [
      _map(client, lambda value, n=n: np.repeat(value, n, axis=0))
      for client, n in zip(
          quadratic.make_clients(examples=(1,)), (1, 2, 5), strict=True
      )
  ]
  process = fednest_tff.build_fed_inn(
      problem, inner_learning_rate=0.2, inner_local_epochs=2, batch_size=2
  )
  state = process.initialize()

  output = process.next(state, quadratic.to_datasets(clients))

  form = quadratic.ClosedForm(clients)
  expected = fed_inn(form, state.outer, state.inner, (2, 2, 6), [0.2] * 3)
  np.testing.assert_allclose(output.state.inner, expected, **EXACT)


# ---- Step sizes -------------------------------------------------------------

RATES = np.array([(0.4, 0.2), (0.1, 0.5), (0.3, 0.1)])  # (beta, alpha)


@pytest.fixture(scope='module')
def scheduled(problem):
  return fednest_tff.build_fed_nest(
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


def test_each_epoch_and_each_client_has_its_own_steps(scheduled, cohort):
  form = quadratic.ClosedForm(CLIENTS, EXAMPLES)
  state = scheduled.initialize()
  x, y = state.outer, state.inner
  # The default l is 1 / beta at epoch 0, and stays.
  smoothness = 1 / 0.4
  np.testing.assert_allclose(state.smoothness, smoothness, **EXACT)

  for epoch, (beta, alpha) in enumerate(RATES):
    assert state.epoch == epoch
    state = scheduled.next(state, cohort).state

    for _ in range(2):  # T
      y = fed_inn(form, x, y, (2, 3, 4), (beta / 2, beta / 3, beta / 4))
    h = first_term(form, smoothness, x, y)
    x = fed_out(form, x, y, h, (1, 2, 3), (alpha, alpha / 2, alpha / 3))
    np.testing.assert_allclose(state.inner, y, **EXACT)
    np.testing.assert_allclose(state.outer, x, **EXACT)
    np.testing.assert_allclose(state.smoothness, smoothness, **EXACT)


# ---- Server optimizer -------------------------------------------------------

STEP = 0.4  # alpha


@pytest.fixture(scope='module')
def run_single_level():
  """Runs a method with an optimizer; one step is the same in all methods.

  In float32: TFF's momentum is of that type alone.
  """
  y = np.zeros(quadratic.DY, np.float32)
  problem = fednest_tff.single_level(
      lambda x, batch: quadratic.outer_loss(x, y, batch),
      lambda seed: quadratic.init_outer(seed, tf.float32),
      quadratic.element_spec(tf.float32),
  )
  cohort = quadratic.to_datasets(
      quadratic.make_clients(examples=EXAMPLES, dtype=np.float32)
  )

  def run(optimizer, method='fednest'):
    process = fednest_tff.build_fed_nest(
        problem, method, outer_learning_rate=STEP, outer_optimizer=optimizer
    )
    states = [process.initialize()]
    for _ in range(3):
      states.append(process.next(states[-1], cohort).state)
    return states

  return run


@pytest.fixture(scope='module')
def without_optimizer(run_single_level):
  return run_single_level(None)


def _gradient(x):
  form = quadratic.ClosedForm(CLIENTS)
  return form.direct_gradient(x, np.zeros(quadratic.DY))


def test_default_takes_the_mean(without_optimizer):
  x = without_optimizer[0].outer
  for state in without_optimizer[1:]:
    x = x - STEP * _gradient(x)
    np.testing.assert_allclose(state.outer, x, rtol=1e-5)
  assert without_optimizer[-1].optimizer == ()


def test_sgd_with_step_one_is_the_default(run_single_level, without_optimizer):
  states = run_single_level(tff.learning.optimizers.build_sgdm(1.0))
  for state, expected in zip(states, without_optimizer, strict=True):
    np.testing.assert_array_equal(state.outer, expected.outer)


@pytest.mark.parametrize('method', ['fednest', 'lfednest', 'fedavg_s'])
def test_momentum_is_carried_from_epoch_to_epoch(run_single_level, method):
  optimizer = tff.learning.optimizers.build_sgdm(0.5, momentum=0.75)
  states = run_single_level(optimizer, method)
  x, velocity = states[0].outer, 0.0
  for state in states[1:]:
    # Minus the mean change is the optimizer's gradient.
    velocity = 0.75 * velocity + STEP * _gradient(x)
    x = x - 0.5 * velocity
    np.testing.assert_allclose(state.outer, x, rtol=1e-5)


def test_adam_keeps_its_state(run_single_level, without_optimizer):
  states = run_single_level(tff.learning.optimizers.build_adam(0.05))
  change = states[1].outer - without_optimizer[1].outer
  assert np.linalg.norm(change) > 1e-3
  # Its first step is its step size, whatever the size of the gradient.
  np.testing.assert_allclose(
      states[1].outer - states[0].outer,
      -0.05 * np.sign(_gradient(states[0].outer)),
      rtol=1e-3,
  )
  flat = [tf.nest.flatten(state.optimizer) for state in states]
  for before, after in itertools.pairwise(flat):
    assert any(np.any(a != b) for a, b in zip(before, after, strict=True))
  assert [state.optimizer['step'] for state in states] == [0, 1, 2, 3]


# ---- Sub-cohorts of FedIHGP: S_0 for b and S_1 for H v, with N = 2 ----------


def _subsets():
  every = range(len(CLIENTS))
  return [
      subset
      for size in range(1, len(CLIENTS) + 1)
      for subset in itertools.combinations(every, size)
  ]


def _build_sampling(problem, **options):
  """FedOut whose rounds, apart from the last, are b, one H v and h."""
  return fednest_tff.build_fed_out(
      problem, outer_learning_rate=1.0, ihgp='truncated', neumann_terms=2,
      smoothness=SMOOTHNESS, **options,
  )  # fmt: skip


@pytest.fixture(scope='module')
def sub_sampled(problem):
  return _build_sampling(problem, participation=0.25)


@functools.cache
def _mean(subset):
  return quadratic.ClosedForm([CLIENTS[i] for i in subset])


def _change(first, second, x, y):
  """x+ - x when S_0 and S_1 are those clients."""
  everyone = _mean(tuple(range(len(CLIENTS))))
  term = _mean(first).gradient_in_inner(x, y) / SMOOTHNESS
  p = term + (term - _mean(second).A @ term / SMOOTHNESS)
  return everyone.mixed_product(p) - everyone.direct_gradient(x, y)


def _drawn(state, output):
  """The one pair (S_0, S_1) that explains the step."""
  x, y = state.outer, state.inner
  matches = [
      pair
      for pair in itertools.product(_subsets(), repeat=2)
      if np.allclose(output.state.outer - x, _change(*pair, x, y), **EXACT)
  ]
  assert len(matches) == 1
  return matches[0]


def test_each_round_draws_its_own_sub_cohort(sub_sampled, cohort):
  state, pairs = sub_sampled.initialize(), []
  for _ in range(40):
    output = sub_sampled.next(state, cohort)
    pairs.append(_drawn(state, output))
    state = output.state._replace(outer=state.outer)
  everyone = tuple(range(len(CLIENTS)))
  assert any(first != second for first, second in pairs)
  assert len(set(pairs)) > 4
  for client in everyone:
    assert any(client in first for first, _ in pairs)
    assert any(client not in first for first, _ in pairs)
    assert any(client not in second for _, second in pairs)
  # Of three clients, 27/64 of the draws have one, 9/64 two, 1/64 all and 27/64
  # none: that means everyone.
  sizes = collections.Counter(
      len(subset) for pair in pairs for subset in pair
  )
  draws = 2 * len(pairs)
  for size, share in ((1, 27 / 64), (2, 9 / 64), (3, 28 / 64)):
    deviation = np.sqrt(draws * share * (1 - share))
    assert abs(sizes[size] - draws * share) < 2.5 * deviation


def test_sub_cohorts_are_reproducible(sub_sampled, cohort):
  state = sub_sampled.initialize()
  np.testing.assert_array_equal(
      sub_sampled.next(state, cohort).state.outer,
      sub_sampled.next(state, cohort).state.outer,
  )


def test_single_client_is_never_left_out(sub_sampled, cohort):
  form = quadratic.ClosedForm(CLIENTS[2:])
  state = sub_sampled.initialize()
  for _ in range(6):  # It is drawn with probability 1/4.
    x, y = state.outer, state.inner
    term = form.gradient_in_inner(x, y) / SMOOTHNESS
    p = 2 * term - form.A @ term / SMOOTHNESS
    h = form.direct_gradient(x, y) - form.mixed_product(p)
    state = sub_sampled.next(state, cohort[2:]).state
    np.testing.assert_allclose(state.outer, x - h, **EXACT)


# ---- Samples outside the local loops ----------------------------------------


def _one_example_each():
  """All ways to take one example of each client, as means over clients."""
  choices = itertools.product(*(range(n) for n in EXAMPLES))
  return {
      choice: quadratic.ClosedForm([
          _map(client, lambda value, k=k: value[k : k + 1])
          for client, k in zip(CLIENTS, choice, strict=True)
      ])
      for choice in choices
  }


def test_fed_inn_samples_the_anchor_gradient(problem, cohort):
  process = fednest_tff.build_fed_inn(
      problem, inner_learning_rate=0.3, gradient_batch_size=1
  )
  forms, drawn = _one_example_each(), []
  state = process.initialize()
  for _ in range(6):
    output = process.next(state, cohort)
    again = process.next(state, cohort)
    np.testing.assert_array_equal(output.state.inner, again.state.inner)
    x, y = state.outer, state.inner
    matches = [
        choice
        for choice, form in forms.items()
        if np.allclose(
            output.state.inner, y - 0.3 * form.inner_gradient(x, y), **EXACT
        )
    ]
    assert len(matches) == 1
    drawn += matches
    state = output.state
  assert len(set(drawn)) > 1


def test_fed_out_samples_each_of_its_rounds_anew(problem, cohort):
  process = _build_sampling(problem, gradient_batch_size=1)
  forms, drawn = _one_example_each(), []
  state = process.initialize()
  for _ in range(6):
    output = process.next(state, cohort)
    x, y = state.outer, state.inner
    change = output.state.outer - x
    matches = []
    for b, hessian in itertools.product(forms, repeat=2):
      term = forms[b].gradient_in_inner(x, y) / SMOOTHNESS
      p = 2 * term - forms[hessian].A @ term / SMOOTHNESS
      for direct, mixed in itertools.product(forms, repeat=2):
        h = forms[direct].direct_gradient(x, y)
        h = h - forms[mixed].mixed_product(p)
        if np.max(np.abs(change + h)) < 1e-10:
          matches.append((b, hessian, direct, mixed))
    assert len(matches) == 1
    drawn += matches
    state = output.state._replace(outer=x)
  # All four samples, and all epochs, are drawn apart.
  assert len(set(drawn)) > 4
  for one, other in itertools.combinations(range(4), 2):
    assert any(samples[one] != samples[other] for samples in drawn)


# ---- Clients without examples -----------------------------------------------


def _without_examples():
  return quadratic.to_datasets([_map(CLIENTS[0], lambda value: value[:0])])


def _assert_same_variables(state, expected):
  np.testing.assert_array_equal(state.outer, expected.outer)
  np.testing.assert_array_equal(state.inner, expected.inner)


def _assert_ignores_empty_client(process, cohort):
  state = process.initialize()
  expected = process.next(state, cohort)
  output = process.next(state, [*cohort[:1], *_without_examples(), *cohort[1:]])
  _assert_same_variables(output.state, expected.state)
  counts = dict(num_clients=4, num_examples=6)
  for name, value in expected.metrics.items():
    assert output.metrics[name] == counts.get(name, value), name


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
      return _map(examples, lambda value: tf.boolean_mask(value, keep))

    inner = where(examples['b'][:, 0] < 100)
    outer = where(examples['c'][:, 0] < 100)
    return inner, outer

  process = fednest_tff.build_fed_nest(
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
