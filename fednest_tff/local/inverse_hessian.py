"""Solvers for H p = b by products with H: the algebra of FedIHGP.

A solver sees one product H v at a time and does not care where it comes from.
In FedIHGP (Algorithm 3) it runs on the server, and each product is a
communication round, the mean of the clients' H_i v; in LFedOut it runs on the
client, with the client's own Hessian. Here l is l_{g,1}, a bound on the largest
eigenvalue of H, and N is the number of terms of the series.

| solver     | p                                        | products |
| ---------- | ---------------------------------------- | -------- |
| stochastic | (N/l) prod_{n=1..N'} (I - H/l) b         | N' < N   |
| truncated  | (1/l) sum_{n=0..N-1} (I - H/l)^n b       | N - 1    |
| cg         | N - 1 steps of conjugate gradient from 0 | N - 1    |

The stochastic product with N' uniform in {0..N-1} is the paper's; its mean over
N' is the truncated sum.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.vector_space import Structure


class Product(NamedTuple):
  """State of the stochastic product."""

  p: Structure
  products_left: tf.Tensor  # N' - n


class PartialSum(NamedTuple):
  """State of the truncated sum."""

  p: Structure
  term: Structure  # (1/l) (I - H/l)^n b
  products_left: tf.Tensor


class ConjugateGradient(NamedTuple):
  """State of conjugate gradient."""

  p: Structure
  residual: Structure
  direction: Structure
  products_left: tf.Tensor


SolverState = Product | PartialSum | ConjugateGradient


class Solver(NamedTuple):
  """A way to approximate the solution p of H p = b.

  Attributes:
    name: 'stochastic', 'truncated' or 'cg'.
    num_terms: N. At most N - 1 products are used.
    start: (b, l, seed) -> state.
    vector: state -> v, the vector whose product H v is wanted next.
    advance: (state, H v, l) -> state. A state with no products left stays as
      it is.
  """

  name: str
  num_terms: int
  start: Callable[[Structure, tf.Tensor, tf.Tensor], SolverState]
  vector: Callable[[SolverState], Structure]
  advance: Callable[[SolverState, Structure, tf.Tensor], SolverState]


def _stochastic(num_terms: int) -> Solver:
  """Algorithm 3: a product of N' factors, N' uniform, scaled by N / l."""

  def start(b, smoothness, seed):
    stop = tf.random.stateless_uniform(
        [], seed, minval=0, maxval=num_terms, dtype=tf.int32
    )
    return Product(vector_space.scale(num_terms / smoothness, b), stop)

  def advance(state, product, smoothness):
    p = vector_space.add_scaled(state.p, -1 / smoothness, product)
    return Product(p, state.products_left - 1)

  return Solver(
      'stochastic', num_terms, start, lambda state: state.p, advance
  )


def _truncated(num_terms: int) -> Solver:
  """The first N terms of the Neumann series of H^-1."""

  def start(b, smoothness, seed):
    del seed  # Nothing is random.
    term = vector_space.scale(1 / smoothness, b)
    return PartialSum(term, term, tf.constant(num_terms - 1))

  def advance(state, product, smoothness):
    term = vector_space.add_scaled(state.term, -1 / smoothness, product)
    return PartialSum(
        vector_space.add(state.p, term), term, state.products_left - 1
    )

  return Solver(
      'truncated', num_terms, start, lambda state: state.term, advance
  )


def _conjugate_gradient(num_terms: int) -> Solver:
  """N - 1 steps of conjugate gradient; needs no l, but a positive H."""

  def start(b, smoothness, seed):
    del smoothness, seed  # Neither is needed.
    p = tf.nest.map_structure(tf.zeros_like, b)
    return ConjugateGradient(p, b, b, tf.constant(num_terms - 1))

  def advance(state, product, smoothness):
    del smoothness
    curvature = vector_space.dot(state.direction, product)
    old = vector_space.squared_norm(state.residual)
    # Where the direction has no positive curvature, or nothing is left to do,
    # the step is 0 and p stays.
    step = tf.where(curvature > 0, tf.math.divide_no_nan(old, curvature), 0)
    # A product that is not finite must not pass for a step of 0.
    step = tf.where(tf.math.is_finite(curvature), step, float('nan'))
    residual = vector_space.add_scaled(state.residual, -step, product)
    ratio = tf.math.divide_no_nan(vector_space.squared_norm(residual), old)
    return ConjugateGradient(
        vector_space.add_scaled(state.p, step, state.direction),
        residual,
        vector_space.add_scaled(residual, ratio, state.direction),
        state.products_left - 1,
    )

  return Solver('cg', num_terms, start, lambda state: state.direction, advance)


def _guarded(solver: Solver) -> Solver:
  """`solver` whose `advance` leaves a finished state as it is."""

  def advance(state, product, smoothness):
    advanced = solver.advance(state, product, smoothness)
    return vector_space.where(state.products_left > 0, advanced, state)

  return solver._replace(advance=advance)


_SOLVERS = {
    'stochastic': _stochastic,
    'truncated': _truncated,
    'cg': _conjugate_gradient,
}


def build_solver(ihgp: str, neumann_terms: int) -> Solver:
  """The solver of that name with N = `neumann_terms`.

  Args:
    ihgp: 'stochastic', 'truncated' or 'cg'.
    neumann_terms: N, at least 1.

  Returns:
    A `Solver`.
  """
  if ihgp not in _SOLVERS:
    raise ValueError(
        f'`ihgp` must be one of {sorted(_SOLVERS)}; got {ihgp!r}.'
    )
  if type(neumann_terms) is not int or neumann_terms < 1:
    raise ValueError(
        f'`neumann_terms` must be a positive integer; got {neumann_terms!r}.'
    )
  return _guarded(_SOLVERS[ihgp](neumann_terms))


def solve(
    solver: Solver,
    product: Callable[[Structure, tf.Tensor], Structure],
    b: Structure,
    smoothness: tf.Tensor,
    seed: tf.Tensor,
) -> Structure:
  """Runs `solver` to its end in one place, as LFedOut does.

  Args:
    solver: The solver.
    product: (v, n) -> H v, where n = 1, 2, ... counts the products.
    b: The right-hand side.
    smoothness: l.
    seed: int64 tensor of shape [2].

  Returns:
    p.
  """

  def step(n, state):
    return n + 1, solver.advance(
        state, product(solver.vector(state), n), smoothness
    )

  _, state = tf.while_loop(
      lambda _, state: state.products_left > 0,
      step,
      (tf.constant(1), solver.start(b, smoothness, seed)),
  )
  return state.p
