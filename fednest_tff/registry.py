"""The methods by name: builders, labels and options.

`METHODS`, the labels of plots, the flags of the binaries, their help and the
README's table come from here. A method from elsewhere joins by `register`, or
by the name 'package.module:builder' wherever a method's name is expected.
"""

from collections.abc import Callable, Sequence
import importlib
import re
from typing import NamedTuple

from fednest_tff import options as options_lib
from fednest_tff.algorithms import (
    agg_itd,
    fed_bio_acc,
    fed_mbo,
    fed_msa,
    fed_nest,
    one_round,
    penalty,
    personal,
    sim_fbo,
)
from fednest_tff.federated.process import NestedProcess
from fednest_tff.options import Option
from fednest_tff.problems import Problem

Builder = Callable[..., NestedProcess]

# Kinds of problems; most methods are defined for all of them.
_NESTED = ('bilevel', 'minimax', 'compositional', 'single_level')
_IMPORTABLE = r'\w+(\.\w+)*:\w+'  # package.module:builder
_NAME = r'[\w:-][\w.:-]*'  # Files are named after methods.


class RegisteredMethod(NamedTuple):
  """A method of the registry.

  Attributes:
    name: What users call it in code and on command lines.
    builder: From a problem and options to a process.
    label: Its name in plots and tables.
    summary: The first line of the builder's documentation.
    rounds: Communication rounds per epoch of a bilevel problem, in terms of T
      (`inner_rounds`) and N (`neumann_terms`).
    kinds: The kinds of problems for which it is defined, as `Problem.kind`
      names them.
  """

  name: str
  builder: Builder
  label: str
  summary: str
  rounds: str
  kinds: tuple[str, ...]

  @property
  def is_built_in(self) -> bool:
    """Whether it is one of this library's own."""
    return self.builder.__module__.partition('.')[0] == __package__

  @property
  def options(self) -> dict[str, list[Option]]:
    """Its options by flat name; see `options.options_of`."""
    return options_lib.options_of(self.builder)


_METHODS: dict[str, RegisteredMethod] = {}


def register(
    name: str,
    builder: Builder,
    label: str | None = None,
    rounds: str = '',
    kinds: Sequence[str] = _NESTED,
) -> None:
  """Adds a method to the registry.

  Args:
    name: What users call it.
    builder: A function of a problem and of named options that returns a
      process, from `fednest_tff.build_process`. Its signature gives the
      options and their defaults, its docstring their help.
    label: Its name in plots; `None` for `name`.
    rounds: Its rounds per epoch as a formula, for the table.
    kinds: The kinds of problems for which it is defined. The builder refuses
      others; comparisons leave the method out there.

  Raises:
    ValueError: If another builder has that name, it has no option `seed`, or
      its options cannot be read.
  """
  if not re.fullmatch(_NAME, str(name)):
    raise ValueError(
        f'`name` must have letters, digits, "_", "-", "." and ":" only; got'
        f' {name!r}.'
    )
  known = _METHODS.get(name)
  if known is not None and known.builder is not builder:
    raise ValueError(f'`name` {name!r} is registered for another method.')
  if not callable(builder):
    raise ValueError(f'`builder` must be a function; got {builder!r}.')
  if 'seed' not in options_lib.options_of(builder):
    raise ValueError(
        f'`{builder.__name__}` must have a parameter `seed: int` after the'
        ' problem.'
    )
  unknown = sorted({*kinds} - {*_NESTED, 'personal'})
  if unknown or isinstance(kinds, str):
    raise ValueError(
        f'`kinds` must be some of {", ".join(_NESTED)} and personal; got'
        f' {kinds!r}.'
    )
  summary = (builder.__doc__ or '').strip().split('\n')[0]
  _METHODS[name] = RegisteredMethod(
      name, builder, label or name, summary, rounds, tuple(kinds)
  )


def method_names() -> tuple[str, ...]:
  """The names of all methods, in the order of their registration."""
  return tuple(_METHODS)


