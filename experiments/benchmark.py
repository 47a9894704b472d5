r"""Seconds per epoch: in process, native, and programs by hand.

  python -m experiments.benchmark --output_dir=outputs/benchmark

Runs the settings of a table one after another in this process, on the same
synthetic MNIST-shaped data, with the threads that the experiments use. Prints

- seconds per epoch after the first, and seconds of the first;
- the peak of resident memory (with the worker's, for native);
- `kernels`: the operations that one epoch executes, from a trace;
- the share of the machine's rate of matrix products, measured in the same run,
  that an epoch reaches with those products that it needs;
- for cohorts of varying size, the seconds of all calls with other sizes.

Writes the table as benchmark.csv and benchmark.md, and a plot, after each row.
Rows of earlier runs in the same directory stay, so the table can be made in
parts. Only ratios mean anything: machines differ.

  python -m experiments.benchmark --group=headline --group=deep

runs parts of the table, and

  python -m experiments.benchmark --only=floor --only='in process' --clients=2 \
      --examples=10 --hidden=8 --epochs=1 --output_dir=outputs/quick

is a quick look at whether it runs.
"""

import contextlib
import gc
import os
import statistics
import sys
import threading
import time

from absl import flags, logging
import psutil
import tensorflow_federated as tff

from experiments import (
    benchmark_epochs,
    benchmark_table,
    kernels,
    program,
    runtimes,
    threads,
)
from experiments import settings as settings_lib
from experiments.benchmark_settings import GROUPS, SETTINGS, Setting
from fednest_tff import simulation
from fednest_tff.runtime import in_process, native

FLAGS = flags.FLAGS
NAMES = tuple(setting.name for setting in SETTINGS)


def define_flags(values: flags.FlagValues = FLAGS) -> None:
  """Defines the flags; some have the names of flags of the experiments."""
  own = dict(flag_values=values, allow_override=True)
  flags.DEFINE_string(
      'output_dir', 'outputs/benchmark', 'Where the table and the plot go.',
      **own,
  )
  flags.DEFINE_integer(
      'epochs', 8, 'Timed epochs after the first.', lower_bound=1, **own
  )
  flags.DEFINE_integer(
      'examples', 600, 'Examples per client.', lower_bound=10, **own
  )
  flags.DEFINE_integer(
      'clients', None, 'Clients, in place of those in the table.',
      lower_bound=1, **own,
  )
  flags.DEFINE_list(
      'hidden', None,
      'Widths of hidden layers, in place of those in the table.', **own,
  )
  flags.DEFINE_multi_string(
      'only', [], 'The name of a row of the table, to run only such',
      **own,
  )
  flags.DEFINE_multi_enum(
      'group', [], GROUPS, 'A part of the table, to run only such',
      **own,
  )


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


def _runtime(
    setting: Setting,
) -> contextlib.AbstractContextManager[tff.framework.SyncContext | None]:
  """Installs a runtime of its own for a setting, while it is entered."""
  if setting.runtime == 'floor':
    return contextlib.nullcontext()
  if setting.runtime == 'native':
    context = native.build_native_context()
  else:
    context = in_process.InProcessContext(
        in_process.InProcessRuntime(unroll=setting.unroll)
    )
  return tff.framework.get_context_stack().install(context)


def _seconds(epoch: benchmark_epochs.Epoch, clients: int) -> float:
  begin = time.perf_counter()
  epoch(clients)
  return time.perf_counter() - begin


