"""LFedOut: the outer problem by local hypergradients (appendix A).

One call is one communication round: tau_i local steps along the hypergradient
that the client's own data give, local Neumann series included, then
x+ = mean_i x_i. The local Hessian makes it biased when clients differ.

The paper prints the last factor of line 6 as grad_x f_i(y_{i,nu}, y); it is
grad_y f_i(x_{i,nu}, y).
"""

from typing import NamedTuple

import tensorflow as tf

from fednest_tff.algorithms import fed_ihgp
from fednest_tff.federated import method, process, server
from fednest_tff.federated.aggregation import Factory
from fednest_tff.federated.rounds import Answer, Executor, Round
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import derivatives, descent, local_hypergradient
from fednest_tff.local.client import Client
from fednest_tff.local.descent import LocalWork
from fednest_tff.local.inverse_hessian import InverseHessian
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class LocalDescentMessage(NamedTuple):
  """The message before local steps on x: (x, y), alpha, l and a seed.

  l is empty if the solver does not need it.
  """

  outer: Structure
  inner: Structure
  learning_rate: tf.Tensor
  smoothness: Structure
  seed: tf.Tensor


class LFedOut(server.OuterStepMethod):
  """LFedOut, alone or as a part of an epoch; see `build_lfed_out`."""

  def __init__(
      self,
      types: ProblemTypes,
      work: LocalWork,
      solver: InverseHessian,
      aggregator: Factory | None,
      optimizer: server.Optimizer | None,
      inner_learning_rate: method.HyperParameter | None = None,
  ):
    problem, steps = types.problem, work.at_level('outer').without_rate()
    chosen = fed_ihgp.solver_for(problem, solver)

    @types.computation(
        LocalDescentMessage(
            types.outer, types.inner, types.scalar,
            fed_ihgp.smoothness_type(types, chosen), types.seed,
        ),
        types.client,
    )
    def client_update(message: LocalDescentMessage, client: Client) -> Answer:
      x, y, alpha, smoothness, seed = message
      x_i = local_hypergradient.outer_steps(
          problem, chosen, x, y, client, steps, alpha, smoothness,
          client_lib.seed_of(client, seed, Purpose.OUTER_STEPS),
      )
      change, metrics = descent.change(x_i, x, problem.scalar_dtype)
      loss = derivatives.outer_loss(problem, x, y, client.outer)
      metrics['outer_loss'] = loss
      return change, metrics

    self._update = Round(
        'outer_update', types, client_update, 'outer_aggregator', aggregator
    )
    hparams = method.learning_rates(outer_learning_rate=work.learning_rate)
    hparams |= fed_ihgp.smoothness_hparams(chosen, solver, inner_learning_rate)
    step = server.ServerStep(types, 'outer', 'LFedOut: x+', optimizer)
    super().__init__(types, [self._update], hparams, step)

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    """One call, at a fixed y."""
    x, y, optimizer = variables
    changes = do.round(
        self._update,
        LocalDescentMessage(
            x,
            y,
            plan.numbers['outer_learning_rate'],
            plan.numbers.get('smoothness', ()),
            plan.seeds[-1],
        ),
    )
    do.measure(outer_loss=changes.metrics['outer_loss'])
    optimizer, x = self.outer_step(do, optimizer, x, changes)
    return method.Variables(x, y, optimizer)


def build_lfed_out(
    problem: Problem,
    *,
    outer: LocalWork = LocalWork(),
    solver: InverseHessian = InverseHessian(),
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """LFedOut as an iterative process; arguments as in `build_fed_out`.

  Its only round is 'outer_update'.
  """
  types = ProblemTypes(problem, client_weighting)
  lfed_out = LFedOut(types, outer, solver, outer_aggregator, outer_optimizer)
  return process.build_process(lfed_out, seed)
