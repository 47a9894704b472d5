"""Constrained problems: x >= 0 and y on the simplex, against NumPy."""

import dataclasses
import functools

import numpy as np
import pytest

import fednest_tff
from tests.helpers import processes, reference, saddle

CASE = saddle.Saddle(seed=53, spread=1.5)
START = np.ones(saddle.DIM), np.full(saddle.DIM, 1 / saddle.DIM)


def _on_simplex(v):
  """max(v - theta, 0) with theta by bisection, so that its sum is 1."""
  low, high = v.min() - 1, v.max()
  for _ in range(100):
    middle = (low + high) / 2
    if np.maximum(v - middle, 0).sum() > 1:
      low = middle
    else:
      high = middle
  return np.maximum(v - (low + high) / 2, 0)


SETTINGS = reference.Settings(
    alpha=0.2, beta=0.3, inner_rounds=2, inner_steps=3, outer_steps=2,
    neumann_terms=1, smoothness=1.0, implicit=False,
    project_outer=lambda x: np.maximum(x, 0),
    project_inner=_on_simplex,
)


@functools.cache
def _process(method):
  problem = CASE.problem(
      init_inner=1 / saddle.DIM,
      project_outer=fednest_tff.projections.non_negative(),
      project_inner=fednest_tff.projections.simplex(),
  )
  return processes.build(problem, method, SETTINGS)


@pytest.mark.parametrize('method', reference.METHODS)
def test_every_method_projects_each_step_in_both_executors(method):
  process = _process(method)
  driver = fednest_tff.build_driver(process)
  x, y = reference.run(method, CASE.form, *START, SETTINGS, 4)
  for executor in (process, driver):
    state, _ = processes.run(executor, CASE.datasets, 4)
    np.testing.assert_allclose(state.outer, x, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state.inner, y, rtol=1e-10, atol=1e-12)
  # The projections matter, of either variable.
  for level, start in (('outer', x), ('inner', y)):
    free = dataclasses.replace(SETTINGS, **{f'project_{level}': lambda v: v})
    other = reference.run(method, CASE.form, *START, free, 4)
    value = other[0] if level == 'outer' else other[1]
    assert np.linalg.norm(value - start) > 1e-3


def _run_to_the_end(method, epochs):
  """The last state and metrics, with steps with which few epochs do."""
  process = _process(method)
  start = processes.start_with(
      process, outer_learning_rate=0.3, inner_learning_rate=0.2
  )
  return processes.run(process, CASE.datasets, epochs, start)


def test_fednest_finds_the_constrained_saddle_point():
  x, y = CASE.constrained_solution()
  # Some constraints hold back either variable, others do not.
  assert 0 < np.sum(x > 0) < saddle.DIM
  assert 1 < np.sum(y > 0) < saddle.DIM
  assert np.linalg.norm(x - CASE.x) > 0.05
  state, metrics = _run_to_the_end('fednest', 15)
  np.testing.assert_allclose(state.outer, x, atol=1e-6)
  np.testing.assert_allclose(state.inner, y, atol=1e-6)
  # Nothing moves any more, at the clients either.
  assert metrics['inner_update_norm'] < 1e-6
  assert metrics['outer_update_norm'] < 1e-6
  assert metrics['client_drift'] < 1e-6
  assert metrics['outer_drift'] < 1e-6


def test_local_steps_alone_stop_elsewhere():
  """As without constraints: local SGD is biased when clients differ."""
  x, _ = CASE.constrained_solution()
  state, metrics = _run_to_the_end('fedavg_s', 40)
  assert metrics['outer_update_norm'] < 1e-6
  assert np.all(state.outer >= 0)
  assert np.all(state.inner >= 0)
  np.testing.assert_allclose(np.sum(state.inner), 1, rtol=1e-12)
  assert np.linalg.norm(state.outer - x) > 1e-2


def test_the_server_of_fed_mbo_projects_y():
  """Its clients send gradients, and the server takes one step."""
  problem = CASE.problem(
      init_inner=1 / saddle.DIM,
      project_inner=fednest_tff.projections.simplex(),
  )
  process = fednest_tff.build(
      problem, 'fedmbo', inner_learning_rate=0.3, outer_learning_rate=0.2
  )
  state, _ = processes.run(process, CASE.datasets, 1)
  x, y = START
  step = y - 0.3 * (CASE.form.A @ y - CASE.form.B @ x - CASE.form.b)
  assert abs(step.sum() - 1) > 0.1
  np.testing.assert_allclose(state.inner, _on_simplex(step), rtol=1e-10)
