"""A worker: the process on a node that runs the clients' part.

It keeps what it has compiled, and the clients' data that it has seen.
"""

from collections.abc import Callable, Sequence
import os
import pickle
from typing import NamedTuple, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime import in_process, shares
from fednest_tff.runtime.distributed import client_data, messages
from fednest_tff.structures import Value

# From the name of a client to its dataset, or to the value that its type asks
# for.
OpenClient: TypeAlias = Callable[[client_data.ClientId], Value]

_MAX_DATA_BYTES = 2**30
_MAX_COMPUTATION_BYTES = 2**28
_OPENED_BYTES = 2**20  # What a client's open data are taken to need.


class Versions(NamedTuple):
  """What must agree between a node and this process."""

  tensorflow: str
  tensorflow_federated: str


class Failure(NamedTuple):
  """An error of a computation, as it travels.

  Attributes:
    kind: The class of a TensorFlow error; `None` for others.
    message: The message of a TensorFlow error.
    error: The error itself if it is not TensorFlow's.
  """

  kind: type[tf.errors.OpError] | None
  message: str
  error: Exception | None

  def rebuild(self) -> Exception:
    """Makes the error that was raised."""
    if self.error is not None:
      return self.error
    assert self.kind is not None
    return self.kind(None, None, self.message)


def _to_failure(error: Exception) -> Failure:
  if isinstance(error, tf.errors.OpError):
    return Failure(type(error), error.message, None)
  try:
    pickle.loads(pickle.dumps(error))
  except Exception:  # What it raises is not ours to know.
    error = RuntimeError(f'{type(error).__name__}: {error}')
  return Failure(None, '', error)


def versions() -> Versions:
  """The versions that are installed here."""
  return Versions(tf.__version__, tff.__version__)


class Worker:
  """Runs computations for shares of a cohort; an actor of Ray."""

  def __init__(
      self,
      num_threads: int,
      devices: Sequence[str] | None,
      unroll: int | None,
      compiled: bool,
      open_client: OpenClient | None,
  ):
    """Starts TensorFlow.

    Args:
      num_threads: How many clients, and parts of an operation, run at once.
      devices: As `InProcessRuntime` takes them.
      unroll: Likewise.
      compiled: Likewise.
      open_client: Opens the data of a client on this node.
    """
    tf.config.threading.set_inter_op_parallelism_threads(num_threads)
    if 'TF_NUM_INTRAOP_THREADS' not in os.environ:
      tf.config.threading.set_intra_op_parallelism_threads(num_threads)
    self._runtime = in_process.InProcessRuntime(
        devices=devices, unroll=unroll, compiled=compiled
    )
    self._open_client = open_client
    self._computations: client_data.Shelf[tff.Computation] = client_data.Shelf(
        _MAX_COMPUTATION_BYTES
    )
    self._datasets: client_data.Shelf[Value] = client_data.Shelf(
        _MAX_DATA_BYTES
    )

  def ping(self) -> int:
    """Answers with the process id, also while another call runs."""
    return os.getpid()

  def describe(self) -> Versions:
    """The versions of this node."""
    return versions()

  def _computation(self, stored: client_data.Stored) -> tff.Computation:
    def fetch() -> tuple[tff.Computation, int]:
      import ray

      proto = ray.get(stored.reference[0])
      return tff.framework.deserialize_computation(proto), proto.ByteSize()

    return self._computations.get(stored.digest, fetch)

  def _load(
      self, stored: Value, sequence_type: tff.SequenceType
  ) -> tf.data.Dataset:
    if isinstance(stored, client_data.Elements):
      return client_data.to_dataset(stored, sequence_type)

    def fetch() -> tuple[tf.data.Dataset, int]:
      import ray

      elements = ray.get(stored.reference[0])
      dataset = client_data.to_dataset(elements, sequence_type)
      return dataset, elements.num_bytes

    return self._datasets.get((stored.digest, str(sequence_type)), fetch)

  def _open(self, client_id: client_data.ClientId) -> Value:
    if self._open_client is None:
      raise ValueError(
          f'A client is given by its name, {client_id!r}, but `open_client` was'
          ' not given.'
      )
    opened = self._open_client
    return self._datasets.get(
        ('client', client_id), lambda: (opened(client_id), _OPENED_BYTES)
    )

  def forget(self) -> None:
    """Frees the clients' data that are kept."""
    self._datasets.clear()

  def count_examples(
      self, client_ids: Sequence[client_data.ClientId]
  ) -> list[int] | Failure:
    """Counts the examples of clients whose data are on the nodes."""
    try:
      return [shares.count_elements(self._open(k)) for k in client_ids]
    except Exception as error:  # It is raised where the result is wanted.
      return _to_failure(error)

  def run(
      self,
      computation: client_data.Stored,
      fixed: list[Value],
      of_clients: list[Value],
  ) -> list[Value] | Failure:
    """Runs a computation for some of the clients.

    Args:
      computation: A reference to its serialised form.
      fixed: What is sent for the leaves of its argument; `None` for those that
        differ between clients.
      of_clients: Lists of what is sent for the clients of this share; `None`
        for the other leaves.

    Returns:
      What is sent for the result, in a list; or the error.
    """
    try:
      found = self._computation(computation)
      parameter = found.type_signature.parameter
      leaf_types = structures.leaves(parameter)
      leaves = [
          messages.decode(
              mine if common is None else common, leaf_type, self._load,
              self._open,
          )
          for common, mine, leaf_type in zip(
              fixed, of_clients, leaf_types, strict=True
          )
      ]
      result = self._runtime.run(found, structures.pack(parameter, leaves))
      result_type = found.type_signature.result
      return [messages.encode(result, result_type, client_data.read)]
    except Exception as error:  # It is raised where the result is wanted.
      return _to_failure(error)
