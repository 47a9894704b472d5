"""A client's data as the algorithms use them: tensors, a weight, a seed."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.local import sampling
from fednest_tff.problems import Batch, Features, Problem
from fednest_tff.vector_space import Structure

Data = TypeVar('Data')

# More than any client has, and what `Dataset.batch` still accepts.
_ALL = 2**40


class Client(NamedTuple):
  """The data of a client during an epoch.

  Attributes:
    inner: Its inner examples, behind g_i.
    outer: Its outer examples, behind f_i.
    weight: Its weight in every mean over clients; 0 if it lacks examples.
    seed: A number (int64) that differs between clients, to fold into seeds
      from the server.
    num_examples: How many examples it has (int64).
  """

  inner: Batch
  outer: Batch
  weight: tf.Tensor
  seed: tf.Tensor
  num_examples: tf.Tensor


class ClientFeatures(NamedTuple):
  """The features of a client's examples at a fixed x.

  Attributes:
    inner: `Problem.representation` of its inner examples.
    outer: `Problem.representation` of its outer examples.
  """

  inner: Features
  outer: Features


def features_at(
    problem: Problem, x: Structure, client: Client
) -> ClientFeatures:
  """The features of the client's examples at x."""
  return ClientFeatures(
      problem.representation(x, client.inner),
      problem.representation(x, client.outer),
  )


def _pad_if_empty(examples: Structure) -> tuple[Structure, tf.Tensor]:
  """The examples, or one of zeros if there are none; and whether there are any.

  The mean over no examples is NaN, and a weight of 0 does not remove a NaN.
  """
  count = sampling.num_examples(examples)
  missing = tf.maximum(1 - count, 0)

  def pad(t: tf.Tensor) -> tf.Tensor:
    return tf.pad(t, [[0, missing]] + [[0, 0]] * (t.shape.rank - 1))

  return tf.nest.map_structure(pad, examples), count > 0


def from_dataset(
    problem: Problem,
    weighting: Callable[[Structure], tf.Tensor],
    dataset: tf.data.Dataset,
) -> Client:
  """Reads a client's dataset, once per epoch, into dense tensors.

  Args:
    problem: The problem, for its split and its types.
    weighting: From the client's examples to its weight.
    dataset: Single examples of `problem.element_spec`.

  Returns:
    The client.
  """
  # A dataset without elements has no batch: an empty one stands in.
  nothing = tf.data.Dataset.from_tensors(
      tf.nest.map_structure(
          lambda spec: tf.zeros([0, *spec.shape], spec.dtype),
          problem.element_spec,
      )
  )
  batches = dataset.batch(_ALL).concatenate(nothing)
  examples = batches.take(1).get_single_element()
  count = sampling.num_examples(examples)

  rows, _ = _pad_if_empty(examples)
  inner, outer = problem.split(rows)
  inner, has_inner = _pad_if_empty(inner)
  outer, has_outer = _pad_if_empty(outer)
  is_whole = tf.reduce_all([count > 0, has_inner, has_outer])
  weight = vector_space.scalar(weighting(examples), problem.scalar_dtype)
  return Client(
      inner,
      outer,
      weight=tf.where(is_whole, weight, 0),
      seed=sampling.fingerprint(rows),
      num_examples=tf.cast(count, tf.int64),
  )


def seed_of(
    client: Client, seed: tf.Tensor, purpose: tf.Tensor | int
) -> tf.Tensor:
  """The client's seed for one purpose, from the seed that all were sent."""
  return sampling.fold_in(sampling.fold_in(seed, client.seed), purpose)


def sample(
    client: Client,
    examples: Data,
    size: int | None,
    seed: tf.Tensor,
    purpose: tf.Tensor | int,
) -> Data:
  """A sample of a client's examples or features outside the local loops."""
  return sampling.sample(examples, size, seed_of(client, seed, purpose))
