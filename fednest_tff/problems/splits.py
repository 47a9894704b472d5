"""How a client's examples become its inner and its outer examples."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import tensorflow as tf

from fednest_tff.vector_space import Structure

# From dense examples to (inner examples, outer examples).
Split = Callable[[Structure], tuple[Structure, Structure]]
# What users may give for it.
SplitArgument: TypeAlias = float | Literal['same'] | Split


def same(examples: Structure) -> tuple[Structure, Structure]:
  """The split that uses all examples on both levels."""
  return examples, examples


def by_fraction(fraction: float, seed: int = 0) -> Split:
  """A split in which a fixed random part is inner and the rest is outer.

  The examples are shuffled first, because a client's examples often come sorted
  by label. The shuffle depends on their number and on `seed` alone, so a client
  has the same two parts in every epoch. Neither part of two or more examples is
  empty; a single example serves both levels.

  Args:
    fraction: The inner part, strictly between 0 and 1.
    seed: Of the shuffle.

  Returns:
    A split.
  """
  if not 0.0 < fraction < 1.0:
    raise ValueError(
        '`split` as a fraction must lie strictly between 0 and 1; got'
        f' {fraction}.'
    )

  def split(examples: Structure) -> tuple[Structure, Structure]:
    count = tf.shape(tf.nest.flatten(examples)[0])[0]
    share = tf.round(fraction * tf.cast(count, tf.float32))
    num_inner = tf.clip_by_value(
        tf.cast(share, tf.int32), 1, tf.maximum(count - 1, 1)
    )
    order = tf.argsort(tf.random.stateless_uniform([count], [seed, 0]))
    first_outer = tf.minimum(num_inner, count - 1)

    def take(indices: tf.Tensor) -> Structure:
      return tf.nest.map_structure(lambda t: tf.gather(t, indices), examples)

    return take(order[:num_inner]), take(order[first_outer:])

  return split


def to_split(split: SplitArgument) -> Split:
  """A split from what users may give: a fraction, 'same' or a function."""
  if callable(split):
    return split
  if isinstance(split, str) and split == 'same':
    return same
  if isinstance(split, float):
    return by_fraction(split)
  raise ValueError(
      "`split` must be a fraction, 'same' or a function of the examples; got"
      f' {split!r}.'
  )
