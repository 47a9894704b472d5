"""Clients with images, as the flags describe them."""

from collections.abc import Callable
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from experiments.settings import Settings, SettingsError
from fednest_tff import data, simulation

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
) -> tuple[data.LabelledImages, str]:
  """The images, with mean 0 and variance 1 over all pixels if asked for.

  Args:
    name: Of the data set.
    data_dir: Where it is.
    only_digits: Whether to leave out letters.
    standardize: Whether to give pixels mean 0 and variance 1.

  Returns:
    The images, and the hash of what was read.
  """
  images = data.load(name, data_dir, only_digits)
  fingerprint = data.fingerprint(images)
  if not standardize:
    return images, fingerprint
  mean, deviation = images.train_images.mean(), images.train_images.std()
  if not deviation:
    raise data.DataError(
        f'all pixels of the training images of `dataset`={name} are equal, so'
        ' that they cannot be given variance 1: choose other data, or'
        ' --nostandardize'
    )
  return images._replace(
      train_images=(images.train_images - mean) / deviation,
      test_images=(images.test_images - mean) / deviation,
  ), fingerprint


@functools.cache
def _load_held_out(*key: Any) -> tuple[data.LabelledImages, str]:
  """The images without those for testing, for which others are held out.

  A sixth of the training images, always the same, takes their place.
  """
  images, fingerprint = _load(*key)
  count = len(images.train_labels)
  order = np.random.default_rng(0).permutation(count)
  held, kept = np.sort(order[: count // 6]), np.sort(order[count // 6 :])
  writers = images.train_writers
  return images._replace(
      train_images=images.train_images[kept],
      train_labels=images.train_labels[kept],
      test_images=images.train_images[held],
      test_labels=images.train_labels[held],
      train_writers=None if writers is None else writers[kept],
      test_writers=None if writers is None else writers[held],
  ), fingerprint


def _load_as_set(settings: Settings) -> tuple[data.LabelledImages, str]:
  is_held_out = getattr(settings, 'hold_out', False)
  return (_load_held_out if is_held_out else _load)(
      settings.dataset,
      settings.data_dir,
      settings.emnist_only_digits,
      settings.standardize,
  )


def load(settings: Settings) -> data.LabelledImages:
  """The images, not yet divided.

  With `hold_out` in the settings, which is no flag, the test images are part of
  the training images, so that settings can be chosen without the real ones.
  """
  return _load_as_set(settings)[0]


def fingerprint(settings: Settings) -> str:
  """A hash of the images that were read, wherever they are."""
  return _load_as_set(settings)[1]


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


def cohort_size(
    settings: Settings, num_clients: int, default: int = CLIENTS_PER_ROUND
) -> int:
  """How many of the clients take part in an epoch."""
  size = settings.clients_per_round or min(default, num_clients)
  if size > num_clients:
    raise SettingsError(
        f'--clients_per_round={size} is more than the {num_clients} clients'
    )
  return size


def make_cohort(
    datasets: list[tf.data.Dataset], size: int, seed: int
) -> Callable[[int], list[tf.data.Dataset]]:
  """From an epoch to the datasets of its clients, drawn at random."""
  return simulation.sample_cohorts(datasets, size, seed)


def make_datasets(images: data.FederatedImages) -> list[tf.data.Dataset]:
  """A dataset per client, made once."""
  clients = images.clients
  return [
      clients.create_tf_dataset_for_client(name) for name in clients.client_ids
  ]
