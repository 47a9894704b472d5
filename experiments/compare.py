r"""Compares methods at equal rounds, bytes, computation and tuning.

  python -m experiments.compare --output_dir=outputs/compare
  python -m experiments.compare --problem=hyper_representation --dataset=mnist \
      --data_dir=DIR --partition=shards --methods=simfbo,fednest --rounds=1000 \
      --budget=12 --seeds=3 --output_dir=outputs/compare_shards

Every method has as many trials on held-out training data; its best setting then
runs on several seeds against the test data. Run again with the same flags, it
goes on where it was stopped. `--methods` and `--seeds` may grow, and so may
`--rounds` if `--tuning_rounds` stays as it was.
The output directory has leaderboard.csv, leaderboard.md, leaderboard.png and
trials.csv.
"""

import math
import sys

from absl import flags, logging
import tensorflow_federated as tff

from experiments import contest_presets, contests, program, runs, runtimes
from experiments import settings as settings_lib
from fednest_tff import simulation

FLAGS = flags.FLAGS
_DEFAULT = 'hyper_representation'
_SEEDS = 3
_METHODS = flags.DEFINE_list(
    'methods', ['all'],
    'Methods, separated by commas: names of the registry, simfbo_momentum,'
    ' simfbo_v0 and simfbo_momentum_v0 (v = 0), fednest_n5 (N = 5),'
    " fednest_paper (the paper's steps), package.module:builder; or all.",
)
_ROUNDS = flags.DEFINE_integer(
    'rounds', 200, 'Communication rounds of the final runs.', lower_bound=1
)
_TUNING_ROUNDS = flags.DEFINE_integer(
    'tuning_rounds', None,
    'Communication rounds of a trial; default: as many as --rounds.',
    lower_bound=1,
)
_BUDGET = flags.DEFINE_integer(
    'budget', 12, 'Trials per method.', lower_bound=1
)
_TUNING_SEEDS = flags.DEFINE_integer(
    'tuning_seeds', 1,
    'Seeds that a trial runs on: with 2, settings that diverge on another seed'
    ' are seldom chosen.',
    lower_bound=1,
)
_PER_EVALUATION = flags.DEFINE_integer(
    'rounds_per_evaluation', 10, 'Rounds from one evaluation to the next.',
    lower_bound=1,
)
_TARGET = flags.DEFINE_float(
    'target', None, 'Value of the metric whose cost is told.'
)
_DECAY = flags.DEFINE_boolean(
    'decay', False,
    'Let the steps of all methods fall to 0 in the second half of the rounds.',
)
# Flags of the experiments that may be chosen here.
_CHOOSABLE = (
    'dataset', 'data_dir', 'partition', 'dirichlet_alpha', 'num_clients',
    'clients_per_round', 'wrong_labels', 'wrong_labels_seed', 'imbalance',
    'batch_size', 'local_steps', 'hidden', 'inner_fraction', 'ridge', 'runtime',
    'compiled', 'unroll', 'devices',
)
# Those that the quadratics do not have.
_NOT_OF_QUADRATICS = {
    'dataset', 'data_dir', 'partition', 'dirichlet_alpha', 'wrong_labels',
    'wrong_labels_seed', 'imbalance', 'hidden', 'inner_fraction', 'ridge',
}
# Settings of the experiments that a comparison has its own for.
_REPLACED = (
    'method', 'epochs', 'seed', 'seeds', 'epochs_per_evaluation',
    'epochs_per_checkpoint',
)
_OWN = ('problem', 'seeds', 'output_dir', 'overwrite')


def _plan(given: settings_lib.Flags) -> simulation.Plan:
  return simulation.Plan(
      rounds=_ROUNDS.value,
      tuning_rounds=_TUNING_ROUNDS.value or _ROUNDS.value,
      budget=_BUDGET.value,
      seeds=given.get('seeds', _SEEDS),
      rounds_per_evaluation=_PER_EVALUATION.value,
      tuning_seeds=_TUNING_SEEDS.value,
  )


