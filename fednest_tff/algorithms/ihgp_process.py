"""FedIHGP as an iterative process with one communication round per `next`."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import fed_ihgp, product_rounds
from fednest_tff.algorithms.fed_ihgp import FederatedInverseHessian
from fednest_tff.algorithms.product_rounds import ProductMessage
from fednest_tff.federated import method, process
from fednest_tff.federated.aggregation import GlobalGradients
from fednest_tff.federated.process import NestedState
from fednest_tff.federated.rounds import (
    Executor,
    Round,
    ServerValue,
    WeightedAnswer,
)
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import sampling
from fednest_tff.local.client import Client, ClientFeatures
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class IHGPState(NamedTuple):
  """The method's part of the state.

  Attributes:
    step: Rounds done at this point (int32): 0, then 1 once b is there, ...
    solver: The solver's state; `solver.p` is the product so far, and
      `solver.products_left` the rounds still wanted.
  """

  step: ServerValue
  solver: ServerValue


class IHGPSteps(method.Method):
  """FedIHGP, of which each epoch is one round: b first, then products."""

  def __init__(
      self,
      types: ProblemTypes,
      wanted: FederatedInverseHessian,
      gradients: GlobalGradients,
  ):
    solver = fed_ihgp.build_solver(wanted)
    self._solver = solver
    self._rounds = rounds = product_rounds.ProductRounds(
        types, gradients, wanted.participation, solver.stops_at_random,
        solver.num_chains,
    )
    message_type = rounds.product.message_type
    gradient, product = rounds.gradient.client_work, rounds.product.client_work

    @types.computation(message_type, types.features, types.client)
    def client_step(
        message: ProductMessage, features: ClientFeatures, client: Client
    ) -> WeightedAnswer:
      return tf.cond(
          tf.equal(message.index, 0),
          lambda: gradient(
              (message.outer, message.inner, message.seed), features, client
          ),
          lambda: product(message, features, client),
      )

    self._round = Round(
        'ihgp_step', types, client_step, aggregation=rounds.product.aggregation
    )
    hparams = fed_ihgp.smoothness_hparams(solver, wanted)
    l_type = fed_ihgp.smoothness_type(types, solver)

    start = tff.tensorflow.computation(
        solver.start, [rounds.vector_type, l_type, types.seed]
    )
    state_type = tff.to_type(
        IHGPState(np.int32, start.type_signature.result)
    )

    @tff.tensorflow.computation(state_type)
    def ask(state: IHGPState) -> tuple[Structure, tf.Tensor]:
      next_product = fed_ihgp.product_index(state.solver)
      index = tf.where(tf.equal(state.step, 0), 0, next_product)
      return solver.vector(state.solver), index

    answer_type = client_step.type_signature.result[0]

    @tff.tensorflow.computation(state_type, answer_type, l_type, types.seed)
    def advance(
        state: IHGPState,
        answer: Structure,
        smoothness: tf.Tensor,
        seed: tf.Tensor,
    ) -> tuple[IHGPState, tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
      answer = rounds.means(answer)
      seed = sampling.fold_in(seed, Purpose.NEUMANN_STOP)
      after = fed_ihgp.checked(
          tf.cond(
              tf.equal(state.step, 0),
              lambda: solver.start(answer, smoothness, seed),
              lambda: solver.advance(state.solver, answer, smoothness),
          )
      )
      metrics = state.step, after.products_left, vector_space.norm(after.p)
      return IHGPState(state.step + 1, after), metrics

    self._ask, self._advance = ask, advance
    super().__init__(types, [self._round], hparams)

  def initial_state(
      self, x: Structure, y: Structure, numbers: method.Numbers, seed: tf.Tensor
  ) -> Structure:
    zero = self._rounds.per_chain(vector_space.zeros_like(y))
    smoothness = numbers.get('smoothness', ())
    return IHGPState(
        tf.constant(0), self._solver.start(zero, smoothness, seed)
    )

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    x, y, state = variables
    seed = plan.seeds[0]
    v, index = do.server(self._ask, state)
    answer = do.round(self._round, ProductMessage(x, y, v, index, seed)).value
    state, metrics = do.server(
        self._advance, state, answer, plan.numbers.get('smoothness', ()), seed
    )
    step, products_left, p_norm = metrics
    do.measure(step=step, products_left=products_left, p_norm=p_norm)
    return method.Variables(x, y, state)


def move_ihgp(
    state: NestedState, outer: Structure, inner: Structure
) -> NestedState:
  """A state of `build_fed_ihgp`, started anew at another point."""
  return state._replace(
      outer=outer, inner=inner, method=state.method._replace(step=np.int32(0))
  )


def build_fed_ihgp(
    problem: Problem,
    *,
    solver: FederatedInverseHessian,
    gradients: GlobalGradients = GlobalGradients(),
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """FedIHGP as an iterative process, one communication round per `next`.

  The first `next` at a point takes the gradient, each further one a product, so
  that every round n can have a cohort S_n drawn for it. When the solver is done
  (`state.method.solver.products_left` is 0), `next` leaves
  `state.method.solver.p` as it is; `move_ihgp` starts anew elsewhere.

  Args:
    problem: A bilevel or compositional problem.
    solver: N (Algorithm 3, line 1), l and how they are used.
    gradients: The samples and the aggregator of b and H v.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  if not problem.is_implicit:
    raise ValueError(
        f'`problem` is {problem.kind}: only bilevel and compositional problems'
        ' have an inverse-Hessian-gradient product.'
    )
  return process.build_process(IHGPSteps(types, solver, gradients), seed)
