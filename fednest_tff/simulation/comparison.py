"""Comparison of methods on one problem, at equal tuning.

Every method gets the same number of trials on held-out data. The best setting
of each then runs on several seeds. Step sizes are numbers in the state, so a
method is compiled once per problem. All of it is on disk: what was killed goes
on where it stopped, in the middle of a trial, too.
"""

from collections.abc import Mapping, Sequence
import os
import shutil
import statistics
import sys

import tensorflow_federated as tff
import tqdm

from fednest_tff.simulation import (
    diverged_runs,
    errors,
    files,
    leaderboard_page,
    method_facts,
    records,
    run_directory,
    tables,
)
from fednest_tff.simulation.checkpoints import CHECKPOINTS
from fednest_tff.simulation.contest import (
    Contest,
    Entry,
    Plan,
    checked_entries,
    file_name,
)
from fednest_tff.simulation.leaderboard import Facts, Outcome
from fednest_tff.simulation.metric_values import check_growth, value_of
from fednest_tff.simulation.search import Range, Search
from fednest_tff.simulation.tables import Row
from fednest_tff.simulation.training import Trial
from fednest_tff.simulation.tuned_runs import TunedRuns, epochs_of, is_done

SEARCH = 'search.db'
_FACTS = 'facts'
_HPARAMS = 'hparams.json'
_KEPT_FUNCTIONS = 4


class _StopTrialError(Exception):
  """Ends a trial that is worse than the others."""


def _free_functions() -> None:
  """Frees what was compiled for methods that are done."""
  context = tff.framework.get_context_stack().current
  runtime = getattr(context, 'runtime', None)
  if runtime is not None:
    runtime.forget(keep=_KEPT_FUNCTIONS)


class _Comparison:
  """One method of a comparison after the other, in an open directory."""

  def __init__(
      self,
      contest: Contest,
      plan: Plan,
      directory: run_directory.RunDirectory,
      num_entries: int,
  ):
    self._contest = contest
    self._plan = plan
    self._directory = directory
    self._total = num_entries * (plan.budget + plan.seeds)
    self._position = 0
    self._trials: dict[int, Trial] = {}
    # From a seed and a method; entries may share a method.
    self._builders: dict[tuple[int, str], TunedRuns] = {}

  def _builder(self, seed: int, method: str) -> TunedRuns:
    if seed not in self._trials:
      is_tuning = seed >= self._plan.tuning_seed
      self._trials[seed] = self._contest.checked_trial(seed, is_tuning)
      self._directory.check_data(self._trials[seed].fingerprint)
    if (seed, method) not in self._builders:
      self._builders[seed, method] = TunedRuns(self._trials[seed], method)
    return self._builders[seed, method]

  def _path(self, folder: str) -> str:
    path = self._directory.join('runs', folder)
    with errors.file_errors(path):
      os.makedirs(path, exist_ok=True)
    return path

  def _title(self, offset: int, label: str, what: str) -> str:
    return f'[{self._position + offset}/{self._total}] {label}, {what}'

  def _tell(self, title: str, outcome: str | float) -> None:
    """Prints a line about a run that has ended, also where no bar is shown."""
    if isinstance(outcome, float):
      outcome = f'{self._contest.curve.column} {outcome:.4g}'
    tqdm.tqdm.write(f'{title}: {outcome}', file=sys.stderr)

  def facts(self, name: str, entry: Entry) -> Facts:
    """Builds a method and counts its work, or reads what is there."""
    return method_facts.find_or_read(
        self._directory.join(_FACTS, f'{file_name(name)}.json'),
        entry,
        # Of a final run: trials for tuning may have fewer examples.
        lambda: self._builder(0, entry.method),
        self._contest.steps,
    )

  def outcome(
      self, k: int, name: str, entry: Entry, facts: Facts
  ) -> Outcome:
    """Tunes and runs the k-th method, or reads what is there."""
    plan = self._plan
    self._position = k * (plan.budget + plan.seeds) + 1
    search = Search(
        self._directory.join(SEARCH),
        name,
        facts.space,
        self._contest.larger_is_better,
        plan.tuning_rounds,
        plan.tuning_seed,
    )
    is_searched = any(isinstance(v, Range) for v in facts.space.values())
    budget = plan.budget if is_searched else 1
    while sum(t.outcome != 'running' for t in search.tried()) < budget:
      self._try(search, name, entry)
    chosen = search.best()
    hparams = chosen.hparams if chosen else {}
    runs, failures = [], {}
    for seed in range(plan.seeds if chosen else 0):
      rows, failure = self._run(name, entry, hparams, seed, facts)
      work = facts.work.example_gradients
      runs.append([
          row | {'example_gradients': row['epoch'] * work}
          for row in rows
          if row['communication_rounds'] <= plan.rounds
      ])
      if failure is not None:
        failures[seed] = failure
    _free_functions()
    return Outcome(facts, search.tried(), chosen, runs, failures)

  def _try(self, search: Search, name: str, entry: Entry) -> None:
    """Tries the next setting to its end.

    It can be stopped early on the first seed only. It counts as diverged if it
    diverges on any seed.
    """
    plan, column = self._plan, self._contest.curve.column
    trial = search.next()
    title = self._title(trial.number, entry.label, f'trial {trial.number + 1}')
    outcome: str | float
    found, paths = [], []

    def report(rounds: int, numbers: dict[str, float]) -> None:
      if trial.report(rounds, numbers[column]):
        raise _StopTrialError

    try:
      for k in range(plan.tuning_seeds):
        seed, suffix = plan.tuning_seed + k, f'-again{k}' if k else ''
        folder = f'{file_name(name)}-trial{trial.number:03d}{suffix}'
        paths.append(self._path(folder))
        rows = self._builder(seed, entry.method).train(
            trial.hparams,
            plan.tuning_rounds,
            plan.rounds_per_evaluation,
            paths[-1],
            name,
            seed,
            title,
            None if k else report,
        )
        check_growth(rows, column)
        found.append(value_of(rows, column))
    except _StopTrialError:
      trial.stop()
      outcome = 'stopped early'
    except errors.NonFiniteError as error:
      trial.diverge(error.reason)
      outcome = 'diverged'
    else:
      outcome = statistics.fmean(found)
      trial.finish(outcome)
    self._tell(title, outcome)
    # The metrics stay.
    for path in paths:
      for left in (CHECKPOINTS, records.TENSORBOARD):
        shutil.rmtree(os.path.join(path, left), ignore_errors=True)

  def _run(
      self,
      name: str,
      entry: Entry,
      hparams: Mapping[str, float],
      seed: int,
      facts: Facts,
  ) -> tuple[list[Row], str | None]:
    """A final run: its rows, and what was not finite if it diverged."""
    plan, column = self._plan, self._contest.curve.column
    path = self._path(f'{file_name(name)}-seed{seed}')
    epochs = epochs_of(plan.rounds, facts.rounds_per_epoch)
    if diverged_runs.is_marked(path):
      return diverged_runs.read(path, column, epochs)
    title = self._title(plan.budget + seed, entry.label, f'seed {seed}')
    try:
      is_ended = is_done(path, epochs)
      if is_ended:
        rows = tables.read_rows(os.path.join(path, tables.METRICS))
      else:
        with errors.file_errors(path):
          files.write_json(os.path.join(path, _HPARAMS), dict(hparams))
        rows = self._builder(seed, entry.method).train(
            hparams,
            plan.rounds,
            plan.rounds_per_evaluation,
            path,
            name,
            seed,
            title,
        )
      check_growth(rows, column)
      if not is_ended:
        self._tell(title, rows[-1][column])
    except errors.NonFiniteError as error:
      diverged_runs.mark(path, error.reason)
      self._tell(title, 'diverged')
      return diverged_runs.read(path, column, epochs)
    return rows, None


