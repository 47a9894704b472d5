"""Clients made of datasets: their examples, weights, seeds and features."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.local import client as client_lib
from fednest_tff.local import sampling
from tests.helpers.one_client import seed_pair, uniform

SPEC = collections.OrderedDict(
    a=tf.TensorSpec([2], tf.float64),
    b=(tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.string)),
    c=tf.TensorSpec([], tf.bool),
)


def _rows(n, offset=0):
  ids = np.arange(offset, offset + n)
  return collections.OrderedDict(
      a=np.stack([ids, ids + 0.5], axis=1).reshape(n, 2),
      b=(ids.astype(np.int64), np.array([f'{i}' for i in ids], dtype='S4')),
      c=ids % 2 == 1,
  )


def _dataset(n, offset=0):
  return tf.data.Dataset.from_tensor_slices(_rows(n, offset))


def _problem(split='same', dtype=tf.float64):
  def loss(x, y, batch):
    return tf.reduce_mean(tf.cast(batch['a'], dtype)) * tf.reduce_sum(x * y)

  def one(seed):
    del seed
    return tf.ones([1], dtype)

  return fednest_tff.bilevel(loss, loss, one, one, SPEC, split=split)


def _assert_rows(examples, expected):
  tf.nest.assert_same_structure(examples, expected)
  for leaf, value in zip(
      tf.nest.flatten(examples), tf.nest.flatten(expected), strict=True
  ):
    np.testing.assert_array_equal(leaf, value)


@pytest.mark.parametrize('n', [1, 2, 5])
def test_a_client_holds_its_examples_densely(n):
  client = client_lib.from_dataset(_problem(), uniform, _dataset(n))
  _assert_rows(client.inner, _rows(n))
  _assert_rows(client.outer, _rows(n))
  assert client.num_examples.dtype == tf.int64
  assert client.num_examples.numpy() == n
  assert client.weight.numpy() == 1.0
  assert client.seed.dtype == tf.int64
  assert client.seed.shape == []


@pytest.mark.parametrize('n', [1, 2, 7])
def test_a_client_splits_its_examples(n):
  problem = _problem(0.4)
  client = client_lib.from_dataset(problem, uniform, _dataset(n))
  inner, outer = problem.split(tf.nest.map_structure(tf.constant, _rows(n)))
  _assert_rows(client.inner, inner)
  _assert_rows(client.outer, outer)
  assert client.num_examples.numpy() == n
  assert client.weight.numpy() == 1.0


@pytest.mark.parametrize('split', ['same', 0.5])
def test_a_client_without_examples_has_one_of_zeros_and_no_weight(split):
  def weighting(examples):
    count = sampling.num_examples(examples)
    assert count.numpy() == 0
    return 1.0 / tf.cast(count, tf.float64)  # Infinite.

  empty = _dataset(3).take(0)
  client = client_lib.from_dataset(_problem(split), weighting, empty)
  zero = collections.OrderedDict(
      a=np.zeros([1, 2]), b=(np.zeros(1), np.array([b''])), c=np.zeros(1, bool)
  )
  _assert_rows(client.inner, zero)
  _assert_rows(client.outer, zero)
  assert client.weight.numpy() == 0.0
  assert client.num_examples.numpy() == 0


def test_splits_never_see_a_client_without_examples():
  def split(examples):
    # Fails on no rows.
    best = tf.argmax(examples['a'][:, 0])
    part = tf.nest.map_structure(lambda t: tf.gather(t, [best]), examples)
    return part, examples

  empty = _dataset(3).take(0)
  client = client_lib.from_dataset(_problem(split), uniform, empty)
  np.testing.assert_array_equal(client.inner['a'], np.zeros([1, 2]))
  assert client.weight.numpy() == 0.0


@pytest.mark.parametrize('level', ['inner', 'outer'])
def test_a_split_that_gives_a_level_nothing_leaves_no_weight(level):
  def split(examples):
    nothing = tf.nest.map_structure(lambda t: t[:0], examples)
    parts = (nothing, examples)
    return parts if level == 'inner' else parts[::-1]

  client = client_lib.from_dataset(_problem(split), uniform, _dataset(3))
  assert client.weight.numpy() == 0.0
  assert client.num_examples.numpy() == 3
  other = 'outer' if level == 'inner' else 'inner'
  _assert_rows(getattr(client, other), _rows(3))
  padded = getattr(client, level)
  np.testing.assert_array_equal(padded['a'], np.zeros([1, 2]))


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
def test_weights_are_of_the_examples(dtype):
  def weighting(examples):
    _assert_rows(examples, _rows(4))
    return tf.shape(examples['a'])[0] * 3

  problem = _problem(0.5, dtype)
  client = client_lib.from_dataset(problem, weighting, _dataset(4))
  assert client.weight.dtype == dtype
  assert client.weight.numpy() == 12.0


def test_seeds_tell_clients_apart():
  def seed_of(dataset):
    return int(client_lib.from_dataset(_problem(), uniform, dataset).seed)

  seeds = {seed_of(_dataset(n, offset)) for n in (0, 1, 4) for offset in (0, 1)}
  # Without examples, the offset makes no difference.
  assert len(seeds) == 5
  assert seed_of(_dataset(4)) == seed_of(_dataset(4))

  common = seed_pair()
  derived = set()
  for offset in (0, 1):
    client = client_lib.from_dataset(_problem(), uniform, _dataset(4, offset))
    for purpose in (0, 1, tf.constant(2)):
      seed = client_lib.seed_of(client, common, purpose)
      assert seed.dtype == tf.int64
      assert seed.shape == [2]
      derived.add(tuple(seed.numpy()))
  assert len(derived) == 6


@pytest.mark.parametrize('n', [0, 1, 5])
def test_clients_inside_a_tf_function(n):
  problem = _problem(0.4)
  dataset = _dataset(5).take(n)
  traced = tf.function(
      lambda dataset: client_lib.from_dataset(problem, uniform, dataset)
  )(dataset)
  eager = client_lib.from_dataset(problem, uniform, dataset)
  for a, b in zip(
      tf.nest.flatten(traced), tf.nest.flatten(eager), strict=True
  ):
    np.testing.assert_array_equal(a, b)


# Features and samples.


def test_features_are_the_representation_of_both_levels():
  def representation(x, batch):
    return batch['a'] * x[0] + tf.cast(batch['b'][0], tf.float64)[:, None]

  def loss(x, y, features):
    return tf.reduce_mean(features) * tf.reduce_sum(x * y)

  def one(seed):
    del seed
    return tf.ones([1], tf.float64)

  problem = fednest_tff.bilevel(
      loss, loss, one, one, SPEC, split=0.4, representation=representation
  )
  client = client_lib.from_dataset(problem, uniform, _dataset(5))
  x = tf.constant([3.0], tf.float64)
  features = client_lib.features_at(problem, x, client)
  assert isinstance(features, client_lib.ClientFeatures)
  for level, rows in ((features.inner, 2), (features.outer, 3)):
    assert level.shape == [rows, 2]
  for name in ('inner', 'outer'):
    data = getattr(client, name)
    expected = 3 * data['a'].numpy() + data['b'][0].numpy()[:, None]
    np.testing.assert_array_equal(getattr(features, name), expected)


def test_without_a_representation_the_examples_are_the_features():
  problem = _problem(0.4)
  client = client_lib.from_dataset(problem, uniform, _dataset(5))
  features = client_lib.features_at(problem, tf.ones([1]), client)
  assert features.inner is client.inner
  assert features.outer is client.outer


def test_samples_depend_on_the_client_the_seed_and_the_purpose():
  problem = _problem()

  def rows(offset, seed, purpose, size=2):
    client = client_lib.from_dataset(problem, uniform, _dataset(9, offset))
    sample = client_lib.sample(client, client.inner, size, seed, purpose)
    return tuple(sample['b'][0].numpy() - offset)

  seed = seed_pair()
  first = rows(0, seed, 0)
  assert first == rows(0, seed, 0)
  assert len(set(first)) == 2
  # Of 36 pairs, and as many orders: the same one thrice would be a wonder.
  others = [
      rows(offset, key, purpose)
      for offset, key, purpose in (
          (1, seed, 0), (0, seed_pair(7, 9), 0), (0, seed, 1)
      )
  ]  # fmt: skip
  assert len({first, *others}) > 2
  assert rows(0, seed, 0, None) == tuple(range(9))
