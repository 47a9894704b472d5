"""One SimFBO epoch of the hyper-representation problem, written by hand.

As `floor` is for FedNest: all clients in one batch, every derivative in closed
form, data in memory. The network has one hidden layer. Given the minibatches
that the library draws, its numbers are the library's.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from experiments.floor import Head, Part


class Settings(NamedTuple):
  """What an epoch does; one step size for all variables and for the server."""

  learning_rate: float
  local_steps: int
  ridge: float


class Point(NamedTuple):
  """x (the hidden layer), y (the head) and v, one per client or one for all."""

  hidden: Head
  head: Head
  v: Head


def _layer_gradient(inputs: tf.Tensor, errors: tf.Tensor) -> Head:
  """The gradient of a layer from that in its outputs."""
  return Head(
      tf.matmul(inputs, errors, transpose_a=True),
      tf.reduce_sum(errors, axis=-2, keepdims=True),
  )


def _directions(
    point: Point, inner: Part, outer: Part, ridge: float
) -> Point:
  """G_i of all clients, from one minibatch of each kind per client."""
  x, y, v = point

  def forward(images):
    hidden = tf.nn.relu(images @ x.weight + x.bias)
    return hidden, tf.nn.softmax(hidden @ y.weight + y.bias)

  def back(images, hidden, hidden_errors):
    active = tf.cast(hidden > 0, tf.float32)
    return _layer_gradient(images, hidden_errors * active)

  # f: gradients in x and y.
  images, targets = outer
  hidden, probabilities = forward(images)
  count = tf.cast(tf.shape(images)[-2], tf.float32)
  errors = (probabilities - targets) / count
  f_y = _layer_gradient(hidden, errors)
  f_x = back(images, hidden, tf.matmul(errors, y.weight, transpose_b=True))

  # g: its gradient in y, and that gradient's change along v in x and y.
  images, targets = inner
  hidden, probabilities = forward(images)
  count = tf.cast(tf.shape(images)[-2], tf.float32)
  errors = (probabilities - targets) / count
  slopes = hidden @ v.weight + v.bias
  mean = tf.reduce_sum(probabilities * slopes, axis=-1, keepdims=True)
  changes = probabilities * (slopes - mean) / count
  g_y = _layer_gradient(hidden, errors)
  hessian_v = _layer_gradient(hidden, changes)
  mixed_v = back(
      images,
      hidden,
      tf.matmul(changes, y.weight, transpose_b=True)
      + tf.matmul(errors, v.weight, transpose_b=True),
  )

  def combine(function, *heads):
    return Head(*(function(*parts) for parts in zip(*heads, strict=True)))

  return Point(
      combine(tf.subtract, f_x, mixed_v),
      combine(lambda g, w: g + 2 * ridge * w, g_y, y),
      combine(lambda h, u, f: h + 2 * ridge * u - f, hessian_v, v, f_y),
  )


def build_epoch(
    settings: Settings,
) -> Callable[[Point, Part, Part, tf.Tensor, tf.Tensor], Point]:
  """One epoch as a `tf.function`.

  Args:
    settings: What the epoch does.

  Returns:
    `(point, inner, outer, inner_rows, outer_rows) -> point`, where `inner` and
    `outer` are (images [clients, examples, pixels], one-hot targets) and the
    rows are those of the minibatches, [local steps, clients, batch size].
  """

  @tf.function
  def epoch(point, inner, outer, inner_rows, outer_rows):
    clients = inner[0].shape[0]
    start = tf.nest.map_structure(
        lambda t: tf.repeat(t[tf.newaxis], clients, axis=0), point
    )

    def step(k, at, total):
      def batch(part, rows):
        return tuple(tf.gather(t, rows[k], batch_dims=1) for t in part)

      d = _directions(
          at, batch(inner, inner_rows), batch(outer, outer_rows), settings.ridge
      )
      at = tf.nest.map_structure(
          lambda v, g: v - settings.learning_rate * g, at, d
      )
      return k + 1, at, tf.nest.map_structure(tf.add, total, d)

    zero = tf.nest.map_structure(tf.zeros_like, start)
    _, _, total = tf.while_loop(
        lambda k, *_: k < settings.local_steps,
        step,
        (tf.constant(0), start, zero),
    )
    return tf.nest.map_structure(
        lambda v, h: v - settings.learning_rate * tf.reduce_mean(h, axis=0),
        point,
        total,
    )

  return epoch


def draw_rows(
    local_steps: int,
    num_clients: int,
    num_examples: int,
    batch_size: int,
    seed: tf.Tensor,
) -> tf.Tensor:
  """Rows of the minibatches of shuffled passes over each client's examples.

  Short minibatches at the end of a pass are left out.

  Args:
    local_steps: tau.
    num_clients: m.
    num_examples: How many examples of a kind a client has.
    batch_size: B.
    seed: Two integers.

  Returns:
    int32, of shape [local steps, clients, batch size].
  """
  per_pass = num_examples // batch_size
  passes = -(-local_steps // per_pass)
  shape = [passes, num_clients, num_examples]
  order = tf.argsort(tf.random.stateless_uniform(shape, seed))
  order = order[:, :, : per_pass * batch_size]
  shape = [passes, num_clients, per_pass, batch_size]
  batches = tf.transpose(tf.reshape(order, shape), [0, 2, 1, 3])
  return tf.reshape(batches, [-1, num_clients, batch_size])[:local_steps]
