"""Converts `tff.tensorflow.computation`s to Python functions.

TFF stores such a computation as a graph with named inputs and outputs. The
graph is imported once and can then be called any number of times inside a
`tf.function`, for many clients at the same time.

The functions take and return TFF values: a tensor, the variant tensor of a
dataset, or a `tff.structure.Struct` of them.
"""

from collections.abc import Callable
import hashlib
import re

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.structures import Value

# By this name TensorFlow knows a resource that each execution creates anew.
_ANONYMOUS = b'cd2c89b7-88b7-44c8-ad83-06c2a9158347'


def _tensor_names(binding: Value) -> list[str]:
  """Lists the tensors of a TFF binding (a protocol buffer), in order."""

  def children(inner: Value) -> Value:
    is_leaf = inner.WhichOneof('binding') in ('tensor', 'sequence')
    return None if is_leaf else inner.struct.element

  return [
      leaf.tensor.tensor_name or leaf.sequence.variant_tensor_name
      for leaf in structures.iterate_leaves(binding, children)
  ]


def _node_name(name: str) -> str:
  """Returns the node that a tensor or a control input belongs to."""
  return name.lstrip('^').split(':')[0]


def _ancestors(graph_def: tf.compat.v1.GraphDef, names: list[str]) -> set[str]:
  """Finds the nodes that `names` depend on, including `names`."""
  nodes = {node.name: node for node in graph_def.node}
  found: set[str] = set()
  stack = list(names)
  while stack:
    current = stack.pop()
    if current not in found:
      found.add(current)
      stack += map(_node_name, nodes[current].input)
  return found


def _separate_variables(
    graph_def: tf.compat.v1.GraphDef, initialize_op: str
) -> None:
  """Gives every call its own variables and initialises them before use.

  TFF runs `initialize_op` in a session before the rest of the graph. Inside one
  function there is no such order, so every node that uses a variable is made to
  wait for `initialize_op`. Variables get an anonymous handle, because clients
  would share a named one.

  Args:
    graph_def: The graph, which is changed in place.
    initialize_op: The name of the node that initialises all variables; empty if
      there are none.
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


def fingerprint(compiled: tff.framework.CompiledComputation) -> bytes:
  """Computes a hash that is the same for computations that are equal."""
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
  """Counts the nodes of a computation's graph and of the graph's functions."""
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
  """Converts a graph to a TensorFlow function from `feeds` to `fetches`.

  The function's arguments replace the graph's placeholders, and control inputs
  from placeholders too. (`WrappedFunction.prune` does the same but copies the
  graph op by op, which is slow.) Nodes that no output needs are left out: TFF's
  session does not run them either.

  Args:
    graph_def: The graph, which is changed in place.
    feeds: The names of the input tensors.
    fetches: The names of the output tensors.

  Returns:
    A function of as many tensors as there are `feeds`.
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

  def imported(*arguments: tf.Tensor) -> list[tf.Tensor]:
    given = dict(zip(feeds, arguments, strict=True))
    waits = {f'^{_node_name(name)}': given[name] for name in feeds}
    return tf.graph_util.import_graph_def(
        graph_def, input_map=given | waits, return_elements=fetches, name=''
    )

  return tf.compat.v1.wrap_function(imported, signature)


def import_graph(
    compiled: tff.framework.CompiledComputation,
) -> Callable[[Value], Value]:
  """Converts a computation to a Python function.

  Args:
    compiled: A TensorFlow computation.

  Returns:
    A function of one TFF value, or of nothing if `compiled` takes no argument.
    It is to be called inside a `tf.function`.

  Raises:
    NotImplementedError: If `compiled` is not a TensorFlow computation, but
      for example one in JAX.
  """
  kind = compiled.proto.WhichOneof('computation')
  if kind != 'tensorflow':
    raise NotImplementedError(
        f'The in-process runtime runs TensorFlow computations, not {kind}.'
    )
  proto = compiled.proto.tensorflow
  graph_def = tf.compat.v1.GraphDef()
  proto.graph_def.Unpack(graph_def)
  _separate_variables(graph_def, proto.initialize_op)
  feeds = []
  if proto.HasField('parameter'):
    feeds = _tensor_names(proto.parameter)
  token = proto.session_token_tensor_name
  if token:
    feeds.append(token)
  imported = _as_function(graph_def, feeds, _tensor_names(proto.result))
  result_type = compiled.type_signature.result

  def call(argument: Value = None) -> Value:
    arguments = [] if argument is None else structures.leaves(argument)
    if token:
      arguments.append(tf.constant(''))
    return structures.pack(result_type, imported(*arguments))

  return call
