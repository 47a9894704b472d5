"""Options of methods: flat names for grouped parameters, and their checks.

A builder takes a few parameters, some of which are groups (dataclasses whose
fields are made by `option`). `fednest_tff.build` and the command line know the
same options by flat names: the field `steps` of the group `inner` is
`inner_local_steps`. The flat names come from the builder's own signature and
the help from its docstring, so that nothing is written twice.
"""

from collections.abc import Callable
import dataclasses
import difflib
import inspect
import numbers
import re
import sys
import types
import typing
from typing import NamedTuple, TypeGuard, TypeVar

REQUIRED = inspect.Parameter.empty
_FLAG_TYPES = (bool, int, float, str)
_LARGEST_COUNT = 2**31 - 1
_Default = TypeVar('_Default')


def option(
    flat_name: str,
    default: _Default = None,  # type: ignore[assignment]
) -> _Default:
  """A field of a group of options.

  Args:
    flat_name: Its name as a flat option; '{}' stands for the name of the
      builder's parameter that holds the group.
    default: Its default value.

  Returns:
    A dataclass field.
  """
  return dataclasses.field(default=default, metadata={'option': flat_name})


class Option(NamedTuple):
  """An option of a method.

  Attributes:
    name: Its flat name.
    default: Its default; `REQUIRED` if there is none.
    help: One sentence or two.
    flag_type: `bool`, `int`, `float` or `str` if it can be given on a command
      line, else `None`.
    choices: Its possible values, if they are few.
    parameter: The builder's parameter that it belongs to.
    field: The field of that parameter if it is a group, else `None`.
  """

  name: str
  default: object
  help: str
  flag_type: type | None
  choices: tuple[str, ...]
  parameter: str
  field: str | None


def _help_of(thing: object) -> dict[str, str]:
  """The texts below 'Args:' and 'Attributes:' of a docstring, by name."""
  found: dict[str, str] = {}
  name, margin = None, None
  for line in inspect.cleandoc(thing.__doc__ or '').splitlines():
    indent = len(line) - len(line.lstrip())
    if re.fullmatch(r'(Args|Attributes):', line):
      name, margin = None, 2
    elif line and indent == 0:
      margin = None
    elif margin is not None and line:
      start = re.match(r'\s*\**(\w+): (.*)', line)
      if indent == margin and start:
        name, text = start.groups()
        found[name] = text
      elif name is not None:
        found[name] += ' ' + line.strip()
  return found


def _rename(text: str, names: dict[str, str]) -> str:
  """`text` with other names for those in backticks."""
  return re.sub(
      r'`(\w+)`', lambda match: f'`{names.get(match[1], match[1])}`', text
  )


def _flag_type(annotation: object) -> tuple[type | None, tuple[str, ...]]:
  """The first type of `annotation` that a command line can give; choices."""
  parts = [annotation]
  if isinstance(annotation, types.UnionType) or (
      typing.get_origin(annotation) is typing.Union
  ):
    parts = list(typing.get_args(annotation))
  for part in parts:
    if typing.get_origin(part) is typing.Literal:
      return str, typing.get_args(part)
    if isinstance(part, type) and part in _FLAG_TYPES:
      return part, ()
  return None, ()


def _group_of(annotation: object) -> type | None:
  """The dataclass of options in `annotation`, if there is one."""
  for part in (annotation, *typing.get_args(annotation)):
    if isinstance(part, type) and dataclasses.is_dataclass(part):
      return part
  return None


def names_of(group: type, parameter: str = '') -> frozenset[str]:
  """The flat names of a group that a builder takes as `parameter`."""
  return frozenset(
      field.metadata['option'].format(parameter)
      for field in dataclasses.fields(group)
  )


