"""The agnostic regression: its loss, its best response, and what it is for."""

import numpy as np
import pytest
import tensorflow as tf

from experiments import logistic_regression, robust_regression
import fednest_tff

RUNTIME = 'in_process'

FEATURES, CLASSES, RHO, RIDGE = 4, 3, 2.0, 0.1


def _clients(sizes=(6, 9, 4), seed=0):
  rng = np.random.default_rng(seed)
  return [
      (rng.normal(size=(n, FEATURES)), np.int32(rng.integers(0, CLASSES, n)))
      for n in sizes
  ]


def _point(seed=0):
  rng = np.random.default_rng(seed)
  return logistic_regression.from_model(
      (rng.normal(size=(FEATURES, CLASSES)), rng.normal(size=CLASSES))
  )


def _losses(x, clients):
  """l_i, by the definition."""
  means = []
  for features, labels in clients:
    scores = features @ x['weight'] + x['bias']
    rows = [
        np.log(np.exp(s).sum()) - s[label]
        for s, label in zip(scores, labels, strict=True)
    ]
    means.append(np.mean(rows))
  return np.array(means)


def _value(x, y, clients):
  """sum_i w_i l_i + ridge/2 |x|^2 - rho/2 |y|^2."""
  weights = 1 / len(y) + y - np.mean(y)
  squares = sum(np.sum(leaf**2) for leaf in x.values())
  fit = weights @ _losses(x, clients)
  return fit + RIDGE / 2 * squares - RHO / 2 * y @ y


def _problem(num_clients=3):
  return robust_regression.robust_regression(
      num_clients, FEATURES, CLASSES, RHO, RIDGE, tf.float64
  )


def test_the_mean_of_the_clients_losses_is_the_objective():
  clients, x = _clients(), _point()
  y = np.random.default_rng(1).normal(size=3)
  losses = [
      _problem().outer_loss(x, y, dataset.batch(100).get_single_element())
      for dataset in robust_regression.to_datasets(clients)
  ]
  np.testing.assert_allclose(np.mean(losses), _value(x, y, clients))
  np.testing.assert_allclose(
      robust_regression.client_losses(x, clients), _losses(x, clients)
  )
  np.testing.assert_allclose(
      robust_regression.client_losses(x, clients).max(),
      max(_losses(x, clients)),
  )
  weights = robust_regression.client_weights(y)
  np.testing.assert_allclose(weights.sum(), 1)
  np.testing.assert_allclose(weights - weights[0], y - y[0])


def test_fed_inn_finds_the_best_response():
  clients, x = _clients(), _point()
  y = robust_regression.best_response(x, clients, RHO)
  assert np.ptp(y) > 0.1
  for step in 1e-4 * np.eye(3):
    up, down = _value(x, y + step, clients), _value(x, y - step, clients)
    assert abs(up - down) < 1e-11
    assert max(up, down) < _value(x, y, clients)
  process = fednest_tff.build_fed_inn(
      _problem(), inner=fednest_tff.LocalWork(learning_rate=0.2, steps=3)
  )
  state = process.initialize()._replace(outer=x)
  for _ in range(15):
    state = process.next(state, robust_regression.to_datasets(clients)).state
  np.testing.assert_allclose(state.inner, y, atol=1e-9)


def test_accuracies_by_hand():
  x = logistic_regression.from_model((np.eye(3), np.zeros(3)))
  clients = [
      (np.eye(3), np.array([0, 1, 2])),
      (np.eye(3), np.array([0, 2, 1])),
  ]
  np.testing.assert_allclose(
      robust_regression.client_accuracies(x, clients), [1, 1 / 3]
  )
  assert robust_regression.worst_client_accuracy(x, clients) == (
      pytest.approx(1 / 3)
  )


def test_breast_cancer_clients():
  train, test = robust_regression.breast_cancer_clients(7, 0.25)
  assert len(train) == len(test) == 7
  features, labels = (
      np.concatenate(parts) for parts in zip(*train, *test, strict=True)
  )
  assert features.shape == (569, 30) and features.dtype == np.float32
  assert len(np.unique(features, axis=0)) == 569
  assert set(labels) == {0, 1}
  np.testing.assert_allclose(features.mean(axis=0), 0, atol=1e-5)
  np.testing.assert_allclose(features.std(axis=0), 1, rtol=1e-5)
  # Sorted by radius: hardly a malignant one at first, hardly a benign at last.
  assert np.mean(train[0][1]) > 0.95 and np.mean(train[-1][1]) < 0.05
  radius = [client[0][:, 0] for client in train]
  assert radius[0].max() <= radius[1].min()


def _robust(clients, rho, ridge, epochs):
  process = fednest_tff.build(
      robust_regression.robust_regression(len(clients), 30, 2, rho, ridge),
      outer_learning_rate=0.5,
      inner_learning_rate=1 / rho,
      inner_local_steps=1,
  )
  state = process.initialize()
  datasets = robust_regression.to_datasets(clients)
  for _ in range(epochs):
    state = process.next(state, datasets).state
  return process.get_model_weights(state)


@pytest.mark.usefixtures('compiled')
def test_the_worst_client_is_better_off_than_by_plain_regression():
  rho, ridge = 0.7, 0.1
  clients, _ = robust_regression.breast_cancer_clients(6)
  plain = {
      name: np.float32(leaf)
      for name, leaf in logistic_regression.optimum(clients, 2, ridge).items()
  }
  weights = _robust(clients, rho, ridge, 120)
  losses = robust_regression.client_losses(weights.outer, clients)
  before = robust_regression.client_losses(plain, clients)
  assert losses.max() < 0.95 * before.max()
  # This is its price.
  assert logistic_regression.objective(
      weights.outer, clients, 2, ridge
  ) > logistic_regression.objective(plain, clients, 2, ridge)
  y = robust_regression.best_response(weights.outer, clients, rho)
  np.testing.assert_allclose(weights.inner, y, atol=1e-4)
  assert robust_regression.client_weights(y).min() > 0
  # What x minimizes in the end, with a slope of zero.
  x = tf.nest.map_structure(tf.constant, weights.outer)
  with tf.GradientTape() as tape:
    tape.watch(x)
    each = tf.stack([
        tf.reduce_mean(logistic_regression.cross_entropy(x, *client))
        for client in clients
    ])
    spread = tf.math.reduce_variance(each) * len(clients) / (2 * rho)
    value = tf.reduce_mean(each) + spread
    value += logistic_regression.penalty(ridge, x)
  slope = tape.gradient(value, x)
  assert max(np.abs(leaf).max() for leaf in slope.values()) < 1e-3
