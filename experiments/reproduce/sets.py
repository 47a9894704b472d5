"""The runs behind each figure, for each preset.

A run has a directory named after what it is, so figures share runs. `paper`
takes its settings from the preset files; `quick` is the same on digits, smaller
and with steps that suit them; `tuned` is described in its own preset files.
"""

import math
import os
from typing import Any, NamedTuple, TypeAlias

from absl import flags

from experiments import hyper_representation, loss_tuning, minimax
from experiments.experiment import Experiment
from experiments.settings import Flags
from fednest_tff import registry

# The key of a run among those of a figure: a text, or a tuple of texts and
# numbers.
Key: TypeAlias = Any

PRESETS = ('quick', 'paper', 'tuned')
FIGURES = ('2a', '2b', '2c', '3a', '3b', '4', '5', '6', '6_rounds')
# The others vary what `tuned` sets, or have nothing to tune.
TUNED_FIGURES = ('2a', '2b', '3a', '3b', '5')
PARTITIONS = ('iid', 'shards')
OUTER_STEPS = (0.0075, 0.005, 0.0025, 0.001)
SPREADS = (1.0, 10.0)
SADDLE_METHODS = ('fednest', 'lfednest', 'fedavg_s')
LIGHT_METHODS = ('lfednest', 'lfednest_svrg', 'lfednest_nonalt')
STEP_METHODS = ('fednest', 'fednest_sgd', 'lfednest', 'lfednest_svrg')

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), 'presets')


class Run(NamedTuple):
  """One method with one setting, over all seeds.

  Attributes:
    name: Of its directory.
    experiment: What to run.
    given: Settings that differ from the experiment's defaults.
  """

  name: str
  experiment: Experiment
  given: Flags


class Preset(NamedTuple):
  """How large everything is.

  Attributes:
    name: One of `PRESETS`.
    seeds: Runs per setting.
    hyper: Settings of the hyper-representation runs.
    tuning: Settings of the loss-tuning runs.
    saddle: Settings of the minimax runs.
    partial: Clients per round in the partial minimax runs.
    step_epochs: Epochs of the runs in figure 6.
    outer_steps: alpha in figure 6.
    tau: Of FedOut, the larger one in figure 2c.
  """

  name: str
  seeds: int
  hyper: Flags
  tuning: Flags
  saddle: Flags
  partial: int
  step_epochs: int
  outer_steps: tuple[float, ...]
  tau: int = 5


def read_flag_file(name: str) -> Flags:
  """The settings in a file of `experiments/presets/`."""
  path = os.path.join(_FOLDER, f'{name}.flags')
  arguments = flags.FLAGS.read_flags_from_files([f'--flagfile={path}'])
  found = {}
  for argument in arguments:
    flag, _, text = argument.removeprefix('--').partition('=')
    # A boolean flag may stand without a value. `reproduce` has a flag
    # `--preset` with other values.
    found[flag] = (
        text if flag == 'preset'
        else flags.FLAGS[flag].parser.parse(text or 'true')
    )
  return found


_QUICK_DIGITS = dict(
    dataset='digits',
    num_clients=20,
    clients_per_round=10,
    inner_learning_rate=0.02,
    outer_learning_rate=0.02,
    batch_size=32,
    epochs=60,
    # What counts is the time to compile.
    unroll=0,
)


def make_preset(name: str, data_dir: str | None, seeds: int | None) -> Preset:
  """A preset by name, on the data in `data_dir`."""
  hyper, tuning, saddle = (
      read_flag_file(f'paper_fig{k}') for k in (2, 3, 4)
  )
  for settings in (hyper, tuning):
    del settings['partition']
  if name == 'quick':
    hyper |= _QUICK_DIGITS | dict(hidden=['64'])
    tuning |= _QUICK_DIGITS | dict(hidden=['64', '32'], imbalance=0.1)
    tuning |= dict(inner_learning_rate=0.05, outer_learning_rate=0.2)
    saddle |= dict(num_clients=50, epochs=100, unroll=0)
    return Preset(
        name, seeds or 1, hyper, tuning, saddle, 10, 60,
        (0.04, 0.02, 0.01, 0.005),
    )
  # As far as the published curves of figures 2, 3 and 5 go. A hundred points
  # are enough for a curve.
  common = dict(epochs=500, epochs_per_evaluation=5, data_dir=data_dir)
  hyper |= common
  tuning |= common
  saddle |= dict(epochs=100)
  if name == 'tuned':
    hyper |= read_flag_file('tuned_fig2')
    tuning |= read_flag_file('tuned_fig3')
  return Preset(name, seeds or 3, hyper, tuning, saddle, 50, 150, OUTER_STEPS)


def _hyper(
    preset: Preset, method: str, partition: str, **given: object
) -> Run:
  tail = ''.join(f'-{key}={value}' for key, value in given.items())
  return Run(
      f'hyper-{partition}-{method}{tail}',
      hyper_representation.EXPERIMENT,
      preset.hyper | dict(method=[method], partition=partition) | given,
  )


def _tuning(
    preset: Preset, method: str, partition: str, **given: object
) -> Run:
  tail = ''.join(f'-{key}' for key in given)
  settings = preset.tuning | dict(method=[method], partition=partition) | given
  if given.get('centralised'):
    # As many local steps per epoch as ten clients take together.
    for key in ('num_clients', 'clients_per_round', 'inner_local_epochs'):
      settings.pop(key, None)
    settings['inner_local_steps'] = 100
  if given.get('no_tuning'):
    settings['neumann_terms'] = 1  # What comes of it is not used.
  return Run(
      f'tuning-{partition}-{method}{tail}', loss_tuning.EXPERIMENT, settings
  )


