"""Methods compared at equal rounds, bytes and computation: the numbers."""

from collections.abc import Callable, Mapping, Sequence
import math
import statistics
from typing import NamedTuple

import numpy as np

from fednest_tff.simulation.client_work import ClientWork
from fednest_tff.simulation.plots import Curve
from fednest_tff.simulation.search import Space, Tried
from fednest_tff.simulation.tables import Row

# Fixed rounds at which methods are compared.
MARKS = (100, 250, 500, 1000)

_MEGA = 1e6
# Larger numbers are written with an exponent.
_LARGEST = 1e9


class Facts(NamedTuple):
  """What is known of a method before it has run.

  Attributes:
    label: Its name in tables and plots.
    rounds_per_epoch: Communication rounds.
    work: What a client computes in an epoch.
    space: What was searched.
  """

  label: str
  rounds_per_epoch: int
  work: ClientWork
  space: Space


class Outcome(NamedTuple):
  """The outcome of one method.

  Attributes:
    facts: What is known of it.
    tried: The settings that were tried.
    chosen: The best one; `None` if none was finished.
    runs: The rows of the final runs, one list per seed. Rows have the column
      `example_gradients`, those of one client so far.
    failures: For each seed that diverged, what was not finite.
  """

  facts: Facts
  tried: list[Tried]
  chosen: Tried | None
  runs: list[list[Row]]
  failures: dict[int, str]


class Cost(NamedTuple):
  """A cost at which methods are compared, such as communication rounds.

  Attributes:
    name: Its name in the tables.
    label: The label of its axis.
    of: From a row to the cost so far.
  """

  name: str
  label: str
  of: Callable[[Row], float]


COSTS = (
    Cost('rounds', 'communication rounds', lambda r: r['communication_rounds']),
    Cost(
        'megabytes',
        'megabytes, up and down, all clients',
        lambda r: (r['bytes_up'] + r['bytes_down']) / _MEGA,
    ),
    Cost(
        'client gradients',
        'gradients of an example, per client',
        lambda r: r['example_gradients'],
    ),
)


def value_at(
    rows: Sequence[Row], curve: Curve, cost: Cost, mark: float
) -> float | None:
  """The metric at a cost, read off the line that joins the evaluations.

  Args:
    rows: Of a run.
    curve: The metric; its logarithm is interpolated where it is drawn so.
    cost: The kind of cost.
    mark: The cost.

  Returns:
    The metric; after the last evaluation, that one; `None` before the first.
  """
  evaluated = [row for row in rows if curve.column in row]
  at = [cost.of(row) for row in evaluated]
  if not at or mark < at[0]:
    return None
  values = np.array([row[curve.column] for row in evaluated], float)
  # A run that diverged may end with what is not finite.
  if curve.logarithmic and (values[np.isfinite(values)] > 0).all():
    found = math.exp(np.interp(mark, at, np.log(values)))
  else:
    found = float(np.interp(mark, at, values))
  return found if math.isfinite(found) else None


def _values_at(
    outcome: Outcome, curve: Curve, cost: Cost, mark: float
) -> list[float | None]:
  """`value_at` for each seed; `None` for one that has diverged before."""
  return [
      None
      # Its last row may be the one in which it diverged.
      if seed in outcome.failures and (not rows or cost.of(rows[-1]) <= mark)
      else value_at(rows, curve, cost, mark)
      for seed, rows in enumerate(outcome.runs)
  ]


def cost_to(
    rows: Sequence[Row],
    column: str,
    cost: Cost,
    target: float,
    larger_is_better: bool,
) -> float | None:
  """The cost at the first evaluation that reaches `target`, or `None`."""
  for row in rows:
    if column in row:
      value = row[column]
      if value >= target if larger_is_better else value <= target:
        return cost.of(row)
  return None


