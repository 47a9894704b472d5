"""FedNest and its family: Algorithm 1, one epoch per `next`.

| method          | outer   | inner   | rounds per epoch |
| --------------- | ------- | ------- | ---------------- |
| `fednest`       | FedOut  | FedInn  | 2T + N + 2       |
| `lfednest`      | LFedOut | LFedInn | T + 1            |
| `fednest_sgd`   | FedOut  | LFedInn | T + N + 2        |
| `lfednest_svrg` | LFedOut | FedInn  | 2T + 1           |

T is `inner_rounds` and N the solver's `terms`. The paper's budget for the
methods with FedOut is one round more: Algorithm 3 stops at N' <= N - 1. A
minimax problem does without FedIHGP's N rounds, and a compositional one has
N = 1.
"""

from collections.abc import Callable

from fednest_tff import options
from fednest_tff.algorithms.fed_ihgp import FederatedInverseHessian
from fednest_tff.algorithms.fed_inn import FedInn, InnerMethod
from fednest_tff.algorithms.fed_out import FedOut
from fednest_tff.algorithms.lfed_inn import LFedInn
from fednest_tff.algorithms.lfed_out import LFedOut
from fednest_tff.federated import method, process, server
from fednest_tff.federated.aggregation import Factory, GlobalGradients
from fednest_tff.federated.rounds import Executor
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local.descent import LocalWork
from fednest_tff.local.inverse_hessian import InverseHessian
from fednest_tff.problems import Problem


class Alternating(server.OuterStepMethod):
  """Algorithm 1: T inner calls, then one outer call at the new y.

  Its own state is the outer method's.
  """

  def __init__(
      self,
      inner: InnerMethod | None,
      outer: server.OuterStepMethod,
      inner_rounds: int,
  ):
    """Composes two methods.

    Args:
      inner: FedInn or LFedInn; `None` for a single-level problem.
      outer: FedOut or LFedOut.
      inner_rounds: T.
    """
    self._inner = inner
    self._outer = outer
    rounds, hparams = outer.rounds, outer.hparams
    if inner is not None:
      rounds = (*inner.rounds, *rounds)
      hparams = inner.hparams | hparams
    super().__init__(
        outer.types, rounds, hparams, outer.outer_step, inner_rounds + 1
    )

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    x, y, optimizer = variables
    if self._inner is not None:
      for seed in plan.seeds[:-1]:
        y = self._inner(do, x, y, plan.numbers['inner_learning_rate'], seed)
    variables = method.Variables(x, y, optimizer)
    return self._outer.epoch(do, variables, plan)


def build_alternating(
    problem: Problem,
    inner_rounds: int,
    client_weighting: ClientWeighting,
    seed: int,
    build_inner: Callable[[ProblemTypes], InnerMethod],
    build_outer: Callable[
        [ProblemTypes, method.HyperParameter | None], server.OuterStepMethod
    ],
) -> process.NestedProcess:
  """The process of Algorithm 1 with any inner and outer method.

  Args:
    problem: The problem.
    inner_rounds: T.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.
    build_inner: From the problem's types to the inner method; not called for a
      single-level problem.
    build_outer: From the types and beta, if there is one, to the outer method.

  Returns:
    A `NestedProcess`.
  """
  options.check_count('inner_rounds', inner_rounds)
  types = ProblemTypes(problem, client_weighting)
  inner, rate = None, None
  if problem.has_inner:
    inner = build_inner(types)
    rate = inner.hparams['inner_learning_rate']
  outer = build_outer(types, rate)
  return process.build_process(Alternating(inner, outer, inner_rounds), seed)


