"""A small problem of each kind, with arguments to change."""

import tensorflow as tf

import fednest_tff

SPEC = {
    'a': tf.TensorSpec([2], tf.float32),
    'b': tf.TensorSpec([], tf.int64),
}
BATCH = {
    'a': tf.constant([[1.0, 2.0], [3.0, 5.0]]),
    'b': tf.constant([0, 1], tf.int64),
}


def ones(seed):
  del seed
  return tf.ones([2])


def loss(x, y, batch):
  return tf.reduce_mean(tf.linalg.matvec(batch['a'], x * y))


def bilevel(**changes):
  arguments = dict(
      outer_loss=loss,
      inner_loss=loss,
      init_outer=ones,
      init_inner=ones,
      element_spec=SPEC,
  )
  return fednest_tff.bilevel(**(arguments | changes))


def personal(**changes):
  arguments = dict(
      outer_loss=loss,
      inner_loss=loss,
      init_outer=ones,
      init_inner=ones,
      element_spec=SPEC,
  )
  return fednest_tff.personal(**(arguments | changes))


def minimax(**changes):
  arguments = dict(
      loss=loss, init_outer=ones, init_inner=ones, element_spec=SPEC
  )
  return fednest_tff.minimax(**(arguments | changes))


def compositional(**changes):
  arguments = dict(
      outer_loss=lambda y, batch: tf.reduce_sum(y),
      inner_map=lambda x, batch: x * tf.reduce_mean(batch['a'], axis=0),
      init_outer=ones,
      init_inner=ones,
      element_spec=SPEC,
  )
  return fednest_tff.compositional(**(arguments | changes))


def single_level(**changes):
  arguments = dict(
      loss=lambda x, batch: tf.reduce_mean(tf.linalg.matvec(batch['a'], x)),
      init_outer=ones,
      element_spec=SPEC,
  )
  return fednest_tff.single_level(**(arguments | changes))


WITH_INNER = [bilevel, minimax, compositional, personal]
ALL = [*WITH_INNER, single_level]
# Each loss: its builder and its argument.
LOSSES = [
    (bilevel, 'outer_loss'),
    (bilevel, 'inner_loss'),
    (minimax, 'loss'),
    (compositional, 'outer_loss'),
    (single_level, 'loss'),
    (personal, 'outer_loss'),
    (personal, 'inner_loss'),
]
