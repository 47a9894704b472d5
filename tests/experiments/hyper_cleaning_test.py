"""Data hyper-cleaning: wrong labels, weights, and their hypergradient."""

import numpy as np
import pytest
from scipy import optimize
import tensorflow as tf

from experiments import hyper_cleaning
from fednest_tff.local import derivatives

pytestmark = pytest.mark.usefixtures('in_process')

FEATURES, CLASSES, RIDGE = 3, 3, 0.05
# One of each kind: alternating, all variables at once, and without second
# derivatives.
METHODS = ['fednest', 'simfbo', 'penalty']
BASELINES = ['no_cleaning', 'true_labels', 'validation_only']


def clients(sizes=(12, 8), seed=0):
  rng = np.random.default_rng(seed)
  return [
      (
          np.float32(rng.normal(size=(n, FEATURES))),
          np.int32(rng.integers(0, CLASSES, n)),
      )
      for n in sizes
  ]


def spoilt(share=0.5, seed=3):
  return hyper_cleaning.spoil(clients(), share, 0.5, CLASSES, seed)


def test_a_share_of_every_clients_training_labels_is_wrong():
  before = clients((100, 60))
  noisy = hyper_cleaning.spoil(before, 0.4, 0.5, CLASSES, seed=1)
  first = 0
  for (images, labels), (kept, spoilt_labels, index) in zip(
      before, noisy.clients, strict=True
  ):
    num_inner = len(labels) // 2
    np.testing.assert_array_equal(kept, images)
    np.testing.assert_array_equal(
        index[:num_inner], first + np.arange(num_inner)
    )
    assert (index[num_inner:] == -1).all()
    is_right = labels[:num_inner] == spoilt_labels[:num_inner]
    assert (~is_right).sum() == round(0.4 * num_inner)
    np.testing.assert_array_equal(
        is_right, noisy.is_right[first : first + num_inner]
    )
    # Validation labels are right.
    np.testing.assert_array_equal(labels[num_inner:], spoilt_labels[num_inner:])
    assert set(spoilt_labels) <= set(range(CLASSES))
    first += num_inner
  again = hyper_cleaning.spoil(before, 0.4, 0.5, CLASSES, seed=1)
  other = hyper_cleaning.spoil(before, 0.4, 0.5, CLASSES, seed=2)
  np.testing.assert_array_equal(again.is_right, noisy.is_right)
  assert (other.is_right != noisy.is_right).any()


def _log_probabilities(y, images):
  logits = images @ y[:-1] + y[-1]
  return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def _inner(flat, x, parts):
  """mean_i g_i in NumPy, y being weights above a bias."""
  y = flat.reshape(FEATURES + 1, CLASSES)
  found = []
  for images, labels, index in parts:
    inner = index >= 0
    losses = -_log_probabilities(y, images[inner])[
        np.arange(inner.sum()), labels[inner]
    ]
    weights = 1 / (1 + np.exp(-x[index[inner]]))
    found.append(np.mean(weights * losses) + RIDGE * np.sum(y**2))
  return np.mean(found)


def _outer(flat, parts):
  y = flat.reshape(FEATURES + 1, CLASSES)
  return np.mean([
      np.mean(-_log_probabilities(y, images[index < 0])[
          np.arange((index < 0).sum()), labels[index < 0]
      ])
      for images, labels, index in parts
  ])


def _solve(x, parts):
  """y*(x), to high accuracy."""
  found = optimize.minimize(
      _inner, np.zeros((FEATURES + 1) * CLASSES), (x, parts), 'BFGS',
      options=dict(gtol=1e-9),
  )
  return found.x


