"""Local descent: the tau_i steps that a client takes between two messages.

`sgd` is the loop of the light variants (LFedInn, LFedOut), `svrg` that of
FedInn (Algorithm 4, lines 8-11) and FedOut (Algorithm 2, lines 9-12). Both are
one `tf.while_loop` over the client's minibatches.
"""

import collections
from collections.abc import Callable
import dataclasses
from typing import Protocol, TypeVar

import tensorflow as tf

from fednest_tff import options, vector_space
from fednest_tff.local import sampling
from fednest_tff.options import option
from fednest_tff.vector_space import Structure

# A minibatch: of the examples themselves, or of their features.
Data = TypeVar('Data')
Data_co = TypeVar('Data_co', covariant=True)
# From a point and a step number to the direction of that step.
Direction = Callable[[Structure, tf.Tensor], Structure]
# From a point and a minibatch to a gradient.
Gradient = Callable[[Structure, Data], Structure]
Projection = Callable[[Structure], Structure]
# From the epoch (int32) to a number.
Schedule = Callable[[tf.Tensor], tf.Tensor]


class Batches(Protocol[Data_co]):
  """Minibatches by the number of the step."""

  def __getitem__(self, step: tf.Tensor) -> Data_co:
    ...


@dataclasses.dataclass(frozen=True)
class LocalWork:
  """The local steps that a client takes on one variable between two messages.

  Attributes:
    learning_rate: The local step size, alpha of x (outer) or beta of y (inner):
      a number, or a function of the epoch. Needed for each variable that the
      problem has.
    steps: How many local steps, tau_i: a number, or a function of the client's
      examples. Default: one pass over the inner examples, one step on the outer
      variable.
    epochs: How many local steps, counted in passes over the client's examples:
      tau_i = epochs * ceil(n_i / B), in place of `steps`.
    batch_size: B, the size of minibatches; all of a client's examples if it is
      not given.
    divide_by_steps: Whether alpha_i = alpha / tau_i and beta_i = beta / tau_i,
      as in the theory.
  """

  learning_rate: float | Schedule | None = option('{}_learning_rate')
  steps: int | Callable[[Structure], tf.Tensor] | None = option(
      '{}_local_steps'
  )
  epochs: int | None = option('{}_local_epochs')
  batch_size: int | None = option('batch_size')
  divide_by_steps: bool = option('divide_by_local_steps', False)

  def at_level(self, level: str) -> 'LocalWork':
    """This work, checked, with the default number of steps of a level.

    Args:
      level: 'inner', 'outer', or '' for steps on all variables at once.

    Returns:
      Work with either `steps` or `epochs`.

    Raises:
      ValueError: If a field does not fit; it names the flat option.
    """
    prefix = f'{level}_' if level else ''
    if self.steps is not None and self.epochs is not None:
      raise ValueError(
          f'Give `{prefix}local_steps` or `{prefix}local_epochs`, not both; got'
          f' {self.steps!r} and {self.epochs!r}.'
      )
    if callable(self.steps):
      options.check_function(f'{prefix}local_steps', self.steps, 'examples')
    elif self.steps is not None:
      options.check_count(f'{prefix}local_steps', self.steps)
    if self.epochs is not None:
      options.check_count(f'{prefix}local_epochs', self.epochs)
    if self.batch_size is not None:
      options.check_count('batch_size', self.batch_size)
    if self.steps is not None or self.epochs is not None:
      return self
    if level == 'inner':
      return dataclasses.replace(self, epochs=1)
    return dataclasses.replace(self, steps=1)

  def without_rate(self) -> 'LocalWork':
    """This work without its step size, which the server sends to clients."""
    return dataclasses.replace(self, learning_rate=None)

  def num_steps(self, examples: Structure) -> tf.Tensor:
    """tau_i (int32 scalar) of the client that holds `examples`."""
    if callable(self.steps):
      number = tf.convert_to_tensor(self.steps(examples))
      if number.dtype == tf.string or number.shape.rank:
        raise ValueError(
            '`local_steps` as a function of the examples must return a number;'
            f' got {number.dtype.name}{number.shape}.'
        )
      return tf.cast(number, tf.int32)
    if self.steps is not None:
      return tf.constant(self.steps, tf.int32)
    per_epoch = sampling.steps_per_epoch(
        sampling.num_examples(examples), self.batch_size
    )
    return self.epochs * per_epoch

  def step_size(self, learning_rate: tf.Tensor, tau: tf.Tensor) -> tf.Tensor:
    """alpha_i or beta_i from alpha or beta."""
    if not self.divide_by_steps:
      return learning_rate
    # A client with tau_i = 0 takes no step; its step size does not matter.
    return learning_rate / tf.cast(tf.maximum(tau, 1), learning_rate.dtype)

  def minibatches(
      self, examples: Data, num_steps: tf.Tensor, seed: tf.Tensor
  ) -> sampling.Minibatches[Data]:
    """The minibatches of `num_steps` steps."""
    return sampling.Minibatches(examples, self.batch_size, num_steps, seed)


