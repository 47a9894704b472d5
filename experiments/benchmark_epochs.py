"""The epochs that the benchmark times: of the library, of TFF, and by hand."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from experiments import floor, floor_sim_fbo, kernels, learning_problems
from experiments.benchmark_settings import (
    CLASSES,
    PIXELS,
    SETTINGS,
    Setting,
)
import fednest_tff

_LEARNING_RATE = 0.01
_BATCH_SIZE = 64
_LOCAL_EPOCHS = 5
_EQUAL_STEPS = 25  # As many as 5 epochs of 300 inner examples.
_LOCAL_STEPS = 10  # Of methods that take them on all variables at once.
_RIDGE = 0.005

# Runs an epoch with this many of the clients.
Epoch = Callable[[int], None]
# Images and labels of one client.
_Client = tuple[np.ndarray, np.ndarray]

_FLOOR = floor.Settings(
    _LEARNING_RATE, _LOCAL_EPOCHS, _BATCH_SIZE, neumann_terms=5, ridge=_RIDGE
)
_SIM_FBO_FLOOR = floor_sim_fbo.Settings(_LEARNING_RATE, _LOCAL_STEPS, _RIDGE)


def client_sizes(setting: Setting, examples: int) -> list[int]:
  """Lists how many examples each client has, `examples` on average."""
  count = max([setting.clients, *setting.other_sizes()])
  if setting.client_sizes == 'equal':
    return [examples] * count
  if setting.client_sizes == 'two':
    return [(2 + 2 * (k % 2)) * examples // 3 for k in range(count)]
  return [examples // 2 + (2 * k + 1) * examples // (2 * count)
          for k in range(count)]


def _make_clients(sizes: Sequence[int]) -> list[_Client]:
  """Synthetic clients with the shapes of MNIST."""
  rng = np.random.default_rng(0)
  return [
      (
          rng.random((size, PIXELS), dtype=np.float32),
          rng.integers(0, CLASSES, size).astype(np.int32),
      )
      for size in sizes
  ]


def _network(sizes: Sequence[int]) -> tuple[floor.Layers, floor.Head]:
  """Hidden layers and a head, for programs by hand."""
  rng = np.random.default_rng(0)

  def layer(inputs: int, outputs: int) -> tuple[tf.Tensor, tf.Tensor]:
    scale = 1 / np.sqrt(inputs)
    weight = rng.uniform(-scale, scale, (inputs, outputs))
    return tf.constant(weight, tf.float32), tf.zeros([outputs])

  layers = [layer(*pair) for pair in zip(sizes[:-2], sizes[1:-1], strict=True)]
  weight, bias = layer(sizes[-2], sizes[-1])
  return layers, floor.Head(weight, bias[tf.newaxis])


def _point(setting: Setting) -> floor_sim_fbo.Point:
  ((weight, bias),), head = _network(setting.sizes)
  return floor_sim_fbo.Point(
      floor.Head(weight, bias[tf.newaxis]),
      head,
      floor.Head(*map(tf.zeros_like, head)),
  )


def _floor_function(
    setting: Setting, inner: floor.Part, outer: floor.Part
) -> tuple[Callable[..., tuple], tuple]:
  """An epoch by hand, `(*variables, seed) -> variables`, and the first ones."""
  clients, half = inner[0].shape[:2]
  if setting.method == 'simfbo':
    step = floor_sim_fbo.build_epoch(_SIM_FBO_FLOOR)

    @tf.function
    def draw_and_step(point, seed):
      rows = [
          floor_sim_fbo.draw_rows(
              _LOCAL_STEPS, clients, half, min(_BATCH_SIZE, half), seed + kind
          )
          for kind in range(2)
      ]
      return (step(point, inner, outer, *rows),)

    return draw_and_step, (_point(setting),)
  settings = _FLOOR._replace(neumann_terms=setting.neumann_terms)
  run = floor.build_epoch(settings)

  @tf.function
  def draw_and_run(layers, head, seed):
    order = floor.draw_order(settings, clients, half, seed)
    return run(layers, head, inner, outer, order)

  return draw_and_run, _network(setting.sizes)


def _floor_epoch(setting: Setting, data: Sequence[_Client]) -> Epoch:
  """The program by hand."""
  images = np.stack([client[0] for client in data])
  targets = tf.one_hot(np.stack([client[1] for client in data]), CLASSES)
  half = images.shape[1] // 2
  function, variables = _floor_function(
      setting,
      (tf.constant(images[:, :half]), targets[:, :half]),
      (tf.constant(images[:, half:]), targets[:, half:]),
  )
  count = 0

  def epoch(clients: int) -> None:
    nonlocal count, variables
    del clients  # Always all.
    count += 1
    variables = function(*variables, tf.constant([0, 2 * count]))
    tf.nest.flatten(variables)[-1].numpy()

  return epoch


@functools.cache
def flops(setting: Setting, examples: int) -> int | None:
  """Counts the floating-point operations that an epoch needs.

  They are those of the matrix products in the program by hand for the same
  epoch: what a runtime does beyond them is no use.

  Args:
    setting: What is computed; its `work`.
    examples: How many examples a client has.

  Returns:
    The number, or `None` if there is no program by hand.
  """
  by_hand = {row.method for row in SETTINGS if row.runtime == 'floor'}
  if (
      setting.problem != 'hyper_representation'
      or setting.method not in by_hand
      or setting.inner_rounds > 1
      or setting.client_sizes != 'equal'
      or setting.equal_steps
  ):
    return None
  half = examples // 2

  def part(count: int) -> floor.Part:
    shape = [setting.clients, count]
    return tf.TensorSpec([*shape, PIXELS]), tf.TensorSpec([*shape, CLASSES])

  parts = part(half), part(examples - half)
  function: Any  # A `tf.function`.
  if setting.method == 'simfbo':
    shape = [_LOCAL_STEPS, setting.clients, min(_BATCH_SIZE, half)]
    rows = tf.TensorSpec(shape, tf.int32)
    function = floor_sim_fbo.build_epoch(_SIM_FBO_FLOOR)
    traced = function.get_concrete_function(_point(setting), *parts, rows, rows)
    return kernels.count_flops(traced, _LOCAL_STEPS)
  order = tf.TensorSpec([_LOCAL_EPOCHS, setting.clients, half], tf.int32)
  function = floor.build_epoch(
      _FLOOR._replace(neumann_terms=setting.neumann_terms)
  )
  traced = function.get_concrete_function(
      *_network(setting.sizes), *parts, order
  )
  return kernels.count_flops(traced, _LOCAL_EPOCHS)


def _build_process(setting: Setting) -> fednest_tff.NestedProcess:
  if setting.problem == 'loss_tuning':
    problem, _ = learning_problems.loss_tuning(setting.sizes)
  else:
    problem, _ = learning_problems.hyper_representation(
        setting.sizes, _RIDGE, declare_representation=setting.representation
    )
  options = dict(
      outer_learning_rate=_LEARNING_RATE,
      inner_learning_rate=_LEARNING_RATE,
      linear_learning_rate=_LEARNING_RATE,
      local_steps=_LOCAL_STEPS,
      batch_size=_BATCH_SIZE,
      inner_rounds=setting.inner_rounds,
      neumann_terms=setting.neumann_terms,
      # FedMBO averages several chains that end at random.
      ihgp='stochastic' if setting.method == 'fedmbo' else 'truncated',
  )
  if setting.equal_steps:
    options['inner_local_steps'] = _EQUAL_STEPS
  else:
    options['inner_local_epochs'] = _LOCAL_EPOCHS
  known = fednest_tff.get_method(setting.method).options
  return fednest_tff.build(
      problem,
      setting.method,
      **{name: value for name, value in options.items() if name in known},
  )


def _build_fed_avg(setting: Setting) -> tff.learning.templates.LearningProcess:
  """TFF's own federated averaging of a Keras model."""
  layers = tf.keras.layers

  def model_fn() -> tff.learning.models.VariableModel:
    if setting.problem == 'fedavg_cnn':
      hidden = [layers.Reshape([28, 28, 1])]
      for channels in (16, 32):
        hidden.append(layers.Conv2D(channels, 3, activation='relu'))
        hidden.append(layers.MaxPooling2D())
      hidden.append(layers.Flatten())
    else:
      hidden = [layers.Dense(n, activation='relu') for n in setting.hidden]
    inputs = tf.keras.Input([PIXELS])
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential([inputs, *hidden, layers.Dense(CLASSES)]),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=(
            tf.TensorSpec([None, PIXELS], tf.float32),
            tf.TensorSpec([None], tf.int32),
        ),
    )

  return tff.learning.algorithms.build_weighted_fed_avg(
      model_fn, tff.learning.optimizers.build_sgdm(_LEARNING_RATE)
  )


def build_epoch(setting: Setting, examples: int) -> Epoch:
  """An epoch of a setting, to be called in its runtime.

  Args:
    setting: The setting.
    examples: How many examples a client has, on average.

  Returns:
    A function of how many clients take part. Its first call also initialises.
  """
  data = _make_clients(client_sizes(setting, examples))
  if setting.runtime == 'floor':
    return _floor_epoch(setting, data)
  datasets = list(map(tf.data.Dataset.from_tensor_slices, data))
  if setting.problem.startswith('fedavg'):
    process = _build_fed_avg(setting)
    # TFF's clients train on the minibatches of their datasets.
    datasets = [d.repeat(_LOCAL_EPOCHS).batch(_BATCH_SIZE) for d in datasets]
  else:
    process = _build_process(setting)
  state = None

  def epoch(clients: int) -> None:
    nonlocal state
    state = process.initialize() if state is None else state
    state = process.next(state, datasets[:clients]).state

  return epoch
