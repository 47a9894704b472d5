"""The problems of `experiments.compare`: settings, and step sizes to search.

Local steps, minibatches, T and N are the same for all methods, but for some
variants of a method, which have settings of their own.
"""

from collections.abc import Mapping
from typing import NamedTuple

from experiments import (
    compositional,
    hyper_cleaning,
    hyper_representation,
    loss_tuning,
    minimax,
)
from experiments.experiment import Experiment
from experiments.settings import Flags
from fednest_tff.simulation import Curve, Range, StepRanges

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
    steps: The step sizes to search if they are not those of the problem.
  """

  label: str
  method: str
  flags: Flags = {}
  fixed: Mapping[str, float] = {}
  steps: StepRanges | None = None


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
    # Four more rounds per epoch, for a p that is nearer to H^-1 grad_y f.
    'fednest_n5': Variant('FedNest, N = 5', 'fednest', dict(neumann_terms=5)),
}
# FedNest as the paper ran it on images: not tuned, so its steps do not fall.
IMAGE_VARIANTS = {
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


def _baselines_of(preset: Preset) -> dict[str, Variant]:
  """Those of hyper-cleaning, tuned like the methods.

  The classifier, which is y in the methods, is their only variable.
  """
  if preset.experiment is not hyper_cleaning.EXPERIMENT:
    return {}
  steps = StepRanges(*[preset.steps.inner] * 3)
  return {
      name: Variant(baseline.label, name, steps=steps)
      for name, baseline in preset.experiment.baselines.items()
  }


def variants_of(preset: Preset) -> dict[str, Variant]:
  """The methods with settings of their own that a problem has."""
  found = _VARIANTS | _baselines_of(preset)
  if preset.kind == 'bilevel':
    found |= _BILEVEL_VARIANTS
  if preset.experiment is hyper_representation.EXPERIMENT:
    found |= IMAGE_VARIANTS
  return found
