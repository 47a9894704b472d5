"""FedIHGP: the federated inverse-Hessian-gradient product (Algorithm 3).

The server approximates the solution p of H p = b, where H = mean_i grad^2_y g_i
and b = mean_i grad_y f_i at (x, y), from products with H:

  gradient   b = mean over S_0 of grad_y f_i                       lines 3-6
  product    H v = mean over S_n of grad^2_y g_i v, n = 1, 2, ...  lines 11-16

Clients send H_i v rather than the paper's (I - H_i/l) v, whose mean is the same
v - H v / l: so a client need not know l, and one product round serves the
paper's randomly stopped product, the truncated Neumann sum, conjugate gradient
(`local.inverse_hessian`) and the power iteration that estimates l.
"""

import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import aggregation, rounds
from fednest_tff.algorithms.federation import Federation
from fednest_tff.local import client as client_lib
from fednest_tff.local import (
    inner_level,
    inverse_hessian,
    outer_level,
    sampling,
)
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure

_NOT_FINITE = (
    'FedIHGP: p, the inverse-Hessian-gradient product (Algorithm 3), is not'
    ' finite. Try a larger smoothness l (build_power_iteration estimates it),'
    ' fewer neumann_terms or a smaller inner_learning_rate'
)

# What a call's seed is used for; FedOut has the purposes 0 to 2.
_STOP, _FIRST_ROUND = 3, 4
# The weight of a client outside S_n relative to one inside: nothing next to 1
# even in float64, and all there is if S_n is empty.
_OUTSIDE = 1e-20


class Product(NamedTuple):
  """What clients need for a Hessian-vector product.

  Attributes:
    outer: x.
    inner: y.
    vector: v.
    index: Which round of the call this is (int32), 0 for the gradient. Clients
      answer with zeros, without computing, when it is negative.
    seed: The call's seed.
  """

  outer: Structure
  inner: Structure
  vector: Structure
  index: tf.Tensor
  seed: tf.Tensor


