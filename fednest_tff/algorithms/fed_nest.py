"""FedNest and its family: Algorithm 1, one epoch per `next`.

| method            | outer                      | inner   | rounds per epoch |
| ----------------- | -------------------------- | ------- | ---------------- |
| `fednest`         | FedOut                     | FedInn  | 2T + N + 2       |
| `lfednest`        | LFedOut                    | LFedInn | T + 1            |
| `fednest_sgd`     | FedOut                     | LFedInn | T + N + 2        |
| `lfednest_svrg`   | LFedOut                    | FedInn  | 2T + 1           |
| `lfednest_nonalt` | both on the client, in turn          | 1                |
| `fedavg_s`        | both on the client, simultaneously   | 1                |

T is `inner_rounds` and N `neumann_terms`. The paper's budget for the methods
with FedOut is one round more: Algorithm 3 stops at N' <= N - 1. A minimax
problem does without FedIHGP's N rounds, and a compositional one has N = 1.
"""

from typing import Any, NamedTuple

import tensorflow_federated as tff

from fednest_tff.algorithms import aggregation, epoch, fed_ihgp
from fednest_tff.algorithms.fed_inn import FedInn
from fednest_tff.algorithms.fed_out import FedOut
from fednest_tff.algorithms.federation import Federation
from fednest_tff.algorithms.joint import Joint
from fednest_tff.algorithms.lfed_inn import LFedInn
from fednest_tff.algorithms.lfed_out import LFedOut
from fednest_tff.local import descent, inverse_hessian
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure

METHODS = (
    'fednest',
    'lfednest',
    'fednest_sgd',
    'lfednest_svrg',
    'lfednest_nonalt',
    'fedavg_s',
)
_FED_OUT = ('fednest', 'fednest_sgd')
_FED_INN = ('fednest', 'lfednest_svrg')
_JOINT = ('lfednest_nonalt', 'fedavg_s')


class NestedWeights(NamedTuple):
  """What a nested process learns.

  Attributes:
    outer: x.
    inner: y; empty for a single-level problem.
  """

  outer: Structure
  inner: Structure


class FedNestProcess(tff.learning.templates.LearningProcess):
  """A `LearningProcess` whose communication rounds can be run one by one.

  Attributes:
    rounds: The epoch's rounds as computations of their own, by name.
    server: What the server does between the rounds, by name.
    solver: FedIHGP's solver; `None` if the method does without FedIHGP.
  """

  def __init__(self, epoch_: epoch.Epoch, solver, get_weights, set_weights):
    super().__init__(epoch_.initialize, epoch_.next, get_weights, set_weights)
    self._rounds = epoch_.rounds
    self._server = epoch_.server
    self._solver = solver

  @property
  def rounds(self) -> dict[str, tff.Computation]:
    return dict(self._rounds)

  @property
  def server(self) -> dict[str, tff.Computation]:
    return dict(self._server)

  @property
  def solver(self) -> inverse_hessian.Solver | None:
    return self._solver


def _check_method(
    problem: Problem,
    method: str,
    inner_rounds: int,
    inner_aggregator: Any,
    inner_learning_rate: Any,
):
  """Refuses arguments that do not go together."""
  if method not in METHODS:
    raise ValueError(f'`method` must be one of {METHODS}; got {method!r}.')
  if not isinstance(inner_rounds, int) or inner_rounds < 1:
    raise ValueError(
        f'`inner_rounds` must be a positive integer; got {inner_rounds!r}.'
    )
  if problem.has_inner and inner_learning_rate is None:
    raise ValueError('`inner_learning_rate` is missing.')
  if method in _JOINT and inner_aggregator is not None:
    raise ValueError(
        f'`inner_aggregator` has no place in {method}, which sends one update'
        ' of both variables: give `outer_aggregator`.'
    )


