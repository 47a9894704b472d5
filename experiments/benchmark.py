r"""Seconds per epoch: in process, native, and programs by hand.

  python -m experiments.benchmark --output_dir=outputs/benchmark

Runs the settings of a table one after another in this process, on the same
synthetic MNIST-shaped data, and prints seconds per epoch after the first,
seconds of the first, and the peak of resident memory (with the worker's, for
native). Writes the table as benchmark.csv and a plot. Only the ratios within a
run mean anything: machines differ.

  python -m experiments.benchmark --only=floor --only='in process' --clients=2 \
      --examples=10 --hidden=8 --epochs=1

is a quick look at whether it runs.
"""

from collections.abc import Callable
import csv
import os
import statistics
import threading
import time
from typing import NamedTuple

from absl import app, flags, logging
import matplotlib
import numpy as np
import psutil
import tensorflow as tf
import tensorflow_federated as tff

from experiments import floor, floor_sim_fbo, learning_problems
import fednest_tff
from fednest_tff.runtime import in_process, native

_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', 'outputs/benchmark', 'Where the table and the plot go.'
)
_EPOCHS = flags.DEFINE_integer(
    'epochs', 8, 'Timed epochs after the first.', lower_bound=1
)
_EXAMPLES = flags.DEFINE_integer(
    'examples', 600, 'Examples per client.', lower_bound=10
)
_CLIENTS = flags.DEFINE_integer(
    'clients', None, 'Clients, in place of those in the table.', lower_bound=1
)
_HIDDEN = flags.DEFINE_list(
    'hidden', None, 'Widths of hidden layers, in place of those in the table.'
)
_ONLY = flags.DEFINE_multi_string(
    'only', [], 'The name of a setting, to run only such; may be repeated.'
)

_LEARNING_RATE = 0.01
_BATCH_SIZE = 64
_LOCAL_EPOCHS = 5
_LOCAL_STEPS = 10  # Of SimFBO, which takes them on all variables at once.
_RIDGE = 0.005
_PIXELS, _CLASSES = 784, 10
_DEEP = (512, 512, 200)
_TUNED = (200, 100)  # The classifier that loss tuning trains.


class Setting(NamedTuple):
  """One row of the table."""

  name: str
  runtime: str  # 'in_process', 'native' or 'floor'
  clients: int = 10
  hidden: tuple[int, ...] = (200,)
  representation: bool = True
  neumann_terms: int = 5
  problem: str = 'hyper_representation'
  unroll: int | None = None
  method: str = 'fednest'

  @property
  def sizes(self) -> tuple[int, ...]:
    """Widths of all layers, inputs first."""
    return (_PIXELS, *self.hidden, _CLASSES)


SETTINGS = (
    Setting('floor', 'floor'),
    Setting('in process', 'in_process'),
    Setting('in process, not declared', 'in_process', representation=False),
    Setting('in process, loop', 'in_process', unroll=0),
    Setting('in process, N=20', 'in_process', neumann_terms=20),
    Setting('native', 'native'),
    Setting('floor, deep', 'floor', hidden=_DEEP),
    Setting('in process, deep', 'in_process', hidden=_DEEP),
    Setting('native, deep', 'native', hidden=_DEEP),
    Setting(
        'in process, loss tuning', 'in_process', hidden=_TUNED,
        problem='loss_tuning',
    ),
    Setting(
        'native, loss tuning', 'native', hidden=_TUNED, problem='loss_tuning'
    ),
    Setting('floor, 100 clients', 'floor', clients=100),
    Setting('in process, 100 clients', 'in_process', clients=100),
    Setting('native, 100 clients', 'native', clients=100),
    Setting('floor, SimFBO', 'floor', method='simfbo'),
    Setting('in process, SimFBO', 'in_process', method='simfbo'),
)


class Measurement(NamedTuple):
  """What a setting took."""

  first: float
  epoch: float
  memory: float  # GiB


class _PeakMemory:
  """The largest resident memory of this process and its children."""

  def __enter__(self):
    self.peak = 0
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()
    return self

  def _watch(self):
    this = psutil.Process()
    while not self._stop.wait(0.05):
      total = 0
      for process in [this, *this.children(recursive=True)]:
        try:
          total += process.memory_info().rss
        except psutil.NoSuchProcess:
          pass
      self.peak = max(self.peak, total)

  def __exit__(self, *error):
    self._stop.set()
    self._thread.join()


