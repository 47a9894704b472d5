"""Minibatches of dense client data, from explicit seeds.

A client's examples are a nested structure of tensors with one leading axis. Its
minibatches are an endless stream of shuffled epochs: minibatch `step` is number
`step mod S` of epoch `step div S`, where an epoch has S = ceil(n / B)
minibatches and shows each example exactly once. The last minibatch of an epoch
is short when B does not divide n, and a client with n < B has one minibatch of
n examples per epoch.
"""

import enum
from typing import Generic, TypeVar

import tensorflow as tf

from fednest_tff.vector_space import Structure

Data = TypeVar('Data')


class Purpose(enum.IntEnum):
  """The purposes of random draws: numbers that are folded into seeds.

  Each call of an algorithm (FedInn, FedOut, ...) has a seed of its own from the
  server, so the purposes of different calls may share numbers.
  """

  # FedInn and LFedInn.
  INNER_GRADIENT = 0  # the sample zeta_i of q
  INNER_STEPS = 1
  # AggITD, with the seed of its FedInn or LFedInn.
  CHAIN_GRADIENT = 2
  CHAIN_PRODUCT = 3
  # FedOut and LFedOut.
  OUTER_GRADIENT = 0  # the sample xi_i of h
  MIXED_PRODUCT = 1  # the sample zeta_i of h
  OUTER_STEPS = 2
  # FedIHGP, with the seed of its FedOut. Its round n has two purposes.
  NEUMANN_STOP = 3  # N'
  FIRST_NEUMANN_ROUND = 4
  # One-round methods.
  CLIENT_STEPS = 0
  # Within local steps along the local hypergradient.
  LOCAL_OUTER_BATCHES = 0
  LOCAL_INNER_BATCHES = 1
  LOCAL_STOP = 2
  # Within local steps on several variables at once.
  SIMULTANEOUS_INNER = 0
  SIMULTANEOUS_OUTER = 1
  # Within local steps of a problem with personal inner solutions.
  PERSONAL_INNER = 0
  PERSONAL_OUTER = 1


def neumann_cohort(index: tf.Tensor | int) -> tf.Tensor | int:
  """The purpose of the draw of S_n, n = `index`."""
  return Purpose.FIRST_NEUMANN_ROUND + 2 * index


def neumann_sample(index: tf.Tensor | int) -> tf.Tensor | int:
  """The purpose of the sample zeta_{i,n}, n = `index`."""
  return Purpose.FIRST_NEUMANN_ROUND + 2 * index + 1


def num_examples(examples: Structure) -> tf.Tensor:
  """n, the common length of the leading axes (int32)."""
  return tf.shape(tf.nest.flatten(examples)[0])[0]


def fold_in(seed: tf.Tensor, data: tf.Tensor | int) -> tf.Tensor:
  """A new int64 seed of shape [2] from a seed and a number."""
  return tf.random.experimental.stateless_fold_in(
      seed, tf.cast(data, tf.int64)
  )


def permutation(shape: tuple[tf.Tensor, ...], seed: tf.Tensor) -> tf.Tensor:
  """Independent uniform permutations along the last axis of `shape`."""
  # argsort of uniforms, because RandomShuffle is neither stateless nor
  # vectorisable.
  return tf.argsort(tf.random.stateless_uniform(shape, seed), axis=-1)


def fingerprint(examples: Structure) -> tf.Tensor:
  """A number (int64) that tells this client's randomness from another's.

  Clients have no names inside a federated computation, and all receive the same
  seed. Their data tell them apart, so a hash of the data is folded into each
  client's seed.
  """

  def digest(t: tf.Tensor) -> tf.Tensor:  # a row of bytes -> a row of 8 bytes
    return tf.fingerprint(tf.reshape(t, [1, -1]))

  rows = [digest(leaf) for leaf in tf.nest.flatten(examples)]
  return tf.bitcast(digest(tf.concat(rows, axis=1)), tf.int64)[0]


class Minibatches(Generic[Data]):
  """The stream of minibatches that the first `num_steps` steps draw from."""

  def __init__(
      self,
      examples: Data,
      batch_size: int | None,
      num_steps: tf.Tensor,
      seed: tf.Tensor,
  ):
    """Draws the permutations of all epochs at once, before the loop.

    Args:
      examples: The client's examples.
      batch_size: B; `None` for all examples in every minibatch.
      num_steps: How many minibatches will be asked for (int32 scalar).
      seed: int64 tensor of shape [2].
    """
    self._examples = examples
    self._batch_size = batch_size
    if batch_size is None:
      return
    count = num_examples(examples)
    self._per_epoch = steps_per_epoch(count, batch_size)
    num_epochs = -(-num_steps // self._per_epoch)
    self._order = permutation((num_epochs, count), seed)

  def __getitem__(self, step: tf.Tensor) -> Data:
    if self._batch_size is None:
      return self._examples
    epoch, position = step // self._per_epoch, step % self._per_epoch
    begin = position * self._batch_size
    indices = self._order[epoch, begin : begin + self._batch_size]
    return tf.nest.map_structure(
        lambda t: tf.gather(t, indices), self._examples
    )


def steps_per_epoch(count: tf.Tensor, batch_size: int | None) -> tf.Tensor:
  """S = ceil(n / B), or 1 when every minibatch has all examples."""
  if batch_size is None:
    return tf.ones_like(count)
  return -(-count // batch_size)


def sample(examples: Data, size: int | None, seed: tf.Tensor) -> Data:
  """`size` examples drawn without replacement; all of them if `size` is None.

  The algorithms draw these samples, xi_i and zeta_i, outside the local loops. A
  client that has fewer examples gives all of them.
  """
  return Minibatches(examples, size, tf.constant(1), seed)[tf.constant(0)]
