"""A small network as a nested problem, its representation declared or not."""

import collections
import functools

import numpy as np
import tensorflow as tf

import fednest_tff

INPUT, HIDDEN, CLASSES = 3, 4, 3
SPEC = collections.OrderedDict(
    image=tf.TensorSpec([INPUT], tf.float64), label=tf.TensorSpec([], tf.int64)
)


def _normal(shape, seed, index):
  return tf.random.stateless_normal(shape, [seed, index], dtype=tf.float64)


def body(seed):
  return {
      'w': _normal([INPUT, HIDDEN], seed, 0), 'b': _normal([HIDDEN], seed, 1)
  }  # fmt: skip


def head(seed):
  return _normal([HIDDEN, CLASSES], seed, 2), _normal([CLASSES], seed, 3)


def features(x, batch):
  hidden = tf.tanh(batch['image'] @ x['w'] + x['b'])
  return {'hidden': hidden, 'label': batch['label']}


def head_loss(y, features):
  logits = features['hidden'] @ y[0] + y[1]
  return tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(features['label'], logits)
  )


def ridge(y):
  return 0.1 * sum(tf.reduce_sum(leaf**2) for leaf in y)


@functools.cache
def build_problem(kind, declared):
  """The same problem, with its representation declared or inside the losses."""
  def outer(x, y, features):
    return head_loss(y, features) + 0.01 * tf.reduce_sum(x['w'] ** 2)

  def inner(x, y, features):
    # Also depends on x beside the features.
    strength = 1 + tf.reduce_sum(x['b'] ** 2)
    return head_loss(y, features) + strength * ridge(y)

  def through(loss):
    if declared:
      return loss
    return lambda x, y, batch: loss(x, y, features(x, batch))

  options = {'representation': features} if declared else {}
  if kind == 'minimax':
    return fednest_tff.minimax(
        through(lambda x, y, features: outer(x, y, features) - ridge(y)),
        body, head, SPEC, **options,
    )  # fmt: skip
  build = fednest_tff.personal if kind == 'personal' else fednest_tff.bilevel
  return build(through(outer), through(inner), body, head, SPEC, **options)


def make_dataset(n=9, seed=7):
  rng = np.random.default_rng(seed)
  return tf.data.Dataset.from_tensor_slices(
      collections.OrderedDict(
          image=rng.normal(size=(n, INPUT)), label=rng.integers(CLASSES, size=n)
      )
  )
