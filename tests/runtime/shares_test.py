"""Clients' values divided among workers."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import shares

Struct = tff.structure.Struct
CLIENTS = tff.FederatedType(np.int32, tff.CLIENTS)
EQUAL = tff.FederatedType(np.int32, tff.CLIENTS, all_equal=True)
SERVER = tff.FederatedType([np.int32], tff.SERVER)
ARGUMENT = tff.to_type([
    ('server', SERVER), ('nested', [('x', CLIENTS), ('y', EQUAL)]),
    ('z', CLIENTS), ('unplaced', [np.int32, np.int32]),
])


def _argument(size):
  clients = list(range(size))
  return Struct([
      ('server', (7,)), ('nested', dict(y=8, x=clients)),
      ('z', tuple(clients)), ('unplaced', [1, 2]),
  ])


def test_has_clients():
  assert shares.has_clients(ARGUMENT)
  assert shares.has_clients(EQUAL)
  assert not shares.has_clients(SERVER)
  assert not shares.has_clients(None)


def test_is_per_client():
  assert shares.is_per_client(CLIENTS)
  assert not shares.is_per_client(EQUAL)
  assert not shares.is_per_client(SERVER)


@pytest.mark.parametrize('size', [0, 1, 4, 5, 7])
@pytest.mark.parametrize('num_parts', [1, 2, 3])
def test_parts_are_even_and_keep_the_order(size, num_parts):
  clients = tuple(range(size))
  parts = [shares.cut(clients, part, num_parts) for part in range(num_parts)]
  assert sum(parts, []) == list(clients)
  lengths = list(map(len, parts))
  assert max(lengths) - min(lengths) <= 1


def test_without_clients():
  rest = shares.without_clients(_argument(3), ARGUMENT)
  assert (rest.nested.x, rest.z) == ([], [])
  assert (rest.server, rest.nested.y) == ((7,), 8)
  assert list(rest.unplaced) == [1, 2]
  assert shares.without_clients([1, 2, 3], CLIENTS) == []


def test_count_elements():
  dataset = tf.data.Dataset.range(5)
  assert shares.count_elements(dataset) == 5
  assert shares.count_elements(dataset.filter(lambda k: k < 3)) == 3
  assert shares.count_elements([4, 5]) == 2
