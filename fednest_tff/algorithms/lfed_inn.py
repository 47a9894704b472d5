"""LFedInn: local SGD on the inner problem (appendix A).

One call is one communication round: tau_i local steps y_i <- y_i - beta_i
G_i(y_i; z) from y_i = y, then y+ = mean_i y_i. It is FedAvg on g, and like
FedAvg it stops at a biased point when clients differ.
"""

from typing import NamedTuple

import tensorflow as tf

from fednest_tff.algorithms.fed_inn import InnerMethod
from fednest_tff.federated import process, server
from fednest_tff.federated.aggregation import Factory
from fednest_tff.federated.rounds import Answer, Executor, Round, ServerValue
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import derivatives, descent
from fednest_tff.local.client import Client, ClientFeatures
from fednest_tff.local.descent import LocalWork
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class SgdMessage(NamedTuple):
  """The message before local SGD on g: (x, y), beta and the call's seed."""

  outer: Structure
  inner: Structure
  learning_rate: tf.Tensor
  seed: tf.Tensor


class LFedInn(InnerMethod):
  """LFedInn, alone or as a part of an epoch; see `build_lfed_inn`."""

  def __init__(
      self, types: ProblemTypes, work: LocalWork, aggregator: Factory | None
  ):
    problem, steps = types.problem, work.at_level('inner').without_rate()

    @types.computation(
        SgdMessage(types.outer, types.inner, types.scalar, types.seed),
        types.features,
        types.client,
    )
    def client_update(
        message: SgdMessage, features: ClientFeatures, client: Client
    ) -> Answer:
      x, y, beta, seed = message
      y_i = descent.sgd(
          lambda at, z: derivatives.inner_gradient(problem, x, at, z)[1],
          y,
          features.inner,
          steps,
          steps.num_steps(client.inner),
          beta,
          client_lib.seed_of(client, seed, Purpose.INNER_STEPS),
          problem.project_inner,
      )
      change, metrics = descent.change(y_i, y, problem.scalar_dtype)
      metrics['inner_loss'] = problem.inner_loss(x, y, features.inner)
      return change, metrics

    self._update = Round(
        'inner_update', types, client_update, 'inner_aggregator', aggregator
    )
    self._step = server.ServerStep(types, 'inner', 'LFedInn: y+')
    super().__init__(types, work, [self._update])

  def __call__(
      self, do: Executor, x: ServerValue, y: ServerValue,
      learning_rate: ServerValue, seed: ServerValue,
  ) -> ServerValue:
    changes = do.round(self._update, SgdMessage(x, y, learning_rate, seed))
    do.measure(inner_loss=changes.metrics['inner_loss'])
    return self._step(do, (), y, changes)[1]


def build_lfed_inn(
    problem: Problem,
    *,
    inner: LocalWork = LocalWork(),
    inner_aggregator: Factory | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """LFedInn as an iterative process; arguments as in `build_fed_inn`.

  Its only round is 'inner_update'.
  """
  types = ProblemTypes(problem, client_weighting)
  return process.build_process(LFedInn(types, inner, inner_aggregator), seed)
