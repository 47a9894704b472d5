"""Multinomial logistic regression, min_x mean_i l_i(x) + ridge/2 |x|^2.

The single-level problem (section 3.3), the same as a TFF model for FedAvg, and
its solution to many digits. l_i is the mean cross-entropy over client i's
examples; clients count alike, so that FedAvg has to be the unweighted one. x is
a matrix 'weight' [features, classes] and a vector 'bias' [classes]; the ridge
is on both, or the solution would not be unique.
"""

import collections
from collections.abc import Callable, Sequence

import numpy as np
import scipy.optimize
import scipy.sparse.linalg
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.vector_space import Structure

# A client's features [n, d] and labels [n].
Client = tuple[np.ndarray, np.ndarray]


def zeros(
    num_features: int, num_classes: int, dtype: tf.DType = tf.float32
) -> collections.OrderedDict:
  """The initial x: all classes alike."""
  return collections.OrderedDict(
      weight=tf.zeros([num_features, num_classes], dtype),
      bias=tf.zeros([num_classes], dtype),
  )


def logits(x: Structure, features: tf.Tensor) -> tf.Tensor:
  """The classes' scores, [n, classes]."""
  return features @ x['weight'] + x['bias']


def cross_entropy(
    x: Structure, features: tf.Tensor, labels: tf.Tensor
) -> tf.Tensor:
  """-log softmax(logits)_label of each example."""
  return tf.nn.sparse_softmax_cross_entropy_with_logits(
      labels, logits(x, features)
  )


def penalty(ridge: float, x: Structure) -> tf.Tensor:
  """ridge/2 |x|^2."""
  squares = [tf.reduce_sum(leaf**2) for leaf in tf.nest.flatten(x)]
  return ridge / 2 * tf.add_n(squares)


def _loss(ridge: float) -> Callable[..., tf.Tensor]:
  """f_i(x), of client i's batch; x is a dictionary."""

  def loss(x, batch):
    features, labels = batch
    fit = tf.reduce_mean(cross_entropy(x, features, labels))
    return fit + penalty(ridge, x)

  return loss


def logistic_regression(
    num_features: int,
    num_classes: int,
    ridge: float = 0.01,
    dtype: tf.DType = tf.float32,
) -> fednest_tff.Problem:
  """The single-level problem, for FedOut as federated SVRG.

  Args:
    num_features: Of an example.
    num_classes: K.
    ridge: The weight of |x|^2 / 2, positive.
    dtype: Of features and x.

  Returns:
    The problem; an element is (features, label).
  """
  return fednest_tff.single_level(
      _loss(ridge),
      lambda seed: zeros(num_features, num_classes, dtype),
      (tf.TensorSpec([num_features], dtype), tf.TensorSpec([], tf.int32)),
  )


def functional_model(
    num_features: int,
    num_classes: int,
    ridge: float = 0.01,
    dtype: tf.DType = tf.float32,
) -> tff.learning.models.FunctionalModel:
  """The same problem as a TFF model, for `build_unweighted_fed_avg`.

  Its clients' datasets are batched, those of the `Problem` are not.

  Args:
    num_features: As in `logistic_regression`, like the rest.
    num_classes: K.
    ridge: The weight of |x|^2 / 2.
    dtype: Of features and x.

  Returns:
    The model; its trainable weights are (weight, bias), see `from_model`.
  """

  @tf.function
  def predict_on_batch(weights, features, training=True):
    del training  # There is nothing that training alone does.
    x = from_model(weights[0])
    # TFF's loss sees only what comes from here, so the penalty goes along; the
    # first part is what counts as the prediction.
    return logits(x, features), penalty(ridge, x)

  def loss(output, labels, sample_weight=None):
    del sample_weight  # TFF passes none.
    fit = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, output[0])
    return tf.reduce_mean(fit) + output[1]

  initial = tuple(
      leaf.numpy() for leaf in zeros(num_features, num_classes, dtype).values()
  )
  return tff.learning.models.FunctionalModel(
      initial_weights=(initial, ()),
      predict_on_batch_fn=predict_on_batch,
      loss_fn=loss,
      input_spec=(
          tf.TensorSpec([None, num_features], dtype),
          tf.TensorSpec([None], tf.int32),
      ),
  )


def build_fed_avg(
    model: tff.learning.models.FunctionalModel, learning_rate: float
) -> tff.learning.templates.LearningProcess:
  """TFF's own FedAvg with plain SGD on the clients, which count alike."""
  sgd = tff.learning.optimizers.build_sgdm
  return tff.learning.algorithms.build_unweighted_fed_avg(
      model,
      sgd(learning_rate),
      sgd(1.0),
      # The same steps, ten times as fast as TFF's default in process.
      loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
  )


