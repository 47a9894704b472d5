"""FedIHGP as a process of its own, one communication round per `next`."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import aggregation, fed_ihgp, federation, rounds
from fednest_tff.algorithms.federation import (
    Federation,
    at_clients,
    at_server,
)
from fednest_tff.local import inverse_hessian, sampling
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class IHGPState(NamedTuple):
  """State of the FedIHGP process.

  Attributes:
    outer: x.
    inner: y.
    step: Rounds done at this point (int32): 0, then 1 once b is there, ...
    epoch: How many points there were before; N' is drawn anew for each.
    seed: int64[2].
    smoothness: l.
    solver: The solver's state; `solver.p` is the product so far, and
      `solver.products_left` the rounds still wanted.
    aggregators: States of the aggregation processes, by name.
  """

  outer: Structure
  inner: Structure
  step: Any
  epoch: Any
  seed: Any
  smoothness: Any
  solver: Any
  aggregators: Any

  def at(self, outer: Structure, inner: Structure) -> 'IHGPState':
    """This state, started anew at another point with another N'."""
    return self._replace(
        outer=outer,
        inner=inner,
        step=np.int32(0),
        epoch=np.int32(self.epoch + 1),
    )


def _replace_aggregators(state: tff.Value, aggregators: tff.Value) -> IHGPState:
  """`state` at the server, field by field, with other aggregator states."""
  names = IHGPState._fields
  values = {name: getattr(state, name) for name in names}
  return IHGPState(**(values | {'aggregators': aggregators}))


def build_fed_ihgp(
    problem: Problem,
    *,
    smoothness: float,
    neumann_terms: int = 5,
    ihgp: str = 'stochastic',
    client_weighting: Any = 'uniform',
    gradient_batch_size: int | None = None,
    gradient_aggregator: aggregation.Factory | None = None,
    seed: int = 0,
) -> rounds.RoundsProcess:
  """FedIHGP as an iterative process, one communication round per `next`.

  The first `next` at a point takes the gradient, each further one a product, so
  that a driver can give every round n a cohort S_n of its own. When the solver
  is done (`state.solver.products_left` is 0), `next` leaves p as it is;
  `state.at(x, y)` starts anew elsewhere.

    initialize: `( -> IHGPState@SERVER)`
    next: `(<IHGPState@SERVER, {dataset}@CLIENTS> ->
            <state=IHGPState@SERVER, metrics=<...>@SERVER>)`

  Args:
    problem: A bilevel or compositional problem.
    smoothness: l, at least the largest eigenvalue of the inner Hessian.
    neumann_terms: N (Algorithm 3, line 1).
    ihgp: 'stochastic', 'truncated' or 'cg'.
    client_weighting: See `build_fed_nest`.
    gradient_batch_size: See `build_fed_nest`.
    gradient_aggregator: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `tff.templates.IterativeProcess` with `rounds`.
  """
  federated = Federation(problem, client_weighting, gradient_batch_size)
  if not problem.is_implicit:
    raise ValueError(
        f'`problem` is {problem.kind}: only bilevel and compositional problems'
        ' have an inverse-Hessian-gradient product.'
    )
  federation.check_smoothness(smoothness)
  stage = fed_ihgp.FedIHGP(
      federated,
      inverse_hessian.build_solver(ihgp, neumann_terms),
      aggregator=gradient_aggregator,
  )

  @tff.tensorflow.computation
  def initial_values():
    scale = vector_space.scalar(smoothness, problem.scalar_dtype)
    key = tf.constant([seed, 0], tf.int64)
    inner = vector_space.tensors(problem.init_inner(seed))
    return IHGPState(
        outer=vector_space.tensors(problem.init_outer(seed)),
        inner=inner,
        step=tf.constant(0),
        epoch=tf.constant(0),
        seed=key,
        smoothness=scale,
        solver=stage.solver.start(vector_space.zeros_like(inner), scale, key),
        aggregators=(),
    )

  @tff.federated_computation
  def initialize():
    values = tff.federated_eval(initial_values, tff.SERVER)
    return tff.federated_zip(
        _replace_aggregators(
            values, aggregation.initial_states(stage.aggregations)
        )
    )

  state_type = initialize.type_signature.result.member

  @tff.tensorflow.computation(state_type)
  def ask(state):
    product_index = fed_ihgp.product_index(state.solver, state.step)
    index = tf.where(tf.equal(state.step, 0), 0, product_index)
    return fed_ihgp.Product(
        state.outer,
        state.inner,
        stage.solver.vector(state.solver),
        index,
        sampling.fold_in(state.seed, state.epoch),
    )

  @tff.tensorflow.computation(state_type, federated.inner_type)
  def take(state, answer):
    key = sampling.fold_in(state.seed, state.epoch)
    solver = tf.cond(
        tf.equal(state.step, 0),
        lambda: stage.server_start(answer, state.smoothness, key),
        lambda: stage.server_advance(state.solver, answer, state.smoothness),
    )
    metrics = dict(
        step=state.step,
        products_left=solver.products_left,
        p_norm=vector_space.norm(solver.p),
    )
    return state._replace(solver=solver, step=state.step + 1), metrics

  @tff.federated_computation(
      at_server(state_type), at_clients(federated.dataset_type)
  )
  def next_fn(state, datasets):
    message = tff.federated_broadcast(tff.federated_map(ask, state))
    clients = tff.federated_map(federated.read_client, datasets)
    features = federated.features(message.outer, clients)
    output = stage.step_round(
        state.aggregators.ihgp, message, features, clients
    )
    taken = tff.federated_map(take, (state, output.value))
    new_state = _replace_aggregators(
        taken[0], tff.federated_zip(dict(ihgp=output.state))
    )
    return tff.learning.templates.LearningProcessOutput(
        tff.federated_zip(new_state), taken[1]
    )

  return rounds.RoundsProcess(initialize, next_fn, stage.rounds, stage.server)
