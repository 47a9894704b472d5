"""From settings to a process, by any method of the registry."""

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from experiments import image_clients
from experiments.closed_form import Case
from experiments.settings import Settings
import fednest_tff
from fednest_tff import options as options_lib
from fednest_tff import simulation

# Options that problems without an inverse Hessian lack: minimax has none, and
# that of a compositional problem is the identity.
IHGP_OPTIONS = options_lib.names_of(fednest_tff.FederatedInverseHessian)
_SIMULTANEOUS = options_lib.names_of(
    fednest_tff.SimultaneousWork
) | options_lib.names_of(fednest_tff.ServerSteps)
# Options that problems lack whose hypergradient has no indirect part.
LINEAR_OPTIONS = {name for name in _SIMULTANEOUS if 'linear' in name} | {
    'radius', 'penalty'
}
# Options that a single-level problem lacks.
INNER_OPTIONS = (
    options_lib.names_of(fednest_tff.LocalWork, 'inner')
    - options_lib.names_of(fednest_tff.LocalWork, 'outer')
    | {name for name in _SIMULTANEOUS if 'inner' in name}
    | {'inner_rounds', 'inner_aggregator', 'inner_method'}
)
# The paper's step sizes, for want of better.
STEP_SIZES = dict(
    inner_learning_rate=0.01,
    linear_learning_rate=0.01,
    outer_learning_rate=0.01,
    local_steps=10,
)


def build(
    problem: fednest_tff.Problem,
    method: str,
    settings: Settings,
    seed: int,
    **options: object,
) -> fednest_tff.NestedProcess:
  """The process that the settings describe.

  Args:
    problem: The problem to solve.
    method: A method of the registry.
    settings: With the method's options, or some of them.
    seed: Of the initial point and of all draws.
    **options: Further options.

  Returns:
    The process.
  """
  known = fednest_tff.get_method(method).options
  chosen = {
      name: value
      for name, value in vars(settings).items()
      if name in known and value is not None
  }
  chosen |= vars(settings).get('own_defaults', {}).get(method, {})
  if 'inner_local_steps' in chosen:
    chosen.pop('inner_local_epochs', None)
  if 'local_epochs' in chosen:
    chosen.pop('local_steps', None)
  return fednest_tff.build(
      problem, method, **(chosen | dict(seed=seed) | options)
  )


def decaying(settings: Settings, epochs: int) -> Settings:
  """Settings whose step sizes fall to 0 in the second half of the epochs.

  A step size is then a function of the epoch with a largest value of 1. The
  number in a process's state, which `set_hparams` changes, is its factor.

  Args:
    settings: With step sizes, or some of them.
    epochs: How many epochs there will be.

  Returns:
    The changed settings.
  """

  def factor(epoch: tf.Tensor) -> tf.Tensor:
    left = 1 - tf.cast(epoch, tf.float32) / epochs
    return tf.clip_by_value(2 * left, 0.0, 1.0)

  known = vars(settings)
  rates = {
      name: factor
      for name in STEP_SIZES
      if name.endswith('learning_rate') and known.get(name) is not None
  }
  return Settings(**(known | rates))


def _distance(a: npt.ArrayLike, b: npt.NDArray[np.floating]) -> float:
  return float(np.linalg.norm(np.asarray(a) - b))


def closed_form_trial(
    case: Case, settings: Settings, seed: int
) -> simulation.Trial:
  """A trial that measures the distance to a known solution."""
  total = len(case.datasets)
  size = image_clients.cohort_size(settings, total, default=total)
  return simulation.Trial(
      lambda method: build(case.problem, method, settings, seed),
      image_clients.make_cohort(case.datasets, size, seed),
      lambda weights: {
          'x_distance': _distance(weights.outer, case.outer),
          'y_distance': _distance(weights.inner, case.inner),
      },
      size,
  )
