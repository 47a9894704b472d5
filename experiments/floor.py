"""One FedNest epoch of the hyper-representation problem, written by hand.

What a fast program for this one problem would be: all clients in one batch,
derivatives of the head in closed form, the representation evaluated once, data
in memory. `benchmark` compares the library with it. Given the minibatches that
the library draws, its numbers are the library's.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf


class Settings(NamedTuple):
  """What an epoch does; truncated Neumann series, T = 1, one outer step."""

  learning_rate: float
  local_epochs: int
  batch_size: int
  neumann_terms: int
  ridge: float


class Head(NamedTuple):
  """The softmax head, one per client if the leading axis says so."""

  weight: tf.Tensor  # [..., features, classes]
  bias: tf.Tensor  # [..., 1, classes]


# The hidden layers' weights and biases.
Layers = list[tuple[tf.Tensor, tf.Tensor]]
# Images [clients, examples, pixels] and one-hot targets.
Part = tuple[tf.Tensor, tf.Tensor]


def _map(function: Callable[..., tf.Tensor], *heads: Head) -> Head:
  return Head(*(function(*parts) for parts in zip(*heads, strict=True)))


def _back(
    features: tf.Tensor, errors: tf.Tensor, like: Head, ridge: float
) -> Head:
  """The gradient of a mean over examples from that in the logits."""
  count = tf.cast(tf.shape(features)[-2], tf.float32)
  return Head(
      tf.matmul(features, errors, transpose_a=True) / count
      + 2 * ridge * like.weight,
      tf.reduce_mean(errors, axis=-2, keepdims=True) + 2 * ridge * like.bias,
  )


def _errors(head: Head, features: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
  return tf.nn.softmax(features @ head.weight + head.bias) - targets


def _gradient(
    head: Head, features: tf.Tensor, targets: tf.Tensor, ridge: float
) -> Head:
  return _back(features, _errors(head, features, targets), head, ridge)


def _hessian_product(
    head: Head, vector: Head, features: tf.Tensor, ridge: float
) -> Head:
  probabilities = tf.nn.softmax(features @ head.weight + head.bias)
  slopes = features @ vector.weight + vector.bias
  mean = tf.reduce_sum(probabilities * slopes, axis=-1, keepdims=True)
  return _back(features, probabilities * (slopes - mean), vector, ridge)


def _hidden(layers: Layers, images: tf.Tensor) -> tf.Tensor:
  shape = tf.shape(images)
  flat = tf.reshape(images, [-1, images.shape[-1]])
  for weight, bias in layers:
    flat = tf.nn.relu(flat @ weight + bias)
  return tf.reshape(flat, [shape[0], shape[1], flat.shape[-1]])


def draw_order(
    settings: Settings, num_clients: int, num_examples: int, seed: tf.Tensor
) -> tf.Tensor:
  """The order of each client's inner examples in each local epoch.

  Args:
    settings: For the number of local epochs.
    num_clients: m.
    num_examples: How many inner examples a client has.
    seed: Two integers.

  Returns:
    Permutations, of shape [local epochs, clients, examples].
  """
  shape = [settings.local_epochs, num_clients, num_examples]
  return tf.argsort(tf.random.stateless_uniform(shape, seed))


def build_epoch(
    settings: Settings,
) -> Callable[[Layers, Head, Part, Part, tf.Tensor], tuple[Layers, Head]]:
  """One epoch as a `tf.function`.

  Args:
    settings: What the epoch does.

  Returns:
    `(layers, head, inner, outer, order) -> (layers, head)`, where `inner` and
    `outer` are (images [clients, examples, pixels], one-hot targets) and
    `order` is as in `draw_order`.
  """
  s = settings

  def mean(head: Head) -> Head:
    return _map(lambda t: tf.reduce_mean(t, axis=0), head)

  def svrg(
      head: Head,
      q: Head,
      features: tf.Tensor,
      targets: tf.Tensor,
      order: tf.Tensor,
  ) -> Head:
    clients, count = features.shape[:2]
    local = _map(lambda t: tf.repeat(t[tf.newaxis], clients, axis=0), head)

    def one_epoch(k, local):
      permutations = order[k]
      for begin in range(0, count, s.batch_size):
        rows = permutations[:, begin : begin + s.batch_size]
        f = tf.gather(features, rows, batch_dims=1)
        t = tf.gather(targets, rows, batch_dims=1)
        local = _map(
            lambda v, g, a, q: v - s.learning_rate * (g - a + q),
            local,
            _gradient(local, f, t, s.ridge),
            _gradient(head, f, t, s.ridge),
            q,
        )
      return k + 1, local

    _, local = tf.while_loop(
        lambda k, _: k < s.local_epochs, one_epoch, (tf.constant(0), local)
    )
    return mean(local)

  @tf.function
  def epoch(
      layers: Layers, head: Head, inner: Part, outer: Part, order: tf.Tensor
  ) -> tuple[Layers, Head]:
    images, targets = inner
    features = _hidden(layers, images)
    q = mean(_gradient(head, features, targets, s.ridge))
    head = svrg(head, q, features, targets, order)

    # b = grad_y f, then p, the truncated sum with l = 1 / learning_rate.
    outer_features = _hidden(layers, outer[0])
    b = mean(_gradient(head, outer_features, outer[1], 0.0))
    term = _map(lambda t: s.learning_rate * t, b)
    p = term
    for _ in range(s.neumann_terms - 1):
      product = mean(_hessian_product(head, term, features, s.ridge))
      term = _map(lambda t, h: t - s.learning_rate * h, term, product)
      p = _map(tf.add, p, term)

    # h = grad_x f - d/dx <grad_y g, p>; the ridge does not depend on x.
    with tf.GradientTape() as tape:
      tape.watch(layers)
      inner_features = _hidden(layers, images)
      errors = _errors(head, inner_features, targets)
      slopes = inner_features @ p.weight + p.bias
      mixed = tf.reduce_mean(tf.reduce_sum(errors * slopes, axis=-1))
      logits = _hidden(layers, outer[0]) @ head.weight + head.bias
      loss = tf.reduce_mean(
          tf.nn.softmax_cross_entropy_with_logits(outer[1], logits)
      )
      total = loss - mixed
    h = tape.gradient(total, layers)
    layers = tf.nest.map_structure(
        lambda v, g: v - s.learning_rate * g, layers, h
    )
    return layers, head

  return epoch
