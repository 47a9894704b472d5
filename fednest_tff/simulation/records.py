"""Metrics of a run: one row per epoch in a CSV file and in TensorBoard.

`Recorder` is a TFF release manager. The file is replaced as a whole with every
row, and its checksums are written after it.
"""

import glob
import math
import os

import numpy as np
import tensorflow_federated as tff

from fednest_tff.runtime.communication import CommunicationCost
from fednest_tff.simulation import errors, files, tables
from fednest_tff.simulation.manifest import Manifest, checksum
from fednest_tff.simulation.tables import Row
from fednest_tff.structures import Value

TENSORBOARD = 'tensorboard'
# The metric with the seconds of an epoch, by a monotonic clock. TFF's own
# metric uses the system's clock, which can be set.
SECONDS = 'monotonic_seconds'

_EVENTS = 'events.out.tfevents.*'
_EVALUATION = 'evaluation/'
_TOTALS = ('communication_rounds', 'bytes_up', 'bytes_down')
_COSTS = frozenset([*_TOTALS, 'seconds', 'num_clients', 'num_examples'])
_DROPPED = frozenset([
    SECONDS,
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


class Recorder(tff.program.ReleaseManager):
  """Writes an epoch's row once it is complete, and stops at what is not finite.

  Rows have: epoch; communication_rounds, bytes_up and bytes_down since the
  first epoch, the bytes of all clients of the cohorts; seconds, of this epoch;
  the labels; then the metrics, those of the evaluation first. Rounds and bytes
  are those that the epoch's metrics report, as a driver's do, or else those of
  the compiled epoch.

  TensorBoard gets the same numbers. Its files are written anew when a run goes
  on, so that no epoch is there twice.

  Attributes:
    path: Of the file.
    last_epoch: The last epoch on record when this object was made.
    table: The rows so far. Whoever evaluates sets its `last_evaluated`.
    manifest: The checksums.
  """

  def __init__(
      self,
      directory: str,
      labels: dict[str, str | int],
      cost: CommunicationCost,
      cohort_size: int,
      table: tables.Table | None = None,
      manifest: Manifest | None = None,
  ):
    """Opens the records of a run.

    Args:
      directory: Of the run.
      labels: What every row says about the run.
      cost: Rounds and bytes of an epoch.
      cohort_size: How many clients take part.
      table: The rows so far; `None` for those in the file that are whole.
      manifest: The checksums; `None` for those in the directory.
    """
    self._labels = labels
    self._cost = cost
    self._cohort_size = cohort_size
    self._directory = directory
    self.path = os.path.join(directory, tables.METRICS)
    self.manifest = manifest or Manifest(directory)
    self.table = table or tables.read_table(directory, self.manifest)[0]
    self.last_epoch = len(self.table.rows)
    # Rounds and bytes so far, by epoch.
    self._totals = {0: dict.fromkeys(_TOTALS, 0)}
    for epoch, row in enumerate(self.table.rows, start=1):
      self._totals[epoch] = {name: int(row[name]) for name in _TOTALS}
    self._tensorboard: tff.program.TensorBoardReleaseManager | None = None
    self._write_if_changed()

  def _write_if_changed(self) -> None:
    """Writes the files anew unless they have exactly the rows of the table."""
    lines = self.table.lines()
    content = files.read(self.path) if os.path.lexists(self.path) else b''
    is_right = content == b''.join(lines) and self.manifest.lines == [
        checksum(line) for line in lines
    ]
    if (content or self.table.rows) and not is_right:
      self.write()

  async def release(self, value: Value, key: int) -> None:
    """Releases the metrics of epoch `key`; epoch 0 has none."""
    if key == 0:
      return
    row = self._row(value, key)
    # Rows after the last checkpoint of a stopped run are computed again.
    del self.table.rows[key - 1 :]
    with errors.file_errors(os.path.join(self._directory, TENSORBOARD)):
      await self._show(row, key)
    with errors.file_errors(self.path):
      self.table.rows.append(
          {name: str(cell) for name, cell in {'epoch': key, **row}.items()}
      )
      self.write()
    check_finite(row | {'epoch': key}, self.path)

  def write(self) -> None:
    """Writes `metrics.csv`, and then its checksums."""
    lines = self.table.lines()
    files.write(self.path, b''.join(lines))
    self.manifest.set_lines(lines)
    self.manifest.evaluation = list(self.table.evaluation)
    self.manifest.last_evaluated = self.table.last_evaluated
    self.manifest.write()

  async def _show(self, row: Row, epoch: int) -> None:
    """Shows an epoch in TensorBoard; the first time, also all before it."""
    if self._tensorboard is None:
      folder = os.path.join(self._directory, TENSORBOARD)
      for old in glob.glob(os.path.join(glob.escape(folder), _EVENTS)):
        os.remove(old)
      self._tensorboard = tff.program.TensorBoardReleaseManager(folder)
      for k, earlier in enumerate(self.table.rows[: epoch - 1], start=1):
        numbers = {
            name: tables.to_number(text) for name, text in earlier.items()
        }
        del numbers['epoch']
        await self._tensorboard.release(self._shown(numbers), k)
    await self._tensorboard.release(self._shown(row), epoch)

  def _shown(self, row: Row) -> Row:
    # As arrays: TensorFlow cannot make a float32 of a large Python float.
    return {
        name: np.asarray(number)
        for name, number in row.items()
        if name not in self._labels
    }

  def _row(self, metrics: Value, epoch: int) -> Row:
    evaluation, training = {}, {}
    # `client_work` repeats metrics under the names of TFF's algorithms.
    named = {k: v for k, v in dict(metrics).items() if k != 'client_work'}
    for name, number in _scalars(named).items():
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
    seconds = training.get(SECONDS, training['training_time_in_seconds'])
    row: Row = {
        **self._totals[epoch],
        'seconds': round(seconds, 4),
        **self._labels,
    }
    # TFF's loop itself adds a time to the evaluation.
    for name in evaluation.keys() - _DROPPED:
      if name in row or name in training or name == 'epoch':
        raise ValueError(
            f'`evaluate` returns {name!r}, which is the name of a number of'
            ' each epoch: choose another one.'
        )
    for name, number in (evaluation | training).items():
      if name not in _DROPPED and name not in row:
        row[name] = number
        if name in evaluation and name not in self.table.evaluation:
          self.table.evaluation.append(name)
    return row


def check_finite(row: Row, path: str) -> None:
  """Raises a `NonFiniteError` if something in a row of `path` is not finite."""
  for name, number in row.items():
    if isinstance(number, float) and not math.isfinite(number):
      raise errors.NonFiniteError(
          f'epoch {row["epoch"]}: {name} is {number}; try smaller learning'
          ' rates',
          f'the metrics so far are in {path!r}',
      )


def summarize(rows: list[Row]) -> dict[str, dict[str, float]]:
  """The last and the best of each quantity of a run, and the best's epoch.

  Of accuracies and areas under a ROC curve the largest is the best, of all
  else the smallest. What a run has cost, and how many took part, has a last
  value only.
  """
  found = {}
  for name in dict.fromkeys(name for row in rows for name in row):
    if name in ('method', 'seed', 'epoch'):
      continue
    values = [(row[name], row['epoch']) for row in rows if name in row]
    if name in _COSTS:
      found[name] = {'last': values[-1][0]}
      continue
    pick = max if 'accuracy' in name or name.endswith('auc') else min
    finite = [pair for pair in values if math.isfinite(pair[0])]
    best, epoch = pick(finite or values, key=lambda pair: pair[0])
    found[name] = {'last': values[-1][0], 'best': best, 'best_epoch': epoch}
  return found
