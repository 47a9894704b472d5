"""LFedNest-NonAlt and FedAvg-S: both variables in one communication round.

Clients step on x and y locally and send both; the server averages them. In
LFedNest-NonAlt (appendix H.1) a client first does all of its inner steps, then
its outer steps at its own y_i; in FedAvg-S (section 4.3) both variables step at
once, descent in x and ascent in y for a minimax problem.
"""

import collections
from typing import NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.algorithms import aggregation, rounds, server_step
from fednest_tff.algorithms.federation import Federation
from fednest_tff.local import client as client_lib
from fednest_tff.local import (
    descent,
    inverse_hessian,
    joint_levels,
    outer_level,
)
from fednest_tff.vector_space import Structure


class JointDescent(NamedTuple):
  """What clients need: (x, y), beta, alpha, l and a seed."""

  outer: Structure
  inner: Structure
  inner_learning_rate: tf.Tensor
  outer_learning_rate: tf.Tensor
  smoothness: tf.Tensor
  seed: tf.Tensor


class Joint:
  """Both one-round methods inside a `tff.federated_computation`.

  Attributes:
    aggregations: How (x+ - x, y+ - y) is averaged, by name.
    server_step: The server's step on x.
    rounds: The round as a computation of its own, by name.
    server: The server's steps on x and y, by name.
  """

  def __init__(
      self,
      federated: Federation,
      inner_work: descent.LocalWork,
      outer_work: descent.LocalWork,
      inner_rounds: int,
      solver: inverse_hessian.Solver | None,
      simultaneous: bool,
      aggregator: aggregation.Factory | None = None,
      optimizer: tff.learning.optimizers.Optimizer | None = None,
  ):
    """Traces what clients and server do.

    Args:
      federated: The problem and its types.
      inner_work: tau_i and the minibatches of the inner steps, and of FedAvg-S.
      outer_work: Those of the outer steps, and of FedAvg-S if there is no inner
        problem.
      inner_rounds: T; LFedNest-NonAlt does T times `inner_work`.
      solver: Of the local series; `None` if the problem is not implicit.
      simultaneous: FedAvg-S if true, else LFedNest-NonAlt.
      aggregator: Factory for (x+ - x, y+ - y); `None` for the plain mean.
      optimizer: The server's for x; `None` to take the mean as it is.
    """
    problem = federated.problem
    outer, inner = federated.outer_type, federated.inner_type
    scalar = federated.scalar_type
    message_type = tff.to_type(
        JointDescent(outer, inner, scalar, scalar, scalar, federated.seed_type)
    )

    def steps(message, client, seed):
      rates = (
          message.inner_learning_rate,
          message.outer_learning_rate,
          message.smoothness,
      )
      point = problem, solver, message.outer, message.inner, client
      if simultaneous:
        work = inner_work if problem.has_inner else outer_work
        return joint_levels.simultaneous_steps(*point, work, *rates, seed)
      return joint_levels.alternating_steps(
          *point, inner_work, outer_work, inner_rounds, *rates, seed
      )

    @tff.tensorflow.computation(message_type, federated.client_type)
    def client_update(message, client):
      x, y = message.outer, message.inner
      x_i, y_i = steps(
          message, client, client_lib.seed_of(client, message.seed, 0)
      )
      x_change, x_squared = rounds.change(x_i, x, problem.scalar_dtype)
      y_change, y_squared = rounds.change(y_i, y, problem.scalar_dtype)
      metrics = collections.OrderedDict(
          outer_loss=outer_level.loss(problem, x, y, client.outer),
          outer_squared_change=x_squared,
          inner_squared_change=y_squared,
      )
      if problem.has_inner:
        features = problem.representation(x, client.inner)
        metrics['inner_loss'] = problem.inner_loss(x, y, features)
      return (x_change, y_change), metrics

    self._has_inner = problem.has_inner
    self._apply_change = rounds.build_apply_change(
        federated, inner, 'y+', 'Try a smaller inner_learning_rate'
    )
    self.server_step = server_step.ServerStep(federated, optimizer)
    self.server = dict(
        outer_step=self.server_step.step, inner_step=self._apply_change
    )
    self.aggregations = {
        'joint_update': aggregation.Aggregation(
            'outer_aggregator',
            aggregator,
            tff.to_type((outer, inner)),
            scalar,
            federated.uniform,
        )
    }
    self._update_round = rounds.build_outer_update(
        client_update, self.aggregations['joint_update']
    )
    self.rounds = {
        'joint_update': rounds.build_round(
            federated,
            self.aggregations['joint_update'],
            message_type,
            lambda state, message, there, clients: self._update_round(
                state, there, clients
            ),
        )
    }

  def __call__(
      self,
      state,
      optimizer,
      x,
      y,
      learning_rates,
      smoothness,
      seed,
      features,
      clients,
  ):
    """One call.

    Args:
      state: States of `aggregations` by name, at the server.
      optimizer: State of `server_step`, at the server.
      x: The outer variable, at the server and at the clients already.
      y: The inner variable, at the server.
      learning_rates: (beta, alpha), at the server.
      smoothness: l, at the server.
      seed: The call's seed, at the server.
      features: Not used: x moves, and with it the features.
      clients: The cohort.

    Returns:
      The optimizer's new state, and a `RoundOutput` whose value is (x+, y+).
    """
    del features
    x, x_there = x
    sent = tff.federated_broadcast(
        tff.federated_zip((y, *learning_rates, smoothness, seed))
    )
    update = self._update_round(
        state['joint_update'],
        JointDescent(x_there, *(sent[k] for k in range(5))),
        clients,
    )
    inner_squared = update.metrics.pop('inner_squared_change')
    outer_squared = update.metrics.pop('outer_squared_change')
    applied = tff.federated_map(
        self._apply_change, (y, update.value[1], inner_squared)
    )
    optimizer, x_next, metrics = self.server_step(
        optimizer, x, update.value[0], outer_squared
    )
    if self._has_inner:
      metrics |= dict(client_drift=applied[1], inner_update_norm=applied[2])
    return optimizer, rounds.RoundOutput(
        dict(joint_update=update.state),
        (x_next, applied[0]),
        update.metrics | metrics,
    )
