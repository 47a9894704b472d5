"""Final runs of a comparison that diverged: why, and their rows until then."""

import os

from fednest_tff.simulation import errors, files, tables
from fednest_tff.simulation.manifest import Manifest
from fednest_tff.simulation.metric_values import bounded
from fednest_tff.simulation.tables import Row

_NOT_FINITE = 'not_finite.json'


def mark(path: str, reason: str) -> None:
  """Keeps in the directory of a run why it diverged."""
  with errors.file_errors(path):
    files.write_json(os.path.join(path, _NOT_FINITE), reason)


def is_marked(path: str) -> bool:
  """Whether the run in a directory has diverged."""
  return os.path.exists(os.path.join(path, _NOT_FINITE))


def _read_reason(path: str) -> str:
  try:
    with errors.file_errors(path, 'read'):
      return str(files.read_json(path))
  except ValueError as error:
    raise errors.RunError(
        f'{path!r} is damaged: delete it, and the run is made again'
    ) from error


def read(path: str, column: str, epochs: int) -> tuple[list[Row], str]:
  """The rows of a run until its metric grew too large, and why it diverged.

  Args:
    path: The directory of the run.
    column: The metric.
    epochs: How many it was to have.

  Returns:
    The rows, and the reason.

  Raises:
    RunError: If a file is damaged or cannot be read, or if the run has more
      epochs than it was to have.
  """
  table, damage = tables.read_table(path, Manifest(path))
  if damage:
    raise errors.RunError(
        f'{damage}: delete {path!r}, and the run is made again'
    )
  tables.check_length(path, table, epochs)
  metrics = os.path.join(path, tables.METRICS)
  rows = tables.read_rows(metrics) if os.path.exists(metrics) else []
  return bounded(rows, column), _read_reason(os.path.join(path, _NOT_FINITE))
