"""LFedNest-NonAlt and FedAvg-S: both variables in one communication round.

Clients step on x and y locally and send both; the server averages them. In
LFedNest-NonAlt (appendix H.1) a client first does all of its inner steps, then
its outer steps at its y_i; in FedAvg-S (section 4.3) both variables step at
once, descent in x and ascent in y for a minimax problem.
"""

import collections
from typing import NamedTuple

import tensorflow as tf

from fednest_tff import options
from fednest_tff.algorithms import fed_ihgp
from fednest_tff.federated import method, process, server
from fednest_tff.federated.aggregation import Factory
from fednest_tff.federated.rounds import Answer, Averaged, Executor, Round
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import (
    derivatives,
    descent,
    inverse_hessian,
    local_hypergradient,
)
from fednest_tff.local.client import Client
from fednest_tff.local.descent import LocalWork
from fednest_tff.local.inverse_hessian import InverseHessian
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class OneRoundMessage(NamedTuple):
  """The message of a one-round method: (x, y), beta, alpha, l and a seed.

  beta is empty without an inner variable, l if the solver does not need it.
  """

  outer: Structure
  inner: Structure
  inner_learning_rate: Structure
  outer_learning_rate: tf.Tensor
  smoothness: Structure
  seed: tf.Tensor


def message_type(
    types: ProblemTypes, solver: inverse_hessian.Solver | None
) -> OneRoundMessage:
  """The TFF types of a `OneRoundMessage`."""
  return OneRoundMessage(
      types.outer,
      types.inner,
      types.scalar if types.problem.has_inner else (),
      types.scalar,
      fed_ihgp.smoothness_type(types, solver),
      types.seed,
  )


def build_message(
    variables: method.Variables, plan: method.Plan
) -> OneRoundMessage:
  """The message of an epoch."""
  return OneRoundMessage(
      variables.outer,
      variables.inner,
      plan.numbers.get('inner_learning_rate', ()),
      plan.numbers['outer_learning_rate'],
      plan.numbers.get('smoothness', ()),
      plan.seeds[-1],
  )


def build_hparams(
    problem: Problem,
    inner: LocalWork,
    outer: LocalWork,
    solver: inverse_hessian.Solver | None,
    wanted: InverseHessian,
) -> dict[str, method.HyperParameter]:
  """alpha, beta and l, as far as the problem and the solver need them."""
  hparams = method.learning_rates(outer_learning_rate=outer.learning_rate)
  if problem.has_inner:
    hparams |= method.learning_rates(inner_learning_rate=inner.learning_rate)
    hparams |= fed_ihgp.smoothness_hparams(
        solver, wanted, hparams['inner_learning_rate']
    )
  return hparams