def options_of(builder: Callable[..., object]) -> dict[str, list[Option]]:
  """The options of a builder by their flat names.

  A flat name that belongs to several groups (`batch_size` of both levels) has
  several entries; its value goes to all of them.

  Args:
    builder: A function whose first parameter is the problem.

  Returns:
    The options, in the order of the parameters.
  """
  found: dict[str, list[Option]] = {}
  hints = typing.get_type_hints(builder)
  helps = _help_of(builder)
  parameters = list(inspect.signature(builder).parameters.values())[1:]
  for parameter in parameters:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
      raise ValueError(
          f'`{builder.__name__}` must name its options; it has'
          f' `{parameter}`.'
      )
    # Without an annotation, an option has the type of its default.
    annotation = hints.get(parameter.name, type(parameter.default))
    group = _group_of(annotation)
    if group is None:
      found.setdefault(parameter.name, []).append(
          Option(
              parameter.name,
              parameter.default,
              helps.get(parameter.name, ''),
              *_flag_type(annotation),
              parameter.name,
              None,
          )
      )
      continue
    group_helps: dict[str, str] = {}
    for base in reversed(group.__mro__):  # A group may add to another.
      group_helps |= _help_of(base)
    group_hints = typing.get_type_hints(group)
    flat_names = {
        field.name: field.metadata['option'].format(parameter.name)
        for field in dataclasses.fields(group)
    }
    for field in dataclasses.fields(group):
      name = flat_names[field.name]
      found.setdefault(name, []).append(
          Option(
              name,
              field.default,
              _rename(group_helps.get(field.name, ''), flat_names),
              *_flag_type(group_hints[field.name]),
              parameter.name,
              field.name,
          )
      )
  return found


def arguments_of(
    builder: Callable[..., object], method: str, options: dict[str, object]
) -> dict[str, object]:
  """The arguments of `builder` from flat options.

  Args:
    builder: The builder.
    method: The method's name, for error messages.
    options: Values by flat name.

  Returns:
    Keyword arguments, with the groups put together.

  Raises:
    ValueError: If the method lacks an option, or an option is missing.
  """
  known = options_of(builder)
  for name in options:
    if name not in known:
      close = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
      hint = f' Did you mean `{close[0]}`?' if close else ''
      raise ValueError(
          f'`{name}` is no option of {method}, which has:'
          f' {", ".join(sorted(known))}.{hint}'
      )
  for name, places in known.items():
    if name not in options and any(p.default is REQUIRED for p in places):
      raise ValueError(f'`{name}` is missing: {method} needs it.')
  hints = typing.get_type_hints(builder)
  arguments: dict[str, object] = {}
  groups: dict[str, dict[str, object]] = {}
  for name, places in known.items():
    for place in places:
      if place.field is not None:
        group = groups.setdefault(place.parameter, {})
        if name in options:
          group[place.field] = options[name]
      elif name in options:
        arguments[place.parameter] = options[name]
  for parameter, fields in groups.items():
    group_type = _group_of(hints[parameter])
    if group_type is not None:  # It is one, or there would be no fields.
      arguments[parameter] = group_type(**fields)
  return arguments


def is_integer(value: object) -> TypeGuard[int]:
  """Whether a value is an integer, be it Python's or NumPy's."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(name: str, value: object) -> None:
  """Refuses a `value` that is no positive integer."""
  if not is_integer(value) or value < 1:
    raise ValueError(f'`{name}` must be a positive integer; got {value!r}.')
  if value > _LARGEST_COUNT:
    raise ValueError(f'`{name}` must be at most {_LARGEST_COUNT}; got {value}.')


def check_positive(name: str, value: object, alternative: str = '') -> float:
  """Refuses a `value` that is no positive, finite number.

  Args:
    name: Of the option.
    value: Its value.
    alternative: What it may be besides, for the message.

  Returns:
    The number.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    kind = ' '.join(['a positive number', alternative]).strip()
    raise ValueError(f'`{name}` must be {kind}; got {value!r}.')
  # An integer may be too large for a float.
  if not 0 < value <= sys.float_info.max:  # type: ignore[operator]
    raise ValueError(f'`{name}` must be positive and finite; got {value}.')
  return float(value)


def check_function(name: str, function: object, *parameters: str) -> None:
  """Refuses what cannot be called with as many arguments.

  Args:
    name: Of the argument that holds the function.
    function: What was given for it.
    *parameters: The names of its parameters, for the message.
  """
  wanted = f'a function ({", ".join(parameters)})'
  if not callable(function):
    raise ValueError(f'`{name}` must be {wanted}; got {function!r}.')
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # Some that are written in C have none.
    return
  try:
    signature.bind(*parameters)
  except TypeError as error:
    raise ValueError(
        f'`{name}` must be {wanted}; got one of {signature} ({error}).'
    ) from None