def from_model(trainable: Sequence) -> collections.OrderedDict:
  """x from the trainable weights of `functional_model`."""
  return collections.OrderedDict(weight=trainable[0], bias=trainable[1])


class _Objective:
  """mean_i l_i + ridge/2 |x|^2 in NumPy, float64, of x as one vector."""

  def __init__(self, clients: Sequence[Client], num_classes: int, ridge: float):
    # With a column of ones for the bias, x is one matrix.
    self._inputs = np.concatenate([
        np.pad(np.float64(features), [(0, 0), (0, 1)], constant_values=1)
        for features, _ in clients
    ])
    labels = np.concatenate([labels for _, labels in clients])
    self._targets = np.eye(num_classes)[labels]
    # An example's share in the mean over clients of means over examples.
    sizes = [len(labels) for _, labels in clients]
    self._shares = np.repeat(
        1 / (len(clients) * np.array(sizes)), sizes
    )[:, None]
    self._ridge = ridge
    # The last x that a product was asked for, and the probabilities there.
    self._last: tuple[np.ndarray, np.ndarray] | None = None

  @property
  def size(self) -> int:
    return self._inputs.shape[1] * self._targets.shape[1]

  def split(self, x: np.ndarray) -> collections.OrderedDict:
    matrix = x.reshape(self._inputs.shape[1], -1)
    return from_model((matrix[:-1], matrix[-1]))

  def _log_softmax(self, x):
    scores = self._inputs @ x.reshape(self._inputs.shape[1], -1)
    scores -= scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

  def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
    logs = self._log_softmax(x)
    value = -np.sum(self._shares * self._targets * logs)
    value += self._ridge / 2 * x @ x
    errors = self._shares * (np.exp(logs) - self._targets)
    return value, (self._inputs.T @ errors).ravel() + self._ridge * x

  def hessian_product(self, x: np.ndarray, vector: np.ndarray) -> np.ndarray:
    # Conjugate gradient asks for many products at one x.
    if self._last is None or self._last[0] is not x:
      self._last = x, np.exp(self._log_softmax(x))
    p = self._last[1]
    slopes = self._inputs @ vector.reshape(self._inputs.shape[1], -1)
    slopes = p * (slopes - np.sum(p * slopes, axis=1, keepdims=True))
    product = self._inputs.T @ (self._shares * slopes)
    return product.ravel() + self._ridge * vector


def objective(
    x: Structure, clients: Sequence[Client], num_classes: int, ridge: float
) -> float:
  """mean_i l_i(x) + ridge/2 |x|^2 in float64, to compare with the optimum's."""
  matrix = np.concatenate([x['weight'], np.asarray(x['bias'])[None]])
  function = _Objective(clients, num_classes, ridge)
  return function.value_and_gradient(np.float64(matrix).ravel())[0]


def optimum(
    clients: Sequence[Client], num_classes: int, ridge: float
) -> collections.OrderedDict:
  """x*, with which the distance of a method to the solution is measured.

  Args:
    clients: Each client's features and labels.
    num_classes: K.
    ridge: The weight of |x|^2 / 2.

  Returns:
    x* (float64). L-BFGS comes near, Newton's method does the rest: the gradient
    is below 1e-9, the distance to the solution below that over `ridge`.

  Raises:
    RuntimeError: If it was not found, as for features of very different sizes.
  """
  function = _Objective(clients, num_classes, ridge)
  near = scipy.optimize.minimize(
      function.value_and_gradient,
      np.zeros(function.size),
      method='L-BFGS-B',
      jac=True,
      options=dict(maxiter=2000, maxfun=4000, gtol=1e-6, ftol=1e-15),
  )
  x = near.x
  for _ in range(10):
    gradient = function.value_and_gradient(x)[1]
    norm = np.linalg.norm(gradient)
    if norm < 1e-9:
      return function.split(x)
    operator = scipy.sparse.linalg.LinearOperator(
        (function.size, function.size),
        lambda v, x=x: function.hessian_product(x, v),
        dtype=np.float64,
    )
    # The tolerance is relative to the gradient if no absolute one is given.
    step, _ = scipy.sparse.linalg.cg(operator, gradient, atol=0, maxiter=2000)
    x = x - step
  raise RuntimeError(
      f'The logistic regression was not solved: |gradient| is {norm:.1e}. Scale'
      ' the features to similar sizes.'
  )


def distance(x: Structure, solution: Structure) -> float:
  """|x - x*|, over weight and bias together."""
  squares = [
      np.sum((np.float64(x[name]) - solution[name]) ** 2) for name in solution
  ]
  return float(np.sqrt(sum(squares)))
