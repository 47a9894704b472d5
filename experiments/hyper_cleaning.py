r"""Data hyper-cleaning: training labels of which a share is wrong.

  python -m experiments.hyper_cleaning --wrong_labels=0.4 \
      --method=simfbo,no_cleaning,true_labels,validation_only \
      --output_dir=outputs/hyper_cleaning

x has one number per training example of all clients; y is a classifier. With
l_j the cross-entropy of example j, n_i the training examples of client i and
sigma the logistic function,

  g_i(x, y) = 1/n_i sum_j sigma(x_j) l_j(y) + ridge |y|^2
  f_i(y)    = mean cross-entropy of the client's validation examples,

whose labels are right. So all of the hypergradient is indirect:
h_j = -sigma'(x_j) / n_i <grad l_j(y), v>. Reported are the test accuracy and
how well sigma(x) tells wrong labels from right ones, as the area under the ROC
curve: 1 if every right label has a larger weight than every wrong one, 0.5 for
weights that know nothing. Three baselines train the same classifier by FedAvg:
`no_cleaning` on all training labels as they are, `true_labels` on the training
examples whose label is right, and `validation_only` on the validation examples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from sklearn import metrics
import tensorflow as tf

from experiments import image_clients, learning_problems, nested, program
from experiments.experiment import Baseline, Experiment
from experiments.hyper_representation import widths
from experiments.settings import Settings, SettingsError
import fednest_tff
from fednest_tff import simulation

_DEFAULTS = image_clients.DATA | dict(
    method=['simfbo', 'no_cleaning', 'true_labels', 'validation_only'],
    wrong_labels=0.4,
    wrong_labels_seed=None,
    inner_fraction=0.5,
    inner_local_epochs=1,
    local_steps=10,
    batch_size=64,
    hidden=[],
    ridge=0.0005,
    inner_learning_rate=0.1,
    linear_learning_rate=0.1,
    outer_learning_rate=1000.0,
    ihgp='truncated',
    neumann_terms=5,
)
# Keeps the draws of wrong labels apart from others of the same seed.
_SALT = 7


class NoisyClients(NamedTuple):
  """Clients of whose training labels a share is wrong.

  Attributes:
    clients: For each client its images, its labels and, per example, its index
      in x; -1 marks validation examples.
    is_right: For each index, whether the label is right.
  """

  clients: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
  is_right: np.ndarray


def spoil(
    clients: Sequence[tuple[np.ndarray, np.ndarray]],
    share: float,
    inner_fraction: float,
    num_classes: int,
    seed: int,
) -> NoisyClients:
  """Gives a share of every client's training examples a wrong label.

  Args:
    clients: Images and labels of each client, in random order.
    share: The part of the training labels that becomes wrong.
    inner_fraction: The part of a client's examples that is for training.
    num_classes: A wrong label is any other, each as likely.
    seed: Of the draws.

  Returns:
    The clients. Each has its training examples first.
  """
  rng = np.random.default_rng([seed, _SALT])
  found, is_right = [], []
  first = 0
  for images, labels in clients:
    count = len(labels)
    num_inner = int(np.clip(round(inner_fraction * count), 1, count - 1))
    labels = np.array(labels, np.int32)
    wrong = rng.permutation(num_inner)[: round(share * num_inner)]
    offsets = rng.integers(1, num_classes, len(wrong))
    labels[wrong] = (labels[wrong] + offsets) % num_classes
    index = np.full(count, -1, np.int32)
    index[:num_inner] = first + np.arange(num_inner)
    first += num_inner
    right = np.ones(num_inner, bool)
    right[wrong] = False
    found.append((images, labels, index))
    is_right.append(right)
  return NoisyClients(found, np.concatenate(is_right))


def _split(
    examples: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
) -> tuple[tuple[tf.Tensor, ...], tuple[tf.Tensor, ...]]:
  """Training examples come first, validation examples have the index -1."""
  images, labels, index = examples
  num_inner = tf.reduce_sum(tf.cast(index >= 0, tf.int32))
  inner = images[:num_inner], labels[:num_inner], index[:num_inner]
  outer = images[num_inner:], labels[num_inner:], index[num_inner:]
  return inner, outer


def _spec(num_features: int) -> tuple[tf.TensorSpec, ...]:
  return (
      *learning_problems.element_spec(num_features),
      tf.TensorSpec([], tf.int32),
  )


def hyper_cleaning(
    sizes: Sequence[int], num_weights: int, ridge: float
) -> learning_problems.LearningProblem:
  """The bilevel problem; x is a weight per training example, before sigma.

  Args:
    sizes: Widths of the classifier's layers, inputs first; two for a linear
      one.
    num_weights: Training examples of all clients, the dimension of x.
    ridge: Weight of the squared norm of the classifier in the inner loss.

  Returns:
    The problem and its classifier. Examples have an image, a label and an
    index, as in `NoisyClients`.
  """
  classifier = learning_problems.classifier(sizes)

  def inner_loss(x, y, batch):
    images, labels, index = batch
    weights = tf.sigmoid(tf.gather(x, tf.maximum(index, 0)))
    losses = classifier.losses(y, images, labels)
    return tf.reduce_mean(weights * losses) + classifier.penalty(ridge, y)

  def outer_loss(x, y, batch):
    images, labels, _ = batch
    return tf.reduce_mean(classifier.losses(y, images, labels))

  problem = fednest_tff.bilevel(
      outer_loss,
      inner_loss,
      lambda seed: tf.zeros([num_weights]),
      classifier.initialize,
      _spec(sizes[0]),
      split=_split,
  )
  return learning_problems.LearningProblem(problem, classifier.predict_inner)


def fixed_weights(
    sizes: Sequence[int], weights: np.ndarray | None, ridge: float
) -> learning_problems.LearningProblem:
  """Training with weights that stay: a single-level problem, in y alone.

  Args:
    sizes: As in `hyper_cleaning`.
    weights: The weight of each training example; `None` to train on the
      validation examples in their place.
    ridge: As in `hyper_cleaning`.

  Returns:
    The problem and its classifier, which is the outer variable here.
  """
  classifier = learning_problems.classifier(sizes)

  def loss(y, batch):
    images, labels, index = batch
    # Validation examples have the index -1.
    is_used = used = tf.cast(
        index < 0 if weights is None else index >= 0, tf.float32
    )
    if weights is not None:
      given = tf.constant(weights, tf.float32)
      used = is_used * tf.gather(given, tf.maximum(index, 0))
    losses = used * classifier.losses(y, images, labels)
    fit = tf.math.divide_no_nan(tf.reduce_sum(losses), tf.reduce_sum(is_used))
    return fit + classifier.penalty(ridge, y)

  problem = fednest_tff.single_level(
      loss, classifier.initialize, _spec(sizes[0])
  )
  return learning_problems.LearningProblem(problem, classifier.predict_outer)


def weights_auc(x: np.ndarray, is_right: np.ndarray) -> float:
  """Area under the ROC curve of the weights; 0.5 if all labels are right."""
  if is_right.all() or not is_right.any():
    return 0.5
  return float(metrics.roc_auc_score(is_right, np.asarray(x)))


def make_trial(settings: Settings, seed: int) -> simulation.Trial:
  """Data, problems and evaluation of one seed."""
  if not 0 <= settings.wrong_labels < 1:
    raise SettingsError(
        f'--wrong_labels={settings.wrong_labels} must be at least 0 and below 1'
    )
  images = image_clients.make_data(settings, seed)
  noise_seed = settings.wrong_labels_seed
  noisy = spoil(
      list(images.arrays.values()),
      settings.wrong_labels,
      settings.inner_fraction,
      images.num_classes,
      seed if noise_seed is None else noise_seed,
  )
  datasets = [
      tf.data.Dataset.from_tensor_slices(client) for client in noisy.clients
  ]
  size = image_clients.cohort_size(settings, len(datasets))
  hidden = widths(settings.hidden) if settings.hidden else []
  sizes = (images.test_images.shape[1], *hidden, images.num_classes)
  count, ridge = len(noisy.is_right), settings.ridge
  cleaning = hyper_cleaning(sizes, count, ridge)
  baselines = {
      'no_cleaning': fixed_weights(sizes, np.ones(count), ridge),
      'true_labels': fixed_weights(sizes, noisy.is_right, ridge),
      'validation_only': fixed_weights(sizes, None, ridge),
  }

  def build(method):
    if method in baselines:
      return nested.build(
          baselines[method].problem, 'simfbo', settings, seed,
          outer_learning_rate=settings.inner_learning_rate,
      )
    return nested.build(cleaning.problem, method, settings, seed)

  def evaluate(weights):
    is_baseline = not tf.nest.flatten(weights.inner)
    learnt = baselines['no_cleaning'] if is_baseline else cleaning
    logits, labels = (
        learnt.predict(weights, images.test_images), images.test_labels
    )
    found = {
        'test_accuracy': learning_problems.accuracy(logits, labels),
        'test_loss': learning_problems.mean_loss(logits, labels),
    }
    if not is_baseline:
      found['weights_auc'] = weights_auc(weights.outer, noisy.is_right)
    return found

  return simulation.Trial(
      build, image_clients.make_cohort(datasets, size, seed), evaluate, size
  )


_FED_AVG = frozenset(
    ['inner_learning_rate', 'local_steps', 'local_epochs', 'batch_size']
)
EXPERIMENT = Experiment(
    'hyper_cleaning',
    'Data hyper-cleaning',
    _DEFAULTS,
    make_trial,
    lambda settings: simulation.Curve('test_accuracy', 'test accuracy'),
    baselines={
        'no_cleaning': Baseline('No cleaning', _FED_AVG),
        'true_labels': Baseline('True labels only', _FED_AVG),
        'validation_only': Baseline('Validation examples only', _FED_AVG),
    },
)

if __name__ == '__main__':
  program.run(EXPERIMENT)
