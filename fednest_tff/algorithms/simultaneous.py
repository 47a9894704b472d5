"""What methods that step on x, y and v at once share.

Their state has v and the server's optimizers, their message has the point
z = (x, y, v) and the local step sizes, and the server moves all variables by
one rule (`server_move`). `local.simultaneous` has the clients' steps.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms.server_move import ServerMove, update_norms
from fednest_tff.federated import method
from fednest_tff.federated.rounds import Executor, Round, ServerValue
from fednest_tff.federated.types import ProblemTypes
from fednest_tff.local import derivatives
from fednest_tff.local.client import Client
from fednest_tff.local.simultaneous import Point, SimultaneousWork
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


class StepsMessage(NamedTuple):
  """The message before local steps on all variables.

  Attributes:
    outer: x.
    inner: y.
    linear: v.
    outer_rate: The local step size of x.
    inner_rate: The local step size of y; empty if there is no y.
    linear_rate: The local step size of v; empty if there is no v.
    more: A further value that the method sends, or nothing.
    seed: The epoch's seed.
  """

  outer: Structure
  inner: Structure
  linear: Structure
  outer_rate: tf.Tensor
  inner_rate: Structure
  linear_rate: Structure
  more: Structure
  seed: tf.Tensor

  @property
  def point(self) -> Point:
    return Point(self.outer, self.inner, self.linear)

  @property
  def rates(self) -> Point:
    return Point(self.outer_rate, self.inner_rate, self.linear_rate)


class SimultaneousState(NamedTuple):
  """The method's part of the state.

  Attributes:
    linear: v; empty unless the problem is implicit.
    optimizers: States of the server's optimizers, by variable.
    more: What else the method keeps, such as a momentum.
  """

  linear: ServerValue
  optimizers: ServerValue
  more: ServerValue


def variables_of(problem: Problem) -> Point:
  """Which variables a problem has: their names, or `None`."""
  return Point(
      'outer',
      'inner' if problem.has_inner else None,
      'linear' if problem.is_implicit else None,
  )


def point_type(types: ProblemTypes) -> Point:
  """The TFF types of a point."""
  linear = types.inner if types.problem.is_implicit else ()
  return Point(types.outer, types.inner, linear)


def rates_type(types: ProblemTypes) -> Point:
  """The TFF types of a number for each variable."""
  return Point(*(
      types.scalar if variable else ()
      for variable in variables_of(types.problem)
  ))


def message_type(types: ProblemTypes, more: tff.Type = ()) -> StepsMessage:
  """The TFF types of a `StepsMessage`."""
  return StepsMessage(
      *point_type(types), *rates_type(types), more, types.seed
  )


def losses(
    problem: Problem, x: Structure, y: Structure, client: Client
) -> collections.OrderedDict[str, tf.Tensor]:
  """f_i and g_i at (x, y), on all of the client's examples."""
  found = collections.OrderedDict(
      outer_loss=derivatives.outer_loss(problem, x, y, client.outer)
  )
  if problem.has_inner:
    features = problem.representation(x, client.inner)
    found['inner_loss'] = problem.inner_loss(x, y, features)
  return found


def rate_hparams(
    problem: Problem, work: SimultaneousWork
) -> dict[str, method.HyperParameter]:
  """The local step sizes of the variables that the problem has."""
  names = [f'{v}_learning_rate' for v in variables_of(problem) if v]
  if problem.is_implicit and work.linear_learning_rate is None:
    raise ValueError(
        '`linear_learning_rate` is missing: the step size of the third'
        ' variable. Try that of y, `inner_learning_rate`, first.'
    )
  return method.learning_rates(
      allow_zero=True, **{name: getattr(work, name) for name in names}
  )


def state_type(
    types: ProblemTypes, move: ServerMove, more: tff.Type = ()
) -> tff.Type:
  """The TFF type of a `SimultaneousState`."""
  optimizers = tff.tensorflow.computation(move.initial_state)
  return tff.to_type(
      SimultaneousState(
          point_type(types).linear, optimizers.type_signature.result, more
      )
  )


