"""Images divided among clients, as TFF and as NumPy have them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.data import partitions
from fednest_tff.data.images import Images, Integers, LabelledImages, Labels

Examples = tuple[Images, Labels]


class FederatedImages(NamedTuple):
  """Training examples by client, and test examples that belong to nobody.

  Attributes:
    clients: Elements are (image float32 [features], label int32).
    arrays: The same examples by client id: images [n, features] and labels [n].
      Not writable, because `clients` reads the same memory.
    test_images: float32 [n, features].
    test_labels: int32 [n].
    num_classes: Labels lie in [0, num_classes).
    image_shape: Height and width; their product is `features`.
  """

  clients: tff.simulation.datasets.ClientData
  arrays: dict[str, Examples]
  test_images: Images
  test_labels: Labels
  num_classes: int
  image_shape: tuple[int, ...]

  def __repr__(self) -> str:
    training = sum(len(labels) for _, labels in self.arrays.values())
    return (
        f'<FederatedImages: {len(self.arrays)} clients, {training} training and'
        f' {len(self.test_labels)} test examples, {self.num_classes} classes,'
        f' images {"x".join(map(str, self.image_shape))}>'
    )


class ArrayClientData(tff.simulation.datasets.ClientData):
  """A `ClientData` over arrays in memory.

  Unlike TFF's `TestClientData`, it copies nothing, and a dataset made for a
  named client holds the examples of that client only. A computation that gets
  the id as an argument (`dataset_computation`) must hold the examples of all
  clients, since it may run in another process. That is slow with much data, and
  TensorFlow allows no more than 2 GB.
  """

  def __init__(
      self, images: Images, labels: Labels, sizes: Mapping[str, int]
  ):
    """Constructs it from all examples, one client after another.

    Args:
      images: [n, features].
      labels: [n].
      sizes: How many examples the clients have, by id.
    """
    if sum(sizes.values()) != len(labels) or len(images) != len(labels):
      raise ValueError('`sizes` must add up to the number of examples.')
    self._images, self._labels = images, labels
    stops = np.cumsum(list(sizes.values())).tolist()
    self._bounds = dict(
        zip(sizes, zip([0, *stops[:-1]], stops, strict=True), strict=True)
    )
    self._element_type_structure = (
        tf.TensorSpec(images.shape[1:], images.dtype),
        tf.TensorSpec([], labels.dtype),
    )

  @property
  def client_ids(self) -> list[str]:
    return list(self._bounds)

  @property
  def element_type_structure(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    return self._element_type_structure

  @property
  def serializable_dataset_fn(
      self,
  ) -> Callable[[str | tf.Tensor], tf.data.Dataset]:
    return self._create_dataset

  def create_tf_dataset_for_client(self, client_id: str) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(self.examples(client_id))

  def create_tf_dataset_from_all_clients(
      self, seed: int | None = None
  ) -> tf.data.Dataset:
    # In the order of the parent's, which would go through a graph that holds
    # all data as a constant: a minute for MNIST.
    client_ids = self.client_ids
    np.random.RandomState(seed).shuffle(client_ids)
    order = np.concatenate([np.arange(*self._bounds[k]) for k in client_ids])
    return tf.data.Dataset.from_tensor_slices(
        (self._images[order], self._labels[order])
    )

  def examples(self, client_id: str) -> Examples:
    """A client's images and labels."""
    if client_id not in self._bounds:
      raise ValueError(
          f'{client_id!r} is none of the {len(self._bounds)} clients; see'
          ' `client_ids`.'
      )
    start, stop = self._bounds[client_id]
    return self._images[start:stop], self._labels[start:stop]

  def _create_dataset(self, client_id: str | tf.Tensor) -> tf.data.Dataset:
    """Takes a string, or a string tensor that may be known only later."""
    if isinstance(client_id, tf.Tensor):
      known = tf.get_static_value(client_id)
      if known is None:
        return self._look_up(client_id)
      client_id = known
    if isinstance(client_id, bytes):
      client_id = client_id.decode()
    return self.create_tf_dataset_for_client(client_id)

  def _look_up(self, client_id: tf.Tensor) -> tf.data.Dataset:
    found = tf.equal(client_id, self.client_ids)
    check = tf.debugging.Assert(
        tf.reduce_any(found), ['No such client:', client_id]
    )
    with tf.control_dependencies([check]):
      row = tf.argmax(found)
    start, stop = tf.unstack(tf.gather(list(self._bounds.values()), row))
    images, labels = tf.constant(self._images), tf.constant(self._labels)
    return tf.data.Dataset.from_tensor_slices(
        (images[start:stop], labels[start:stop])
    )


def federate(
    images: LabelledImages,
    partition_name: str,
    num_clients: int | None,
    *,
    seed: int,
    dirichlet_alpha: float = 0.5,
    imbalance: float | None = None,
) -> FederatedImages:
  """Divides the training images among clients.

  Args:
    images: The data.
    partition_name: How to divide it; one of `PARTITIONS`, see `partition`.
    num_clients: How many clients; `None` for all writers.
    seed: Of all that is random here.
    dirichlet_alpha: The concentration, for 'dirichlet'.
    imbalance: If given, the training images are first made long-tailed with
      this factor; see `long_tail`. The test images stay as they are.

  Returns:
    The clients, and the test images. Clients are called after their number, or
    that of the writer.
  """
  kept: Integers = np.arange(len(images.train_labels))
  if imbalance is not None:
    kept = partitions.long_tail(
        images.train_labels, images.num_classes, seed=seed, factor=imbalance
    )
  writers = images.train_writers
  parts = partitions.partition(
      partition_name,
      images.train_labels[kept],
      num_clients,
      seed=seed,
      num_classes=images.num_classes,
      writers=None if writers is None else writers[kept],
      dirichlet_alpha=dirichlet_alpha,
  )
  parts = [kept[part] for part in parts]
  if partition_name == 'writers' and writers is not None:
    names = [f'writer_{writers[part[0]]:04d}' for part in parts]
  else:
    names = [f'client_{k:04d}' for k in range(len(parts))]
  order = np.concatenate(parts)
  train_images = images.train_images[order].reshape(len(order), -1)
  train_labels = images.train_labels[order]
  for array in (train_images, train_labels):
    array.flags.writeable = False
  sizes = {name: len(part) for name, part in zip(names, parts, strict=True)}
  clients = ArrayClientData(train_images, train_labels, sizes)
  return FederatedImages(
      clients=clients,
      arrays={name: clients.examples(name) for name in names},
      test_images=images.test_images.reshape(len(images.test_labels), -1),
      test_labels=images.test_labels,
      num_classes=images.num_classes,
      image_shape=images.train_images.shape[1:],
  )
