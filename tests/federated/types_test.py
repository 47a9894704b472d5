"""Who counts how much: sub-cohorts by participation, metrics by weight."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.federated import types as types_lib
from tests.helpers import mlp, quadratic
from tests.helpers.processes import build_flat

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
  process = fednest_tff.build(
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
  process = build_flat(
      fednest_tff.build_fed_out,
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


# ---- The types of a problem -------------------------------------------------


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
def test_types_are_those_of_the_problem(dtype):
  types = fednest_tff.ProblemTypes(quadratic.build_problem(dtype))
  number = dtype.as_numpy_dtype
  assert types.outer == tff.TensorType(number, [quadratic.DX])
  assert types.inner == tff.TensorType(number, [quadratic.DY])
  assert types.scalar == tff.TensorType(number)
  assert types.seed == tff.TensorType(np.int64, [2])
  assert types.dataset.element['A'] == tff.TensorType(number, [4, 4])
  # Of any number of examples; without a representation these are the features.
  assert types.client.inner['A'] == tff.TensorType(number, [None, 4, 4])
  assert types.features.outer['A'] == tff.TensorType(number, [None, 4, 4])
  assert types_lib.at_server(np.int32).placement is tff.SERVER
  assert types_lib.at_clients(np.int32).placement is tff.CLIENTS


def test_features_are_those_of_the_representation():
  types = fednest_tff.ProblemTypes(mlp.build_problem('bilevel', True))
  hidden = tff.TensorType(np.float64, [None, mlp.HIDDEN])
  assert types.features.inner['hidden'] == hidden
  assert 'image' in dict(tff.structure.iter_elements(types.client.inner))

  @tff.federated_computation(
      types_lib.at_server(types.outer), types_lib.at_clients(types.dataset)
  )
  def features(x, datasets):
    clients = tff.federated_map(types.read_client, datasets)
    return types.features_at_clients(tff.federated_broadcast(x), clients)

  x = {name: value.numpy() for name, value in mlp.body(3).items()}
  (found,) = features(x, [mlp.make_dataset(5)])
  images = np.stack([row['image'] for row in mlp.make_dataset(5)])
  # The first half is inner, the second outer, in a shuffled order.
  values = np.concatenate([found.inner['hidden'], found.outer['hidden']])
  expected = np.tanh(images @ x['w'] + x['b'])
  np.testing.assert_allclose(
      np.sort(values, axis=0), np.sort(expected, axis=0), rtol=1e-12
  )


@pytest.mark.parametrize(
    ['weighting', 'is_uniform', 'weights'],
    [
        ('uniform', True, [1, 1, 1]),
        (tff.learning.ClientWeighting.UNIFORM, True, [1, 1, 1]),
        ('num_examples', False, [1, 2, 3]),
        (tff.learning.ClientWeighting.NUM_EXAMPLES, False, [1, 2, 3]),
        (lambda examples: tf.size(examples['b']), False, [4, 8, 12]),
    ],
)
def test_weights_of_clients(weighting, is_uniform, weights):
  types = fednest_tff.ProblemTypes(quadratic.build_problem(), weighting)
  assert types.uniform == is_uniform
  datasets = quadratic.to_datasets(quadratic.make_clients(examples=(1, 2, 3)))
  clients = [types.read_client(dataset) for dataset in datasets]
  assert [client.weight for client in clients] == weights
  assert [client.num_examples for client in clients] == [1, 2, 3]


@pytest.mark.parametrize('bad', ['examples', None, 2.0])
def test_bad_weighting_is_named(bad):
  with pytest.raises(ValueError, match=f'`client_weighting` .*; got {bad!r}'):
    fednest_tff.ProblemTypes(quadratic.build_problem(), bad)


def test_something_that_is_no_problem():
  with pytest.raises(ValueError, match='`problem` must come from bilevel, .*4'):
    fednest_tff.ProblemTypes(4)
