"""AggITD: the inner rounds also carry the chain of Hessian products.

FedIHGP's chain of Hessian products takes N rounds after the inner problem. Here
the T inner rounds carry it. One epoch, with Q uniform in {0, ..., T - 1} and
lambda = 1 / l:

  t = 0 .. T-1   y^{t+1} from y^t by FedInn or LFedInn; in the same messages
                 t = Q   r = mean_i grad_y f_i(x, y^t)
                 t > Q   r <- mean_i (I - lambda grad^2_y g_i(x, y^t)) r
  hypergradient  h = mean_i [grad_x f_i - lambda T grad^2_xy g_i r] at (x, y^T)
  update         the local steps of FedOut

With y frozen, the mean of lambda T r over Q is FedIHGP's truncated sum with
N = T. There are 2 T + 2 rounds with FedInn inside, T + 2 with LFedInn.

Communication-Efficient Federated Hypergradient Computation via Aggregated
Iterative Differentiation. P. Xiao, K. Ji. ICML 2023. Choices made here, where
the paper can be read differently: grad_y f_i is taken at y^Q and each Hessian
at y^t, before the inner step of the same round; clients send grad^2_y g_i r,
and the server forms r - lambda times their mean; x moves by FedOut's corrected
steps.
"""

from typing import Literal, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import options, vector_space
from fednest_tff.algorithms import fed_ihgp, fed_nest
from fednest_tff.algorithms.fed_inn import FedInn
from fednest_tff.algorithms.fed_out import FedOut
from fednest_tff.algorithms.lfed_inn import LFedInn
from fednest_tff.federated import method, process, server
from fednest_tff.federated.aggregation import Factory, GlobalGradients
from fednest_tff.federated.rounds import (
    Answer,
    Averaged,
    Executor,
    Round,
    ServerValue,
)
from fednest_tff.federated.types import ClientWeighting, ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import derivatives, inverse_hessian, sampling
from fednest_tff.local.client import Client, ClientFeatures
from fednest_tff.local.descent import LocalWork
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure

Inner = Literal['fedinn', 'lfedinn']


class ChainMessage(NamedTuple):
  """The message of an inner round that carries r.

  Attributes:
    outer: x.
    inner: y^t.
    r: The vector so far.
    countdown: Q - t (int32): at 0, r starts; below 0, r is multiplied.
    learning_rate: beta, if clients step in this round; else empty.
    seed: The seed of the inner call.
  """

  outer: Structure
  inner: Structure
  r: Structure
  countdown: tf.Tensor
  learning_rate: Structure
  seed: tf.Tensor


class Chain(NamedTuple):
  """The chain so far: the vector r, and the countdown Q - t."""

  r: ServerValue
  countdown: ServerValue


def _build_carrying_round(
    types: ProblemTypes,
    carried: Round,
    batch_size: int | None,
    argument: str,
    factory: Factory | None,
) -> Round:
  """An inner round whose clients also answer with their part of r.

  Args:
    types: The problem's types.
    carried: The inner round.
    batch_size: Size of the samples behind r.
    argument: The name of the argument that holds `factory`.
    factory: For the inner round's value and the part of r together.

  Returns:
    A round with a `ChainMessage`; its value is (the inner round's value, the
    mean of grad_y f_i or of grad^2_y g_i r).
  """
  problem, carried_work = types.problem, carried.client_work
  steps = 'learning_rate' in tff.structure.name_list(carried.message_type)

  @types.computation(
      ChainMessage(
          types.outer, types.inner, types.inner, np.int32,
          types.scalar if steps else (), types.seed,
      ),
      types.features,
      types.client,
  )
  def client_work(
      message: ChainMessage, features: ClientFeatures, client: Client
  ) -> Answer:
    x, y, r, countdown, beta, seed = message
    own = (x, y, beta, seed) if steps else (x, y, seed)
    value, metrics = carried_work(own, features, client)

    def gradient() -> Structure:
      xi = client_lib.sample(
          client, features.outer, batch_size, seed, Purpose.CHAIN_GRADIENT
      )
      return derivatives.outer_gradient_in_inner(problem, x, y, xi)

    def product() -> Structure:
      zeta = client_lib.sample(
          client, features.inner, batch_size, seed, Purpose.CHAIN_PRODUCT
      )
      return derivatives.inner_hessian_product(problem, x, y, r, zeta)

    # sign(countdown) + 1 is 0 after t = Q, 1 at t = Q and 2 before.
    answer = tf.switch_case(
        tf.sign(countdown) + 1,
        [
            product,
            gradient,
            lambda: tf.nest.map_structure(tf.zeros_like, r),
        ],
    )
    return (value, answer), metrics

  return Round(
      f'{carried.name}_and_chain', types, client_work, argument, factory
  )


class CarryingExecutor:
  """An executor that replaces a round of an inner method by one that carries r.

  Attributes:
    answer: The mean answer for r, once the round has run.
  """

  def __init__(
      self, do: Executor, carried: Round, carrying: Round, chain: Chain
  ):
    self._do = do
    self._carried = carried
    self._carrying = carrying
    self._chain = chain
    self.answer: ServerValue = None
    self.server = do.server
    self.measure = do.measure
    self.is_zero = do.is_zero

  def round(
      self, round_: Round, message: NamedTuple, chance: float = 1.0
  ) -> Averaged:
    if round_ is not self._carried:
      return self._do.round(round_, message, chance)
    own = message._asdict()
    output = self._do.round(
        self._carrying,
        ChainMessage(
            own['outer'], own['inner'], self._chain.r, self._chain.countdown,
            own.get('learning_rate', ()), own['seed'],
        ),
        chance,
    )
    value, self.answer = output.value
    return Averaged(value, output.metrics)