def _tell_left_out(folder: str, entries: Mapping[str, Entry]) -> None:
  """Names the methods of an earlier comparison that are not asked for now."""
  left = method_facts.known(folder) - {*map(file_name, entries)}
  if left:
    tqdm.tqdm.write(
        f'left out of the tables: {", ".join(sorted(left))}; what was run'
        ' stays',
        file=sys.stderr,
    )


def compare(
    contest: Contest,
    entries: Mapping[str, Entry],
    plan: Plan,
    directory: str | os.PathLike[str],
    *,
    settings: Mapping[str, object] = {},
    about: Mapping[str, object] = {},
    title: str = 'Leaderboard',
    overwrite: bool = False,
    places: Sequence[str] = (),
) -> dict[str, Outcome]:
  """Tunes all methods alike, runs them on several seeds, and writes tables.

  Run again, it goes on where it was stopped or killed. Methods, seeds and
  rounds may be added later; what was tuned stays as it is.

  Args:
    contest: The problem.
    entries: The methods, by names that are used for files.
    plan: Trials, rounds and seeds.
    directory: Where everything goes: `leaderboard.csv`, `leaderboard.md`,
      `leaderboard.png`, `trials.csv`, and `runs/` with the metrics of every
      trial and run.
    settings: What else decides the numbers. A directory with other settings is
      refused.
    about: What else `config.json` tells, such as versions.
    title: Of the tables and the plot.
    overwrite: Whether to remove an earlier comparison and start anew.
    places: Settings that say where it runs and where its data are; they may
      change.

  Returns:
    The outcome of each method.

  Raises:
    ValueError: If the plan or the methods do not fit.
    RunError: If the directory does not fit, or a file cannot be written.
    StoppedError: After SIGINT or SIGTERM, at the end of an epoch.
  """
  directory = os.fspath(directory)
  if not isinstance(plan, Plan):
    raise ValueError(f'`plan` must be a `simulation.Plan`; got {plan!r}.')
  plan.check()
  contest = Contest.checked(contest)
  plan = Plan(*map(int, plan))  # NumPy's integers would not be kept as numbers.
  entries = checked_entries(entries)
  if any(character in directory for character in '?{}'):
    # They have a meaning in the address of a database.
    raise errors.RunError(
        f'`output_dir` {directory!r} must not contain ?, {{ or }}'
    )
  outcomes: dict[str, Outcome] = {}
  with run_directory.RunDirectory(
      directory,
      {'comparison': True, **settings, **contest.tuning(), **plan.tuning()},
      about,
      overwrite,
      places=places,
  ) as opened:
    comparison = _Comparison(contest, plan, opened, len(entries))
    _tell_left_out(opened.join(_FACTS), entries)
    # Of all methods before the first trial, so that a mistake in the last
    # method is told at once.
    facts = {}
    labels = [entry.label for entry in entries.values()]
    for name, entry in entries.items():
      facts[name] = comparison.facts(name, entry)
      plan.check_epoch(entry.label, facts[name].rounds_per_epoch)
    for k, (name, entry) in enumerate(entries.items()):
      outcomes[name] = comparison.outcome(k, name, entry, facts[name])
      # Also after each method: what is done can be read.
      with errors.file_errors(directory):
        leaderboard_page.write(
            outcomes,
            directory,
            contest.curve,
            contest.larger_is_better,
            plan.rounds,
            contest.target,
            title,
            plan.describe(labels[k + 1:]),
            with_plot=k == len(entries) - 1,
        )
  return outcomes
