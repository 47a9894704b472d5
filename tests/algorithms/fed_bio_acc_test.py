"""FedBiOAcc: NumPy, and its momentum in closed form."""

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from tests.algorithms import sim_fbo_test as sim
from tests.helpers import later_methods, processes, quadratic


def momentum(state):
  x, y, v = state.method.more.value
  return np.concatenate([y, v, x])


def test_three_epochs_equal_numpy():
  """Minibatches, unequal tau_i and weights; the first epoch starts m."""
  process = fednest_tff.build(
      quadratic.build_problem(), 'fedbioacc', **sim.RATES,
      local_steps=sim.unequal, batch_size=2, client_weighting='num_examples',
      step_scale=0.9, step_offset=2.0, momentum_rate=0.7,
  )
  state, _ = processes.run(process, sim.DATASETS, 3)
  clients = later_methods.Clients(
      quadratic.build_problem(),
      sim.DATASETS,
      fednest_tff.SimultaneousWork(local_steps=sim.unequal, batch_size=2),
      lambda examples: tf.shape(examples['A'])[0],
  )
  expected = later_methods.fed_bio_acc(
      clients, sim.start(), sim.ETA, 3, 0.9, 2.0, 0.7
  )
  sim.assert_close(state, expected[:3])
  for part, value in zip(state.method.more.value, expected[3:], strict=True):
    np.testing.assert_allclose(part, value, rtol=1e-10)


def test_momentum_in_closed_form():
  """Closed form 8: m_k = G_i(z_k) + (1 - a)^k (m - G_i(z_0)), full batches."""
  tau = 4
  process = fednest_tff.build(
      quadratic.build_problem(), 'fedbioacc', **sim.RATES, local_steps=tau,
      step_scale=0.8, momentum_rate=0.5,
  )
  (dataset,) = quadratic.to_datasets(sim.CLIENTS[:1])
  K, k = sim.LINEAR.matrices[0], sim.LINEAR.vectors[0]
  state, _ = processes.run(process, [dataset], 1)
  # With one client and full batches m is G(z) by now; another m is needed to
  # see how it fades.
  more = state.method.more
  other = tf.nest.map_structure(lambda part: part + 1.0, more.value)
  state = state._replace(
      method=state.method._replace(more=more._replace(value=other))
  )
  z, m = sim.joined(state), momentum(state)
  after = process.next(state, [dataset]).state
  # alpha at epoch 1, where u_0 = 1.
  a = 0.5 * (0.8 / 2 ** (1 / 3)) ** 2
  expected = K @ sim.joined(after) - k + (1 - a) ** tau * (m - (K @ z - k))
  np.testing.assert_allclose(momentum(after), expected, rtol=1e-10)


def test_momentum_is_never_subtracted():
  """With c alpha^2 > 1 the momentum is the new direction alone."""
  process = fednest_tff.build(
      quadratic.build_problem(), 'fedbioacc', **sim.RATES, momentum_rate=100.0
  )
  (dataset,) = quadratic.to_datasets(sim.CLIENTS[:1])
  state, _ = processes.run(process, [dataset], 2)
  K, k = sim.LINEAR.matrices[0], sim.LINEAR.vectors[0]
  np.testing.assert_allclose(
      momentum(state), K @ sim.joined(state) - k, rtol=1e-10
  )


def test_wrong_numbers_are_named():
  for name in ('step_scale', 'step_offset', 'momentum_rate'):
    with pytest.raises(ValueError, match=f'`{name}` must be positive'):
      fednest_tff.build(
          quadratic.build_problem(), 'fedbioacc', **sim.RATES, **{name: 0.0}
      )
