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

from typing import Any, NamedTuple

import attrs
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import aggregation, rounds
from fednest_tff.algorithms.federation import (
    Federation,
    at_clients,
    at_server,
)
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

    def gradient(message, client):
      batch = sample(client.outer, client, message.seed, 0)
      return outer_level.gradient_in_inner(
          problem, message.outer, message.inner, batch
      )

    def product(message, client):
      def multiply():
        batch = sample(client.inner, client, message.seed, message.index)
        return inner_level.hessian_product(
            problem, message.outer, message.inner, message.vector, batch
        )

      return tf.cond(
          message.index >= 0,
          multiply,
          lambda: tf.nest.map_structure(tf.zeros_like, message.vector),
      )

    @tff.tensorflow.computation(point_type, federated.client_type)
    def client_gradient(point, client):
      return gradient(point, client), weight(client, point.seed, 0)

    @tff.tensorflow.computation(product_type, federated.client_type)
    def client_product(message, client):
      return (
          product(message, client),
          weight(client, message.seed, message.index),
      )

    @tff.tensorflow.computation(product_type, federated.client_type)
    def client_step(message, client):
      answer = tf.cond(
          tf.equal(message.index, 0),
          lambda: gradient(message, client),
          lambda: product(message, client),
      )
      return answer, weight(client, message.seed, message.index)

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
                state, there, clients
            ),
        ),
        'ihgp_product': rounds.build_round(
            federated,
            self.aggregations['ihgp'],
            product_type,
            lambda state, message, there, clients: self.product_round(
                state, there, clients
            ),
        ),
    }

  def _mean(self, client_fn, state, message, clients) -> rounds.RoundOutput:
    answers = tff.federated_map(client_fn, (message, clients))
    mean = self.aggregations['ihgp'](state, answers[0], answers[1])
    return rounds.RoundOutput(mean.state, mean.value, {})

  def gradient_round(self, state, point, clients) -> rounds.RoundOutput:
    """b (lines 3-6, without the factor N/l)."""
    return self._mean(self._client_gradient, state, point, clients)

  def product_round(self, state, message, clients) -> rounds.RoundOutput:
    """H v (lines 11-16)."""
    return self._mean(self._client_product, state, message, clients)

  def step_round(self, state, message, clients) -> rounds.RoundOutput:
    """b if `message.index` is 0, else H v."""
    return self._mean(self._client_step, state, message, clients)

  def __call__(self, state, x, y, smoothness, seed, clients):
    """p after at most N rounds; those beyond N' leave it as it is.

    Args:
      state: States of `aggregations` by name, at the server.
      x: The outer variable, at the clients already.
      y: The inner variable, at the clients already.
      smoothness: l, at the server.
      seed: The call's seed, at the server and at the clients.
      clients: The cohort.

    Returns:
      A `RoundOutput` whose value is p.
    """
    seed, seed_there = seed
    output = self.gradient_round(
        state['ihgp'], rounds.Point(x, y, seed_there), clients
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
      return self.solver.vector(state), _index(state, n)

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


def _index(state: inverse_hessian.SolverState, n) -> tf.Tensor:
  """n if the solver still wants its product, else -1."""
  return tf.where(state.products_left > 0, n, -1)


@attrs.frozen
class IHGPState:
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
    return attrs.evolve(
        self,
        outer=outer,
        inner=inner,
        step=np.int32(0),
        epoch=np.int32(self.epoch + 1),
    )


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
  if not problem.is_implicit:
    raise ValueError(
        f'`problem` is {problem.kind}: only bilevel and compositional problems'
        ' have an inverse-Hessian-gradient product.'
    )
  federated = Federation(problem, client_weighting, gradient_batch_size)
  stage = FedIHGP(
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
    index = tf.where(
        tf.equal(state.step, 0), 0, _index(state.solver, state.step)
    )
    return Product(
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
    return attrs.evolve(state, solver=solver, step=state.step + 1), metrics

  @tff.federated_computation(
      at_server(state_type), at_clients(federated.dataset_type)
  )
  def next_fn(state, datasets):
    message = tff.federated_broadcast(tff.federated_map(ask, state))
    clients = tff.federated_map(federated.read_client, datasets)
    output = stage.step_round(state.aggregators.ihgp, message, clients)
    taken = tff.federated_map(take, (state, output.value))
    new_state = _replace_aggregators(
        taken[0], tff.federated_zip(dict(ihgp=output.state))
    )
    return tff.learning.templates.LearningProcessOutput(
        tff.federated_zip(new_state), taken[1]
    )

  return rounds.RoundsProcess(initialize, next_fn, stage.rounds)


def _replace_aggregators(state: tff.Value, aggregators: tff.Value) -> IHGPState:
  """`state` at the server, field by field, with other aggregator states."""
  names = [field.name for field in attrs.fields(IHGPState)]
  values = {name: getattr(state, name) for name in names}
  return IHGPState(**(values | {'aggregators': aggregators}))
