"""FedOut: federated SVRG on the outer problem (Algorithm 2).

One call takes FedIHGP's rounds, if the problem is implicit, and two more:

  FedIHGP         p ~ H^-1 mean_i grad_y f_i                       line 3
  hypergradient   h = mean_i [F_i(x) - grad^2_xy g_i p],           lines 4-8
                  F_i = grad_x f_i(., y); no term in p if minimax
  update          x_i <- x_i - alpha_i (F_i(x_i; s) - F_i(x; s) + h),
                  tau_i times from x_i = x; then x+ = mean_i x_i   lines 9-14

Only the direct gradient F_i is corrected in local steps; the indirect part,
which would need the other clients' Hessians, stays in h as it was at x. With no
inner problem this is federated SVRG (section 3.3).
"""

import collections
from typing import NamedTuple

import tensorflow as tf

from fednest_tff.algorithms import fed_ihgp
from fednest_tff.algorithms.fed_ihgp import FederatedInverseHessian
from fednest_tff.algorithms.fed_inn import DescentMessage
from fednest_tff.federated import method, process, server
from fednest_tff.federated.aggregation import Factory, GlobalGradients
from fednest_tff.federated.rounds import Answer, Executor, Round, ServerValue
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import derivatives, descent
from fednest_tff.local.client import Client
from fednest_tff.local.descent import LocalWork
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Batch, Problem
from fednest_tff.vector_space import Structure


class HypergradientMessage(NamedTuple):
  """The message before the hypergradient: (x, y), p and the call's seed."""

  outer: Structure
  inner: Structure
  p: Structure
  seed: tf.Tensor


class FedOut(server.OuterStepMethod):
  """FedOut, alone or as a part of an epoch; see `build_fed_out`."""

  def __init__(
      self,
      types: ProblemTypes,
      work: LocalWork,
      solver: FederatedInverseHessian | None,
      gradients: GlobalGradients,
      aggregator: Factory | None,
      optimizer: server.Optimizer | None,
      inner_learning_rate: method.HyperParameter | None = None,
  ):
    """Traces the computations; see `build_fed_out`.

    Args:
      types: The problem's types.
      work: alpha, and the local steps.
      solver: Of FedIHGP; `None` if p comes from elsewhere (`descend`).
      gradients: The samples and the aggregator of h and FedIHGP's vectors.
      aggregator: Factory for x+ - x.
      optimizer: The server's.
      inner_learning_rate: beta, from which l follows if it is not given.
    """
    problem, steps = types.problem, work.at_level('outer').without_rate()
    batch_size = gradients.batch_size
    chosen, smoothness = None, {}
    if solver is not None:
      chosen = fed_ihgp.solver_for(problem, solver)
      smoothness = fed_ihgp.smoothness_hparams(
          chosen, solver, inner_learning_rate
      )
    p_type = types.inner if problem.is_implicit else ()

    @types.computation(
        HypergradientMessage(types.outer, types.inner, p_type, types.seed),
        types.client,
    )
    def client_hypergradient(
        message: HypergradientMessage, client: Client
    ) -> Answer:
      x, y, p, seed = message

      def sample(examples: Batch, purpose: Purpose) -> Batch:
        return client_lib.sample(
            client, examples, batch_size, seed, purpose
        )

      value, h_i = derivatives.hypergradient(
          problem, x, y, p,
          sample(client.outer, Purpose.OUTER_GRADIENT),
          sample(client.inner, Purpose.MIXED_PRODUCT),
      )
      return h_i, collections.OrderedDict(outer_loss=value)

    @types.computation(
        DescentMessage(
            types.outer, types.inner, types.outer, types.scalar, types.seed
        ),
        types.client,
    )
    def client_update(message: DescentMessage, client: Client) -> Answer:
      x, y, h, alpha, seed = message
      x_i = descent.svrg(
          lambda at, xi: derivatives.direct_gradient(problem, at, y, xi)[1],
          x,
          h,
          client.outer,
          steps,
          steps.num_steps(client.outer),
          alpha,
          client_lib.seed_of(client, seed, Purpose.OUTER_STEPS),
          problem.project_outer,
      )
      return descent.change(x_i, x, problem.scalar_dtype)

    self._hypergradient = Round(
        'hypergradient', types, client_hypergradient, 'gradient_aggregator',
        gradients.aggregator,
    )
    self._update = Round(
        'outer_update', types, client_update, 'outer_aggregator', aggregator
    )
    self._check = server.build_check(
        types.outer,
        'FedOut: h, the hypergradient (Algorithm 2, line 8), is not finite. Try'
        ' a smaller outer_learning_rate or inner_learning_rate, or a larger'
        ' smoothness l',
    )
    rounds = [self._hypergradient, self._update]
    self._fed_ihgp = None
    if solver is not None and chosen is not None:
      self._fed_ihgp = fed_ihgp.FedIHGP(
          types, chosen, gradients, solver.participation
      )
      rounds = [*self._fed_ihgp.rounds, *rounds]
    step = server.ServerStep(
        types, 'outer',
        'FedOut: x+, the new outer variable (Algorithm 2, line 14),', optimizer,
    )
    rates = method.learning_rates(outer_learning_rate=work.learning_rate)
    super().__init__(types, rounds, rates | smoothness, step)

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    """One call, at a fixed y."""
    x, y, _ = variables
    p = ()
    if self._fed_ihgp is not None:
      smoothness = plan.numbers.get('smoothness', ())
      p = self._fed_ihgp(do, x, y, smoothness, plan.seeds[-1])  # line 3
    return self.descend(do, variables, p, plan)

  def descend(
      self,
      do: Executor,
      variables: method.Variables,
      p: ServerValue,
      plan: method.Plan,
  ) -> method.Variables:
    """The call after line 3, with p from FedIHGP or from elsewhere."""
    x, y, optimizer = variables
    alpha, seed = plan.numbers['outer_learning_rate'], plan.seeds[-1]
    gradient = do.round(  # lines 4-8
        self._hypergradient, HypergradientMessage(x, y, p, seed)
    )
    h, norm = do.server(self._check, gradient.value)
    do.measure(**gradient.metrics, hypergradient_norm=norm)
    changes = do.round(  # lines 9-13
        self._update, DescentMessage(x, y, h, alpha, seed)
    )
    optimizer, x = self.outer_step(do, optimizer, x, changes)  # line 14
    return method.Variables(x, y, optimizer)


def build_fed_out(
    problem: Problem,
    *,
    outer: LocalWork = LocalWork(),
    solver: FederatedInverseHessian = FederatedInverseHessian(),
    gradients: GlobalGradients = GlobalGradients(),
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """FedOut as an iterative process: x <- FedOut(x, y, alpha) at a fixed y.

  For a single-level problem this is all there is: federated SVRG. Its rounds
  are 'ihgp_gradient' and 'ihgp_product' (line 3, if the problem is implicit),
  'hypergradient' (lines 4-8) and 'outer_update' (lines 9-13).

  Args:
    problem: Any problem.
    outer: alpha, tau_i and the minibatches xi_{i,nu}.
    solver: N and how FedIHGP uses it; l is needed for a bilevel problem unless
      the kind is 'cg'.
    gradients: The samples xi_i, zeta_i, xi_{i,0} and zeta_{i,n}, and the
      aggregator of h and FedIHGP's vectors.
    outer_aggregator: A `tff.aggregators` factory for x+ - x in place of the
      plain mean.
    outer_optimizer: The server's; `None` to add the mean change.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  fed_out = FedOut(
      types, outer, solver, gradients, outer_aggregator, outer_optimizer
  )
  return process.build_process(fed_out, seed)
