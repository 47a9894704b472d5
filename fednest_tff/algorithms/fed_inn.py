"""FedInn: federated SVRG on the inner problem (Algorithm 4).

One call takes two communication rounds:

  gradient   q = mean_i G_i(y), G_i = grad_y g_i(x, .)             lines 3-6
  update     y_i <- y_i - beta_i (G_i(y_i; z) - G_i(y; z) + q),    lines 7-12
             tau_i times from y_i = y; then y+ = mean_i y_i        line 13

FedNest: Federated Bilevel, Minimax, and Compositional Optimization.
D. A. Tarzanagh, M. Li, C. Thrampoulidis, S. Oymak. ICML 2022.
"""

import collections
from typing import Any

import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import aggregation, epoch, rounds
from fednest_tff.algorithms.federation import Federation
from fednest_tff.local import client as client_lib
from fednest_tff.local import descent, inner_level
from fednest_tff.problems import Problem

_ADVICE = 'Try a smaller inner_learning_rate'


class FedInn:
  """FedInn inside a `tff.federated_computation`.

  Attributes:
    aggregations: How q and y+ - y are averaged, by name.
    rounds: The two rounds as computations of their own, by name.
    server: Nothing: the rounds do what there is to do at the server.
  """

  def __init__(
      self,
      federated: Federation,
      work: descent.LocalWork,
      aggregator: aggregation.Factory | None = None,
      gradient_aggregator: aggregation.Factory | None = None,
  ):
    """Traces what clients and server do in both rounds.

    Args:
      federated: The problem and its types.
      work: tau_i and the minibatches.
      aggregator: Factory for y+ - y; `None` for the plain mean.
      gradient_aggregator: Factory for q; `None` for the plain mean.
    """
    problem = federated.problem
    outer, inner = federated.outer_type, federated.inner_type
    scalar, seed = federated.scalar_type, federated.seed_type
    point_type = tff.to_type(rounds.Point(outer, inner, seed))
    descent_type = tff.to_type(
        rounds.Descent(outer, inner, inner, scalar, seed)
    )

    @tff.tensorflow.computation(
        point_type, federated.features_type, federated.client_type
    )
    def client_gradient(point, features, client):
      sample = federated.sample(features.inner, client, point.seed, 0)
      value, gradient = inner_level.gradient(
          problem, point.outer, point.inner, sample
      )
      return gradient, collections.OrderedDict(inner_loss=value)

    @tff.tensorflow.computation(
        descent_type, federated.features_type, federated.client_type
    )
    def client_update(message, features, client):
      y_i = inner_level.svrg_steps(
          problem,
          message.outer,
          message.inner,
          message.direction,
          features.inner,
          work,
          work.num_steps(client.inner),
          message.learning_rate,
          client_lib.seed_of(client, message.seed, 1),
      )
      update, squared = rounds.change(
          y_i, message.inner, problem.scalar_dtype
      )
      return update, collections.OrderedDict(squared_change=squared)

    @tff.tensorflow.computation(inner)
    def check_gradient(q):
      q = vector_space.check_finite(
          q,
          'FedInn: q, the mean inner gradient (Algorithm 4, line 6), is not'
          f' finite. {_ADVICE}',
      )
      return q, vector_space.norm(q)

    self._client_gradient = client_gradient
    self._check_gradient = check_gradient
    self.server = {}
    uniform = federated.uniform
    self.aggregations = {
        'inner_gradient': aggregation.Aggregation(
            'gradient_aggregator', gradient_aggregator, inner, scalar, uniform
        ),
        'inner_update': aggregation.Aggregation(
            'inner_aggregator', aggregator, inner, scalar, uniform
        ),
    }
    # y+ from y at the server (lines 7-13).
    self._update_round = rounds.build_inner_update(
        client_update,
        rounds.build_apply_change(
            federated, inner, 'FedInn: y+ (Algorithm 4, line 13)', _ADVICE
        ),
        self.aggregations['inner_update'],
    )
    self.rounds = {
        'inner_gradient': rounds.build_round(
            federated,
            self.aggregations['inner_gradient'],
            point_type,
            lambda state, message, there, clients: self._gradient_round(
                state, there, federated.features(there.outer, clients), clients
            ),
        ),
        'inner_update': rounds.build_round(
            federated,
            self.aggregations['inner_update'],
            descent_type,
            lambda state, message, there, clients: self._update_round(
                state,
                message.inner,
                there,
                federated.features(there.outer, clients),
                clients,
            ),
        ),
    }

  def _gradient_round(
      self, state, point, features, clients
  ) -> rounds.RoundOutput:
    """q (lines 3-6)."""
    gradients = tff.federated_map(
        self._client_gradient, (point, features, clients)
    )
    mean = self.aggregations['inner_gradient'](
        state, gradients[0], clients.weight, gradients[1]
    )
    checked = tff.federated_map(self._check_gradient, mean.value)
    metrics = dict(
        inner_loss=mean.metrics['inner_loss'], inner_gradient_norm=checked[1]
    )
    return rounds.RoundOutput(mean.state, checked[0], metrics)

  def __call__(self, state, x, y, learning_rate, seed, features, clients):
    """One call of FedInn.

    Args:
      state: States of `aggregations` by name, at the server.
      x: The outer variable, at the clients already.
      y: The inner variable, at the server.
      learning_rate: beta, at the server.
      seed: The call's seed, at the server.
      features: The cohort's features at x.
      clients: The cohort.

    Returns:
      A `RoundOutput` whose value is y+.
    """
    sent = tff.federated_broadcast(tff.federated_zip((y, seed)))
    gradient = self._gradient_round(
        state['inner_gradient'],
        rounds.Point(x, sent[0], sent[1]),
        features,
        clients,
    )
    q = tff.federated_broadcast(
        tff.federated_zip((gradient.value, learning_rate))
    )
    update = self._update_round(
        state['inner_update'],
        y,
        rounds.Descent(x, sent[0], q[0], q[1], sent[1]),
        features,
        clients,
    )
    return rounds.RoundOutput(
        dict(inner_gradient=gradient.state, inner_update=update.state),
        update.value,
        gradient.metrics | update.metrics,
    )


