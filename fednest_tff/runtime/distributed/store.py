"""What this process puts into Ray's object store, and how much it was."""

from collections.abc import Sequence
import functools
from typing import NamedTuple
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.distributed import client_data, messages
from fednest_tff.runtime.distributed.cluster import Ray, Reference
from fednest_tff.structures import Value

# Of clients' data that are kept. What is more than the memory of the object
# store, Ray writes to disk.
_MAX_DATA_BYTES = 2**34


class Traffic(NamedTuple):
  """What this process has sent and received since the start.

  Attributes:
    data_puts: How often a client's data were put into the object store.
    data_bytes: The bytes of these data. Each travels to a node at most once
      while the node has room.
    message_bytes: The bytes of all else that was sent: what the server sends to
      the clients, once per call, and values of single clients.
    computation_bytes: The bytes of computations, which are sent once.
    result_bytes: The bytes of the aggregates that came back.
  """

  data_puts: int = 0
  data_bytes: int = 0
  message_bytes: int = 0
  computation_bytes: int = 0
  result_bytes: int = 0


def _forget(
    digests: dict[int, tuple[weakref.ref[Value], bytes]],
    key: int,
    _: weakref.ref[Value],
) -> None:
  digests.pop(key, None)


class Store:
  """Puts values into the object store, equal ones only once.

  Attributes:
    traffic: What was sent and received.
  """

  def __init__(self, ray: Ray):
    self._ray = ray
    self._data: client_data.Shelf[client_data.Stored] = client_data.Shelf(
        _MAX_DATA_BYTES
    )
    # The hashes of datasets that are still alive, by their ids.
    self._digests: dict[int, tuple[weakref.ref[Value], bytes]] = {}
    # Computations are kept so that no other object gets the id of one.
    self._computations: dict[
        int, tuple[tff.Computation, client_data.Stored]
    ] = {}
    self.traffic = Traffic()

  def clear(self) -> None:
    """Lets Ray free everything."""
    self._data.clear()
    self._digests.clear()
    self._computations.clear()

  def _count(self, **numbers: int) -> None:
    self.traffic = self.traffic._replace(
        **{name: getattr(self.traffic, name) + k for name, k in numbers.items()}
    )

  def count_results(self, results: Sequence[Value]) -> None:
    """Adds results to the traffic."""
    self._count(result_bytes=sum(map(messages.num_bytes, results)))

  def put_message(self, message: Value, more_bytes: int) -> Reference:
    """Puts what all workers receive, for one call.

    Args:
      message: From `messages.encode`.
      more_bytes: The size of what is sent besides, to single workers.

    Returns:
      A reference. The message is freed with it.
    """
    self._count(message_bytes=messages.num_bytes(message) + more_bytes)
    return self._ray.put(message)

  def put_computation(self, comp: tff.Computation) -> client_data.Stored:
    """Puts a computation, unless it is there."""
    found = self._computations.get(id(comp))
    if found is None:
      proto = tff.framework.serialize_computation(comp)
      digest = client_data.digest(proto.SerializeToString(deterministic=True))
      stored = client_data.Stored(digest, [self._ray.put(proto)])
      self._count(computation_bytes=proto.ByteSize())
      found = self._computations[id(comp)] = comp, stored
    return found[1]

  def put_sequence(
      self, value: Value, sequence_type: tff.SequenceType
  ) -> client_data.Stored:
    """Puts a client's data, unless they are there.

    A dataset that was put before is known by its identity and not read again.
    Another one with the same elements is read, but not put.

    Args:
      value: A dataset, or a list of elements.
      sequence_type: Its type.

    Returns:
      A reference to the data.
    """
    elements = None
    seen = self._digests.get(id(value))
    if seen is not None and seen[0]() is value:
      digest = seen[1]
    else:
      elements = client_data.read(value, sequence_type)
      digest = elements.digest()
      if isinstance(value, tf.data.Dataset):
        forget = functools.partial(_forget, self._digests, id(value))
        self._digests[id(value)] = weakref.ref(value, forget), digest

    def put() -> tuple[client_data.Stored, int]:
      content = elements or client_data.read(value, sequence_type)
      self._count(data_puts=1, data_bytes=content.num_bytes)
      stored = client_data.Stored(digest, [self._ray.put(content)])
      return stored, content.num_bytes

    return self._data.get(digest, put)
