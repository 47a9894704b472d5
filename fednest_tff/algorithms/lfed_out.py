"""LFedOut: the outer problem by local hypergradients (appendix A).

One call is one communication round: tau_i local steps along the hypergradient
that the client's own data give, local Neumann series included, then
x+ = mean_i x_i. The local Hessian makes it biased when clients differ.

The paper prints the last factor of line 6 as grad_x f_i(y_{i,nu}, y); it is
grad_y f_i(x_{i,nu}, y).
"""

import collections
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.algorithms import (
    aggregation,
    epoch,
    fed_ihgp,
    rounds,
    server_step,
)
from fednest_tff.algorithms.federation import Federation
from fednest_tff.local import client as client_lib
from fednest_tff.local import descent, inverse_hessian, outer_level
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class LocalDescent(NamedTuple):
  """What clients need for their local steps: (x, y), alpha, l and a seed."""

  outer: Structure
  inner: Structure
  learning_rate: tf.Tensor
  smoothness: tf.Tensor
  seed: tf.Tensor


class LFedOut:
  """LFedOut inside a `tff.federated_computation`; attributes as `FedOut`."""

  def __init__(
      self,
      federated: Federation,
      work: descent.LocalWork,
      solver: inverse_hessian.Solver | None,
      aggregator: aggregation.Factory | None = None,
      optimizer: tff.learning.optimizers.Optimizer | None = None,
  ):
    """Traces what clients and server do.

    Args:
      federated: The problem and its types.
      work: tau_i and the minibatches.
      solver: Of the local series; `None` if the problem is not implicit.
      aggregator: Factory for x+ - x; `None` for the plain mean.
      optimizer: The server's; `None` to take the mean as it is.
    """
    problem = federated.problem
    outer, scalar = federated.outer_type, federated.scalar_type
    message_type = tff.to_type(
        LocalDescent(
            outer, federated.inner_type, scalar, scalar, federated.seed_type
        )
    )

    @tff.tensorflow.computation(message_type, federated.client_type)
    def client_update(message, client):
      x, y = message.outer, message.inner
      x_i = outer_level.sgd_steps(
          problem,
          solver,
          x,
          y,
          client,
          work,
          message.learning_rate,
          message.smoothness,
          client_lib.seed_of(client, message.seed, 2),
      )
      update, squared = rounds.change(x_i, x, problem.scalar_dtype)
      return update, collections.OrderedDict(
          outer_loss=outer_level.loss(problem, x, y, client.outer),
          squared_change=squared,
      )

    self.server_step = server_step.ServerStep(federated, optimizer)
    self.server = dict(outer_step=self.server_step.step)
    self.aggregations = {
        'outer_update': aggregation.Aggregation(
            'outer_aggregator', aggregator, outer, scalar, federated.uniform
        )
    }
    self._update_round = rounds.build_outer_update(
        client_update, self.aggregations['outer_update']
    )
    self.rounds = {
        'outer_update': rounds.build_round(
            federated,
            self.aggregations['outer_update'],
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
      learning_rate,
      smoothness,
      seed,
      features,
      clients,
  ):
    """One call of LFedOut; arguments and result as in `FedOut`."""
    del features  # x moves, and with it the features.
    x, x_there = x
    sent = tff.federated_broadcast(
        tff.federated_zip((y, learning_rate, smoothness, seed))
    )
    update = self._update_round(
        state['outer_update'],
        LocalDescent(x_there, sent[0], sent[1], sent[2], sent[3]),
        clients,
    )
    squared_change = update.metrics.pop('squared_change')
    optimizer, x_next, metrics = self.server_step(
        optimizer, x, update.value, squared_change
    )
    return optimizer, rounds.RoundOutput(
        dict(outer_update=update.state), x_next, update.metrics | metrics
    )


def build_lfed_out(
    problem: Problem,
    *,
    outer_learning_rate: Any,
    outer_local_steps: Any = None,
    outer_local_epochs: int | None = None,
    batch_size: int | None = None,
    divide_by_local_steps: bool = False,
    neumann_terms: int = 5,
    ihgp: str = 'stochastic',
    smoothness: float | None = None,
    client_weighting: Any = 'uniform',
    outer_aggregator: aggregation.Factory | None = None,
    outer_optimizer: tff.learning.optimizers.Optimizer | None = None,
    seed: int = 0,
) -> rounds.RoundsProcess:
  """LFedOut as an iterative process; arguments as in `build_fed_out`.

    initialize: `( -> NestedState@SERVER)`
    next: `(<NestedState@SERVER, {dataset}@CLIENTS> ->
            <state=NestedState@SERVER, metrics=<...>@SERVER>)`

  Its only round is 'outer_update'.
  """
  federated = Federation(problem, client_weighting)
  solver = fed_ihgp.solver_for(problem, ihgp, neumann_terms)
  lfed_out = LFedOut(
      federated,
      descent.build_work(
          'outer',
          outer_local_steps,
          outer_local_epochs,
          batch_size,
          divide_by_local_steps,
      ),
      solver,
      outer_aggregator,
      outer_optimizer,
  )
  return epoch.build_outer_process(
      federated, lfed_out, outer_learning_rate, smoothness, solver, seed
  )
