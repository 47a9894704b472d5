"""Local steps on both variables between two messages: the one-round methods."""

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.local import (
    descent,
    inner_level,
    inverse_hessian,
    outer_level,
    sampling,
)
from fednest_tff.local.client import Client
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


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
    solver: Of the local series; `None` if the problem is not implicit.
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
      y = inner_level.sgd_steps(
          problem,
          x,
          y,
          features,
          inner_work,
          inner_work.num_steps(client.inner),
          inner_learning_rate,
          sampling.fold_in(seed, t),
      )
  x = outer_level.sgd_steps(
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
    solver: As in `alternating_steps`.
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
  batches = work.minibatches(client.inner, tau, sampling.fold_in(seed, 0))
  hypergradient = outer_level.LocalHypergradient(
      problem, solver, client, work, tau, smoothness, sampling.fold_in(seed, 1)
  )

  def direction(point, nu):
    x, y = point
    h = hypergradient(x, y, nu)
    if not problem.has_inner:
      return vector_space.scale(outer_learning_rate, h), y
    features = problem.representation(x, batches[nu])
    _, g = inner_level.gradient(problem, x, y, features)
    return (
        vector_space.scale(outer_learning_rate, h),
        vector_space.scale(inner_learning_rate, g),
    )

  one = tf.ones_like(outer_learning_rate)
  return descent.descend(direction, (x, y), tau, work.step_size(one, tau))
