"""The TFF types of a problem, and how a dataset becomes a `Client`."""

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import options
from fednest_tff.federated import tracing
from fednest_tff.local import client as client_lib
from fednest_tff.local import sampling
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure

# From a client's examples to its weight.
Weighting = Callable[[Structure], tf.Tensor]
# What users may give as `client_weighting`.
ClientWeighting: TypeAlias = str | tff.learning.ClientWeighting | Weighting


def _is_uniform(client_weighting: ClientWeighting) -> bool:
  uniform = tff.learning.ClientWeighting.UNIFORM
  return client_weighting in ('uniform', uniform)


def _to_weighting(client_weighting: ClientWeighting) -> Weighting:
  if _is_uniform(client_weighting):
    return lambda examples: tf.constant(1.0)
  num_examples = tff.learning.ClientWeighting.NUM_EXAMPLES
  if client_weighting in ('num_examples', num_examples):
    return sampling.num_examples
  if callable(client_weighting):
    options.check_function('client_weighting', client_weighting, 'examples')
    return client_weighting
  raise ValueError(
      "`client_weighting` must be 'uniform', 'num_examples', a"
      ' `tff.learning.ClientWeighting` or a function of the examples; got'
      f' {client_weighting!r}.'
  )


class ProblemTypes:
  """The TFF types of a problem, and how a dataset becomes a `Client`.

  Attributes:
    problem: The problem.
    outer: Type of x, and of everything that lives in its space.
    inner: Type of y, likewise.
    scalar: Type of step sizes, weights and losses.
    seed: int64[2].
    dataset: A sequence of single examples.
    client: Type of a `Client`.
    features: Type of a client's `ClientFeatures`.
    read_client: `(dataset -> client)`.
    uniform: Whether all clients have the same weight.
  """

  def __init__(
      self,
      problem: Problem,
      client_weighting: ClientWeighting = 'uniform',
      inner_is_personal: bool = False,
  ):
    """Traces the computation that reads a client's dataset.

    Args:
      problem: The problem.
      client_weighting: 'uniform', 'num_examples', a
        `tff.learning.ClientWeighting` or a function of a client's examples.
      inner_is_personal: Whether the method is for problems in which each
        client has its own inner solution; in other problems clients share one.
    """
    if not isinstance(problem, Problem):
      raise ValueError(
          '`problem` must come from bilevel, minimax, compositional,'
          f' single_level or personal; got {problem!r}.'
      )
    if problem.inner_is_personal and not inner_is_personal:
      raise ValueError(
          '`problem` is personal: each client has its own inner solution, which'
          " only method='personal' (build_personal) finds."
      )
    if inner_is_personal and not problem.inner_is_personal:
      raise ValueError(
          f"`problem` is {problem.kind}: method='personal' is for problems from"
          ' fednest_tff.personal.'
      )
    self.problem = problem
    self.uniform = _is_uniform(client_weighting)
    to_type = tff.types.tensorflow_to_type
    self.outer: tff.Type = to_type(problem.outer_spec)
    self.inner: tff.Type = to_type(problem.inner_spec)
    self.scalar: tff.Type = to_type(tf.TensorSpec([], problem.scalar_dtype))
    self.seed: tff.Type = to_type(tf.TensorSpec([2], tf.int64))
    self.dataset = tff.SequenceType(to_type(problem.element_spec))
    weighting = _to_weighting(client_weighting)

    @self.computation(self.dataset)
    def read_client(dataset: tf.data.Dataset) -> client_lib.Client:
      return client_lib.from_dataset(problem, weighting, dataset)

    self.read_client = read_client
    self.client: tff.Type = read_client.type_signature.result

    @self.computation(self.outer, self.client)
    def represent(
        x: Structure, client: client_lib.Client
    ) -> client_lib.ClientFeatures:
      return client_lib.features_at(problem, x, client)

    self._represent = represent
    self.features: tff.Type = represent.type_signature.result

  def computation(
      self, *parameter_types: Any
  ) -> Callable[[Callable[..., Any]], tff.Computation]:
    """Decorates a function of tensors, as `tff.tensorflow.computation` does.

    What was traced for the same problem before is used again; see `tracing`.
    """
    return tracing.computation(self.problem, *parameter_types)

  def features_at_clients(self, x: tff.Value, clients: tff.Value) -> tff.Value:
    """The clients' features at x, both at the clients."""
    if self.problem.has_representation:
      return tff.federated_map(self._represent, (x, clients))
    return tff.federated_zip(
        client_lib.ClientFeatures(clients.inner, clients.outer)
    )


def at_server(value_type: tff.Type) -> tff.FederatedType:
  """`value_type@SERVER`."""
  return tff.FederatedType(value_type, tff.SERVER)


def at_clients(value_type: tff.Type) -> tff.FederatedType:
  """`{value_type}@CLIENTS`."""
  return tff.FederatedType(value_type, tff.CLIENTS)