def descend(
    direction: Direction,
    start: Structure,
    num_steps: tf.Tensor,
    step_size: tf.Tensor,
    project: Projection,
    first_step: int = 0,
) -> Structure:
  """v <- project(v - step_size direction(v, nu)), nu = first_step, ..."""

  def step(nu: tf.Tensor, v: Structure) -> tuple[tf.Tensor, Structure]:
    moved = vector_space.add_scaled(v, -step_size, direction(v, nu))
    return nu + 1, project(moved)

  _, end = tf.while_loop(
      lambda nu, _: nu < num_steps, step, (tf.constant(first_step), start)
  )
  return end


def sgd(
    gradient: Gradient[Data],
    start: Structure,
    features: Data,
    work: LocalWork,
    tau: tf.Tensor,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
    project: Projection = vector_space.identity,
) -> Structure:
  """tau_i local steps along the minibatch gradients G_i(v; z).

  Args:
    gradient: G_i, from a point and a minibatch.
    start: Where the client starts.
    features: What the minibatches are drawn from.
    work: Minibatch and step size.
    tau: tau_i, as `work.num_steps` gives it.
    learning_rate: alpha or beta.
    seed: int64 tensor of shape [2].
    project: The projection on the variable's feasible set, after each step.

  Returns:
    The client's last iterate.
  """
  batches = work.minibatches(features, tau, seed)
  return descend(
      lambda v, nu: gradient(v, batches[nu]),
      start,
      tau,
      work.step_size(learning_rate, tau),
      project,
  )


def svrg(
    gradient: Gradient[Data],
    anchor: Structure,
    anchor_direction: Structure,
    features: Data,
    work: LocalWork,
    tau: tf.Tensor,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
    project: Projection = vector_space.identity,
) -> Structure:
  """tau_i local steps along G_i(v; z) - G_i(anchor; z) + anchor_direction.

  The same minibatch z is in both terms: that is what makes it SVRG. If the
  anchor solves the constrained problem, projected steps stay there.

  Args:
    gradient: As in `sgd`.
    anchor: Where the client starts, and where `anchor_direction` was taken.
    anchor_direction: The global direction at the anchor (q or h).
    features: As in `sgd`.
    work: As in `sgd`.
    tau: As in `sgd`.
    learning_rate: As in `sgd`.
    seed: As in `sgd`.
    project: As in `sgd`.

  Returns:
    The client's last iterate.
  """
  return corrected_descent(
      gradient,
      anchor,
      anchor_direction,
      work.minibatches(features, tau, seed),
      tau,
      work.step_size(learning_rate, tau),
      project,
  )


def corrected_descent(
    gradient: Gradient[Data],
    anchor: Structure,
    anchor_direction: Structure,
    batches: Batches[Data],
    tau: tf.Tensor,
    step_size: tf.Tensor,
    project: Projection,
) -> Structure:
  """The steps of `svrg`, for given minibatches and a given step size."""

  def direction(v: Structure, nu: tf.Tensor) -> Structure:
    batch = batches[nu]
    correction = vector_space.subtract(
        gradient(v, batch), gradient(anchor, batch)
    )
    return vector_space.add(correction, anchor_direction)

  # At the anchor itself the minibatch terms cancel: the first step, if there is
  # one, needs no minibatch. With tau_i = 1, the usual FedOut, none is read.
  any_step = tf.cast(tf.minimum(tau, 1), step_size.dtype)
  first = project(
      vector_space.add_scaled(anchor, -step_size * any_step, anchor_direction)
  )
  if tf.get_static_value(tau) == 1:
    return first
  return descend(direction, first, tau, step_size, project, first_step=1)


def change(
    end: Structure, start: Structure, dtype: tf.DType
) -> tuple[Structure, collections.OrderedDict[str, tf.Tensor]]:
  """A client's report of its local steps: the change and its squared norm."""
  difference = vector_space.subtract(end, start)
  squared = tf.cast(vector_space.squared_norm(difference), dtype)
  return difference, collections.OrderedDict(squared_change=squared)


def drift(mean_squared_change: tf.Tensor, mean_change: Structure) -> tf.Tensor:
  """Root mean square over clients of ||y_i - y+||.

  mean ||y_i - y+||^2 = mean ||y_i - y||^2 - ||y+ - y||^2 when y+ is the mean,
  so it costs no further round. The mean of ||y_i - y+|| itself would cost one,
  because clients do not know y+ yet.
  """
  squared = tf.cast(
      vector_space.squared_norm(mean_change), mean_squared_change.dtype
  )
  return tf.sqrt(tf.maximum(mean_squared_change - squared, 0))