class FedIHGP:
  """FedIHGP inside a `tff.federated_computation`.

  Attributes:
    solver: How p is made from b and products with H.
    aggregations: How b and H v are averaged, by name.
    rounds: Both rounds as computations of their own, by name.
    server: The solver's steps, by name: 'ihgp_start', `(<b, l, seed> -> solver
      state)`, and 'ihgp_advance', `(<solver state, H v, l> -> solver state)`.
  """

  def __init__(
      self,
      federated: Federation,
      solver: inverse_hessian.Solver,
      participation: float = 1.0,
      aggregator: aggregation.Factory | None = None,
  ):
    """Traces what clients and server do.

    Args:
      federated: The problem and its types.
      solver: How p is made from b and products with H.
      participation: The probability that a client of the cohort is in S_n,
        drawn anew in each round. An empty S_n means the whole cohort.
      aggregator: Factory for b and H v; `None` for the plain mean.
    """
    if not 0.0 < participation <= 1.0:
      raise ValueError(
          f'`participation` must be in (0, 1]; got {participation!r}.'
      )
    problem = federated.problem
    inner, scalar = federated.inner_type, federated.scalar_type
    self.solver = solver

    point_type = tff.to_type(
        rounds.Point(federated.outer_type, inner, federated.seed_type)
    )
    product_type = tff.to_type(
        Product(
            federated.outer_type,
            inner,
            inner,
            tff.TensorType(np.int32),
            federated.seed_type,
        )
    )

    def weight(client, seed, index):
      if participation == 1.0:
        return client.weight
      own = client_lib.seed_of(client, seed, _FIRST_ROUND + 2 * index)
      is_in = tf.random.stateless_uniform([], own) < participation
      return client.weight * tf.where(
          is_in, tf.ones_like(client.weight), _OUTSIDE
      )

    def sample(examples, client, seed, index):
      purpose = _FIRST_ROUND + 2 * index + 1
      return federated.sample(examples, client, seed, purpose)

    def gradient(message, features, client):
      part = sample(features.outer, client, message.seed, 0)
      return outer_level.gradient_in_inner(
          problem, message.outer, message.inner, part
      )

    def product(message, features, client):
      def multiply():
        part = sample(features.inner, client, message.seed, message.index)
        return inner_level.hessian_product(
            problem, message.outer, message.inner, message.vector, part
        )

      if solver.name != 'stochastic':  # Every product is wanted.
        return multiply()
      return tf.cond(
          message.index >= 0,
          multiply,
          lambda: tf.nest.map_structure(tf.zeros_like, message.vector),
      )

    client_types = federated.features_type, federated.client_type

    @tff.tensorflow.computation(point_type, *client_types)
    def client_gradient(point, features, client):
      return gradient(point, features, client), weight(client, point.seed, 0)

    @tff.tensorflow.computation(product_type, *client_types)
    def client_product(message, features, client):
      return (
          product(message, features, client),
          weight(client, message.seed, message.index),
      )

    @functools.cache  # Traced only if asked for: second derivatives take long.
    def client_step():
      @tff.tensorflow.computation(product_type, *client_types)
      def step(message, features, client):
        answer = tf.cond(
            tf.equal(message.index, 0),
            lambda: gradient(message, features, client),
            lambda: product(message, features, client),
        )
        return answer, weight(client, message.seed, message.index)

      return step

    @tff.tensorflow.computation(inner, scalar, federated.seed_type)
    def server_start(b, smoothness, seed):
      return _checked(
          solver.start(b, smoothness, sampling.fold_in(seed, _STOP))
      )

    self.solver_type = server_start.type_signature.result

    @tff.tensorflow.computation(self.solver_type, inner, scalar)
    def server_advance(state, product, smoothness):
      return _checked(solver.advance(state, product, smoothness))

    self._client_gradient = client_gradient
    self._client_product = client_product
    self._client_step = client_step
    self.server_start = server_start
    self.server_advance = server_advance
    self.server = dict(ihgp_start=server_start, ihgp_advance=server_advance)
    uniform = federated.uniform and participation == 1.0
    self.aggregations = {
        'ihgp': aggregation.Aggregation(
            'gradient_aggregator', aggregator, inner, scalar, uniform
        )
    }
    self.rounds = {
        'ihgp_gradient': rounds.build_round(
            federated,
            self.aggregations['ihgp'],
            point_type,
            lambda state, message, there, clients: self.gradient_round(
                state, there, federated.features(there.outer, clients), clients
            ),
        ),
        'ihgp_product': rounds.build_round(
            federated,
            self.aggregations['ihgp'],
            product_type,
            lambda state, message, there, clients: self.product_round(
                state, there, federated.features(there.outer, clients), clients
            ),
        ),
    }

  def _mean(self, client_fn, state, message, features, clients):
    answers = tff.federated_map(client_fn, (message, features, clients))
    mean = self.aggregations['ihgp'](state, answers[0], answers[1])
    return rounds.RoundOutput(mean.state, mean.value, {})

  def gradient_round(
      self, state, point, features, clients
  ) -> rounds.RoundOutput:
    """b (lines 3-6, without the factor N/l)."""
    return self._mean(self._client_gradient, state, point, features, clients)

  def product_round(
      self, state, message, features, clients
  ) -> rounds.RoundOutput:
    """H v (lines 11-16)."""
    return self._mean(self._client_product, state, message, features, clients)

  def step_round(
      self, state, message, features, clients
  ) -> rounds.RoundOutput:
    """b if `message.index` is 0, else H v."""
    return self._mean(self._client_step(), state, message, features, clients)

  def __call__(self, state, x, y, smoothness, seed, features, clients):
    """p after at most N rounds; those beyond N' leave it as it is.

    Args:
      state: States of `aggregations` by name, at the server.
      x: The outer variable, at the clients already.
      y: The inner variable, at the clients already.
      smoothness: l, at the server.
      seed: The call's seed, at the server and at the clients.
      features: The cohort's features at x.
      clients: The cohort.

    Returns:
      A `RoundOutput` whose value is p.
    """
    seed, seed_there = seed
    output = self.gradient_round(
        state['ihgp'], rounds.Point(x, y, seed_there), features, clients
    )
    solution = tff.federated_map(
        self.server_start, (output.value, smoothness, seed)
    )
    for n in range(1, self.solver.num_terms):
      asked = tff.federated_broadcast(
          tff.federated_map(self._build_ask(n), solution)
      )
      output = self.product_round(
          output.state,
          Product(x, y, asked[0], asked[1], seed_there),
          features,
          clients,
      )
      solution = tff.federated_map(
          self.server_advance, (solution, output.value, smoothness)
      )
    return rounds.RoundOutput(dict(ihgp=output.state), solution.p, {})


  def _build_ask(self, n: int) -> tff.Computation:
    """The n-th vector to multiply, and n or -1 if none is wanted."""

    @tff.tensorflow.computation(self.solver_type)
    def ask(state):
      return self.solver.vector(state), product_index(state, n)

    return ask


def solver_for(
    problem: Problem, ihgp: str, neumann_terms: int
) -> inverse_hessian.Solver | None:
  """The solver that a problem needs: the one asked for, or a simpler one.

  A compositional problem has H = I, so one term is exact; a problem that is not
  implicit needs none.
  """
  solver = inverse_hessian.build_solver(ihgp, neumann_terms)
  if problem.kind == 'compositional':
    return inverse_hessian.build_solver('truncated', 1)
  return solver if problem.is_implicit else None


def _checked(state: inverse_hessian.SolverState) -> inverse_hessian.SolverState:
  return state._replace(p=vector_space.check_finite(state.p, _NOT_FINITE))


def product_index(state: inverse_hessian.SolverState, n) -> tf.Tensor:
  """n if the solver still wants its product, else -1."""
  return tf.where(state.products_left > 0, n, -1)
