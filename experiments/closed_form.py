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


def _spec(
    data: dict[str, np.ndarray],
) -> collections.OrderedDict[str, tf.TensorSpec]:
  return collections.OrderedDict(
      (k, tf.TensorSpec(v.shape[1:], v.dtype)) for k, v in data.items()
  )


def saddle(
    num_clients: int = 10,
    dim: int = 5,
    spread: float = 1.0,
    ridge: float = 10.0,
    coupling: float = 0.1,
    centred: bool = True,
    seed: int = 0,
) -> Case:
  """The paper's minimax problem (section 4.3).

  f_i(x, y) = -[1/2 |y|^2 - b_i'y + y'A_i x] + lambda/2 |x|^2 with A_i = t_i I.

  Args:
    num_clients: m.
    dim: d, the dimension of x and of y.
    spread: s, the standard deviation of b_i' before centring.
    ridge: lambda.
    coupling: t_i is uniform between 0 and this, which is 0.1 in the paper.
    centred: Whether b_i = b_i' - mean_j b_j', as in the paper; the solution is
      then 0. Over a cohort of some clients the mean of b_i is not 0: with
      partial participation methods with a constant step stop at a noise floor.
    seed: Of b_i and t_i.

  Returns:
    The case.
  """
  rng = np.random.default_rng(seed)
  b = spread * rng.normal(size=(num_clients, dim))
  if centred:
    b -= b.mean(axis=0)
  data = dict(b=b, t=rng.uniform(0, coupling, size=num_clients))

  def loss(x, y, batch):
    product = batch['t'][:, tf.newaxis] * x - batch['b']
    concave = tf.reduce_sum(y**2) / 2 + tf.reduce_mean(
        tf.linalg.matvec(product, y)
    )
    return ridge / 2 * tf.reduce_sum(x**2) - concave

  def ones(seed):
    return tf.ones([dim], tf.float64)

  problem = fednest_tff.minimax(loss, ones, ones, _spec(data))
  # y = b - t x and lambda x = t y, with the clients' means.
  t, b = data['t'].mean(), data['b'].mean(axis=0)
  outer = t * b / (ridge + t**2)
  return Case(problem, _datasets(data), outer, b - t * outer)


def portfolio(
    num_clients: int = 10,
    num_assets: int = 5,
    num_days: int = 50,
    risk_aversion: float = 1.0,
    spread: float = 1.0,
    seed: int = 0,
) -> Case:
  """Risk-averse (mean-variance) investment as a compositional problem.

  Each client has seen the returns rho of the same assets in a market of its
  own. A joint portfolio x, with whatever is not invested kept as cash, has the
  return R = rho'x on the mixture of all markets and is to have the least

    mean_i lambda_i Var(R) - E R = mean_i f_i(mean_j r_j(x)),
    r_j(x) = (E_j R, E_j R^2),   f_i(y) = lambda_i (y_2 - y_1^2) - y_1.

  The variance of a mixture is not the mean of variances: no client can compute
  its part of the risk alone.

  Args:
    num_clients: m.
    num_assets: The dimension of x.
    num_days: Returns per client. Together more than there are assets, so that
      the covariance has an inverse and the solution is unique.
    risk_aversion: The mean of lambda_i.
    spread: How different the clients' mean returns, correlations and lambda_i
      are; 0 for the same distribution everywhere, at most 1.
    seed: Of everything random.

  Returns:
    The case; `inner` is (E R, E R^2) of the solution.
  """
  rng = np.random.default_rng(seed)
  shape = (num_clients, num_days, num_assets)
  mean = 0.3 + 0.1 * rng.normal(size=num_assets)
  mean = mean + 0.3 * spread * rng.normal(size=(num_clients, 1, num_assets))
  # One factor moves all assets of a market, with its own loadings there.
  loadings = 0.5 + 0.5 * spread * rng.normal(
      size=(num_clients, 1, num_assets)
  )
  factor = rng.normal(size=(num_clients, num_days, 1))
  returns = mean + loadings * factor + 0.7 * rng.normal(size=shape)
  aversion = 1 + 0.9 * spread * rng.uniform(-1, 1, size=num_clients)
  aversion *= risk_aversion / aversion.mean()
  data = dict(
      returns=returns, aversion=np.repeat(aversion[:, None], num_days, axis=1)
  )

  def outer_loss(y, batch):
    return tf.reduce_mean(batch['aversion']) * (y[1] - y[0] ** 2) - y[0]

  def inner_map(x, batch):
    gains = tf.linalg.matvec(batch['returns'], x)
    return tf.stack([tf.reduce_mean(gains), tf.reduce_mean(gains**2)])

  problem = fednest_tff.compositional(
      outer_loss,
      inner_map,
      lambda seed: tf.zeros([num_assets], tf.float64),
      lambda seed: tf.zeros([2], tf.float64),
      collections.OrderedDict(
          (k, tf.TensorSpec(v.shape[2:], v.dtype)) for k, v in data.items()
      ),
  )
  datasets = [
      tf.data.Dataset.from_tensor_slices(
          collections.OrderedDict((k, v[i]) for k, v in data.items())
      )
      for i in range(num_clients)
  ]
  # 2 lambda C x = mu, with the mean and the covariance of the mixture; all
  # clients have equally many days.
  flat = returns.reshape(-1, num_assets)
  mu, second = flat.mean(axis=0), flat.T @ flat / len(flat)
  outer = np.linalg.solve(2 * risk_aversion * (second - np.outer(mu, mu)), mu)
  inner = np.array([mu @ outer, outer @ second @ outer])
  return Case(problem, datasets, outer, inner)
