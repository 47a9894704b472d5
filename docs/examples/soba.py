"""SOBA (Dagreou et al., NeurIPS 2022): x, y and v step at once.

  y <- y - beta  mean_i grad_y g_i
  v <- v - beta  mean_i (grad^2_y g_i v - grad_y f_i)       v -> H^-1 grad_y f
  x <- x - alpha mean_i (grad_x f_i - grad^2_xy g_i v)

One round per epoch, full batches; v is the method's own state; no limits on y.
"""

from typing import NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff import vector_space
from fednest_tff.local import derivatives


class Point(NamedTuple):
  """The message to the clients: (x, y, v)."""
  outer: vector_space.Structure
  inner: vector_space.Structure
  v: vector_space.Structure


class Soba(fednest_tff.Method):
  """One round and one step of the server per epoch."""

  def __init__(self, types, rates):
    problem = types.problem
    if not problem.is_implicit:
      raise ValueError(f'SOBA needs a bilevel problem; got {problem.kind}.')
    point = Point(types.outer, types.inner, types.inner)

    @tff.tensorflow.computation(point, types.features, types.client)
    def directions(point, features, client):
      x, y, v = point
      inner, d_y = derivatives.inner_gradient(problem, x, y, features.inner)
      d_v = vector_space.subtract(
          derivatives.inner_hessian_product(problem, x, y, v, features.inner),
          derivatives.outer_gradient_in_inner(problem, x, y, features.outer))
      outer, d_x = derivatives.hypergradient(
          problem, x, y, v, client.outer, client.inner)
      return Point(d_x, d_y, d_v), dict(inner_loss=inner, outer_loss=outer)

    @tff.tensorflow.computation(point, point, types.scalar, types.scalar)
    def step(point, mean, beta, alpha):
      x = vector_space.add_scaled(point.outer, -alpha, mean.outer)
      y, v = vector_space.add_scaled(point[1:], -beta, mean[1:])
      return problem.project_outer(x), y, v

    self._step = step
    self._round = fednest_tff.Round('directions', types, directions)
    super().__init__(types, [self._round], rates)

  def initial_state(self, x, y, numbers, seed):
    return tf.nest.map_structure(tf.zeros_like, y)  # v

  def epoch(self, do, variables, plan):
    point = Point(*variables)  # The method's own variable is v.
    mean = do.round(self._round, point)
    do.measure(**mean.metrics)
    beta = plan.numbers['inner_learning_rate']
    alpha = plan.numbers['outer_learning_rate']
    return fednest_tff.Variables(
        *do.server(self._step, point, mean.value, beta, alpha))


def build_soba(problem: fednest_tff.Problem, *, inner_learning_rate: float,
    outer_learning_rate: float, seed: int = 0) -> fednest_tff.NestedProcess:
  """SOBA: x, y and v step at once, from full gradients."""
  rates = fednest_tff.learning_rates(
      inner_learning_rate=inner_learning_rate,
      outer_learning_rate=outer_learning_rate)
  return fednest_tff.build_process(
      Soba(fednest_tff.ProblemTypes(problem), rates), seed)


fednest_tff.register('soba', build_soba, label='SOBA', rounds='1')
