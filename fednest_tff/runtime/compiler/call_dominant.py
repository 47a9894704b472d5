"""Rewrites a computation as a list of calls, and identifies it by a hash.

TFF calls this list the call-dominant form: every call has a name, and no call
is inside another one.
"""

from collections.abc import Iterator
import contextlib
import hashlib
import re
import threading
from typing import NamedTuple
import weakref

import tensorflow_federated as tff
from tensorflow_federated.python.core.impl.types import type_serialization

from fednest_tff import structures
from fednest_tff.runtime.compiler import fingerprints, readings
from fednest_tff.structures import Value


class CallDominant(NamedTuple):
  """A computation in call-dominant form.

  Attributes:
    block: The computation.
    type_signature: Its type.
    fingerprint: A hash. Equal computations have the same one, also if they were
      traced at different times.
    num_nodes: The number of nodes of all TensorFlow graphs in it.
    readings: The calls that only read what clients gave.
  """

  block: tff.framework.ComputationBuildingBlock
  type_signature: tff.FunctionType
  fingerprint: bytes
  num_nodes: int
  readings: readings.Readings


def _text(block: tff.framework.ComputationBuildingBlock) -> str:
  """Writes a block as text, without its graphs and without made-up names."""

  def hide_graphs(
      inner: tff.framework.ComputationBuildingBlock,
  ) -> tuple[tff.framework.ComputationBuildingBlock, bool]:
    if isinstance(inner, tff.framework.CompiledComputation):
      return tff.framework.Reference('graph', inner.type_signature), True
    return inner, False

  plain, _ = tff.framework.transform_postorder(block, hide_graphs)
  # TFF makes up names such as _abc1. Here they are numbered as they appear.
  names: dict[str, str] = {}
  text = re.sub(
      r'\b_[a-z]{3}\d+\b',
      lambda match: names.setdefault(match[0], f'name_{len(names)}'),
      plain.compact_representation(),
  )
  return f'{text} : {block.type_signature}'


def fingerprint(block: tff.framework.ComputationBuildingBlock) -> bytes:
  """Hashes a block's graphs, its constants and its text."""
  digest = hashlib.sha256()
  for inner in structures.inner_blocks(block):
    if isinstance(inner, tff.framework.CompiledComputation):
      digest.update(fingerprints.fingerprint(inner))
    elif isinstance(inner, tff.framework.Literal):
      digest.update(repr(inner.value).encode())
  digest.update(_text(block).encode())
  return digest.digest()


def _num_nodes(block: tff.framework.ComputationBuildingBlock) -> int:
  """Counts the nodes of all graphs, each graph as often as it is called."""
  return sum(
      fingerprints.num_nodes(inner)
      for inner in structures.inner_blocks(block)
      if isinstance(inner, tff.framework.CompiledComputation)
  )


_READ_TYPE = type_serialization.deserialize_type
_READING_TYPES = threading.Lock()


@contextlib.contextmanager
def _types_read_once() -> Iterator[None]:
  """Within it, TFF reads equal types once, not once for each building block.

  Every block of a computation has its type, and most blocks have the type of
  the whole state: reading types is most of the time to read a computation.
  """
  known: dict[bytes, tff.Type] = {}

  def read_once(proto: Value) -> tff.Type:
    key = proto.SerializeToString()
    if key not in known:
      known[key] = _READ_TYPE(proto)
    return known[key]

  with _READING_TYPES:
    type_serialization.deserialize_type = read_once
    try:
      yield
    finally:
      type_serialization.deserialize_type = _READ_TYPE


# Call-dominant forms by the id of the computation, while it exists.
_KNOWN: dict[int, CallDominant] = {}


def to_call_dominant(computation: tff.Computation) -> CallDominant:
  """Rewrites a computation, if it has not been rewritten before.

  Args:
    computation: Any computation that is a function.

  Returns:
    Its call-dominant form.

  Raises:
    ValueError: If `computation` is not a function.
  """
  found = _KNOWN.get(id(computation))
  if found is not None:
    return found
  with _types_read_once():
    block = computation.to_building_block()
  if not isinstance(block.type_signature, tff.FunctionType):
    raise ValueError(f'Expected a function; got {block.type_signature}.')
  block = tff.framework.to_call_dominant(block)
  found = CallDominant(
      block,
      block.type_signature,
      fingerprint(block),
      _num_nodes(block),
      readings.find_readings(block),
  )
  _KNOWN[id(computation)] = found
  weakref.finalize(computation, _KNOWN.pop, id(computation), None)
  return found
