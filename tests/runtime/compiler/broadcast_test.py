"""Values that are the same at all clients."""

import tensorflow_federated as tff

from fednest_tff.runtime.compiler.broadcast import (
    Broadcast,
    broadcast_value,
    is_broadcast,
    split_broadcasts,
)

Struct = tff.structure.Struct


def test_broadcasts():
  shared = Struct([('a', Broadcast(1)), ('b', Struct([(None, Broadcast(2))]))])
  assert is_broadcast(shared)
  assert is_broadcast(Broadcast(Struct([('a', 1)])))
  assert not is_broadcast(Struct.unnamed(Broadcast(1), [1, 2]))
  plain = Struct([('a', 1), ('b', Struct([(None, 2)]))])
  assert broadcast_value(shared) == plain
  # A list stands for one value per client.
  mixed = Struct.unnamed([1, 2], Broadcast(plain))
  assert split_broadcasts(mixed) == Struct.unnamed([1, 2], shared)