def build_fed_nest(
    problem: Problem,
    method: str = 'fednest',
    *,
    outer_learning_rate: Any,
    inner_learning_rate: Any = None,
    inner_rounds: int = 1,
    inner_local_steps: Any = None,
    inner_local_epochs: int | None = None,
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
    inner_aggregator: aggregation.Factory | None = None,
    outer_aggregator: aggregation.Factory | None = None,
    gradient_aggregator: aggregation.Factory | None = None,
    outer_optimizer: tff.learning.optimizers.Optimizer | None = None,
    seed: int = 0,
) -> FedNestProcess:
  """A method of the FedNest family as a `LearningProcess`.

    initialize: `( -> NestedState@SERVER)`
    next: `(<NestedState@SERVER, {dataset}@CLIENTS> ->
            <state=NestedState@SERVER, metrics=<...>@SERVER>)`
    get_model_weights: `(NestedState -> NestedWeights)`
    set_model_weights: `(<NestedState, NestedWeights> -> NestedState)`

  A client's dataset has single examples, unbatched. Metrics of an epoch: the
  losses at the cohort (`inner_loss` where the last inner call began,
  `outer_loss` at x and the new y), `inner_gradient_norm` (of q) and
  `hypergradient_norm` (of h) where the method forms them, `client_drift`, the
  root mean square of ||y_i - y+||, and `outer_drift`, that of ||x_i - x+||, the
  norms of both updates, and the numbers of clients and examples. A quantity
  that is not finite stops the call with an error that names it.

  Args:
    problem: From `bilevel`, `minimax`, `compositional` or `single_level`.
    method: One of `METHODS`.
    outer_learning_rate: alpha, a number or a function of the epoch (int32).
    inner_learning_rate: beta, likewise; not for single-level problems.
    inner_rounds: T, inner calls per epoch.
    inner_local_steps: tau_i of the inner steps: a number, or a function of the
      client's inner examples. FedAvg-S takes as many.
    inner_local_epochs: The same in passes over the client's inner examples,
      tau_i = epochs * ceil(n_i / B). Default: one pass.
    outer_local_steps: tau_i of the outer steps. Default: one step.
    outer_local_epochs: The same in passes over the client's outer examples.
    batch_size: B, of all minibatches in local steps; `None` for all examples.
    divide_by_local_steps: Whether alpha_i = alpha / tau_i and beta_i = beta /
      tau_i, as in the theory.
    neumann_terms: N.
    ihgp: How H^-1 grad_y f is approximated: 'stochastic' (Algorithm 3),
      'truncated' (the sum of N terms) or 'cg' (N - 1 steps).
    smoothness: l, at least the largest eigenvalue of the inner Hessian
      (`build_power_iteration` estimates it). Default: 1 / beta, with which the
      series is that of the unrolled inner descent.
    participation: Share of the cohort in each of FedIHGP's S_n.
    client_weighting: 'uniform', 'num_examples', `tff.learning.ClientWeighting`
      or a function of a client's examples. The weights define the problem,
      mean_i w_i f_i and mean_i w_i g_i. Clients without inner or outer examples
      have weight 0.
    gradient_batch_size: Size of the samples outside the local loops (xi_i,
      zeta_i, xi_{i,0}, zeta_{i,n}); `None` for all examples.
    inner_aggregator: A `tff.aggregators` factory for y+ - y.
    outer_aggregator: One for x+ - x, or for both in the one-round methods.
    gradient_aggregator: One for q, h and FedIHGP's vectors. An aggregator that
      gives privacy gives it only if all three do; losses and norms are plain
      means in any case.
    outer_optimizer: Of `tff.learning.optimizers`, for the server's step on x
      with minus the mean change as gradient; `None` to take the mean as it is.
    seed: Of the initial point and of all draws.

  Returns:
    A `FedNestProcess`.
  """
  federated = Federation(problem, client_weighting, gradient_batch_size)
  _check_method(
      problem, method, inner_rounds, inner_aggregator, inner_learning_rate
  )
  inner_work = descent.build_work(
      'inner', inner_local_steps, inner_local_epochs, batch_size,
      divide_by_local_steps,
  )
  outer_work = descent.build_work(
      'outer', outer_local_steps, outer_local_epochs, batch_size,
      divide_by_local_steps,
  )
  solver = fed_ihgp.solver_for(problem, ihgp, neumann_terms)

  if method in _JOINT:
    joint = Joint(
        federated,
        inner_work,
        outer_work,
        inner_rounds,
        solver,
        simultaneous=method == 'fedavg_s',
        aggregator=outer_aggregator,
        optimizer=outer_optimizer,
    )
    stages = epoch.Stages(joint=joint, inner_rounds=inner_rounds)
  else:
    if not problem.has_inner:
      inner = None
    elif method in _FED_INN:
      inner = FedInn(
          federated, inner_work, inner_aggregator, gradient_aggregator
      )
    else:
      inner = LFedInn(federated, inner_work, inner_aggregator)
    if method in _FED_OUT:
      outer = FedOut(
          federated, outer_work, solver, participation, outer_aggregator,
          gradient_aggregator, outer_optimizer,
      )
    else:
      outer = LFedOut(
          federated, outer_work, solver, outer_aggregator, outer_optimizer
      )
    stages = epoch.Stages(inner, outer, inner_rounds=inner_rounds)

  built = epoch.build_epoch(
      federated,
      stages,
      inner_learning_rate,
      outer_learning_rate,
      smoothness,
      seed,
  )
  state_type = built.initialize.type_signature.result.member
  weights_type = tff.to_type(
      NestedWeights(federated.outer_type, federated.inner_type)
  )

  @tff.tensorflow.computation(state_type)
  def get_weights(state):
    return NestedWeights(state.outer, state.inner)

  @tff.tensorflow.computation(state_type, weights_type)
  def set_weights(state, weights):
    return state._replace(outer=weights.outer, inner=weights.inner)

  return FedNestProcess(
      built, solver if method in _FED_OUT else None, get_weights, set_weights
  )
