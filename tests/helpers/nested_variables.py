"""A problem whose variables are nested structures of several types."""

import collections
import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import fednest_tff


class Head(NamedTuple):
  slope: tf.Tensor
  offset: tf.Tensor


def _predict(slope, offset, batch):
  slope = tf.cast(slope, tf.float64)
  return tf.linalg.matvec(batch['u'], slope) + offset


def _inner_loss(x, y, batch):
  target = _predict(x['a'], x['b'] * x['b'], batch)
  error = _predict(*y, batch) - target
  penalty = tf.reduce_sum(tf.cast(y.slope, tf.float64) ** 2) + y.offset**2
  return tf.reduce_mean(error**2) / 2 + penalty / 20


def _outer_loss(x, y, batch):
  error = _predict(*y, batch) - batch['t']
  own = _predict(x['a'], x['b'], batch)
  return tf.reduce_mean(error**2) / 2 + tf.reduce_mean(own**2) / 10


@functools.cache
def build_problem():
  """x is a dict and y a named tuple, each of a float32 and a float64 leaf."""
  return fednest_tff.bilevel(
      _outer_loss,
      _inner_loss,
      lambda seed: dict(
          b=tf.constant(0.5 + seed, tf.float64), a=tf.ones([3], tf.float32)
      ),
      lambda seed: Head(tf.zeros([3], tf.float32), tf.zeros([], tf.float64)),
      collections.OrderedDict(
          t=tf.TensorSpec([], tf.float64), u=tf.TensorSpec([3], tf.float64)
      ),
  )


def build_cohort():
  """The datasets of three clients, with 4, 5 and 6 examples."""
  rng = np.random.default_rng(0)
  return [
      tf.data.Dataset.from_tensor_slices(
          collections.OrderedDict(
              t=rng.normal(size=n), u=rng.normal(size=(n, 3))
          )
      )
      for n in (4, 5, 6)
  ]
