"""Metrics of a run: one row per epoch in a CSV file and in TensorBoard.

`Recorder` is a TFF release manager; files are written by TFF's own.
"""

from collections.abc import Sequence
import contextlib
import csv
import glob
import math
import os
from typing import Any, TypeAlias

from absl import logging
import numpy as np
import tensorflow_federated as tff

from fednest_tff.runtime.communication import CommunicationCost
from fednest_tff.simulation import errors
from fednest_tff.structures import Value

# One epoch in a metrics file: numbers by name, and texts such as the method's
# name.
Row: TypeAlias = dict[str, Any]

METRICS = 'metrics.csv'
TENSORBOARD = 'tensorboard'

_EVALUATION = 'evaluation/'
_TOTALS = ('communication_rounds', 'bytes_up', 'bytes_down')
_DROPPED = frozenset([
    'evaluation_time_in_seconds',
    'round_number',
    'training_time_in_seconds',
])


def _scalars(metrics: Value, prefix: str = '') -> dict[str, float]:
  """The numbers in nested metrics, by their path."""
  if isinstance(metrics, dict):
    found: dict[str, float] = {}
    for name, value in metrics.items():
      found |= _scalars(value, f'{prefix}/{name}' if prefix else name)
    return found
  value = np.asarray(metrics)
  return {prefix: value.item()} if value.ndim == 0 else {}


class _OrderedCsv(tff.program.CSVFileReleaseManager):
  """TFF's manager, which sorts columns by name, with columns as they come."""

  async def release(self, value: Row, key: int) -> None:
    self._names = [self._key_fieldname, *value]
    await super().release(value, key)

  async def _write_value(self, value: Row) -> None:
    await super()._write_value({name: value[name] for name in self._names})


class Recorder(tff.program.ReleaseManager):
  """Writes an epoch's row once it is complete, and stops at what is not finite.

  Rows have: epoch; communication_rounds, bytes_up and bytes_down since the
  first epoch, the bytes of all clients of the cohorts; seconds, of this epoch;
  the labels; then the metrics, those of the evaluation first. Rounds and bytes
  are those that the epoch's metrics report, as a driver's do, or else those of
  the compiled epoch.

  Attributes:
    path: Of the file.
    last_epoch: The last one that was on record in the beginning.
  """

  def __init__(
      self,
      directory: str,
      labels: dict[str, str | int],
      cost: CommunicationCost,
      cohort_size: int,
  ):
    self._labels = labels
    self._cost = cost
    self._cohort_size = cohort_size
    self.path = os.path.join(directory, METRICS)
    # What a killed process had not finished writing.
    for leftover in glob.glob(glob.escape(self.path) + '_temp*'):
      os.remove(leftover)
    self.last_epoch = _repair(self.path)
    # Rounds and bytes so far, by epoch.
    self._totals = {0: dict.fromkeys(_TOTALS, 0)}
    if self.last_epoch:
      for row in read_rows(self.path):
        self._totals[row['epoch']] = {name: row[name] for name in _TOTALS}
    # Write mode replaces the file as a whole; appending can leave half a line.
    self._csv = _OrderedCsv(
        self.path, tff.program.CSVSaveMode.WRITE, key_fieldname='epoch'
    )
    self._tensorboard = tff.program.TensorBoardReleaseManager(
        os.path.join(directory, TENSORBOARD)
    )

  async def release(self, value: Value, key: int) -> None:
    """Releases the metrics of epoch `key`; epoch 0 has none."""
    if key == 0:
      return
    row = self._row(value, key)
    with errors.file_errors(self.path):
      await self._csv.release(row, key)
      # As arrays: of a large Python float TensorFlow makes no float32.
      numbers = {
          name: np.asarray(number)
          for name, number in row.items()
          if name not in self._labels
      }
      await self._tensorboard.release(numbers, key)
    check_finite(row | {'epoch': key}, self.path)

  def _row(self, metrics: Value, epoch: int) -> Row:
    evaluation, training = {}, {}
    for name, number in _scalars(dict(metrics)).items():
      if name.startswith(_EVALUATION):
        evaluation[name.removeprefix(_EVALUATION)] = number
      else:
        training[name] = number
    of_epoch = {
        'communication_rounds': self._cost.rounds,
        'bytes_up': self._cost.bytes_up * self._cohort_size,
        'bytes_down': self._cost.bytes_down * self._cohort_size,
    }
    before = self._totals[epoch - 1]
    self._totals[epoch] = {
        name: before[name] + int(training.get(name, number))
        for name, number in of_epoch.items()
    }
    row: Row = {
        **self._totals[epoch],
        'seconds': round(training['training_time_in_seconds'], 4),
        **self._labels,
    }
    for name, number in (evaluation | training).items():
      if name not in _DROPPED and name not in row:
        row[name] = number
    return row


