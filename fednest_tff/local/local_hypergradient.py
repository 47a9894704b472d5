"""Local steps along the hypergradient of a client's own data.

LFedOut steps on x alone; LFedNest-NonAlt and FedAvg-S step on x and y between
two messages. In all three the Neumann series runs on the client, with the
client's own Hessian.
"""

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.local import (
    derivatives,
    descent,
    inverse_hessian,
    sampling,
)
from fednest_tff.local.client import Client
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class LocalHypergradient:
  """The whole hypergradient from a client's data (LFedOut, lines 5-8).

  Local step nu draws xi_{i,nu} from the outer examples, and zeta_{i,nu} and the
  samples zeta_{i,n} of the Neumann factors from the inner examples.
  """

  def __init__(
      self,
      problem: Problem,
      solver: inverse_hessian.Solver | None,
      client: Client,
      work: descent.LocalWork,
      tau: tf.Tensor,
      smoothness: tf.Tensor,
      seed: tf.Tensor,
  ):
    """Prepares the minibatches of tau_i steps.

    Args:
      problem: The problem.
      solver: How the inverse-Hessian-gradient product is approximated; `None`
        unless the problem is implicit.
      client: The client.
      work: The minibatch size.
      tau: tau_i.
      smoothness: l.
      seed: int64 tensor of shape [2].
    """
    self._problem = problem
    self._solver = solver
    self._smoothness = smoothness
    self._seed = seed
    self._outer_batches = work.minibatches(
        client.outer, tau, sampling.fold_in(seed, Purpose.LOCAL_OUTER_BATCHES)
    )
    if solver is not None:
      self._inner_batches = work.minibatches(
          client.inner,
          tau * solver.num_terms,
          sampling.fold_in(seed, Purpose.LOCAL_INNER_BATCHES),
      )

  def __call__(self, x: Structure, y: Structure, nu: tf.Tensor) -> Structure:
    """h_{i,nu} at (x, y)."""
    problem, solver = self._problem, self._solver
    outer_batch = self._outer_batches[nu]
    if solver is None:
      return derivatives.direct_gradient(problem, x, y, outer_batch)[1]
    # Step nu owns the minibatches nu N (for the mixed product) to nu N + N - 1.
    first = nu * solver.num_terms

    def product(vector: Structure, n: tf.Tensor) -> Structure:
      features = problem.representation(x, self._inner_batches[first + n])
      return derivatives.inner_hessian_product(problem, x, y, vector, features)

    p = inverse_hessian.solve(
        solver,
        product,
        derivatives.outer_gradient_in_inner(
            problem, x, y, problem.representation(x, outer_batch)
        ),
        self._smoothness,
        sampling.fold_in(
            sampling.fold_in(self._seed, Purpose.LOCAL_STOP), nu
        ),
    )
    inner_batch = self._inner_batches[first]
    return derivatives.hypergradient(
        problem, x, y, p, outer_batch, inner_batch
    )[1]


def outer_steps(
    problem: Problem,
    solver: inverse_hessian.Solver | None,
    x: Structure,
    y: Structure,
    client: Client,
    work: descent.LocalWork,
    learning_rate: tf.Tensor,
    smoothness: tf.Tensor,
    seed: tf.Tensor,
) -> Structure:
  """Lines 4-9 of LFedOut: tau_i steps along the local hypergradient.

  Args:
    problem: The problem.
    solver: Of the local series; `None` unless the problem is implicit.
    x: The outer variable.
    y: The inner variable, fixed.
    client: The client.
    work: tau_i and the minibatches.
    learning_rate: alpha.
    smoothness: l.
    seed: int64 tensor of shape [2].

  Returns:
    x_i.
  """
  tau = work.num_steps(client.outer)
  direction = LocalHypergradient(
      problem, solver, client, work, tau, smoothness, seed
  )
  return descent.descend(
      lambda at, nu: direction(at, y, nu),
      x,
      tau,
      work.step_size(learning_rate, tau),
      problem.project_outer,
  )


