"""What every experiment binary does: flags, runs, files, plot, exit codes.

Exit codes: 0; 2 for bad input, with one line that names it; 3 for numbers that
are not finite; 130 after Ctrl-C (143 after SIGTERM), with the state saved.
"""

import collections
from collections.abc import Callable, Collection
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from typing import NamedTuple, TypedDict

from absl import app, flags, logging
import tensorflow_federated as tff

from experiments import report, runtimes
from experiments import settings as settings_lib
from experiments.settings import Flags, Settings
import fednest_tff
from fednest_tff import data, registry, simulation
from fednest_tff import options as options_lib

FLAGS = flags.FLAGS
_PACKAGES = (
    'tensorflow', 'tensorflow-federated', 'tensorflow-datasets', 'numpy'
)
_NOT_FINITE = 'not_finite.json'

# For each method the rows of its runs, one list per seed.
Results = dict[str, list[list[simulation.Row]]]
# For a method and a seed, what was not finite.
Failures = dict[tuple[str, int], str]


class Baseline(NamedTuple):
  """A method that one experiment has besides those of the registry.

  Attributes:
    label: Its name in plots and tables.
    options: Those of the methods' options that it uses.
  """

  label: str
  options: frozenset[str]


class Experiment(NamedTuple):
  """An experiment binary.

  Attributes:
    name: Of the module.
    title: For people.
    defaults: Its flags, besides the common ones, and their defaults; also
      defaults of the methods' options that suit it.
    make_trial: From settings and a seed to a trial.
    curve: From settings to the curve of the plot.
    variants: Further flags for each value of `--problem`, if it has several.
    without: Options of methods that have no effect on its problems.
    baselines: Methods of its own, by name.
  """

  name: str
  title: str
  defaults: Flags
  make_trial: Callable[[Settings, int], simulation.Trial]
  curve: Callable[[Settings], simulation.Curve]
  variants: dict[str, Flags] = {}
  without: frozenset[str] = frozenset()
  baselines: dict[str, Baseline] = {}

  def resolve(self, given: Flags) -> Settings:
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
    methods = {**settings_lib.COMMON, **defaults, **given}['method']
    self._check_methods(methods)
    wanted = self._options(methods)
    every = self._options(self.methods())
    plain = {
        key: default for key, default in defaults.items()
        if key not in settings_lib.METHOD_FLAGS
    }
    if given.keys() & every.keys() - wanted.keys():
      name = f'{name} --method={",".join(methods)}'
    return settings_lib.resolve(
        name,
        plain
        | {key: defaults.get(key, default) for key, default in wanted.items()},
        given,
    )

  def _options(self, methods: list[str]) -> Flags:
    """The options of methods that have an effect here, with their defaults.

    The default is `None` where the methods' defaults differ: each method then
    takes its own.
    """
    found: Flags = {}
    for method in methods:
      for name, default in self._options_of(method).items():
        if found.setdefault(name, default) != default:
          found[name] = None
    return found

  def _options_of(self, method: str) -> Flags:
    if method in self.baselines:
      return dict.fromkeys(self.baselines[method].options)
    return {
        option.name: (
            None if option.default is options_lib.REQUIRED else option.default
        )
        for option in settings_lib.method_options(method).values()
        if option.name not in self.without
    }

  def _check_methods(self, methods: list[str]) -> None:
    if not methods:
      raise settings_lib.SettingsError(
          f'--method is empty; choose from {", ".join(self.methods())}'
      )
    for method in methods:
      if method in self.baselines:
        continue
      try:
        registry.get_method(method)
      except ValueError as error:
        raise settings_lib.SettingsError(
            f'--method={method} is none of {", ".join(self.methods())}'
            if ':' not in method else str(error)
        ) from error
    if len(set(methods)) != len(methods):
      raise settings_lib.SettingsError('--method names a method twice')

  def methods(self) -> list[str]:
    """The names of all methods that it can run."""
    return [*registry.method_names(), *self.baselines]

  def labels(self, methods: list[str]) -> dict[str, str]:
    """The methods' names in plots and tables, no two of them equal."""
    found = {
        method: (
            self.baselines[method].label if method in self.baselines
            else registry.get_method(method).label
        )
        for method in methods
    }
    counts = collections.Counter(found.values())
    return {
        method: label if counts[label] == 1 else method
        for method, label in found.items()
    }

  def flags(self) -> dict[str, dict[str | None, object]]:
    """All flags that it may have: the default of each, by `--problem`.

    An experiment with one problem has the key `None` in place of its name.
    """
    options = self._options(self.methods())
    found: dict[str, dict[str | None, object]] = collections.defaultdict(dict)
    problems: list[str | None] = [*self.variants] or [None]
    for problem in problems:
      variant = {} if problem is None else self.variants[problem]
      every = settings_lib.COMMON | options | self.defaults | variant
      for name, default in every.items():
        found[name][problem] = default
    return dict(found)


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


