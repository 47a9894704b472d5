"""Clients' values divided among workers."""

import numpy as np
import pytest
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


def test_lists_at_clients():
  assert shares.lists_at_clients(_argument(2), ARGUMENT) == [[0, 1], (0, 1)]
  assert shares.lists_at_clients([4, 5], CLIENTS) == [[4, 5]]
  assert shares.lists_at_clients(4, EQUAL) == []


@pytest.mark.parametrize('size', [0, 1, 4, 5, 7])
@pytest.mark.parametrize('num_parts', [1, 2, 3])
def test_parts_are_even_and_keep_the_order(size, num_parts):
  parts = [
      shares.share(_argument(size), ARGUMENT, part, num_parts)
      for part in range(num_parts)
  ]
  assert sum([part.nested.x for part in parts], []) == list(range(size))
  lengths = [len(part.nested.x) for part in parts]
  assert max(lengths) - min(lengths) <= 1
  for part in parts:
    assert part.z == part.nested.x
    assert (part.server, part.nested.y) == ((7,), 8)
    assert list(part.unplaced) == [1, 2]


def test_no_clients_and_a_single_list():
  rest = shares.share(_argument(3), ARGUMENT, 0, 0)
  assert (rest.nested.x, rest.z, rest.server) == ([], [], (7,))
  assert shares.share([1, 2, 3], CLIENTS, 1, 2) == [2, 3]
