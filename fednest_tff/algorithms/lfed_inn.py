"""LFedInn: local SGD on the inner problem (appendix A).

One call is one communication round: tau_i local steps y_i <- y_i - beta_i
G_i(y_i; z) from y_i = y, then y+ = mean_i y_i. It is FedAvg on g, and like
FedAvg it stops at a biased point when clients differ.
"""

import collections
from typing import Any

import tensorflow_federated as tff

from fednest_tff.algorithms import aggregation, epoch, rounds
from fednest_tff.algorithms.federation import Federation
from fednest_tff.local import client as client_lib
from fednest_tff.local import descent, inner_level
from fednest_tff.problems import Problem


class LFedInn:
  """LFedInn inside a `tff.federated_computation`; attributes as `FedInn`."""

  def __init__(
      self,
      federated: Federation,
      work: descent.LocalWork,
      aggregator: aggregation.Factory | None = None,
  ):
    """Traces what clients and server do.

    Args:
      federated: The problem and its types.
      work: tau_i and the minibatches.
      aggregator: Factory for y+ - y; `None` for the plain mean.
    """
    problem = federated.problem
    inner, scalar = federated.inner_type, federated.scalar_type
    message_type = tff.to_type(
        rounds.Descent(
            federated.outer_type, inner, (), scalar, federated.seed_type
        )
    )

    @tff.tensorflow.computation(
        message_type, federated.features_type, federated.client_type
    )
    def client_update(message, features, client):
      x, y = message.outer, message.inner
      y_i = inner_level.sgd_steps(
          problem,
          x,
          y,
          features.inner,
          work,
          work.num_steps(client.inner),
          message.learning_rate,
          client_lib.seed_of(client, message.seed, 1),
      )
      update, squared = rounds.change(y_i, y, problem.scalar_dtype)
      return update, collections.OrderedDict(
          inner_loss=problem.inner_loss(x, y, features.inner),
          squared_change=squared,
      )

    self.server = {}
    self.aggregations = {
        'inner_update': aggregation.Aggregation(
            'inner_aggregator', aggregator, inner, scalar, federated.uniform
        )
    }
    self._update_round = rounds.build_inner_update(
        client_update,
        rounds.build_apply_change(
            federated, inner, 'LFedInn: y+', 'Try a smaller inner_learning_rate'
        ),
        self.aggregations['inner_update'],
    )
    self.rounds = {
        'inner_update': rounds.build_round(
            federated,
            self.aggregations['inner_update'],
            message_type,
            lambda state, message, there, clients: self._update_round(
                state,
                message.inner,
                there,
                federated.features(there.outer, clients),
                clients,
            ),
        )
    }

  def __call__(self, state, x, y, learning_rate, seed, features, clients):
    """One call of LFedInn; arguments and result as in `FedInn`."""
    sent = tff.federated_broadcast(tff.federated_zip((y, learning_rate, seed)))
    output = self._update_round(
        state['inner_update'],
        y,
        rounds.Descent(x, sent[0], (), sent[1], sent[2]),
        features,
        clients,
    )
    return output._replace(state=dict(inner_update=output.state))


def build_lfed_inn(
    problem: Problem,
    *,
    inner_learning_rate: Any,
    inner_local_steps: Any = None,
    inner_local_epochs: int | None = None,
    batch_size: int | None = None,
    divide_by_local_steps: bool = False,
    client_weighting: Any = 'uniform',
    inner_aggregator: aggregation.Factory | None = None,
    seed: int = 0,
) -> rounds.RoundsProcess:
  """LFedInn as an iterative process; arguments as in `build_fed_inn`.

    initialize: `( -> NestedState@SERVER)`
    next: `(<NestedState@SERVER, {dataset}@CLIENTS> ->
            <state=NestedState@SERVER, metrics=<...>@SERVER>)`

  Its only round is 'inner_update'.
  """
  federated = Federation(problem, client_weighting)
  work = descent.build_work(
      'inner',
      inner_local_steps,
      inner_local_epochs,
      batch_size,
      divide_by_local_steps,
  )
  lfed_inn = LFedInn(federated, work, inner_aggregator)
  return epoch.build_inner_process(
      federated, lfed_inn, inner_learning_rate, seed
  )
