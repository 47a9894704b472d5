"""Clients' data as arrays: read, identified, made into datasets again."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.distributed import client_data, messages

FLAT = tff.SequenceType(np.int64)
BATCHES = tff.SequenceType(tff.TensorType(np.float32, [None, 2]))
NAMED = tff.SequenceType(
    collections.OrderedDict(z=np.int32, a=tff.TensorType(np.str_))
)


def elements(dataset):
  return [tf.nest.flatten(e) for e in dataset.as_numpy_iterator()]


def check_round_trip(value, sequence_type, expected):
  found = elements(
      client_data.to_dataset(
          client_data.read(value, sequence_type), sequence_type
      )
  )
  assert len(found) == len(expected)
  for row, other in zip(found, expected, strict=True):
    for a, b in zip(row, other, strict=True):
      np.testing.assert_array_equal(a, b)


def test_many_examples_and_none():
  check_round_trip(
      tf.data.Dataset.range(5000), FLAT, [[k] for k in range(5000)]
  )
  check_round_trip(tf.data.Dataset.range(0), FLAT, [])
  check_round_trip([3, 1, 2], FLAT, [[3], [1], [2]])


def test_batches_of_different_sizes_keep_their_order():
  arrays = [np.full([size, 2], k, np.float32) for k, size in
            enumerate([3, 3, 1, 3, 2])]
  rows = tf.data.Dataset.from_tensor_slices(np.concatenate(arrays[:3]))
  check_round_trip(
      rows.batch(3), BATCHES, [[arrays[0]], [arrays[1]], [arrays[2]]]
  )
  check_round_trip(arrays, BATCHES, [[array] for array in arrays])
  read = client_data.read(arrays, BATCHES)
  assert [group[0].shape for group in read.groups] == [
      (2, 3, 2), (1, 1, 2), (1, 3, 2), (1, 2, 2)
  ]
  assert read.num_bytes == 12 * 2 * 4
  check_round_trip(rows.batch(3).take(0), BATCHES, [])


def test_names_of_components_and_strings():
  columns = collections.OrderedDict(
      z=np.array([1, 2], np.int32), a=np.array(['x', 'long'])
  )
  dataset = tf.data.Dataset.from_tensor_slices(columns)
  check_round_trip(dataset, NAMED, [[b'x', 1], [b'long', 2]])


def test_hash_tells_contents_apart():
  def digest(value, kind=FLAT):
    return client_data.read(value, kind).digest()

  assert digest([1, 2]) == digest(tf.data.Dataset.range(1, 3))
  assert len({digest(v) for v in ([], [1], [2], [1, 2], [2, 1])}) == 5
  one = np.zeros([2, 2], np.float32), np.zeros([1, 2], np.float32)
  assert digest(one, BATCHES) != digest(one[::-1], BATCHES)


def test_what_cannot_be_sent():
  with pytest.raises(ValueError, match='has no end'):
    client_data.read(tf.data.Dataset.range(3).repeat(), FLAT)
  with pytest.raises(TypeError, match='Expected a dataset'):
    client_data.read(tf.data.Dataset.range(3), BATCHES)


def test_shelf_keeps_what_was_used_last():
  shelf = client_data.Shelf(10)
  made = []

  def get(key, size):
    return shelf.get(key, lambda: (made.append(key) or key.upper(), size))

  assert [get('a', 4), get('b', 4), get('a', 4)] == ['A', 'B', 'A']
  get('c', 4)  # No room for b, which was used longest ago.
  get('a', 4)
  get('b', 4)
  assert made == ['a', 'b', 'c', 'b']
  get('huge', 40)  # What is needed is kept, whatever its size.
  get('huge', 40)
  assert made[4:] == ['huge']


def test_messages_have_arrays_only_and_names_stand_for_clients():
  value_type = tff.to_type([
      ('server', tff.FederatedType([np.float32, np.int32], tff.SERVER)),
      ('data', tff.FederatedType(FLAT, tff.CLIENTS)),
      ('numbers', tff.FederatedType(np.int32, tff.CLIENTS)),
  ])
  value = collections.OrderedDict(
      server=(tf.constant(1.5), 2), data=[[7], 'alice'], numbers=[3, 4]
  )
  sent = messages.encode(value, value_type, client_data.read)
  assert sent[1][1] == client_data.Named('alice')
  assert messages.num_bytes(sent) == 4 + 4 + 8 + 2 * 4
  opened = tf.data.Dataset.range(2)
  back = messages.decode(
      sent, value_type, client_data.to_dataset, lambda name: opened
  )
  assert list(back.server) == [1.5, 2]
  assert elements(back.data[0]) == [[7]]
  assert back.data[1] is opened
  assert back.numbers == [3, 4]
  assert back.numbers[0].dtype == np.int32
