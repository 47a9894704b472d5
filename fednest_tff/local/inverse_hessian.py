"""Solvers for H p = b by products with H: the algebra of FedIHGP.

A solver is given one product H v at a time. In FedIHGP (Algorithm 3) it runs on
the server, and each product is a communication round, the mean of the clients'
H_i v; in LFedOut it runs on the client, with the client's Hessian. Here l is
l_{g,1}, a bound on the largest eigenvalue of H, and N is the number of terms of
the series.

| solver     | p                                        | products |
| ---------- | ---------------------------------------- | -------- |
| stochastic | (N/l) prod_{n=1..N'} (I - H/l) b         | N' < N   |
| truncated  | (1/l) sum_{n=0..N-1} (I - H/l)^n b       | N - 1    |
| cg         | N - 1 steps of conjugate gradient from 0 | N - 1    |

The stochastic product with N' uniform in {0..N-1} is the paper's; its mean over
N' is the truncated sum.
"""

from collections.abc import Callable
import dataclasses
from typing import Literal, NamedTuple

import tensorflow as tf

from fednest_tff import options, vector_space
from fednest_tff.local import sampling
from fednest_tff.options import option
from fednest_tff.vector_space import Structure

Kind = Literal['stochastic', 'truncated', 'cg']


@dataclasses.dataclass(frozen=True)
class InverseHessian:
  """How H^-1 grad_y f is approximated.

  Attributes:
    kind: 'stochastic' (Algorithm 3), 'truncated' (the sum of N terms) or 'cg'
      (N - 1 steps of conjugate gradient).
    terms: N, the number of terms of the Neumann series.
    smoothness: l, at least the largest eigenvalue of the inner Hessian
      (`build_power_iteration` estimates it). Default: 1 / beta, with which the
      series is that of the unrolled inner descent.
  """

  kind: Kind = option('ihgp', 'stochastic')
  terms: int = option('neumann_terms', 5)
  smoothness: float | None = option('smoothness')


class SolverState(NamedTuple):
  """State of a solver.

  Attributes:
    p: The approximate solution so far.
    memory: Vectors that the solver keeps besides p.
    products_done: Products used so far (int32).
    products_left: Products still wanted (int32).
  """

  p: Structure
  memory: Structure
  products_done: tf.Tensor
  products_left: tf.Tensor


class Solver(NamedTuple):
  """A way to approximate the solution p of H p = b.

  Attributes:
    num_terms: N. At most N - 1 products are used.
    start: (b, l, seed) -> state.
    vector: state -> v, the vector whose product H v is wanted next.
    advance: (state, H v, l) -> state. A state with no products left stays as
      it is.
    residual: (state, l) -> b - H p, for a p whose residual is known without
      another product: the p of conjugate gradient, or a Neumann sum.
    needs_smoothness: Whether l is used.
    stops_at_random: Whether the number of products is N', drawn at random.
    num_chains: How many chains it has, if it has several; see
      `independent_chains`.
  """

  num_terms: int
  start: Callable[[Structure, tf.Tensor, tf.Tensor], SolverState]
  vector: Callable[[SolverState], Structure]
  advance: Callable[[SolverState, Structure, tf.Tensor], SolverState]
  residual: Callable[[SolverState, tf.Tensor], Structure]
  needs_smoothness: bool = True
  stops_at_random: bool = False
  num_chains: int = 1

  def chance(self, n: int) -> float:
    """The probability that the n-th product, n = 1, 2, ..., is wanted."""
    if not self.stops_at_random:
      return 1.0
    # It is not wanted if all chains have stopped before.
    return 1 - (n / self.num_terms) ** self.num_chains


def _stochastic(num_terms: int) -> Solver:
  """Algorithm 3: a product of N' factors, N' uniform, scaled by N / l."""

  def start(
      b: Structure, smoothness: tf.Tensor, seed: tf.Tensor
  ) -> SolverState:
    stop = tf.random.stateless_uniform(
        [], seed, minval=0, maxval=num_terms, dtype=tf.int32
    )
    p = vector_space.scale(num_terms / smoothness, b)
    return SolverState(p, (), tf.constant(0), stop)

  def advance(
      state: SolverState, product: Structure, smoothness: tf.Tensor
  ) -> SolverState:
    p = vector_space.add_scaled(state.p, -1 / smoothness, product)
    return state._replace(p=p)

  return Solver(
      num_terms,
      start,
      lambda state: state.p,
      advance,
      # (I - H/l)^N' b, the residual of a Neumann sum of N' terms.
      lambda state, smoothness: vector_space.scale(
          smoothness / num_terms, state.p
      ),
      stops_at_random=True,
  )


def _truncated(num_terms: int) -> Solver:
  """The first N terms of the Neumann series of H^-1."""

  def start(
      b: Structure, smoothness: tf.Tensor, seed: tf.Tensor
  ) -> SolverState:
    del seed  # Nothing is random.
    term = vector_space.scale(1 / smoothness, b)
    return SolverState(term, term, tf.constant(0), tf.constant(num_terms - 1))

  def advance(
      state: SolverState, product: Structure, smoothness: tf.Tensor
  ) -> SolverState:
    # The next term, (1/l) (I - H/l)^n b.
    term = vector_space.add_scaled(state.memory, -1 / smoothness, product)
    return state._replace(p=vector_space.add(state.p, term), memory=term)

  return Solver(
      num_terms,
      start,
      lambda state: state.memory,
      advance,
      # (I - H/l)^(N-1) b, the residual of the sum without its last term. The
      # residual of the whole sum would take another product.
      lambda state, smoothness: vector_space.scale(smoothness, state.memory),
  )


