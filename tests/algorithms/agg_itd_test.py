"""AggITD: NumPy, its mean over Q in closed form, and what it sends."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.local import sampling
from fednest_tff.local.sampling import Purpose
from tests.helpers import later_methods, quadratic, small_problems

CLIENTS = quadratic.make_clients(examples=(2, 3, 5), seed=3)
DATASETS = quadratic.to_datasets(CLIENTS)
T, L = 3, 4.0
FORM = quadratic.ClosedForm(CLIENTS, (2, 3, 5))


def count(examples):
  return tf.shape(examples['A'])[0]


# Samples of one in all sums of FedInn; in LFedInn's local steps only, so that
# its chain has a closed form.
SAMPLES = dict(
    fedinn=dict(batch_size=1, gradient_batch_size=1),
    lfedinn=dict(batch_size=2),
)
SPLITS = dict(fedinn=0.5, lfedinn='same')


@functools.cache
def problem(inner_method):
  return quadratic.build_problem(split=SPLITS[inner_method])


@functools.cache
def build(inner_method):
  """tau_i and the weights are the clients' numbers of examples."""
  return fednest_tff.build(
      problem(inner_method), 'aggitd', inner_method=inner_method,
      inner_rounds=T, inner_learning_rate=0.15, outer_learning_rate=0.1,
      inner_local_steps=count, outer_local_steps=count, smoothness=L,
      client_weighting='num_examples', **SAMPLES[inner_method],
  )


EPOCHS = range(2, 5)  # With all Q.


def stop(epoch):
  """Q of an epoch."""
  seed = sampling.fold_in(tf.constant([0, 0], tf.int64), epoch)
  seed = sampling.fold_in(seed, T)  # The outer call is the last of T + 1.
  return later_methods.stop(
      sampling.fold_in(seed, Purpose.NEUMANN_STOP), T
  )


@pytest.mark.parametrize('inner_method', ['fedinn', 'lfedinn'])
def test_epochs_equal_numpy(inner_method):
  """Minibatches, unequal tau_i and weights; all Q, the last one included."""
  process = build(inner_method)
  clients = later_methods.Clients(
      problem(inner_method), DATASETS, weighting=count
  )
  settings = later_methods.Settings(
      alpha=0.1, beta=0.15, inner_rounds=T, smoothness=L, tau=count,
      **SAMPLES[inner_method],
  )
  state = process.initialize()._replace(epoch=np.int32(EPOCHS[0]))
  x, y = state.outer, state.inner
  seen = set()
  for epoch in EPOCHS:
    seen.add(stop(epoch))
    state = process.next(state, DATASETS).state
    x, y = later_methods.agg_itd(clients, x, y, settings, epoch, inner_method)
    np.testing.assert_allclose(state.outer, x, rtol=1e-10)
    np.testing.assert_allclose(state.inner, y, rtol=1e-10)
  assert seen == set(range(T))


def test_mean_over_the_stop_with_y_frozen():
  """Closed form 6: mean of lambda T r = (I - (I - lambda H)^T) v*."""
  process = build('lfedinn')
  start = process.initialize()
  frozen = process.set_hparams(
      start,
      process.get_hparams(start)
      | dict(inner_learning_rate=np.float64(1e-300)),
  )
  x, y = start.outer, start.inner
  found = {}
  for epoch in EPOCHS:
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
