"""A quadratic problem of every kind over one set of different clients.

Example j of client i has a matrix A_ij and vectors b_ij and c_ij. With A_i, b_i
and c_i their means over the client's examples, and A, b and c over clients:

  bilevel        f_i = 1/2 |y - c_i|^2 + 1/2 |x|^2,
                 g_i = 1/2 y'A_i y - y'(x + b_i)
  minimax        f_i = 1/2 |x - c_i|^2 + y'(x + b_i) - 1/2 y'A_i y
  compositional  f_i = 1/2 |y - c_i|^2,  r_i = A_i x + b_i
  single_level   f_i = 1/2 x'A_i x - x'b_i

up to constants, so that grad f is affine in x and known exactly. Minibatches
have noise in gradients, Hessians and Jacobians.

x and y are several vectors, one per lane: as many problems of the same kind,
each with matrices and vectors of its own, solved at the price of one.
"""

import collections
import math

import numpy as np
import tensorflow as tf

import fednest_tff

KINDS = ('bilevel', 'minimax', 'compositional', 'single_level')


def _spd(
    rng: np.random.Generator, size: tuple[int, ...], dim: int, top: float
) -> np.ndarray:
  """Matrices with eigenvalues from 0 to `top` in random directions."""
  basis = np.linalg.qr(rng.normal(size=(*size, dim, dim)))[0]
  return basis * np.linspace(0, top, dim) @ np.swapaxes(basis, -1, -2)


