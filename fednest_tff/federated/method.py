"""Federated methods, each of which writes its epoch once, for any executor.

A method declares its rounds, its hyper-parameters and the part of the state
that belongs to it, and writes one epoch as a function of an executor
(`rounds.Executor`). `process.build_process` makes a `LearningProcess` of it.
"""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from fednest_tff import options, vector_space
from fednest_tff.federated.rounds import Executor, Round, ServerValue
from fednest_tff.federated.types import ProblemTypes
from fednest_tff.local.descent import Schedule
from fednest_tff.problems import Problem
from fednest_tff.vector_space import Structure

Numbers = collections.OrderedDict[str, tf.Tensor]


class Variables(NamedTuple):
  """The values that an epoch changes: x, y and the method's own state."""

  outer: ServerValue
  inner: ServerValue
  method: ServerValue


class Plan(NamedTuple):
  """The values that an epoch starts from.

  Attributes:
    numbers: The hyper-parameters at this epoch, by name.
    seeds: A seed for each call of the epoch.
  """

  numbers: dict[str, ServerValue]
  seeds: list[ServerValue]


class HyperParameter(NamedTuple):
  """A number that is read from the state.

  Attributes:
    initial: Its value in the initial state.
    at: A function of the epoch and of all numbers in the state that returns
      the value that the method uses; `None` to use the number itself.
  """

  initial: float
  at: Callable[[tf.Tensor, Numbers], tf.Tensor] | None = None


def learning_rates(
    allow_zero: bool = False,
    **rates: float | Schedule | None,
) -> dict[str, HyperParameter]:
  """Step sizes as hyper-parameters.

  Args:
    allow_zero: Whether a step size may be 0, which keeps its variable still.
    **rates: The step sizes by name: positive numbers, or functions of the
      epoch. A function is multiplied by the number in the state, 1 at first.

  Returns:
    The hyper-parameters.
  """
  found = {}
  for name, value in rates.items():
    if value is None:
      raise ValueError(f'`{name}` is missing: a step size, such as 0.1.')
    if callable(value):
      _check_schedule(name, value)
      found[name] = HyperParameter(1.0, _scheduled(name, value))
    else:
      if not (allow_zero and value == 0):
        options.check_positive(name, value, 'or a function of the epoch')
      found[name] = HyperParameter(float(value))
  return found


def _check_schedule(name: str, schedule: Schedule) -> None:
  """Refuses a function that gives no step size for the first epoch."""
  options.check_function(name, schedule, 'epoch')
  try:
    value = schedule(tf.constant(0))
  except Exception as error:
    raise ValueError(
        f'`{name}` fails when it is tried in epoch 0:'
        f' {type(error).__name__}: {" ".join(str(error).split())}'
    ) from error
  try:
    number = np.asarray(value, np.float64)
  except (OverflowError, TypeError, ValueError):
    number = np.full(2, np.nan)
  if isinstance(value, str) or number.ndim or not 0 <= number < np.inf:
    raise ValueError(
        f'`{name}` as a function of the epoch must return a finite number, not'
        f' below 0; got {value!r}.'
    )
  with tf.Graph().as_default():
    try:
      schedule(tf.compat.v1.placeholder(tf.int32, []))
    except Exception as error:
      raise ValueError(
          f'`{name}` fails for an epoch that is a tensor in a graph, where'
          ' `tf.where` stands for `if`:'
          f' {type(error).__name__}: {" ".join(str(error).split())}'
      ) from error


def _scheduled(
    name: str, schedule: Schedule
) -> Callable[[tf.Tensor, Numbers], tf.Tensor]:
  def at(epoch: tf.Tensor, numbers: Numbers) -> tf.Tensor:
    factor = numbers[name]
    return factor * vector_space.scalar(schedule(epoch), factor.dtype)

  return at


def check_has_inner(problem: Problem) -> None:
  """Refuses a problem without an inner variable."""
  if not problem.has_inner:
    raise ValueError('`problem` is single-level: it has no inner variable.')


class Method:
  """A federated method; derive from it and write `epoch`.

  Attributes:
    types: The types of its problem.
    rounds: Its rounds.
    hparams: Its hyper-parameters, by name.
    num_seeds: How many seeds an epoch needs.
  """

  def __init__(
      self,
      types: ProblemTypes,
      rounds: Sequence[Round],
      hparams: dict[str, HyperParameter],
      num_seeds: int = 1,
  ):
    self.types = types
    self.rounds = tuple(rounds)
    self.hparams = hparams
    self.num_seeds = num_seeds

  def initial_state(
      self, x: Structure, y: Structure, numbers: Numbers, seed: tf.Tensor
  ) -> Structure:
    """The method's part of the initial state, in TensorFlow."""
    del x, y, numbers, seed
    return ()

  def epoch(self, do: Executor, variables: Variables, plan: Plan) -> Variables:
    """One epoch: communication rounds and the server's steps between them."""
    raise NotImplementedError

  def get_hparams(self, method_state: Structure) -> dict[str, Structure]:
    """Further hyper-parameters, kept in the method's part of the state."""
    del method_state
    return {}

  def set_hparams(
      self, method_state: Structure, hparams: dict[str, Structure]
  ) -> Structure:
    """The method's part of the state, with the given hyper-parameters set."""
    del hparams
    return method_state