def build_direction_check(types: ProblemTypes, name: str) -> tff.Computation:
  """`(G -> <G, norm of its part of x>)`, which fails unless G is finite."""

  @tff.tensorflow.computation(point_type(types))
  def check(direction: Point) -> tuple[Point, tf.Tensor]:
    direction = vector_space.check_finite(
        direction,
        f'{name}: the mean of the clients\' directions is not finite. Try'
        ' smaller learning rates',
    )
    return direction, vector_space.norm(direction.outer)

  return check


def build_mean_step(
    types: ProblemTypes, move: ServerMove, name: str, more: tff.Type = ()
) -> tff.Computation:
  """The server's step to the mean of the clients' points.

  Args:
    types: The problem's types.
    move: The rule; minus the mean change is the direction, 1 the step size.
    name: Of the method, for the error message.
    more: Type of `SimultaneousState.more`.

  Returns:
    `(<x, y, method state, mean change> -> <x, y, method state, norms>)`.
  """

  @tff.tensorflow.computation(
      types.outer, types.inner, state_type(types, move, more), point_type(types)
  )
  def step(
      x: Structure, y: Structure, state: SimultaneousState, change: Point
  ) -> tuple[Structure, Structure, SimultaneousState, dict[str, tf.Tensor]]:
    change = vector_space.check_finite(
        change,
        f'{name}: the mean of the clients\' points is not finite. Try smaller'
        ' learning rates',
    )
    before = Point(x, y, state.linear)
    optimizers, after = move(
        state.optimizers,
        before,
        vector_space.scale(-1.0, change),
        Point(1.0, 1.0, 1.0),
    )
    state = state._replace(linear=after.linear, optimizers=optimizers)
    return after.outer, after.inner, state, update_norms(before, after)

  return step


class SimultaneousMethod(method.Method):
  """A method that keeps x, y and v, and steps on all of them."""

  def __init__(
      self,
      types: ProblemTypes,
      rounds: Sequence[Round],
      hparams: dict[str, method.HyperParameter],
      move: ServerMove,
  ):
    super().__init__(types, rounds, hparams)
    self._move = move

  def initial_linear(self, y: Structure) -> Structure:
    """The third variable at the start: v = 0."""
    return vector_space.zeros_like(y)

  def initial_state(
      self, x: Structure, y: Structure, numbers: method.Numbers, seed: tf.Tensor
  ) -> Structure:
    linear = self.initial_linear(y) if self.types.problem.is_implicit else ()
    return SimultaneousState(linear, self._move.initial_state(), ())

  def get_hparams(self, method_state: Structure) -> dict[str, Structure]:
    return self._move.get_hparams(method_state.optimizers)

  def set_hparams(
      self, method_state: Structure, hparams: dict[str, Structure]
  ) -> Structure:
    return method_state._replace(
        optimizers=self._move.set_hparams(method_state.optimizers, hparams)
    )

  def message(
      self,
      variables: method.Variables,
      plan: method.Plan,
      more: ServerValue = (),
  ) -> StepsMessage:
    """The message with the point, the local step sizes and a seed."""
    is_implicit = self.types.problem.is_implicit
    return StepsMessage(
        variables.outer,
        variables.inner,
        variables.method.linear if is_implicit else (),
        *self.rates(plan),
        more,
        plan.seeds[0],
    )

  def rates(self, plan: method.Plan, prefix: str = '') -> Point:
    """The step sizes of an epoch, empty for variables that are not there."""
    return Point(*(
        plan.numbers[f'{prefix}{variable}_learning_rate'] if variable else ()
        for variable in variables_of(self.types.problem)
    ))

  def take_step(
      self,
      do: Executor,
      step: tff.Computation,
      variables: method.Variables,
      *arguments: ServerValue,
  ) -> method.Variables:
    """Runs `step` at the server and measures how far the variables moved.

    Args:
      do: The executor.
      step: `(<x, y, method state, *arguments> -> <x, y, method state, norms>)`,
        with norms as `update_norms` gives them.
      variables: The variables before.
      *arguments: The step's further arguments.

    Returns:
      The variables after.
    """
    x, y, state, norms = do.server(step, *variables, *arguments)
    do.measure(**{
        f'{variable}_update_norm': norms[f'{variable}_update_norm']
        for variable in variables_of(self.types.problem)
        if variable
    })
    return method.Variables(x, y, state)
