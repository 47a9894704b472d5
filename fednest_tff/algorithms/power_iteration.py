"""Federated power iteration: an estimate of l, the largest inner curvature.

FedIHGP's series converges if and only if l is more than half the largest
eigenvalue of H = mean_i grad^2_y g_i(x, y), and Lemma 2.2 wants l to bound it.
Each `next` is one communication round, FedIHGP's product round: clients send
H_i v, the server takes the Rayleigh quotient <v, H v> of the unit vector v and
normalises H v. The estimate grows towards the eigenvalue from below, so users
add a margin.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import product_rounds
from fednest_tff.federated import method, process
from fednest_tff.federated.aggregation import GlobalGradients
from fednest_tff.federated.rounds import Executor, ServerValue
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import sampling
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class PowerState(NamedTuple):
  """The method's part of the state.

  Attributes:
    vector: v, of norm 1.
    smoothness: The estimate of l so far; 0 before the first round.
    step: Rounds done (int32).
  """

  vector: ServerValue
  smoothness: ServerValue
  step: ServerValue


def _unit_normal(spec: Structure, seed: tf.Tensor) -> Structure:
  """A random direction."""
  leaves = [
      tf.cast(
          tf.random.stateless_normal(leaf.shape, sampling.fold_in(seed, k)),
          leaf.dtype,
      )
      for k, leaf in enumerate(tf.nest.flatten(spec))
  ]
  vector = tf.nest.pack_sequence_as(spec, leaves)
  return vector_space.scale(1 / vector_space.norm(vector), vector)


class PowerIteration(method.Method):
  """The power iteration, of which each epoch is one product round."""

  def __init__(self, types: ProblemTypes, gradients: GlobalGradients):
    problem = types.problem
    self._spec = problem.inner_spec
    self._round = product_rounds.ProductRounds(types, gradients).product
    state_type = tff.to_type(PowerState(types.inner, types.scalar, np.int32))

    @tff.tensorflow.computation(state_type)
    def ask(state: PowerState) -> tuple[Structure, tf.Tensor]:
      return state.vector, state.step + 1

    @tff.tensorflow.computation(state_type, types.inner)
    def advance(
        state: PowerState, product: Structure
    ) -> tuple[PowerState, tf.Tensor]:
      product = vector_space.check_finite(
          product,
          'Power iteration: H v is not finite. Try another point (x, y)',
      )
      smoothness = tf.cast(
          vector_space.dot(state.vector, product), problem.scalar_dtype
      )
      length = vector_space.norm(product)
      residual = vector_space.add_scaled(product, -smoothness, state.vector)
      vector = vector_space.where(
          length > 0,
          vector_space.scale(tf.math.divide_no_nan(1.0, length), product),
          state.vector,
      )
      state = PowerState(vector, smoothness, state.step + 1)
      return state, vector_space.norm(residual)

    self._ask, self._advance = ask, advance
    super().__init__(types, [self._round], {})

  def initial_state(
      self, x: Structure, y: Structure, numbers: method.Numbers, seed: tf.Tensor
  ) -> Structure:
    zero = tf.zeros([], self.types.problem.scalar_dtype)
    return PowerState(_unit_normal(self._spec, seed), zero, tf.constant(0))

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    x, y, state = variables
    v, index = do.server(self._ask, state)
    message = product_rounds.ProductMessage(x, y, v, index, plan.seeds[0])
    product = do.round(self._round, message).value
    state, residual = do.server(self._advance, state, product)
    do.measure(smoothness=state.smoothness, residual=residual)
    return method.Variables(x, y, state)


def build_power_iteration(
    problem: Problem,
    *,
    gradients: GlobalGradients = GlobalGradients(),
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """The power iteration as an iterative process, one round per `next`.

  Its metrics are `smoothness`, the estimate, and `residual`, the norm of
  H v - smoothness v: some eigenvalue of H lies that close to the estimate. To
  estimate elsewhere, `_replace` the state's `outer` and `inner`; the vector is
  a good start there, too.

  Args:
    problem: A problem with an inner level.
    gradients: The samples of the Hessian and the aggregator of H v.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and the first vector.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  method.check_has_inner(problem)
  return process.build_process(PowerIteration(types, gradients), seed)
