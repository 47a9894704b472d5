"""What every experiment binary does: flags, runs, files, plot, exit codes.

Exit codes: 0; 2 for bad input, with one line that names it; 3 for numbers that
are not finite; 4 if a worker or a cluster is lost; 70 for an error that nobody
expected, with a line that names the file with its traceback; 130 after Ctrl-C,
143 after SIGTERM and 129 after SIGHUP, with the state saved.
"""

import collections
from collections.abc import Callable, Collection
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from typing import TypedDict

from absl import app, flags, logging
import tensorflow_federated as tff

from experiments import image_clients, launch, report, runtimes
from experiments import settings as settings_lib
from experiments.experiment import Experiment
from experiments.settings import Settings
import fednest_tff
from fednest_tff import data, registry, runtime, simulation

FLAGS = flags.FLAGS
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
            trials = {seed: _trial(experiment, settings, seed)}
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
    trial = _trial(experiment, settings, settings.seed)
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


def main(experiment: Experiment, argv: list[str]) -> int:
  """Runs an experiment as its flags say; returns the exit code."""
  logging.set_verbosity(logging.WARNING)
  output_dir = None
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
  except (Exception, KeyboardInterrupt) as error:
    return end_with(error, output_dir)
  return 0


def end_with(error: BaseException, output_dir: str | None = None) -> int:
  """Says in one line which error ends a program; returns its exit code."""
  if isinstance(
      error, settings_lib.SettingsError | data.DataError | simulation.RunError
  ):
    return end(error, 2)
  if isinstance(error, simulation.NonFiniteError):
    return end(error, 3)
  if isinstance(error, runtime.WorkerError):
    return end(error, 4)
  if isinstance(error, simulation.StoppedError):
    return end(error, 128 + error.signal_number)
  if isinstance(error, KeyboardInterrupt):
    number = getattr(error, 'signal_number', signal.SIGINT)
    return end('interrupted; the last checkpoint is kept', 128 + number)
  if output_dir is not None and not simulation.is_ours(output_dir):
    output_dir = None
  return end(launch.describe(error, output_dir), launch.UNEXPECTED)


def _with_flags(text: str) -> str:
  """`text` with the names of arguments in backticks as flags."""
  return re.sub(
      r'`(\w+)`',
      lambda match: f'--{match[1]}' if match[1] in FLAGS else match[0],
      text,
  )


def end(error: object, code: int) -> int:
  """Says in one line why a program ends; returns its exit code."""
  launch.claim()
  line = _with_flags(str(error))
  launch.say(f'error: {line}' if code < 128 else line)
  return code


def parse(argv: list[str]) -> list[str]:
  """Parses flags; a wrong one is one line and exit code 2."""
  try:
    return FLAGS(argv)
  except flags.Error as error:
    sys.exit(end(error, 2))


def _check_flag_files(arguments: list[str], seen: tuple[str, ...]) -> None:
  """Refuses flag files that are no text, and those that contain themselves."""
  for k, argument in enumerate(arguments):
    name, equals, path = argument.strip().lstrip('-').partition('=')
    if name != 'flagfile' or not argument.strip().startswith('-'):
      continue
    if not equals:
      path = arguments[k + 1] if k + 1 < len(arguments) else ''
    path = path.strip().strip('"\'')
    if path in seen:
      raise settings_lib.SettingsError(f'--flagfile={path} contains itself')
    try:
      lines = simulation.read_file(os.path.expanduser(path)).decode()
    except UnicodeDecodeError:
      raise settings_lib.SettingsError(
          f'--flagfile={path} is not a text file'
      ) from None
    except OSError as error:
      raise settings_lib.SettingsError(
          f'--flagfile={path} cannot be read: {error.strerror}'
      ) from error
    _check_flag_files(lines.splitlines(), (*seen, path))


def _import_methods(argv: list[str]) -> None:
  """Imports the user's methods that `argv` names, and defines their flags.

  Their options must be known as flags before the command line is parsed.
  """
  _check_flag_files(argv, ())
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
  FLAGS['preset'].help = (
      f'Defaults that go together: {", ".join(experiment.presets)}.'
      ' `paper` has those of the paper, `tuned` those that do best here, chosen'
      ' on images held out of the training images.'
  )
  for preset, flags_of in list(experiment.presets.items())[1:]:
    for name, value in flags_of.items():
      if value is None:
        continue
      FLAGS[name].help += f' With --preset={preset}: {_text(value)}.'


def start(function: Callable[[list[str]], int]) -> None:
  """Parses flags and ends the program with what `function` returns."""
  try:
    app.run(lambda argv: sys.exit(function(argv)), flags_parser=parse)
  except OSError as error:  # From printing help: `main` catches all others.
    launch.flush_output()
    sys.exit(end(f'cannot write to standard output: {error.strerror}', 2))
  except SystemExit:
    # What `--help` has printed, for example.
    reason = launch.flush_output()
    if reason is not None:
      sys.exit(end(f'cannot write to standard output: {reason}', 2))
    raise


def run(experiment: Experiment) -> None:
  """The `__main__` of a binary; does not return."""
  tff.framework.set_default_context(runtimes.NoRuntime())
  try:
    _import_methods(sys.argv)
  except (ValueError, flags.Error) as error:
    sys.exit(end(error, 2))
  except Exception as error:  # Of the user's own module.
    sys.exit(end_with(error))
  define_flags(experiment)
  start(lambda argv: main(experiment, argv))
