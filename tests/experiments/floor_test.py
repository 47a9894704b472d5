"""The benchmark's program by hand against the library."""

import numpy as np
import pytest
import tensorflow as tf

from experiments import floor, learning_problems
import fednest_tff
from fednest_tff.local import client as client_lib
from fednest_tff.local import sampling

SIZES = (8, 6, 5, 4)
# Of 18 examples 9 are inner: minibatches of 4, 4 and 1.
CLIENTS, EXAMPLES = 3, 18
SETTINGS = floor.Settings(
    learning_rate=0.2, local_epochs=2, batch_size=4, neumann_terms=4, ridge=0.05
)


@pytest.fixture(scope='module')
def datasets():
  rng = np.random.default_rng(5)
  images = rng.normal(size=(CLIENTS, EXAMPLES, SIZES[0])).astype(np.float32)
  labels = rng.integers(0, SIZES[-1], (CLIENTS, EXAMPLES))
  return learning_problems.to_datasets(list(zip(images, labels, strict=True)))


@pytest.fixture(scope='module')
def process():
  problem, _ = learning_problems.hyper_representation(SIZES, SETTINGS.ridge)
  return fednest_tff.build(
      problem,
      outer_learning_rate=SETTINGS.learning_rate,
      inner_learning_rate=SETTINGS.learning_rate,
      inner_local_epochs=SETTINGS.local_epochs,
      batch_size=SETTINGS.batch_size,
      neumann_terms=SETTINGS.neumann_terms,
      ihgp='truncated',
      seed=3,
  )


def _clients(process, datasets):
  """The clients as the library reads them: split, and with their seeds."""
  problem = process.method.types.problem
  return [
      client_lib.from_dataset(problem, lambda examples: tf.ones([]), dataset)
      for dataset in datasets
  ]


def _level(clients, level):
  """(images, one-hot targets) of all clients."""
  images, labels = zip(*(getattr(c, level) for c in clients), strict=True)
  return tf.stack(images), tf.one_hot(tf.stack(labels), SIZES[-1])


def _order(process, state, clients):
  """The order in which the library's FedInn takes the examples."""
  _, seeds, _ = process.plan(state.seed, state.epoch, state.hparams)
  shape = (SETTINGS.local_epochs, EXAMPLES // 2)
  return tf.stack(
      [
          sampling.permutation(
              shape,
              client_lib.seed_of(
                  client,
                  tf.constant(seeds[0]),
                  sampling.Purpose.INNER_STEPS,
              ),
          )
          for client in clients
      ],
      axis=1,
  )


def _from_library(weights):
  layers = [(layer['weight'], layer['bias']) for layer in weights.outer]
  head = floor.Head(weights.inner['weight'], weights.inner['bias'][np.newaxis])
  return tf.nest.map_structure(tf.constant, (layers, head))


def _furthest(one, other):
  pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
  return max(float(tf.reduce_max(tf.abs(a - b))) for a, b in pairs)


def test_the_floor_is_the_library_on_the_same_minibatches(
    in_process, process, datasets
):
  clients = _clients(process, datasets)
  inner, outer = _level(clients, 'inner'), _level(clients, 'outer')
  assert inner[0].shape[1] == EXAMPLES // 2
  run = floor.build_epoch(SETTINGS)
  state = process.initialize()
  start = layers, head = _from_library(process.get_model_weights(state))
  for _ in range(3):
    order = _order(process, state, clients)
    others = run(layers, head, inner, outer, order[:, :, ::-1])
    layers, head = run(layers, head, inner, outer, order)
    state = process.next(state, datasets).state
    expected = _from_library(process.get_model_weights(state))
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (layers, head),
        expected,
    )
    # Other minibatches make a difference that this would see.
    assert _furthest(others, expected) > 1e-4
  for before, after in zip(start, (layers, head), strict=True):
    assert _furthest(before, after) > 1e-2


def test_the_floor_draws_permutations():
  order = floor.draw_order(SETTINGS, CLIENTS, 9, tf.constant([0, 1]))
  assert order.shape == (SETTINGS.local_epochs, CLIENTS, 9)
  np.testing.assert_array_equal(
      np.sort(order, axis=-1), np.broadcast_to(np.arange(9), order.shape)
  )
  rows = {tuple(row) for row in np.reshape(order, [-1, 9])}
  assert len(rows) == SETTINGS.local_epochs * CLIENTS
