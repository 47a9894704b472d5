"""Clients with images, as the flags describe them."""

from collections.abc import Callable
import functools

import tensorflow as tf
import tensorflow_federated as tff

from experiments.settings import Settings, SettingsError
from fednest_tff import data

# The flags, and defaults that need no download.
DATA = dict(
    dataset='digits',
    data_dir=None,
    emnist_only_digits=True,
    standardize=True,
    partition='iid',
    dirichlet_alpha=0.5,
    num_clients=None,
    clients_per_round=None,
)
# Clients if the flags do not say: as in the paper, fewer for the small data.
_NUM_CLIENTS = {'digits': 20}
CLIENTS_PER_ROUND = 10


@functools.cache
def _load(
    name: str, data_dir: str | None, only_digits: bool, standardize: bool
) -> data.LabelledImages:
  """The images, with mean 0 and variance 1 over all pixels if asked for."""
  images = data.load(name, data_dir, only_digits)
  if not standardize:
    return images
  mean, deviation = images.train_images.mean(), images.train_images.std()
  return images._replace(
      train_images=(images.train_images - mean) / deviation,
      test_images=(images.test_images - mean) / deviation,
  )


def load(settings: Settings) -> data.LabelledImages:
  """The images, not yet divided."""
  return _load(
      settings.dataset,
      settings.data_dir,
      settings.emnist_only_digits,
      settings.standardize,
  )


def make_data(
    settings: Settings, seed: int, imbalance: float | None = None
) -> data.FederatedImages:
  """The images, divided among the clients."""
  images = load(settings)
  num_clients = settings.num_clients
  if num_clients is None and settings.partition != 'writers':
    num_clients = _NUM_CLIENTS.get(settings.dataset, 100)
  return data.federate(
      images,
      settings.partition,
      num_clients,
      seed=seed,
      dirichlet_alpha=settings.dirichlet_alpha,
      imbalance=imbalance,
  )


def cohort_size(settings: Settings, num_clients: int) -> int:
  """How many of the clients take part in an epoch."""
  size = settings.clients_per_round or min(CLIENTS_PER_ROUND, num_clients)
  if size > num_clients:
    raise SettingsError(
        f'--clients_per_round={size} is more than the {num_clients} clients'
    )
  return size


def make_cohort(
    datasets: list[tf.data.Dataset], size: int, seed: int
) -> Callable[[int], list[tf.data.Dataset]]:
  """From an epoch to the datasets of its clients, drawn at random."""
  if size == len(datasets):
    return lambda epoch: datasets
  draw = tff.simulation.build_uniform_sampling_fn(
      range(len(datasets)), replace=False, random_seed=seed
  )
  return lambda epoch: [datasets[int(i)] for i in draw(epoch, size)]


def make_datasets(images: data.FederatedImages) -> list[tf.data.Dataset]:
  """A dataset per client, made once."""
  clients = images.clients
  return [
      clients.create_tf_dataset_for_client(name) for name in clients.client_ids
  ]