def build_fed_inn(
    problem: Problem,
    *,
    inner_learning_rate: Any,
    inner_local_steps: Any = None,
    inner_local_epochs: int | None = None,
    batch_size: int | None = None,
    divide_by_local_steps: bool = False,
    client_weighting: Any = 'uniform',
    gradient_batch_size: int | None = None,
    inner_aggregator: aggregation.Factory | None = None,
    gradient_aggregator: aggregation.Factory | None = None,
    seed: int = 0,
) -> rounds.RoundsProcess:
  """FedInn as an iterative process: y <- FedInn(x, y, beta) at a fixed x.

    initialize: `( -> NestedState@SERVER)`
    next: `(<NestedState@SERVER, {dataset}@CLIENTS> ->
            <state=NestedState@SERVER, metrics=<...>@SERVER>)`

  Its `rounds` are 'inner_gradient' (lines 3-6) and 'inner_update' (7-13).

  Args:
    problem: A problem with an inner level.
    inner_learning_rate: beta, a number or a function of `state.epoch`.
    inner_local_steps: tau_i; see `build_fed_nest`.
    inner_local_epochs: tau_i in passes over the client's inner examples.
    batch_size: Of the minibatches z; `None` for all examples.
    divide_by_local_steps: Whether beta_i = beta / tau_i.
    client_weighting: See `build_fed_nest`.
    gradient_batch_size: Size of zeta_i (line 4); `None` for all examples.
    inner_aggregator: Factory for y+ - y in place of the plain mean.
    gradient_aggregator: Factory for q in place of the plain mean.
    seed: Of the initial point and of all draws.

  Returns:
    A `tff.templates.IterativeProcess` with `rounds`.
  """
  federated = Federation(problem, client_weighting, gradient_batch_size)
  work = descent.build_work(
      'inner',
      inner_local_steps,
      inner_local_epochs,
      batch_size,
      divide_by_local_steps,
  )
  fed_inn = FedInn(federated, work, inner_aggregator, gradient_aggregator)
  return epoch.build_inner_process(
      federated, fed_inn, inner_learning_rate, seed
  )