class OneRound(server.OuterStepMethod):
  """LFedNest-NonAlt or FedAvg-S; see the builders."""

  def __init__(
      self,
      types: ProblemTypes,
      inner: LocalWork,
      outer: LocalWork,
      inner_rounds: int,
      solver: InverseHessian,
      simultaneous: bool,
      aggregator: Factory | None,
      optimizer: server.Optimizer | None,
  ):
    """Traces the computations.

    Args:
      types: The problem's types.
      inner: beta, and the inner steps; FedAvg-S takes as many on both.
      outer: alpha, and the outer steps.
      inner_rounds: T.
      solver: The local series.
      simultaneous: FedAvg-S if true, else LFedNest-NonAlt.
      aggregator: Factory for (x+ - x, y+ - y).
      optimizer: The server's for x.
    """
    problem = types.problem
    options.check_count('inner_rounds', inner_rounds)
    inner, outer = inner.at_level('inner'), outer.at_level('outer')
    chosen = fed_ihgp.solver_for(problem, solver)
    hparams = build_hparams(problem, inner, outer, chosen, solver)
    inner, outer = inner.without_rate(), outer.without_rate()

    def steps(
        message: OneRoundMessage, client: Client, seed: tf.Tensor
    ) -> tuple[Structure, Structure]:
      point = problem, chosen, message.outer, message.inner, client
      numbers = message[2:5]
      if simultaneous:
        work = inner if problem.has_inner else outer
        return local_hypergradient.simultaneous_steps(
            *point, work, *numbers, seed
        )
      return local_hypergradient.alternating_steps(
          *point, inner, outer, inner_rounds, *numbers, seed
      )

    @types.computation(message_type(types, chosen), types.client)
    def client_update(message: OneRoundMessage, client: Client) -> Answer:
      x, y = message.outer, message.inner
      x_i, y_i = steps(
          message,
          client,
          client_lib.seed_of(client, message.seed, Purpose.CLIENT_STEPS),
      )
      x_change, x_metrics = descent.change(x_i, x, problem.scalar_dtype)
      y_change, y_metrics = descent.change(y_i, y, problem.scalar_dtype)
      metrics = collections.OrderedDict(
          outer_loss=derivatives.outer_loss(problem, x, y, client.outer),
          outer_squared_change=x_metrics['squared_change'],
          inner_squared_change=y_metrics['squared_change'],
      )
      if problem.has_inner:
        features = problem.representation(x, client.inner)
        metrics['inner_loss'] = problem.inner_loss(x, y, features)
      return (x_change, y_change), metrics

    self._update = Round(
        'joint_update', types, client_update, 'outer_aggregator', aggregator
    )
    self._inner_step = None
    if problem.has_inner:
      self._inner_step = server.ServerStep(types, 'inner', 'y+')
    step = server.ServerStep(types, 'outer', 'x+', optimizer)
    # As in the other methods, the last of T + 1 seeds is that of the outer
    # steps.
    super().__init__(types, [self._update], hparams, step, inner_rounds + 1)

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    x, y, optimizer = variables
    update = do.round(self._update, build_message(variables, plan))
    changes = {
        level: Averaged(
            update.value[k],
            dict(squared_change=update.metrics[f'{level}_squared_change']),
        )
        for k, level in enumerate(('outer', 'inner'))
    }
    do.measure(outer_loss=update.metrics['outer_loss'])
    if self._inner_step is not None:
      do.measure(inner_loss=update.metrics['inner_loss'])
      y = self._inner_step(do, (), y, changes['inner'])[1]
    optimizer, x = self.outer_step(do, optimizer, x, changes['outer'])
    return method.Variables(x, y, optimizer)


def build_lfed_nest_nonalt(
    problem: Problem,
    *,
    inner: LocalWork = LocalWork(),
    outer: LocalWork = LocalWork(),
    inner_rounds: int = 1,
    solver: InverseHessian = InverseHessian(),
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """LFedNest-NonAlt: clients step on y, then on x, and send both.

  Args:
    problem: Any problem.
    inner: beta, tau_i and the minibatches of the inner steps.
    outer: alpha, tau_i and the minibatches of the outer steps.
    inner_rounds: T, how often a client does its inner work per epoch.
    solver: The local Neumann series.
    outer_aggregator: A `tff.aggregators` factory for (x+ - x, y+ - y).
    outer_optimizer: The server's for x; `None` to add the mean change.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  one_round = OneRound(
      types, inner, outer, inner_rounds, solver, False, outer_aggregator,
      outer_optimizer,
  )
  return process.build_process(one_round, seed)


def build_fed_avg_s(
    problem: Problem,
    *,
    inner: LocalWork = LocalWork(),
    outer: LocalWork = LocalWork(),
    solver: InverseHessian = InverseHessian(),
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """FedAvg-S: clients step on x and y at once and send both.

  Args:
    problem: Any problem.
    inner: beta, and tau_i and the minibatches of both variables.
    outer: alpha; tau_i and the minibatches, too, without an inner variable.
    solver: The local Neumann series.
    outer_aggregator: A `tff.aggregators` factory for (x+ - x, y+ - y).
    outer_optimizer: The server's for x; `None` to add the mean change.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  one_round = OneRound(
      types, inner, outer, 1, solver, True, outer_aggregator, outer_optimizer
  )
  return process.build_process(one_round, seed)