def _digits(number: float, count: int) -> str:
  """A number with so many digits, without an exponent if it is a cost."""
  rounded = float(f'{number:.{count}g}')
  if 1 <= abs(rounded) < _LARGEST and rounded == int(rounded):
    return f'{rounded:,.0f}'
  return f'{number:.{count}g}'


class Mean(NamedTuple):
  """A mean over seeds.

  Attributes:
    mean: The mean of the seeds that have a value; `None` if none has.
    error: The standard error of the mean; `None` below two values.
    num_values: How many have a value.
    num_seeds: How many seeds there are.
  """

  mean: float | None
  error: float | None
  num_values: int
  num_seeds: int

  def to_text(self) -> str:
    if self.mean is None:
      return '-'
    text = _digits(self.mean, 4)
    if self.error is not None:
      text += f' ± {_digits(self.error, 1)}'
    if self.num_values < self.num_seeds:
      text += f' ({self.num_values} of {self.num_seeds})'
    return text


def mean_of(values: Sequence[float | None]) -> Mean:
  """Mean and standard error of the values that are there."""
  found = [value for value in values if value is not None]
  error = None
  if len(found) > 1:
    error = statistics.stdev(found) / math.sqrt(len(found))
  mean = statistics.fmean(found) if found else None
  return Mean(mean, error, len(found), len(values))


def _round_up(number: float) -> float:
  """Rounds up to two significant digits."""
  if number <= 0:
    return 0.0
  unit = 10.0 ** (math.floor(math.log10(number)) - 1)
  return math.ceil(number / unit - 1e-9) * unit


def marks_of(
    outcomes: Mapping[str, Outcome], rounds: int
) -> dict[str, list[float]]:
  """The marks at which methods are compared, by the name of the cost.

  For rounds they are the `MARKS` below `rounds`, and `rounds` itself. For any
  other cost they are the same fractions of what the cheapest method needs for
  all of its rounds.
  """
  at_rounds = sorted({float(m) for m in MARKS if m < rounds} | {float(rounds)})
  found = {COSTS[0].name: at_rounds}
  for cost in COSTS[1:]:
    totals = [
        cost.of(rows[-1])
        for outcome in outcomes.values()
        for seed, rows in enumerate(outcome.runs)
        if rows and seed not in outcome.failures
    ]
    if totals:
      # Two marks may be the same after rounding.
      found[cost.name] = list(dict.fromkeys(
          _round_up(min(totals) * mark / rounds) for mark in at_rounds
      ))
  return found


class Standing(NamedTuple):
  """A line of the leaderboard's file.

  Attributes:
    method: The name of the method.
    axis: The name of the cost, or 'NAME to target'.
    at: The mark, or the target.
    mean: The mean over seeds.
  """

  method: str
  axis: str
  at: float
  mean: Mean


def standings(
    outcomes: Mapping[str, Outcome],
    curve: Curve,
    larger_is_better: bool,
    rounds: int,
    target: float | None,
) -> list[Standing]:
  """All numbers of the leaderboard, the best method first."""
  marks = marks_of(outcomes, rounds)
  found: dict[str, list[Standing]] = {}
  for name, outcome in outcomes.items():
    lines = [
        Standing(
            name,
            cost.name,
            mark,
            mean_of(_values_at(outcome, curve, cost, mark)),
        )
        for cost in COSTS
        for mark in marks.get(cost.name, ())
    ]
    if target is not None:
      lines += [
          Standing(name, f'{cost.name} to target', target, mean_of([
              cost_to(rows, curve.column, cost, target, larger_is_better)
              for rows in outcome.runs
          ]))
          for cost in COSTS
      ]
    found[name] = lines
  sign = -1 if larger_is_better else 1

  def rank(name: str) -> tuple[bool, float]:
    final = found[name][len(marks[COSTS[0].name]) - 1].mean
    diverged = final.mean is None or bool(outcomes[name].failures)
    return diverged, sign * final.mean if final.mean is not None else 0.0

  return [line for name in sorted(found, key=rank) for line in found[name]]
