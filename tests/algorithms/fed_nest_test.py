"""FedNest and its family against NumPy, closed forms and each other."""

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff import options
from tests.helpers import quadratic, reference
from tests.helpers.processes import SETTINGS, quadratic_process, run

ALTERNATING = 'fednest', 'lfednest', 'fednest_sgd', 'lfednest_svrg'
CLIENTS = quadratic.make_clients()
COHORT = quadratic.to_datasets(CLIENTS)


@pytest.mark.parametrize('method', ALTERNATING)
def test_three_epochs_equal_numpy(method):
  """Every term of every method, to the last digits of float64."""
  process = quadratic_process(method)
  state, _ = run(process, COHORT, 3)
  x, y = reference.run(
      method,
      quadratic.ClosedForm(CLIENTS),
      quadratic.init_outer(0).numpy(),
      quadratic.init_inner(0).numpy(),
      SETTINGS,
      3,
  )
  np.testing.assert_allclose(state.outer, x, rtol=1e-10)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)


def test_float32_epoch_equals_numpy():
  clients = quadratic.make_clients(dtype=np.float32)
  process = quadratic_process('fednest', dtype=tf.float32)
  state, _ = run(process, quadratic.to_datasets(clients), 1)
  x, y = reference.run(
      'fednest',
      quadratic.ClosedForm(clients),
      quadratic.init_outer(0, tf.float32).numpy(),
      quadratic.init_inner(0, tf.float32).numpy(),
      SETTINGS,
      1,
  )
  assert state.outer.dtype == np.float32
  np.testing.assert_allclose(state.outer, x, rtol=1e-5)
  np.testing.assert_allclose(state.inner, y, rtol=1e-5)


# Exact hypergradients (conjugate gradient in as many steps as dimensions) and
# many local inner steps, so that what is left is each method's own bias.
THOROUGH = reference.Settings(
    alpha=0.3,
    beta=0.3,
    inner_rounds=1,
    inner_steps=10,
    outer_steps=1,
    neumann_terms=quadratic.DY + 1,
    smoothness=SETTINGS.smoothness,
)


def _build_thorough(method):
  return quadratic_process(method, THOROUGH, ihgp='cg')


def test_fednest_alone_reaches_the_solution_when_clients_differ():
  """The paper's point: local Hessians and local SGD inside stop elsewhere."""
  clients = quadratic.make_clients(examples=(2,), seed=2)
  solution, _ = quadratic.ClosedForm(clients).solution()
  datasets = quadratic.to_datasets(clients)
  distances = {}
  for method in ('fednest', 'lfednest', 'fednest_sgd'):
    state, metrics = run(_build_thorough(method), datasets, 36)
    distances[method] = np.linalg.norm(state.outer - solution)
    # They stand still, wherever they are.
    assert metrics['outer_update_norm'] < 1e-6, method
  assert distances['fednest'] < 1e-6
  assert distances['fednest_sgd'] > 1e-3
  assert distances['lfednest'] > 1e-2


def test_all_methods_agree_when_clients_do_not_differ():
  clients = quadratic.make_clients(examples=(2,), heterogeneity=0.0, seed=1)
  datasets = quadratic.to_datasets(clients)
  alternating = [*ALTERNATING, 'lfednest_nonalt']
  states = {
      method: run(_build_thorough(method), datasets, 2)[0]
      for method in alternating
  }
  for method in alternating:
    np.testing.assert_allclose(
        states[method].outer, states['fednest'].outer, rtol=1e-9
    )
    np.testing.assert_allclose(
        states[method].inner, states['fednest'].inner, rtol=1e-9
    )
  # FedAvg-S takes another way, to the same place.
  solution, _ = quadratic.ClosedForm(clients).solution()
  state, _ = run(_build_thorough('fedavg_s'), datasets, 25)
  np.testing.assert_allclose(state.outer, solution, rtol=1e-8)


