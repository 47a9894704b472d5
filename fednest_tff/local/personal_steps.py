"""Local steps when each client has its own inner solution.

The client solves its inner problem at its current x_i, from the start that the
server sent, and steps on x_i along the hypergradient of its own data, with its
own Hessian. Here that is the whole hypergradient of the client's objective
f_i(x, y_i*(x)), however much clients differ.
"""

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.local import (
    derivatives,
    descent,
    inverse_hessian,
    local_hypergradient,
    sampling,
)
from fednest_tff.local.client import Client
from fednest_tff.local.sampling import Purpose
from fednest_tff.problems import Batch, Problem
from fednest_tff.vector_space import Structure


def personalize(
    problem: Problem,
    x: Structure,
    start: Structure,
    examples: Batch,
    work: descent.LocalWork,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
) -> Structure:
  """y_i: tau_i steps on y from `start` along grad_y g_i(x, y).

  Args:
    problem: A problem with an inner variable.
    x: The outer variable, fixed: features are evaluated once.
    start: Where y starts.
    examples: The client's inner examples, behind g_i.
    work: tau_i and the minibatches.
    learning_rate: beta.
    seed: int64 tensor of shape [2].

  Returns:
    y_i.
  """
  return descent.sgd(
      lambda at, part: derivatives.inner_gradient(problem, x, at, part)[1],
      start,
      problem.representation(x, examples),
      work,
      work.num_steps(examples),
      learning_rate,
      seed,
      problem.project_inner,
  )


def personal_steps(
    problem: Problem,
    solver: inverse_hessian.Solver | None,
    x: Structure,
    start: Structure,
    client: Client,
    inner_work: descent.LocalWork,
    outer_work: descent.LocalWork,
    inner_learning_rate: tf.Tensor,
    outer_learning_rate: tf.Tensor,
    smoothness: tf.Tensor,
    seed: tf.Tensor,
) -> tuple[Structure, Structure]:
  """tau_i steps on x, each along the hypergradient at the client's own y_i.

  Every step solves the inner problem anew, from `start` and with new
  minibatches, because y_i*(x_i) moves with x_i.

  Args:
    problem: The problem.
    solver: Of H_i p = grad_y f_i; `None` unless the problem is implicit.
    x: The outer variable.
    start: Where y starts in every step.
    client: The client.
    inner_work: The inner steps.
    outer_work: The outer steps.
    inner_learning_rate: beta.
    outer_learning_rate: alpha.
    smoothness: l.
    seed: int64 tensor of shape [2].

  Returns:
    x_i after the steps, and y_i at the x that they began with (`start` if there
    is no step).
  """
  tau = outer_work.num_steps(client.outer)
  step_size = outer_work.step_size(outer_learning_rate, tau)
  inner_seed = sampling.fold_in(seed, Purpose.PERSONAL_INNER)
  hypergradient = local_hypergradient.LocalHypergradient(
      problem,
      solver,
      client,
      outer_work,
      tau,
      smoothness,
      sampling.fold_in(seed, Purpose.PERSONAL_OUTER),
  )

  def step(
      nu: tf.Tensor, x_i: Structure, first: Structure
  ) -> tuple[tf.Tensor, Structure, Structure]:
    y_i = personalize(
        problem,
        x_i,
        start,
        client.inner,
        inner_work,
        inner_learning_rate,
        sampling.fold_in(inner_seed, nu),
    )
    h = hypergradient(x_i, y_i, nu)
    moved = vector_space.add_scaled(x_i, -step_size, h)
    return (
        nu + 1,
        problem.project_outer(moved),
        vector_space.where(tf.equal(nu, 0), y_i, first),
    )

  _, x_i, y_i = tf.while_loop(
      lambda nu, *_: nu < tau, step, (tf.constant(0), x, start)
  )
  return x_i, y_i
