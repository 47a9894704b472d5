"""Metrics of a run: one row per epoch in a CSV file and in TensorBoard.

`Recorder` is a TFF release manager; files are written by TFF's own.
"""

import collections
import csv
import glob
import math
import os
from typing import Any

import numpy as np
import tensorflow_federated as tff

from fednest_tff.algorithms.communication import CommunicationCost
from fednest_tff.simulation import errors

METRICS = 'metrics.csv'
TENSORBOARD = 'tensorboard'

_EVALUATION = 'evaluation/'
_DROPPED = frozenset([
    'evaluation_time_in_seconds',
    'round_number',
    'training_time_in_seconds',
])


def _scalars(metrics: Any, prefix: str = '') -> dict[str, float]:
  """The numbers in nested metrics, by their path."""
  if isinstance(metrics, dict):
    found = {}
    for name, value in metrics.items():
      found |= _scalars(value, f'{prefix}/{name}' if prefix else name)
    return found
  value = np.asarray(metrics)
  return {prefix: value.item()} if value.ndim == 0 else {}


class Recorder(tff.program.ReleaseManager):
  """Writes an epoch's row once it is complete, and stops at what is not finite.

  Rows have, besides `labels`: epoch; communication_rounds, bytes_up and
  bytes_down since the first epoch, the bytes of all clients of the cohorts;
  seconds, of this epoch; then the metrics, those of the evaluation first.
  """

  def __init__(
      self,
      directory: str,
      labels: dict[str, Any],
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
    # Write mode replaces the file as a whole; appending can leave half a line.
    self._csv = tff.program.CSVFileReleaseManager(
        self.path, tff.program.CSVSaveMode.WRITE, key_fieldname='epoch'
    )
    self._tensorboard = tff.program.TensorBoardReleaseManager(
        os.path.join(directory, TENSORBOARD)
    )

  async def release(self, value: Any, key: int) -> None:
    """Releases the metrics of epoch `key`; epoch 0 has none."""
    if key == 0:
      return
    row = self._row(value, key)
    with errors.file_errors(self.path):
      await self._csv.release(row, key)
      numbers = {k: v for k, v in row.items() if k not in self._labels}
      await self._tensorboard.release(numbers, key)
    for name, number in row.items():
      if isinstance(number, float) and not math.isfinite(number):
        raise errors.NonFiniteError(
            f'epoch {key}: {name} is {number}; try smaller learning rates'
            f' (the metrics so far are in {self.path!r})'
        )

  def _row(self, metrics: Any, epoch: int) -> dict[str, Any]:
    evaluation, training = {}, {}
    for name, number in _scalars(dict(metrics)).items():
      if name.startswith(_EVALUATION):
        evaluation[name.removeprefix(_EVALUATION)] = number
      else:
        training[name] = number
    # Ordered, or else TFF sorts the columns by name.
    row = collections.OrderedDict(self._labels) | {
        'communication_rounds': epoch * self._cost.rounds,
        'bytes_up': epoch * self._cost.bytes_up * self._cohort_size,
        'bytes_down': epoch * self._cost.bytes_down * self._cohort_size,
        'seconds': round(training['training_time_in_seconds'], 4),
    }
    for name, number in (evaluation | training).items():
      if name not in _DROPPED:
        row[name] = number
    return row


def _number(text: str) -> Any:
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      continue
  return text


def read_rows(path: str) -> list[dict[str, Any]]:
  """The rows of a metrics file; missing values are left out."""
  with open(path, newline='') as file:
    return [
        {name: _number(text) for name, text in row.items() if text}
        for row in csv.DictReader(file)
    ]


def write_rows(path: str, rows: list[dict[str, Any]]) -> None:
  """Writes rows as CSV, all or nothing."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  temporary = f'{path}.tmp'
  with open(temporary, 'w', newline='') as file:
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(rows)
  os.replace(temporary, path)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """The last and the best of each quantity of a run, and the best's epoch.

  Of accuracies the largest is the best, of all else the smallest.
  """
  found = {}
  for name in rows[-1]:
    if name in ('method', 'seed', 'epoch'):
      continue
    values = [(row[name], row['epoch']) for row in rows if name in row]
    pick = max if name.endswith('accuracy') else min
    best, epoch = pick(values, key=lambda pair: pair[0])
    found[name] = {'last': values[-1][0], 'best': best, 'best_epoch': epoch}
  return found
