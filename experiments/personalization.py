r"""Personalisation: a head for each client over a shared backbone.

  python -m experiments.personalization --method=personal,fednest,fedrecon \
      --output_dir=outputs/personalization
  python -m experiments.personalization --dataset=emnist --data_dir=DIR \
      --output_dir=outputs/personalization_femnist

x is the backbone, judged on each client's validation data. For `personal` the
head y_i is the client's own, fitted to its training data; other methods of the
registry learn one head y for all, on the same network; `fedrecon` is TFF's
Federated Reconstruction, with the backbone global and the head local.

Every client has test images of its own: those of its writer (EMNIST), or a
fifth of its images, which are held out. Accuracies are means over a client's
test images; reported are their mean over the clients and their lowest decile,

  client_accuracy_*   after personalisation: as many inner steps as `personal`
                      takes, on all training images of the client, from the
                      head that the server has
  shared_accuracy_*   with that head itself, which `personal` and `fedrecon` do
                      not train.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from experiments import image_clients, learning_problems, nested, program
from experiments.experiment import Baseline, Experiment
from experiments.hyper_representation import make_problem
from experiments.settings import Settings
import fednest_tff
from fednest_tff import data, simulation

_INNER_STEPS = 20
_DEFAULTS = image_clients.DATA | dict(
    method=['personal', 'fednest', 'fedrecon'],
    partition=None,
    inner_fraction=0.5,
    inner_learning_rate=0.03,
    linear_learning_rate=0.03,
    outer_learning_rate=0.1,
    local_steps=10,
    inner_local_steps=_INNER_STEPS,
    outer_local_steps=1,
    personalization_steps=None,
    batch_size=64,
    ihgp='truncated',
    neumann_terms=5,
    backbone='mlp',
    hidden=['200'],
    ridge=0.0005,
)
# The part of a client's images that is held out, where no test images are its.
_HELD_OUT = 5


class ClientImages(NamedTuple):
  """Images and labels of one client.

  Attributes:
    train: Those that it learns from.
    test: Those that it is judged on.
  """

  train: tuple[np.ndarray, np.ndarray]
  test: tuple[np.ndarray, np.ndarray]


def _with_partition(settings: Settings) -> Settings:
  """The settings, with clients that differ unless they say otherwise."""
  if settings.partition is not None:
    return settings
  by_writer = settings.dataset == 'emnist'
  partition = 'writers' if by_writer else 'shards'
  return Settings(**(vars(settings) | dict(partition=partition)))


def _personalization_steps(settings: Settings) -> int:
  """How many steps fit the head to a client."""
  # Not all methods of a run have inner steps.
  if settings.personalization_steps is not None:
    return settings.personalization_steps
  return vars(settings).get('inner_local_steps') or _INNER_STEPS


def divide(
    settings: Settings, seed: int
) -> tuple[data.FederatedImages, list[ClientImages]]:
  """The images by client, with test images for each.

  Args:
    settings: The data and how it is divided.
    seed: Of the division.

  Returns:
    All images, and those of each client. A client may lack test images.
  """
  images = image_clients.make_data(settings, seed)
  if settings.partition != 'writers':
    clients = []
    for features, labels in images.arrays.values():
      # A client's images are in random order.
      cut = len(labels) - len(labels) // _HELD_OUT
      clients.append(
          ClientImages(
              (features[:cut], labels[:cut]), (features[cut:], labels[cut:])
          )
      )
    return images, clients
  writers = image_clients.load(settings).test_writers
  clients = []
  for name, train in images.arrays.items():
    own = np.flatnonzero(writers == int(name.removeprefix('writer_')))
    test = images.test_images[own], images.test_labels[own]
    clients.append(ClientImages(train, test))
  return images, clients


def client_accuracies(
    accuracies: list[float], name: str
) -> dict[str, float]:
  """The mean over the clients, and what a tenth of them do not exceed."""
  return {
      f'{name}_accuracy_mean': float(np.mean(accuracies)),
      f'{name}_accuracy_decile': float(np.quantile(accuracies, 0.1)),
  }


class _BatchOutput(NamedTuple):
  """The fields that TFF reads of a forward pass; its class is not public."""

  predictions: tf.Tensor
  labels: tf.Tensor
  num_examples: tf.Tensor


class _Network(tff.learning.models.ReconstructionModel):
  """The network for TFF: the backbone is global, the head local."""

  def __init__(self, learning: learning_problems.LearningProblem, seed: int):
    self._learning = learning
    problem = learning.problem
    self._outer, self._inner = (
        tf.nest.map_structure(tf.Variable, init(seed))
        for init in (problem.init_outer, problem.init_inner)
    )

  @property
  def global_trainable_variables(self):
    return tf.nest.flatten(self._outer)

  @property
  def global_non_trainable_variables(self):
    return []

  @property
  def local_trainable_variables(self):
    return tf.nest.flatten(self._inner)

  @property
  def local_non_trainable_variables(self):
    return []

  @property
  def input_spec(self):
    return tf.nest.map_structure(
        lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
        self._learning.problem.element_spec,
    )

  def forward_pass(self, batch_input, training=True):
    del training  # It is the same.
    images, labels = batch_input
    weights = fednest_tff.NestedWeights(self._outer, self._inner)
    return _BatchOutput(
        predictions=self._learning.predict(weights, images),
        labels=labels,
        num_examples=tf.shape(labels)[0],
    )


def build_fed_recon(
    learning: learning_problems.LearningProblem, settings: Settings, seed: int
) -> tff.learning.templates.LearningProcess:
  """TFF's FedRecon, with as many steps on minibatches of the same size.

  A client fits its head to its inner examples, then steps on the backbone with
  its outer examples. The head's ridge is left out: TFF has one loss for both.

  Args:
    learning: The problem and its network.
    settings: Step sizes and numbers of steps.
    seed: Of the initial network.

  Returns:
    A process whose clients have the datasets of the other methods.
  """
  problem = learning.problem
  num_inner = settings.inner_local_steps

  @tff.tensorflow.computation(
      tff.SequenceType(tff.types.tensorflow_to_type(problem.element_spec))
  )
  def minibatches(dataset):
    rows = dataset.batch(2**31 - 1).get_single_element()

    def batches(part, count):
      size = settings.batch_size or tf.shape(part[1], tf.int64)[0]
      found = tf.data.Dataset.from_tensor_slices(part).batch(size)
      return found.repeat().take(count)

    inner, outer = problem.split(rows)
    return batches(inner, num_inner).concatenate(
        batches(outer, settings.outer_local_steps)
    )

  def make_network():
    return _Network(learning, seed)

  def split(dataset):
    return dataset.take(num_inner), dataset.skip(num_inner)

  process = tff.learning.algorithms.build_fed_recon(
      make_network,
      loss_fn=lambda: tf.keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      client_optimizer_fn=tff.learning.optimizers.build_sgdm(
          settings.outer_learning_rate
      ),
      reconstruction_optimizer_fn=tff.learning.optimizers.build_sgdm(
          settings.inner_learning_rate
      ),
      dataset_split_fn=split,
      client_weighting=tff.learning.ClientWeighting.UNIFORM,
  )
  return tff.simulation.compose_dataset_computation_with_learning_process(
      minibatches, process
  )


def make_trial(settings: Settings, seed: int) -> simulation.Trial:
  """Data, problems and evaluation of one seed."""
  settings = _with_partition(settings)
  images, clients = divide(settings, seed)
  datasets = learning_problems.to_datasets(
      [client.train for client in clients]
  )
  size = image_clients.cohort_size(settings, len(datasets))
  shared = make_problem(settings, images)
  personal = make_problem(settings, images, personal=True)
  personalize = fednest_tff.build_personalize(
      personal.problem,
      inner=fednest_tff.LocalWork(
          learning_rate=settings.inner_learning_rate,
          steps=_personalization_steps(settings),
          batch_size=settings.batch_size,
      ),
  )

  def build(method):
    if method == 'fedrecon':
      return build_fed_recon(personal, settings, seed)
    learning = personal if method == 'personal' else shared
    return nested.build(learning.problem, method, settings, seed)

  def evaluate(weights):
    if not isinstance(weights, fednest_tff.NestedWeights):
      outer = tf.nest.pack_sequence_as(
          personal.problem.outer_spec, list(weights.trainable)
      )
      weights = fednest_tff.NestedWeights(
          outer, personal.problem.init_inner(seed)
      )
    before: list[float] = []
    after: list[float] = []
    for client in clients:
      test_images, labels = client.test
      if not len(labels):
        continue
      own = personalize(weights, client.train, np.array([seed, 0]))
      for found, y in ((before, weights.inner), (after, own)):
        logits = personal.predict(
            weights._replace(inner=y), test_images
        )
        found.append(learning_problems.accuracy(logits, labels))
    return client_accuracies(after, 'client') | client_accuracies(
        before, 'shared'
    )

  return simulation.Trial(
      build, image_clients.make_cohort(datasets, size, seed), evaluate, size
  )


EXPERIMENT = Experiment(
    'personalization',
    'Personal heads over a shared backbone',
    _DEFAULTS,
    make_trial,
    lambda settings: simulation.Curve(
        'client_accuracy_mean', "mean of the clients' test accuracies"
    ),
    # Steps are counted, so that all methods and the evaluation take as many.
    without=frozenset(['inner_local_epochs', 'outer_local_epochs']),
    baselines={
        'fedrecon': Baseline(
            'FedRecon',
            frozenset([
                'inner_learning_rate',
                'inner_local_steps',
                'outer_learning_rate',
                'outer_local_steps',
                'batch_size',
            ]),
        )
    },
)

if __name__ == '__main__':
  program.run(EXPERIMENT)
