"""What a client computes for the inner problem, min_y mean_i g_i(x, y).

While x is fixed, so are a client's features (`Problem.representation`): they
are evaluated once, and everything here differentiates with respect to y alone.
"""

import tensorflow as tf

from fednest_tff.local import derivatives, descent
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


def gradient(
    problem: Problem, x: Structure, y: Structure, features: Structure
) -> tuple[tf.Tensor, Structure]:
  """g_i(x, y; features) and G_i = grad_y g_i(x, y; features)."""
  return derivatives.value_and_gradient(
      lambda at: problem.inner_loss(x, at, features), y
  )


def hessian_product(
    problem: Problem,
    x: Structure,
    y: Structure,
    vector: Structure,
    features: Structure,
) -> Structure:
  """grad^2_y g_i(x, y; features) times `vector`."""
  return derivatives.hessian_vector_product(
      lambda at: problem.inner_loss(x, at, features), y, vector
  )


def _gradient_at(problem: Problem, x: Structure) -> descent.Gradient:
  return lambda y, features: gradient(problem, x, y, features)[1]


def svrg_steps(
    problem: Problem,
    x: Structure,
    y: Structure,
    q: Structure,
    features: Structure,
    work: descent.LocalWork,
    tau: tf.Tensor,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
) -> Structure:
  """Lines 8-11 of Algorithm 4: y_{i,tau_i} from y_{i,0} = y.

  Args:
    problem: The problem.
    x: The outer variable, fixed.
    y: The global inner variable.
    q: The mean over clients of G_i(y).
    features: Those of the client's inner examples.
    work: The minibatches.
    tau: tau_i.
    learning_rate: beta.
    seed: int64 tensor of shape [2].

  Returns:
    The client's inner variable after tau_i steps.
  """
  return descent.svrg(
      _gradient_at(problem, x), y, q, features, work, tau, learning_rate, seed
  )


def sgd_steps(
    problem: Problem,
    x: Structure,
    y: Structure,
    features: Structure,
    work: descent.LocalWork,
    tau: tf.Tensor,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
) -> Structure:
  """Lines 3-6 of LFedInn: local SGD on g_i; arguments as in `svrg_steps`."""
  return descent.sgd(
      _gradient_at(problem, x), y, features, work, tau, learning_rate, seed
  )
