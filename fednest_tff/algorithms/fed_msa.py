"""FedMSA: drift-corrected local steps on x, y and v at once.

One epoch takes two communication rounds, with z = (x, y, v) and G_i(z) as in
`local.simultaneous`:

  direction   G(z) = mean_i G_i(z)
  update      z_i <- z_i - eta (G_i(z_i; s) - G_i(z; s) + G(z)), tau_i times
              from z_i = z; then z <- mean_i z_i

It is FedInn's correction (Algorithm 4 of FedNest), of all variables together:
the solution is a fixed point whatever tau_i and however much clients differ.
For a minimax problem it is FedGDA-GT, for a single-level problem federated
SVRG.

Federated Multi-Sequence Stochastic Approximation with Local Hypergradient
Estimation. D. A. Tarzanagh, M. Li, P. Sharma, S. Oymak. 2023. That paper mixes
the correction with a momentum that clients keep, of weight 1 - rho; here
rho = 1, so that nothing is kept on a client.
"""

import collections
from typing import NamedTuple

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.algorithms import simultaneous
from fednest_tff.algorithms.server_move import ServerMove, ServerOptimizers
from fednest_tff.federated import method, process
from fednest_tff.federated.aggregation import Factory, GlobalGradients
from fednest_tff.federated.rounds import Answer, Executor, Round
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import simultaneous as local
from fednest_tff.local.client import Client
from fednest_tff.local.sampling import Purpose
from fednest_tff.local.simultaneous import BatchPair, Point, SimultaneousWork
from fednest_tff.problems import Batch, Problem
from fednest_tff.vector_space import Structure


class DirectionMessage(NamedTuple):
  """The message before the mean direction: z and the epoch's seed."""

  outer: Structure
  inner: Structure
  linear: Structure
  seed: tf.Tensor


class FedMSA(simultaneous.SimultaneousMethod):
  """FedMSA with rho = 1; see `build_fed_msa`."""

  def __init__(
      self,
      types: ProblemTypes,
      work: SimultaneousWork,
      gradients: GlobalGradients,
      aggregator: Factory | None,
      optimizers: ServerOptimizers,
  ):
    problem, batch_size = types.problem, gradients.batch_size
    per_client = work.per_client()
    move = ServerMove(problem, optimizers)
    at = simultaneous.point_type(types)

    @types.computation(DirectionMessage(*at, types.seed), types.client)
    def client_direction(message: DirectionMessage, client: Client) -> Answer:
      x, y, v, seed = message

      def sample(examples: Batch, purpose: Purpose) -> Batch:
        return client_lib.sample(client, examples, batch_size, seed, purpose)

      batch = BatchPair(
          sample(client.outer, Purpose.OUTER_GRADIENT),
          sample(client.inner, Purpose.MIXED_PRODUCT),
      )
      direction = local.nested_direction(problem, Point(x, y, v), batch)
      return direction, simultaneous.losses(problem, x, y, client)

    @types.computation(simultaneous.message_type(types, at), types.client)
    def client_update(
        message: simultaneous.StepsMessage, client: Client
    ) -> Answer:
      z_i = local.corrected_steps(
          problem,
          lambda at, batch: local.nested_direction(problem, at, batch),
          message.point,
          message.more,  # G(z)
          local.LocalSteps(
              problem,
              per_client,
              client,
              client_lib.seed_of(client, message.seed, Purpose.OUTER_STEPS),
          ),
          message.rates,
      )
      change = vector_space.subtract(z_i, message.point)
      return change, collections.OrderedDict()

    self._direction = Round(
        'direction', types, client_direction, 'gradient_aggregator',
        gradients.aggregator,
    )
    self._update = Round(
        'simultaneous_update', types, client_update, 'aggregator', aggregator
    )
    self._check = simultaneous.build_direction_check(types, 'FedMSA')
    self._step = simultaneous.build_mean_step(types, move, 'FedMSA')
    super().__init__(
        types,
        [self._direction, self._update],
        simultaneous.rate_hparams(problem, work),
        move,
    )

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    message = self.message(variables, plan)
    direction = do.round(
        self._direction, DirectionMessage(*message.point, message.seed)
    )
    do.measure(**direction.metrics)
    mean, norm = do.server(self._check, direction.value)
    do.measure(hypergradient_norm=norm)
    update = do.round(self._update, message._replace(more=mean))
    return self.take_step(do, self._step, variables, update.value)


def build_fed_msa(
    problem: Problem,
    *,
    work: SimultaneousWork = SimultaneousWork(),
    gradients: GlobalGradients = GlobalGradients(),
    server: ServerOptimizers = ServerOptimizers(),
    aggregator: Factory | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """FedMSA: drift-corrected steps on x, y and v at once.

  Its rounds are 'direction' and 'simultaneous_update'; v is in
  `state.method.linear`.

  Args:
    problem: Any problem.
    work: eta, tau_i and the minibatches s.
    gradients: The sample behind G_i(z), all examples by default, and the
      aggregator of G(z).
    server: Optimizers of the server, which take minus the mean change of a
      variable as its gradient.
    aggregator: A `tff.aggregators` factory for the clients' changes of z.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  fed_msa = FedMSA(types, work, gradients, aggregator, server)
  return process.build_process(fed_msa, seed)
