"""The learning problems against NumPy, and on scikit-learn's digits."""

import numpy as np
import pytest
from sklearn import datasets, metrics
import tensorflow as tf

from experiments import learning_problems
import fednest_tff
from fednest_tff.local import derivatives

pytestmark = pytest.mark.usefixtures('in_process')


def _images(count=6, pixels=64, classes=3, seed=0):
  rng = np.random.default_rng(seed)
  return (
      np.float32(rng.uniform(size=(count, pixels))),
      np.int32(rng.integers(0, classes, count)),
  )


def _weights(problem, seed=0):
  return fednest_tff.NestedWeights(
      problem.init_outer(seed), problem.init_inner(seed)
  )


def _log_softmax(logits):
  logits = np.float64(logits)
  return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _cross_entropy(logits, labels):
  return -_log_softmax(logits)[np.arange(len(labels)), labels]


def _dense(layer, inputs):
  return inputs @ np.float64(layer['weight']) + np.float64(layer['bias'])


def _squares(structure):
  return sum(
      np.sum(np.float64(leaf) ** 2) for leaf in tf.nest.flatten(structure)
  )


def _convolve_and_pool(layer, maps):
  """3x3 with zeros around, ReLU and 2x2 max-pooling, in loops."""
  height, width, _ = maps.shape
  weight = np.float64(layer['weight'])
  around = np.pad(maps, [(1, 1), (1, 1), (0, 0)])
  full = np.zeros((height, width, weight.shape[-1]))
  for i in range(height):
    for j in range(width):
      patch = around[i : i + 3, j : j + 3]
      full[i, j] = np.einsum('abc,abcd->d', patch, weight) + layer['bias']
  full = np.maximum(full, 0)
  return np.array([
      [
          full[i : i + 2, j : j + 2].max(axis=(0, 1))
          for j in range(0, width, 2)
      ]
      for i in range(0, height, 2)
  ])


def _check_head_problem(built, weights, features, labels, batch, ridge):
  """Prediction and both losses, from the backbone's features in NumPy."""
  logits = _dense(weights.inner, features)
  np.testing.assert_allclose(
      built.predict(weights, batch[0]), logits, rtol=1e-4, atol=1e-6
  )
  problem = built.problem
  there = problem.representation(weights.outer, batch)
  outer = _cross_entropy(logits, labels).mean()
  np.testing.assert_allclose(
      problem.outer_loss(*weights, there), outer, rtol=1e-5
  )
  np.testing.assert_allclose(
      problem.inner_loss(*weights, there),
      outer + ridge * _squares(weights.inner),
      rtol=1e-5,
  )


def test_mlp_representation_equals_numpy():
  built = learning_problems.hyper_representation((64, 7, 5, 3), ridge=0.1)
  weights = _weights(built.problem)
  images, labels = _images()
  features = images
  for layer in weights.outer:
    features = np.maximum(_dense(layer, features), 0)
  _check_head_problem(built, weights, features, labels, (images, labels), 0.1)


@pytest.mark.parametrize('shape', [(8, 8), (6, 10), (4, 4, 3)])
def test_convolutional_representation_equals_numpy(shape):
  built = learning_problems.convolutional_representation(
      shape, num_classes=3, channels=(2, 4), features=5, ridge=0.1
  )
  weights = _weights(built.problem)
  images, labels = _images(pixels=int(np.prod(shape)))
  features = []
  for image in images:
    maps = image.reshape((*shape, 1)[:3])
    for layer in weights.outer[:-1]:
      # Pooling pads an odd side, which cannot be the largest after ReLU.
      maps = _convolve_and_pool(layer, maps)
    features.append(
        np.maximum(_dense(weights.outer[-1], maps.reshape(-1)), 0)
    )
  _check_head_problem(
      built, weights, np.array(features), labels, (images, labels), 0.1
  )


def test_convolutional_mixed_product_by_differences():
  problem, _ = learning_problems.convolutional_representation(
      (8, 8), num_classes=3, channels=(2, 3), features=4
  )
  cast = tf.nest.map_structure
  x, y = cast(lambda t: tf.cast(t, tf.float64), _weights(problem))
  images, labels = _images()
  batch = np.float64(images), labels
  rng = np.random.default_rng(1)
  vector = cast(lambda t: tf.constant(rng.normal(size=t.shape)), y)

  def loss(x, y):
    return problem.inner_loss(x, y, problem.representation(x, batch))

  found = derivatives.mixed_product(loss, x, y, vector)

  def slope(sign):
    moved = cast(lambda t, v: t + sign * 1e-5 * v, y, vector)
    return derivatives.gradient(lambda x: loss(x, moved), x)

  expected = cast(lambda a, b: (a - b) / 2e-5, slope(1), slope(-1))
  for a, b in zip(
      tf.nest.flatten(found), tf.nest.flatten(expected), strict=True
  ):
    assert np.abs(b).max() > 1e-4
    np.testing.assert_allclose(a, b, atol=1e-8)


