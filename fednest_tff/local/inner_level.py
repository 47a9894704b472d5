"""What a client computes for the inner problem, min_y mean_i g_i(x, y).

While x is fixed, a client's features (`Problem.representation`) are too: each
function evaluates them once and differentiates with respect to y alone.
"""

import tensorflow as tf

from fednest_tff.local import derivatives, descent
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


def gradient(
    problem: Problem, x: Structure, y: Structure, batch: Structure
) -> tuple[tf.Tensor, Structure]:
  """g_i(x, y; batch) and G_i = grad_y g_i(x, y; batch)."""
  features = problem.representation(x, batch)
  return derivatives.value_and_gradient(
      lambda at: problem.inner_loss(x, at, features), y
  )


def loss(
    problem: Problem, x: Structure, y: Structure, batch: Structure
) -> tf.Tensor:
  """g_i(x, y; batch)."""
  return problem.inner_loss(x, y, problem.representation(x, batch))


def hessian_product(
    problem: Problem,
    x: Structure,
    y: Structure,
    vector: Structure,
    batch: Structure,
) -> Structure:
  """grad^2_y g_i(x, y; batch) times `vector`."""
  features = problem.representation(x, batch)
  return derivatives.hessian_vector_product(
      lambda at: problem.inner_loss(x, at, features), y, vector
  )


def _gradient_in_features(problem: Problem, x: Structure) -> descent.Gradient:
  return lambda y, features: derivatives.gradient(
      lambda at: problem.inner_loss(x, at, features), y
  )


def svrg_steps(
    problem: Problem,
    x: Structure,
    y: Structure,
    q: Structure,
    examples: Structure,
    work: descent.LocalWork,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
) -> Structure:
  """Lines 8-11 of Algorithm 4: y_{i,tau_i} from y_{i,0} = y.

  Args:
    problem: The problem.
    x: The outer variable, fixed.
    y: The global inner variable.
    q: The mean over clients of G_i(y).
    examples: The client's inner examples.
    work: tau_i and the minibatches.
    learning_rate: beta.
    seed: int64 tensor of shape [2].

  Returns:
    The client's inner variable after tau_i steps.
  """
  return descent.svrg(
      _gradient_in_features(problem, x),
      y,
      q,
      problem.representation(x, examples),
      work,
      work.num_steps(examples),
      learning_rate,
      seed,
  )


def sgd_steps(
    problem: Problem,
    x: Structure,
    y: Structure,
    examples: Structure,
    work: descent.LocalWork,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
) -> Structure:
  """Lines 3-6 of LFedInn: local SGD on g_i; arguments as in `svrg_steps`."""
  return descent.sgd(
      _gradient_in_features(problem, x),
      y,
      problem.representation(x, examples),
      work,
      work.num_steps(examples),
      learning_rate,
      seed,
  )
