"""Who counts how much: sub-cohorts by participation, metrics by weight."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from tests import quadratic

NUM_CLIENTS = 20


def _indicator_problem():
  """grad_y f_i is client i's own unit vector, so a mean tells who is in it."""
  return fednest_tff.bilevel(
      lambda x, y, batch: tf.reduce_mean(tf.linalg.matvec(batch, y)) + 0 * x,
      lambda x, y, batch: tf.reduce_sum(y**2) / 2 - x * tf.reduce_sum(y),
      lambda seed: tf.zeros([], tf.float64),
      lambda seed: tf.zeros([NUM_CLIENTS], tf.float64),
      tf.TensorSpec([NUM_CLIENTS], tf.float64),
      split='same',
  )


def test_participation_is_the_share_of_the_cohort_in_a_round():
  share = 0.2
  process = fednest_tff.build_fed_nest(
      _indicator_problem(),
      outer_learning_rate=0.1,
      inner_learning_rate=0.1,
      participation=share,
  )
  clients = [
      tf.data.Dataset.from_tensors(unit) for unit in np.eye(NUM_CLIENTS)
  ]
  state = process.initialize()
  counts = []
  for k in range(20):
    message = dict(
        outer=state.outer, inner=state.inner, seed=np.array([k, 0], np.int64)
    )
    mean = process.rounds['ihgp_gradient']((), message, clients).value
    members = mean > 1e-6
    np.testing.assert_allclose(mean[members], 1 / members.sum(), rtol=1e-9)
    counts.append(members.sum())
  # 400 draws of probability 0.2: four standard deviations are 0.08.
  assert abs(np.mean(counts) / NUM_CLIENTS - share) < 0.08
  assert len(set(counts)) > 1


def test_metrics_beside_a_factory_are_weighted():
  clients = quadratic.make_clients()
  process = fednest_tff.build_fed_out(
      quadratic.build_problem(),
      outer_learning_rate=0.1,
      ihgp='cg',
      client_weighting='num_examples',
      outer_aggregator=tff.aggregators.MeanFactory(),
      gradient_aggregator=tff.aggregators.MeanFactory(),
  )
  output = process.next(
      process.initialize(), quadratic.to_datasets(clients)
  )
  x, y = quadratic.init_outer(0), quadratic.init_inner(0)
  losses = [quadratic.outer_loss(x, y, client).numpy() for client in clients]
  weights = [len(client['b']) for client in clients]
  expected = np.average(losses, weights=weights)
  assert not np.isclose(expected, np.mean(losses), rtol=1e-3)
  np.testing.assert_allclose(
      output.metrics['outer_loss'], expected, rtol=1e-10
  )
