"""FedIHGP: the federated inverse-Hessian-gradient product (Algorithm 3).

The server approximates the solution p of H p = b, where H = mean_i grad^2_y g_i
and b = mean_i grad_y f_i at (x, y), from products with H:

  gradient   b = mean over S_0 of grad_y f_i                       lines 3-6
  product    H v = mean over S_n of grad^2_y g_i v, n = 1, 2, ...  lines 11-16

Clients send H_i v rather than the paper's (I - H_i/l) v, whose mean is the same
v - H v / l: so a client need not know l, and one product round serves the
paper's randomly stopped product, the truncated Neumann sum, conjugate gradient
(`local.inverse_hessian`) and the power iteration that estimates l. The rounds
are in `product_rounds`.
"""

import dataclasses
from typing import NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import options, vector_space
from fednest_tff.algorithms.product_rounds import ProductMessage, ProductRounds
from fednest_tff.federated.aggregation import GlobalGradients
from fednest_tff.federated.method import HyperParameter, Numbers
from fednest_tff.federated.rounds import Executor, PointMessage, ServerValue
from fednest_tff.federated.types import ProblemTypes
from fednest_tff.local import inverse_hessian, sampling
from fednest_tff.local.inverse_hessian import InverseHessian, SolverState
from fednest_tff.local.sampling import Purpose
from fednest_tff.options import option
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure

_NOT_FINITE = (
    'FedIHGP: p, the inverse-Hessian-gradient product (Algorithm 3), is not'
    ' finite. Try a larger smoothness l (build_power_iteration estimates it),'
    ' fewer neumann_terms or a smaller inner_learning_rate'
)


@dataclasses.dataclass(frozen=True)
class FederatedInverseHessian(InverseHessian):
  """How H^-1 grad_y f is approximated in communication rounds.

  Attributes:
    participation: The share of the cohort in each of FedIHGP's S_n.
    chains: S, how many independent chains run in the same rounds, each with
      its own samples, S_n and N'; p is their mean, whose variance falls as
      1 / S. Messages are S times as large.
  """

  participation: float = option('participation', 1.0)
  chains: int = option('chains', 1)


class Progress(NamedTuple):
  """A solver under way, and what its products tell about H.

  Attributes:
    solver: The state of the solver.
    norm: ||b||.
    largest: The largest <v, H v> / <v, v> so far, a lower bound of the largest
      eigenvalue of H; 0 before the first product.
    smallest: The smallest such quotient; if it is negative, H is not positive.
  """

  solver: SolverState
  norm: tf.Tensor
  largest: tf.Tensor
  smallest: tf.Tensor


def _seen(
    progress: Progress, v: Structure, product: Structure
) -> tuple[tf.Tensor, tf.Tensor]:
  """`largest` and `smallest` with H v counted in, if that was wanted."""
  square = vector_space.squared_norm(v)
  curvature = tf.math.divide_no_nan(vector_space.dot(v, product), square)
  wanted = (progress.solver.products_left > 0) & (square > 0)
  is_first = tf.equal(progress.solver.products_done, 0)
  largest = tf.where(
      is_first, curvature, tf.maximum(progress.largest, curvature)
  )
  smallest = tf.where(
      is_first, curvature, tf.minimum(progress.smallest, curvature)
  )
  return (
      tf.where(wanted, largest, progress.largest),
      tf.where(wanted, smallest, progress.smallest),
  )


