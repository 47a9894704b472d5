"""Federated images: the same examples for TFF and for NumPy."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.data import (
    ArrayClientData,
    DataError,
    LabelledImages,
    federate,
    load,
    long_tail,
    partition,
)


def make_images(num_classes=4, size=200):
  """Every image is told from all others by its first pixel."""
  rng = np.random.default_rng(0)
  images = rng.random((size + 20, 3, 2)).astype(np.float32)
  images[:, 0, 0] = np.arange(size + 20) / 1000
  labels = rng.integers(0, num_classes, size + 20).astype(np.int32)
  return LabelledImages(
      images[:size],
      labels[:size],
      images[size:],
      labels[size:],
      num_classes,
      train_writers=rng.integers(0, 12, size).astype(np.int32),
      test_writers=np.zeros(20, np.int32),
  )


IMAGES = make_images()


def to_arrays(dataset):
  images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
  return np.stack(images), np.stack(labels)


def assert_equal(actual, expected):
  for one, other in zip(actual, expected, strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


def positions(images):
  return np.rint(images[:, 0] * 1000).astype(int)


@pytest.mark.parametrize('name', ['iid', 'shards', 'dirichlet', 'writers'])
@pytest.mark.parametrize('imbalance', [None, 0.1])
def test_clients_have_the_examples_of_the_partition(name, imbalance):
  federated = federate(IMAGES, name, 6, seed=5, imbalance=imbalance)
  kept = np.arange(200)
  if imbalance:
    kept = long_tail(IMAGES.train_labels, 4, seed=5, factor=imbalance)
    assert len(kept) < 100
  parts = partition(
      name,
      IMAGES.train_labels[kept],
      6,
      seed=5,
      num_classes=4,
      writers=IMAGES.train_writers[kept],
  )
  assert federated.clients.client_ids == list(federated.arrays)
  for part, (images, labels) in zip(
      parts, federated.arrays.values(), strict=True
  ):
    assert_equal(
        (images, labels),
        (
            IMAGES.train_images[kept[part]].reshape(-1, 6),
            IMAGES.train_labels[kept[part]],
        ),
    )
  assert_equal(
      (federated.test_images, federated.test_labels),
      (IMAGES.test_images.reshape(20, 6), IMAGES.test_labels),
  )
  assert federated.image_shape == (3, 2)
  assert federated.num_classes == 4


def test_alpha_reaches_the_partition():
  sizes = []
  for alpha in (0.01, 1000.0):
    arrays = federate(
        IMAGES, 'dirichlet', 5, seed=0, dirichlet_alpha=alpha
    ).arrays
    sizes.append(np.std([len(labels) for _, labels in arrays.values()]))
  assert sizes[0] > 5 * sizes[1]


def test_writers_give_their_number_to_the_client():
  federated = federate(IMAGES, 'writers', None, seed=0)
  assert federated.clients.client_ids == [f'writer_{k:04d}' for k in range(12)]
  for name, (images, _) in federated.arrays.items():
    writers = IMAGES.train_writers[positions(images)]
    assert {f'writer_{k:04d}' for k in writers} == {name}


def test_data_without_writers():
  with pytest.raises(DataError, match='emnist'):
    federate(load('digits'), 'writers', 3, seed=0)


def test_same_seed_same_clients():
  one, same, other = (
      federate(IMAGES, 'shards', 6, seed=seed, imbalance=0.5)
      for seed in (1, 1, 2)
  )
  for name, examples in one.arrays.items():
    assert_equal(examples, same.arrays[name])
  assert any(
      not np.array_equal(labels, other.arrays[name][1])
      for name, (_, labels) in one.arrays.items()
  )


@pytest.fixture(scope='module')
def federated():
  return federate(IMAGES, 'shards', 6, seed=0)


SPEC = (tf.TensorSpec([6], tf.float32), tf.TensorSpec([], tf.int32))


def test_datasets(federated):
  clients = federated.clients
  assert isinstance(clients, tff.simulation.datasets.ClientData)
  assert clients.element_type_structure == SPEC
  for name, examples in federated.arrays.items():
    dataset = clients.create_tf_dataset_for_client(name)
    assert dataset.element_spec == SPEC
    assert_equal(to_arrays(dataset), examples)


def test_arrays_cannot_be_changed(federated):
  images, labels = federated.arrays['client_0001']
  for array in (images, labels):
    with pytest.raises(ValueError, match='read-only'):
      array[0] = 0


def test_unknown_client(federated):
  with pytest.raises(ValueError, match="'nobody' is none of the 6 clients"):
    federated.clients.create_tf_dataset_for_client('nobody')
  look_up = tf.function(federated.clients.serializable_dataset_fn)
  with pytest.raises(tf.errors.InvalidArgumentError, match='nobody'):
    list(look_up(tf.constant('nobody')))


def test_sizes_must_add_up():
  with pytest.raises(ValueError, match='add up'):
    ArrayClientData(np.zeros([4, 2]), np.zeros(4), {'a': 1, 'b': 2})


def test_serializable_function_on_names_and_tensors(federated):
  create = federated.clients.serializable_dataset_fn
  symbolic = tf.function(create)
  for name, examples in federated.arrays.items():
    assert_equal(to_arrays(create(name)), examples)
    assert_equal(to_arrays(create(tf.constant(name))), examples)
    assert_equal(to_arrays(symbolic(tf.constant(name))), examples)


def test_dataset_computation(federated):
  for name in ('client_0000', 'client_0005'):
    elements = list(federated.clients.dataset_computation(name))
    images, labels = zip(*elements, strict=True)
    assert_equal((np.stack(images), np.stack(labels)), federated.arrays[name])


def test_preprocessed_clients(federated):
  clients = federated.clients.preprocess(lambda d: d.take(8).batch(4))
  expected = federated.arrays['client_0002'][1][:8].reshape(2, 4)
  for dataset in (
      clients.create_tf_dataset_for_client('client_0002'),
      clients.dataset_computation('client_0002'),
  ):
    labels = np.stack([np.asarray(batch[1]) for batch in dataset])
    np.testing.assert_array_equal(labels, expected)


def test_all_clients_in_the_order_of_tff(federated):
  clients = federated.clients
  expected = tff.simulation.datasets.ClientData.from_clients_and_tf_fn(
      clients.client_ids, clients.serializable_dataset_fn
  )
  for seed in (3, [1, 2]):
    assert_equal(
        to_arrays(clients.create_tf_dataset_from_all_clients(seed)),
        to_arrays(expected.create_tf_dataset_from_all_clients(seed)),
    )


def test_split_of_clients(federated):
  train, test = tff.simulation.datasets.ClientData.train_test_client_split(
      federated.clients, 2, seed=0
  )
  assert len(test.client_ids) == 2
  names = train.client_ids + test.client_ids
  assert sorted(names) == federated.clients.client_ids
  name = test.client_ids[0]
  assert_equal(
      to_arrays(test.create_tf_dataset_for_client(name)), federated.arrays[name]
  )


def test_sampled_digits_in_a_federated_computation():
  federated = federate(load('digits'), 'shards', 30, seed=0)
  sample = tff.simulation.build_uniform_sampling_fn(
      federated.clients.client_ids, random_seed=1
  )
  names = sample(0, size=4)
  assert len(set(names)) == 4
  sequence = tff.SequenceType(
      (tff.TensorType(np.float32, [64]), tff.TensorType(np.int32))
  )

  @tff.tensorflow.computation(sequence)
  def add_labels(dataset):
    return dataset.reduce(0, lambda total, example: total + example[1])

  @tff.federated_computation(tff.FederatedType(sequence, tff.CLIENTS))
  def add_all(datasets):
    return tff.federated_sum(tff.federated_map(add_labels, datasets))

  datasets = [
      federated.clients.create_tf_dataset_for_client(name) for name in names
  ]
  expected = sum(federated.arrays[name][1].sum() for name in names)
  assert add_all(datasets) == expected > 0


def test_what_is_printed_is_short():
  images = load('digits')
  assert repr(images) == (
      '<LabelledImages: 1438 training and 359 test examples, 10 classes, images'
      ' 8x8>'
  )
  assert repr(federate(images, 'iid', 6, seed=0)) == (
      '<FederatedImages: 6 clients, 1438 training and 359 test examples, 10'
      ' classes, images 8x8>'
  )