def check_finite(row: Row, path: str) -> None:
  """Raises a `NonFiniteError` if something in a row of `path` is not finite."""
  for name, number in row.items():
    if isinstance(number, float) and not math.isfinite(number):
      raise errors.NonFiniteError(
          f'epoch {row["epoch"]}: {name} is {number}; try smaller learning'
          f' rates (the metrics so far are in {path!r})'
      )


def _whole(path: str) -> tuple[list[list[str]], bool]:
  """Header and rows of a metrics file up to damage, and if there is none."""
  with open(path, newline='', errors='replace') as file:
    lines = file.read().split('\r\n')
  table = list(csv.reader(lines[:-1]))
  if not table or not table[0] or table[0][0] != 'epoch':
    return [], False
  header, *rows = table
  whole = [header]
  for row in rows:
    if len(row) != len(header) or row[0] != str(len(whole)):
      break
    whole.append(row)
  return whole, len(whole) == len(table) and lines[-1] == ''


def _repair(path: str) -> int:
  """Keeps of a metrics file what precedes damage; returns the last epoch."""
  if not os.path.exists(path):
    return 0
  table, is_whole = _whole(path)
  if not is_whole:
    logging.warning(
        '%r is damaged; going on from epoch %d.', path, max(0, len(table) - 1)
    )
    if table:
      _write_table(path, table)
    else:
      os.remove(path)
  return max(0, len(table) - 1)


def is_complete(path: str, epochs: int) -> bool:
  """Whether a metrics file has all of a run's rows."""
  return os.path.exists(path) and len(_whole(path)[0]) == epochs + 1


def _number(text: str) -> int | float | str:
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      continue
  return text


def read_rows(path: str) -> list[Row]:
  """The rows of a metrics file; missing values are left out."""
  with open(path, newline='') as file:
    return [
        {name: _number(text) for name, text in row.items() if text}
        for row in csv.DictReader(file)
    ]


def write_rows(path: str, rows: list[Row]) -> None:
  """Writes rows as CSV, all or nothing."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  _write_table(
      path, [names, *([row.get(name, '') for name in names] for row in rows)]
  )


def _write_table(path: str, table: Sequence[Sequence[object]]) -> None:
  temporary = f'{path}.tmp'
  try:
    with open(temporary, 'w', newline='') as file:
      csv.writer(file).writerows(table)
    os.replace(temporary, path)
  except OSError:
    with contextlib.suppress(OSError):
      os.remove(temporary)
    raise


def summarize(rows: list[Row]) -> dict[str, dict[str, float]]:
  """The last and the best of each quantity of a run, and the best's epoch.

  Of accuracies the largest is the best, of all else the smallest.
  """
  found = {}
  for name in dict.fromkeys(name for row in rows for name in row):
    if name in ('method', 'seed', 'epoch'):
      continue
    values = [(row[name], row['epoch']) for row in rows if name in row]
    pick = max if 'accuracy' in name else min
    finite = [pair for pair in values if math.isfinite(pair[0])]
    best, epoch = pick(finite or values, key=lambda pair: pair[0])
    found[name] = {'last': values[-1][0], 'best': best, 'best_epoch': epoch}
  return found
