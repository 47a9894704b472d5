"""A problem as TFF sees it: its types, its clients and its state."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.local import client as client_lib
from fednest_tff.local import sampling
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure

Schedule = Callable[[tf.Tensor], tf.Tensor]
Weighting = Callable[[Structure], tf.Tensor]


class NestedState(NamedTuple):
  """State of a nested process, on the server.

  Attributes:
    outer: x.
    inner: y; empty for a single-level problem.
    epoch: How many times `next` has run (int32); schedules are functions of it.
    seed: int64[2]. With `epoch` it determines every random draw, so a restored
      state goes on exactly as the original would have.
    smoothness: l, the bound on the inner Hessian's eigenvalues. It is state,
      not a constant, so that a new estimate needs no new process.
    aggregators: States of the aggregation processes, by name.
    optimizer: State of the server's outer optimizer.
  """

  outer: Structure
  inner: Structure
  epoch: Any
  seed: Any
  smoothness: Any
  aggregators: Any
  optimizer: Any


def to_schedule(
    name: str, value: float | Schedule, dtype: tf.DType
) -> Schedule:
  """A function of the epoch from a constant or a function of the epoch."""
  if callable(value):
    return lambda epoch: vector_space.scalar(value(epoch), dtype)
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    raise ValueError(
        f'`{name}` must be a number or a function of the epoch; got {value!r}.'
    )
  if not value > 0 or value == float('inf'):
    raise ValueError(f'`{name}` must be positive and finite; got {value}.')
  return lambda epoch: tf.constant(value, dtype)


def check_smoothness(value: Any) -> None:
  """Refuses an l that is no positive number."""
  if callable(value) or value is None:
    raise ValueError(f'`smoothness` must be a positive number; got {value!r}.')
  to_schedule('smoothness', value, tf.float64)


def is_uniform(client_weighting: Any) -> bool:
  """Whether every client has the same weight."""
  uniform = tff.learning.ClientWeighting.UNIFORM
  return client_weighting in ('uniform', uniform)


def to_weighting(client_weighting: Any) -> Weighting:
  """From a client's examples to its weight; see `build_fed_nest`."""
  if is_uniform(client_weighting):
    return lambda examples: tf.constant(1.0)
  num_examples = tff.learning.ClientWeighting.NUM_EXAMPLES
  if client_weighting in ('num_examples', num_examples):
    return sampling.num_examples
  if callable(client_weighting):
    return client_weighting
  raise ValueError(
      "`client_weighting` must be 'uniform', 'num_examples', a"
      ' `tff.learning.ClientWeighting` or a function of the examples; got'
      f' {client_weighting!r}.'
  )


def at_server(value_type) -> tff.FederatedType:
  """`value_type@SERVER`."""
  return tff.FederatedType(value_type, tff.SERVER)


def at_clients(value_type) -> tff.FederatedType:
  """`{value_type}@CLIENTS`."""
  return tff.FederatedType(value_type, tff.CLIENTS)


class Federation:
  """The TFF types of a problem, and how a dataset becomes a `Client`.

  Attributes:
    problem: The problem.
    outer_type: Type of x, and of everything that lives in its space.
    inner_type: Type of y, likewise.
    scalar_type: Type of step sizes, weights and losses.
    seed_type: int64[2].
    dataset_type: A sequence of single examples.
    client_type: Type of a `Client`.
    features_type: Type of a client's `Features`.
    read_client: `(dataset -> client)`.
    uniform: Whether all clients have the same weight.
    gradient_batch_size: Size of the samples xi_i, zeta_i and zeta_{i,n} outside
      the local loops; `None` for all of a client's examples.
  """

  def __init__(
      self,
      problem: Problem,
      client_weighting: Any = 'uniform',
      gradient_batch_size: int | None = None,
  ):
    if not isinstance(problem, Problem):
      raise ValueError(
          '`problem` must come from bilevel, minimax, compositional or'
          f' single_level; got {problem!r}.'
      )
    if gradient_batch_size is not None and (
        isinstance(gradient_batch_size, bool)
        or not isinstance(gradient_batch_size, int)
        or gradient_batch_size < 1
    ):
      raise ValueError(
          '`gradient_batch_size` must be a positive integer; got'
          f' {gradient_batch_size!r}.'
      )
    self.problem = problem
    self.uniform = is_uniform(client_weighting)
    self.gradient_batch_size = gradient_batch_size
    to_type = tff.types.tensorflow_to_type
    self.outer_type = to_type(problem.outer_spec)
    self.inner_type = to_type(problem.inner_spec)
    self.scalar_type = to_type(tf.TensorSpec([], problem.scalar_dtype))
    self.seed_type = to_type(tf.TensorSpec([2], tf.int64))
    self.dataset_type = tff.SequenceType(to_type(problem.element_spec))
    weighting = to_weighting(client_weighting)

    @tff.tensorflow.computation(self.dataset_type)
    def read_client(dataset):
      return client_lib.from_dataset(problem, weighting, dataset)

    self.read_client = read_client
    self.client_type = read_client.type_signature.result

    @tff.tensorflow.computation(self.outer_type, self.client_type)
    def represent(x, client):
      return client_lib.Features(
          problem.representation(x, client.inner),
          problem.representation(x, client.outer),
      )

    self._represent = represent
    self.features_type = represent.type_signature.result

  def features(self, x: tff.Value, clients: tff.Value) -> tff.Value:
    """The clients' features at x, both at the clients."""
    if self.problem.has_representation:
      return tff.federated_map(self._represent, (x, clients))
    return tff.federated_zip(
        client_lib.Features(clients.inner, clients.outer)
    )

  def sample(
      self, examples: Structure, client: client_lib.Client, seed, purpose
  ) -> Structure:
    """A sample of the client's `examples` outside the local loops."""
    return sampling.sample(
        examples,
        self.gradient_batch_size,
        client_lib.seed_of(client, seed, purpose),
    )


def count_clients(clients: tff.Value) -> tff.Value:
  """Numbers of clients and examples; it rides along with the first round."""

  @tff.tensorflow.computation(clients.type_signature.member)
  def count(client):
    return collections.OrderedDict(
        num_clients=tf.constant(1, tf.int64), num_examples=client.num_examples
    )

  return tff.federated_sum(tff.federated_map(count, clients))
