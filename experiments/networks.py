"""Dense networks whose layers are plain dictionaries of tensors."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from fednest_tff.vector_space import Structure


def uniform_layer(
    shape: Sequence[int], bound: float, seed: int, salt: int, k: int
) -> dict[str, tf.Tensor]:
  """Layer k of network `salt`: weights and a bias, uniform in +-bound."""
  key = tf.random.experimental.stateless_fold_in([seed, salt], k)
  *inputs, outputs = shape
  size = int(np.prod(inputs))
  both = tf.random.stateless_uniform([size + 1, outputs], key, -bound, bound)
  return {'weight': tf.reshape(both[:-1], shape), 'bias': both[-1]}


def initialize(sizes: Sequence[int], seed: int, salt: int) -> list[dict]:
  """Dense layers of these widths, inputs first, within 1/sqrt(inputs)."""
  return [
      uniform_layer(pair, 1 / np.sqrt(pair[0]), seed, salt, k)
      for k, pair in enumerate(zip(sizes, sizes[1:], strict=False))
  ]


def dense(layer: dict, inputs: tf.Tensor) -> tf.Tensor:
  """An affine layer."""
  return tf.nn.bias_add(inputs @ layer['weight'], layer['bias'])


def hidden(layers: list[dict], inputs: tf.Tensor) -> tf.Tensor:
  """Dense layers, each with ReLU."""
  for layer in layers:
    inputs = tf.nn.relu(dense(layer, inputs))
  return inputs


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
  """The cross-entropy of each example."""
  return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def penalty(ridge: float, variable: Structure) -> tf.Tensor:
  """`ridge` times the squared norm."""
  squares = [tf.reduce_sum(leaf**2) for leaf in tf.nest.flatten(variable)]
  return ridge * tf.add_n(squares)


def logits(layers: list[dict], images: tf.Tensor) -> tf.Tensor:
  """Dense layers, the last one without ReLU."""
  return dense(layers[-1], hidden(layers[:-1], images))
