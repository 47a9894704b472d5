"""The paper's learning problems on labelled images (section 4)."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

import fednest_tff


def element_spec(num_features: int) -> tuple[tf.TensorSpec, tf.TensorSpec]:
  """An example: features (float32) and a label (int32)."""
  return tf.TensorSpec([num_features], tf.float32), tf.TensorSpec([], tf.int32)


def _initialize(sizes: Sequence[int], seed: int, salt: int) -> list[dict]:
  """Weights and biases of dense layers, uniform in +-1/sqrt(inputs)."""
  layers = []
  for k, (inputs, outputs) in enumerate(zip(sizes, sizes[1:], strict=False)):
    key = tf.random.experimental.stateless_fold_in([seed, salt], k)
    bound = 1 / np.sqrt(inputs)
    shape = [inputs + 1, outputs]
    both = tf.random.stateless_uniform(shape, key, -bound, bound)
    layers.append({'weight': both[:-1], 'bias': both[-1]})
  return layers


def _dense(layer: dict, inputs: tf.Tensor) -> tf.Tensor:
  return inputs @ layer['weight'] + layer['bias']


def _hidden(layers: list[dict], inputs: tf.Tensor) -> tf.Tensor:
  for layer in layers:
    inputs = tf.nn.relu(_dense(layer, inputs))
  return inputs


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
  return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def hyper_representation(
    sizes: Sequence[int] = (784, 200, 10),
    ridge: float = 0.005,
    split: float = 0.5,
    declare_representation: bool = True,
) -> fednest_tff.Problem:
  """The backbone is x, judged on validation data; the head is y (section 4.1).

  Args:
    sizes: Widths of the layers, inputs first; the last layer is the head.
    ridge: Weight of the squared norm of the head in the inner loss.
    split: The part of a client's examples that trains the head.
    declare_representation: Whether the problem says that the losses need the
      images only through the backbone, which is then evaluated once while x is
      fixed. The numbers are the same.

  Returns:
    The problem.
  """

  def represent(x, batch):
    images, labels = batch
    return _hidden(x, images), labels

  def fit(y, features):
    return tf.reduce_mean(_cross_entropy(_dense(y, features[0]), features[1]))

  def penalty(y):
    squares = [tf.reduce_sum(leaf**2) for leaf in y.values()]
    return ridge * tf.add_n(squares)

  def outer_loss(x, y, features):
    return fit(y, features)

  def inner_loss(x, y, features):
    return fit(y, features) + penalty(y)

  if declare_representation:
    losses, representation = (outer_loss, inner_loss), represent
  else:
    losses = tuple(
        lambda x, y, batch, loss=loss: loss(x, y, represent(x, batch))
        for loss in (outer_loss, inner_loss)
    )
    representation = None
  return fednest_tff.bilevel(
      *losses,
      lambda seed: _initialize(sizes[:-1], seed, 1),
      lambda seed: _initialize(sizes[-2:], seed, 2)[0],
      element_spec(sizes[0]),
      split=split,
      representation=representation,
  )


def loss_tuning(
    sizes: Sequence[int] = (784, 200, 100, 10),
    ridge: float = 1e-3,
    split: float = 0.8,
    class_weights: Sequence[float] | None = None,
) -> fednest_tff.Problem:
  """The VS-loss is x, the whole classifier y (section 4.2).

  The inner loss is the cross-entropy of logits that x scales and shifts class
  by class; the outer one is balanced over the classes.

  Args:
    sizes: Widths of the classifier's layers, inputs first.
    ridge: Weight of the squared norm of the classifier in the inner loss.
    split: The part of a client's examples that trains the classifier.
    class_weights: Weights of the classes in the outer loss; `None` for 1.

  Returns:
    The problem.
  """
  num_classes = sizes[-1]
  # Not a tensor: TFF traces losses into graphs of its own.
  weights = np.float32(
      np.ones(num_classes) if class_weights is None else class_weights
  )

  def logits(y, images):
    return _dense(y[-1], _hidden(y[:-1], images))

  def outer_loss(x, y, batch):
    images, labels = batch
    losses = _cross_entropy(logits(y, images), labels)
    return tf.reduce_mean(tf.gather(weights, labels) * losses)

  def inner_loss(x, y, batch):
    images, labels = batch
    scaled = tf.sigmoid(x['scale']) * logits(y, images) + x['shift']
    squares = [tf.reduce_sum(leaf**2) for leaf in tf.nest.flatten(y)]
    penalty = ridge * tf.add_n(squares)
    return tf.reduce_mean(_cross_entropy(scaled, labels)) + penalty

  return fednest_tff.bilevel(
      outer_loss,
      inner_loss,
      lambda seed: {
          'scale': tf.ones([num_classes]),
          'shift': tf.zeros([num_classes]),
      },
      lambda seed: _initialize(sizes, seed, 3),
      element_spec(sizes[0]),
      split=split,
  )
