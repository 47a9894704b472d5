"""A cohort whose clients are written into the graph one after the other.

The graph grows with the number of clients, and TensorFlow can run clients at
the same time. Clients may differ in the shapes of their tensors. Aggregates are
taken in the order of the clients, as TFF's own runtime does.
"""

from collections.abc import Iterator

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import values
from fednest_tff.runtime.compiler.broadcast import (
    Broadcast,
    Function,
    ReduceAtOnce,
)
from fednest_tff.structures import Value


class Unrolled:
  """A cohort whose clients are written out one after the other.

  A value at the clients is a list with one TFF value per client, a `Broadcast`,
  or a struct of such lists and `Broadcast`s.

  Attributes:
    size: The number of clients.
    key: What a function for this cohort depends on.
    is_vectorised: Whether clients are computed at once; they are not.
  """

  def __init__(self, size: int, devices: list[str]):
    """Creates the cohort.

    Args:
      size: The number of clients.
      devices: Client i runs on device i modulo the number of devices.
    """
    self.size = size
    self.key = size
    self.is_vectorised = False
    self._devices = devices

  def size_specs(self) -> list[tf.TensorSpec]:
    """Lists the specs of `size_tensors`."""
    return []

  def size_tensors(self) -> list[tf.Tensor]:
    """Returns an empty list: the function has a fixed number of clients."""
    return []

  def unpack_sizes(self, tensors: Iterator[tf.Tensor]) -> None:
    """Takes the next `tensors`, those of `size_tensors`."""
    del tensors  # None of them.

  def argument_specs(self, member: tff.Type) -> list[tf.TensorSpec]:
    """Lists the specs of a flat argument: all leaves, client by client."""
    return values.leaf_specs(member) * self.size

  def feed_tensors(
      self, arguments: list[Value], member: tff.Type
  ) -> list[tf.Tensor]:
    """Flattens an argument: Python values, one per client."""
    return [
        tensor
        for argument in arguments
        for tensor in values.to_tensors(argument, member)
    ]

  def stack_tensors(
      self, rows: list[list[tf.Tensor]], member: tff.Type
  ) -> list[tf.Tensor]:
    """Flattens an argument: tensors of all leaves, client by client."""
    del member  # Every tensor is an argument.
    return [tensor for row in rows for tensor in row]

  def unpack_argument(
      self, tensors: Iterator[tf.Tensor], member: tff.Type
  ) -> list[Value]:
    """Makes a value at the clients of the next `tensors`."""
    return [structures.pack(member, tensors) for _ in range(self.size)]

  def flatten_result(self, value: Value) -> list[tf.Tensor]:
    """Flattens a value at the clients: all leaves, client by client."""
    return [
        tensor
        for i in range(self.size)
        for tensor in structures.leaves(self._client_value(value, i))
    ]

  def to_python(
      self, tensors: Iterator[tf.Tensor], member: tff.Type
  ) -> list[Value]:
    """Makes Python values, one per client, of the next `tensors`."""
    return [values.to_python(tensors, member) for _ in range(self.size)]

  def _client_value(self, value: Value, i: int) -> Value:
    return structures.map_leaves(
        lambda v: v.value if isinstance(v, Broadcast) else v[i], value
    )

  def map(
      self,
      function: Function,
      value: Value,
      result_member: tff.Type,
      is_stateless: bool = False,
  ) -> list[Value]:
    """Applies `function` to each client's value; see `Batched.map`."""
    del result_member, is_stateless  # Only the other kind of cohort uses them.
    results = []
    for i in range(self.size):
      with tf.device(self._devices[i % len(self._devices)]):
        results.append(function(self._client_value(value, i)))
    return results

  def reduce(
      self,
      value: Value,
      zero: Value,
      accumulate: Function,
      merge: Function,
      at_once: ReduceAtOnce | None = None,
  ) -> Value:
    """Aggregates a value at the clients; see `Batched.reduce`.

    Args:
      value: The value.
      zero: The aggregate of no clients.
      accumulate: Maps (aggregate, client's value) to an aggregate.
      merge: Maps two aggregates to one.
      at_once: Maps stacked values to their aggregate.

    Returns:
      The aggregate of all clients.
    """
    del merge, at_once  # There is only one aggregate, of single values.
    total = zero
    for i in range(self.size):
      total = accumulate(
          tff.structure.Struct.unnamed(total, self._client_value(value, i))
      )
    return total