def _trial(
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
    if settings.runtime != 'workers':
      return process
    if not isinstance(process, fednest_tff.NestedProcess):
      raise settings_lib.SettingsError(
          f'--method={method} does not run with --runtime=workers'
      )
    return fednest_tff.build_driver(process)

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
        labels = experiment.labels(settings.method)
        labelled = {labels[method]: runs for method, runs in started.items()}
        plot = simulation.draw(
            labelled, curve, directory.join('plot'), experiment.title
        )
  if started and not quiet:
    print(report.table(labelled, curve))
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


def _with_flags(text: str) -> str:
  """`text` with the names of arguments in backticks as flags."""
  return re.sub(
      r'`(\w+)`',
      lambda match: f'--{match[1]}' if match[1] in FLAGS else match[0],
      text,
  )


def end(error: object, code: int) -> int:
  """Says in one line why a program ends; returns its exit code."""
  line = _with_flags(' '.join(str(error).split()))
  print(f'error: {line}' if code < 128 else line, file=sys.stderr)
  return code


def parse(argv: list[str]) -> list[str]:
  """Parses flags; a wrong one is one line and exit code 2."""
  try:
    return FLAGS(argv)
  except flags.Error as error:
    sys.exit(end(error, 2))


def _import_methods(argv: list[str]) -> None:
  """Imports the user's methods that `argv` names, and defines their flags.

  Their options must be known as flags before the command line is parsed.
  """
  arguments = FLAGS.read_flags_from_files(argv)
  for k, argument in enumerate(arguments):
    flag, equals, text = argument.lstrip('-').partition('=')
    if flag != 'method' or not argument.startswith('-'):
      continue
    if not equals:
      text = arguments[k + 1] if k + 1 < len(arguments) else ''
    for name in text.split(','):
      if ':' in name:
        registry.get_method(name)
  settings_lib.define_method_flags()


def _text(value: object) -> str:
  return ','.join(value) if isinstance(value, list) else str(value)


def _describe(
    name: str, defaults: dict[str | None, object], problems: Collection[str]
) -> None:
  """Has `--help` tell a flag's defaults, and the problems that have the flag.

  Args:
    name: Of the flag.
    defaults: Its default for each value of `--problem` that has the flag.
    problems: All values of `--problem`.
  """
  flag, values = FLAGS[name], list(defaults.values())
  flag.help = _with_flags(flag.help)
  if len(defaults) < len(problems):
    flag.help += f' Only with --problem={",".join(map(str, defaults))}.'
  if all(value == values[0] for value in values):
    FLAGS.set_default(name, values[0])
  else:
    each = ', '.join(
        f'{_text(value)} with --problem={problem}'
        for problem, value in defaults.items() if value is not None
    )
    flag.help += f' Default: {each}.'


def define_flags(experiment: Experiment) -> None:
  """Makes the flags of an experiment those that `--help` shows."""
  for name in settings_lib.PLACES:
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
  for name, defaults in experiment.flags().items():
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
    _describe(name, defaults, experiment.variants)
  FLAGS['method'].help = (
      f'Methods, separated by commas: {", ".join(experiment.methods())}; or'
      ' package.module:builder for your own.'
  )
  FLAGS['problem'].help = f'One of {", ".join(experiment.variants)}.'


def run(experiment: Experiment) -> None:
  """The `__main__` of a binary; does not return."""
  tff.framework.set_default_context(runtimes.NoRuntime())
  try:
    _import_methods(sys.argv)
  except (ValueError, flags.Error) as error:
    sys.exit(end(error, 2))
  define_flags(experiment)
  app.run(lambda argv: sys.exit(main(experiment, argv)), flags_parser=parse)