def multiply(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
  """Matrix times vector, lane by lane."""
  return np.einsum('rij,rj->ri', matrices, vectors)


def solve(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
  """Inverse matrix times vector, lane by lane."""
  return np.linalg.solve(matrices, vectors[..., np.newaxis])[..., 0]


def _product(matrices, vector):
  return tf.reduce_mean(tf.linalg.matvec(matrices, vector), axis=0)


def _half_square(vectors):
  """The mean over a batch, and the sum over lanes, of 1/2 |v|^2."""
  return tf.reduce_mean(tf.reduce_sum(vectors**2, axis=(1, 2))) / 2


def _bilevel_outer(x, y, batch):
  return _half_square(y - batch['c']) + tf.reduce_sum(x**2) / 2


def _bilevel_inner(x, y, batch):
  product = _product(batch['A'], y) / 2 - x
  return tf.reduce_sum(y * (product - tf.reduce_mean(batch['b'], axis=0)))


def _saddle(x, y, batch):
  return _half_square(x - batch['c']) - _bilevel_inner(x, y, batch)


def _outer_of_map(y, batch):
  return _half_square(y - batch['c'])


def _inner_map(x, batch):
  return _product(batch['A'], x) + tf.reduce_mean(batch['b'], axis=0)


def _single(x, batch):
  product = _product(batch['A'], x) / 2
  return tf.reduce_sum(x * (product - tf.reduce_mean(batch['b'], axis=0)))


class Quadratics:
  """Clients, and a problem of every kind on them.

  Attributes:
    A: Matrices A_ij, an array with axes client, example and lane.
    b: Vectors b_ij, likewise.
    c: Vectors c_ij, likewise.
    start: Every entry of x at the start; y starts at 0.
    mu: mu_g, the least eigenvalue of any A_i.
    smoothness: l_g1, the largest eigenvalue of any A_i.
    lipschitz: l_f0 where y = 0, the largest |grad_y f_i| of any bilevel f_i.
  """

  def __init__(
      self,
      num_clients: int = 4,
      num_examples: int = 8,
      dim: int = 4,
      curvature: tuple[float, float] = (0.5, 1.0),
      heterogeneity: float = 1.0,
      noise: float = 1.0,
      start: float = 1.0,
      lanes: int = 1,
      seed: int = 0,
  ):
    """Draws the clients.

    Args:
      num_clients: m.
      num_examples: Of each client.
      dim: The dimension of x and of y.
      curvature: The least and the largest eigenvalue of what all A_ij share.
      heterogeneity: Size of what clients differ in.
      noise: Size of what a client's examples differ in.
      start: Every entry of x at the start.
      lanes: How many problems are solved side by side.
      seed: Of everything random.
    """
    rng = np.random.default_rng(seed)
    size = (num_clients, num_examples, lanes)
    low, high = curvature
    self.A = low * np.eye(dim) + _spd(rng, (1, 1, lanes), dim, high - low)
    # A quarter, so that the condition number stays near `curvature`'s.
    self.A = self.A + _spd(
        rng, (num_clients, 1, lanes), dim, heterogeneity / 4
    )
    self.A = self.A + _spd(rng, size, dim, noise / 4)

    def vectors():
      return heterogeneity * rng.normal(
          size=(num_clients, 1, lanes, dim)
      ) + noise * rng.normal(size=(*size, dim))

    self.b, self.c = vectors(), vectors()
    self.start = start
    eigenvalues = np.linalg.eigvalsh(self.A.mean(axis=1))
    self.mu = float(eigenvalues.min())
    self.smoothness = float(eigenvalues.max())
    norms = np.linalg.norm(self.c.mean(axis=1), axis=-1)
    self.lipschitz = float(norms.max())

  @property
  def condition(self) -> float:
    """kappa_g."""
    return self.smoothness / self.mu

  @property
  def joint_smoothness(self) -> float:
    """l_g1 in x and y together: the norm of any [[0, -I], [-I, A_i]]."""
    half = self.smoothness / 2
    return half + math.sqrt(half**2 + 1)

  @property
  def means(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, b and c, of every lane."""
    return tuple(v.mean(axis=(0, 1)) for v in (self.A, self.b, self.c))

  def datasets(self) -> list[tf.data.Dataset]:
    """One dataset per client."""
    return [
        tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict(A=A, b=b, c=c)
        )
        for A, b, c in zip(self.A, self.b, self.c, strict=True)
    ]

  def problem(self, kind: str) -> fednest_tff.Problem:
    """The problem of that kind."""
    shape = self.b.shape[2:]
    spec = collections.OrderedDict(
        A=tf.TensorSpec(self.A.shape[2:], tf.float64),
        b=tf.TensorSpec(shape, tf.float64),
        c=tf.TensorSpec(shape, tf.float64),
    )

    def x(seed):
      return tf.fill(shape, tf.constant(self.start, tf.float64))

    def y(seed):
      return tf.zeros(shape, tf.float64)

    if kind == 'bilevel':
      return fednest_tff.bilevel(
          _bilevel_outer, _bilevel_inner, x, y, spec, split='same'
      )
    if kind == 'minimax':
      return fednest_tff.minimax(_saddle, x, y, spec)
    if kind == 'compositional':
      return fednest_tff.compositional(_outer_of_map, _inner_map, x, y, spec)
    return fednest_tff.single_level(_single, x, spec)

  def inner_solution(self, x: np.ndarray) -> np.ndarray:
    """y*(x) of the bilevel and of the minimax problem."""
    A, b, _ = self.means
    return solve(A, x + b)

  def gradient(self, kind: str, x: np.ndarray) -> np.ndarray:
    """grad f(x), exactly."""
    A, b, c = self.means
    if kind == 'bilevel':
      return x + solve(A, self.inner_solution(x) - c)
    if kind == 'minimax':
      return x - c + self.inner_solution(x)
    if kind == 'compositional':
      return multiply(A, multiply(A, x) + b - c)
    return multiply(A, x) - b


def bias_case() -> Quadratics:
  """kappa_g about 3, and more dimensions than conjugate gradient steps."""
  return Quadratics(dim=20, curvature=(0.4, 1.6), noise=0.5)


def slopes_case(lanes: int) -> Quadratics:
  """kappa_g about 2, and noise as large as the way to the solution."""
  # Lanes draw the same examples, by number, so that one drawn twice in a short
  # time disturbs all of them; with 32 examples that is rare.
  return Quadratics(
      num_clients=3, num_examples=32, curvature=(0.8, 1.2), noise=2.0,
      start=0.0, lanes=lanes,
  )


def inner_case() -> Quadratics:
  """Different clients without noise."""
  return Quadratics(
      num_examples=1, dim=10, curvature=(0.4, 1.6), heterogeneity=2.0, noise=0.0
  )


def ihgp_variance(case: Quadratics, terms: int) -> float:
  """E |p - E p|^2 for p = (N/l) (I - A/l)^N' c, all N' < N as likely.

  This is one call of FedIHGP on full batches where y = 0. In A's eigenvectors
  the sums over N' are geometric.

  Args:
    case: The clients, of one lane.
    terms: N.

  Returns:
    The variance.
  """
  A, _, c = (v[0] for v in case.means)
  eigenvalues, basis = np.linalg.eigh(A)
  ratio, c = 1 - eigenvalues / case.smoothness, basis.T @ c
  second = terms * (c / case.smoothness) ** 2 * (
      (1 - ratio ** (2 * terms)) / (1 - ratio**2)
  )
  mean = c / eigenvalues * (1 - ratio**terms)
  return float(np.sum(second - mean**2))


def _local_operators(
    case: Quadratics, beta: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
  """(I - beta A_i)^tau and S_i = beta sum_{nu < tau} (I - beta A_i)^nu."""
  A = case.A.mean(axis=1)[:, 0]
  contraction = np.eye(A.shape[-1]) - beta * A
  powers = [np.linalg.matrix_power(contraction, nu) for nu in range(steps + 1)]
  return powers[-1], beta * sum(powers[:-1], np.zeros_like(A))


def inner_rate(case: Quadratics, beta: float, steps: int) -> float:
  """What FedInn multiplies |y - y*|^2 by in the end: y+ - y* = M (y - y*)."""
  _, S = _local_operators(case, beta, steps)
  M = np.eye(S.shape[-1]) - S.mean(axis=0) @ case.means[0][0]
  return float(np.abs(np.linalg.eigvals(M)).max() ** 2)


def fixed_point(
    case: Quadratics, beta: float, steps: int, x: np.ndarray
) -> np.ndarray:
  """Where LFedInn ends: y = mean_i [(I - beta A_i)^tau y + S_i (x + b_i)]."""
  power, S = _local_operators(case, beta, steps)
  linear = (x + case.b.mean(axis=1))[:, 0]
  offset = np.einsum('ijk,ik->j', S, linear) / len(S)
  return np.linalg.solve(np.eye(len(offset)) - power.mean(axis=0), offset)
