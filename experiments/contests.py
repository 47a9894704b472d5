"""Contests for `experiments.compare`: trials of a problem, and its methods.

Each problem is an experiment's, or one of those in closed form. Methods are
tuned on clients of another seed; where there are images, also without the test
images, a sixth of the training images being held out in their place.
"""

from collections.abc import Mapping

import numpy as np

from experiments import image_clients, nested
from experiments import settings as settings_lib
from experiments.closed_form import Case
from experiments.contest_presets import IMAGE_VARIANTS, Preset, variants_of
from experiments.reproduce import quadratics
from experiments.settings import Flags, Settings
import fednest_tff
from fednest_tff import registry, simulation
from fednest_tff.simulation import Entry
from fednest_tff.simulation.tuned_runs import epochs_of


def entries(preset: Preset) -> dict[str, Entry]:
  """All methods that are defined for a problem, ablations and baselines.

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
  for name, variant in variants_of(preset).items():
    # One without settings of its own shares what is compiled for the method.
    built = name if variant.flags else variant.method
    found[name] = Entry(variant.label, built, variant.fixed, variant.steps)
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
    return settings_lib.resolve(
        'compare --problem=quadratic', defaults | steps | preset.flags, given
    )
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
    variants = variants_of(preset)

    def build(name: str) -> simulation.Process:
      method, own = name, chosen
      if name in variants:
        method = variants[name].method
        own = _with(chosen, **variants[name].flags)
        process = trial_of(own, seed).build(method)
      else:
        process = trial.build(method)
      # What has no steps to search keeps them as they are.
      if decay is None or name in IMAGE_VARIANTS:
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
      # Builders of other modules may have names that are taken.
      known = (*found.values(), *chosen.values())
      is_taken = any(entry.label == label for entry in known)
      chosen[name] = Entry(name if is_taken else label, name)
    else:
      raise ValueError(
          f'`methods`={name} is none of {", ".join(found)} for this problem'
      )
  return chosen
