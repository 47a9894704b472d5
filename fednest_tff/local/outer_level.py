"""What a client computes for the outer problem, min_x mean_i f_i(x, y*(x)).

The hypergradient of f_i has a direct part, grad_x f_i(x, y), and, if the
problem is implicit, an indirect part -grad^2_xy g_i(x, y) p, where p solves
H p = grad_y f with the Hessian H of the inner problem (Lemma 2.1).
"""

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.local import (
    derivatives,
    descent,
    inner_level,
    inverse_hessian,
    sampling,
)
from fednest_tff.local.client import Client
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


def loss(
    problem: Problem, x: Structure, y: Structure, batch: Structure
) -> tf.Tensor:
  """f_i(x, y; batch)."""
  return problem.outer_loss(x, y, problem.representation(x, batch))


def direct_gradient(
    problem: Problem, x: Structure, y: Structure, batch: Structure
) -> tuple[tf.Tensor, Structure]:
  """f_i(x, y; batch) and F_i = grad_x f_i(x, y; batch)."""
  return derivatives.value_and_gradient(
      lambda at: loss(problem, at, y, batch), x
  )


def gradient_in_inner(
    problem: Problem, x: Structure, y: Structure, features: Structure
) -> Structure:
  """grad_y f_i(x, y; features): the right-hand side of H p = grad_y f."""
  return derivatives.gradient(
      lambda at: problem.outer_loss(x, at, features), y
  )


def hypergradient(
    problem: Problem,
    x: Structure,
    y: Structure,
    p: Structure,
    outer_batch: Structure,
    inner_batch: Structure,
) -> tuple[tf.Tensor, Structure]:
  """f_i and h_i = F_i(x) - grad^2_xy g_i(x, y) p (Algorithm 2, line 5).

  Args:
    problem: The problem.
    x: The outer variable.
    y: The inner variable.
    p: The inverse-Hessian-gradient product; not used unless the problem is
      implicit (line 6: h_i = F_i(x)).
    outer_batch: xi_i.
    inner_batch: zeta_i.

  Returns:
    The outer loss and the client's hypergradient.
  """
  value, direct = direct_gradient(problem, x, y, outer_batch)
  if not problem.is_implicit:
    return value, direct

  def inner_loss(x, y):
    return problem.inner_loss(x, y, problem.representation(x, inner_batch))

  indirect = derivatives.mixed_product(inner_loss, x, y, p)
  return value, vector_space.subtract(direct, indirect)


def svrg_steps(
    problem: Problem,
    x: Structure,
    y: Structure,
    h: Structure,
    examples: Structure,
    work: descent.LocalWork,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
) -> Structure:
  """Lines 9-12 of Algorithm 2: x_{i,tau_i} from x_{i,0} = x.

  Only the direct gradient F_i is corrected locally; the indirect part, which
  would need the other clients' Hessians, stays in h as it was at x.

  Args:
    problem: The problem.
    x: The global outer variable.
    y: The inner variable, fixed.
    h: The mean over clients of h_i.
    examples: The client's outer examples.
    work: tau_i and the minibatches.
    learning_rate: alpha.
    seed: int64 tensor of shape [2].

  Returns:
    The client's outer variable after tau_i steps.
  """
  return descent.svrg(
      lambda at, batch: direct_gradient(problem, at, y, batch)[1],
      x,
      h,
      examples,
      work,
      work.num_steps(examples),
      learning_rate,
      seed,
  )


class LocalHypergradient:
  """The whole hypergradient from a client's own data (LFedOut, lines 5-8).

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
      solver: How the inverse-Hessian-gradient product is approximated; not
        used unless the problem is implicit.
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
        client.outer, tau, sampling.fold_in(seed, 0)
    )
    if problem.is_implicit:
      self._inner_batches = work.minibatches(
          client.inner, tau * solver.num_terms, sampling.fold_in(seed, 1)
      )

  def __call__(self, x: Structure, y: Structure, nu: tf.Tensor) -> Structure:
    """h_{i,nu} at (x, y)."""
    problem, solver = self._problem, self._solver
    outer_batch = self._outer_batches[nu]
    if not problem.is_implicit:
      return direct_gradient(problem, x, y, outer_batch)[1]
    # Step nu owns the minibatches nu N (for the mixed product) to nu N + N - 1.
    first = nu * solver.num_terms

    def product(vector, n):
      features = problem.representation(x, self._inner_batches[first + n])
      return inner_level.hessian_product(problem, x, y, vector, features)

    p = inverse_hessian.solve(
        solver,
        product,
        gradient_in_inner(
            problem, x, y, problem.representation(x, outer_batch)
        ),
        self._smoothness,
        sampling.fold_in(sampling.fold_in(self._seed, 2), nu),
    )
    inner_batch = self._inner_batches[first]
    return hypergradient(problem, x, y, p, outer_batch, inner_batch)[1]


def sgd_steps(
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
  """Lines 4-9 of LFedOut: tau_i steps along the local hypergradient."""
  tau = work.num_steps(client.outer)
  direction = LocalHypergradient(
      problem, solver, client, work, tau, smoothness, seed
  )
  return descent.descend(
      lambda at, nu: direction(at, y, nu),
      x,
      tau,
      work.step_size(learning_rate, tau),
  )
