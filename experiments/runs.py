"""The runs of an experiment: methods and seeds, files, plot and table."""

import collections
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from typing import TypedDict

from absl import logging

from experiments import image_clients, launch, report, runtimes
from experiments import settings as settings_lib
from experiments.experiment import Experiment
from experiments.settings import Settings
import fednest_tff
from fednest_tff import simulation

_PACKAGES = (
    'tensorflow', 'tensorflow-federated', 'tensorflow-datasets', 'numpy'
)
_NOT_FINITE = 'not_finite.json'
_DATASETS = {
    'emnist': 'EMNIST', 'fashion_mnist': 'Fashion-MNIST', 'mnist': 'MNIST'
}

# For each method the rows of its runs, one list per seed.
Results = dict[str, list[list[simulation.Row]]]
# For a method and a seed, what was not finite.
Failures = dict[tuple[str, int], str]


class About(TypedDict):
  """What `config.json` tells besides the flags."""

  versions: dict[str, str]
  commit: str
  started: str
  command: str


def _commit() -> str:
  """The commit of this code; empty if it is not in a repository."""
  here = os.path.dirname(os.path.abspath(__file__))
  try:
    found = subprocess.run(
        ['git', 'describe', '--always', '--dirty', '--abbrev=40'],
        cwd=here, capture_output=True, text=True, check=False,
    )
  except OSError:  # There is no git.
    return ''
  return found.stdout.strip()


def about() -> About:
  """What `config.json` tells besides the flags."""
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {
      'versions': {
          'fednest_tff': fednest_tff.__version__,
          'python': platform.python_version(),
          **versions,
      },
      'commit': _commit(),
      'started': datetime.datetime.now().isoformat(timespec='seconds'),
      'command': shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
  }


def make_trial(
    experiment: Experiment, settings: Settings, seed: int
) -> simulation.Trial:
  """A trial whose builder names bad settings in one line."""
  try:
    trial = experiment.make_trial(settings, seed)
  except ValueError as error:
    raise settings_lib.SettingsError(str(error)) from error

  def build(method: str) -> simulation.Process:
    try:
      process = trial.build(method)
    except ValueError as error:
      raise settings_lib.SettingsError(str(error)) from error
    if settings.runtime == 'ray' and isinstance(
        process, fednest_tff.NestedProcess
    ):
      return fednest_tff.build_driver(process)
    return process

  if hasattr(settings, 'dataset'):
    trial = trial._replace(fingerprint=image_clients.fingerprint(settings))
  return trial._replace(build=build)


def _runs(settings: Settings) -> list[tuple[str, int]]:
  return [
      (method, settings.seed + k)
      for k in range(settings.seeds)
      for method in settings.method
  ]


def _folder(method: str, seed: int) -> str:
  """The name of a run's folder; a method may be 'package.module:builder'."""
  return f'{method.replace(":", ".")}-seed{seed}'


def _read_failure(path: str) -> str | None:
  """What was not finite in an earlier start; `None` if nothing was.

  A damaged file is removed: the run is computed again to the same end.
  """
  if not os.path.lexists(path):
    return None
  with simulation.file_errors(path, 'read'):
    try:
      found = simulation.read_json(path)
    except ValueError:
      found = None
    if isinstance(found, str):
      return found
    logging.warning('%r is damaged; its run is computed again.', path)
    os.remove(path)
  return None


