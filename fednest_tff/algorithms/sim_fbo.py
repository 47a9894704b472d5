"""SimFBO and ShroFBO: one round per epoch, all variables at once.

One epoch, with z = (x, y, v) and G_i(z) as in `local.simultaneous`:

  clients   z_i <- z_i - eta a_k G_i(z_i), k = 0, ..., tau_i - 1, from z_i = z
            h_i = sum_k a_k G_i(z_i),  A_i = sum_k a_k
  server    z <- z - gamma mean_i h_i                            SimFBO
            z <- z - gamma (mean_i A_i) mean_i (h_i / A_i)       ShroFBO

Then v is projected on a ball. eta and gamma have a number for each variable.
With a server momentum beta the server steps along m <- beta m + h in place of
h, the mean of either method. A mean over few clients with few labels each is
then averaged over about 1 / (1 - beta) rounds.
With gamma = eta, the default, the new point of SimFBO is the mean of the
clients' points. When clients take unequal numbers of steps, SimFBO solves a
problem in which each client counts tau_i times, ShroFBO the problem as it is.

- A minimax problem has no v: this is local SGDA with two-sided step sizes, and
  Fed-Norm-SGDA when normalised.
- For a compositional problem H = I: with a step of 1, v = mean_i grad f_i(y).
- A single-level problem has x alone: this is FedAvg with a step size of the
  server, and FedNova when normalised.

SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel
Learning. Y. Yang, P. Xiao, K. Ji. NeurIPS 2023. Choices made here, where the
paper can be read differently: v stands for +H^-1 grad_y f; both gradients and
both products of a local step are taken at the client's current point, those of
f with one minibatch of outer examples, those of g with one of inner examples; v
is projected by the server only.
"""

from collections.abc import Callable

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import server_steps, simultaneous
from fednest_tff.algorithms.server_move import ServerMove, update_norms
from fednest_tff.algorithms.server_steps import ServerSteps
from fednest_tff.federated import method, process
from fednest_tff.federated.aggregation import Factory
from fednest_tff.federated.rounds import Answer, Executor, Round
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import simultaneous as local
from fednest_tff.local.client import Client
from fednest_tff.local.sampling import Purpose
from fednest_tff.local.simultaneous import Point, SimultaneousWork
from fednest_tff.problems import Problem, projections
from fednest_tff.vector_space import Structure


