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

from absl import app, flags, logging
import psutil
import tensorflow_federated as tff

from experiments import (
    benchmark_epochs,
    benchmark_table,
    kernels,
    threads,
)
from experiments.benchmark_settings import GROUPS, SETTINGS, Setting
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
_GROUP = flags.DEFINE_multi_enum(
    'group', [], GROUPS, 'A part of the table, to run it; may be repeated.'
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
  epoch = benchmark_epochs.build_epoch(setting, _EXAMPLES.value)
  others = executed = share = None
  with _runtime(setting):
    with _PeakMemory() as memory:
      first = _seconds(epoch, setting.clients)
      if setting.other_cohorts:
        others = sum(_seconds(epoch, n) for n in setting.other_sizes())
      later = statistics.median(
          _seconds(epoch, setting.clients) for _ in range(_EPOCHS.value)
      )
    # The native runtime executes in its worker.
    if setting.runtime != 'native' and setting.is_traced:
      executed = kernels.count_operations(
          lambda: epoch(setting.clients)
      ).total()
  flops = benchmark_epochs.flops(setting.work, _EXAMPLES.value)
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


def _chosen() -> list[Setting]:
  """The settings that the flags ask for."""
  known = {setting.name: setting for setting in SETTINGS}
  for name in _ONLY.value:
    if name not in known:
      raise app.UsageError(
          f'--only={name} is none of {", ".join(map(repr, known))}'
      )
  settings = list(SETTINGS)
  if _ONLY.value or _GROUP.value:
    settings = [
        setting
        for setting in SETTINGS
        if setting.name in _ONLY.value or setting.group in _GROUP.value
    ]
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
  stem = os.path.join(_OUTPUT_DIR.value, 'benchmark')
  rows = {row.setting: row for row in benchmark_table.read(f'{stem}.csv')}
  os.makedirs(_OUTPUT_DIR.value, exist_ok=True)
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


if __name__ == '__main__':
  app.run(main)