def alternating_steps(
    problem: Problem,
    solver: inverse_hessian.Solver | None,
    x: Structure,
    y: Structure,
    client: Client,
    inner_work: descent.LocalWork,
    outer_work: descent.LocalWork,
    inner_rounds: int,
    inner_learning_rate: tf.Tensor,
    outer_learning_rate: tf.Tensor,
    smoothness: tf.Tensor,
    seed: tf.Tensor,
) -> tuple[Structure, Structure]:
  """LFedNest-NonAlt: T inner calls, then the outer one, all on one client.

  Args:
    problem: The problem.
    solver: As in `outer_steps`.
    x: The outer variable.
    y: The inner variable.
    client: The client.
    inner_work: tau_i and the minibatches of the inner steps.
    outer_work: tau_i and the minibatches of the outer steps.
    inner_rounds: T.
    inner_learning_rate: beta.
    outer_learning_rate: alpha.
    smoothness: l.
    seed: int64 tensor of shape [2].

  Returns:
    (x_i, y_i).
  """
  if problem.has_inner:
    features = problem.representation(x, client.inner)
    for t in range(inner_rounds):
      y = descent.sgd(
          lambda at, part: derivatives.inner_gradient(problem, x, at, part)[1],
          y,
          features,
          inner_work,
          inner_work.num_steps(client.inner),
          inner_learning_rate,
          sampling.fold_in(seed, t),
          problem.project_inner,
      )
  x = outer_steps(
      problem,
      solver,
      x,
      y,
      client,
      outer_work,
      outer_learning_rate,
      smoothness,
      sampling.fold_in(seed, inner_rounds),
  )
  return x, y


def simultaneous_steps(
    problem: Problem,
    solver: inverse_hessian.Solver | None,
    x: Structure,
    y: Structure,
    client: Client,
    work: descent.LocalWork,
    inner_learning_rate: tf.Tensor,
    outer_learning_rate: tf.Tensor,
    smoothness: tf.Tensor,
    seed: tf.Tensor,
) -> tuple[Structure, Structure]:
  """FedAvg-S: x and y step at once, both from the old (x, y).

  For minimax this is local descent in x and ascent in y; for other problems x
  follows the local hypergradient at the current y.

  Args:
    problem: The problem.
    solver: As in `outer_steps`.
    x: The outer variable.
    y: The inner variable.
    client: The client.
    work: tau_i, counted in inner examples, and the minibatches.
    inner_learning_rate: beta.
    outer_learning_rate: alpha.
    smoothness: l.
    seed: int64 tensor of shape [2].

  Returns:
    (x_i, y_i).
  """
  tau = work.num_steps(client.inner)
  batches = work.minibatches(
      client.inner, tau, sampling.fold_in(seed, Purpose.SIMULTANEOUS_INNER)
  )
  hypergradient = LocalHypergradient(
      problem,
      solver,
      client,
      work,
      tau,
      smoothness,
      sampling.fold_in(seed, Purpose.SIMULTANEOUS_OUTER),
  )

  def direction(
      point: tuple[Structure, Structure], nu: tf.Tensor
  ) -> tuple[Structure, Structure]:
    x, y = point
    h = hypergradient(x, y, nu)
    if not problem.has_inner:
      return vector_space.scale(outer_learning_rate, h), y
    features = problem.representation(x, batches[nu])
    _, g = derivatives.inner_gradient(problem, x, y, features)
    return (
        vector_space.scale(outer_learning_rate, h),
        vector_space.scale(inner_learning_rate, g),
    )

  def project(
      point: tuple[Structure, Structure]
  ) -> tuple[Structure, Structure]:
    return problem.project_outer(point[0]), problem.project_inner(point[1])

  one = tf.ones_like(outer_learning_rate)
  return descent.descend(
      direction, (x, y), tau, work.step_size(one, tau), project
  )