def _saddle(preset: Preset, method: str, spread: float, partial: bool) -> Run:
  settings = preset.saddle | dict(method=[method], spread=spread)
  if partial:
    settings['clients_per_round'] = preset.partial
  kind = 'partial' if partial else 'full'
  return Run(
      f'saddle-s{spread:g}-{kind}-{method}', minimax.EXPERIMENT, settings
  )


def _differences(preset: Preset) -> dict[Key, Run]:
  """Settings of the authors' code beside those of the preset."""
  variants: dict[str, Flags] = {
      'base': {},
      'truncated': dict(ihgp='truncated'),
      'plain': dict(standardize=False),
      'split': dict(inner_fraction=0.8),
  }
  found: dict[Key, Run] = {
      (name, partition): _hyper(
          preset, 'fednest', partition,
          epochs=min(100, preset.hyper['epochs']), **given,
      )
      for name, given in variants.items() for partition in PARTITIONS
      if (name, partition) != ('split', 'iid')
  }
  # l = 1/alpha, as in the code (and alpha = beta), does not bound a client's
  # own Hessian.
  bound = 4 / preset.hyper['inner_learning_rate']
  found['light', 'shards'] = _hyper(preset, 'lfednest', 'shards')
  found['light, bound', 'shards'] = _hyper(
      preset, 'lfednest', 'shards', smoothness=bound
  )
  found['tuning'] = _tuning(preset, 'fednest', 'iid')
  found['tuning, no tuning'] = _tuning(preset, 'fednest', 'iid', no_tuning=True)
  # Without the factor 1/l, that is with l times the step.
  found['tuning, not divided'] = _tuning(
      preset, 'fednest', 'iid',
      outer_learning_rate=(
          preset.tuning['outer_learning_rate']
          / preset.tuning['inner_learning_rate']
      ),
  )
  found['with b'] = _saddle(preset, 'fednest', 1.0, True)
  # b_i = 0 for all clients is the update without b.
  found['without b'] = _saddle(preset, 'fednest', 0.0, True)
  return found


def _rounds_per_epoch(method: str, settings: Flags) -> int:
  """The value of the registry's formula, such as '2T + N + 2'."""
  values = {
      'T': settings['inner_rounds'], 'N': settings['neumann_terms'], '': 1
  }
  total = 0
  for term in registry.get_method(method).rounds.split(' + '):
    factor = term.rstrip('TN')
    total += int(factor or 1) * values[term.removeprefix(factor)]
  return total


def _at_equal_rounds(preset: Preset) -> dict[Key, Run]:
  """Figure 6 with as many rounds for all methods, and with l = 1/alpha."""
  per_epoch = {
      method: _rounds_per_epoch(method, preset.hyper)
      for method in STEP_METHODS
  }
  # About as many as FedNest has in figure 6, and whole epochs for all.
  unit = math.lcm(*per_epoch.values())
  rounds = unit * max(1, preset.step_epochs * per_epoch['fednest'] // unit)
  found = {}
  for step in preset.outer_steps:
    for method in STEP_METHODS:
      run = _hyper(
          preset, method, 'shards', outer_learning_rate=step,
          smoothness=1 / step,
      )
      # Not part of the name: with more epochs a run goes on.
      epochs = dict(epochs=rounds // per_epoch[method])
      found[step, method] = run._replace(given=run.given | epochs)
  return found


def runs_of(figure: str, preset: Preset) -> dict[Key, Run]:
  """The runs of a figure; keys are what its drawing and claims ask for."""
  found: dict[Key, Run]
  if figure == '2a':
    return {
        (method, partition): _hyper(preset, method, partition)
        for method in ('fednest', 'lfednest') for partition in PARTITIONS
    }
  if figure == '2b':
    return {
        (method, partition): _hyper(preset, method, partition)
        for method in ('fednest', 'fednest_sgd') for partition in PARTITIONS
    }
  if figure == '2c':
    found = {}
    for partition in PARTITIONS:
      found[1, partition] = _hyper(preset, 'fednest', partition)
      found[preset.tau, partition] = _hyper(
          preset, 'fednest', partition, outer_local_steps=preset.tau
      )
    return found
  if figure == '3a':
    found = {
        (method, partition): _tuning(preset, method, partition)
        for method in ('fednest', 'lfednest') for partition in PARTITIONS
    }
    found['untuned clients'] = _tuning(
        preset, 'fednest', 'iid', no_tuning=True
    )
    # With one client there is no drift that SVRG could correct.
    found['centralised'] = _tuning(
        preset, 'fednest_sgd', 'iid', centralised=True
    )
    found['untuned'] = _tuning(
        preset, 'fednest_sgd', 'iid', centralised=True, no_tuning=True
    )
    return found
  if figure == '3b':
    return {
        (method, partition): _tuning(preset, method, partition)
        for method in ('fednest', 'fednest_sgd') for partition in PARTITIONS
    }
  if figure == '4':
    return {
        (method, spread, partial): _saddle(preset, method, spread, partial)
        for method in SADDLE_METHODS
        for spread in SPREADS
        for partial in (False, True)
    }
  if figure == '5':
    return {
        method: _hyper(preset, method, 'shards') for method in LIGHT_METHODS
    }
  if figure == '6':
    return {
        (step, method): _hyper(
            preset, method, 'shards', outer_learning_rate=step,
            epochs=preset.step_epochs,
        )
        for step in preset.outer_steps for method in STEP_METHODS
    }
  if figure == '6_rounds':
    return _at_equal_rounds(preset)
  if figure == 'code':
    return _differences(preset)
  raise ValueError(f'`figure` must be one of {FIGURES}; got {figure!r}.')

