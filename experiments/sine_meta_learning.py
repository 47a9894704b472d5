"""Federated meta-learning of sine curves: MAML as a compositional problem.

Client i has a task, the curve a sin(u + b) of its own amplitude a and phase b,
as support and as query points. With L the mean squared error of a network with
parameters x, MAML wants the x from which one step on the support points does
best on the query points (step size eta):

  min_x mean_i L_i^query(x - eta grad L_i^support(x)).

This is mean_i f_i(mean_j r_j(x)) if y has a block of parameters per client, and

  r_j(x) = m (x - eta grad L_j^support(x)) in block j, 0 elsewhere,
  f_i(y) = L_i^query(block i of y),

because the mean over all m clients then has every client's adapted parameters
in its block. With fewer clients it does not: methods need full participation.
FedInn with beta = 1 and one step finds y exactly.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

import fednest_tff
from fednest_tff.vector_space import Structure


class Tasks(NamedTuple):
  """Points of m tasks, each array [m, points].

  Attributes:
    support_inputs: u of the points that parameters are adapted on.
    support_targets: The curve there.
    query_inputs: u of the points that adapted parameters are judged on.
    query_targets: The curve there.
  """

  support_inputs: np.ndarray
  support_targets: np.ndarray
  query_inputs: np.ndarray
  query_targets: np.ndarray


def sample_tasks(
    num_tasks: int,
    num_support: int = 10,
    num_query: int = 10,
    amplitudes: tuple[float, float] = (0.1, 5.0),
    seed: int = 0,
    dtype: npt.DTypeLike = np.float32,
) -> Tasks:
  """Random tasks, by default with the amplitudes of the MAML paper.

  Args:
    num_tasks: m.
    num_support: Support points per task, uniform in (-5, 5).
    num_query: Query points per task, likewise.
    amplitudes: The range of a; phases b are uniform in (0, pi).
    seed: Of all of it. Held-out tasks are those of another seed.
    dtype: Of the arrays.

  Returns:
    The tasks.
  """
  rng = np.random.default_rng(seed)
  amplitude = rng.uniform(*amplitudes, size=(num_tasks, 1))
  phase = rng.uniform(0, np.pi, size=(num_tasks, 1))
  arrays = []
  for count in (num_support, num_query):
    inputs = rng.uniform(-5, 5, size=(num_tasks, count))
    arrays += [inputs, amplitude * np.sin(inputs + phase)]
  return Tasks(*(array.astype(dtype) for array in arrays))


def to_datasets(tasks: Tasks) -> list[tf.data.Dataset]:
  """One dataset per task; an example says of which task and part it is."""
  datasets = []
  for i, rows in enumerate(zip(*tasks, strict=True)):
    inputs = np.concatenate([rows[0], rows[2]])
    is_query = np.arange(len(inputs)) >= len(rows[0])
    datasets.append(
        tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict(
                input=inputs,
                target=np.concatenate([rows[1], rows[3]]),
                is_query=is_query,
                client=np.full(len(inputs), i, np.int32),
            )
        )
    )
  return datasets


def _split(examples: Structure) -> tuple[Structure, Structure]:
  """Support points are inner, query points outer examples."""

  def take(mask):
    return tf.nest.map_structure(
        lambda t: tf.boolean_mask(t, mask), examples
    )

  is_query = examples['is_query']
  return take(tf.logical_not(is_query)), take(is_query)


def _layers(hidden: Sequence[int]) -> list[tuple[int, int]]:
  """The shapes of the layers of a network from one number to one number."""
  sizes = (1, *hidden, 1)
  return list(zip(sizes, sizes[1:], strict=False))


def initial_parameters(
    hidden: Sequence[int], seed: int, dtype: tf.DType = tf.float32
) -> tf.Tensor:
  """x at the start: weights normal with variance 1/inputs, biases 0."""
  parts = []
  for k, (inputs, outputs) in enumerate(_layers(hidden)):
    key = tf.random.experimental.stateless_fold_in([seed, 5], k)
    weights = tf.random.stateless_normal([inputs * outputs], key, dtype=dtype)
    parts += [weights / np.sqrt(inputs), tf.zeros([outputs], dtype)]
  return tf.concat(parts, axis=0)


def network(
    x: tf.Tensor, inputs: tf.Tensor, hidden: Sequence[int]
) -> tf.Tensor:
  """The tanh network of parameters x at `inputs`.

  Args:
    x: [..., parameters]: weights, then bias, layer by layer.
    inputs: [..., points] with the same leading axes.
    hidden: Widths of the hidden layers.

  Returns:
    [..., points].
  """
  leading = x.shape[:-1].as_list()
  activations = inputs[..., tf.newaxis]
  begin = 0
  for k, shape in enumerate(_layers(hidden)):
    middle = begin + shape[0] * shape[1]
    end = middle + shape[1]
    weight = tf.reshape(x[..., begin:middle], [*leading, *shape])
    bias = x[..., tf.newaxis, middle:end]
    begin = end
    activations = activations if k == 0 else tf.tanh(activations)
    activations = activations @ weight + bias
  return activations[..., 0]


def _adapt(
    x: tf.Tensor,
    inputs: tf.Tensor,
    targets: tf.Tensor,
    hidden: Sequence[int],
    adaptation_rate: float,
) -> tf.Tensor:
  """x - eta grad L(x), for each of the leading axes of x on its own."""
  with tf.GradientTape() as tape:
    tape.watch(x)
    errors = network(x, inputs, hidden) - targets
    # The sum over tasks of means over points: no task sees another's gradient.
    loss = tf.reduce_sum(tf.reduce_mean(errors**2, axis=-1))
  return x - adaptation_rate * tape.gradient(loss, x)


def sine_meta_learning(
    num_clients: int,
    hidden: Sequence[int] = (16, 16),
    adaptation_rate: float = 0.02,
    dtype: tf.DType = tf.float32,
) -> fednest_tff.Problem:
  """The compositional problem.

  Args:
    num_clients: m, the blocks of y.
    hidden: Widths of the hidden layers.
    adaptation_rate: eta.
    dtype: Of inputs, targets, x and y.

  Returns:
    The problem; its clients are those of `to_datasets`.
  """
  size = sum((inputs + 1) * outputs for inputs, outputs in _layers(hidden))

  def inner_map(x, batch):
    adapted = _adapt(
        x, batch['input'], batch['target'], hidden, adaptation_rate
    )
    # All examples of a batch are one client's.
    block = tf.one_hot(batch['client'][0], num_clients, dtype=dtype)
    return num_clients * block[:, tf.newaxis] * adapted

  def outer_loss(y, batch):
    parameters = tf.gather(y, batch['client'][0])
    errors = network(parameters, batch['input'], hidden) - batch['target']
    return tf.reduce_mean(errors**2)

  return fednest_tff.compositional(
      outer_loss,
      inner_map,
      lambda seed: initial_parameters(hidden, seed, dtype),
      lambda seed: tf.zeros([num_clients, size], dtype),
      collections.OrderedDict(
          input=tf.TensorSpec([], dtype),
          target=tf.TensorSpec([], dtype),
          is_query=tf.TensorSpec([], tf.bool),
          client=tf.TensorSpec([], tf.int32),
      ),
      split=_split,
  )


def adapted_loss(
    x: tf.Tensor,
    tasks: Tasks,
    hidden: Sequence[int] = (16, 16),
    adaptation_rate: float = 0.02,
    steps: int = 1,
) -> tf.Tensor:
  """MAML's objective: the mean query loss after adaptation to each task.

  Args:
    x: The parameters to start from.
    tasks: Those of the clients, or held-out ones.
    hidden: Widths of the hidden layers.
    adaptation_rate: eta.
    steps: Steps on the support points; 0 for none.

  Returns:
    A scalar, differentiable in x.
  """
  x = tf.convert_to_tensor(x)
  each = tf.repeat(x[tf.newaxis], len(tasks.support_inputs), axis=0)
  for _ in range(steps):
    each = _adapt(
        each,
        tasks.support_inputs,
        tasks.support_targets,
        hidden,
        adaptation_rate,
    )
  errors = network(each, tasks.query_inputs, hidden) - tasks.query_targets
  return tf.reduce_mean(errors**2)
