"""Hashes of `tff.tensorflow.computation`s, equal for those that do the same.

Equal computations share what is imported, read and compiled for one of them.
"""

import hashlib
import re

import tensorflow as tf
import tensorflow_federated as tff


def _canonical_text(graph_def: tf.compat.v1.GraphDef) -> str:
  """Writes a graph as text that does not depend on when it was traced.

  TensorFlow numbers functions in the order in which a process creates them.
  The same Python function, traced twice, therefore gives two graphs that differ
  in those numbers. Here functions are renamed and sorted in order of use.
  """
  functions = {f.signature.name: f for f in graph_def.library.function}
  # The longest first, because a name may be the beginning of another one.
  known = sorted(functions, key=len, reverse=True)
  pattern = re.compile('|'.join(map(re.escape, known)) or '$^')
  names: dict[str, str] = {}
  parts = []
  queue = [''.join(map(str, graph_def.node))]
  while queue:
    text = queue.pop(0)
    for name in pattern.findall(text):
      if name not in names:
        names[name] = f'function_{len(names)}_'
        queue.append(str(functions[name]))
    parts.append(text)
  return pattern.sub(lambda match: names[match[0]], ''.join(parts))


# From the hash of a serialised computation to its fingerprint.
_FINGERPRINTS: dict[bytes, bytes] = {}


def fingerprint(compiled: tff.framework.CompiledComputation) -> bytes:
  """Computes a hash that is the same for computations that are equal."""
  text = compiled.proto.SerializeToString(deterministic=True)
  key = hashlib.sha256(text).digest()
  if key not in _FINGERPRINTS:
    _FINGERPRINTS[key] = _fingerprint(compiled)
  return _FINGERPRINTS[key]


def _fingerprint(compiled: tff.framework.CompiledComputation) -> bytes:
  proto = compiled.proto
  if proto.WhichOneof('computation') != 'tensorflow':
    text = proto.SerializeToString(deterministic=True)
    return hashlib.sha256(text).digest()
  graph_def = tf.compat.v1.GraphDef()
  proto.tensorflow.graph_def.Unpack(graph_def)
  digest = hashlib.sha256(_canonical_text(graph_def).encode())
  for part in (
      proto.type,
      proto.tensorflow.parameter,
      proto.tensorflow.result,
  ):
    digest.update(part.SerializeToString(deterministic=True))
  digest.update(proto.tensorflow.initialize_op.encode())
  return digest.digest()


def num_nodes(compiled: tff.framework.CompiledComputation) -> int:
  """Counts the nodes of a computation's graph and of the graph's functions."""
  if compiled.proto.WhichOneof('computation') != 'tensorflow':
    return 0
  graph_def = tf.compat.v1.GraphDef()
  compiled.proto.tensorflow.graph_def.Unpack(graph_def)
  return len(graph_def.node) + sum(
      len(function.node_def) for function in graph_def.library.function
  )
