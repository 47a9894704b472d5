"""Local descent: the tau_i steps that a client takes between two messages.

`sgd` is the loop of the light variants (LFedInn, LFedOut), `svrg` that of
FedInn (Algorithm 4, lines 8-11) and FedOut (Algorithm 2, lines 9-12). Both are
one `tf.while_loop` over the client's minibatches.
"""

from collections.abc import Callable
import dataclasses

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.local import sampling
from fednest_tff.vector_space import Structure

# From a point and a step number to the direction of that step.
Direction = Callable[[Structure, tf.Tensor], Structure]
# From a point and a minibatch to a gradient.
Gradient = Callable[[Structure, Structure], Structure]


@dataclasses.dataclass(frozen=True)
class LocalWork:
  """How much a client does between two messages: tau_i and the minibatches.

  Attributes:
    steps: tau_i itself, or a function of the client's examples that returns it
      (system heterogeneity); `None` to count in epochs.
    epochs: Passes over the client's examples, tau_i = epochs * ceil(n_i / B);
      `None` to count in steps.
    batch_size: B; `None` to use all of a client's examples in each step.
    divide_by_steps: Whether step sizes are divided by tau_i, as the theory
      wants (alpha_i = alpha / tau_i, beta_i = beta / tau_i).
  """

  steps: int | Callable[[Structure], tf.Tensor] | None = None
  epochs: int | None = None
  batch_size: int | None = None
  divide_by_steps: bool = False

  def num_steps(self, examples: Structure) -> tf.Tensor:
    """tau_i (int32 scalar) of the client that holds `examples`."""
    if callable(self.steps):
      return tf.cast(self.steps(examples), tf.int32)
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
    # tau_i = 0 is a client that takes no step at all; its step size is moot.
    return learning_rate / tf.cast(tf.maximum(tau, 1), learning_rate.dtype)

  def minibatches(
      self, examples: Structure, num_steps: tf.Tensor, seed: tf.Tensor
  ) -> sampling.Minibatches:
    return sampling.Minibatches(examples, self.batch_size, num_steps, seed)


def build_work(
    level: str,
    steps: int | Callable[[Structure], tf.Tensor] | None,
    epochs: int | None,
    batch_size: int | None,
    divide_by_steps: bool,
) -> LocalWork:
  """The work of one level from the arguments of a builder.

  Args:
    level: 'inner' or 'outer', for error messages.
    steps: `*_local_steps`.
    epochs: `*_local_epochs`; with neither, one epoch inside, one step outside.
    batch_size: B.
    divide_by_steps: Whether step sizes are divided by tau_i.

  Returns:
    The work.
  """
  if steps is None and epochs is None:
    steps, epochs = (None, 1) if level == 'inner' else (1, None)
  if steps is not None and epochs is not None:
    raise ValueError(
        f'Give `{level}_local_steps` or `{level}_local_epochs`, not both; got'
        f' {steps!r} and {epochs!r}.'
    )
  for name, value in (
      (f'{level}_local_steps', steps),
      (f'{level}_local_epochs', epochs),
      ('batch_size', batch_size),
  ):
    if value is None or (callable(value) and value is steps):
      continue
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f'`{name}` must be a positive integer; got {value!r}.')
  return LocalWork(steps, epochs, batch_size, divide_by_steps)


def descend(
    direction: Direction,
    start: Structure,
    num_steps: tf.Tensor,
    step_size: tf.Tensor,
    first_step: int = 0,
) -> Structure:
  """v <- v - step_size * direction(v, nu), nu = first_step..num_steps - 1."""

  def step(nu, v):
    return nu + 1, vector_space.add_scaled(v, -step_size, direction(v, nu))

  _, end = tf.while_loop(
      lambda nu, _: nu < num_steps, step, (tf.constant(first_step), start)
  )
  return end


def sgd(
    gradient: Gradient,
    start: Structure,
    features: Structure,
    work: LocalWork,
    tau: tf.Tensor,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
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

  Returns:
    The client's last iterate.
  """
  batches = work.minibatches(features, tau, seed)
  return descend(
      lambda v, nu: gradient(v, batches[nu]),
      start,
      tau,
      work.step_size(learning_rate, tau),
  )


def svrg(
    gradient: Gradient,
    anchor: Structure,
    anchor_direction: Structure,
    features: Structure,
    work: LocalWork,
    tau: tf.Tensor,
    learning_rate: tf.Tensor,
    seed: tf.Tensor,
) -> Structure:
  """tau_i local steps along G_i(v; z) - G_i(anchor; z) + anchor_direction.

  The same minibatch z is in both terms: that is what makes it SVRG.

  Args:
    gradient: As in `sgd`.
    anchor: Where the client starts, and where `anchor_direction` was taken.
    anchor_direction: The global direction at the anchor (q or h).
    features: As in `sgd`.
    work: As in `sgd`.
    tau: As in `sgd`.
    learning_rate: As in `sgd`.
    seed: As in `sgd`.

  Returns:
    The client's last iterate.
  """
  batches = work.minibatches(features, tau, seed)

  def direction(v, nu):
    batch = batches[nu]
    correction = vector_space.subtract(
        gradient(v, batch), gradient(anchor, batch)
    )
    return vector_space.add(correction, anchor_direction)

  # At the anchor itself the minibatch terms cancel: the first step, if there is
  # one, needs no minibatch. With tau_i = 1, the usual FedOut, none is read.
  step_size = work.step_size(learning_rate, tau)
  any_step = tf.cast(tf.minimum(tau, 1), step_size.dtype)
  first = vector_space.add_scaled(
      anchor, -step_size * any_step, anchor_direction
  )
  if tf.get_static_value(tau) == 1:
    return first
  return descend(direction, first, tau, step_size, first_step=1)
