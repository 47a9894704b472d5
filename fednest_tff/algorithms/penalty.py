"""The penalty method: bilevel problems by first derivatives alone.

It replaces the bilevel problem by a penalty on the inner optimality gap,

  min_{x, y} max_w mean_i [ f_i(x, y) + lambda (g_i(x, y) - g_i(x, w)) ],

in the style of F2SA (A Fully First-Order Method for Stochastic Bilevel
Optimization. J. Kwon, D. Kwon, S. Wright, R. Nowak. ICML 2023). One epoch is
one round, federated like SimFBO: clients step on x, y and w at once along

  x   grad_x f_i(x, y) + lambda (grad_x g_i(x, y) - grad_x g_i(x, w))
  y   grad_y f_i(x, y) / lambda + grad_y g_i(x, y)
  w   grad_y g_i(x, w),

send the sums of their directions, and the server steps along the mean. No
second derivative is taken. At the solution y - w is about H^-1 grad_y f /
lambda, so the direction of x is the hypergradient up to an error of order
1 / lambda: doubling lambda halves it.

Choices made here, where the paper can be read differently: w starts where y
does; the step size of y is divided by lambda, the step size of w is not; both
terms in g of a local step have the same minibatch.
"""

import tensorflow as tf

from fednest_tff import options
from fednest_tff.algorithms import sim_fbo
from fednest_tff.algorithms.server_steps import ServerSteps
from fednest_tff.federated import method, process
from fednest_tff.federated.aggregation import Factory
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import simultaneous as local
from fednest_tff.local.descent import Schedule
from fednest_tff.local.simultaneous import SimultaneousWork
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class Penalty(sim_fbo.SimFBO):
  """SimFBO with other directions, and w in the place of v."""

  def initial_linear(self, y: Structure) -> Structure:
    return tf.nest.map_structure(tf.identity, y)


def build_penalty(
    problem: Problem,
    *,
    penalty: float | Schedule = 10.0,
    work: SimultaneousWork = SimultaneousWork(),
    server: ServerSteps = ServerSteps(),
    aggregator: Factory | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """Penalty: SimFBO on a penalised problem, first derivatives only.

  Its only round is 'simultaneous_update'; w is in `state.method.linear`.

  Args:
    problem: A bilevel or compositional problem.
    penalty: lambda: a number, or a function of the epoch, usually increasing.
    work: The local step sizes (`linear_learning_rate` is that of w), tau_i and
      the minibatches.
    server: The server's step sizes, or optimizers; the radius limits w.
    aggregator: A `tff.aggregators` factory for what clients send.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  if not problem.is_implicit:
    raise ValueError(
        f'`problem` is {problem.kind}: the penalty method is for bilevel and'
        ' compositional problems. simfbo solves this one by first derivatives.'
    )
  if not callable(penalty):
    options.check_positive('penalty', penalty, 'or a function of the epoch')
  penalty_method = Penalty(
      'Penalty',
      types,
      work,
      server,
      coefficients=None,
      normalize=False,
      aggregator=aggregator,
      direction=lambda number, at, batch: local.penalty_direction(
          problem, number, at, batch
      ),
      number=method.learning_rates(penalty=penalty),
  )
  return process.build_process(penalty_method, seed)