class FedIHGP:
  """FedIHGP (Algorithm 3) as a part of an epoch.

  Attributes:
    rounds: Its rounds.
  """

  def __init__(
      self,
      types: ProblemTypes,
      solver: inverse_hessian.Solver,
      gradients: GlobalGradients,
      participation: float,
  ):
    """Traces the computations; see `ProductRounds`.

    Args:
      types: The problem's types.
      solver: How p is made from b and products with H.
      gradients: The samples and the aggregator of b and H v.
      participation: The share of the cohort in each S_n.
    """
    rounds = ProductRounds(
        types, gradients, participation, solver.stops_at_random,
        solver.num_chains,
    )
    means_of, self._solver = rounds.means, solver
    self.rounds = self._gradient, self._product = (
        rounds.gradient, rounds.product
    )
    l_type = smoothness_type(types, solver)
    mean_type = rounds.gradient.client_work.type_signature.result[0]

    @types.computation(mean_type, l_type, types.seed)
    def start(
        b: Structure, smoothness: tf.Tensor, seed: tf.Tensor
    ) -> Progress:
      seed = sampling.fold_in(seed, Purpose.NEUMANN_STOP)
      means = means_of(b)
      norm = vector_space.norm(means)
      return Progress(
          checked(solver.start(means, smoothness, seed)),
          norm,
          largest=tf.zeros_like(norm),
          smallest=tf.zeros_like(norm),
      )

    state_type = start.type_signature.result

    @types.computation(state_type)
    def ask(state: Progress) -> tuple[Structure, tf.Tensor]:
      return solver.vector(state.solver), product_index(state.solver)

    @types.computation(state_type, mean_type, l_type)
    def advance(
        state: Progress, product: Structure, smoothness: tf.Tensor
    ) -> Progress:
      product = means_of(product)
      largest, smallest = _seen(state, solver.vector(state.solver), product)
      advanced = checked(solver.advance(state.solver, product, smoothness))
      return Progress(advanced, state.norm, largest, smallest)

    @types.computation(state_type, l_type)
    def residual(state: Progress, smoothness: tf.Tensor) -> tf.Tensor:
      left = solver.residual(state.solver, smoothness)
      return tf.math.divide_no_nan(vector_space.norm(left), state.norm)

    self._start, self._ask, self._advance = start, ask, advance
    self._residual = residual

  def __call__(
      self, do: Executor, x: ServerValue, y: ServerValue,
      smoothness: ServerValue, seed: ServerValue,
  ) -> ServerValue:
    """p at (x, y) from l and a seed, after at most N rounds.

    In one computation all N rounds run, and those beyond N' leave p as it is.
    """
    b = do.round(self._gradient, PointMessage(x, y, seed)).value  # lines 3-6
    solution = do.server(self._start, b, smoothness, seed)  # lines 1 and 7
    for n in range(1, self._solver.num_terms):  # line 8
      if do.is_zero(solution.solver.products_left):
        break
      v, index = do.server(self._ask, solution)
      message = ProductMessage(x, y, v, index, seed)
      chance = self._solver.chance(n)
      product = do.round(self._product, message, chance).value  # lines 9-16
      solution = do.server(self._advance, solution, product, smoothness)
    if self._solver.num_terms > 1:
      do.measure(
          ihgp_residual=do.server(self._residual, solution, smoothness),
          ihgp_largest_curvature=solution.largest,
          ihgp_smallest_curvature=solution.smallest,
      )
      if self._solver.needs_smoothness:
        do.measure(smoothness=smoothness)
    return solution.solver.p


def product_index(state: SolverState) -> tf.Tensor:
  """The number of the next product, or -1 if none is wanted."""
  return tf.where(state.products_left > 0, state.products_done + 1, -1)


def checked(state: SolverState) -> SolverState:
  """`state`; running it fails unless p is finite."""
  return state._replace(p=vector_space.check_finite(state.p, _NOT_FINITE))


def solver_for(
    problem: Problem, wanted: InverseHessian
) -> inverse_hessian.Solver | None:
  """The solver that a problem needs: the one asked for, or a simpler one.

  With H = I no product is needed; a problem that is not implicit needs no
  solver.
  """
  solver = build_solver(wanted)
  if problem.hessian_is_identity:
    return inverse_hessian.identity_solver()
  return solver if problem.is_implicit else None


def build_solver(wanted: InverseHessian) -> inverse_hessian.Solver:
  """The solver that is asked for, with all its chains."""
  solver = inverse_hessian.build_solver(wanted.kind, wanted.terms)
  chains = getattr(wanted, 'chains', 1)
  options.check_count('chains', chains)
  if chains == 1:
    return solver
  return inverse_hessian.independent_chains(solver, chains)


def smoothness_type(
    types: ProblemTypes, solver: inverse_hessian.Solver | None
) -> tff.Type:
  """Type of l, which is empty if the solver does not need it."""
  if solver is None or not solver.needs_smoothness:
    return tff.to_type(())
  return types.scalar


def smoothness_hparams(
    solver: inverse_hessian.Solver | None,
    wanted: InverseHessian,
    inner_learning_rate: HyperParameter | None = None,
) -> dict[str, HyperParameter]:
  """l as a hyper-parameter, if the solver needs it.

  Args:
    solver: The solver.
    wanted: l, or `None` for 1 / beta at epoch 0. The state has 0 for `None`, so
      that l follows when beta is changed.
    inner_learning_rate: beta; `None` if the method has none.

  Returns:
    The hyper-parameter `smoothness`, or nothing.
  """
  if wanted.smoothness is not None:
    options.check_positive('smoothness', wanted.smoothness)
  if solver is None or not solver.needs_smoothness:
    return {}
  if inner_learning_rate is None:
    if wanted.smoothness is None:
      raise ValueError(
          f"`smoothness` (l) is needed for ihgp='{wanted.kind}';"
          ' `build_power_iteration` estimates it.'
      )
    return dict(smoothness=HyperParameter(float(wanted.smoothness)))

  def at(epoch: tf.Tensor, numbers: Numbers) -> tf.Tensor:
    beta = numbers['inner_learning_rate']
    if inner_learning_rate.at is not None:  # A schedule.
      beta = inner_learning_rate.at(tf.zeros_like(epoch), numbers)
    given = numbers['smoothness']
    return tf.where(given > 0, given, 1 / beta)

  return dict(smoothness=HyperParameter(float(wanted.smoothness or 0), at))
