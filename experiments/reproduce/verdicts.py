"""How numbers over seeds become a verdict.

A difference counts as clear if it is at least `_CLEAR` and twice its standard
error over the seeds (with one seed, the first alone).
"""

import math
import statistics
from typing import Any, NamedTuple

from experiments.reproduce.figures import Rows, last

HOLDS, WEAKLY, FAILS = 'holds', 'holds weakly', 'does not hold'
_CLEAR = 0.01


class Value(NamedTuple):
  """Mean and standard deviation over seeds."""

  mean: float
  deviation: float
  count: int

  def shown(self) -> str:
    if self.count > 1:
      return f'{self.mean:.4g} ± {self.deviation:.2g}'
    return f'{self.mean:.4g}'


def over_seeds(numbers: list[float]) -> Value:
  """The value of one number per seed."""
  if not numbers:
    return Value(math.nan, math.nan, 0)
  return Value(
      statistics.fmean(numbers), statistics.pstdev(numbers), len(numbers)
  )


def final(runs: list, column: str) -> Value:
  """A column's last values; 0 where it diverged before it had one."""
  found = last(runs, column)
  return over_seeds(found + [0.0] * (len(runs) - len(found)))


def best(runs: list, column: str) -> Value:
  """A column's largest values."""
  values = [[row[column] for row in rows if column in row] for rows in runs]
  return over_seeds([max(found) for found in values if found])


def at_rounds(runs: list, column: str, rounds: int) -> Value:
  """A column when so many communication rounds were over."""
  found = []
  for rows in runs:
    values = [
        row[column] for row in rows
        if row['communication_rounds'] <= rounds and column in row
    ]
    found.append(values[-1] if values else 0.0)
  return over_seeds(found)


def is_larger(a: Value, b: Value) -> str:
  """Whether a > b, clearly or at all."""
  difference = a.mean - b.mean
  error = math.sqrt(
      sum(v.deviation**2 / max(1, v.count - 1) for v in (a, b))
  )
  if difference >= _CLEAR and difference >= 2 * error:
    return HOLDS
  return WEAKLY if difference > 0 else FAILS


def is_near(a: Value, b: Value, near: float = 0.01) -> str:
  """Whether a and b differ by no more than `near`; weakly, three times that."""
  difference = abs(a.mean - b.mean)
  if difference <= near:
    return HOLDS
  return WEAKLY if difference <= 3 * near else FAILS


def worst(*verdicts: str) -> str:
  """Of several parts of a claim."""
  order = (HOLDS, WEAKLY, FAILS)
  return max(verdicts, key=order.index)


def at_same_rounds(rows: Rows, keys: list, column: str) -> list[Value]:
  """The values of runs when the shortest of them has no more rounds."""
  rounds = min(
      (
          run[-1]['communication_rounds']
          for key in keys for run in rows[key] if run
      ),
      default=0,
  )
  return [at_rounds(rows[key], column, rounds) for key in keys]


def is_smaller(a: float, b: float) -> str:
  """Whether a < b: clearly if by a factor of two."""
  if a <= b / 2:
    return HOLDS
  return WEAKLY if a < b else FAILS


def plain(value: Any) -> Any:
  """What JSON can hold."""
  return value._asdict() if isinstance(value, Value) else value


def shown(value: Any) -> str:
  """For people."""
  return value.shown() if isinstance(value, Value) else f'{value:.3g}'
