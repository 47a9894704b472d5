"""The command line of every experiment binary: flags, errors, exit codes.

Exit codes: 0; 2 for bad input, with one line that names it; 3 for numbers that
are not finite; 4 if a worker or a cluster is lost; 70 for an error that nobody
expected, with a line that names the file with its traceback; 130 after Ctrl-C,
143 after SIGTERM and 129 after SIGHUP, with the state saved.
"""

from collections.abc import Callable, Collection
import os
import re
import signal
import sys

from absl import app, flags, logging
import tensorflow_federated as tff

from experiments import launch, runs, runtimes
from experiments import settings as settings_lib
from experiments.experiment import Experiment
from fednest_tff import data, registry, runtime, simulation

FLAGS = flags.FLAGS


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
    _, failures = runs.run_in(
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
