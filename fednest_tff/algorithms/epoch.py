"""Epochs: inner and outer stages composed into one iterative process.

Algorithm 1 with one epoch per `next`: T inner calls at x, then one outer call
at the new y. With only one of the two stages, the same epoch is FedInn, FedOut
or one of their light variants as a process of its own.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import aggregation, federation, rounds
from fednest_tff.algorithms.federation import (
    Federation,
    NestedState,
    at_clients,
)
from fednest_tff.local import inverse_hessian, sampling


class Stage(Protocol):
  """A part of an epoch, to be called inside a federated computation.

  Inner stages (`FedInn`, `LFedInn`) take `(state, x, y, learning_rate, seed,
  features, clients)` and return y+. Outer stages (`FedOut`, `LFedOut`) and
  joint ones (`Joint`) also take the optimizer's state and l, and return x+ or
  both.
  """

  aggregations: dict[str, aggregation.Aggregation]
  rounds: dict[str, tff.Computation]
  server: dict[str, tff.Computation]

  def __call__(self, *arguments):
    ...


class Stages(NamedTuple):
  """What an epoch is made of; `joint` excludes the other two.

  Attributes:
    inner: The inner optimizer, or `None`.
    outer: The outer optimizer, or `None`.
    joint: A one-round optimizer of both variables, or `None`.
    inner_rounds: T.
  """

  inner: Stage | None = None
  outer: Stage | None = None
  joint: Stage | None = None
  inner_rounds: int = 1

  @property
  def used(self) -> list:
    return [stage for stage in self[:3] if stage is not None]


class Epoch(NamedTuple):
  """The computations of a process.

  Attributes:
    initialize: `( -> NestedState@SERVER)`.
    next: `(<NestedState@SERVER, {dataset}@CLIENTS> ->
      <state=NestedState@SERVER, metrics=<...>@SERVER>)`.
    rounds: The epoch's rounds as computations of their own, by name.
    server: What the server does between the rounds, by name: 'plan', `(<seed,
      epoch> -> <beta, alpha, seeds of all calls, epoch + 1>)`, and that of the
      stages.
  """

  initialize: tff.Computation
  next: tff.Computation
  rounds: dict[str, tff.Computation]
  server: dict[str, tff.Computation]


def build_epoch(
    federated: Federation,
    stages: Stages,
    inner_learning_rate: Any,
    outer_learning_rate: Any,
    smoothness: float | None,
    seed: int,
) -> Epoch:
  """Composes `stages` into an epoch.

  Args:
    federated: The problem and its types.
    stages: What an epoch is made of.
    inner_learning_rate: beta, a number or a function of the epoch; `None` if
      there is no inner stage.
    outer_learning_rate: alpha, likewise.
    smoothness: l; `None` for 1 / beta at epoch 0. It is 1 for a compositional
      problem.
    seed: Of the initial point and of all draws.

  Returns:
    The epoch's computations.
  """
  problem, dtype = federated.problem, federated.problem.scalar_dtype
  if isinstance(seed, bool) or not isinstance(seed, int):
    raise ValueError(f'`seed` must be an integer; got {seed!r}.')

  def schedule(name, rate, is_used):
    if not is_used:
      return lambda epoch: tf.ones([], dtype)
    return federation.to_schedule(name, rate, dtype)

  has_inner_steps = problem.has_inner and bool(stages.inner or stages.joint)
  inner_rate = schedule(
      'inner_learning_rate', inner_learning_rate, has_inner_steps
  )
  outer_rate = schedule(
      'outer_learning_rate',
      outer_learning_rate,
      bool(stages.outer or stages.joint),
  )
  if problem.kind == 'compositional':
    smoothness = 1.0  # The inner Hessian is the identity.
  if smoothness is not None:
    federation.check_smoothness(smoothness)
  aggregations, single_rounds, server = {}, {}, {}
  for stage in stages.used:
    aggregations |= stage.aggregations
    single_rounds |= stage.rounds
    server |= stage.server

  @tff.tensorflow.computation
  def initial_values():
    if smoothness is not None:
      scale = vector_space.scalar(smoothness, dtype)
    else:
      scale = 1 / inner_rate(tf.constant(0))
    return (
        vector_space.tensors(problem.init_outer(seed)),
        vector_space.tensors(problem.init_inner(seed)),
        tf.constant(0),
        tf.constant([seed, 0], tf.int64),
        scale,
    )

  server_step = getattr(stages.joint or stages.outer, 'server_step', None)

  @tff.federated_computation
  def initialize():
    values = tff.federated_eval(initial_values, tff.SERVER)
    if server_step is None:
      optimizer = tff.federated_value((), tff.SERVER)
    else:
      optimizer = server_step.initialize()
    return tff.federated_zip(
        NestedState(
            *(values[k] for k in range(5)),
            aggregators=aggregation.initial_states(aggregations),
            optimizer=optimizer,
        )
    )

  @tff.tensorflow.computation(federated.seed_type, tff.TensorType(np.int32))
  def plan(seed, epoch):
    epoch_seed = sampling.fold_in(seed, epoch)
    seeds = [
        sampling.fold_in(epoch_seed, call)
        for call in range(stages.inner_rounds + 1)
    ]
    return inner_rate(epoch), outer_rate(epoch), seeds, epoch + 1

  @tff.federated_computation(
      initialize.type_signature.result, at_clients(federated.dataset_type)
  )
  def next_fn(state, datasets):
    clients = tff.federated_map(federated.read_client, datasets)
    planned = tff.federated_map(plan, (state.seed, state.epoch))
    beta, alpha, seeds = planned[0], planned[1], planned[2]
    x, y, optimizer = state.outer, state.inner, state.optimizer
    x_there = tff.federated_broadcast(x)
    features = federated.features(x_there, clients)
    aggregators = {
        name: getattr(state.aggregators, name) for name in aggregations
    }
    metrics = {}
    if stages.inner is not None:
      for t in range(stages.inner_rounds):
        output = stages.inner(
            aggregators, x_there, y, beta, seeds[t], features, clients
        )
        y = output.value
        aggregators |= output.state
        metrics |= output.metrics
    rest = state.smoothness, seeds[stages.inner_rounds], features, clients
    if stages.outer is not None:
      optimizer, output = stages.outer(
          aggregators, optimizer, (x, x_there), y, alpha, *rest
      )
      x = output.value
      aggregators |= output.state
      metrics |= output.metrics
    if stages.joint is not None:
      optimizer, output = stages.joint(
          aggregators, optimizer, (x, x_there), y, (beta, alpha), *rest
      )
      x, y = output.value
      aggregators |= output.state
      metrics |= output.metrics
    counts = federation.count_clients(clients)
    metrics |= dict(
        num_clients=counts.num_clients, num_examples=counts.num_examples
    )
    new_state = NestedState(
        outer=x,
        inner=y,
        epoch=planned[3],
        seed=state.seed,
        smoothness=state.smoothness,
        aggregators=aggregators,
        optimizer=optimizer,
    )
    return tff.learning.templates.LearningProcessOutput(
        tff.federated_zip(new_state), tff.federated_zip(metrics)
    )

  return Epoch(initialize, next_fn, single_rounds, {'plan': plan} | server)


def build_inner_process(
    federated: Federation, stage: Stage, inner_learning_rate: Any, seed: int
) -> rounds.RoundsProcess:
  """One inner stage as a process of its own, with x fixed."""
  if not federated.problem.has_inner:
    raise ValueError('`problem` is single-level: it has no inner variable.')
  return rounds.RoundsProcess(
      *build_epoch(
          federated, Stages(inner=stage), inner_learning_rate, None, None, seed
      )
  )


def build_outer_process(
    federated: Federation,
    stage: Stage,
    outer_learning_rate: Any,
    smoothness: float | None,
    solver: inverse_hessian.Solver | None,
    seed: int,
) -> rounds.RoundsProcess:
  """One outer stage as a process of its own, with y fixed."""
  if smoothness is None and federated.problem.kind == 'bilevel':
    if solver.name != 'cg':
      raise ValueError(
          f"`smoothness` (l) is needed for ihgp='{solver.name}';"
          ' `build_power_iteration` estimates it.'
      )
  return rounds.RoundsProcess(
      *build_epoch(
          federated,
          Stages(outer=stage),
          None,
          outer_learning_rate,
          smoothness,
          seed,
      ),
      # LFedOut's solver runs on the clients and takes no rounds.
      solver=solver if 'ihgp_product' in stage.rounds else None,
  )
