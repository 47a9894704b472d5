"""Writes `flags.json`, from which `--help` and wrong flags are answered.

  python -m experiments.flags
"""

from collections.abc import Callable, Sequence
import json
from typing import Any

from absl import flags as absl_flags
import tensorflow_federated as tff

from experiments import (
    benchmark,
    compare,
    compositional,
    hyper_cleaning,
    hyper_representation,
    loss_tuning,
    minimax,
    personalization,
    program,
    quick,
    runtimes,
    single_level,
)
from experiments import settings as settings_lib
from experiments.experiment import Experiment
from experiments.reproduce import __main__ as reproduce

FLAGS = absl_flags.FLAGS
EXPERIMENTS = tuple(
    module.EXPERIMENT
    for module in (
        compositional, hyper_cleaning, hyper_representation, loss_tuning,
        minimax, personalization, single_level,
    )
)
_KINDS = {
    absl_flags.BooleanParser: 'boolean',
    absl_flags.EnumParser: 'enum',
    absl_flags.FloatParser: 'float',
    absl_flags.IntegerParser: 'integer',
    absl_flags.ListParser: 'list',
    absl_flags.ArgumentParser: 'string',
}


def _copy(flag: absl_flags.Flag) -> dict[str, Any]:
  kind = _KINDS[type(flag.parser)]
  found = dict(
      name=flag.name, kind=kind, default=flag.default, help=flag.help
  )
  if isinstance(flag.parser, absl_flags.EnumParser):
    found['choices'] = list(flag.parser.enum_values)
    # absl puts the choices before the text.
    found['help'] = flag.help.removeprefix(f'<{"|".join(found["choices"])}>: ')
  if isinstance(flag, absl_flags.MultiFlag):
    found['kind'] = f'multi_{kind}'
    # absl adds a line to the text.
    found['help'] = found['help'].partition(';\n')[0]
  if kind in ('float', 'integer') and flag.parser.lower_bound is not None:
    found['lower_bound'] = flag.parser.lower_bound
  return found


def _describe(define: Callable[[], list[str]]) -> list[dict[str, Any]]:
  """Copies the flags whose names `define` returns; they are as before then."""
  before = {name: (FLAGS[name].help, FLAGS[name].default) for name in FLAGS}
  try:
    return [_copy(FLAGS[name]) for name in sorted(define())]
  finally:
    for name, (text, default) in before.items():
      FLAGS[name].help = text
      if FLAGS[name].default != default:
        FLAGS.set_default(name, default)


def describe(experiment: Experiment) -> dict[str, Any]:
  """The flags of an experiment as `--help` shows them, and its methods."""

  def define() -> list[str]:
    program.define_flags(experiment)
    return [*settings_lib.PLACES, *experiment.flags()]

  return dict(
      known=dict(method=experiment.methods()), flags=_describe(define)
  )


def _describe_own(
    define: Callable[[absl_flags.FlagValues], None], **known: Sequence[str]
) -> dict[str, Any]:
  """Copies flags that are not among those of this process.

  Args:
    define: Defines them.
    **known: For some flags, the values that they may have.

  Returns:
    Their description.
  """
  values = absl_flags.FlagValues()
  define(values)
  return dict(
      known=known, flags=[_copy(values[name]) for name in sorted(values)]
  )


def make() -> str:
  """The content of the file."""
  found = {each.name: describe(each) for each in EXPERIMENTS}
  found['compare'] = dict(known={}, flags=_describe(compare.define_flags))
  found['benchmark'] = _describe_own(
      benchmark.define_flags, only=benchmark.NAMES
  )
  found['reproduce'] = _describe_own(
      reproduce.define_flags, figure=[*reproduce.FIGURES, 'all']
  )
  return json.dumps(found, indent=1, sort_keys=True) + '\n'


def write(path: str) -> None:
  """Writes the file."""
  with open(path, 'w') as file:
    file.write(make())


if __name__ == '__main__':
  tff.framework.set_default_context(runtimes.NoRuntime())
  write(quick.COPY)
