"""FedOut: federated SVRG on the outer problem (Algorithm 2).

One call takes FedIHGP's rounds, if the problem is implicit, and two more:

  FedIHGP         p ~ H^-1 mean_i grad_y f_i                       line 3
  hypergradient   h = mean_i [F_i(x) - grad^2_xy g_i p],           lines 4-8
                  F_i = grad_x f_i(., y); without g_i p if minimax
  update          x_i <- x_i - alpha_i (F_i(x_i; s) - F_i(x; s) + h),
                  tau_i times from x_i = x; then x+ = mean_i x_i   lines 9-14

With no inner problem this is federated SVRG (section 3.3).
"""

import collections
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
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


class Hyperpoint(NamedTuple):
  """Where clients take their hypergradient: (x, y), p and the call's seed."""

  outer: Structure
  inner: Structure
  p: Structure
  seed: tf.Tensor


class FedOut:
  """FedOut inside a `tff.federated_computation`.

  Attributes:
    aggregations: How FedIHGP's vectors, h and x+ - x are averaged, by name.
    server_step: The server's step on x.
    rounds: All rounds as computations of their own, by name.
    server: The server's step and, if the problem is implicit, the solver's, by
      name.
  """

  def __init__(
      self,
      federated: Federation,
      work: descent.LocalWork,
      solver: inverse_hessian.Solver | None,
      participation: float = 1.0,
      aggregator: aggregation.Factory | None = None,
      gradient_aggregator: aggregation.Factory | None = None,
      optimizer: tff.learning.optimizers.Optimizer | None = None,
  ):
    """Traces what clients and server do.

    Args:
      federated: The problem and its types.
      work: tau_i and the minibatches.
      solver: Of FedIHGP; `None` if the problem is not implicit.
      participation: Of FedIHGP's sub-cohorts.
      aggregator: Factory for x+ - x; `None` for the plain mean.
      gradient_aggregator: Factory for h and FedIHGP's vectors; `None` for the
        plain mean.
      optimizer: The server's; `None` to take the mean as it is.
    """
    problem = federated.problem
    outer, inner = federated.outer_type, federated.inner_type
    scalar, seed = federated.scalar_type, federated.seed_type
    p_type = inner if problem.is_implicit else tff.to_type(())
    point_type = tff.to_type(Hyperpoint(outer, inner, p_type, seed))
    descent_type = tff.to_type(
        rounds.Descent(outer, inner, outer, scalar, seed)
    )

    @tff.tensorflow.computation(point_type, federated.client_type)
    def client_hypergradient(point, client):
      value, h_i = outer_level.hypergradient(
          problem,
          point.outer,
          point.inner,
          point.p,
          federated.sample(client.outer, client, point.seed, 0),
          federated.sample(client.inner, client, point.seed, 1),
      )
      return h_i, collections.OrderedDict(outer_loss=value)

    @tff.tensorflow.computation(descent_type, federated.client_type)
    def client_update(message, client):
      x_i = outer_level.svrg_steps(
          problem,
          message.outer,
          message.inner,
          message.direction,
          client.outer,
          work,
          message.learning_rate,
          client_lib.seed_of(client, message.seed, 2),
      )
      update, squared = rounds.change(
          x_i, message.outer, problem.scalar_dtype
      )
      return update, collections.OrderedDict(squared_change=squared)

    @tff.tensorflow.computation(outer)
    def check_hypergradient(h):
      h = vector_space.check_finite(
          h,
          'FedOut: h, the hypergradient (Algorithm 2, line 8), is not finite.'
          ' Try a smaller outer_learning_rate or inner_learning_rate, or a'
          ' larger smoothness l',
      )
      return h, vector_space.norm(h)

    self._client_hypergradient = client_hypergradient
    self._check_hypergradient = check_hypergradient
    self._fed_ihgp = None
    self.server_step = server_step.ServerStep(federated, optimizer)
    self.server = dict(outer_step=self.server_step.step)
    uniform = federated.uniform
    self.aggregations = {
        'hypergradient': aggregation.Aggregation(
            'gradient_aggregator', gradient_aggregator, outer, scalar, uniform
        ),
        'outer_update': aggregation.Aggregation(
            'outer_aggregator', aggregator, outer, scalar, uniform
        ),
    }
    # The mean change of x (lines 9-13).
    self._update_round = rounds.build_outer_update(
        client_update, self.aggregations['outer_update']
    )
    self.rounds = {
        'hypergradient': rounds.build_round(
            federated,
            self.aggregations['hypergradient'],
            point_type,
            lambda state, message, there, clients: self._hypergradient_round(
                state, there, clients
            ),
        ),
        'outer_update': rounds.build_round(
            federated,
            self.aggregations['outer_update'],
            descent_type,
            lambda state, message, there, clients: self._update_round(
                state, there, clients
            ),
        ),
    }
    if problem.is_implicit:
      self._fed_ihgp = fed_ihgp.FedIHGP(
          federated, solver, participation, gradient_aggregator
      )
      self.aggregations |= self._fed_ihgp.aggregations
      self.rounds |= self._fed_ihgp.rounds
      self.server |= self._fed_ihgp.server

  def _hypergradient_round(self, state, point, clients) -> rounds.RoundOutput:
    """h (lines 4-8)."""
    gradients = tff.federated_map(self._client_hypergradient, (point, clients))
    mean = self.aggregations['hypergradient'](
        state, gradients[0], clients.weight, gradients[1]
    )
    checked = tff.federated_map(self._check_hypergradient, mean.value)
    metrics = dict(
        outer_loss=mean.metrics['outer_loss'], hypergradient_norm=checked[1]
    )
    return rounds.RoundOutput(mean.state, checked[0], metrics)

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
    """One call of FedOut.

    Args:
      state: States of `aggregations` by name, at the server.
      optimizer: State of `server_step`, at the server.
      x: The outer variable, at the server and at the clients already.
      y: The inner variable, at the server.
      learning_rate: alpha, at the server.
      smoothness: l, at the server.
      seed: The call's seed, at the server.
      features: The cohort's features at x.
      clients: The cohort.

    Returns:
      The optimizer's new state, and a `RoundOutput` whose value is x+.
    """
    x, x_there = x
    sent = tff.federated_broadcast(tff.federated_zip((y, seed)))
    y_there, seed_there = sent[0], sent[1]
    new_state, p_there = {}, ()
    if self._fed_ihgp is not None:
      solved = self._fed_ihgp(
          state,
          x_there,
          y_there,
          smoothness,
          (seed, seed_there),
          features,
          clients,
      )
      new_state |= solved.state
      p_there = tff.federated_broadcast(solved.value)

    gradient = self._hypergradient_round(
        state['hypergradient'],
        Hyperpoint(x_there, y_there, p_there, seed_there),
        clients,
    )
    h = tff.federated_broadcast(
        tff.federated_zip((gradient.value, learning_rate))
    )
    update = self._update_round(
        state['outer_update'],
        rounds.Descent(x_there, y_there, h[0], h[1], seed_there),
        clients,
    )
    squared_change = update.metrics.pop('squared_change')
    optimizer, x_next, metrics = self.server_step(
        optimizer, x, update.value, squared_change
    )
    new_state |= dict(
        hypergradient=gradient.state, outer_update=update.state
    )
    return optimizer, rounds.RoundOutput(
        new_state, x_next, gradient.metrics | update.metrics | metrics
    )


