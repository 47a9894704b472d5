"""The problems of `experiments.compare`, with the step sizes to search.

Each is an experiment's problem, or one of those in closed form, with options
that are the same for all methods: local steps, minibatches, T and N. Methods
are tuned on clients of another seed; where there are images, also without the
test images, a sixth of the training images being held out in their place.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from experiments import (
    compositional,
    hyper_cleaning,
    hyper_representation,
    image_clients,
    loss_tuning,
    minimax,
    nested,
)
from experiments.closed_form import Case
from experiments.experiment import Experiment
from experiments.reproduce import quadratics
from experiments.settings import COMMON, Flags, Settings
import fednest_tff
from fednest_tff import registry, simulation
from fednest_tff.simulation import Curve, Entry, Range, StepRanges
from fednest_tff.simulation.tuned_runs import epochs_of

# Alternating methods spend their rounds on epochs, not on the series.
_ALTERNATING: Flags = dict(
    inner_rounds=1, ihgp='truncated', neumann_terms=1, outer_local_steps=10
)
_IMAGES: Flags = _ALTERNATING | dict(
    batch_size=64, local_steps=10, inner_local_epochs=1
)
# Full batches.
_SMALL: Flags = _ALTERNATING | dict(
    batch_size=None, local_steps=5, inner_local_steps=5, outer_local_steps=1
)
_SMALL_STEPS = StepRanges(
    Range(0.01, 1.0, 0.1), Range(0.01, 1.0, 0.1), Range(0.01, 1.0, 0.1)
)


class Preset(NamedTuple):
  """A problem to compare on.

  Attributes:
    experiment: Where trials come from; `None` for the quadratics.
    flags: Settings that differ from the experiment's defaults.
    steps: The step sizes to search.
    kind: Of the problem.
    target: Of the metric.
    larger_is_better: Whether the metric is to be large.
    curve: The metric, unless it is the experiment's.
  """

  experiment: Experiment | None
  flags: Flags
  steps: StepRanges
  kind: str = 'bilevel'
  target: float | None = None
  larger_is_better: bool = True
  curve: Curve | None = None


PRESETS: dict[str, Preset] = {
    'hyper_representation': Preset(
        hyper_representation.EXPERIMENT,
        _IMAGES | dict(ridge=0.0005, outer_local_steps=20),
        StepRanges(
            Range(0.01, 1.0, 0.1), Range(0.001, 1.0, 0.1), Range(0.01, 1.0, 0.1)
        ),
        target=0.95,
    ),
    'loss_tuning': Preset(
        loss_tuning.EXPERIMENT,
        # y is the whole network: one pass over its examples is too little.
        _IMAGES | dict(inner_local_epochs=5, outer_local_steps=1),
        # Larger steps of v diverge: the inner Hessian's largest eigenvalue is
        # about 50 on iid clients, and more on label shards.
        StepRanges(
            Range(0.01, 0.5, 0.05),
            Range(0.001, 0.1, 0.05),
            Range(0.001, 1.0, 0.0015),
            series_outer=Range(0.1, 100, 5.0),
        ),
        target=0.9,
    ),
    'hyper_cleaning': Preset(
        hyper_cleaning.EXPERIMENT,
        _IMAGES | dict(outer_local_steps=1),
        StepRanges(
            Range(0.01, 1.0, 0.1), Range(0.001, 1.0, 0.1), Range(1.0, 1e4, 100.)
        ),
        target=0.9,
    ),
    'emnist': Preset(
        hyper_representation.EXPERIMENT,
        _IMAGES | dict(
            dataset='emnist', partition='writers', backbone='cnn',
            hidden=['64'], ridge=0.0005,
        ),
        StepRanges(
            Range(0.01, 1.0, 0.1), Range(0.001, 1.0, 0.1), Range(0.01, 1.0, 0.1)
        ),
        target=0.95,
    ),
    'quadratic': Preset(
        None,
        _SMALL | dict(neumann_terms=3),
        _SMALL_STEPS,
        target=1e-3,
        larger_is_better=False,
        curve=Curve('x_distance', '|x - x*|', logarithmic=True),
    ),
    'saddle': Preset(
        minimax.EXPERIMENT,
        # t_i up to 5 in place of 0.1: curvatures that differ between clients.
        _SMALL | dict(problem='saddle', coupling=5.0, num_clients=20),
        StepRanges(
            Range(0.01, 1.0, 0.1), Range(0.01, 1.0, 0.1), Range(1e-3, 0.2, 0.02)
        ),
        kind='minimax',
        target=1e-3,
        larger_is_better=False,
    ),
    'robust_regression': Preset(
        minimax.EXPERIMENT,
        _SMALL | dict(problem='robust_regression'),
        _SMALL_STEPS,
        kind='minimax',
        larger_is_better=False,
    ),
    'portfolio': Preset(
        compositional.EXPERIMENT,
        _SMALL | dict(problem='portfolio'),
        StepRanges(
            Range(0.1, 1.0, 1.0), Range(0.1, 1.0, 1.0), Range(0.01, 1.0, 0.2)
        ),
        kind='compositional',
        target=1e-3,
        larger_is_better=False,
    ),
}

class Variant(NamedTuple):
  """A method with settings of its own.

  Attributes:
    label: In tables and plots.
    method: Of the registry.
    flags: Settings that differ from those of the other methods.
    fixed: Hyper-parameters that are not searched.
  """

  label: str
  method: str
  flags: Flags = {}
  fixed: Mapping[str, float] = {}


_VARIANTS = {
    'simfbo_momentum': Variant(
        'SimFBO, server momentum 0.9', 'simfbo', dict(server_momentum=0.9)
    ),
}
# Only where the hypergradient has an indirect part.
_BILEVEL_VARIANTS = {
    'simfbo_v0': Variant(
        'SimFBO, v = 0', 'simfbo', fixed={'linear_learning_rate': 0.0}
    ),
    'simfbo_momentum_v0': Variant(
        'SimFBO, server momentum 0.9, v = 0', 'simfbo',
        dict(server_momentum=0.9), {'linear_learning_rate': 0.0},
    ),
}
# FedNest as the paper ran it on images: not tuned.
_IMAGE_VARIANTS = {
    'fednest_paper': Variant(
        "FedNest, the paper's steps",
        'fednest',
        dict(
            ihgp='stochastic', neumann_terms=5, inner_local_epochs=5,
            outer_local_steps=1,
        ),
        dict(
            inner_learning_rate=0.01, outer_learning_rate=0.01, smoothness=0.0
        ),
    ),
}


def _variants(preset: Preset) -> dict[str, Variant]:
  found = dict(_VARIANTS)
  if preset.kind == 'bilevel':
    found |= _BILEVEL_VARIANTS
  if preset.experiment is hyper_representation.EXPERIMENT:
    found |= _IMAGE_VARIANTS
  return found


def entries(preset: Preset) -> dict[str, Entry]:
  """All methods that are defined for a problem, and the ablations.

  Args:
    preset: The problem.

  Returns:
    The methods by name. 'simfbo_v0' is SimFBO with v = 0, which leaves the
    indirect part of the hypergradient out; 'simfbo_momentum' has a momentum at
    the server; 'simfbo_momentum_v0' is both.
  """
  found = {
      name: Entry(registry.get_method(name).label, name)
      for name in registry.method_names()
      if preset.kind in registry.get_method(name).kinds
  }
  for name, variant in _variants(preset).items():
    # One without settings of its own shares what is compiled for the method.
    built = name if variant.flags else variant.method
    found[name] = Entry(variant.label, built, variant.fixed)
  return found


def quadratic_case(num_clients: int, seed: int) -> Case:
  """A bilevel problem with clients of unequal curvature, in closed form."""
  drawn = quadratics.Quadratics(
      num_clients=num_clients, num_examples=1, dim=10, curvature=(0.5, 2.0),
      heterogeneity=1.0, noise=0.0, seed=seed,
  )
  # x + A^-1 (A^-1 (x + b) - c) = 0.
  A, b, c = (value[0] for value in drawn.means)
  inverse = np.linalg.inv(A)
  x = np.linalg.solve(
      np.eye(len(b)) + inverse @ inverse, inverse @ (c - inverse @ b)
  )[np.newaxis]
  return Case(
      drawn.problem('bilevel'), drawn.datasets(), x, drawn.inner_solution(x)
  )


def _quadratic_trial(settings: Settings, seed: int) -> simulation.Trial:
  case = quadratic_case(settings.num_clients or 10, seed)
  return nested.closed_form_trial(case, settings, seed)


def resolve(preset: Preset, given: Flags) -> Settings:
  """The settings of a problem, from those that were chosen.

  Args:
    preset: The problem.
    given: What the user chose, such as the data and its partition.

  Returns:
    All settings, with the options of all methods.
  """
  if preset.experiment is None:
    defaults: Flags = dict(num_clients=10, clients_per_round=None)
    steps: Flags = nested.STEP_SIZES
    return Settings(**(COMMON | defaults | steps | preset.flags | given))
  # Step sizes are only where the search starts from.
  steps = {
      f'{level}_learning_rate': getattr(preset.steps, level).start
      for level in ('inner', 'linear', 'outer')
  }
  methods = [
      name for name in entries(preset) if name in registry.method_names()
  ]
  known = preset.experiment.flags()
  chosen = {
      name: value
      for name, value in (preset.flags | steps).items()
      if name in known and name not in preset.experiment.without
  }
  return preset.experiment.resolve(chosen | dict(method=methods) | given)


def _with(settings: Settings, **changes: object) -> Settings:
  return Settings(**(vars(settings) | changes))


def contest(
    preset: Preset, settings: Settings, decay: simulation.Plan | None = None
) -> simulation.Contest:
  """The problem for `simulation.compare`.

  Args:
    preset: The problem.
    settings: From `resolve`.
    decay: If the steps of all methods are to fall to 0 in the second half of
      their rounds, the plan, which says how many these are.

  Returns:
    The problem, with trials by seed.
  """

  def trial_of(settings: Settings, seed: int) -> simulation.Trial:
    if preset.experiment is None:
      return _quadratic_trial(settings, seed)
    return preset.experiment.make_trial(settings, seed)

  def make_trial(seed: int, is_tuning: bool) -> simulation.Trial:
    chosen = _with(settings, hold_out=is_tuning)
    trial = trial_of(chosen, seed)
    variants = _variants(preset)

    def build(name: str) -> simulation.Process:
      method, own = name, chosen
      if name in variants:
        method = variants[name].method
        own = _with(chosen, **variants[name].flags)
        process = trial_of(own, seed).build(method)
      else:
        process = trial.build(method)
      # What has no steps to search keeps them as they are.
      if decay is None or name in _IMAGE_VARIANTS:
        return process
      rounds = decay.tuning_rounds if is_tuning else decay.rounds
      cost = fednest_tff.communication_cost(process)
      epochs = epochs_of(rounds, cost.rounds)
      return trial_of(nested.decaying(own, epochs), seed).build(method)

    fingerprint = ''
    if getattr(chosen, 'dataset', None) is not None:
      fingerprint = image_clients.fingerprint(chosen)
    return trial._replace(build=build, fingerprint=fingerprint)

  curve = preset.curve
  if curve is None:
    assert preset.experiment is not None
    curve = preset.experiment.curve(settings)
  return simulation.Contest(
      make_trial, curve, preset.larger_is_better, preset.steps, preset.target
  )


def choose(found: Mapping[str, Entry], names: list[str]) -> dict[str, Entry]:
  """The entries of these names; a method may be 'package.module:builder'.

  Raises:
    ValueError: If a name is not known or given twice, or if there is none.
  """
  if not names:
    raise ValueError(f'`methods` is empty: choose from {", ".join(found)}')
  if len({*names}) < len(names):
    raise ValueError('`methods` names a method twice')
  if names == ['all']:
    return dict(found)
  chosen = {}
  for name in names:
    if name in found:
      chosen[name] = found[name]
    elif ':' in name:
      label = registry.get_method(name).label
      # Two modules may have builders of one name.
      is_taken = any(entry.label == label for entry in chosen.values())
      chosen[name] = Entry(name if is_taken else label, name)
    else:
      raise ValueError(
          f'`methods`={name} is none of {", ".join(found)} for this problem'
      )
  return chosen
