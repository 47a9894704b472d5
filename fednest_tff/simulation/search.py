"""Search for hyper-parameters: the settings that were tried, and how they did.

Optuna proposes the settings and keeps them in a SQLite file. The first trial is
the start of every range, the second to the fifth are drawn at random, and the
others by the tree-structured Parzen estimator. Every proposal has a seed of its
own, so that a search that was killed goes on with the settings that it would
have tried anyway. A trial is stopped at a round if the best of its metric so
far is worse than the median, at that round, of the earlier trials that were not
stopped. Trials that are stopped or diverge count.
"""

from collections.abc import Iterator, Mapping
import contextlib
import math
import numbers
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
import warnings

import numpy as np

from fednest_tff.simulation import errors

if TYPE_CHECKING:  # Otherwise imported by those who search: it takes a second.
  import optuna

_RANDOM_TRIALS = 5
# A trial is never stopped before this part of its rounds, nor before so many
# others have finished or diverged.
_WARM_UP = 0.25
_OTHERS = 3

_DIVERGED = 'diverged'


class Range(NamedTuple):
  """The values that a positive number may take, on a logarithmic scale.

  Attributes:
    low: The smallest.
    high: The largest.
    start: The first that is tried.
  """

  low: float
  high: float
  start: float

  def check(self, name: str) -> None:
    """Raises a `ValueError` that names the range if it is none."""
    is_range = isinstance(self, Range) and all(
        isinstance(value, numbers.Real) and math.isfinite(value)
        for value in self
    )
    if not is_range or not 0 < self.low <= self.start <= self.high:
      raise ValueError(
          f'`{name}` must be a `simulation.Range` of finite numbers with 0 <'
          f' low <= start <= high; got {self!r}.'
      )

  def inverse(self) -> 'Range':
    """The range of the reciprocals."""
    return Range(1 / self.high, 1 / self.low, 1 / self.start)


# From the names of hyper-parameters to their ranges, or to fixed numbers.
Space: TypeAlias = Mapping[str, Range | float]


class StepRanges(NamedTuple):
  """The step sizes to search for a problem, the same for all methods.

  Attributes:
    inner: Of y.
    linear: Of v; the methods with a Neumann series have 1 / l in its place.
    outer: Of x.
    series_outer: Of x for the methods with a Neumann series, if they need
      other ones: with few terms, p is much smaller than v.
  """

  inner: Range
  linear: Range
  outer: Range
  series_outer: Range | None = None

  def checked(self, name: str) -> 'StepRanges':
    """The same with Python's own numbers, if all ranges are ranges.

    Args:
      name: What a message calls them.

    Returns:
      The ranges.

    Raises:
      ValueError: If something else is given.
    """
    if not isinstance(self, StepRanges):
      raise ValueError(
          f'`{name}` must be `simulation.StepRanges`; got {self!r}.'
      )
    found: dict[str, Range] = {}
    for field, steps in self._asdict().items():
      if field != 'series_outer' or steps is not None:
        Range.check(steps, f'{name}.{field}')
        found[field] = Range(*map(float, steps))
    return StepRanges(**found)

  def as_lists(self) -> dict[str, list[float] | None]:
    """The ranges by name, as JSON has them."""
    return {
        name: None if steps is None else list(steps)
        for name, steps in self._asdict().items()
    }


# The weight of the penalty method.
_PENALTY = Range(3.0, 300.0, 10.0)


def space_of(hparams: Mapping[str, object], steps: StepRanges) -> Space:
  """The search space of a method, from the names of its hyper-parameters.

  Args:
    hparams: As `process.get_hparams` gives them.
    steps: The ranges of the problem.

  Returns:
    A range for each step size, for l and for the weight of a penalty; other
    hyper-parameters stay as they are.
  """
  outer = steps.outer
  if steps.series_outer is not None and 'smoothness' in hparams:
    outer = steps.series_outer
  known = {
      'inner_learning_rate': steps.inner,
      'linear_learning_rate': steps.linear,
      'smoothness': steps.linear.inverse(),
      'outer_learning_rate': outer,
      'penalty': _PENALTY,
  }
  return {name: known[name] for name in known if name in hparams}


