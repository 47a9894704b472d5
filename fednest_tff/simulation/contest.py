"""What is compared, and how far: a problem, the methods, the rounds."""

from collections.abc import Callable, Mapping, Sequence
import math
import numbers
import re
from typing import NamedTuple

import numpy as np

from fednest_tff.simulation.plots import Curve
from fednest_tff.simulation.search import StepRanges
from fednest_tff.simulation.training import Trial
from fednest_tff.structures import Value

_NAME = re.compile(r'\w[\w.:+-]{0,99}', re.ASCII)
_BREAKS = re.compile(r'[|\r\n]')


class Contest(NamedTuple):
  """A problem on which methods are compared.

  Attributes:
    make_trial: From a seed, and from whether the trial serves for tuning, to
      the trial. Trials for tuning must not touch the test data.
    curve: The metric: a column of the evaluation, with a label.
    larger_is_better: Whether the metric is to be large.
    steps: The step sizes to search, the same for all methods.
    target: A value of the metric; the cost of reaching it is reported.
  """

  make_trial: Callable[[int, bool], Trial]
  curve: Curve
  larger_is_better: bool
  steps: StepRanges
  target: float | None = None

  def checked(self) -> 'Contest':
    """The same with Python's own numbers, if all parts fit.

    Returns:
      The contest.

    Raises:
      ValueError: If a part does not fit.
    """
    if not isinstance(self, Contest):
      raise ValueError(
          f'`contest` must be a `simulation.Contest`; got {self!r}.'
      )
    if not callable(self.make_trial):
      raise ValueError(
          f'`make_trial` must be a function; got {self.make_trial!r}.'
      )
    if not isinstance(self.curve, Curve) or not _is_line(self.curve.column):
      raise ValueError(
          '`curve` must be a `simulation.Curve` whose column is a line of text'
          f' without |; got {self.curve!r}.'
      )
    if not isinstance(self.larger_is_better, bool | np.bool_):
      raise ValueError(
          '`larger_is_better` must be True or False; got'
          f' {self.larger_is_better!r}.'
      )
    target = self.target
    if target is not None:
      if not _is_finite(target):
        raise ValueError(f'`target` must be a finite number; got {target!r}.')
      target = float(target)
    return self._replace(
        steps=StepRanges.checked(self.steps, 'steps'),
        larger_is_better=bool(self.larger_is_better),
        target=target,
    )

  def checked_trial(self, seed: int, is_tuning: bool) -> Trial:
    """A trial whose evaluations are refused if they lack the metric.

    Args:
      seed: Of the trial.
      is_tuning: Whether it serves for tuning.

    Returns:
      The trial.
    """
    trial = self.make_trial(seed, is_tuning)
    if not isinstance(trial, Trial):
      raise ValueError(
          f'`make_trial` must return a `simulation.Trial`; got {trial!r}.'
      )
    column = self.curve.column

    def evaluate(weights: Value) -> dict[str, float]:
      found = trial.evaluate(weights)
      if column not in found:
        raise ValueError(
            f'`curve.column` {column!r} is none of what is evaluated:'
            f' {", ".join(found)}.'
        )
      value = np.asarray(found[column])
      if value.ndim or value.dtype.kind not in 'iuf':
        raise ValueError(
            f'`curve.column` {column!r} must be evaluated as a number; got'
            f' {found[column]!r}.'
        )
      return found

    return trial._replace(evaluate=evaluate)

  def tuning(self) -> dict[str, object]:
    """What decides which settings are tried and chosen, as JSON has it."""
    return {
        'metric': self.curve.column,
        'larger_is_better': self.larger_is_better,
        'step_ranges': self.steps.as_lists(),
    }


class Entry(NamedTuple):
  """A method that takes part.

  Attributes:
    label: Its name in tables and plots.
    method: What the trials' `build` is asked for.
    fixed: Hyper-parameters that are not searched, by name. A method with
      nothing to search has one trial.
    steps: The step sizes to search if they are not those of the contest. A
      baseline without x may have the model for its outer variable.
  """

  label: str
  method: str
  fixed: Mapping[str, float] = {}
  steps: StepRanges | None = None


def _is_line(text: object) -> bool:
  return isinstance(text, str) and bool(text.strip()) and not (
      _BREAKS.search(text)
  )


def _is_finite(number: object) -> bool:
  return (
      isinstance(number, numbers.Real)
      and not isinstance(number, bool)
      and math.isfinite(number)
  )


def file_name(name: str) -> str:
  """A name for files; a method may be 'package.module:builder'."""
  return name.replace(':', '.')


def _check_entry(name: str, entry: Entry) -> None:
  where = f'`entries[{name!r}]`'
  if not isinstance(entry, Entry):
    raise ValueError(f'{where} must be a `simulation.Entry`; got {entry!r}.')
  label = entry.label
  if not _is_line(label):
    raise ValueError(
        f'The label of {where} must be a line of text without |, which ends a'
        f' cell of a table; got {label!r}.'
    )
  if not isinstance(entry.fixed, Mapping):
    raise ValueError(
        f'`fixed` of {where} must be a mapping; got {entry.fixed!r}.'
    )
  for key, value in entry.fixed.items():
    if not _is_finite(value):
      raise ValueError(
          f'`fixed` of {where}: {key!r} must be a finite number; got'
          f' {value!r}.'
      )


