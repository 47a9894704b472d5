"""LFedNest-NonAlt and FedAvg-S against NumPy."""

import numpy as np
import pytest

import fednest_tff
from fednest_tff import options
from tests.helpers import processes, quadratic, reference

METHODS = 'lfednest_nonalt', 'fedavg_s'
CLIENTS = quadratic.make_clients()
COHORT = quadratic.to_datasets(CLIENTS)
FORM = quadratic.ClosedForm(CLIENTS)
X = quadratic.init_outer(0).numpy()
Y = quadratic.init_inner(0).numpy()


@pytest.mark.parametrize('method', METHODS)
def test_three_epochs_equal_numpy(method):
  """Every term of every method, to the last digits of float64."""
  process = processes.quadratic_process(method)
  state, _ = processes.run(process, COHORT, 3)
  x, y = reference.run(method, FORM, X, Y, processes.SETTINGS, 3)
  np.testing.assert_allclose(state.outer, x, rtol=1e-10)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)


@pytest.mark.parametrize('method', METHODS)
def test_losses_are_those_before_the_steps(method):
  _, metrics = processes.run(processes.quadratic_process(method), COHORT, 1)
  for name in ('inner_loss', 'outer_loss'):
    loss = getattr(quadratic, name)
    losses = [loss(X, Y, client).numpy() for client in CLIENTS]
    np.testing.assert_allclose(metrics[name], np.mean(losses), rtol=1e-10)


def test_flat_options_are_those_of_the_groups():
  flat = dict(
      inner_learning_rate=0.1, inner_local_steps=3, outer_learning_rate=0.2,
      ihgp='cg', neumann_terms=6, divide_by_local_steps=True,
  )  # fmt: skip
  groups = dict(
      inner=fednest_tff.LocalWork(0.1, steps=3, divide_by_steps=True),
      outer=fednest_tff.LocalWork(0.2, divide_by_steps=True),
      solver=fednest_tff.InverseHessian('cg', terms=6),
  )
  for builder in (
      fednest_tff.build_fed_avg_s, fednest_tff.build_lfed_nest_nonalt
  ):
    assert options.arguments_of(builder, 'its name', flat) == groups


def test_single_level_problem_is_local_sgd():
  """Without an inner variable both methods are FedAvg on f."""
  y = np.zeros(quadratic.DY)
  problem = fednest_tff.single_level(
      lambda x, batch: quadratic.outer_loss(x, y, batch),
      quadratic.init_outer,
      quadratic.element_spec(),
  )
  ends = []
  for form in FORM.locals:
    x_i = X
    for _ in range(3):
      x_i = x_i - 0.2 * form.direct_gradient(x_i, y)
    ends.append(x_i)
  for method in METHODS:
    process = fednest_tff.build(
        problem, method, outer_learning_rate=0.2, outer_local_steps=3
    )
    state, metrics = processes.run(process, COHORT, 1)
    np.testing.assert_allclose(state.outer, np.mean(ends, 0), rtol=1e-10)
    assert state.inner == ()
    assert 'inner_loss' not in metrics