def _conjugate_gradient(num_terms: int) -> Solver:
  """N - 1 steps of conjugate gradient; needs no l, but a positive H."""

  def start(
      b: Structure, smoothness: tf.Tensor, seed: tf.Tensor
  ) -> SolverState:
    del smoothness, seed  # Neither is needed.
    zero = tf.nest.map_structure(tf.zeros_like, b)
    # The memory is the residual and the direction.
    return SolverState(zero, (b, b), tf.constant(0), tf.constant(num_terms - 1))

  def advance(
      state: SolverState, product: Structure, smoothness: tf.Tensor
  ) -> SolverState:
    del smoothness
    residual, direction = state.memory
    curvature = vector_space.dot(direction, product)
    old = vector_space.squared_norm(residual)
    # Where the direction has no positive curvature, or nothing is left to do,
    # the step is 0 and p stays.
    step = tf.where(curvature > 0, tf.math.divide_no_nan(old, curvature), 0)
    # A product that is not finite must not pass for a step of 0.
    step = tf.where(tf.math.is_finite(curvature), step, float('nan'))
    p = vector_space.add_scaled(state.p, step, direction)
    residual = vector_space.add_scaled(residual, -step, product)
    ratio = tf.math.divide_no_nan(vector_space.squared_norm(residual), old)
    direction = vector_space.add_scaled(residual, ratio, direction)
    return state._replace(p=p, memory=(residual, direction))

  return Solver(
      num_terms,
      start,
      lambda state: state.memory[1],
      advance,
      lambda state, smoothness: state.memory[0],
      needs_smoothness=False,
  )


def identity_solver() -> Solver:
  """The solver for H = I: p = b, without products."""

  def start(
      b: Structure, smoothness: tf.Tensor, seed: tf.Tensor
  ) -> SolverState:
    del smoothness, seed  # Neither is needed.
    return SolverState(b, (), tf.constant(0), tf.constant(0))

  return Solver(
      1,
      start,
      lambda state: state.p,
      lambda state, product, smoothness: state,
      lambda state, smoothness: vector_space.zeros_like(state.p),
      needs_smoothness=False,
  )


def _counted(solver: Solver) -> Solver:
  """`solver` that counts its products and leaves a finished state as it is."""

  def advance(
      state: SolverState, product: Structure, smoothness: tf.Tensor
  ) -> SolverState:
    advanced = solver.advance(state, product, smoothness)._replace(
        products_done=state.products_done + 1,
        products_left=state.products_left - 1,
    )
    return vector_space.where(state.products_left > 0, advanced, state)

  return solver._replace(advance=advance)


def independent_chains(solver: Solver, num_chains: int) -> Solver:
  """Several copies of `solver`, the chains; p is the mean of their solutions.

  Right-hand sides, vectors and products are tuples with an entry per chain.
  Where chains draw their own samples and their own N', the variance of p falls
  as 1 / `num_chains`.
  """

  def combine(states: list[SolverState]) -> SolverState:
    total = states[0].p
    for state in states[1:]:
      total = vector_space.add(total, state.p)
    left = tf.reduce_max([state.products_left for state in states])
    done = tf.reduce_max([state.products_done for state in states])
    return SolverState(
        vector_space.scale(1 / num_chains, total), tuple(states), done, left
    )

  def start(
      b: Structure, smoothness: tf.Tensor, seed: tf.Tensor
  ) -> SolverState:
    return combine([
        solver.start(b[k], smoothness, chain_seed(seed, k))
        for k in range(num_chains)
    ])

  def advance(
      state: SolverState, product: Structure, smoothness: tf.Tensor
  ) -> SolverState:
    return combine([
        solver.advance(chain, product[k], smoothness)
        for k, chain in enumerate(state.memory)
    ])

  return solver._replace(
      start=start,
      vector=lambda state: tuple(map(solver.vector, state.memory)),
      advance=advance,
      residual=lambda state, smoothness: tuple(
          solver.residual(chain, smoothness) for chain in state.memory
      ),
      num_chains=num_chains,
  )


def chain_seed(seed: tf.Tensor, chain: int) -> tf.Tensor:
  """The seed of one of several chains."""
  return sampling.fold_in(seed, chain)


_SOLVERS = {
    'stochastic': _stochastic,
    'truncated': _truncated,
    'cg': _conjugate_gradient,
}


def build_solver(ihgp: Kind, neumann_terms: int) -> Solver:
  """The solver of that name with N = `neumann_terms`.

  Args:
    ihgp: 'stochastic', 'truncated' or 'cg'.
    neumann_terms: N, at least 1.

  Returns:
    A `Solver`.
  """
  if not isinstance(ihgp, str) or ihgp not in _SOLVERS:
    raise ValueError(
        f'`ihgp` must be one of {sorted(_SOLVERS)}; got {ihgp!r}.'
    )
  options.check_count('neumann_terms', neumann_terms)
  return _counted(_SOLVERS[ihgp](neumann_terms))


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

  def step(n: tf.Tensor, state: SolverState) -> tuple[tf.Tensor, SolverState]:
    return n + 1, solver.advance(
        state, product(solver.vector(state), n), smoothness
    )

  _, state = tf.while_loop(
      lambda _, state: state.products_left > 0,
      step,
      (tf.constant(1), solver.start(b, smoothness, seed)),
  )
  return state.p
