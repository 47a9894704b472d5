"""Federated power iteration: an estimate of l, the largest inner curvature.

FedIHGP's series converges if and only if l is more than half the largest
eigenvalue of H = mean_i grad^2_y g_i(x, y), and Lemma 2.2 wants l to bound it.
Each `next` is one communication round, FedIHGP's product round: clients send
H_i v, the server takes the Rayleigh quotient <v, H v> of the unit vector v and
normalises H v. The estimate grows towards the eigenvalue from below, so users
add a margin.
"""

from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import fed_ihgp, rounds
from fednest_tff.algorithms.federation import (
    Federation,
    at_clients,
)
from fednest_tff.local import inverse_hessian, sampling
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class PowerState(NamedTuple):
  """State of the power iteration.

  Attributes:
    outer: x.
    inner: y.
    vector: v, of norm 1.
    smoothness: The estimate of l so far; 0 before the first round.
    step: Rounds done (int32).
    seed: int64[2].
    aggregators: States of the aggregation processes, by name.
  """

  outer: Structure
  inner: Structure
  vector: Structure
  smoothness: Any
  step: Any
  seed: Any
  aggregators: Any


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


def build_power_iteration(
    problem: Problem,
    *,
    client_weighting: Any = 'uniform',
    gradient_batch_size: int | None = None,
    seed: int = 0,
) -> rounds.RoundsProcess:
  """The power iteration as an iterative process, one round per `next`.

    initialize: `( -> PowerState@SERVER)`
    next: `(<PowerState@SERVER, {dataset}@CLIENTS> ->
            <state=PowerState@SERVER, metrics=<smoothness, residual>@SERVER>)`

  `residual` is ||H v - smoothness v||: some eigenvalue of H lies that close to
  the estimate. To estimate elsewhere, `_replace` the state's `outer` and
  `inner`; the vector is a good start there, too.

  Args:
    problem: A bilevel or compositional problem.
    client_weighting: See `build_fed_nest`.
    gradient_batch_size: Size of the samples of the Hessian; `None` for all.
    seed: Of the initial point and the first vector.

  Returns:
    A `tff.templates.IterativeProcess` with `rounds`.
  """
  federated = Federation(problem, client_weighting, gradient_batch_size)
  if not problem.has_inner:
    raise ValueError('`problem` is single-level: it has no inner Hessian.')
  stage = fed_ihgp.FedIHGP(
      federated, inverse_hessian.build_solver('truncated', 1)
  )

  @tff.tensorflow.computation
  def initial_values():
    key = tf.constant([seed, 0], tf.int64)
    return PowerState(
        outer=vector_space.tensors(problem.init_outer(seed)),
        inner=vector_space.tensors(problem.init_inner(seed)),
        vector=_unit_normal(problem.inner_spec, key),
        smoothness=tf.zeros([], problem.scalar_dtype),
        step=tf.constant(0),
        seed=key,
        aggregators={'ihgp': ()},
    )

  @tff.federated_computation
  def initialize():
    return tff.federated_eval(initial_values, tff.SERVER)

  state_type = initialize.type_signature.result

  @tff.tensorflow.computation(state_type.member)
  def ask(state):
    return fed_ihgp.Product(
        state.outer, state.inner, state.vector, state.step + 1, state.seed
    )

  @tff.tensorflow.computation(state_type.member, federated.inner_type)
  def take(state, product):
    product = vector_space.check_finite(
        product, 'Power iteration: H v is not finite. Try another point (x, y)'
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
    metrics = dict(
        smoothness=smoothness, residual=vector_space.norm(residual)
    )
    new_state = state._replace(
        vector=vector, smoothness=smoothness, step=state.step + 1
    )
    return new_state, metrics

  @tff.federated_computation(state_type, at_clients(federated.dataset_type))
  def next_fn(state, datasets):
    message = tff.federated_broadcast(tff.federated_map(ask, state))
    clients = tff.federated_map(federated.read_client, datasets)
    features = federated.features(message.outer, clients)
    output = stage.product_round(
        state.aggregators.ihgp, message, features, clients
    )
    taken = tff.federated_map(take, (state, output.value))
    return tff.learning.templates.LearningProcessOutput(taken[0], taken[1])

  return rounds.RoundsProcess(
      initialize, next_fn, {'ihgp_product': stage.rounds['ihgp_product']}
  )