def test_single_client_is_the_centralised_algorithm():
  """With one client there is nothing to drift from: descent on f and g."""
  clients = quadratic.make_clients(num_clients=1, examples=(4,))
  form = quadratic.local_form(clients[0])
  x, y = quadratic.init_outer(0).numpy(), quadratic.init_inner(0).numpy()
  for _ in range(2):
    for _ in range(SETTINGS.inner_rounds * SETTINGS.inner_steps):
      y = y - SETTINGS.beta * form.inner_gradient(x, y)
    p = reference.neumann(
        form.A,
        form.gradient_in_inner(x, y),
        SETTINGS.smoothness,
        SETTINGS.neumann_terms,
    )
    indirect = -form.mixed_product(p)
    for _ in range(SETTINGS.outer_steps):
      x = x - SETTINGS.alpha * (form.direct_gradient(x, y) + indirect)
  for method in ('fednest', 'fednest_sgd'):
    process = quadratic_process(method)
    state, metrics = run(process, quadratic.to_datasets(clients), 2)
    np.testing.assert_allclose(state.outer, x, rtol=1e-10)
    np.testing.assert_allclose(state.inner, y, rtol=1e-10)
    assert metrics['client_drift'] < 1e-6


def test_default_smoothness_is_one_over_the_inner_step():
  process = fednest_tff.build(
      quadratic.build_problem(),
      outer_learning_rate=0.1,
      inner_learning_rate=lambda epoch: 0.25 / (1.0 + tf.cast(epoch, 'float')),
  )
  state = process.initialize()
  numbers, *_ = process.plan(state.seed, state.epoch, state.hparams)
  assert numbers['smoothness'] == 4.0


def test_flat_options_are_those_of_the_groups():
  flat = dict(
      inner_learning_rate=0.1, inner_local_steps=3, outer_learning_rate=0.2,
      outer_local_epochs=2, batch_size=5, inner_rounds=4, ihgp='truncated',
      neumann_terms=6, smoothness=7.0, participation=0.5,
      gradient_batch_size=8, seed=9,
  )  # fmt: skip
  assert options.arguments_of(
      fednest_tff.build_fed_nest, 'fednest', flat
  ) == dict(
      inner=fednest_tff.LocalWork(0.1, steps=3, batch_size=5),
      outer=fednest_tff.LocalWork(0.2, epochs=2, batch_size=5),
      inner_rounds=4,
      solver=fednest_tff.FederatedInverseHessian(
          'truncated', terms=6, smoothness=7.0, participation=0.5
      ),
      gradients=fednest_tff.GlobalGradients(batch_size=8),
      seed=9,
  )


def test_metrics_of_an_epoch_are_what_they_say():
  s = SETTINGS
  process = quadratic_process('fednest')
  _, metrics = run(process, COHORT, 1)
  form = quadratic.ClosedForm(CLIENTS)
  x, y = quadratic.init_outer(0).numpy(), quadratic.init_inner(0).numpy()
  y_1 = reference.fed_inn(form, x, y, s)  # where the last inner call begins
  q = form.inner_gradient(x, y_1)
  ends = []
  for c in form.locals:
    y_i = y_1
    for _ in range(s.inner_steps):
      y_i = y_i - s.beta * (
          c.inner_gradient(x, y_i) - c.inner_gradient(x, y_1) + q
      )
    ends.append(y_i)
  y_2 = form.mean(ends)
  drift = np.sqrt(np.mean([np.sum((y_i - y_2) ** 2) for y_i in ends]))
  h = reference.hypergradient(form, x, y_2, s)

  def loss(function, y):
    return np.mean([function(x, y, client).numpy() for client in CLIENTS])

  expected = dict(
      inner_loss=loss(quadratic.inner_loss, y_1),
      inner_gradient_norm=np.linalg.norm(q),
      client_drift=drift,
      inner_update_norm=np.linalg.norm(y_2 - y_1),
      outer_loss=loss(quadratic.outer_loss, y_2),
      hypergradient_norm=np.linalg.norm(h),
      num_clients=len(CLIENTS),
      num_examples=sum(len(client['b']) for client in CLIENTS),
  )
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-9, err_msg=name)
  assert metrics['outer_drift'] > 0 and metrics['outer_update_norm'] > 0