def _make_data(
    num_clients: int, examples: int
) -> tuple[np.ndarray, np.ndarray]:
  """Images and labels, one leading axis of clients."""
  rng = np.random.default_rng(0)
  images = rng.random((num_clients, examples, _PIXELS), dtype=np.float32)
  labels = rng.integers(0, _CLASSES, (num_clients, examples)).astype(np.int32)
  return images, labels


def _time_epochs(
    epoch: Callable[[], None], epochs: int
) -> tuple[float, float]:
  """Seconds of the first epoch, and the median of those after it."""
  seconds = []
  for _ in range(epochs + 1):
    begin = time.perf_counter()
    epoch()
    seconds.append(time.perf_counter() - begin)
  return seconds[0], statistics.median(seconds[1:])


def _floor_epoch(
    setting: Setting, images: np.ndarray, labels: np.ndarray
) -> Callable[[], None]:
  """The program by hand, as a function of no arguments."""
  clients, half = images.shape[0], images.shape[1] // 2
  targets = tf.one_hot(labels, _CLASSES)
  inner = tf.constant(images[:, :half]), targets[:, :half]
  outer = tf.constant(images[:, half:]), targets[:, half:]
  rng = np.random.default_rng(0)
  sizes = setting.sizes

  def layer(inputs, outputs):
    scale = 1 / np.sqrt(inputs)
    weight = rng.uniform(-scale, scale, (inputs, outputs))
    return tf.constant(weight, tf.float32), tf.zeros([outputs])

  layers = [layer(*pair) for pair in zip(sizes[:-2], sizes[1:-1], strict=True)]
  weight, bias = layer(sizes[-2], sizes[-1])
  head = floor.Head(weight, bias[tf.newaxis])
  if setting.method == 'simfbo':
    return _sim_fbo_floor_epoch(layers, head, inner, outer)
  settings = floor.Settings(
      _LEARNING_RATE, _LOCAL_EPOCHS, _BATCH_SIZE, setting.neumann_terms, _RIDGE
  )
  run = floor.build_epoch(settings)

  @tf.function
  def draw_and_run(layers, head, seed):
    order = floor.draw_order(settings, clients, half, seed)
    return run(layers, head, inner, outer, order)

  count = 0

  def epoch():
    nonlocal count, layers, head
    count += 1
    layers, head = draw_and_run(layers, head, tf.constant([0, count]))
    head.weight.numpy()

  return epoch


def _sim_fbo_floor_epoch(
    layers: floor.Layers, head: floor.Head, inner: floor.Part, outer: floor.Part
) -> Callable[[], None]:
  """SimFBO by hand, as a function of no arguments."""
  ((weight, bias),) = layers
  point = floor_sim_fbo.Point(
      floor.Head(weight, bias[tf.newaxis]),
      head,
      floor.Head(*map(tf.zeros_like, head)),
  )
  run = floor_sim_fbo.build_epoch(
      floor_sim_fbo.Settings(_LEARNING_RATE, _LOCAL_STEPS, _RIDGE)
  )
  clients, half = inner[0].shape[:2]

  @tf.function
  def draw_and_run(point, seed):
    rows = [
        floor_sim_fbo.draw_rows(
            _LOCAL_STEPS, clients, half, min(_BATCH_SIZE, half), seed + kind
        )
        for kind in range(2)
    ]
    return run(point, inner, outer, *rows)

  count = 0

  def epoch():
    nonlocal count, point
    count += 1
    point = draw_and_run(point, tf.constant([0, 2 * count]))
    point.head.weight.numpy()

  return epoch


def _build_process(setting: Setting) -> fednest_tff.NestedProcess:
  if setting.problem == 'loss_tuning':
    problem, _ = learning_problems.loss_tuning(setting.sizes)
  else:
    problem, _ = learning_problems.hyper_representation(
        setting.sizes, _RIDGE, declare_representation=setting.representation
    )
  if setting.method == 'simfbo':
    return fednest_tff.build(
        problem,
        'simfbo',
        outer_learning_rate=_LEARNING_RATE,
        inner_learning_rate=_LEARNING_RATE,
        linear_learning_rate=_LEARNING_RATE,
        local_steps=_LOCAL_STEPS,
        batch_size=_BATCH_SIZE,
    )
  return fednest_tff.build(
      problem,
      outer_learning_rate=_LEARNING_RATE,
      inner_learning_rate=_LEARNING_RATE,
      inner_local_epochs=_LOCAL_EPOCHS,
      batch_size=_BATCH_SIZE,
      neumann_terms=setting.neumann_terms,
      ihgp='truncated',
  )