def build_fed_out(
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
    participation: float = 1.0,
    client_weighting: Any = 'uniform',
    gradient_batch_size: int | None = None,
    outer_aggregator: aggregation.Factory | None = None,
    gradient_aggregator: aggregation.Factory | None = None,
    outer_optimizer: tff.learning.optimizers.Optimizer | None = None,
    seed: int = 0,
) -> rounds.RoundsProcess:
  """FedOut as an iterative process: x <- FedOut(x, y, alpha) at a fixed y.

  For a single-level problem this is all there is: federated SVRG.

    initialize: `( -> NestedState@SERVER)`
    next: `(<NestedState@SERVER, {dataset}@CLIENTS> ->
            <state=NestedState@SERVER, metrics=<...>@SERVER>)`

  Its `rounds` are 'ihgp_gradient' and 'ihgp_product' (line 3, if the problem is
  implicit), 'hypergradient' (lines 4-8) and 'outer_update' (9-14).

  Args:
    problem: Any problem.
    outer_learning_rate: alpha, a number or a function of `state.epoch`.
    outer_local_steps: tau_i; see `build_fed_nest`.
    outer_local_epochs: tau_i in passes over the client's outer examples.
    batch_size: Of the minibatches xi_{i,nu}; `None` for all examples.
    divide_by_local_steps: Whether alpha_i = alpha / tau_i.
    neumann_terms: N.
    ihgp: 'stochastic', 'truncated' or 'cg'.
    smoothness: l; needed for a bilevel problem unless `ihgp` is 'cg'.
    participation: Share of the cohort in each of FedIHGP's S_n.
    client_weighting: See `build_fed_nest`.
    gradient_batch_size: Size of xi_i, zeta_i, xi_{i,0} and zeta_{i,n}; `None`
      for all examples.
    outer_aggregator: Factory for x+ - x in place of the plain mean.
    gradient_aggregator: Factory for h and FedIHGP's vectors.
    outer_optimizer: The server's; `None` to take the mean as it is.
    seed: Of the initial point and of all draws.

  Returns:
    A `tff.templates.IterativeProcess` with `rounds`.
  """
  federated = Federation(problem, client_weighting, gradient_batch_size)
  solver = fed_ihgp.solver_for(problem, ihgp, neumann_terms)
  fed_out = FedOut(
      federated,
      descent.build_work(
          'outer',
          outer_local_steps,
          outer_local_epochs,
          batch_size,
          divide_by_local_steps,
      ),
      solver,
      participation,
      outer_aggregator,
      gradient_aggregator,
      outer_optimizer,
  )
  return epoch.build_outer_process(
      federated, fed_out, outer_learning_rate, smoothness, solver, seed
  )
