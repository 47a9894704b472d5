"""FedMBO: minibatch steps on y, and a hypergradient from several chains.

One epoch takes T + N + 2 communication rounds:

  T times    y <- y - beta mean_i G_i(y)
  FedIHGP    p = mean over S independent chains, each with its own N', samples
             and sub-cohorts (the option `chains` of FedIHGP)
  FedOut     h, and local steps on x

The chains run in the same N rounds, whose messages are S times as large, and
the variance of p falls as 1 / S.

Achieving Linear Speedup in Non-IID Federated Bilevel Learning. M. Huang,
D. Zhang, K. Ji. ICML 2023. Choices made here, where the paper can be read
differently: the chains share the epoch's cohort, of which each round of each
chain takes the share `participation`, and a client answers all chains in one
message; x is moved by FedOut.
"""

import dataclasses

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import fed_inn, fed_nest
from fednest_tff.algorithms.fed_ihgp import FederatedInverseHessian
from fednest_tff.algorithms.fed_out import FedOut
from fednest_tff.federated import process, server
from fednest_tff.federated.aggregation import Factory, GlobalGradients
from fednest_tff.federated.rounds import Executor, PointMessage, ServerValue
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local.descent import LocalWork, Schedule
from fednest_tff.options import option
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class GradientSteps(fed_inn.InnerMethod):
  """y+ = y - beta mean_i G_i(y): one round and one step of the server."""

  def __init__(
      self,
      types: ProblemTypes,
      learning_rate: float | Schedule | None,
      gradients: GlobalGradients,
  ):
    problem = types.problem

    @tff.tensorflow.computation(types.inner, types.inner, types.scalar)
    def step(
        y: Structure, gradient: Structure, beta: tf.Tensor
    ) -> tuple[Structure, tf.Tensor]:
      gradient = vector_space.check_finite(
          gradient,
          'FedMBO: the mean inner gradient is not finite. Try a smaller'
          ' inner_learning_rate',
      )
      moved = vector_space.add_scaled(y, -beta, gradient)
      return problem.project_inner(moved), vector_space.norm(gradient)

    self._gradient = fed_inn.build_gradient_round(types, gradients)
    self._step = step
    super().__init__(
        types, LocalWork(learning_rate=learning_rate), [self._gradient]
    )

  def __call__(
      self, do: Executor, x: ServerValue, y: ServerValue,
      learning_rate: ServerValue, seed: ServerValue,
  ) -> ServerValue:
    gradient = do.round(self._gradient, PointMessage(x, y, seed))
    y, norm = do.server(self._step, y, gradient.value, learning_rate)
    do.measure(**gradient.metrics, inner_gradient_norm=norm)
    return y


@dataclasses.dataclass(frozen=True)
class SeveralChains(FederatedInverseHessian):
  """FedIHGP with two chains unless another number is given."""

  chains: int = option('chains', 2)


def build_fed_mbo(
    problem: Problem,
    *,
    inner_learning_rate: float | Schedule | None = None,
    outer: LocalWork = LocalWork(),
    inner_rounds: int = 1,
    solver: SeveralChains = SeveralChains(),
    gradients: GlobalGradients = GlobalGradients(),
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """FedMBO: minibatch steps on y, several chains for p, FedOut.

  Args:
    problem: Any problem; without an inverse Hessian there are no chains.
    inner_learning_rate: beta; not for single-level problems.
    outer: alpha, tau_i and the minibatches of the outer steps.
    inner_rounds: T, steps on y per epoch.
    solver: N, l, S (`chains`) and the share of the cohort in each S_n.
    gradients: The samples and the aggregator of the inner gradients, h and
      FedIHGP's vectors.
    outer_aggregator: A `tff.aggregators` factory for x+ - x.
    outer_optimizer: The server's for x; `None` to add the mean change.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  return fed_nest.build_alternating(
      problem, inner_rounds, client_weighting, seed,
      lambda types: GradientSteps(types, inner_learning_rate, gradients),
      lambda types, rate: FedOut(
          types, outer, solver, gradients, outer_aggregator, outer_optimizer,
          rate,
      ),
  )
