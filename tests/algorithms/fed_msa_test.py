"""FedMSA: NumPy, its closed form, and FedGDA-GT."""

import numpy as np
import tensorflow as tf

import fednest_tff
from tests.algorithms import sim_fbo_test as sim
from tests.helpers import later_methods, processes, quadratic


def test_three_epochs_equal_numpy():
  """Minibatches, unequal tau_i and weights."""
  process = fednest_tff.build(
      quadratic.build_problem(), 'fedmsa', **sim.RATES,
      local_steps=sim.unequal, batch_size=2, client_weighting='num_examples',
  )
  state, _ = processes.run(process, sim.DATASETS, 3)
  clients = later_methods.Clients(
      quadratic.build_problem(),
      sim.DATASETS,
      fednest_tff.SimultaneousWork(local_steps=sim.unequal, batch_size=2),
      lambda examples: tf.shape(examples['A'])[0],
  )
  expected = later_methods.fed_msa(clients, sim.start(), sim.ETA, 3)
  sim.assert_close(state, expected)


def test_closed_form_of_an_epoch():
  """Closed form 5: z* is a fixed point, whatever tau and the clients."""
  tau = 3
  process = fednest_tff.build(
      quadratic.build_problem(), 'fedmsa', **sim.RATES, local_steps=tau
  )
  state, _ = processes.run(process, sim.DATASETS, 2)
  D, K, eye = sim.diagonal(sim.ETA), sim.LINEAR.K, np.eye(11)
  matrix = np.mean([
      eye - sum(
          np.linalg.matrix_power(eye - D @ K_i, j) for j in range(tau)
      ) @ D @ K
      for K_i in sim.LINEAR.matrices
  ], 0)
  error = sim.joined_start() - sim.LINEAR.solution
  expected = sim.LINEAR.solution + matrix @ matrix @ error
  np.testing.assert_allclose(sim.joined(state), expected, rtol=1e-10)
  assert sim.moved_from(process, sim.LINEAR.solution) < 1e-12


def test_minimax_is_fed_gda_gt():
  """Corrected descent in x and ascent in y."""
  clients = sim.minimax_clients()
  process = fednest_tff.build(
      sim.minimax_problem(), 'fedmsa', outer_learning_rate=0.1,
      inner_learning_rate=0.2, local_steps=3,
  )
  state, _ = processes.run(process, quadratic.to_datasets(clients), 2)
  forms = [(c['B'].mean(0), c['b'].mean(0)) for c in clients]

  def directions(form, x, y):
    B, b = form
    return B @ y + x, B.T @ x + b - 2 * y

  x, y = sim.START
  for _ in range(2):
    means = np.mean([directions(f, x, y)[0] for f in forms], 0), np.mean(
        [directions(f, x, y)[1] for f in forms], 0
    )
    ends = []
    for form in forms:
      x_i, y_i = x, y
      for _ in range(3):
        here, there = directions(form, x_i, y_i), directions(form, x, y)
        x_i = x_i - 0.1 * (here[0] - there[0] + means[0])
        y_i = y_i + 0.2 * (here[1] - there[1] + means[1])
      ends.append((x_i, y_i))
    x, y = (np.mean([end[k] for end in ends], 0) for k in range(2))
  np.testing.assert_allclose(state.outer, x, rtol=1e-10)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)
