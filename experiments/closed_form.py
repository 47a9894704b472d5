"""Problems over different clients whose solution is known in closed form."""

import collections
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import fednest_tff


class Case(NamedTuple):
  """A problem, its clients and its solution.

  Attributes:
    problem: The problem.
    datasets: One dataset per client.
    outer: x*.
    inner: y*(x*).
  """

  problem: fednest_tff.Problem
  datasets: list[tf.data.Dataset]
  outer: np.ndarray
  inner: np.ndarray


def _datasets(data: dict[str, np.ndarray]) -> list[tf.data.Dataset]:
  """One dataset per row of the leading axis, one example each."""
  count = len(next(iter(data.values())))
  return [
      tf.data.Dataset.from_tensors(
          collections.OrderedDict((k, v[i]) for k, v in data.items())
      )
      for i in range(count)
  ]


def _spec(data: dict[str, np.ndarray]):
  return collections.OrderedDict(
      (k, tf.TensorSpec(v.shape[1:], v.dtype)) for k, v in data.items()
  )


def quadratic_bilevel(
    num_clients: int = 10, dim: int = 5, ridge: float = 0.5, seed: int = 0
) -> Case:
  """g_i = 1/2 y'A_i y - y'(x + b_i), f_i = 1/2 |y - c_i|^2 + ridge/2 |x|^2.

  Args:
    num_clients: m.
    dim: Dimension of x and of y.
    ridge: The weight of |x|^2.
    seed: Of the clients' matrices, whose eigenvalues lie between 0.5 and 2.5,
      and vectors.

  Returns:
    The case.
  """
  rng = np.random.default_rng(seed)
  basis = np.linalg.qr(rng.normal(size=(num_clients, dim, dim)))[0]
  curvature = rng.uniform(0.5, 2.5, size=(num_clients, 1, dim))
  data = dict(
      A=basis * curvature @ np.swapaxes(basis, 1, 2),
      b=rng.normal(size=(num_clients, dim)),
      c=rng.normal(size=(num_clients, dim)),
  )

  def inner_loss(x, y, batch):
    product = tf.linalg.matvec(batch['A'], y) / 2 - x - batch['b']
    return tf.reduce_mean(tf.linalg.matvec(product, y))

  def outer_loss(x, y, batch):
    fit = tf.reduce_mean(tf.reduce_sum((y - batch['c']) ** 2, axis=1)) / 2
    return fit + ridge / 2 * tf.reduce_sum(x**2)

  def ones(seed):
    return tf.ones([dim], tf.float64)

  problem = fednest_tff.bilevel(
      outer_loss, inner_loss, ones, ones, _spec(data), split='same'
  )
  # y* = A^-1 (x + b) and ridge x + A^-1 (y* - c) = 0, with the clients' means.
  inverse = np.linalg.inv(data['A'].mean(0))
  b, c = data['b'].mean(0), data['c'].mean(0)
  outer = np.linalg.solve(
      ridge * np.eye(dim) + inverse @ inverse, inverse @ (c - inverse @ b)
  )
  return Case(problem, _datasets(data), outer, inverse @ (outer + b))


def saddle(
    num_clients: int = 10,
    dim: int = 5,
    spread: float = 1.0,
    ridge: float = 10.0,
    seed: int = 0,
) -> Case:
  """The paper's minimax problem (section 4.3), with x* = y* = 0.

  f_i(x, y) = -[1/2 |y|^2 - b_i'y + t_i y'x] + ridge/2 |x|^2, where the b_i are
  centred over the clients.

  Args:
    num_clients: m.
    dim: Dimension of x and of y.
    spread: s, the standard deviation of b_i before centring.
    ridge: lambda.
    seed: Of b_i and t_i, t_i uniform in (0, 0.1).

  Returns:
    The case.
  """
  rng = np.random.default_rng(seed)
  b = spread * rng.normal(size=(num_clients, dim))
  data = dict(b=b - b.mean(axis=0), t=rng.uniform(0, 0.1, size=num_clients))

  def loss(x, y, batch):
    coupling = batch['t'][:, tf.newaxis] * x - batch['b']
    concave = tf.reduce_sum(y**2) / 2 + tf.reduce_mean(
        tf.linalg.matvec(coupling, y)
    )
    return ridge / 2 * tf.reduce_sum(x**2) - concave

  def ones(seed):
    return tf.ones([dim], tf.float64)

  problem = fednest_tff.minimax(loss, ones, ones, _spec(data))
  zero = np.zeros(dim)
  return Case(problem, _datasets(data), zero, zero)
