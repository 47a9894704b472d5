"""AggITD: NumPy, its mean over Q in closed form, and what it sends."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.local import sampling
from fednest_tff.local.sampling import Purpose
from tests.helpers import quadratic, reference, small_problems

CLIENTS = quadratic.make_clients(examples=(2, 3, 5), seed=3)
DATASETS = quadratic.to_datasets(CLIENTS)
T, L = 3, 4.0
SETTINGS = reference.Settings(
    alpha=0.1, beta=0.15, inner_rounds=T, inner_steps=2, outer_steps=2,
    neumann_terms=T, smoothness=L,
)
FORM = quadratic.ClosedForm(CLIENTS)


@functools.cache
def build(inner_method):
  return fednest_tff.build(
      quadratic.build_problem(), 'aggitd', inner_method=inner_method,
      inner_rounds=T, inner_learning_rate=0.15, outer_learning_rate=0.1,
      inner_local_steps=2, outer_local_steps=2, smoothness=L,
  )


def stop(epoch):
  """Q of an epoch."""
  seed = sampling.fold_in(tf.constant([0, 0], tf.int64), epoch)
  seed = sampling.fold_in(seed, T)  # The outer call is the last of T + 1.
  return int(
      tf.random.stateless_uniform(
          [], sampling.fold_in(seed, Purpose.NEUMANN_STOP), 0, T, tf.int32
      )
  )


def numpy_epoch(inner_method, x, y, Q):
  inner = reference.fed_inn if inner_method == 'fedinn' else reference.lfed_inn
  r = np.zeros_like(y)
  for t in range(T):
    if t == Q:
      r = FORM.gradient_in_inner(x, y)
    elif t > Q:
      r = r - FORM.A @ r / L
    y = inner(FORM, x, y, SETTINGS)
  h = FORM.direct_gradient(x, y) - FORM.mixed_product(T / L * r)
  ends = []
  for c in FORM.locals:
    x_i = x
    for _ in range(2):
      d = c.direct_gradient(x_i, y) - c.direct_gradient(x, y) + h
      x_i = x_i - 0.1 * d
    ends.append(x_i)
  return FORM.mean(ends), y


@pytest.mark.parametrize('inner_method', ['fedinn', 'lfedinn'])
def test_epochs_equal_numpy(inner_method):
  """As many epochs as it takes to see every Q, the last one included."""
  process = build(inner_method)
  state = process.initialize()
  x, y = state.outer, state.inner
  seen = set()
  for epoch in range(8):
    seen.add(stop(epoch))
    state = process.next(state, DATASETS).state
    x, y = numpy_epoch(inner_method, x, y, stop(epoch))
    np.testing.assert_allclose(state.outer, x, rtol=1e-10)
    np.testing.assert_allclose(state.inner, y, rtol=1e-10)
  assert seen == set(range(T))


def test_mean_over_the_stop_with_y_frozen():
  """Closed form 6: mean of lambda T r = (I - (I - lambda H)^T) v*."""
  process = build('fedinn')
  start = process.initialize()
  frozen = process.set_hparams(
      start,
      process.get_hparams(start)
      | dict(inner_learning_rate=np.float64(1e-300)),
  )
  x, y = start.outer, start.inner
  # h by the outer step, the first of two local steps being exact: with one
  # example per client the second is not, so h comes from a single client.
  found = {}
  for epoch in range(12):
    state = frozen._replace(epoch=np.int32(epoch))
    norm = process.next(state, DATASETS).metrics['hypergradient_norm']
    found[stop(epoch)] = norm
  assert set(found) == set(range(T))
  step = np.eye(quadratic.DY) - FORM.A / L
  b = FORM.gradient_in_inner(x, y)
  chains = [
      T / L * np.linalg.matrix_power(step, T - 1 - Q) @ b for Q in range(T)
  ]
  for Q, p in enumerate(chains):
    h = FORM.direct_gradient(x, y) - FORM.mixed_product(p)
    np.testing.assert_allclose(found[Q], np.linalg.norm(h), rtol=1e-10)
  exact = np.linalg.solve(FORM.A, b)
  mean = exact - np.linalg.matrix_power(step, T) @ exact
  np.testing.assert_allclose(np.mean(chains, 0), mean, rtol=1e-10)


@pytest.mark.parametrize(
    'inner_method, rounds', [('fedinn', 2 * T + 2), ('lfedinn', T + 2)]
)
def test_rounds(inner_method, rounds):
  cost = fednest_tff.communication_cost(build(inner_method))
  assert cost.rounds == rounds


def test_wrong_options_are_named():
  problem = small_problems.bilevel()
  rates = dict(inner_learning_rate=0.1, outer_learning_rate=0.1)
  with pytest.raises(ValueError, match='`inner_method` must be'):
    fednest_tff.build(problem, 'aggitd', **rates, inner_method='sgd')
  with pytest.raises(ValueError, match='`inner_rounds` must be'):
    fednest_tff.build(problem, 'aggitd', **rates, inner_rounds=0)
  with pytest.raises(ValueError, match='is minimax: AggITD is for'):
    fednest_tff.build(small_problems.minimax(), 'aggitd', **rates)
  with pytest.raises(ValueError, match='is single_level: AggITD is for'):
    fednest_tff.build(small_problems.single_level(), 'aggitd', **rates)
