"""What every experiment binary does: flags, runs, files, plot, exit codes.

Exit codes: 0; 2 for bad input, with one line that names it; 3 for numbers that
are not finite; 130 after Ctrl-C (143 after SIGTERM), with the state saved.
"""

import collections
from collections.abc import Callable
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from typing import Any, NamedTuple

from absl import app, flags, logging
import tensorflow_federated as tff

from experiments import report, runtimes
from experiments import settings as settings_lib
import fednest_tff
from fednest_tff import data, simulation

FLAGS = flags.FLAGS
_PACKAGES = (
    'tensorflow', 'tensorflow-federated', 'tensorflow-datasets', 'numpy'
)
_NOT_FINITE = 'not_finite.json'

# For each method the rows of its runs, one list per seed.
Results = dict[str, list[list[dict[str, Any]]]]
# For a method and a seed, what was not finite.
Failures = dict[tuple[str, int], str]


class Experiment(NamedTuple):
  """What a binary is made of.

  Attributes:
    name: Of the module.
    title: For people.
    methods: That it can run.
    defaults: Its flags, besides the common ones, and their defaults.
    make_trial: From settings and a seed to what is run.
    curve: From settings to what the plot shows.
    variants: Further flags for each value of `--problem`, if it has several.
  """

  name: str
  title: str
  methods: tuple[str, ...]
  defaults: dict[str, Any]
  make_trial: Callable[[settings_lib.Settings, int], simulation.Trial]
  curve: Callable[[settings_lib.Settings], simulation.Curve]
  variants: dict[str, dict[str, Any]] = {}

  def resolve(self, given: dict[str, Any]) -> settings_lib.Settings:
    """All settings, from those that were chosen."""
    defaults = dict(self.defaults)
    name = self.name
    if self.variants:
      problem = given.get('problem', defaults['problem'])
      if problem not in self.variants:
        raise settings_lib.SettingsError(
            f'--problem={problem} is none of {", ".join(self.variants)}'
        )
      defaults |= self.variants[problem]
      name = f'{name} --problem={problem}'
    return settings_lib.resolve(name, defaults, given)

  def flags(self) -> dict[str, Any]:
    """All flags that it may have, and a default of each."""
    found = dict(settings_lib.COMMON)
    for defaults in (*self.variants.values(), self.defaults):
      found |= defaults
    return found


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


def about() -> dict[str, Any]:
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


def _trial(experiment, settings, seed) -> simulation.Trial:
  """A trial whose builder names bad settings in one line."""
  try:
    trial = experiment.make_trial(settings, seed)
  except ValueError as error:
    raise settings_lib.SettingsError(str(error)) from error

  def build(method):
    try:
      process = trial.build(method)
    except ValueError as error:
      raise settings_lib.SettingsError(str(error)) from error
    if settings.runtime == 'workers':
      return runtimes.Driven(process)
    return process

  return trial._replace(build=build)


def _runs(experiment, settings) -> list[tuple[str, int]]:
  if not settings.method:
    raise settings_lib.SettingsError(
        f'--method is empty; choose from {", ".join(experiment.methods)}'
    )
  for method in settings.method:
    if method not in experiment.methods:
      raise settings_lib.SettingsError(
          f'--method={method} is none of {", ".join(experiment.methods)}'
      )
  if len(set(settings.method)) != len(settings.method):
    raise settings_lib.SettingsError('--method names a method twice')
  return [
      (method, settings.seed + k)
      for k in range(settings.seeds)
      for method in settings.method
  ]


def execute(
    experiment: Experiment, settings: settings_lib.Settings, directory
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
  runs = _runs(experiment, settings)
  results, failures = collections.defaultdict(list), {}
  trials = {}
  for k, (method, seed) in enumerate(runs):
    path = directory.path
    if len(runs) > 1:
      path = directory.join('runs', f'{method}-seed{seed}')
    metrics = os.path.join(path, 'metrics.csv')
    failed = os.path.join(path, _NOT_FINITE)
    title = f'{method}, seed {seed}'
    if len(runs) > 1:
      title = f'[{k + 1}/{len(runs)}] {title}'
    if not os.path.exists(failed):
      try:
        if simulation.is_complete(metrics, settings.epochs):
          # It may have been killed before it could say so.
          simulation.check_finite(simulation.read_rows(metrics)[-1], metrics)
        else:
          if seed not in trials:
            trials = {seed: _trial(experiment, settings, seed)}
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
    if os.path.exists(failed):
      with open(failed) as file:
        failures[method, seed] = json.load(file)
    results[method].append(simulation.read_rows(metrics))
  return dict(results), failures


def run_in(
    experiment: Experiment,
    settings: settings_lib.Settings,
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
  _runs(experiment, settings)
  runtimes.use_runtime(settings)
  if overwrite:
    # No run is removed for flags or files that turn out not to fit.
    trial = _trial(experiment, settings, settings.seed)
    for method in settings.method:
      trial.build(method)
  chosen = {'experiment': experiment.name, **vars(settings)}
  with simulation.RunDirectory(
      output_dir, chosen, about(), overwrite, length='epochs'
  ) as directory:
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
        plot = simulation.draw(
            started, curve, directory.join('plot'), experiment.title
        )
  if started and not quiet:
    print(report.table(started, curve))
    print(f'plot: {plot}')
  return results, failures


def main(experiment: Experiment, argv: list[str]) -> int:
  """Runs an experiment as its flags say; returns the exit code."""
  logging.set_verbosity(logging.WARNING)
  try:
    if len(argv) > 1:
      raise settings_lib.SettingsError(f'unexpected argument {argv[1]!r}')
    given = settings_lib.given_by_flags()
    overwrite = given.pop('overwrite', False)
    output_dir = given.pop('output_dir', f'outputs/{experiment.name}')
    _, failures = run_in(
        experiment, experiment.resolve(given), output_dir, overwrite
    )
    for (method, seed), reason in failures.items():
      raise simulation.NonFiniteError(f'{method}, seed {seed}, {reason}')
  except (
      settings_lib.SettingsError, data.DataError, simulation.RunError
  ) as error:
    return end(error, 2)
  except simulation.NonFiniteError as error:
    return end(error, 3)
  except simulation.StoppedError as error:
    return end(error, 128 + error.signal_number)
  except KeyboardInterrupt:
    return end('interrupted; the last checkpoint is kept', 130)
  return 0


def end(error: Any, code: int) -> int:
  """Says in one line why a program ends; returns its exit code."""
  line = ' '.join(str(error).split())
  print(f'error: {line}' if code < 128 else line, file=sys.stderr)
  return code


def parse(argv: list[str]) -> list[str]:
  """Parses flags; a wrong one is one line and exit code 2."""
  try:
    return FLAGS(argv)
  except flags.Error as error:
    sys.exit(end(error, 2))


def run(experiment: Experiment) -> None:
  """The `__main__` of a binary; does not return."""
  tff.framework.set_default_context(runtimes.NoRuntime())
  defaults = experiment.flags()
  for name in (*defaults, *settings_lib.PLACES):
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
    if name in defaults and not experiment.variants:
      FLAGS.set_default(name, defaults[name])

  app.run(lambda argv: sys.exit(main(experiment, argv)), flags_parser=parse)
