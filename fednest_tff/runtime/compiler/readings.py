"""Reads clients' datasets before the function that needs what is in them.

Clients of this library first turn their dataset into tensors, and all else is
computed from these. A call of a graph that takes nothing but what one client
gave is a *reading*. Readings run before the function, client by client, and the
function takes their results as further arguments. So the shapes of a client's
tensors are known before, datasets need no loop inside, and what was read from a
dataset can be used again in the next epoch.

The result is kept only for a dataset whose elements are the same each time it
is read. A shuffled one, for example, is read every time.
"""

from collections.abc import Sequence
import concurrent.futures
import os
from typing import NamedTuple
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import (
    datasets,
    fingerprints,
    graph_rewriting,
    graphs,
    values,
)
from fednest_tff.structures import Value

# How many bytes of results are kept; beyond that all are dropped.
_MAX_BYTES = 2**30


class Reading(NamedTuple):
  """A call of a graph that takes nothing but what one client gave.

  Attributes:
    name: The name of the call's result in the computation.
    graph: The graph.
    leaf: The number of its argument among the leaves of the computation's
      parameter.
    is_constant: Whether the graph has the same result for the same data.
  """

  name: str
  graph: tff.framework.CompiledComputation
  leaf: int
  is_constant: bool

  @property
  def member(self) -> tff.Type:
    """The type of one client's result."""
    return self.graph.type_signature.result


class Readings(NamedTuple):
  """The readings of a computation.

  Attributes:
    calls: The readings.
    unused: The numbers of those leaves of the computation's parameter that
      nothing but readings needs.
  """

  calls: list[Reading]
  unused: frozenset[int]


def find_readings(block: tff.framework.ComputationBuildingBlock) -> Readings:
  """Finds the readings of a computation in call-dominant form."""
  nothing = Readings([], frozenset())
  if not isinstance(block, tff.framework.Lambda) or not isinstance(
      block.result, tff.framework.Block
  ):
    return nothing
  parameter = block.parameter_type
  numbers = structures.pack(parameter, range(len(structures.leaves(parameter))))

  def leaf_number(inner: tff.framework.ComputationBuildingBlock) -> Value:
    if isinstance(inner, tff.framework.Reference):
      return numbers if inner.name == block.parameter_name else None
    if isinstance(inner, tff.framework.Selection):
      source = leaf_number(inner.source)
      if isinstance(source, tff.structure.Struct):
        if inner.name is not None:
          return getattr(source, inner.name)
        return source[inner.index]
    return None

  found = []
  others = [block.result.result]
  for name, call in block.result.locals:
    others.append(call)
    if (
        isinstance(call, tff.framework.Call)
        and isinstance(call.function, tff.framework.Intrinsic)
        and call.function.uri == 'federated_map'
    ):
      graph, argument = call.argument
      if isinstance(graph, tff.framework.CompiledComputation):
        number = leaf_number(argument)
        if isinstance(number, int) and graph_rewriting.reads_datasets(graph):
          is_constant = graph_rewriting.only_reads_datasets(graph)
          found.append(Reading(name, graph, number, is_constant))
          others.pop()
  if not found:
    return nothing
  inner_blocks = [
      inner for other in others for inner in structures.inner_blocks(other)
  ]
  references = [
      inner for inner in inner_blocks
      if isinstance(inner, tff.framework.Reference)
      and inner.name == block.parameter_name
  ]
  selections = [
      inner for inner in inner_blocks
      if isinstance(inner, tff.framework.Selection)
      and isinstance(inner.source, tff.framework.Reference)
      and inner.source.name == block.parameter_name
  ]
  if len(references) > len(selections):
    return Readings(found, frozenset())  # Something takes the whole parameter.
  used = {
      number for selection in selections
      for number in structures.leaves(leaf_number(selection))
  }
  return Readings(
      found, frozenset(reading.leaf for reading in found) - used
  )


def _num_bytes(tensors: Sequence[tf.Tensor]) -> int:
  return sum(t.dtype.size * t.shape.num_elements() for t in tensors)


class Reader:
  """Runs readings, and keeps results."""

  def __init__(self) -> None:
    self._functions: dict[bytes, Value] = {}
    # From a dataset to the results of graphs, by fingerprint.
    self._kept: weakref.WeakKeyDictionary[
        tf.data.Dataset, dict[bytes, list[tf.Tensor]]
    ] = weakref.WeakKeyDictionary()
    self._num_bytes = 0
    self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())

  def clear(self) -> None:
    """Forgets all results."""
    self._kept.clear()
    self._num_bytes = 0

  def read(
      self, reading: Reading, clients: Sequence[Value], member: tff.Type
  ) -> list[list[tf.Tensor]]:
    """Runs a reading.

    Args:
      reading: The reading.
      clients: What each client gave.
      member: Its type.

    Returns:
      The tensors of the result, for each client.
    """
    key = fingerprints.fingerprint(reading.graph)
    if key not in self._functions:
      self._functions[key] = _build_function(reading.graph, member)
    function = self._functions[key]

    def kept(value: Value) -> list[tf.Tensor] | None:
      if reading.is_constant and isinstance(value, tf.data.Dataset):
        return self._kept.get(value, {}).get(key)
      return None

    def read_client(value: Value) -> list[tf.Tensor]:
      tensors = function(*values.to_tensors(value, member))
      if (
          reading.is_constant
          and isinstance(value, tf.data.Dataset)
          and datasets.is_constant(value)
      ):
        self._keep(value, key, tensors)
      return tensors

    found = [kept(value) for value in clients]
    # Threads only for those that are not kept: they cost a tenth of a
    # millisecond each.
    missing = [
        value
        for value, tensors in zip(clients, found, strict=True)
        if tensors is None
    ]
    read = iter(self._pool.map(read_client, missing) if missing else ())
    return [next(read) if tensors is None else tensors for tensors in found]

  def _keep(
      self, dataset: tf.data.Dataset, key: bytes, tensors: list[tf.Tensor]
  ) -> None:
    num_bytes = _num_bytes(tensors)
    if self._num_bytes + num_bytes > _MAX_BYTES:
      # Many of the datasets may be gone, and their results with them.
      self._num_bytes = sum(
          _num_bytes(tensors)
          for results in list(self._kept.values())
          for tensors in results.values()
      )
      if self._num_bytes + num_bytes > _MAX_BYTES:
        self.clear()
    self._num_bytes += num_bytes
    self._kept.setdefault(dataset, {})[key] = tensors


def _build_function(
    graph: tff.framework.CompiledComputation, member: tff.Type
) -> Value:
  imported = graphs.ImportedGraph(graph)

  @tf.function(input_signature=values.leaf_specs(member), autograph=False)
  def read(*tensors: tf.Tensor) -> list[tf.Tensor]:
    with tf.device('CPU:0'):
      return structures.leaves(imported(structures.pack(member, tensors)))

  return read.get_concrete_function()