class Tried(NamedTuple):
  """A setting that was tried.

  Attributes:
    number: Of the trial, from 0.
    hparams: The setting.
    outcome: 'finished', 'stopped', 'diverged' or 'running'.
    value: The metric in the end, or where the trial was stopped; `None` if it
      diverged or is running.
    rounds: The round of the last evaluation.
    reason: Of a divergence.
  """

  number: int
  hparams: dict[str, float]
  outcome: str
  value: float | None
  rounds: int
  reason: str = ''


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps Optuna from telling what the comparison tells itself."""
  import optuna

  optuna.logging.set_verbosity(optuna.logging.ERROR)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', optuna.exceptions.ExperimentalWarning)
    yield


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
  """Says in one line that the file of the trials cannot be used."""
  import optuna
  import sqlalchemy

  try:
    yield
  except (
      sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError
  ) as error:
    # What SQLite itself says, such as 'database or disk is full'.
    reason = str(getattr(error.__cause__ or error, 'orig', error))
    raise errors.RunError(
        f'{path!r} is damaged, or cannot be written ({reason.splitlines()[0]}):'
        ' free the disk or put an older copy in its place; `overwrite` starts'
        ' anew'
    ) from error


class Search:
  """The trials of one method, in a file that may have those of others."""

  def __init__(
      self,
      path: str,
      name: str,
      space: Space,
      larger_is_better: bool,
      rounds: int,
      seed: int = 0,
  ):
    """Opens the search, or begins it.

    Args:
      path: Of the SQLite file.
      name: Of the search in that file.
      space: What to try. The fixed numbers are part of every setting.
      larger_is_better: Whether the metric is to be large.
      rounds: Communication rounds of a trial that is not stopped.
      seed: Of the proposals.

    Raises:
      RunError: If the file is damaged or cannot be written.
    """
    import optuna

    self._ranges = {
        k: v for k, v in space.items() if isinstance(v, Range)
    }
    self._fixed = {
        k: float(v) for k, v in space.items() if not isinstance(v, Range)
    }
    self._sign = 1 if larger_is_better else -1
    self._seed = seed
    with _quiet(), _readable(path):
      self._study = optuna.create_study(
          storage=optuna.storages.RDBStorage(f'sqlite:///{path}'),
          study_name=name,
          direction='maximize' if larger_is_better else 'minimize',
          pruner=optuna.pruners.MedianPruner(
              n_startup_trials=_OTHERS, n_warmup_steps=int(_WARM_UP * rounds)
          ),
          load_if_exists=True,
      )

  def _distributions(
      self,
  ) -> 'dict[str, optuna.distributions.BaseDistribution]':
    from optuna import distributions

    return {
        name: distributions.FloatDistribution(low, high, log=True)
        for name, (low, high, _) in self._ranges.items()
    }

  def next(self) -> 'RunningTrial':
    """The trial that was interrupted, or else a new one."""
    import optuna

    for trial in self._study.trials:
      if trial.state == optuna.trial.TrialState.RUNNING:
        # A killed process may have left it without some of its numbers.
        if trial.params.keys() == self._ranges.keys():
          return self._running(optuna.trial.Trial(self._study, trial._trial_id))
        self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    number = len(self.tried())
    key = np.random.SeedSequence([self._seed, number])
    self._study.sampler = optuna.samplers.TPESampler(
        seed=int(key.generate_state(1)[0]), n_startup_trials=_RANDOM_TRIALS
    )
    with _quiet():
      waiting = self._study.get_trials(
          states=[optuna.trial.TrialState.WAITING]
      )
      if number == 0 and not waiting:
        self._study.enqueue_trial(
            {name: start for name, (_, _, start) in self._ranges.items()}
        )
      return self._running(self._study.ask(self._distributions()))

  def _running(self, trial: 'optuna.trial.Trial') -> 'RunningTrial':
    # Those that failed do not count, so numbers have no gaps.
    number = sum(t.number < trial.number for t in self._kept())
    return RunningTrial(
        trial, number, self._fixed | trial.params, self._sign
    )

  def _kept(self) -> 'list[optuna.trial.FrozenTrial]':
    from optuna.trial import TrialState

    return [
        t for t in self._study.trials
        if t.state not in (TrialState.FAIL, TrialState.WAITING)
    ]

  def tried(self) -> list[Tried]:
    """All trials so far."""
    from optuna.trial import TrialState

    found = []
    for number, trial in enumerate(self._kept()):
      reported = sorted(trial.intermediate_values.items())
      rounds, last = reported[-1] if reported else (0, None)
      reason = trial.user_attrs.get(_DIVERGED, '')
      outcome, value = 'finished', trial.value
      if trial.state == TrialState.RUNNING:
        outcome, value = 'running', None
      elif reason:
        outcome, value = 'diverged', None
      elif trial.state == TrialState.PRUNED:
        outcome, value = 'stopped', last
      found.append(
          Tried(
              number, self._fixed | trial.params, outcome, value, rounds, reason
          )
      )
    return found

  def best(self) -> Tried | None:
    """The best of the trials that were finished, the first of equals."""
    finished = [t for t in self.tried() if t.outcome == 'finished']
    if not finished:
      return None
    return max(finished, key=lambda t: (self._sign * (t.value or 0), -t.number))


class RunningTrial:
  """A setting that is being tried.

  Attributes:
    number: From 0.
    hparams: The setting.
  """

  def __init__(
      self,
      trial: 'optuna.trial.Trial',
      number: int,
      hparams: dict[str, float],
      sign: int,
  ):
    self._trial = trial
    self._sign = sign
    self.number = number
    self.hparams = hparams

  def report(self, rounds: int, value: float) -> bool:
    """Notes the metric at a round; returns whether to stop."""
    if not math.isfinite(value):
      return False  # The training will raise an error.
    known = self._trial.study.trials[self._trial.number].intermediate_values
    if rounds not in known:  # A resumed trial repeats some rounds.
      self._trial.report(value, rounds)
    return self._trial.should_prune()

  def finish(self, value: float) -> None:
    """Ends the trial with its metric."""
    self._trial.study.tell(self._trial, value)

  def stop(self) -> None:
    """Ends the trial before its last round."""
    from optuna.trial import TrialState

    self._trial.study.tell(self._trial, state=TrialState.PRUNED)

  def diverge(self, reason: str) -> None:
    """Ends the trial as worse than any other."""
    self._trial.set_user_attr(_DIVERGED, reason)
    self._trial.study.tell(self._trial, -self._sign * math.inf)