def execute(
    experiment: Experiment,
    settings: Settings,
    directory: simulation.RunDirectory,
) -> tuple[Results, Failures]:
  """Runs all methods and seeds in an open directory; those done are read.

  A single run has the directory for itself; several have one each in `runs/`.

  Args:
    experiment: What to run.
    settings: Its settings.
    directory: An open `simulation.RunDirectory`.

  Returns:
    For each method the rows of its runs, one list per seed; and, for the runs
    that did not end because something was not finite, what it was.
  """
  runs = _runs(settings)
  results: Results = collections.defaultdict(list)
  failures: Failures = {}
  trials: dict[int, simulation.Trial] = {}
  labels = experiment.labels(settings.method)
  for k, (method, seed) in enumerate(runs):
    path = directory.path
    if len(runs) > 1:
      path = directory.join('runs', _folder(method, seed))
    metrics = os.path.join(path, 'metrics.csv')
    failed = os.path.join(path, _NOT_FINITE)
    title = f'{labels[method]}, seed {seed}'
    if len(runs) > 1:
      title = f'[{k + 1}/{len(runs)}] {title}'
    if _read_failure(failed) is None:
      try:
        is_complete = simulation.is_complete(metrics, settings.epochs)
        if is_complete:
          # It may have been killed before it could say so.
          simulation.check_finite(simulation.read_rows(metrics)[-1], metrics)
        # Or before it had saved its weights.
        if not is_complete or not simulation.has_weights(
            path, settings.epochs
        ):
          if seed not in trials:
            trials = {seed: make_trial(experiment, settings, seed)}
          directory.check_data(trials[seed].fingerprint)
          with simulation.file_errors(path):
            os.makedirs(path, exist_ok=True)
          simulation.train(
              trials[seed],
              method,
              settings.epochs,
              path,
              seed=seed,
              epochs_per_evaluation=settings.epochs_per_evaluation,
              epochs_per_checkpoint=settings.epochs_per_checkpoint,
              title=title,
          )
      except simulation.NonFiniteError as error:
        # The others go on. Run again, this one would end in the same way.
        with simulation.file_errors(path):
          simulation.write_json(failed, str(error))
    directory.settle()
    failure = _read_failure(failed)
    if failure is not None:
      failures[method, seed] = failure
    # One that diverges in its first epoch has no rows.
    is_there = os.path.exists(metrics)
    results[method].append(simulation.read_rows(metrics) if is_there else [])
  return dict(results), failures


def _title(experiment: Experiment, settings: Settings) -> str:
  """Title of the plot: the experiment, its data and who has which of them."""
  dataset = getattr(settings, 'dataset', None)
  if dataset is None:
    return experiment.title
  parts = [experiment.title, _DATASETS.get(dataset, dataset)]
  partition = getattr(settings, 'partition', None)
  return ', '.join([*parts, *([partition] if partition else [])])


def run_in(
    experiment: Experiment,
    settings: Settings,
    output_dir: str,
    overwrite: bool = False,
    quiet: bool = False,
) -> tuple[Results, Failures]:
  """All of an experiment: runs, `metrics.csv`, `summary.json`, plot, table.

  Args:
    experiment: What to run.
    settings: From `experiment.resolve`.
    output_dir: Where everything goes.
    overwrite: Whether to start anew.
    quiet: Whether to print nothing.

  Returns:
    As `execute` does.
  """
  runtimes.use_runtime(settings)
  if overwrite:
    # No run is removed for flags or files that turn out not to fit.
    trial = make_trial(experiment, settings, settings.seed)
    for method in settings.method:
      trial.build(method)
  chosen = {'experiment': experiment.name, **vars(settings)}
  directory = simulation.RunDirectory(
      output_dir,
      chosen,
      about(),
      overwrite,
      length='epochs',
      places=settings_lib.MACHINES,
  )
  with launch.cleanup(directory.give_up), directory:
    results, failures = execute(experiment, settings, directory)
    curve = experiment.curve(settings)
    # Some may have diverged before they had a row.
    started = {m: [r for r in runs if r] for m, runs in results.items()}
    started = {method: runs for method, runs in started.items() if runs}
    with simulation.file_errors(output_dir):
      if len(settings.method) * settings.seeds > 1 and started:
        every = [
            row for runs in started.values() for rows in runs for row in rows
        ]
        simulation.write_rows(directory.join('metrics.csv'), every)
      if started:
        summary = report.summary(started)
        simulation.write_json(directory.join('summary.json'), summary)
        labels = experiment.labels(settings.method)
        labelled = {labels[method]: runs for method, runs in started.items()}
        plot = simulation.draw(
            labelled, curve, directory.join('plot'),
            _title(experiment, settings),
        )
  if started and not quiet:
    _show(report.table(labelled, curve), f'plot: {plot}')
  return results, failures


def _show(*lines: str) -> None:
  """Prints lines; a standard output that is full, or gone, is one line."""
  try:
    print(*lines, sep='\n')
    reason = launch.flush_output()
  except OSError as error:
    launch.flush_output()
    reason = error.strerror
  if reason is not None:
    raise simulation.RunError(f'cannot write to standard output: {reason}')
