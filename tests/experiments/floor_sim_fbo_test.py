"""The benchmark's SimFBO by hand against the library."""

import numpy as np
import tensorflow as tf

from experiments import floor, floor_sim_fbo, learning_problems
import fednest_tff
from fednest_tff.local import client as client_lib
from fednest_tff.local import sampling
from fednest_tff.local.sampling import Purpose
from tests.helpers import processes

RUNTIME = 'in_process'
SIZES = (8, 6, 4)
# Of 24 examples 12 are inner: three minibatches of 4 per pass.
CLIENTS, EXAMPLES, BATCH = 3, 24, 4
SETTINGS = floor_sim_fbo.Settings(
    learning_rate=0.2, local_steps=5, ridge=0.05
)


def _to_point(state):
  (layer,) = state.outer

  def head(value):
    return floor.Head(value['weight'], value['bias'][np.newaxis])

  return floor_sim_fbo.Point(
      head(layer), head(state.inner), head(state.method.linear)
  )


def _rows(state, clients, purpose):
  """The library's minibatches: [local steps, clients, batch size]."""
  call = sampling.fold_in(sampling.fold_in(state.seed, state.epoch), 0)
  found = []
  for client in clients:
    seed = client_lib.seed_of(client, call, Purpose.CLIENT_STEPS)
    order = sampling.permutation((2, 12), sampling.fold_in(seed, purpose))
    found.append(tf.reshape(order, [6, BATCH])[: SETTINGS.local_steps])
  return tf.stack(found, axis=1)


def test_two_epochs_equal_the_library():
  rng = np.random.default_rng(5)
  images = rng.normal(size=(CLIENTS, EXAMPLES, SIZES[0])).astype(np.float32)
  labels = rng.integers(0, SIZES[-1], (CLIENTS, EXAMPLES))
  datasets = learning_problems.to_datasets(
      list(zip(images, labels, strict=True))
  )
  problem, _ = learning_problems.hyper_representation(SIZES, SETTINGS.ridge)
  rates = {
      f'{variable}_learning_rate': SETTINGS.learning_rate
      for variable in ('outer', 'inner', 'linear')
  }
  process = fednest_tff.build(
      problem, 'simfbo', **rates, local_steps=SETTINGS.local_steps,
      batch_size=BATCH,
  )
  clients = [
      client_lib.from_dataset(problem, lambda examples: tf.ones([]), dataset)
      for dataset in datasets
  ]

  def level(name):
    found = [getattr(client, name) for client in clients]
    return (
        tf.stack([c[0] for c in found]),
        tf.one_hot(tf.stack([c[1] for c in found]), SIZES[-1]),
    )

  epoch = floor_sim_fbo.build_epoch(SETTINGS)
  state = process.initialize()
  point = _to_point(state)
  for _ in range(2):
    point = epoch(
        point,
        level('inner'),
        level('outer'),
        _rows(state, clients, Purpose.SIMULTANEOUS_INNER),
        _rows(state, clients, Purpose.SIMULTANEOUS_OUTER),
    )
    state, _ = processes.run(process, datasets, 1, state)
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
      point,
      _to_point(state),
  )
  # v has moved: both products have been used.
  assert np.linalg.norm(state.method.linear['weight']) > 1e-2


def test_rows_show_each_example_once_per_pass():
  rows = floor_sim_fbo.draw_rows(4, 2, 8, 4, tf.constant([1, 2])).numpy()
  assert rows.shape == (4, 2, 4)
  for client in range(2):
    for start in (0, 2):
      shown = rows[start : start + 2, client].ravel()
      np.testing.assert_array_equal(np.sort(shown), np.arange(8))
