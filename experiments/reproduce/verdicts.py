"""How numbers over seeds become a verdict.

A difference counts as clear if it is large enough and twice its standard error
over the seeds (with one seed, the first alone).
"""

from collections.abc import Mapping
import math
import statistics
from typing import Any, NamedTuple, TypeAlias

from experiments.reproduce.figures import Rows, Runs, last
from experiments.reproduce.sets import Key

# What JSON can hold, by name: texts, numbers, and lists and dictionaries of
# them.
Record: TypeAlias = dict[str, Any]
# What was measured for a claim, by name.
Measured: TypeAlias = Mapping[str, 'Value | float']

HOLDS, WEAKLY, FAILS = 'holds', 'holds weakly', 'does not hold'
# How many points of accuracy are better, and how many are much better.
CLEAR, MUCH = 0.01, 0.02


class Value(NamedTuple):
  """Mean and standard deviation over seeds."""

  mean: float
  deviation: float
  count: int  # type: ignore[assignment]  # It hides `tuple.count`.

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


def final(runs: Runs, column: str) -> Value:
  """A column's last values; 0 where it diverged before it had one."""
  found = last(runs, column)
  return over_seeds(found + [0.0] * (len(runs) - len(found)))


def best(runs: Runs, column: str) -> Value:
  """A column's largest values."""
  values = [[row[column] for row in rows if column in row] for rows in runs]
  return over_seeds([max(found) for found in values if found])


def at_rounds(runs: Runs, column: str, rounds: int) -> Value:
  """A column when so many communication rounds were over."""
  found = []
  for rows in runs:
    values = [
        row[column] for row in rows
        if row['communication_rounds'] <= rounds and column in row
    ]
    found.append(values[-1] if values else 0.0)
  return over_seeds(found)


def variation(runs: Runs, column: str) -> Value:
  """How much a column still varies in the last third of a run."""
  found = []
  for rows in runs:
    values = [row[column] for row in rows if column in row]
    found.append(statistics.pstdev(values[-math.ceil(len(values) / 3):] or [0]))
  return over_seeds(found)


def gain(a: Value, b: Value) -> Value:
  """a - b."""
  deviation = math.hypot(a.deviation, b.deviation)
  return Value(a.mean - b.mean, deviation, min(a.count, b.count))


def is_larger(a: Value, b: Value, clear: float = CLEAR) -> str:
  """Whether a > b, clearly or at all."""
  difference = a.mean - b.mean
  error = math.sqrt(
      sum(v.deviation**2 / max(1, v.count - 1) for v in (a, b))
  )
  if difference >= clear and difference >= 2 * error:
    return HOLDS
  return WEAKLY if difference > 0 else FAILS


def is_near(a: Value, b: Value, near: float = 0.01) -> str:
  """Whether a and b differ by no more than `near`; weakly, three times that."""
  difference = abs(a.mean - b.mean)
  if difference <= near:
    return HOLDS
  return WEAKLY if difference <= 3 * near else FAILS


def is_as_good(a: Value, b: Value, near: float = 0.01) -> str:
  """Whether a is not below b by more than `near`."""
  return HOLDS if a.mean >= b.mean else is_near(a, b, near)


def worst(*verdicts: str) -> str:
  """Of several parts of a claim."""
  order = (HOLDS, WEAKLY, FAILS)
  return max(verdicts, key=order.index)


def at_same_rounds(rows: Rows, keys: list[Key], column: str) -> list[Value]:
  """The values of runs when the one with the fewest rounds is over.

  A run that diverged is shorter than the others. It does not cut them short: it
  keeps its last value.
  """
  ends = {key: [run[-1] for run in rows[key] if run] for key in keys}
  epochs = max(
      (end['epoch'] for found in ends.values() for end in found), default=0
  )
  rounds = min(
      (
          found[0]['communication_rounds'] * epochs // found[0]['epoch']
          for found in ends.values() if found
      ),
      default=0,
  )
  return [at_rounds(rows[key], column, rounds) for key in keys]


def is_smaller(a: float, b: float, factor: float = 2.0) -> str:
  """Whether a < b: clearly if by `factor`."""
  if a <= b / factor:
    return HOLDS
  return WEAKLY if a < b else FAILS


def plain(value: Value | float) -> Record | float:
  """What JSON can hold."""
  return value._asdict() if isinstance(value, Value) else value


def shown(value: Value | float) -> str:
  """For people."""
  return value.shown() if isinstance(value, Value) else f'{value:.3g}'
