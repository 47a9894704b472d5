"""Logistic regression: both models alike, the solution, and who reaches it."""

import numpy as np
import pytest
import tensorflow as tf

from experiments import learning_problems, logistic_regression
import fednest_tff

RUNTIME = 'in_process'

FEATURES, CLASSES, RIDGE = 5, 3, 0.1


def _clients(sizes=(20, 30, 25, 40), seed=0):
  """Clients that prefer one class each, and see shifted features."""
  rng = np.random.default_rng(seed)
  truth = rng.normal(size=(FEATURES, CLASSES))
  clients = []
  for i, size in enumerate(sizes):
    features = rng.normal(size=(size, FEATURES)) + 1.5 * rng.normal(
        size=FEATURES
    )
    scores = features @ truth + rng.gumbel(size=(size, CLASSES))
    scores[:, i % CLASSES] += 2
    labels = np.argmax(scores, axis=1)
    clients.append((np.float32(features), np.int32(labels)))
  return clients


def _random_point(seed=0):
  rng = np.random.default_rng(seed)
  return logistic_regression.from_model((
      np.float32(rng.normal(size=(FEATURES, CLASSES))),
      np.float32(rng.normal(size=CLASSES)),
  ))


def _value(x, clients):
  """The objective, example by example."""
  means = []
  for features, labels in clients:
    scores = np.float64(features) @ x['weight'] + x['bias']
    likelihoods = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    means.append(-np.log(likelihoods[np.arange(len(labels)), labels]).mean())
  squares = sum(np.sum(np.float64(leaf) ** 2) for leaf in x.values())
  return np.mean(means) + RIDGE / 2 * squares


def _gradient(function, x):
  x = tf.nest.map_structure(tf.convert_to_tensor, x)
  with tf.GradientTape() as tape:
    tape.watch(x)
    value = function(x)
  return value.numpy(), tape.gradient(value, x)


def test_problem_and_model_have_the_loss_and_gradient_of_numpy():
  clients = _clients((17,))
  batch = clients[0]
  problem = logistic_regression.logistic_regression(FEATURES, CLASSES, RIDGE)
  model = logistic_regression.functional_model(FEATURES, CLASSES, RIDGE)
  x = _random_point()

  def model_loss(x):
    output = model.predict_on_batch((tuple(x.values()), ()), batch[0])
    return model.loss(output, batch[1])

  value, slope = _gradient(lambda x: problem.outer_loss(x, (), batch), x)
  model_value, model_slope = _gradient(model_loss, x)
  np.testing.assert_allclose(value, _value(x, clients), rtol=1e-5)
  np.testing.assert_allclose(model_value, value, rtol=1e-6)
  for name, leaf in x.items():
    np.testing.assert_allclose(model_slope[name], slope[name], atol=1e-6)
    step = np.float64(np.arange(leaf.size).reshape(leaf.shape) == 2) * 1e-4
    rise = _value({**x, name: leaf + step}, clients) - _value(
        {**x, name: leaf - step}, clients
    )
    np.testing.assert_allclose(
        np.ravel(slope[name])[2], rise / 2e-4, atol=1e-4
    )


def test_optimum_has_no_slope_and_is_the_least():
  clients = _clients()
  solution = logistic_regression.optimum(clients, CLASSES, RIDGE)
  least = _value(solution, clients)
  np.testing.assert_allclose(
      logistic_regression.objective(solution, clients, CLASSES, RIDGE),
      least,
      rtol=1e-12,
  )
  for name, leaf in solution.items():
    for k in range(leaf.size):
      step = 1e-5 * np.float64(np.arange(leaf.size) == k).reshape(leaf.shape)
      up = _value({**solution, name: leaf + step}, clients)
      down = _value({**solution, name: leaf - step}, clients)
      assert min(up, down) > least - 1e-14
      assert abs(up - down) / 2e-5 < 1e-8
  moved = {**solution, 'bias': solution['bias'] + [3, 4, 0]}
  assert logistic_regression.distance(moved, solution) == pytest.approx(5)


def _fed_out(clients, steps, epochs, learning_rate=0.1):
  process = fednest_tff.build(
      logistic_regression.logistic_regression(FEATURES, CLASSES, RIDGE),
      outer_learning_rate=learning_rate,
      outer_local_steps=steps,
  )
  datasets = learning_problems.to_datasets(clients)
  state = process.initialize()
  for _ in range(epochs):
    state = process.next(state, datasets).state
  return process.get_model_weights(state).outer


def _fed_avg(clients, steps, *rounds, learning_rate=0.1):
  """x after each of these numbers of rounds."""
  process = logistic_regression.build_fed_avg(
      logistic_regression.functional_model(FEATURES, CLASSES, RIDGE),
      learning_rate,
  )
  datasets = [
      dataset.batch(100).repeat(steps)
      for dataset in learning_problems.to_datasets(clients)
  ]
  state = process.initialize()
  found = []
  for k in range(1, max(rounds) + 1):
    state = process.next(state, datasets).state
    if k in rounds:
      weights = process.get_model_weights(state)
      found.append(logistic_regression.from_model(weights.trainable))
  return found


def test_with_one_local_step_fed_out_is_fed_avg():
  clients = _clients()
  x = _fed_out(clients, 1, 3)
  (other,) = _fed_avg(clients, 1, 3)
  assert logistic_regression.distance(x, other) < 1e-6
  assert np.linalg.norm(x['weight']) > 0.1


@pytest.mark.usefixtures('compiled')
def test_with_several_only_fed_out_reaches_the_optimum():
  clients = _clients()
  solution = logistic_regression.optimum(clients, CLASSES, RIDGE)
  x = _fed_out(clients, 5, 150)
  assert logistic_regression.distance(x, solution) < 1e-5
  x, later = _fed_avg(clients, 5, 60, 90)
  assert logistic_regression.distance(x, solution) > 0.05
  # It is no matter of more rounds.
  assert logistic_regression.distance(x, later) < 5e-3
