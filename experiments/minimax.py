r"""Minimax problems (section 4.3).

  python -m experiments.minimax --method=fednest,lfednest,fedavg_s \
      --spread=10 --output_dir=outputs/minimax

`--problem=saddle` is the paper's, whose saddle point is known in closed form;
`--problem=robust_regression` is a logistic regression that is to be good for
every client: the maximising variable weighs the clients.
"""

import numpy as np

from experiments import (
    closed_form,
    image_clients,
    logistic_regression,
    nested,
    program,
    robust_regression,
)
from experiments.experiment import Experiment
from experiments.settings import Flags, Settings
from fednest_tff import simulation

_DEFAULTS: Flags = dict(problem='saddle')
_VARIANTS: dict[str, Flags] = dict(
    saddle=dict(
        num_clients=100,
        clients_per_round=None,
        dimension=10,
        spread=1.0,
        coupling=0.1,
        ridge=10.0,
        inner_local_steps=5,
        local_steps=5,
        inner_learning_rate=0.1,
        outer_learning_rate=0.05,
    ),
    robust_regression=image_clients.DATA | dict(
        partition='shards',
        num_clients=10,
        rho=5.0,
        ridge=0.01,
        inner_local_steps=5,
        local_steps=5,
        inner_learning_rate=0.1,
        outer_learning_rate=0.1,
    ),
)


def _saddle(settings: Settings, seed: int) -> simulation.Trial:
  case = closed_form.saddle(
      settings.num_clients,
      settings.dimension,
      settings.spread,
      settings.ridge,
      settings.coupling,
      seed=seed,
  )
  return nested.closed_form_trial(case, settings, seed)


def _robust_regression(settings: Settings, seed: int) -> simulation.Trial:
  images = image_clients.make_data(settings, seed)
  clients = list(images.arrays.values())
  datasets = robust_regression.to_datasets(clients)
  size = image_clients.cohort_size(settings, len(clients))
  problem = robust_regression.robust_regression(
      len(clients),
      images.test_images.shape[1],
      images.num_classes,
      settings.rho,
      settings.ridge,
  )

  def evaluate(weights):
    x, y = weights.outer, weights.inner
    losses = robust_regression.client_losses(x, clients)
    best = robust_regression.best_response(x, clients, settings.rho)
    logits = logistic_regression.logits(x, images.test_images)
    return {
        'worst_client_loss': float(losses.max()),
        'mean_client_loss': float(losses.mean()),
        'worst_client_accuracy': robust_regression.worst_client_accuracy(
            x, clients
        ),
        'test_accuracy': float(
            np.mean(np.argmax(logits, axis=1) == images.test_labels)
        ),
        'y_distance': float(np.linalg.norm(y - best)),
    }

  return simulation.Trial(
      lambda method: nested.build(problem, method, settings, seed),
      image_clients.make_cohort(datasets, size, seed),
      evaluate,
      size,
  )


def make_trial(settings: Settings, seed: int) -> simulation.Trial:
  """Clients, problem and evaluation of one seed."""
  if settings.problem == 'saddle':
    return _saddle(settings, seed)
  return _robust_regression(settings, seed)


def _curve(settings: Settings) -> simulation.Curve:
  if settings.problem == 'saddle':
    return simulation.Curve('x_distance', '|x - x*|', logarithmic=True)
  return simulation.Curve('worst_client_loss', 'loss of the worst client')


EXPERIMENT = Experiment(
    'minimax',
    'Minimax',
    _DEFAULTS,
    make_trial,
    _curve,
    _VARIANTS,
    without=nested.IHGP_OPTIONS | nested.LINEAR_OPTIONS,
)

if __name__ == '__main__':
  program.run(EXPERIMENT)
