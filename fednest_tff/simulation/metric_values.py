"""With which value of its metric a run counts, and whether it diverged."""

import statistics

from fednest_tff.simulation import errors
from fednest_tff.simulation.tables import Row

# A trial's value is the mean of its last evaluations: single ones are noisy.
_LAST_EVALUATIONS = 3
# A run has diverged if its metric grows to so many times its first value, or to
# so much, if the first value is below 1.
_DIVERGED = 1e6


def value_of(rows: list[Row], column: str) -> float:
  """The mean of a column over the last evaluations of a run."""
  values = [row[column] for row in rows if column in row]
  return statistics.fmean(values[-_LAST_EVALUATIONS:])


def bounded(rows: list[Row], column: str) -> list[Row]:
  """The rows of a run until its metric is a million times its first value."""
  first = None
  for k, row in enumerate(rows):
    if column in row:
      first = abs(row[column]) if first is None else first
      if abs(row[column]) > _DIVERGED * max(first, 1.0):
        return rows[:k]
  return rows


def check_growth(rows: list[Row], column: str) -> None:
  """Raises `NonFiniteError` if a metric grew to a million times that."""
  count = len(bounded(rows, column))
  if count < len(rows):
    # The first that is too large: it stays the same if the run goes on.
    raise errors.NonFiniteError(
        f'{column} grew to {abs(rows[count][column]):.0e}'
    )
