"""From flags to a method of the FedNest family."""

from typing import Any

import numpy as np

from experiments import image_clients
from experiments.closed_form import Case
from experiments.settings import Settings
import fednest_tff
from fednest_tff import simulation

# The flags of the methods. The paper's values where it gives them.
METHOD = dict(
    inner_rounds=1,
    inner_local_epochs=None,
    inner_local_steps=None,
    outer_local_steps=1,
    neumann_terms=5,
    ihgp='stochastic',
    smoothness=None,
    inner_learning_rate=0.01,
    outer_learning_rate=0.01,
    batch_size=None,
)
# Those of problems without an inverse Hessian: minimax has none, and that of a
# compositional problem is the identity.
WITHOUT_IHGP = {
    name: value
    for name, value in METHOD.items()
    if name not in ('neumann_terms', 'ihgp', 'smoothness')
}


def build(
    problem: fednest_tff.Problem,
    method: str,
    settings: Settings,
    seed: int,
    **options: Any,
) -> fednest_tff.FedNestProcess:
  """The process that the flags describe.

  Args:
    problem: What to solve.
    method: One of `fednest_tff.METHODS`.
    settings: With the flags of `METHOD`, or of some of them.
    seed: Of the initial point and of all draws.
    **options: Further arguments of `build_fed_nest`.

  Returns:
    The process.
  """
  chosen = {
      name: value for name, value in vars(settings).items() if name in METHOD
  }
  if settings.inner_local_steps is not None:
    chosen['inner_local_epochs'] = None
  return fednest_tff.build_fed_nest(
      problem, method, seed=seed, **(chosen | options)
  )


def _distance(a: Any, b: Any) -> float:
  return float(np.linalg.norm(np.asarray(a) - b))


def closed_form_trial(
    case: Case, settings: Settings, seed: int
) -> simulation.Trial:
  """A trial that measures the distance to a known solution."""
  size = settings.clients_per_round or len(case.datasets)
  return simulation.Trial(
      lambda method: build(case.problem, method, settings, seed),
      image_clients.make_cohort(case.datasets, size, seed),
      lambda weights: {
          'x_distance': _distance(weights.outer, case.outer),
          'y_distance': _distance(weights.inner, case.inner),
      },
      size,
  )
