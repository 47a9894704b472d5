"""Agnostic logistic regression: a fair classifier as a minimax problem.

With l_i the mean cross-entropy of client i and m clients,

  min_x max_y sum_i w_i(y) l_i(x) + ridge/2 |x|^2 - rho/2 |y|^2,
  w_i(y) = 1/m + y_i - mean(y),

where the adversary y moves weight to the clients that fare worst. It is
f = mean_i f_i with f_i = m w_i l_i + ridge/2 |x|^2 - rho/2 |y|^2, of which
client i computes its own from its own data: its examples carry its number. The
best response is y*(x) = (l(x) - mean l(x)) / rho, and what x minimizes in the
end is mean_i l_i + m / (2 rho) times the variance of the l_i over the clients,
plus the ridge. A small rho is a strong adversary. Weights stay positive as long
as no l_i is more than rho / m below the mean; f is convex in x there only.
"""

import collections
from collections.abc import Sequence

import numpy as np
from sklearn import datasets as sklearn_datasets
import tensorflow as tf

from experiments import logistic_regression
from experiments.logistic_regression import Client
import fednest_tff
from fednest_tff.vector_space import Structure


def breast_cancer_clients(
    num_clients: int = 10, test_fraction: float = 0.3, seed: int = 0
) -> tuple[list[Client], list[Client]]:
  """scikit-learn's breast cancer data, 569 tumours, sorted by their radius.

  Small ones are benign and large ones malignant, so that the clients at both
  ends are easy, and those in between, who have both, are the hard ones.

  Args:
    num_clients: m, at most 100.
    test_fraction: The part of each client's examples that is for testing.
    seed: Of the choice of those.

  Returns:
    Each client's training examples, and its test examples: 30 standardised
    features (float32) and a label (int32), 0 for malignant.
  """
  if not 1 <= num_clients <= 100:
    raise ValueError(
        f'`num_clients` must be between 1 and 100; got {num_clients}.'
    )
  features, labels = sklearn_datasets.load_breast_cancer(return_X_y=True)
  order = np.argsort(features[:, 0], kind='stable')
  features = (features - features.mean(axis=0)) / features.std(axis=0)
  rng = np.random.default_rng(seed)
  train: list[Client] = []
  test: list[Client] = []
  for rows in np.array_split(order, num_clients):
    rows = rng.permutation(rows)
    num_test = round(test_fraction * len(rows))
    for part, clients in ((rows[num_test:], train), (rows[:num_test], test)):
      clients.append(
          (features[part].astype(np.float32), labels[part].astype(np.int32))
      )
  return train, test


def to_datasets(clients: Sequence[Client]) -> list[tf.data.Dataset]:
  """One dataset per client, whose examples carry the client's number."""
  return [
      tf.data.Dataset.from_tensor_slices(
          collections.OrderedDict(
              features=features,
              label=np.int32(labels),
              client=np.full(len(labels), i, np.int32),
          )
      )
      for i, (features, labels) in enumerate(clients)
  ]


def robust_regression(
    num_clients: int,
    num_features: int,
    num_classes: int,
    rho: float,
    ridge: float = 0.01,
    dtype: tf.DType = tf.float32,
) -> fednest_tff.Problem:
  """The minimax problem; x is a multinomial logistic regression.

  Args:
    num_clients: m, the dimension of y.
    num_features: Of an example.
    num_classes: Of the labels.
    rho: The strength of concavity, in units of m times a loss.
    ridge: The weight of |x|^2 / 2.
    dtype: Of features, x and y.

  Returns:
    The problem; its clients are those of `to_datasets`.
  """

  def loss(x, y, batch):
    losses = logistic_regression.cross_entropy(
        x, batch['features'], batch['label']
    )
    # m w_i: all examples of a batch are one client's.
    weights = 1 + num_clients * (y - tf.reduce_mean(y))
    fit = tf.reduce_mean(tf.gather(weights, batch['client']) * losses)
    convex = logistic_regression.penalty(ridge, x)
    return fit + convex - rho / 2 * tf.reduce_sum(y**2)

  return fednest_tff.minimax(
      loss,
      lambda seed: logistic_regression.zeros(num_features, num_classes, dtype),
      lambda seed: tf.zeros([num_clients], dtype),
      collections.OrderedDict(
          features=tf.TensorSpec([num_features], dtype),
          label=tf.TensorSpec([], tf.int32),
          client=tf.TensorSpec([], tf.int32),
      ),
  )


def client_losses(x: Structure, clients: Sequence[Client]) -> np.ndarray:
  """l_i(x), client by client."""
  return np.array([
      np.mean(logistic_regression.cross_entropy(x, features, labels))
      for features, labels in clients
  ])


def client_accuracies(x: Structure, clients: Sequence[Client]) -> np.ndarray:
  """The share of right predictions, client by client."""
  return np.array([
      np.mean(np.argmax(logistic_regression.logits(x, features), 1) == labels)
      for features, labels in clients
  ])


def worst_client_accuracy(x: Structure, clients: Sequence[Client]) -> float:
  """The accuracy of the client that has the lowest."""
  return float(client_accuracies(x, clients).min())


def best_response(
    x: Structure, clients: Sequence[Client], rho: float
) -> np.ndarray:
  """y*(x), the weights that hurt x most."""
  losses = client_losses(x, clients)
  return (losses - losses.mean()) / rho


def client_weights(y: np.ndarray) -> np.ndarray:
  """w(y), which sums to one."""
  y = np.asarray(y)
  return 1 / len(y) + y - y.mean()
