r"""Single level: FedOut, which is federated SVRG, against TFF's FedAvg.

  python -m experiments.single_level --method=fednest,fedavg \
      --partition=shards --output_dir=outputs/single_level

Multinomial logistic regression, whose solution a centralised solver finds to
high accuracy. `fednest` is FedOut alone, there being no inner problem.
"""

import numpy as np
import tensorflow_federated as tff

from experiments import image_clients, logistic_regression, nested, program
from experiments.experiment import Baseline, Experiment
from experiments.settings import Settings
import fednest_tff
from fednest_tff import simulation

_DEFAULTS = image_clients.DATA | dict(
    method=['fednest', 'fedavg'],
    partition='shards',
    outer_local_steps=5,
    local_steps=5,
    outer_learning_rate=0.3,
    batch_size=None,
    ridge=0.01,
)
# More examples than any client has.
_ALL = 2**31 - 1


def _fed_avg(
    settings: Settings, num_features: int, num_classes: int
) -> tff.learning.templates.LearningProcess:
  """TFF's FedAvg, with as many local steps on minibatches of the same size."""
  model = logistic_regression.functional_model(
      num_features, num_classes, settings.ridge
  )

  element = (
      tff.TensorType(np.float32, [num_features]), tff.TensorType(np.int32)
  )

  @tff.tensorflow.computation(tff.SequenceType(element))
  def minibatches(dataset):
    batches = dataset.batch(settings.batch_size or _ALL)
    return batches.repeat().take(settings.outer_local_steps)

  return tff.simulation.compose_dataset_computation_with_learning_process(
      minibatches,
      logistic_regression.build_fed_avg(model, settings.outer_learning_rate),
  )


def make_trial(settings: Settings, seed: int) -> simulation.Trial:
  """Data, problem and evaluation of one seed."""
  images = image_clients.make_data(settings, seed)
  clients = list(images.arrays.values())
  datasets = image_clients.make_datasets(images)
  size = image_clients.cohort_size(settings, len(clients))
  num_features = images.test_images.shape[1]
  num_classes, ridge = images.num_classes, settings.ridge
  problem = logistic_regression.logistic_regression(
      num_features, num_classes, ridge
  )
  solution = logistic_regression.optimum(clients, num_classes, ridge)
  lowest = logistic_regression.objective(
      solution, clients, num_classes, ridge
  )

  def build(method):
    if method == 'fedavg':
      return _fed_avg(settings, num_features, num_classes)
    return nested.build(problem, method, settings, seed)

  def evaluate(weights):
    if isinstance(weights, fednest_tff.NestedWeights):
      x = weights.outer
    else:
      x = logistic_regression.from_model(weights.trainable)
    value = logistic_regression.objective(x, clients, num_classes, ridge)
    logits = logistic_regression.logits(x, images.test_images)
    return {
        'x_distance': logistic_regression.distance(x, solution),
        'excess_loss': value - lowest,
        'test_accuracy': float(
            np.mean(np.argmax(logits, axis=1) == images.test_labels)
        ),
    }

  return simulation.Trial(
      build,
      image_clients.make_cohort(datasets, size, seed),
      evaluate,
      size,
  )


EXPERIMENT = Experiment(
    'single_level',
    'Single level: logistic regression',
    _DEFAULTS,
    make_trial,
    lambda settings: simulation.Curve(
        'x_distance', '|x - x*|', logarithmic=True
    ),
    without=(
        nested.IHGP_OPTIONS | nested.LINEAR_OPTIONS | nested.INNER_OPTIONS
    ),
    baselines={
        'fedavg': Baseline(
            'FedAvg',
            frozenset(
                ['outer_learning_rate', 'outer_local_steps', 'batch_size']
            ),
        )
    },
)

if __name__ == '__main__':
  program.run(EXPERIMENT)
