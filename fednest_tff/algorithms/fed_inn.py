"""FedInn: federated SVRG on the inner problem (Algorithm 4).

One call takes two communication rounds:

  gradient   q = mean_i G_i(y), G_i = grad_y g_i(x, .)             lines 3-6
  update     y_i <- y_i - beta_i (G_i(y_i; z) - G_i(y; z) + q),    lines 7-12
             tau_i times from y_i = y; then y+ = mean_i y_i        line 13

FedNest: Federated Bilevel, Minimax, and Compositional Optimization.
D. A. Tarzanagh, M. Li, C. Thrampoulidis, S. Oymak. ICML 2022.
"""

import collections
from typing import NamedTuple

import tensorflow as tf

from fednest_tff.federated import method, process, server
from fednest_tff.federated.aggregation import Factory, GlobalGradients
from fednest_tff.federated.rounds import (
    Answer,
    Executor,
    PointMessage,
    Round,
    ServerValue,
)
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import derivatives, descent
from fednest_tff.local.client import Client, ClientFeatures
from fednest_tff.local.descent import LocalWork
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class DescentMessage(NamedTuple):
  """The message before local steps along a corrected direction.

  Attributes:
    outer: x.
    inner: y.
    direction: The global direction at (x, y): q or h.
    learning_rate: beta or alpha.
    seed: The call's seed.
  """

  outer: Structure
  inner: Structure
  direction: Structure
  learning_rate: tf.Tensor
  seed: tf.Tensor


class InnerMethod(method.Method):
  """An optimizer of the inner problem at a fixed x: FedInn or LFedInn."""

  def __init__(self, types: ProblemTypes, work: LocalWork, rounds: list[Round]):
    method.check_has_inner(types.problem)
    super().__init__(
        types,
        rounds,
        method.learning_rates(inner_learning_rate=work.learning_rate),
    )

  def __call__(
      self, do: Executor, x: ServerValue, y: ServerValue,
      learning_rate: ServerValue, seed: ServerValue,
  ) -> ServerValue:
    """One call: y+ from (x, y), beta and a seed."""
    raise NotImplementedError

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    """The method alone: one call."""
    x, y, own = variables
    y = self(do, x, y, plan.numbers['inner_learning_rate'], plan.seeds[0])
    return method.Variables(x, y, own)


def build_gradient_round(
    types: ProblemTypes, gradients: GlobalGradients
) -> Round:
  """The round that averages G_i(y) (lines 3-6)."""
  problem, batch_size = types.problem, gradients.batch_size

  @types.computation(
      PointMessage(types.outer, types.inner, types.seed),
      types.features,
      types.client,
  )
  def client_gradient(
      message: PointMessage, features: ClientFeatures, client: Client
  ) -> Answer:
    x, y, seed = message
    zeta = client_lib.sample(
        client, features.inner, batch_size, seed, Purpose.INNER_GRADIENT
    )
    value, gradient = derivatives.inner_gradient(problem, x, y, zeta)
    return gradient, collections.OrderedDict(inner_loss=value)

  return Round(
      'inner_gradient', types, client_gradient, 'gradient_aggregator',
      gradients.aggregator,
  )


class FedInn(InnerMethod):
  """FedInn, alone or as a part of an epoch; see `build_fed_inn`."""

  def __init__(
      self,
      types: ProblemTypes,
      work: LocalWork,
      gradients: GlobalGradients,
      aggregator: Factory | None,
  ):
    problem, steps = types.problem, work.at_level('inner').without_rate()

    @types.computation(
        DescentMessage(
            types.outer, types.inner, types.inner, types.scalar, types.seed
        ),
        types.features,
        types.client,
    )
    def client_update(
        message: DescentMessage, features: ClientFeatures, client: Client
    ) -> Answer:
      x, y, q, beta, seed = message
      y_i = descent.svrg(
          lambda at, z: derivatives.inner_gradient(problem, x, at, z)[1],
          y,
          q,
          features.inner,
          steps,
          steps.num_steps(client.inner),
          beta,
          client_lib.seed_of(client, seed, Purpose.INNER_STEPS),
          problem.project_inner,
      )
      return descent.change(y_i, y, problem.scalar_dtype)

    self._gradient = build_gradient_round(types, gradients)
    self._update = Round(
        'inner_update', types, client_update, 'inner_aggregator', aggregator
    )
    self._check = server.build_check(
        types.inner,
        'FedInn: q, the mean inner gradient (Algorithm 4, line 6), is not'
        ' finite. Try a smaller inner_learning_rate',
    )
    self._step = server.ServerStep(
        types, 'inner', 'FedInn: y+ (Algorithm 4, line 13)'
    )
    super().__init__(types, work, [self._gradient, self._update])

  def __call__(
      self, do: Executor, x: ServerValue, y: ServerValue,
      learning_rate: ServerValue, seed: ServerValue,
  ) -> ServerValue:
    gradient = do.round(self._gradient, PointMessage(x, y, seed))  # lines 3-6
    q, norm = do.server(self._check, gradient.value)
    do.measure(**gradient.metrics, inner_gradient_norm=norm)
    changes = do.round(  # lines 7-12
        self._update, DescentMessage(x, y, q, learning_rate, seed)
    )
    return self._step(do, (), y, changes)[1]  # line 13


def build_fed_inn(
    problem: Problem,
    *,
    inner: LocalWork = LocalWork(),
    gradients: GlobalGradients = GlobalGradients(),
    inner_aggregator: Factory | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """FedInn as an iterative process: y <- FedInn(x, y, beta) at a fixed x.

  Its rounds are 'inner_gradient' (lines 3-6) and 'inner_update' (lines 7-12).

  Args:
    problem: A problem with an inner level.
    inner: beta, tau_i and the minibatches z.
    gradients: The sample zeta_i (line 4) and the aggregator of q.
    inner_aggregator: A `tff.aggregators` factory for y+ - y in place of the
      plain mean.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  return process.build_process(
      FedInn(types, inner, gradients, inner_aggregator), seed
  )
