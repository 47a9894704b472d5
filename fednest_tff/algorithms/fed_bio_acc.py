"""FedBiOAcc: local steps on x, y and v along variance-reduced momenta.

One epoch is one communication round, with z = (x, y, v) and G_i(z) as in
`local.simultaneous`. Clients start at z with the momentum m, and tau_i times

  z'  = z_i - eta alpha_t m_i
  m_i <- G_i(z'; B) + (1 - c alpha_t^2) (m_i - G_i(z_i; B)),    z_i <- z',

with the same minibatch B in both terms; then z = mean_i z_i and m = mean_i m_i.
The step sizes decay as alpha_t = delta / (u_0 + t)^(1/3).

Communication-Efficient Federated Bilevel Optimization with Global and Local
Lower Level Problems. J. Li, F. Huang, H. Huang. NeurIPS 2023. Choices made
here, where the paper can be read differently: the momentum is part of the
server's state and not of the clients', so that a client need not take part in
every epoch; t counts epochs, so that alpha is constant within one and the same
for clients that take unequal numbers of steps; 1 - c alpha_t^2 is never
negative; in the first epoch m_i starts as G_i(z; B), B being the first
minibatch.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import options, vector_space
from fednest_tff.algorithms import simultaneous
from fednest_tff.algorithms.server_move import ServerMove, ServerOptimizers
from fednest_tff.federated import method, process
from fednest_tff.federated.aggregation import Factory
from fednest_tff.federated.rounds import Answer, Executor, Round, ServerValue
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import simultaneous as local
from fednest_tff.local.client import Client
from fednest_tff.local.sampling import Purpose
from fednest_tff.local.simultaneous import BatchPair, Point, SimultaneousWork
from fednest_tff.options import option
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


@dataclasses.dataclass(frozen=True)
class Acceleration:
  """How the steps decay and how long the momentum lasts.

  Attributes:
    step_scale: delta, a factor of all step sizes.
    step_offset: u_0, which is added to the epoch: the larger it is, the slower
      the steps decay, and the smaller the first ones are.
    momentum_rate: c, how fast a momentum is forgotten: a step keeps the share
      1 - c alpha_t^2 of it.
  """

  step_scale: float = option('step_scale', 1.0)
  step_offset: float = option('step_offset', 1.0)
  momentum_rate: float = option('momentum_rate', 1.0)

  def hparams(self) -> dict[str, method.HyperParameter]:
    """delta, u_0 and c; at epoch t, `step_scale` is alpha_t."""
    for field in dataclasses.fields(self):
      options.check_positive(field.name, getattr(self, field.name))

    def alpha(epoch: tf.Tensor, numbers: method.Numbers) -> tf.Tensor:
      t = tf.cast(epoch, numbers['step_offset'].dtype)
      return numbers['step_scale'] / (numbers['step_offset'] + t) ** (1 / 3)

    return dict(
        step_scale=method.HyperParameter(float(self.step_scale), alpha),
        step_offset=method.HyperParameter(float(self.step_offset)),
        momentum_rate=method.HyperParameter(float(self.momentum_rate)),
    )


class Momentum(NamedTuple):
  """The momentum in the state.

  Attributes:
    value: m, of the shape of z.
    is_set: 1, or 0 before the first epoch (int32).
  """

  value: ServerValue
  is_set: ServerValue


class MomentumMessage(NamedTuple):
  """The momentum in the message: m, alpha_t and 1 - c alpha_t^2."""

  momentum: Momentum
  alpha: tf.Tensor
  decay: tf.Tensor


class FedBiOAcc(simultaneous.SimultaneousMethod):
  """FedBiOAcc with its momentum at the server; see `build_fed_bio_acc`."""

  def __init__(
      self,
      types: ProblemTypes,
      work: SimultaneousWork,
      acceleration: Acceleration,
      aggregator: Factory | None,
      optimizers: ServerOptimizers,
  ):
    problem = types.problem
    hparams = simultaneous.rate_hparams(problem, work) | acceleration.hparams()
    per_client = work.per_client()
    move = ServerMove(problem, optimizers)
    at = simultaneous.point_type(types)
    momentum_type = tff.to_type(Momentum(at, np.int32))

    @tff.tensorflow.computation(momentum_type, types.scalar, types.scalar)
    def prepare(
        momentum: Momentum, alpha: tf.Tensor, rate: tf.Tensor
    ) -> MomentumMessage:
      decay = tf.maximum(1 - rate * alpha**2, 0)
      return MomentumMessage(momentum, alpha, decay)

    @types.computation(
        simultaneous.message_type(types, prepare.type_signature.result),
        types.client,
    )
    def client_update(
        message: simultaneous.StepsMessage, client: Client
    ) -> Answer:
      (m, is_set), alpha, decay = message.more
      steps = local.LocalSteps(
          problem,
          per_client,
          client,
          client_lib.seed_of(client, message.seed, Purpose.CLIENT_STEPS),
      )

      def direction(at: Point, batch: BatchPair) -> Point:
        return local.nested_direction(problem, at, batch)

      m = tf.cond(
          is_set > 0, lambda: m, lambda: direction(message.point, steps[0])
      )
      z_i, m_i = local.momentum_steps(
          problem,
          direction,
          message.point,
          m,
          steps,
          vector_space.scale(alpha, message.rates),
          decay,
      )
      change = vector_space.subtract(z_i, message.point)
      return (change, m_i), simultaneous.losses(
          problem, message.outer, message.inner, client
      )

    self._move_to_mean = simultaneous.build_mean_step(
        types, move, 'FedBiOAcc', momentum_type
    )

    @tff.tensorflow.computation(
        self._move_to_mean.type_signature.parameter[2], at
    )
    def keep(
        state: simultaneous.SimultaneousState, mean_momentum: Point
    ) -> simultaneous.SimultaneousState:
      momentum = vector_space.check_finite(
          mean_momentum,
          'FedBiOAcc: the mean momentum is not finite. Try smaller learning'
          ' rates',
      )
      return state._replace(more=Momentum(momentum, tf.constant(1)))

    self._prepare, self._keep = prepare, keep
    self._update = Round(
        'simultaneous_update', types, client_update, 'aggregator', aggregator
    )
    super().__init__(types, [self._update], hparams, move)

  def initial_state(
      self, x: Structure, y: Structure, numbers: method.Numbers, seed: tf.Tensor
  ) -> Structure:
    state = super().initial_state(x, y, numbers, seed)
    zero = vector_space.zeros_like(Point(x, y, state.linear))
    return state._replace(more=Momentum(zero, tf.constant(0)))

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    numbers = plan.numbers
    more = do.server(
        self._prepare,
        variables.method.more,
        numbers['step_scale'],
        numbers['momentum_rate'],
    )
    update = do.round(self._update, self.message(variables, plan, more))
    do.measure(**update.metrics)
    change, momentum = update.value
    after = self.take_step(do, self._move_to_mean, variables, change)
    return after._replace(method=do.server(self._keep, after.method, momentum))


def build_fed_bio_acc(
    problem: Problem,
    *,
    work: SimultaneousWork = SimultaneousWork(),
    acceleration: Acceleration = Acceleration(),
    server: ServerOptimizers = ServerOptimizers(),
    aggregator: Factory | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """FedBiOAcc: steps on x, y and v at once along corrected momenta.

  Its only round is 'simultaneous_update'; v is in `state.method.linear`, m in
  `state.method.more.value`.

  Args:
    problem: Any problem.
    work: eta, tau_i and the minibatches B.
    acceleration: delta, u_0 and c.
    server: Optimizers of the server, which take minus the mean change of a
      variable as its gradient.
    aggregator: A `tff.aggregators` factory for the clients' changes of z and
      their momenta together.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  fed_bio_acc = FedBiOAcc(types, work, acceleration, aggregator, server)
  return process.build_process(fed_bio_acc, seed)