def _vs_loss(x, logits, labels):
  """-omega_c log softmax(Delta * logits + iota)_c, by the definition."""
  delta = 2 / (1 + np.exp(-np.float64(x['scale'])))
  losses = _cross_entropy(delta * logits + np.float64(x['shift']), labels)
  if 'weight' in x:
    losses *= np.log2(1 + np.exp(np.float64(x['weight'])))[labels]
  return losses.mean()


@pytest.mark.parametrize('tune_class_weights', [False, True])
def test_loss_tuning_is_neutral_at_first_and_the_vs_loss_later(
    tune_class_weights,
):
  built = learning_problems.loss_tuning(
      (64, 6, 5, 3),
      ridge=0.1,
      class_weights=[1, 2, 3],
      tune_class_weights=tune_class_weights,
  )
  problem = built.problem
  x, y = weights = _weights(problem)
  batch = images, labels = _images()
  assert set(x) == {'scale', 'shift'} | (
      {'weight'} if tune_class_weights else set()
  )
  hidden = images
  for layer in y[:-1]:
    hidden = np.maximum(_dense(layer, hidden), 0)
  logits = _dense(y[-1], hidden)
  np.testing.assert_allclose(
      built.predict(weights, images), logits, rtol=1e-4, atol=1e-6
  )
  plain = _cross_entropy(logits, labels)
  penalty = 0.1 * _squares(y)
  np.testing.assert_allclose(
      problem.inner_loss(x, y, batch), plain.mean() + penalty, rtol=1e-6
  )
  np.testing.assert_allclose(
      problem.outer_loss(x, y, batch), np.mean((labels + 1) * plain), rtol=1e-5
  )
  rng = np.random.default_rng(2)
  moved = {k: np.float32(rng.normal(size=v.shape)) for k, v in x.items()}
  expected = _vs_loss(moved, logits, labels)
  assert abs(expected - plain.mean()) > 0.01
  np.testing.assert_allclose(
      problem.inner_loss(moved, y, batch), expected + penalty, rtol=1e-5
  )


def test_balanced_class_weights_give_each_class_one_vote():
  labels = [np.array([0, 0, 0, 1]), np.array([0, 2]), np.array([0] * 5)]
  weights = learning_problems.balanced_class_weights(labels, 4)
  assert weights[3] == 0
  # The mean over clients of the weight that each class carries in all.
  votes = [
      np.mean([np.mean(weights[c] * (client == c)) for client in labels])
      for c in range(3)
  ]
  np.testing.assert_allclose(votes, 1 / 4)


def test_accuracies():
  logits = np.random.default_rng(0).normal(size=(50, 4))
  labels = np.random.default_rng(1).integers(0, 3, 50)  # No 3.
  predicted = np.argmax(logits, axis=1)
  assert learning_problems.accuracy(logits, labels) == pytest.approx(
      metrics.accuracy_score(labels, predicted)
  )
  recalls = metrics.recall_score(
      labels, predicted, average=None, labels=[0, 1, 2]
  )
  assert learning_problems.balanced_accuracy(
      tf.constant(logits), labels, 4
  ) == pytest.approx(np.mean(recalls))


def test_predict_in_parts():
  built = learning_problems.hyper_representation((4, 3, 2))
  weights = _weights(built.problem)
  images, _ = _images(2500, 4)
  together = built.predict(weights, images)
  assert together.shape == (2500, 2)
  np.testing.assert_allclose(
      together[2000:2100], built.predict(weights, images[2000:2100]), rtol=1e-5
  )
  assert built.predict(weights, images[:0]).shape == (0, 2)


def _digits(num_clients=5):
  images, labels = datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(0).permutation(len(labels))
  images, labels = np.float32(images[order] / 16), np.int32(labels[order])
  clients = [
      (images[rows], labels[rows])
      for rows in np.array_split(np.arange(1000), num_clients)
  ]
  return clients, (images[1000:], labels[1000:])


@pytest.mark.parametrize('method,learning_rate,least', [
    ('fednest', 0.05, 0.7), ('lfednest', 0.02, 0.4)
])
def test_digits_are_learnt_with_convolutions(method, learning_rate, least):
  built = learning_problems.convolutional_representation(
      (8, 8), channels=(6, 12), features=24
  )
  clients, (images, labels) = _digits()
  process = fednest_tff.build(
      built.problem,
      method,
      outer_learning_rate=2 * learning_rate,
      inner_learning_rate=learning_rate,
      inner_local_epochs=2,
      batch_size=32,
      neumann_terms=3,
      ihgp='truncated',
  )
  state = process.initialize()
  for _ in range(25):
    state = process.next(state, learning_problems.to_datasets(clients)).state
  logits = built.predict(process.get_model_weights(state), images)
  assert learning_problems.accuracy(logits, labels) > least
