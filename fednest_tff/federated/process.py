"""The process of a method: its state, and one epoch per `next`."""

import collections
import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import options, vector_space
from fednest_tff.federated.method import Method, Numbers, Plan, Variables
from fednest_tff.federated.rounds import (
    Executor,
    InOneComputation,
    SentRound,
    ServerValue,
    build_round,
)
from fednest_tff.federated.types import ProblemTypes, at_clients
from fednest_tff.local import sampling
from fednest_tff.local.client import Client
from fednest_tff.vector_space import Structure


class NestedState(NamedTuple):
  """State of a nested process, on the server.

  Attributes:
    outer: x.
    inner: y; empty for a single-level problem.
    epoch: How many times `next` has run (int32); schedules are functions of it.
    seed: int64[2]. With `epoch` it determines every random draw, so a restored
      state goes on exactly as the original would have.
    hparams: The numbers that `set_hparams` changes, by name.
    aggregators: States of the aggregation processes, by name.
    method: The part that belongs to the method, of the method's own type.
  """

  outer: ServerValue
  inner: ServerValue
  epoch: ServerValue
  seed: ServerValue
  hparams: ServerValue
  aggregators: ServerValue
  method: ServerValue


class NestedWeights(NamedTuple):
  """The variables that a nested process learns.

  Attributes:
    outer: x.
    inner: y; empty for a single-level problem.
  """

  outer: Structure
  inner: Structure


class NestedProcess(tff.learning.templates.LearningProcess):
  """A `LearningProcess` whose epochs can also be run round by round.

    initialize: `( -> NestedState@SERVER)`
    next: `(<NestedState@SERVER, {dataset}@CLIENTS> ->
            <state=NestedState@SERVER, metrics=<...>@SERVER>)`
    get_model_weights: `(NestedState -> NestedWeights)`
    set_model_weights: `(<NestedState, NestedWeights> -> NestedState)`
    get_hparams: `(NestedState -> <name=number, ...>)`
    set_hparams: `(<NestedState, <name=number, ...>> -> NestedState)`

  Attributes:
    method: The method.
    plan: `(<seed, epoch, hparams> -> <numbers, seeds, epoch + 1>)`.
    sent_rounds: The rounds of one `next`.
    rounds: The rounds as separate computations, by name; see `build_round`.
  """

  def __init__(
      self,
      method: Method,
      plan: tff.Computation,
      sent_rounds: list[SentRound],
      **computations: tff.Computation,
  ):
    super().__init__(**computations)
    self.method = method
    self.plan = plan
    self.sent_rounds = sent_rounds

  def __repr__(self) -> str:
    """The method, its rounds per epoch and the problem."""
    name, count = type(self.method).__name__, len(self.sent_rounds)
    rounds = 'round' if count == 1 else 'rounds'
    return (
        f'<NestedProcess, {name}: {count} {rounds} per epoch,'
        f' {self.method.types.problem!r}>'
    )

  @functools.cached_property
  def rounds(self) -> dict[str, tff.Computation]:
    return {
        round_.name: build_round(self.method.types, round_)
        for round_ in self.method.rounds
    }


def run_epoch(
    do: Executor, method: Method, plan: tff.Computation, state: NestedState
) -> NestedState:
  """Runs one epoch of `method` from `state`, with any executor."""
  numbers, seeds, following = do.server(
      plan, state.seed, state.epoch, state.hparams
  )
  planned = Plan({name: numbers[name] for name in method.hparams}, list(seeds))
  variables = method.epoch(
      do, Variables(state.outer, state.inner, state.method), planned
  )
  return state._replace(
      outer=variables.outer,
      inner=variables.inner,
      epoch=following,
      method=variables.method,
  )


def _build_plan(method: Method, hparams_type: tff.Type) -> tff.Computation:
  @tff.tensorflow.computation(
      method.types.seed, tff.TensorType(np.int32), hparams_type
  )
  def plan(
      seed: tf.Tensor, epoch: tf.Tensor, numbers: Numbers
  ) -> tuple[Numbers, list[tf.Tensor], tf.Tensor]:
    used = collections.OrderedDict(
        (name, hparam.at(epoch, numbers) if hparam.at else numbers[name])
        for name, hparam in method.hparams.items()
    )
    epoch_seed = sampling.fold_in(seed, epoch)
    seeds = [
        sampling.fold_in(epoch_seed, call) for call in range(method.num_seeds)
    ]
    return used, seeds, epoch + 1

  return plan


def _count_clients(types: ProblemTypes, clients: tff.Value) -> tff.Value:
  """Counts clients and examples, as a part of the first round."""

  @types.computation(types.client)
  def count(client: Client) -> Numbers:
    return collections.OrderedDict(
        num_clients=tf.constant(1, tf.int64), num_examples=client.num_examples
    )

  return tff.federated_sum(tff.federated_map(count, clients))