def _compare(given: settings_lib.Flags) -> None:
  name = given.get('problem', _DEFAULT)
  if name not in contest_presets.PRESETS:
    raise settings_lib.SettingsError(
        f'--problem={name} is none of {", ".join(contest_presets.PRESETS)}'
    )
  unknown = sorted(given.keys() - {*_CHOOSABLE, *_OWN})
  if unknown:
    raise settings_lib.SettingsError(
        f'--{unknown[0]} has no effect in compare: leave it out'
    )
  preset = contest_presets.PRESETS[name]
  unused = sorted(given.keys() & _NOT_OF_QUADRATICS)
  if name == 'quadratic' and unused:
    raise settings_lib.SettingsError(
        f'--{unused[0]} has no effect in --problem=quadratic: leave it out'
    )
  if _TARGET.value is not None:
    if not math.isfinite(_TARGET.value):
      raise settings_lib.SettingsError(
          f'--target={_TARGET.value} must be finite'
      )
    preset = preset._replace(target=_TARGET.value)
  settings = contests.resolve(
      preset, {k: v for k, v in given.items() if k not in _OWN}
  )
  try:
    chosen = contests.choose(contests.entries(preset), _METHODS.value)
  except ValueError as error:
    text = str(error).replace('`method`', '`methods`')
    raise settings_lib.SettingsError(text) from error
  runtimes.use_runtime(settings)
  output_dir = given.get('output_dir', f'outputs/compare_{name}')
  decisive = {
      key: value
      for key, value in vars(settings).items()
      if key not in _REPLACED
  }
  plan = _plan(given)
  decisive['decay'] = _DECAY.value
  if _DECAY.value:  # The steps depend on the rounds, which may not grow then.
    decisive['rounds'] = plan.rounds
  try:
    simulation.compare(
        contests.contest(preset, settings, plan if _DECAY.value else None),
        chosen,
        plan,
        output_dir,
        settings={'experiment': 'compare', 'problem': name, **decisive},
        about=runs.about(),
        title=f'{name}: {", ".join(_described(settings, name, given))}',
        overwrite=given.get('overwrite', False),
        places=settings_lib.MACHINES,
    )
  except ValueError as error:
    raise settings_lib.SettingsError(str(error)) from error
  with open(f'{output_dir}/leaderboard.md', encoding='utf-8') as file:
    print(file.read())
  print(f'tables and plot: {output_dir}')


def _described(
    settings: settings_lib.Settings, problem: str, given: settings_lib.Flags
) -> list[str]:
  """The data and choices, for a title that begins with the problem."""
  found = []
  for name in ('dataset', 'partition'):
    value = getattr(settings, name, None)
    if value is not None and value != problem:
      found.append(str(value))
  wrong = getattr(settings, 'wrong_labels', None)
  if wrong is not None:
    found.append(f'{wrong:.0%} wrong labels')
  total = getattr(settings, 'num_clients', None)
  size = getattr(settings, 'clients_per_round', None)
  if total:
    found.append(f'{size} of {total} clients' if size else f'{total} clients')
  elif size:
    found.append(f'{size} clients per round')
  if 'ridge' in given:
    found.append(f'ridge {settings.ridge:g}')
  if _DECAY.value:
    found.append('steps fall to 0 in the second half')
  return found


def main(argv: list[str]) -> int:
  """Runs a comparison as the flags say; returns the exit code."""
  logging.set_verbosity(logging.WARNING)
  try:
    if len(argv) > 1:
      raise settings_lib.SettingsError(f'unexpected argument {argv[1]!r}')
    _compare(settings_lib.given_by_flags())
  except (Exception, KeyboardInterrupt) as error:
    return program.end_with(error)
  return 0


def define_flags() -> list[str]:
  """Makes the flags those that `--help` shows; returns their names."""
  for name in (*_CHOOSABLE, *_OWN):
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
  FLAGS['problem'].help = (
      f'One of {", ".join(contest_presets.PRESETS)}; {_DEFAULT} if not given.'
  )
  FLAGS['seeds'].help = (
      f'Seeds of the final runs, from 0; {_SEEDS} if not given.'
  )
  FLAGS['output_dir'].help = (
      'Where everything is written; outputs/compare_PROBLEM if not given.'
  )
  FLAGS['local_steps'].help = (
      'Steps per round of the methods that step on x, y and v at once; the'
      ' others have the local work of the problem.'
  )
  return [
      *_CHOOSABLE,
      *_OWN,
      *(
          flag.name
          for flag in (
              _METHODS, _ROUNDS, _TUNING_ROUNDS, _BUDGET, _TUNING_SEEDS,
              _PER_EVALUATION, _TARGET, _DECAY,
          )
      ),
  ]


def run() -> None:
  """The `__main__` of the binary; does not return."""
  tff.framework.set_default_context(runtimes.NoRuntime())
  define_flags()
  program.start(main)


if __name__ == '__main__':
  run()