def checked_entries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
  """The methods of a comparison, if they can be told apart.

  Args:
    entries: The methods, by names that are used for files.

  Returns:
    The same, with Python's own numbers.

  Raises:
    ValueError: If a name, a label or a number does not fit.
  """
  if not isinstance(entries, Mapping) or not entries:
    raise ValueError(
        '`entries` must be a mapping with at least one method; got'
        f' {entries!r}.'
    )
  labels: dict[str, str] = {}
  folders: dict[str, str] = {}
  for name, entry in entries.items():
    if not isinstance(name, str) or not _NAME.fullmatch(name):
      raise ValueError(
          f'The name {name!r} in `entries` must have 1 to 100 letters, digits'
          ' and _ . : + -, and start with one of the first three: files are'
          ' named after it.'
      )
    _check_entry(name, entry)
    for seen, key, what in (
        # Some file systems do not tell A from a.
        (folders, file_name(name).lower(), 'files'),
        (labels, entry.label, 'label'),
    ):
      other = seen.setdefault(key, name)
      if other != name:
        raise ValueError(
            f'{other!r} and {name!r} in `entries` would have the same {what},'
            f' {key!r}.'
        )
  return {
      name: entry._replace(
          fixed={key: float(value) for key, value in entry.fixed.items()},
          steps=entry.steps and StepRanges.checked(
              entry.steps, f'entries[{name!r}].steps'
          ),
      )
      for name, entry in entries.items()
  }


def _count(number: int, word: str) -> str:
  return f'{number:,} {word}' + ('s' if number != 1 else '')


class Plan(NamedTuple):
  """How far a comparison goes.

  Attributes:
    rounds: Communication rounds of the final runs.
    tuning_rounds: Communication rounds of a trial.
    budget: Trials per method.
    seeds: How many seeds the chosen settings run on, from 0.
    rounds_per_evaluation: Communication rounds between evaluations, at most,
      if a method's epoch does not have more.
    tuning_seed: Of the trials' clients and draws; not one of `seeds`.
    tuning_seeds: How many seeds a trial runs on, from `tuning_seed`. On one
      alone, the best setting may be one that diverges on another.
  """

  rounds: int
  tuning_rounds: int
  budget: int
  seeds: int = 3
  rounds_per_evaluation: int = 10
  tuning_seed: int = 1000
  tuning_seeds: int = 1

  def check(self) -> None:
    """Raises a `ValueError` if a number does not fit."""
    for name, value in self._asdict().items():
      is_integer = isinstance(value, numbers.Integral)
      if isinstance(value, bool) or not is_integer or value < 1:
        raise ValueError(
            f'`{name}` must be an integer of at least 1; got {value!r}.'
        )
    if self.tuning_seed < self.seeds:
      raise ValueError(
          f'`seeds` must be at most {self.tuning_seed}, from which on seeds are'
          f' for tuning; got {self.seeds}.'
      )

  def check_epoch(self, label: str, rounds_per_epoch: int) -> None:
    """Raises a `ValueError` if an epoch of a method does not fit.

    Args:
      label: Of the method.
      rounds_per_epoch: Its communication rounds.
    """
    for name in ('rounds', 'tuning_rounds'):
      value = getattr(self, name)
      if value < rounds_per_epoch:
        raise ValueError(
            f'`{name}` must be at least {rounds_per_epoch}, the rounds of one'
            f' epoch of {label}; got {value}.'
        )

  def tuning(self) -> dict[str, int]:
    """What trials depend on: it stays as it is when a comparison grows."""
    return {
        name: value
        for name, value in self._asdict().items()
        if name not in ('rounds', 'seeds')
    }

  def describe(self, missing: Sequence[str] = ()) -> str:
    """How the numbers of the tables are made, in a few sentences.

    Args:
      missing: Labels of methods that are not done yet.

    Returns:
      The sentences.
    """
    unfinished = ''
    if missing:
      unfinished = (
          f'**Not done yet, and not in the tables: {", ".join(missing)}.** The'
          ' plot is drawn when all methods are done. '
      )
    return unfinished + (
        f'Every method had {_count(self.budget, "trial")} (one if it has'
        ' nothing to search) of'
        f' {_count(self.tuning_rounds, "communication round")} with'
        f' {_count(self.tuning_seeds, "other seed")}, on the data for tuning. A'
        ' trial that was never as good as the median of the earlier ones was'
        ' stopped; those that were stopped or diverged count. The best setting'
        f' ran for {_count(self.rounds, "round")} on'
        f' {_count(self.seeds, "seed")}. Means ± standard errors over the'
        ' seeds. Between two evaluations, numbers are read off the line that'
        ' joins them; a run that needs less than a mark in all of its rounds'
        ' counts there with its end. Costs until a target are those of the'
        ' first evaluation that is there. A dash: nothing was evaluated yet,'
        ' the runs had diverged, or the target was not reached.'
    )
