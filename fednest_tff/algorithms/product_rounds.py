"""The rounds of FedIHGP: grad_y f, and products with the inner Hessian.

  gradient   b = mean over S_0 of grad_y f_i                       lines 3-6
  product    H v = mean over S_n of grad^2_y g_i v, n = 1, 2, ...  lines 11-16

Line numbers are those of Algorithm 3. FedIHGP and the power iteration use these
rounds.
"""

import collections
from collections.abc import Callable
import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.federated.aggregation import Aggregation, GlobalGradients
from fednest_tff.federated.method import Numbers
from fednest_tff.federated.rounds import (
    PointMessage,
    Round,
    ServerValue,
    WeightedAnswer,
)
from fednest_tff.federated.types import ProblemTypes
from fednest_tff.local import client as client_lib
from fednest_tff.local import derivatives, inverse_hessian, sampling
from fednest_tff.local.client import Client, ClientFeatures
from fednest_tff.problems import Features
from fednest_tff.vector_space import Structure

# The weight of a client outside S_n, relative to one inside. Next to 1 it is
# lost even in float64; if S_n is empty, all clients have it, and it cancels.
_OUTSIDE = 1e-20


class ProductMessage(NamedTuple):
  """The message before a Hessian-vector product.

  Attributes:
    outer: x.
    inner: y.
    vector: v, or a tuple of them, one per chain.
    index: The number n of the round in its call (int32), 0 for the gradient. If
      it is negative, clients answer with zeros and do not compute.
    seed: The call's seed.
  """

  outer: Structure
  inner: Structure
  vector: Structure
  index: tf.Tensor
  seed: tf.Tensor


def _divide_by_shares(value: Structure) -> Structure:
  """The chains' means over their S_n, from the means over all clients."""
  scaled, shares = value
  return tuple(map(vector_space.scale, [1 / s for s in shares], scaled))


class ProductRounds:
  """The rounds of FedIHGP.

  Attributes:
    gradient: The round that computes b.
    product: The round that computes H v.
    vector_type: Type of v: that of y, or a tuple with one per chain.
    means: From a round's mean value to the means over S_n; in TensorFlow.
  """

  def __init__(
      self,
      types: ProblemTypes,
      gradients: GlobalGradients,
      participation: float = 1.0,
      may_be_unwanted: bool = False,
      num_chains: int = 1,
  ):
    """Traces the clients' computations.

    Args:
      types: The problem's types.
      gradients: The samples and the aggregator of b and H v.
      participation: The probability that a client of the cohort is in S_n,
        drawn anew in each round. An empty S_n means the whole cohort.
      may_be_unwanted: Whether a product's index can be negative.
      num_chains: S.
    """
    is_number = isinstance(participation, (int, float))
    if not is_number or not 0.0 < participation <= 1.0:
      raise ValueError(
          f'`participation` must be in (0, 1]; got {participation!r}.'
      )
    problem, batch_size = types.problem, gradients.batch_size
    has_shares = participation < 1.0 and num_chains > 1
    self._num_chains = num_chains
    self.means = _divide_by_shares if has_shares else vector_space.identity
    self.vector_type: ServerValue = types.inner
    if num_chains > 1:
      self.vector_type = (types.inner,) * num_chains

    def share(
        client: Client, seed: tf.Tensor, index: tf.Tensor | int
    ) -> tf.Tensor:
      """1 for a client in S_n, `_OUTSIDE` for any other."""
      own = client_lib.seed_of(client, seed, sampling.neumann_cohort(index))
      is_in = tf.random.stateless_uniform([], own) < participation
      return tf.where(is_in, tf.ones_like(client.weight), _OUTSIDE)

    def answer(
        client: Client,
        seed: tf.Tensor,
        index: tf.Tensor | int,
        compute: Callable[[int, Callable[[Features], Features]], Structure],
    ) -> WeightedAnswer:
      """The client's value, metrics and weight in round n = `index`.

      Each of several chains has its own S_n, so that a client's share differs
      between chains: it sends its shares, and the server divides by their mean.
      """

      nothing: Numbers = collections.OrderedDict()  # No metrics.

      def sample(features: Features, chain_seed: tf.Tensor) -> Features:
        return client_lib.sample(
            client, features, batch_size, chain_seed,
            sampling.neumann_sample(index),
        )

      if num_chains == 1:
        weight = client.weight
        if participation < 1.0:
          weight *= share(client, seed, index)
        value = compute(0, functools.partial(sample, chain_seed=seed))
        return value, nothing, weight
      seeds = [
          inverse_hessian.chain_seed(seed, k) for k in range(num_chains)
      ]
      values = tuple(
          compute(k, functools.partial(sample, chain_seed=own))
          for k, own in enumerate(seeds)
      )
      if not has_shares:
        return values, nothing, client.weight
      shares = tuple(share(client, own, index) for own in seeds)
      scaled = tuple(map(vector_space.scale, shares, values))
      return (scaled, shares), nothing, client.weight

    @types.computation(
        PointMessage(types.outer, types.inner, types.seed),
        types.features, types.client,
    )
    def client_gradient(
        message: PointMessage, features: ClientFeatures, client: Client
    ) -> WeightedAnswer:
      x, y, seed = message
      return answer(
          client, seed, 0,
          lambda chain, sample: derivatives.outer_gradient_in_inner(
              problem, x, y, sample(features.outer)
          ),
      )

    @types.computation(
        ProductMessage(
            types.outer, types.inner, self.vector_type, np.int32, types.seed
        ),
        types.features, types.client,
    )
    def client_product(
        message: ProductMessage, features: ClientFeatures, client: Client
    ) -> WeightedAnswer:
      x, y, vectors, index, seed = message
      if num_chains == 1:
        vectors = (vectors,)

      def multiply(
          chain: int, sample: Callable[[Features], Features]
      ) -> Structure:
        vector = vectors[chain]

        def product() -> Structure:
          return derivatives.inner_hessian_product(
              problem, x, y, vector, sample(features.inner)
          )

        if not may_be_unwanted:
          return product()
        return tf.cond(
            index >= 0,
            product,
            lambda: tf.nest.map_structure(tf.zeros_like, vector),
        )

      return answer(client, seed, index, multiply)

    value_type = client_gradient.type_signature.result[0]
    shared = Aggregation(
        'ihgp', types, value_type, 'gradient_aggregator',
        gradients.aggregator,
        uniform=participation == 1.0 or has_shares,
    )
    self.gradient = Round(
        'ihgp_gradient', types, client_gradient, aggregation=shared
    )
    self.product = Round(
        'ihgp_product', types, client_product, aggregation=shared
    )

  def per_chain(self, vector: Structure) -> Structure:
    """`vector`, once per chain if there are several."""
    return vector if self._num_chains == 1 else (vector,) * self._num_chains