class AggITD(fed_nest.Alternating):
  """AggITD; see `build_agg_itd`. Its own state is the outer method's."""

  def __init__(
      self,
      types: ProblemTypes,
      inner: FedInn | LFedInn,
      carrying: Round,
      outer: FedOut,
      inner_rounds: int,
      smoothness: dict[str, method.HyperParameter],
  ):
    self._carried, self._carrying = inner.rounds[0], carrying
    self._chained, self._descend = inner, outer.descend
    chain_type = tff.to_type(Chain(types.inner, np.int32))
    problem = types.problem

    @types.computation(types.seed)
    def start(seed: tf.Tensor) -> Chain:
      stop = tf.random.stateless_uniform(
          [],
          sampling.fold_in(seed, Purpose.NEUMANN_STOP),
          minval=0,
          maxval=inner_rounds,
          dtype=tf.int32,
      )
      return Chain(vector_space.zeros_like(problem.inner_spec), stop)

    @types.computation(chain_type, types.inner, types.scalar)
    def advance(
        chain: Chain, answer: Structure, smoothness: tf.Tensor
    ) -> Chain:
      # `answer` is zeros before Q, grad_y f at Q, and a product after Q.
      after = vector_space.add_scaled(chain.r, -1 / smoothness, answer)
      r = vector_space.where(chain.countdown < 0, after, answer)
      return Chain(r, chain.countdown - 1)

    @types.computation(chain_type, types.scalar)
    def finish(chain: Chain, smoothness: tf.Tensor) -> Structure:
      p = vector_space.scale(inner_rounds / smoothness, chain.r)
      return vector_space.check_finite(
          p,
          'AggITD: lambda T r is not finite. Try a larger smoothness l or a'
          ' smaller inner_learning_rate',
      )

    self._start, self._advance, self._finish = start, advance, finish
    super().__init__(inner, outer, inner_rounds)
    self.rounds = (carrying, *inner.rounds[1:], *outer.rounds)
    self.hparams = self.hparams | smoothness

  def epoch(
      self, do: Executor, variables: method.Variables, plan: method.Plan
  ) -> method.Variables:
    x, y, optimizer = variables
    numbers = plan.numbers
    chain = do.server(self._start, plan.seeds[-1])  # Q
    for seed in plan.seeds[:-1]:
      carrying = CarryingExecutor(
          do, self._carried, self._carrying, chain
      )
      y = self._chained(carrying, x, y, numbers['inner_learning_rate'], seed)
      chain = do.server(
          self._advance, chain, carrying.answer, numbers['smoothness']
      )
    p = do.server(self._finish, chain, numbers['smoothness'])
    return self._descend(do, method.Variables(x, y, optimizer), p, plan)


def build_agg_itd(
    problem: Problem,
    *,
    inner_method: Inner = 'fedinn',
    inner: LocalWork = LocalWork(),
    outer: LocalWork = LocalWork(),
    inner_rounds: int = 5,
    smoothness: float | None = None,
    gradients: GlobalGradients = GlobalGradients(),
    inner_aggregator: Factory | None = None,
    outer_aggregator: Factory | None = None,
    outer_optimizer: server.Optimizer | None = None,
    client_weighting: ClientWeighting = 'uniform',
    seed: int = 0,
) -> process.NestedProcess:
  """AggITD: the inner rounds carry the hypergradient's chain.

  Args:
    problem: A bilevel or compositional problem.
    inner_method: 'fedinn' or 'lfedinn'.
    inner: beta, tau_i and the minibatches of the inner steps.
    outer: alpha, tau_i and the minibatches of the outer steps.
    inner_rounds: T, inner calls per epoch and terms of the series.
    smoothness: l = 1 / lambda, at least the largest eigenvalue of the inner
      Hessian. Default: 1 / beta.
    gradients: The samples of q, r and h, and the aggregator of h and, with
      FedInn, of q and r together.
    inner_aggregator: A `tff.aggregators` factory for y+ - y; with LFedInn, for
      that and r together.
    outer_aggregator: One for x+ - x.
    outer_optimizer: The server's for x; `None` to add the mean change.
    client_weighting: See `build_fed_nest`.
    seed: Of the initial point and of all draws.

  Returns:
    A `NestedProcess`.
  """
  types = ProblemTypes(problem, client_weighting)
  if not problem.is_implicit:
    raise ValueError(
        f'`problem` is {problem.kind}: AggITD is for bilevel and compositional'
        ' problems. fednest solves this one without a chain.'
    )
  options.check_count('inner_rounds', inner_rounds)
  if inner_method == 'fedinn':
    method_inside: FedInn | LFedInn = FedInn(
        types, inner, gradients, inner_aggregator
    )
    carrier = 'gradient_aggregator', gradients.aggregator
  elif inner_method == 'lfedinn':
    method_inside = LFedInn(types, inner, inner_aggregator)
    carrier = 'inner_aggregator', inner_aggregator
  else:
    raise ValueError(
        "`inner_method` must be 'fedinn' or 'lfedinn'; got"
        f' {inner_method!r}.'
    )
  agg_itd = AggITD(
      types,
      method_inside,
      _build_carrying_round(
          types, method_inside.rounds[0], gradients.batch_size, *carrier
      ),
      FedOut(
          types, outer, None, gradients, outer_aggregator, outer_optimizer
      ),
      inner_rounds,
      fed_ihgp.smoothness_hparams(
          inverse_hessian.build_solver('truncated', inner_rounds),
          inverse_hessian.InverseHessian(smoothness=smoothness),
          method_inside.hparams['inner_learning_rate'],
      ),
  )
  return process.build_process(agg_itd, seed)
