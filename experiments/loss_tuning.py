r"""Loss tuning on long-tailed data (section 4.2).

  python -m experiments.loss_tuning --method=fednest,lfednest \
      --partition=shards --output_dir=outputs/loss_tuning

x holds the parameters of the VS-loss, judged by a class-balanced validation
loss; y is the classifier, trained with that loss on imbalanced data.
"""

import tensorflow as tf

from experiments import image_clients, learning_problems, nested, program
from experiments.experiment import Experiment
from experiments.hyper_representation import widths
from experiments.settings import Settings, SettingsError
from fednest_tff import data, simulation

_DEFAULTS = image_clients.DATA | dict(
    imbalance=0.01,
    inner_fraction=0.8,
    inner_local_epochs=5,
    local_steps=10,
    batch_size=64,
    hidden=['200', '100'],
    ridge=0.0,
    tune_class_weights=False,
    no_tuning=False,
    centralised=False,
)
# experiments/presets/tuned_fig3.flags and paper_fig3.flags say how and why.
_PRESETS = dict(
    tuned=dict(
        inner_learning_rate=0.1,
        linear_learning_rate=0.1,
        outer_learning_rate=10.0,
        inner_rounds=1,
        ihgp='truncated',
        neumann_terms=1,
        smoothness=50.0,
    ),
    paper=nested.STEP_SIZES | dict(
        outer_learning_rate=0.02,
        inner_rounds=3,
        ihgp='stochastic',
        neumann_terms=3,
        smoothness=None,
    ),
)


def _clients(settings: Settings, seed: int) -> data.FederatedImages:
  if not settings.centralised:
    return image_clients.make_data(settings, seed, settings.imbalance)
  if {settings.num_clients, settings.clients_per_round} - {None, 1}:
    raise SettingsError(
        '--num_clients and --clients_per_round must be 1 with --centralised'
    )
  # One client: how examples would be divided does not matter.
  one = Settings(**(vars(settings) | dict(partition='iid', num_clients=1)))
  return image_clients.make_data(one, seed, settings.imbalance)


def make_trial(settings: Settings, seed: int) -> simulation.Trial:
  """Data, problem and evaluation of one seed."""
  images = _clients(settings, seed)
  datasets = image_clients.make_datasets(images)
  size = image_clients.cohort_size(settings, len(datasets))
  weights = learning_problems.balanced_class_weights(
      [labels for _, labels in images.arrays.values()], images.num_classes
  )
  features = images.test_images.shape[1]
  problem, predict = learning_problems.loss_tuning(
      (features, *widths(settings.hidden), images.num_classes),
      ridge=settings.ridge,
      split=settings.inner_fraction,
      class_weights=weights,
      tune_class_weights=settings.tune_class_weights,
  )
  options = {}
  if settings.no_tuning:
    options['outer_learning_rate'] = lambda epoch: tf.zeros([])

  def evaluate(learnt):
    logits, labels = predict(learnt, images.test_images), images.test_labels
    return {
        'balanced_accuracy': learning_problems.balanced_accuracy(
            logits, labels, images.num_classes
        ),
        'test_accuracy': learning_problems.accuracy(logits, labels),
        'test_loss': learning_problems.mean_loss(logits, labels),
    }

  return simulation.Trial(
      lambda method: nested.build(problem, method, settings, seed, **options),
      image_clients.make_cohort(datasets, size, seed),
      evaluate,
      size,
  )


EXPERIMENT = Experiment(
    'loss_tuning',
    'Loss tuning on long-tailed data',
    _DEFAULTS,
    make_trial,
    lambda settings: simulation.Curve(
        'balanced_accuracy', 'class-balanced test accuracy'
    ),
    presets=_PRESETS,
)

if __name__ == '__main__':
  program.run(EXPERIMENT)
