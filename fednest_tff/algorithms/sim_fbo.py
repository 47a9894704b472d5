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
import dataclasses

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import options, vector_space
from fednest_tff.algorithms import simultaneous
from fednest_tff.algorithms.server_move import (
  ServerMove,
  ServerOptimizers,
  update_norms,
)
from fednest_tff.federated import method, process
from fednest_tff.federated.aggregation import Factory
from fednest_tff.federated.rounds import Answer, Executor, Round
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import simultaneous as local
from fednest_tff.local.client import Client
from fednest_tff.local.descent import Schedule
from fednest_tff.local.sampling import Purpose
from fednest_tff.local.simultaneous import Point, SimultaneousWork
from fednest_tff.options import option
from fednest_tff.problems import Problem, projections
from fednest_tff.vector_space import Structure


@dataclasses.dataclass(frozen=True)
class ServerSteps(ServerOptimizers):
  """The server's steps on all variables.

  Attributes:
    outer_learning_rate: gamma_x, the server's step size of x: a number, or a
      function of the epoch. Default: the local one, so that the new x is the
      mean of the clients'.
    inner_learning_rate: gamma_y, the server's step size of y, likewise.
    linear_learning_rate: gamma_v, the server's step size of v, likewise.
    radius: r, of the ball around 0 that v is projected on; no projection if it
      is not given.
    momentum: beta, from 0 to 1 (excluded), for all variables; no momentum is
      kept if it is not given.
  """

  outer_learning_rate: float | Schedule | None = option(
      'server_outer_learning_rate'
  )
  inner_learning_rate: float | Schedule | None = option(
      'server_inner_learning_rate'
  )
  linear_learning_rate: float | Schedule | None = option(
      'server_linear_learning_rate'
  )
  radius: float | None = option('radius')
  momentum: float | None = option('server_momentum')


def _server_rates(
    problem: Problem,
    steps: ServerSteps,
    local_rates: dict[str, method.HyperParameter],
) -> dict[str, method.HyperParameter]:
  """gamma as hyper-parameters; 0 in the state stands for the local step."""
  found: dict[str, method.HyperParameter] = {}
  for variable in simultaneous.variables_of(problem):
    if variable is None:
      continue
    name = f'{variable}_learning_rate'
    given = getattr(steps, name)
    if given is not None:
      if getattr(steps, f'{variable}_optimizer') is not None:
        raise ValueError(
            f'Give `server_{name}` or `{variable}_optimizer`, not both.'
        )
      found |= method.learning_rates(**{f'server_{name}': given})
      continue

    def at(
        epoch: tf.Tensor, numbers: method.Numbers, name: str = name
    ) -> tf.Tensor:
      local_rate = numbers[name]
      schedule = local_rates[name].at
      if schedule is not None:
        local_rate = schedule(epoch, numbers)
      own = numbers[f'server_{name}']
      return tf.where(own > 0, own, local_rate)

    found[f'server_{name}'] = method.HyperParameter(0.0, at)
  return found


def _momentum(steps: ServerSteps) -> dict[str, method.HyperParameter]:
  """beta as a hyper-parameter; empty if there is none."""
  if steps.momentum is None:
    return {}
  for variable in Point._fields:
    if getattr(steps, f'{variable}_optimizer') is not None:
      raise ValueError(
          f'Give `server_momentum` or `{variable}_optimizer`, not both.'
      )
  if steps.momentum != 0:
    options.check_positive('server_momentum', steps.momentum)
  if not steps.momentum < 1:
    raise ValueError(
        f'`server_momentum` must be less than 1; got {steps.momentum}.'
    )
  return dict(server_momentum=method.HyperParameter(float(steps.momentum)))


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
    server_rates = _server_rates(problem, steps, rates)
    move = ServerMove(problem, steps)
    radius = {}
    if problem.is_implicit:
      if steps.radius is not None:
        options.check_positive('radius', steps.radius)
      radius['radius'] = method.HyperParameter(float(steps.radius or 'inf'))
    momentum = _momentum(steps)
    point_type = simultaneous.point_type(types)
    kept = point_type if momentum else ()  # Type of m.
    self._has_momentum = bool(momentum)
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
        types.scalar if radius else (),
        types.scalar if momentum else (),
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
      if momentum:
        h = vector_space.add_scaled(h, beta, state.more)
        state = state._replace(more=h)
      before = Point(x, y, state.linear)
      optimizers, after = move(state.optimizers, before, h, rates)
      if problem.is_implicit:
        v = projections.to_ball(after.linear, radius)
        after = after._replace(linear=v)
      state = state._replace(linear=after.linear, optimizers=optimizers)
      norms = update_norms(before, after)
      return after.outer, after.inner, state, norms

    self._update = Round(
        'simultaneous_update', types, client_update, 'aggregator', aggregator
    )
    self._step = step
    hparams = rates | server_rates | radius | momentum | number
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