class SimFBO(simultaneous.SimultaneousMethod):
  """SimFBO or ShroFBO, with G_i or other directions; see `build_sim_fbo`."""

  def __init__(
      self,
      name: str,
      types: ProblemTypes,
      work: SimultaneousWork,
      steps: ServerSteps,
      coefficients: local.Coefficients | None,
      normalize: bool,
      aggregator: Factory | None,
      direction: Callable[[Structure, Point, local.BatchPair], Point],
      number: dict[str, method.HyperParameter],
  ):
    """Traces the computations.

    Args:
      name: Of the method, for error messages.
      types: The problem's types.
      work: The local steps.
      steps: The server's steps.
      coefficients: a_k; `None` for 1.
      normalize: ShroFBO if true, else SimFBO.
      aggregator: Factory for the clients' h_i.
      direction: (number, point, minibatches) -> directions.
      number: The first argument of `direction`, such as lambda of the penalty
        method, as a hyper-parameter by its name. Empty if the directions need
        none; then they are called with `()`.
    """
    problem = types.problem
    per_client = work.per_client()
    rates = simultaneous.rate_hparams(problem, work)
    server_numbers = server_steps.hparams(problem, steps, rates)
    move = ServerMove(problem, steps)
    has_momentum = steps.momentum is not None
    point_type = simultaneous.point_type(types)
    kept = point_type if has_momentum else ()  # Type of m.
    self._has_momentum = has_momentum
    self._number = next(iter(number), None)

    @types.computation(
        simultaneous.message_type(types, types.scalar if number else ()),
        types.client,
    )
    def client_update(
        message: simultaneous.StepsMessage, client: Client
    ) -> Answer:
      h_i, weight = local.accumulate(
          problem,
          lambda at, batch: direction(message.more, at, batch),
          message.point,
          local.LocalSteps(
              problem,
              per_client,
              client,
              client_lib.seed_of(client, message.seed, Purpose.CLIENT_STEPS),
          ),
          message.rates,
          coefficients or (lambda k, tau: 1.0),
      )
      if normalize:
        # A client without steps has h_i = 0 and no weight to divide by.
        h_i = vector_space.scale(tf.math.reciprocal_no_nan(weight), h_i)
      metrics = simultaneous.losses(
          problem, message.outer, message.inner, client
      )
      metrics['local_weight'] = weight
      return h_i, metrics

    @tff.tensorflow.computation(
        types.outer,
        types.inner,
        simultaneous.state_type(types, move, kept),
        point_type,
        types.scalar,
        simultaneous.rates_type(types),
        types.scalar if problem.is_implicit else (),
        types.scalar if has_momentum else (),
    )
    def step(
        x: Structure,
        y: Structure,
        state: simultaneous.SimultaneousState,
        h: Point,
        weight: tf.Tensor,
        rates: Point,
        radius: tf.Tensor,
        beta: tf.Tensor,
    ) -> tuple[
        Structure,
        Structure,
        simultaneous.SimultaneousState,
        dict[str, tf.Tensor],
    ]:
      h = vector_space.check_finite(
          h,
          f'{name}: h, the mean of the clients\' directions, is not finite. Try'
          ' smaller learning rates',
      )
      if normalize:
        h = vector_space.scale(weight, h)
      if has_momentum:
        h = vector_space.add_scaled(h, beta, state.more)
        state = state._replace(more=h)
      before = Point(x, y, state.linear)
      optimizers, after = move(state.optimizers, before, h, rates)
      if problem.is_implicit:
        v = projections.to_ball(after.linear, radius)
        after = after._replace(linear=v)
      after = vector_space.check_finite(
          after,
          f'{name}: the server\'s new point is not finite. Try smaller learning'
          ' rates',
      )
      state = state._replace(linear=after.linear, optimizers=optimizers)
      norms = update_norms(before, after)
      return after.outer, after.inner, state, norms

    self._update = Round(
        'simultaneous_update', types, client_update, 'aggregator', aggregator
    )
    self._step = step
    hparams = rates | server_numbers | number
    super().__init__(types, [self._update], hparams, move)

  def initial_state(
      self, x: Structure, y: Structure, numbers: method.Numbers, seed: tf.Tensor
  ) -> Structure:
    state = super().initial_state(x, y, numbers, seed)
    if not self._has_momentum:
      return state
    return state._replace(
        more=vector_space.zeros_like(Point(x, y, state.linear))
    )

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    number = plan.numbers[self._number] if self._number else ()
    update = do.round(self._update, self.message(variables, plan, number))
    metrics = dict(update.metrics)
    weight = metrics.pop('local_weight')
    do.measure(**metrics)
    return self.take_step(
        do,
        self._step,
        variables,
        update.value,
        weight,
        self.rates(plan, 'server_'),
        plan.numbers.get('radius', ()),
        plan.numbers.get('server_momentum', ()),
    )


def _build(
    name: str,
    problem: Problem,
    normalize: bool,
    work: SimultaneousWork,
    server: ServerSteps,
    coefficients: local.Coefficients | None,
    aggregator: Factory | None,
    client_weighting: ClientWeighting,
    seed: int,
) -> process.NestedProcess:
  sim_fbo = SimFBO(
      name,
      ProblemTypes(problem, client_weighting),
      work,
      server,
      coefficients,
      normalize,
      aggregator,
      direction=lambda _, at, batch: local.nested_direction(
          problem, at, batch
      ),
      number={},
  )
  return process.build_process(sim_fbo, seed)


def build_shro_fbo(
    problem: Problem,
    *,
    work: SimultaneousWork = SimultaneousWork(),
    server: ServerSteps = ServerSteps(),
    coefficients: local.Coefficients | None = None,
    aggregator: Factory | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """ShroFBO: SimFBO, right although clients take unequal numbers of steps.

  Arguments as in `build_sim_fbo`.
  """
  return _build(
      'ShroFBO', problem, True, work, server, coefficients, aggregator,
      client_weighting, seed,
  )


def build_sim_fbo(
    problem: Problem,
    *,
    work: SimultaneousWork = SimultaneousWork(),
    server: ServerSteps = ServerSteps(),
    coefficients: local.Coefficients | None = None,
    aggregator: Factory | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """SimFBO: clients step on x, y and v at once and send all three.

  Its only round is 'simultaneous_update'; v is in `state.method.linear`, m, if
  there is one, in `state.method.more`.

  Args:
    problem: Any problem.
    work: eta, tau_i and the minibatches. A step size of 0 keeps a variable
      where it is on the clients, and at the server, too, unless `server` has a
      step size for it. `divide_by_local_steps` divides a_k by tau_i, and so
      what clients send.
    server: gamma, r and beta, or optimizers.
    coefficients: a_k from k and tau_i, two int32 scalars; `None` for 1.
    aggregator: A `tff.aggregators` factory for the clients' h_i in place of the
      plain mean.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  return _build(
      'SimFBO', problem, False, work, server, coefficients, aggregator,
      client_weighting, seed,
  )
