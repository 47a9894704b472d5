"""The benchmark's table: on the screen, as CSV, as Markdown and as a plot."""

from collections.abc import Callable, Iterable
import csv
import os
from typing import Any, NamedTuple

import matplotlib

from experiments.benchmark_settings import SETTINGS, Setting


class Row(NamedTuple):
  """What a setting took.

  Attributes:
    setting: Its name.
    group: Its group.
    clients: How many took part.
    seconds_per_epoch: The median of the epochs after the first.
    first_seconds: The first epoch, with all that is traced and compiled.
    gib: The peak of resident memory, with the native worker's.
    kernels: Operations executed in one epoch, if they were counted.
    gflop: What an epoch needs, in 10^9 floating-point operations of matrix
      products, if there is a program by hand.
    matmul_share: The rate of these as a share of `matmul_gflop_per_second`.
    matmul_gflop_per_second: The rate of large matrix products in the same run.
    other_cohorts_seconds: All first calls with other cohort sizes together.
  """

  setting: str
  group: str
  clients: int
  seconds_per_epoch: float
  first_seconds: float
  gib: float
  kernels: int | None
  gflop: float | None
  matmul_share: float | None
  matmul_gflop_per_second: float
  other_cohorts_seconds: float | None


_INTEGERS = ('clients', 'kernels')
_TEXTS = ('setting', 'group')
_ORDER = {setting.name: k for k, setting in enumerate(SETTINGS)}


def sort(rows: Iterable[Row]) -> list[Row]:
  """Rows in the order of the settings."""
  return sorted(rows, key=lambda row: _ORDER[row.setting])


def read(path: str) -> list[Row]:
  """Reads the rows of an earlier run; none if there is no such file.

  Args:
    path: The file that `write` wrote.

  Returns:
    The rows of settings that are still known.

  Raises:
    ValueError: If it is not such a file.
  """
  if not os.path.exists(path):
    return []
  with open(path, newline='') as file:
    reader = csv.DictReader(file)
    if tuple(reader.fieldnames or ()) != Row._fields:
      raise ValueError(f'{path} has other columns: move it, or remove it.')
    found = list(reader)

  def parse(name: str, text: str) -> Any:
    if name in _TEXTS:
      return text
    if not text:
      return None
    return int(text) if name in _INTEGERS else float(text)

  rows = [
      Row(**{name: parse(name, text) for name, text in entry.items()})
      for entry in found
  ]
  return [row for row in rows if row.setting in _ORDER]


def write(rows: Iterable[Row], path: str) -> None:
  """Writes rows as CSV; an empty field is what was not measured."""
  with open(path, 'w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(Row._fields)
    writer.writerows(rows)


def _ratio(
    row: Row,
    rows: Iterable[Row],
    applies: Callable[[Setting], bool],
    is_base: Callable[[Setting], bool],
) -> float | None:
  """A row's time divided by that of another one which computes the same."""
  setting = SETTINGS[_ORDER[row.setting]]
  if not applies(setting):
    return None
  for other in rows:
    base = SETTINGS[_ORDER[other.setting]]
    if (
        is_base(base)
        and base.work == setting.work
        and other.clients == row.clients
    ):
      return row.seconds_per_epoch / other.seconds_per_epoch
  return None


def ratios(row: Row, rows: Iterable[Row]) -> tuple[float | None, float | None]:
  """In process / floor, and native / in process, where there are both.

  Args:
    row: A row, of a setting in process or native.
    rows: All rows.
  """
  return (
      _ratio(
          row, rows, lambda s: s.runtime == 'in_process',
          lambda s: s.runtime == 'floor',
      ),
      _ratio(
          row, rows, lambda s: s.runtime == 'native', lambda s: s.is_default
      ),
  )


def _show(value: float | None, form: str) -> str:
  return '' if value is None else format(value, form)


_COLUMNS = (
    'setting', 's per epoch', 'first s', 'GiB', 'kernels', 'of matmul rate',
    'in process / floor', 'native / in process', 'other cohorts, s',
)


def _cells(row: Row, rows: Iterable[Row]) -> list[str]:
  to_floor, to_in_process = ratios(row, rows)
  return [
      row.setting,
      _show(row.seconds_per_epoch, '.3f'),
      _show(row.first_seconds, '.1f'),
      _show(row.gib, '.2f'),
      _show(row.kernels, ','),
      _show(row.matmul_share, '.0%'),
      _show(to_floor, '.2f'),
      _show(to_in_process, '.2f'),
      _show(row.other_cohorts_seconds, '.1f'),
  ]


def markdown(rows: Iterable[Row]) -> str:
  """The table in Markdown."""
  rows = list(rows)
  lines = [list(_COLUMNS), ['---'] * len(_COLUMNS)]
  lines += [_cells(row, rows) for row in rows]
  return ''.join(f'| {" | ".join(cells)} |\n' for cells in lines)


def header() -> str:
  """The first line of the table on the screen."""
  return _line([
      'setting', 's/epoch', 'first s', 'GiB', 'kernels', 'matmul', '/floor',
      '/in pr.', 'others s',
  ])


def line(row: Row, rows: Iterable[Row]) -> str:
  """A row of the table on the screen, with ratios to `rows`."""
  return _line(_cells(row, rows))


def _line(cells: list[str]) -> str:
  name, *numbers = cells
  return f'{name:36}' + ''.join(f' {number:>8}' for number in numbers)


def plot(rows: Iterable[Row], path: str) -> None:
  """Bars of seconds per epoch."""
  matplotlib.use('Agg')
  import matplotlib.pyplot as plt  # after the backend is chosen

  rows = list(rows)
  seconds = [row.seconds_per_epoch for row in rows]
  figure, axes = plt.subplots(figsize=(7, 0.4 * len(rows) + 1.2))
  names = [row.setting for row in rows]
  bars = axes.barh(names, seconds, color='0.6', edgecolor='0.2')
  axes.bar_label(bars, [f'{s:.3g}' for s in seconds], padding=3)
  axes.invert_yaxis()
  axes.set_xscale('log')
  axes.set_xlabel('seconds per epoch (log scale)')
  axes.margins(x=0.15)
  figure.tight_layout()
  figure.savefig(path, dpi=150)
  plt.close(figure)
