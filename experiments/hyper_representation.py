r"""Hyper-representation: a backbone that is good for a head (section 4.1).

  python -m experiments.hyper_representation --method=fednest,lfednest \
      --partition=shards --output_dir=outputs/hyper_representation

x is the backbone, judged on each client's validation data; y is the linear
head, fitted to its training data with a ridge.
"""

from experiments import image_clients, learning_problems, nested, program
from experiments.experiment import Experiment
from experiments.settings import Settings, SettingsError
from fednest_tff import data, simulation

_DEFAULTS = image_clients.DATA | dict(
    inner_fraction=0.5,
    batch_size=64,
    backbone='mlp',
    hidden=['200'],
    ridge=0.0005,
    local_steps=10,
)
# experiments/presets/tuned_fig2.flags and paper_fig2.flags say how and why.
_PRESETS = dict(
    tuned=dict(
        inner_learning_rate=0.1,
        linear_learning_rate=0.1,
        outer_learning_rate=0.03,
        inner_local_epochs=1,
        outer_local_steps=20,
        ihgp='truncated',
        neumann_terms=1,
        smoothness=1000.0,
    ),
    paper=nested.STEP_SIZES | dict(
        inner_local_epochs=5,
        outer_local_steps=1,
        ihgp='stochastic',
        neumann_terms=5,
        smoothness=None,
    ),
)
_LARGEST_WIDTH = 2**14


def widths(hidden: list[str]) -> list[int]:
  """Widths of layers as the flag `--hidden` gives them."""
  try:
    sizes = [int(text) for text in hidden]
  except ValueError:
    sizes = [0]
  if not sizes or min(sizes) < 1:
    raise SettingsError(
        f'--hidden={",".join(hidden)} must be positive integers, separated by'
        ' commas'
    )
  if max(sizes) > _LARGEST_WIDTH:
    raise SettingsError(
        f'--hidden={",".join(hidden)} must be at most {_LARGEST_WIDTH} each'
    )
  return sizes


def make_problem(
    settings: Settings, images: data.FederatedImages, personal: bool = False
) -> learning_problems.LearningProblem:
  """The network that the settings describe, with one head or one for each."""
  sizes = widths(settings.hidden)
  options = dict(
      ridge=settings.ridge, split=settings.inner_fraction, personal=personal
  )
  if settings.backbone == 'mlp':
    features = images.test_images.shape[1]
    return learning_problems.hyper_representation(
        (features, *sizes, images.num_classes), **options
    )
  if len(sizes) > 1:
    raise SettingsError('--hidden must be one width with --backbone=cnn')
  return learning_problems.convolutional_representation(
      images.image_shape, images.num_classes, features=sizes[0], **options
  )


def make_trial(settings: Settings, seed: int) -> simulation.Trial:
  """Data, problem and evaluation of one seed."""
  images = image_clients.make_data(settings, seed)
  datasets = image_clients.make_datasets(images)
  size = image_clients.cohort_size(settings, len(datasets))
  problem, predict = make_problem(settings, images)

  def evaluate(weights):
    logits = predict(weights, images.test_images)
    labels = images.test_labels
    return {
        'test_accuracy': learning_problems.accuracy(logits, labels),
        'test_loss': learning_problems.mean_loss(logits, labels),
    }

  return simulation.Trial(
      lambda method: nested.build(problem, method, settings, seed),
      image_clients.make_cohort(datasets, size, seed),
      evaluate,
      size,
  )


EXPERIMENT = Experiment(
    'hyper_representation',
    'Hyper-representation',
    _DEFAULTS,
    make_trial,
    lambda settings: simulation.Curve('test_accuracy', 'test accuracy'),
    presets=_PRESETS,
)

if __name__ == '__main__':
  program.run(EXPERIMENT)
