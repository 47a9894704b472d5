"""The server's computations between rounds: steps on a variable, and checks."""

import collections
from collections.abc import Sequence
import functools
from typing import TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.federated import method
from fednest_tff.federated.rounds import (
    Averaged,
    Executor,
    Round,
    ServerValue,
)
from fednest_tff.federated.types import ProblemTypes
from fednest_tff.local import descent
from fednest_tff.vector_space import Structure

Optimizer: TypeAlias = tff.learning.optimizers.Optimizer

_ADVICE = {
    'inner': 'Try a smaller inner_learning_rate',
    'outer': 'Try a smaller outer_learning_rate, or a larger smoothness l',
}
_METRICS = {
    'inner': ('client_drift', 'inner_update_norm'),
    'outer': ('outer_drift', 'outer_update_norm'),
}


@functools.lru_cache(maxsize=128)
def build_check(value_type: tff.Type, message: str) -> tff.Computation:
  """`(v -> <v, ||v||>)`, which fails with `message` unless v is finite."""
  # Without clients that have examples, a mean is 0 / 0.
  message += ' (and see that there are clients with examples)'

  @tff.tensorflow.computation(value_type)
  def check(value: Structure) -> tuple[Structure, tf.Tensor]:
    value = vector_space.check_finite(value, message)
    # With data of 1e38, say, the value is finite but its norm overflows.
    norm = vector_space.check_finite(
        vector_space.norm(value), f'The norm overflows: {message}'
    )
    return value, norm

  return check


class ServerStep:
  """The server's step on x or y from the clients' mean change.

  By default it adds the mean change, which gives the mean of the clients'
  variables as in the paper (Algorithm 2, line 14, and Algorithm 4, line 13). An
  optimizer takes minus the mean change as its gradient. The projection on the
  variable's feasible set follows.
  """

  def __init__(
      self,
      types: ProblemTypes,
      level: str,
      variable: str,
      optimizer: Optimizer | None = None,
  ):
    """Traces the step.

    Args:
      types: The problem's types.
      level: 'inner' or 'outer'.
      variable: The new variable, for the error message.
      optimizer: Of `tff.learning.optimizers`; `None` to add the mean change.
    """
    if optimizer is not None and not isinstance(
        optimizer, tff.learning.optimizers.Optimizer
    ):
      raise ValueError(
          f'`{level}_optimizer` must be one of tff.learning.optimizers; got'
          f' {optimizer!r}.'
      )
    problem = types.problem
    is_outer = level == 'outer'
    value_type = types.outer if is_outer else types.inner
    project = problem.project_outer if is_outer else problem.project_inner
    self._optimizer = optimizer
    self._spec = problem.outer_spec if is_outer else problem.inner_spec
    self._metrics = _METRICS[level]
    self._name = f'{level}_optimizer'

    @tff.tensorflow.computation
    def initial_state() -> Structure:
      return self.initial_state()

    @types.computation(
        initial_state.type_signature.result, value_type, value_type,
        types.scalar,
    )
    def step(
        state: Structure,
        value: Structure,
        mean_change: Structure,
        mean_squared_change: tf.Tensor,
    ) -> tuple[Structure, Structure, tf.Tensor, tf.Tensor]:
      mean_change = vector_space.check_finite(
          mean_change, f'{variable} is not finite. {_ADVICE[level]}'
      )
      if optimizer is None:
        moved = vector_space.add(value, mean_change)
      else:
        state, moved = optimizer.next(
            state, value, vector_space.scale(-1.0, mean_change)
        )
      moved = project(moved)
      return (
          state,
          moved,
          descent.drift(mean_squared_change, mean_change),
          vector_space.norm(vector_space.subtract(moved, value)),
      )

    self._step = step

  def initial_state(self) -> Structure:
    """The optimizer's state, in TensorFlow; empty without one."""
    if self._optimizer is None:
      return ()
    return self._optimizer.initialize(self._spec)

  def get_hparams(self, state: Structure) -> dict[str, Structure]:
    """The optimizer's hyper-parameters, if it has any."""
    found: dict[str, Structure] = {}
    if self._optimizer is not None:
      found = self._optimizer.get_hparams(state)
    if not found:
      return {}
    return collections.OrderedDict([(self._name, found)])

  def set_hparams(
      self, state: Structure, hparams: dict[str, Structure]
  ) -> Structure:
    """The optimizer's state with those hyper-parameters."""
    if self._optimizer is None or self._name not in hparams:
      return state
    return self._optimizer.set_hparams(state, hparams[self._name])

  def __call__(
      self,
      do: Executor,
      state: ServerValue,
      value: ServerValue,
      changes: Averaged,
  ) -> tuple[ServerValue, ServerValue]:
    """The optimizer's new state and the new variable.

    Args:
      do: The executor.
      state: The optimizer's state; `()` without one.
      value: x or y.
      changes: The clients' mean change, with its mean square in the metric
        `squared_change`.

    Returns:
      (state, x+ or y+).
    """
    state, value, drift, norm = do.server(
        self._step,
        state,
        value,
        changes.value,
        changes.metrics['squared_change'],
    )
    do.measure(**dict(zip(self._metrics, (drift, norm), strict=True)))
    return state, value


class OuterStepMethod(method.Method):
  """A method whose own state is the state of the server's step on x.

  Attributes:
    outer_step: The server's step on x.
  """

  def __init__(
      self,
      types: ProblemTypes,
      rounds: Sequence[Round],
      hparams: dict[str, method.HyperParameter],
      outer_step: ServerStep,
      num_seeds: int = 1,
  ):
    super().__init__(types, rounds, hparams, num_seeds)
    self.outer_step = outer_step

  def initial_state(
      self, x: Structure, y: Structure, numbers: method.Numbers, seed: tf.Tensor
  ) -> Structure:
    return self.outer_step.initial_state()

  def get_hparams(self, method_state: Structure) -> dict[str, Structure]:
    return self.outer_step.get_hparams(method_state)

  def set_hparams(
      self, method_state: Structure, hparams: dict[str, Structure]
  ) -> Structure:
    return self.outer_step.set_hparams(method_state, hparams)