def test_hypergradient_equals_the_derivative_of_the_whole_function():
  noisy = spoilt()
  parts = [
      (np.float64(images), labels, index)
      for images, labels, index in noisy.clients
  ]
  num_weights = len(noisy.is_right)
  x = np.random.default_rng(5).normal(size=num_weights)
  step = 1e-3

  def value(x):
    return _outer(_solve(x, parts), parts)

  wanted = np.array([
      (value(x + d) - value(x - d)) / (2 * step)
      for d in step * np.eye(num_weights)
  ])

  problem, _ = hyper_cleaning.hyper_cleaning(
      (FEATURES, CLASSES), num_weights, RIDGE
  )
  solution = _solve(x, parts)
  matrix = np.float32(solution.reshape(FEATURES + 1, CLASSES))
  y = [{'weight': tf.constant(matrix[:-1]), 'bias': tf.constant(matrix[-1])}]
  x = tf.constant(x, tf.float32)
  halves = [problem.split(client) for client in noisy.clients]

  def mean(function):
    found = [function(*half) for half in halves]
    return tf.nest.map_structure(lambda *t: sum(t) / len(t), *found)

  def flat(a):
    return np.concatenate([np.ravel(a[0]['weight']), np.ravel(a[0]['bias'])])

  def pack(v):
    v = np.float32(v)
    return [{
        'weight': tf.constant(v[: FEATURES * CLASSES].reshape(FEATURES, -1)),
        'bias': tf.constant(v[FEATURES * CLASSES :]),
    }]

  right = flat(mean(lambda inner, outer: derivatives.outer_gradient_in_inner(
      problem, x, y, outer)))
  hessian = np.array([
      flat(mean(lambda inner, outer: derivatives.inner_hessian_product(
          problem, x, y, pack(e), inner)))  # noqa: B023
      for e in np.eye(len(right))
  ])
  v = pack(np.linalg.solve(hessian, right))
  h = mean(lambda inner, outer: derivatives.hypergradient(
      problem, x, y, v, outer, inner)[1])
  assert np.abs(wanted).max() > 1e-3
  np.testing.assert_allclose(h, wanted, atol=2e-5, rtol=2e-3)


def test_baselines_train_on_what_they_say():
  noisy = spoilt()
  y = [{
      'weight': tf.random.stateless_normal([FEATURES, CLASSES], [1, 2]),
      'bias': tf.zeros([CLASSES]),
  }]
  matrix = np.vstack([y[0]['weight'], y[0]['bias']])
  for weights in (np.ones(10), noisy.is_right, None):
    problem, _ = hyper_cleaning.fixed_weights(
        (FEATURES, CLASSES), weights, RIDGE
    )
    images, labels, index = noisy.clients[0]
    used = index < 0 if weights is None else index >= 0
    losses = -_log_probabilities(matrix, images[used])[
        np.arange(used.sum()), labels[used]
    ]
    if weights is not None:
      losses = weights[index[used]] * losses
    wanted = np.mean(losses) + RIDGE * np.sum(matrix**2)
    found = problem.outer_loss(y, (), noisy.clients[0])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_area_under_the_curve():
  is_right = np.array([True, False, True, False])
  assert hyper_cleaning.weights_auc([2.0, 1.0, 4.0, 3.0], is_right) == 0.75
  assert hyper_cleaning.weights_auc(np.zeros(4), is_right) == 0.5
  assert hyper_cleaning.weights_auc(np.arange(4), np.ones(4, bool)) == 0.5


@pytest.fixture(scope='module')
def trial():
  settings = hyper_cleaning.EXPERIMENT.resolve(dict(
      method=METHODS + BASELINES,
      num_clients=2, clients_per_round=2, local_steps=2, neumann_terms=2,
      inner_rounds=1, inner_local_steps=1, batch_size=16,
  ))
  return hyper_cleaning.EXPERIMENT.make_trial(settings, 0)


@pytest.mark.parametrize('method', METHODS + BASELINES)
def test_methods_learn_something(trial, method):
  process = trial.build(method)
  state = process.initialize()
  before = trial.evaluate(process.get_model_weights(state))
  state = process.next(state, trial.cohort(1)).state
  found = trial.evaluate(process.get_model_weights(state))
  assert found['test_loss'] < before['test_loss'] - 0.05
  assert ('weights_auc' in found) == (method in METHODS)


