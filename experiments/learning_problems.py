"""The paper's learning problems on labelled images (sections 4.1 and 4.2).

Each builder returns the problem and how to predict with what it has learnt. An
example is a flat image (float32) and its label (int32).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from experiments import networks
import fednest_tff
from fednest_tff.vector_space import Structure

# Enough for speed, and little memory for a network with convolutions.
_PREDICTION_BATCH = 1000


class LearningProblem(NamedTuple):
  """A problem, and the classifier that its variables make up.

  Attributes:
    problem: The problem.
    predict: `(weights, images) -> logits`, where `weights` has x as `outer` and
      y as `inner`, as `get_model_weights` returns them, and the images may be
      as many as memory holds.
  """

  problem: fednest_tff.Problem
  predict: Callable[[fednest_tff.NestedWeights, np.ndarray], tf.Tensor]


def element_spec(num_features: int) -> tuple[tf.TensorSpec, tf.TensorSpec]:
  """An example: features (float32) and a label (int32)."""
  return tf.TensorSpec([num_features], tf.float32), tf.TensorSpec([], tf.int32)


def to_datasets(
    clients: Sequence[tuple[np.ndarray, np.ndarray]],
) -> list[tf.data.Dataset]:
  """One dataset of single examples per client, from (features, labels)."""
  return [
      tf.data.Dataset.from_tensor_slices((features, np.int32(labels)))
      for features, labels in clients
  ]


def _predictor(logits):
  """`predict` from `logits(x, y, images)`, part by part."""

  def predict(weights, images):
    x, y = weights.outer, weights.inner
    if images.shape[0] is None:  # A minibatch, while a graph is traced.
      return logits(x, y, images)
    parts = [
        logits(x, y, images[k : k + _PREDICTION_BATCH])
        for k in range(0, max(len(images), 1), _PREDICTION_BATCH)
    ]
    return tf.concat(parts, axis=0)

  return predict


class Classifier(NamedTuple):
  """A dense network whose layers are one variable.

  Attributes:
    initialize: From a seed to the layers.
    losses: (layers, images, labels) -> the cross-entropy of each example.
    penalty: (ridge, layers) -> ridge times their squared norm.
    predict_inner: `LearningProblem.predict` if the layers are y.
    predict_outer: The same if they are x.
  """

  initialize: Callable[[int], list[dict]]
  losses: Callable[[list[dict], tf.Tensor, tf.Tensor], tf.Tensor]
  penalty: Callable[[float, Structure], tf.Tensor]
  predict_inner: Callable[..., tf.Tensor]
  predict_outer: Callable[..., tf.Tensor]


def classifier(sizes: Sequence[int]) -> Classifier:
  """A classifier with layers of these widths, inputs first."""
  return Classifier(
      lambda seed: networks.initialize(sizes, seed, 3),
      lambda y, images, labels: networks.cross_entropy(
          networks.logits(y, images), labels
      ),
      networks.penalty,
      _predictor(lambda x, y, images: networks.logits(y, images)),
      _predictor(lambda x, y, images: networks.logits(x, images)),
  )


def _with_head(
    backbone: Callable[..., tf.Tensor],
    init_outer: Callable[[int], list[dict]],
    num_pixels: int,
    head: tuple[int, int],
    ridge: float,
    split: float,
    declare_representation: bool,
    personal: bool,
) -> LearningProblem:
  """x is what `backbone(x, images)` takes, y a dense layer of sizes `head`."""

  def represent(x, batch):
    images, labels = batch
    return backbone(x, images), labels

  def outer_loss(x, y, features):
    inputs, labels = features
    losses = networks.cross_entropy(networks.dense(y, inputs), labels)
    return tf.reduce_mean(losses)

  def inner_loss(x, y, features):
    return outer_loss(x, y, features) + networks.penalty(ridge, y)

  def of_batch(loss):
    return lambda x, y, batch: loss(x, y, represent(x, batch))

  build = fednest_tff.personal if personal else fednest_tff.bilevel
  problem = build(
      outer_loss if declare_representation else of_batch(outer_loss),
      inner_loss if declare_representation else of_batch(inner_loss),
      init_outer,
      lambda seed: networks.initialize(head, seed, 2)[0],
      element_spec(num_pixels),
      split=split,
      representation=represent if declare_representation else None,
  )
  return LearningProblem(
      problem,
      _predictor(lambda x, y, images: networks.dense(y, backbone(x, images))),
  )


def hyper_representation(
    sizes: Sequence[int] = (784, 200, 10),
    ridge: float = 0.005,
    split: float = 0.5,
    declare_representation: bool = True,
    personal: bool = False,
) -> LearningProblem:
  """The backbone is x, judged on validation data; the head is y (section 4.1).

  Args:
    sizes: Widths of the layers, inputs first; the last layer is the head.
    ridge: Weight of the squared norm of the head in the inner loss.
    split: The part of a client's examples that trains the head.
    declare_representation: Whether the problem says that the losses need the
      images only through the backbone, which is then evaluated once while x is
      fixed. The numbers are the same.
    personal: Whether each client has its own head, in place of one for all.

  Returns:
    The problem and its classifier.
  """
  return _with_head(
      networks.hidden,
      lambda seed: networks.initialize(sizes[:-1], seed, 1),
      sizes[0],
      (sizes[-2], sizes[-1]),
      ridge,
      split,
      declare_representation,
      personal,
  )


def convolutional_representation(
    image_shape: Sequence[int] = (28, 28),
    num_classes: int = 10,
    channels: Sequence[int] = (16, 32),
    features: int = 64,
    ridge: float = 0.005,
    split: float = 0.5,
    declare_representation: bool = True,
    personal: bool = False,
) -> LearningProblem:
  """`hyper_representation` with a small convolutional network as x.

  Each convolution is 3x3 with ReLU and 2x2 max-pooling; a dense layer of
  `features` units with ReLU follows.

  Args:
    image_shape: Height and width of an image, and its channels unless 1.
    num_classes: Of the head.
    channels: Output channels of the convolutions.
    features: What the head takes.
    ridge: As in `hyper_representation`.
    split: As in `hyper_representation`.
    declare_representation: As in `hyper_representation`.
    personal: As in `hyper_representation`.

  Returns:
    The problem and its classifier.
  """
  height, width, depth = (*image_shape, 1)[:3]
  depths = [depth, *channels]
  # Pooling rounds up.
  pooled = [-(-side // 2 ** len(channels)) for side in (height, width)]

  size = pooled[0] * pooled[1] * depths[-1]
  shapes: list[tuple[int, ...]] = [
      (3, 3, *pair) for pair in zip(depths, channels, strict=False)
  ]
  shapes.append((size, features))

  def init_outer(seed):
    # More rectified layers than the paper's network has: these bounds keep the
    # variance from layer to layer (He et al., 2015), or learning starts slowly.
    return [
        networks.uniform_layer(
            shape, np.sqrt(6 / np.prod(shape[:-1])), seed, 1, k
        )
        for k, shape in enumerate(shapes)
    ]

  def backbone(x, images):
    maps = tf.reshape(images, [-1, height, width, depth])
    for layer in x[:-1]:
      maps = tf.nn.conv2d(maps, layer['weight'], 1, 'SAME') + layer['bias']
      maps = tf.nn.max_pool2d(tf.nn.relu(maps), 2, 2, 'SAME')
    flat = tf.reshape(maps, [-1, np.prod(maps.shape[1:])])
    return networks.hidden(x[-1:], flat)

  return _with_head(
      backbone,
      init_outer,
      height * width * depth,
      (features, num_classes),
      ridge,
      split,
      declare_representation,
      personal,
  )


def balanced_class_weights(
    labels: Sequence[np.ndarray], num_classes: int
) -> np.ndarray:
  """Weights with which the mean over clients gives every class one vote.

  Args:
    labels: Each client's labels. Clients count alike, however many they have.
    num_classes: K.

  Returns:
    1 / (K share) for each class, and 0 for those that no client has.
  """
  shares = np.mean(
      [np.bincount(one, minlength=num_classes) / len(one) for one in labels],
      axis=0,
  )
  return np.divide(
      1 / num_classes, shares, out=np.zeros(num_classes), where=shares > 0
  )


def loss_tuning(
    sizes: Sequence[int] = (784, 200, 100, 10),
    ridge: float = 1e-3,
    split: float = 0.8,
    class_weights: np.ndarray | Sequence[float] | None = None,
    tune_class_weights: bool = False,
) -> LearningProblem:
  """The VS-loss is x, the whole classifier y (section 4.2).

  The inner loss of an example of class c with logits o is the VS-loss,
  -omega_c log softmax(Delta * o + iota)_c, where x holds Delta ('scale'), iota
  ('shift') and, if asked for, omega ('weight'), an entry per class; the outer
  one is the cross-entropy, balanced over the classes.

  Args:
    sizes: Widths of the classifier's layers, inputs first.
    ridge: Weight of the squared norm of the classifier in the inner loss.
    split: The part of a client's examples that trains the classifier.
    class_weights: Weights of the classes in the outer loss, such as those of
      `balanced_class_weights`; `None` for 1.
    tune_class_weights: Whether x has omega, too.

  Returns:
    The problem and its classifier, which uses plain logits.
  """
  num_classes = sizes[-1]
  # Not a tensor: TFF traces losses into graphs of its own.
  weights = np.ones(num_classes, np.float32)
  if class_weights is not None:
    weights = np.asarray(class_weights, np.float32)

  def vs_loss(x, outputs, labels):
    # x = 0 is the plain cross-entropy (Delta = 1, iota = 0, omega = 1), from
    # which tuning starts and which a run without tuning keeps. Delta stays
    # below 2, because the inner Hessian grows with its square and l has to
    # bound that; omega is positive without a bound, for the rarest classes.
    scaled = 2 * tf.sigmoid(x['scale']) * outputs + x['shift']
    losses = networks.cross_entropy(scaled, labels)
    if tune_class_weights:
      omega = tf.nn.softplus(x['weight']) / np.float32(np.log(2))
      losses *= tf.gather(omega, labels)
    return tf.reduce_mean(losses)

  def outer_loss(x, y, batch):
    images, labels = batch
    losses = networks.cross_entropy(networks.logits(y, images), labels)
    return tf.reduce_mean(tf.gather(weights, labels) * losses)

  def inner_loss(x, y, batch):
    images, labels = batch
    tuned = vs_loss(x, networks.logits(y, images), labels)
    return tuned + networks.penalty(ridge, y)

  names = ['scale', 'shift'] + ['weight'] * tune_class_weights
  problem = fednest_tff.bilevel(
      outer_loss,
      inner_loss,
      lambda seed: {name: tf.zeros([num_classes]) for name in names},
      lambda seed: networks.initialize(sizes, seed, 3),
      element_spec(sizes[0]),
      split=split,
  )
  return LearningProblem(
      problem, _predictor(lambda x, y, images: networks.logits(y, images))
  )


def accuracy(logits: tf.Tensor, labels: np.ndarray) -> float:
  """The share of examples whose largest logit is that of their label."""
  return float(np.mean(np.argmax(logits, axis=-1) == np.asarray(labels)))


def balanced_accuracy(
    logits: tf.Tensor, labels: np.ndarray, num_classes: int
) -> float:
  """The mean over the classes, of those that occur, of their accuracy."""
  hits = np.argmax(logits, axis=-1) == np.asarray(labels)
  counts = np.bincount(labels, minlength=num_classes)
  right = np.bincount(labels, weights=hits, minlength=num_classes)
  return float(np.mean(right[counts > 0] / counts[counts > 0]))


def mean_loss(logits: tf.Tensor, labels: np.ndarray) -> float:
  """The mean cross-entropy."""
  return float(tf.reduce_mean(networks.cross_entropy(logits, labels)))