def _measure(setting: Setting, rate: float) -> benchmark_table.Row:
  """Runs one setting.

  Args:
    setting: The setting.
    rate: That of matrix products, in floating-point operations per second.

  Returns:
    Its row.
  """
  epoch = benchmark_epochs.build_epoch(setting, FLAGS.examples)
  others = executed = share = None
  with _runtime(setting):
    with _PeakMemory() as memory:
      first = _seconds(epoch, setting.clients)
      if setting.other_cohorts:
        others = sum(_seconds(epoch, n) for n in setting.other_sizes())
      later = statistics.median(
          _seconds(epoch, setting.clients) for _ in range(FLAGS.epochs)
      )
    # The native runtime executes in its worker.
    if setting.runtime != 'native' and setting.is_traced:
      executed = kernels.count_operations(
          lambda: epoch(setting.clients)
      ).total()
  flops = benchmark_epochs.flops(setting.work, FLAGS.examples)
  if flops is not None:
    share = flops / later / rate
  return benchmark_table.Row(
      setting=setting.name,
      group=setting.group,
      clients=setting.clients,
      seconds_per_epoch=later,
      first_seconds=first,
      gib=memory.peak / 2**30,
      kernels=executed,
      gflop=None if flops is None else flops / 1e9,
      matmul_share=share,
      matmul_gflop_per_second=rate / 1e9,
      other_cohorts_seconds=others,
  )


def _widths() -> tuple[int, ...]:
  """The widths of hidden layers that the flag has."""
  if not all(width.isdecimal() and int(width) > 0 for width in FLAGS.hidden):
    raise settings_lib.SettingsError(
        f'--hidden={",".join(FLAGS.hidden)} must be positive integers,'
        ' separated by commas'
    )
  return tuple(map(int, FLAGS.hidden))


def _chosen() -> list[Setting]:
  """The settings that the flags ask for."""
  for name in FLAGS.only:
    if name not in NAMES:
      raise settings_lib.SettingsError(
          f'--only={name} is none of {", ".join(map(repr, NAMES))}'
      )
  settings = list(SETTINGS)
  if FLAGS.only or FLAGS.group:
    settings = [
        setting
        for setting in SETTINGS
        if setting.name in FLAGS.only or setting.group in FLAGS.group
    ]
  if FLAGS.clients is not None:
    settings = [s._replace(clients=FLAGS.clients) for s in settings]
  if FLAGS.hidden is not None:
    settings = [s._replace(hidden=_widths()) for s in settings]
  return settings


def _read(path: str) -> list[benchmark_table.Row]:
  """The rows of earlier runs."""
  try:
    return benchmark_table.read(path)
  except ValueError as error:
    raise settings_lib.SettingsError(str(error)) from error


def _run() -> None:
  """Runs the settings and reports."""
  settings = _chosen()
  stem = os.path.join(FLAGS.output_dir, 'benchmark')
  rows = {row.setting: row for row in _read(f'{stem}.csv')}
  with simulation.file_errors(FLAGS.output_dir):
    os.makedirs(FLAGS.output_dir, exist_ok=True)
  # TensorFlow can be told only once, before it runs anything.
  threads.give_cores_to_clients(min(setting.clients for setting in settings))
  rate = kernels.matmul_rate()
  print(threads.describe())
  print(f'matrix products: {rate / 1e9:.1f} GFLOP/s')
  print(benchmark_table.header(), flush=True)
  for k, setting in enumerate(settings):
    print(
        f'[{k + 1} of {len(settings)}] {setting.name} ...', file=sys.stderr,
        flush=True,
    )
    rows[setting.name] = _measure(setting, rate)
    gc.collect()  # What the runtime has compiled has cycles.
    table = benchmark_table.sort(rows.values())
    print(benchmark_table.line(rows[setting.name], table), flush=True)
    benchmark_table.write(table, f'{stem}.csv')
    with open(f'{stem}.md', 'w') as file:
      file.write(benchmark_table.markdown(table))
  benchmark_table.plot(table, f'{stem}.png')
  print(f'wrote {stem}.csv, {stem}.md and {stem}.png')


def main(argv: list[str]) -> int:
  """Runs the command; returns the exit code."""
  logging.set_verbosity(logging.WARNING)
  try:
    if len(argv) > 1:
      raise settings_lib.SettingsError(f'unexpected argument {argv[1]!r}')
    _run()
  except (Exception, KeyboardInterrupt) as error:
    return program.end_with(error)
  return 0


if __name__ == '__main__':
  tff.framework.set_default_context(runtimes.NoRuntime())
  define_flags()
  program.start(main)
