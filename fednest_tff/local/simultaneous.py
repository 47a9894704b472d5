"""Local steps on x, y and v at once.

Several methods keep a third variable v beside x and y, which approximates the
solution of H v = grad_y f, and step on all of them along directions taken at
one point z = (x, y, v):

  G_i(z) = (grad_x f_i - grad^2_xy g_i v,    of x
            grad_y g_i,                      of y
            grad^2_y g_i v - grad_y f_i)     of v

A minimax problem has no v, a single-level problem neither y nor v; their parts
of a point are empty. The penalty method has another third variable and other
directions (`penalty_direction`), without second derivatives.

Since x moves, features cannot be kept from one step to the next: directions
take batches, and evaluate the representation at every step.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.local import derivatives, descent, sampling
from fednest_tff.local.client import Client
from fednest_tff.local.sampling import Purpose
from fednest_tff.options import option
from fednest_tff.problems import Batch, Problem
from fednest_tff.vector_space import Structure


class Point(NamedTuple):
  """A point z, or anything with a part per variable: directions, step sizes.

  Attributes:
    outer: x.
    inner: y; empty for a single-level problem.
    linear: v; empty unless the problem is implicit.
  """

  outer: Structure
  inner: Structure
  linear: Structure


class BatchPair(NamedTuple):
  """The minibatches of one step: of outer and of inner examples."""

  outer: Batch
  inner: Batch


# From a point and a step's minibatches to the directions of all variables.
Direction = Callable[[Point, BatchPair], Point]
# From the number k of a step (int32, from 0) and tau_i (int32) to a_k.
Coefficients = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class SimultaneousWork:
  """The local steps that a client takes on all variables between two messages.

  Attributes:
    inner_learning_rate: The local step size of y: a number, or a function of
      the epoch.
    linear_learning_rate: The local step size of the third variable, v (w in the
      penalty method).
    outer_learning_rate: The local step size of x.
    local_steps: How many local steps, tau_i: a number, or a function of the
      client's inner examples (outer ones without an inner problem). Default: 1.
    local_epochs: How many local steps, counted in passes over those examples,
      in place of `local_steps`.
    batch_size: B, the size of minibatches; all of a client's examples if it is
      not given.
    divide_by_local_steps: Whether a client divides its local step sizes by
      tau_i.
  """

  inner_learning_rate: float | descent.Schedule | None = option(
      'inner_learning_rate'
  )
  linear_learning_rate: float | descent.Schedule | None = option(
      'linear_learning_rate'
  )
  outer_learning_rate: float | descent.Schedule | None = option(
      'outer_learning_rate'
  )
  local_steps: int | Callable[[Structure], tf.Tensor] | None = option(
      'local_steps'
  )
  local_epochs: int | None = option('local_epochs')
  batch_size: int | None = option('batch_size')
  divide_by_local_steps: bool = option('divide_by_local_steps', False)

  def per_client(self) -> descent.LocalWork:
    """The number of steps and their minibatches, checked."""
    work = descent.LocalWork(
        steps=self.local_steps,
        epochs=self.local_epochs,
        batch_size=self.batch_size,
        divide_by_steps=self.divide_by_local_steps,
    )
    return work.at_level('')


class LocalSteps:
  """The tau_i steps of one client: how many, and their minibatches.

  Attributes:
    tau: tau_i (int32).
    size: The factor of the client's step sizes: 1, or 1 / tau_i.
  """

  def __init__(
      self,
      problem: Problem,
      work: descent.LocalWork,
      client: Client,
      seed: tf.Tensor,
  ):
    self.tau = work.num_steps(
        client.inner if problem.has_inner else client.outer
    )
    self.size = work.step_size(tf.ones([], problem.scalar_dtype), self.tau)
    self._outer = work.minibatches(
        client.outer,
        self.tau,
        sampling.fold_in(seed, Purpose.SIMULTANEOUS_OUTER),
    )
    self._inner = work.minibatches(
        client.inner,
        self.tau,
        sampling.fold_in(seed, Purpose.SIMULTANEOUS_INNER),
    )

  def __getitem__(self, step: tf.Tensor) -> BatchPair:
    return BatchPair(self._outer[step], self._inner[step])


def nested_direction(
    problem: Problem, point: Point, batch: BatchPair
) -> Point:
  """G_i(z), from one pass over f_i and one over g_i."""
  x, y, v = point
  if not problem.is_implicit:
    _, d_x = derivatives.direct_gradient(problem, x, y, batch.outer)
    if not problem.has_inner:
      return Point(d_x, (), ())
    features = problem.representation(x, batch.inner)
    _, d_y = derivatives.inner_gradient(problem, x, y, features)
    return Point(d_x, d_y, ())
  f_x, f_y = derivatives.outer_gradients(problem, x, y, batch.outer)
  g_y, hessian_v, mixed_v = derivatives.inner_gradient_and_products(
      problem, x, y, v, batch.inner
  )
  return Point(
      vector_space.subtract(f_x, mixed_v),
      g_y,
      vector_space.subtract(hessian_v, f_y),
  )


def penalty_direction(
    problem: Problem, penalty: tf.Tensor, point: Point, batch: BatchPair
) -> Point:
  """Descent directions of f_i(x, y) + lambda (g_i(x, y) - g_i(x, w)).

  The direction of y is divided by lambda, so that its step size need not
  follow lambda; w, the third variable, descends g_i alone.
  """
  x, y, w = point
  f_x, f_y = derivatives.outer_gradients(problem, x, y, batch.outer)
  g_x, g_y = derivatives.inner_gradients(problem, x, y, batch.inner)
  g_x_at_w, g_w = derivatives.inner_gradients(problem, x, w, batch.inner)
  difference = vector_space.subtract(g_x, g_x_at_w)
  return Point(
      vector_space.add_scaled(f_x, penalty, difference),
      vector_space.add_scaled(g_y, 1 / penalty, f_y),
      g_w,
  )


def project(problem: Problem, point: Point) -> Point:
  """x and y projected on their feasible sets."""
  return Point(
      problem.project_outer(point.outer),
      problem.project_inner(point.inner),
      point.linear,
  )


def scale(rates: Point, point: Point) -> Point:
  """Each variable's part times that variable's number."""
  return Point(*map(vector_space.scale, rates, point))


def accumulate(
    problem: Problem,
    direction: Direction,
    start: Point,
    steps: LocalSteps,
    rates: Point,
    coefficients: Coefficients,
) -> tuple[Point, tf.Tensor]:
  """z_i <- z_i - rates a_k G_i(z_i), tau_i times, and the sum of directions.

  Args:
    problem: The problem.
    direction: G_i.
    start: z, where the client starts.
    steps: tau_i and the minibatches.
    rates: The local step sizes.
    coefficients: a_k.

  Returns:
    (sum_k a_k G_i(z_i), sum_k a_k).
  """
  dtype = problem.scalar_dtype

  def step(
      k: tf.Tensor, at: Point, total: Point, weight: tf.Tensor
  ) -> tuple[tf.Tensor, Point, Point, tf.Tensor]:
    a = steps.size * vector_space.scalar(coefficients(k, steps.tau), dtype)
    d = vector_space.scale(a, direction(at, steps[k]))
    moved = vector_space.subtract(at, scale(rates, d))
    return (
        k + 1, project(problem, moved), vector_space.add(total, d), weight + a
    )

  zero = tf.nest.map_structure(tf.zeros_like, start)
  _, _, total, weight = tf.while_loop(
      lambda k, *_: k < steps.tau,
      step,
      (tf.constant(0), start, zero, tf.zeros([], dtype)),
  )
  return total, weight


def corrected_steps(
    problem: Problem,
    direction: Direction,
    start: Point,
    mean_direction: Point,
    steps: LocalSteps,
    rates: Point,
) -> Point:
  """tau_i steps along G_i(z_i; s) - G_i(z; s) + G(z), from z_i = z.

  Args:
    problem: The problem.
    direction: G_i.
    start: z.
    mean_direction: G(z), the mean over the clients.
    steps: tau_i and the minibatches s.
    rates: The local step sizes.

  Returns:
    z_i.
  """
  return descent.corrected_descent(
      lambda at, batch: scale(rates, direction(at, batch)),
      start,
      scale(rates, mean_direction),
      steps,
      steps.tau,
      steps.size,
      lambda point: project(problem, point),
  )


def momentum_steps(
    problem: Problem,
    direction: Direction,
    start: Point,
    momentum: Point,
    steps: LocalSteps,
    rates: Point,
    decay: tf.Tensor,
) -> tuple[Point, Point]:
  """tau_i steps along a momentum that is corrected by each minibatch:

    z' = z_i - rates m_i
    m_i <- G_i(z'; B) + decay (m_i - G_i(z_i; B)),    z_i <- z'

  Args:
    problem: The problem.
    direction: G_i.
    start: z.
    momentum: m, where the clients' momenta start.
    steps: tau_i and the minibatches B.
    rates: The local step sizes.
    decay: The weight of the old momentum.

  Returns:
    (z_i, m_i).
  """

  def step(
      k: tf.Tensor, at: Point, m: Point
  ) -> tuple[tf.Tensor, Point, Point]:
    batch = steps[k]
    moved = vector_space.subtract(
        at, scale(rates, vector_space.scale(steps.size, m))
    )
    moved = project(problem, moved)
    kept = vector_space.subtract(m, direction(at, batch))
    m = vector_space.add_scaled(direction(moved, batch), decay, kept)
    return k + 1, moved, m

  _, end, momentum = tf.while_loop(
      lambda k, *_: k < steps.tau, step, (tf.constant(0), start, momentum)
  )
  return end, momentum