def build_lfed_nest(
    problem: Problem,
    *,
    inner: LocalWork = LocalWork(),
    outer: LocalWork = LocalWork(),
    inner_rounds: int = 1,
    solver: InverseHessian = InverseHessian(),
    inner_aggregator: Factory | None = None,
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """LFedNest: LFedInn and LFedOut.

  Arguments as in `build_fed_nest`.
  """
  return build_alternating(
      problem, inner_rounds, client_weighting, seed,
      lambda types: LFedInn(types, inner, inner_aggregator),
      lambda types, rate: LFedOut(
          types, outer, solver, outer_aggregator, outer_optimizer, rate
      ),
  )


def build_fed_nest_sgd(
    problem: Problem,
    *,
    inner: LocalWork = LocalWork(),
    outer: LocalWork = LocalWork(),
    inner_rounds: int = 1,
    solver: FederatedInverseHessian = FederatedInverseHessian(),
    gradients: GlobalGradients = GlobalGradients(),
    inner_aggregator: Factory | None = None,
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """FedNest_SGD: LFedInn and FedOut.

  Arguments as in `build_fed_nest`.
  """
  return build_alternating(
      problem, inner_rounds, client_weighting, seed,
      lambda types: LFedInn(types, inner, inner_aggregator),
      lambda types, rate: FedOut(
          types, outer, solver, gradients, outer_aggregator, outer_optimizer,
          rate,
      ),
  )


def build_lfed_nest_svrg(
    problem: Problem,
    *,
    inner: LocalWork = LocalWork(),
    outer: LocalWork = LocalWork(),
    inner_rounds: int = 1,
    solver: InverseHessian = InverseHessian(),
    gradients: GlobalGradients = GlobalGradients(),
    inner_aggregator: Factory | None = None,
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """LFedNest_SVRG: FedInn and LFedOut.

  Arguments as in `build_fed_nest`.
  """
  return build_alternating(
      problem, inner_rounds, client_weighting, seed,
      lambda types: FedInn(types, inner, gradients, inner_aggregator),
      lambda types, rate: LFedOut(
          types, outer, solver, outer_aggregator, outer_optimizer, rate
      ),
  )


def build_fed_nest(
    problem: Problem,
    *,
    inner: LocalWork = LocalWork(),
    outer: LocalWork = LocalWork(),
    inner_rounds: int = 1,
    solver: FederatedInverseHessian = FederatedInverseHessian(),
    gradients: GlobalGradients = GlobalGradients(),
    inner_aggregator: Factory | None = None,
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """FedNest (Algorithm 1): FedInn and FedOut.

  A client's dataset has single examples, unbatched. Metrics of an epoch: the
  losses at the cohort (`inner_loss` where the last inner call began,
  `outer_loss` at x and the new y); `inner_gradient_norm` (of q) and
  `hypergradient_norm` (of h) where the method forms them; `client_drift`, the
  root mean square of ||y_i - y+||; `outer_drift`, the same for ||x_i - x+||;
  the norms of both updates; the numbers of clients and examples. A quantity
  that is not finite stops the call with an error that names it.

  Args:
    problem: From `bilevel`, `minimax`, `compositional` or `single_level`.
    inner: beta, tau_i and the minibatches of the inner steps; not for
      single-level problems.
    outer: alpha, tau_i and the minibatches of the outer steps.
    inner_rounds: T, inner calls per epoch.
    solver: N, l and how FedIHGP uses them.
    gradients: The samples and the aggregator of q, h and FedIHGP's vectors.
    inner_aggregator: A `tff.aggregators` factory for y+ - y in place of the
      plain mean.
    outer_aggregator: One for x+ - x.
    outer_optimizer: Of `tff.learning.optimizers`, for the server's step on x
      with minus the mean change as gradient; `None` to add the mean change.
    client_weighting: 'uniform', 'num_examples', `tff.learning.ClientWeighting`
      or a function of a client's examples. The weights define the problem,
      mean_i w_i f_i and mean_i w_i g_i. Clients without inner or outer examples
      have weight 0.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  return build_alternating(
      problem, inner_rounds, client_weighting, seed,
      lambda types: FedInn(types, inner, gradients, inner_aggregator),
      lambda types, rate: FedOut(
          types, outer, solver, gradients, outer_aggregator, outer_optimizer,
          rate,
      ),
  )
