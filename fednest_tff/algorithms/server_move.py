"""The server's step on x, y and v at once, in TensorFlow.

Each variable takes a plain step, or one of a `tff.learning.optimizers`.
"""

import collections
import dataclasses

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.federated import server
from fednest_tff.local import simultaneous
from fednest_tff.local.simultaneous import Point
from fednest_tff.options import option
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure


@dataclasses.dataclass(frozen=True)
class ServerOptimizers:
  """Optimizers of the server, one per variable.

  Attributes:
    outer_optimizer: One of `tff.learning.optimizers` for x in place of the
      plain step.
    inner_optimizer: One of them for y.
    linear_optimizer: One of them for the third variable.
  """

  outer_optimizer: server.Optimizer | None = option('outer_optimizer')
  inner_optimizer: server.Optimizer | None = option('inner_optimizer')
  linear_optimizer: server.Optimizer | None = option('linear_optimizer')


def _point_spec(problem: Problem) -> Point:
  """The `tf.TensorSpec`s of a point."""
  return Point(
      problem.outer_spec,
      problem.inner_spec,
      problem.inner_spec if problem.is_implicit else (),
  )


class ServerMove:
  """The server's step on all variables, in TensorFlow.

  A variable without an optimizer moves by minus its rate times its direction;
  an optimizer takes the direction as its gradient. Projections follow.
  """

  def __init__(self, problem: Problem, optimizers: ServerOptimizers):
    self._problem = problem
    self._optimizers = Point(
        optimizers.outer_optimizer,
        optimizers.inner_optimizer if problem.has_inner else None,
        optimizers.linear_optimizer if problem.is_implicit else None,
    )
    for variable, optimizer in self._optimizers._asdict().items():
      if optimizer is None or isinstance(optimizer, server.Optimizer):
        continue
      raise ValueError(
          f'`{variable}_optimizer` must be one of tff.learning.optimizers; got'
          f' {optimizer!r}.'
      )

  def initial_state(self) -> Point:
    """The optimizers' states; empty where there is none."""
    specs = _point_spec(self._problem)
    return Point(*(
        () if optimizer is None else optimizer.initialize(spec)
        for optimizer, spec in zip(self._optimizers, specs, strict=True)
    ))

  def get_hparams(self, states: Point) -> dict[str, Structure]:
    """The optimizers' hyper-parameters, by '<variable>_optimizer'."""
    found = collections.OrderedDict()
    for k, variable in enumerate(Point._fields):
      optimizer = self._optimizers[k]
      hparams = optimizer.get_hparams(states[k]) if optimizer else None
      if hparams:
        found[f'{variable}_optimizer'] = hparams
    return found

  def set_hparams(
      self, states: Point, hparams: dict[str, Structure]
  ) -> Point:
    """The optimizers' states with those hyper-parameters."""
    return Point(*(
        self._optimizers[k].set_hparams(
            states[k], hparams[f'{variable}_optimizer']
        )
        if f'{variable}_optimizer' in hparams else states[k]
        for k, variable in enumerate(Point._fields)
    ))

  def __call__(
      self, states: Point, point: Point, direction: Point, rates: Point
  ) -> tuple[Point, Point]:
    """The optimizers' new states and the new point."""
    new_states, moved = [], []
    for k, optimizer in enumerate(self._optimizers):
      state, value = states[k], point[k]
      if optimizer is None:
        step = vector_space.scale(rates[k], direction[k])
        value = vector_space.subtract(value, step)
      else:
        state, value = optimizer.next(state, value, direction[k])
      new_states.append(state)
      moved.append(value)
    return Point(*new_states), simultaneous.project(
        self._problem, Point(*moved)
    )


def update_norms(before: Point, after: Point) -> dict[str, tf.Tensor]:
  """How far each variable has moved."""
  return collections.OrderedDict(
      (f'{variable}_update_norm', vector_space.norm(
          vector_space.subtract(new, old)))
      for variable, new, old in zip(Point._fields, after, before, strict=True)
      if tf.nest.flatten(new)
  )