def get_method(name: str) -> RegisteredMethod:
  """The method of that name.

  Args:
    name: A registered name, or 'package.module:builder', which is imported and
      registered under that name.

  Returns:
    The method.

  Raises:
    ValueError: If there is no such method.
  """
  if name not in _METHODS:
    if not re.fullmatch(_IMPORTABLE, str(name)):
      raise ValueError(
          f'`method` must be one of {", ".join(_METHODS)}, or'
          f" 'package.module:builder'; got {name!r}."
      )
    _import(name)
  return _METHODS[name]


def _import(name: str) -> None:
  """Imports 'package.module:builder' and registers it."""
  module_name, _, attribute = name.partition(':')
  try:
    module = importlib.import_module(module_name)
  except ImportError as error:
    raise ValueError(
        f'`method` {name!r} cannot be imported: {error}.'
    ) from error
  except (Exception, SystemExit) as error:
    raise ValueError(
        f'`method` {name!r} fails when it is imported:'
        f' {type(error).__name__}: {error}'
    ) from error
  if name in _METHODS:  # The module has registered it itself.
    return
  builder = getattr(module, attribute, None)
  if builder is None:
    raise ValueError(
        f'`method` {name!r} names no function: {module_name} has no'
        f' {attribute!r}.'
    )
  # The module may have registered it under a shorter name.
  known = [m for m in _METHODS.values() if m.builder is builder]
  label = known[0].label if known else attribute.removeprefix('build_')
  register(name, builder, label)


def build(
    problem: Problem, method: str = 'fednest', **options: object
) -> NestedProcess:
  """A process for `problem` by any registered method.

  Args:
    problem: From `bilevel`, `minimax`, `compositional`, `single_level` or
      `personal`.
    method: Its name; see `METHODS`, or 'package.module:builder'.
    **options: The method's options by their flat names, such as
      `inner_learning_rate`, `outer_learning_rate`, `inner_rounds`,
      `neumann_terms` and `batch_size`. `get_method(method).options` lists them.

  Returns:
    The process.

  Raises:
    ValueError: If an option does not fit; it names the option and the method.
  """
  found = get_method(method)
  arguments = options_lib.arguments_of(found.builder, method, options)
  process = found.builder(problem, **arguments)
  if not hasattr(process, 'next'):
    raise ValueError(
        f'`{found.builder.__name__}` must return a process, as'
        f' `fednest_tff.build_process` makes them; got {process!r}.'
    )
  return process


def to_markdown() -> str:
  """The table of all methods in the README."""
  rows = [
      '| method | description | builder | rounds per epoch |',
      '| --- | --- | --- | --- |',
  ]
  rows += [
      f'| `{m.name}` | {m.summary} | `{m.builder.__name__}` | {m.rounds} |'
      for m in _METHODS.values()
  ]
  return '\n'.join(rows)


register('fednest', fed_nest.build_fed_nest, 'FedNest', '2T + N + 2')
register('lfednest', fed_nest.build_lfed_nest, 'LFedNest', 'T + 1')
register(
    'fednest_sgd', fed_nest.build_fed_nest_sgd, 'FedNest-SGD', 'T + N + 2'
)
register(
    'lfednest_svrg', fed_nest.build_lfed_nest_svrg, 'LFedNest-SVRG', '2T + 1'
)
register(
    'lfednest_nonalt', one_round.build_lfed_nest_nonalt, 'LFedNest-NonAlt', '1'
)
register('fedavg_s', one_round.build_fed_avg_s, 'FedAvg-S', '1')
register('simfbo', sim_fbo.build_sim_fbo, 'SimFBO', '1')
register('shrofbo', sim_fbo.build_shro_fbo, 'ShroFBO', '1')
register('fedmsa', fed_msa.build_fed_msa, 'FedMSA', '2')
register('fedbioacc', fed_bio_acc.build_fed_bio_acc, 'FedBiOAcc', '1')
register(
    'penalty', penalty.build_penalty, 'Penalty', '1',
    kinds=['bilevel', 'compositional'],
)
register(
    'aggitd', agg_itd.build_agg_itd, 'AggITD', '2T + 2',
    kinds=['bilevel', 'compositional'],
)
register('fedmbo', fed_mbo.build_fed_mbo, 'FedMBO', 'T + N + 2')
register(
    'personal', personal.build_personal, 'Personal', '1', kinds=['personal']
)