def client_work_metrics(
    metrics: dict[str, ServerValue]
) -> dict[str, dict[str, ServerValue]]:
  """Chooses what TFF's training program releases as the model's metrics.

  `tff.learning.programs.train_model` takes them from
  `metrics['client_work']['train']`, where TFF's own algorithms put them.

  Args:
    metrics: The epoch's metrics, by name.

  Returns:
    The metric `train`: the loss, of the outer level if it was measured, and the
    number of examples.
  """
  train = collections.OrderedDict()
  for name in ('outer_loss', 'inner_loss'):
    if name in metrics:
      train['loss'] = metrics[name]
      break
  train['num_examples'] = metrics['num_examples']
  return collections.OrderedDict(train=train)


def build_process(method: Method, seed: int) -> NestedProcess:
  """A `LearningProcess` with one epoch of `method` per `next`.

  Args:
    method: The method.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  if not options.is_integer(seed):
    raise ValueError(f'`seed` must be an integer; got {seed!r}.')
  if not -(2**63) <= seed < 2**63:
    raise ValueError(f'`seed` must fit into 64 bits; got {seed}.')
  types, problem = method.types, method.types.problem
  aggregations = {
      round_.aggregation.name: round_.aggregation for round_ in method.rounds
  }

  @tff.tensorflow.computation
  def initial_values() -> NestedState:
    x = vector_space.constants(problem.init_outer(seed))
    y = vector_space.constants(problem.init_inner(seed))
    key = tf.constant([seed, 0], tf.int64)
    numbers = collections.OrderedDict(
        (name, tf.constant(hparam.initial, problem.scalar_dtype))
        for name, hparam in method.hparams.items()
    )
    own = method.initial_state(x, y, numbers, key)
    return NestedState(x, y, tf.constant(0), key, numbers, (), own)

  @tff.federated_computation
  def initialize() -> tff.Value:
    values = tff.federated_eval(initial_values, tff.SERVER)
    state = NestedState(*(values[k] for k in range(len(NestedState._fields))))
    states = {
        name: aggregation.initialize()
        for name, aggregation in aggregations.items()
    }
    return tff.federated_zip(state._replace(aggregators=states))

  state_type = initialize.type_signature.result
  plan = _build_plan(method, state_type.member.hparams)
  sent_rounds: list[SentRound] = []

  @tff.federated_computation(state_type, at_clients(types.dataset))
  def next_fn(
      state: tff.Value, datasets: tff.Value
  ) -> tff.learning.templates.LearningProcessOutput:
    before = NestedState(*(getattr(state, f) for f in NestedState._fields))
    states = {name: state.aggregators[name] for name in aggregations}
    do = InOneComputation(types, states, datasets)
    after = run_epoch(do, method, plan, before)
    sent_rounds[:] = do.sent_rounds
    counts = _count_clients(types, do.clients)
    do.measure(num_clients=counts.num_clients, num_examples=counts.num_examples)
    do.measure(client_work=client_work_metrics(do.metrics))
    return tff.learning.templates.LearningProcessOutput(
        tff.federated_zip(after._replace(aggregators=do.aggregators)),
        tff.federated_zip(do.metrics),
    )

  weights_type = tff.to_type(NestedWeights(types.outer, types.inner))

  @types.computation(state_type.member)
  def get_model_weights(state: NestedState) -> NestedWeights:
    return NestedWeights(state.outer, state.inner)

  @types.computation(state_type.member, weights_type)
  def set_model_weights(
      state: NestedState, weights: NestedWeights
  ) -> NestedState:
    return state._replace(outer=weights.outer, inner=weights.inner)

  @tff.tensorflow.computation(state_type.member)
  def get_hparams(state: NestedState) -> dict[str, Structure]:
    found = collections.OrderedDict(state.hparams)
    found.update(method.get_hparams(state.method))
    return found

  @tff.tensorflow.computation(
      state_type.member, get_hparams.type_signature.result
  )
  def set_hparams(
      state: NestedState, hparams: dict[str, Structure]
  ) -> NestedState:
    numbers = collections.OrderedDict(
        (name, hparams[name]) for name in state.hparams
    )
    return state._replace(
        hparams=numbers, method=method.set_hparams(state.method, hparams)
    )

  return NestedProcess(
      method,
      plan,
      sent_rounds,
      initialize_fn=initialize,
      next_fn=next_fn,
      get_model_weights=get_model_weights,
      set_model_weights=set_model_weights,
      get_hparams_fn=get_hparams,
      set_hparams_fn=set_hparams,
  )
