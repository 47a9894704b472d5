"""Serialized TensorFlow computations as functions of TFF values.

A `tff.tensorflow.computation` is a graph with named feeds and fetches. Imported
once, it can be called any number of times inside a `tf.function`, by any number
of clients at the same time.

TFF values are tensors, variant tensors (datasets) or `tff.structure.Struct`s of
them.
"""

from collections.abc import Callable
import hashlib
import re
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

# TensorFlow's name of a resource that belongs to one execution of its op.
_ANONYMOUS = b'cd2c89b7-88b7-44c8-ad83-06c2a9158347'


def _tensor_names(binding) -> list[str]:
  """The names of the tensors that a binding is made of, in order."""
  kind = binding.WhichOneof('binding')
  if kind == 'tensor':
    return [binding.tensor.tensor_name]
  if kind == 'sequence':
    return [binding.sequence.variant_tensor_name]
  return [
      name for element in binding.struct.element
      for name in _tensor_names(element)
  ]


def flatten(value: Any) -> list[tf.Tensor]:
  """The leaves of a TFF value."""
  if isinstance(value, tff.structure.Struct):
    return [leaf for element in value for leaf in flatten(element)]
  return [value]


def pack(value_type: tff.Type, leaves: list) -> Any:
  """A TFF value of `value_type` from its leaves; uses them up from the left."""
  if isinstance(value_type, tff.StructType):
    return tff.structure.Struct(
        (name, pack(element, leaves))
        for name, element in tff.structure.iter_elements(value_type)
    )
  return leaves.pop(0)


def _node_name(name: str) -> str:
  """The node that a tensor or a control input belongs to."""
  return name.lstrip('^').split(':')[0]


def _ancestors(graph_def: tf.compat.v1.GraphDef, names: list[str]) -> set[str]:
  """The nodes that nodes `names` depend on, themselves included."""
  nodes = {node.name: node for node in graph_def.node}
  found, stack = set(), list(names)
  while stack:
    current = stack.pop()
    if current not in found:
      found.add(current)
      stack += map(_node_name, nodes[current].input)
  return found


def _own_variables(graph_def: tf.compat.v1.GraphDef, initialize_op: str):
  """Gives each call its own variables, initialised before they are used.

  In TFF a session runs `initialize_op` first. Here everything is one function:
  whatever takes a variable's handle waits for the initialisation instead, and
  the handle is anonymous, so that clients do not share it.
  """
  handles = set()
  for node in graph_def.node:
    if node.op == 'VarHandleOp':
      node.attr['shared_name'].s = _ANONYMOUS
      handles.add(node.name)
  if not initialize_op:
    return
  initializers = _ancestors(graph_def, [initialize_op])
  for node in graph_def.node:
    sources = {source.split(':')[0] for source in node.input}
    if node.name not in initializers and sources & handles:
      node.input.append(f'^{initialize_op}')


def _canonical_text(graph_def: tf.compat.v1.GraphDef) -> str:
  """The graph as text, with its functions renamed and sorted in order of use.

  TensorFlow numbers functions over the whole process, so that the same Python
  function traced twice gives graphs that differ in nothing else.
  """
  functions = {f.signature.name: f for f in graph_def.library.function}
  # Names occur inside names, such as while_body_12_placeholder: longest first.
  known = sorted(functions, key=len, reverse=True)
  pattern = re.compile('|'.join(map(re.escape, known)) or '$^')
  names, parts = {}, []
  queue = [''.join(map(str, graph_def.node))]
  while queue:
    text = queue.pop(0)
    for name in pattern.findall(text):
      if name not in names:
        names[name] = f'function_{len(names)}_'
        queue.append(str(functions[name]))
    parts.append(text)
  return pattern.sub(lambda match: names[match[0]], ''.join(parts))


def fingerprint(compiled: tff.framework.CompiledComputation) -> bytes:
  """A hash that equal computations share, whenever they were traced."""
  proto = compiled.proto
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
  """How many nodes the graph and its functions have."""
  if compiled.proto.WhichOneof('computation') != 'tensorflow':
    return 0
  graph_def = tf.compat.v1.GraphDef()
  compiled.proto.tensorflow.graph_def.Unpack(graph_def)
  return len(graph_def.node) + sum(
      len(function.node_def) for function in graph_def.library.function
  )


def _as_function(
    graph_def: tf.compat.v1.GraphDef, feeds: list[str], fetches: list[str]
) -> Callable[..., list[tf.Tensor]]:
  """A graph as a TensorFlow function from `feeds` to `fetches`.

  It is imported with the arguments in place of the placeholders, also where an
  op only waits for one: `WrappedFunction.prune` would copy it op by op instead.
  What no fetch needs is left out, as TFF's session does not run it either.
  """
  needed = _ancestors(graph_def, [_node_name(name) for name in feeds + fetches])
  kept = [node for node in graph_def.node if node.name in needed]
  placeholders = {node.name: node.attr for node in kept}
  signature = []
  for name in feeds:
    attributes = placeholders[_node_name(name)]
    signature.append(
        tf.TensorSpec(attributes['shape'].shape, attributes['dtype'].type)
    )
  del graph_def.node[:]
  graph_def.node.extend(kept)

  def imported(*arguments):
    given = dict(zip(feeds, arguments, strict=True))
    waits = {f'^{_node_name(name)}': given[name] for name in feeds}
    return tf.graph_util.import_graph_def(
        graph_def, input_map=given | waits, return_elements=fetches, name=''
    )

  return tf.compat.v1.wrap_function(imported, signature)


def import_graph(
    compiled: tff.framework.CompiledComputation,
) -> Callable[[Any], Any]:
  """`compiled` as a Python function of a TFF value (or of `None`)."""
  kind = compiled.proto.WhichOneof('computation')
  if kind != 'tensorflow':
    raise NotImplementedError(
        f'The in-process runtime runs TensorFlow computations, not {kind}.'
    )
  proto = compiled.proto.tensorflow
  graph_def = tf.compat.v1.GraphDef()
  proto.graph_def.Unpack(graph_def)
  _own_variables(graph_def, proto.initialize_op)
  token = [proto.session_token_tensor_name] if (
      proto.session_token_tensor_name
  ) else []
  feeds = token
  if proto.HasField('parameter'):
    feeds = _tensor_names(proto.parameter) + token
  imported = _as_function(graph_def, feeds, _tensor_names(proto.result))
  result_type = compiled.type_signature.result

  def call(argument=None):
    arguments = [] if argument is None else flatten(argument)
    arguments += [tf.constant('') for _ in token]
    return pack(result_type, list(imported(*arguments)))

  return call