def _library_epoch(
    setting: Setting, images: np.ndarray, labels: np.ndarray
) -> Callable[[], None]:
  """A FedNest epoch, as a function of no arguments."""
  process = _build_process(setting)
  datasets = [
      tf.data.Dataset.from_tensor_slices(pair)
      for pair in zip(images, labels, strict=True)
  ]
  state = None

  def epoch():
    nonlocal state
    state = process.initialize() if state is None else state
    state = process.next(state, datasets).state

  return epoch


def _measure(setting: Setting) -> Measurement:
  """Runs one setting in a runtime of its own."""
  images, labels = _make_data(setting.clients, _EXAMPLES.value)
  with _PeakMemory() as memory:
    if setting.runtime == 'floor':
      epoch = _floor_epoch(setting, images, labels)
      first, later = _time_epochs(epoch, _EPOCHS.value)
    else:
      if setting.runtime == 'native':
        context = native.build_native_context()
      else:
        context = in_process.InProcessContext(
            in_process.InProcessRuntime(unroll=setting.unroll)
        )
      epoch = _library_epoch(setting, images, labels)
      with tff.framework.get_context_stack().install(context):
        first, later = _time_epochs(epoch, _EPOCHS.value)
  return Measurement(first, later, memory.peak / 2**30)


def _plot(results: dict[Setting, Measurement], path: str) -> None:
  """Bars of seconds per epoch."""
  matplotlib.use('Agg')
  import matplotlib.pyplot as plt  # after the backend is chosen

  names = [setting.name for setting in results]
  seconds = [measured.epoch for measured in results.values()]
  figure, axes = plt.subplots(figsize=(7, 0.4 * len(names) + 1.2))
  bars = axes.barh(names, seconds, color='0.6', edgecolor='0.2')
  axes.bar_label(bars, [f'{s:.3g}' for s in seconds], padding=3)
  axes.invert_yaxis()
  axes.set_xscale('log')
  axes.set_xlabel('seconds per epoch (log scale)')
  axes.margins(x=0.15)
  figure.tight_layout()
  figure.savefig(path, dpi=150)
  plt.close(figure)


def _chosen() -> list[Setting]:
  """The settings that the flags ask for."""
  known = {setting.name: setting for setting in SETTINGS}
  for name in _ONLY.value:
    if name not in known:
      raise app.UsageError(
          f'--only={name} is none of {", ".join(map(repr, known))}'
      )
  settings = [known[name] for name in _ONLY.value] or list(SETTINGS)
  if _CLIENTS.value is not None:
    settings = [s._replace(clients=_CLIENTS.value) for s in settings]
  if _HIDDEN.value is not None:
    widths = tuple(map(int, _HIDDEN.value))
    settings = [s._replace(hidden=widths) for s in settings]
  return settings


def main(argv: list[str]) -> None:
  """Runs the settings and reports."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected argument {argv[1]!r}')
  logging.set_verbosity(logging.WARNING)
  settings = _chosen()
  os.makedirs(_OUTPUT_DIR.value, exist_ok=True)
  results = {}
  print(f'{"setting":26} {"s/epoch":>8} {"first s":>8} {"GiB":>6}')
  for setting in settings:
    measured = _measure(setting)
    results[setting] = measured
    print(
        f'{setting.name:26} {measured.epoch:8.3f} {measured.first:8.1f}'
        f' {measured.memory:6.2f}',
        flush=True,
    )
  path = os.path.join(_OUTPUT_DIR.value, 'benchmark.csv')
  with open(path, 'w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(['setting', 'seconds_per_epoch', 'first_seconds', 'gib'])
    for setting, measured in results.items():
      writer.writerow(
          [setting.name, measured.epoch, measured.first, measured.memory]
      )
  plot = os.path.join(_OUTPUT_DIR.value, 'benchmark.png')
  _plot(results, plot)
  print(f'wrote {path} and {plot}')


if __name__ == '__main__':
  app.run(main)
