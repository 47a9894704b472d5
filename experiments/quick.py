"""Answers `--help` and wrong flags before TensorFlow is imported.

Flags come from the builders of the methods, and importing these takes ten
seconds. `flags.json` is a copy of all flags; `python -m experiments.flags`
writes it, and a test compares it with the originals. Whatever this module does
not find wrong, the program itself checks again.
"""

import ast
import json
import os
import re
import sys
from typing import Any, NoReturn

from absl import flags

COPY = os.path.join(os.path.dirname(__file__), 'flags.json')
_PROGRAM = r'experiments\.(\w+)'
_FROM_ELSEWHERE = r'\w+(\.\w+)*:[A-Za-z_]'


def define(flag: dict[str, Any], values: flags.FlagValues) -> None:
  """Defines a flag of the copy."""
  name, default, text = flag['name'], flag['default'], flag['help']
  bounds = {key: flag[key] for key in ('lower_bound',) if key in flag}
  function = getattr(flags, f'DEFINE_{flag["kind"]}')
  if 'choices' in flag:
    function(name, default, flag['choices'], text, values)
  else:
    function(name, default, text, flag_values=values, **bounds)


def _program(argv: list[str]) -> tuple[str, list[str]] | None:
  """Name and arguments of the program if it is one of ours."""
  if '-m' not in argv[1:-1]:
    return None
  k = argv.index('-m') + 1
  found = re.fullmatch(_PROGRAM, argv[k])
  return (found[1], argv[k + 1 :]) if found else None


def _end(message: str) -> NoReturn:
  print(f'error: {" ".join(message.split())}', file=sys.stderr)
  sys.exit(2)


def _help(name: str, values: flags.FlagValues) -> NoReturn:
  """Prints what absl prints for `--help`."""
  path = os.path.join(os.path.dirname(__file__), name)
  is_package = os.path.isdir(path)
  path = os.path.join(path, '__main__.py') if is_package else f'{path}.py'
  with open(path) as file:
    print(ast.get_docstring(ast.parse(file.read()), clean=False))
  print('\nflags:')
  print(values.get_help().replace(__name__, f'experiments.{name}'))
  sys.exit(0)


def _listed(names: list[str]) -> str:
  """Names with commas between them; in quotes if they have commas in them."""
  has_commas = any(',' in name for name in names)
  return ', '.join(map(repr, names) if has_commas else names)


def check(name: str, arguments: list[str]) -> None:
  """Ends the program if its arguments ask for help or are wrong.

  Args:
    name: Of a program.
    arguments: Its arguments.
  """
  with open(COPY) as file:
    copy = json.load(file)
  if name not in copy:
    return
  values = flags.FlagValues()
  for flag in copy[name]['flags']:
    define(flag, values)
  try:
    every = values.read_flags_from_files(arguments)
    if any(re.search(_FROM_ELSEWHERE, argument) for argument in every):
      return  # A method from elsewhere has flags of its own.
    if any(argument in ('--help', '-help') for argument in every):
      _help(name, values)
    if any(argument.startswith(('--help', '-help')) for argument in every):
      return  # Further kinds of help, by absl.
    for known in flags.FLAGS:  # Those of absl itself, such as --verbosity.
      # A flag is there under its short name, too.
      if known not in values and flags.FLAGS[known].name == known:
        values[known] = flags.FLAGS[known]
    surplus = values([name, *arguments])[1:]
  except (flags.Error, OSError) as error:
    _end(str(error))
  if surplus:
    _end(f'unexpected argument {surplus[0]!r}')
  for flag, known in copy[name]['known'].items():
    for value in values[flag].value or []:
      if value not in known and not (flag == 'method' and ':' in value):
        own = '; one of your own is package.module:builder'
        _end(
            f'--{flag}={value} is none of {_listed(known)}'
            f'{own if flag == "method" else ""}'
        )


def answer() -> None:
  """Looks at the command line of this process."""
  found = _program(sys.orig_argv)
  if found is not None:
    check(*found)
