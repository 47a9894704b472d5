"""Converts `tff.tensorflow.computation`s to Python functions.

TFF stores such a computation as a graph with named inputs and outputs. The
graph is imported once and can then be called any number of times inside a
`tf.function`, for many clients at the same time.

The functions take and return TFF values: a tensor, the variant tensor of a
dataset, or a `tff.structure.Struct` of them.
"""

from collections.abc import Callable, Hashable, Sequence
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import (
    converters,
    fingerprints,
    graph_rewriting,
)
from fednest_tff.runtime.compiler.graph_rewriting import node_name
from fednest_tff.structures import Value

# How many functions an `Importer` keeps; an epoch of FedNest has about 20.
_MAX_FUNCTIONS = 1024
# By this name TensorFlow knows a resource that each execution creates anew.
_ANONYMOUS = b'cd2c89b7-88b7-44c8-ad83-06c2a9158347'
# A function of tensors.
_Tensors = Callable[..., list[tf.Tensor]]
# Operations that make a table, and those that make a new one in each execution.
_TABLES = {
    'HashTableV2': 'AnonymousHashTable',
    'MutableDenseHashTableV2': 'AnonymousMutableDenseHashTable',
    'MutableHashTableV2': 'AnonymousMutableHashTable',
    'MutableHashTableOfTensorsV2': 'AnonymousMutableHashTableOfTensors',
}


def _tensor_names(binding: Value) -> list[str]:
  """Lists the tensors of a TFF binding (a protocol buffer), in order."""

  def children(inner: Value) -> Value:
    is_leaf = inner.WhichOneof('binding') in ('tensor', 'sequence')
    return None if is_leaf else inner.struct.element

  return [
      leaf.tensor.tensor_name or leaf.sequence.variant_tensor_name
      for leaf in structures.iterate_leaves(binding, children)
  ]


def _ancestors(graph_def: tf.compat.v1.GraphDef, names: list[str]) -> set[str]:
  """Finds the nodes that `names` depend on, including `names`."""
  nodes = {node.name: node for node in graph_def.node}
  found: set[str] = set()
  stack = list(names)
  while stack:
    current = stack.pop()
    if current not in found:
      found.add(current)
      stack += map(node_name, nodes[current].input)
  return found


def _separate_variables(
    graph_def: tf.compat.v1.GraphDef, initialize_op: str
) -> None:
  """Gives every call its own variables and tables, initialised before use.

  TFF runs `initialize_op` in a session before the rest of the graph. Inside one
  function there is no such order, so every node that uses a variable or a table
  is made to wait for `initialize_op`. Variables and tables get an anonymous
  handle, because clients would share a named one.

  Args:
    graph_def: The graph, which is changed in place.
    initialize_op: The name of the node that initialises all variables and
      tables; empty if there are none.
  """
  handles = set()
  for node in graph_def.node:
    if node.op == 'VarHandleOp':
      node.attr['shared_name'].s = _ANONYMOUS
      handles.add(node.name)
    elif node.op in _TABLES:
      node.op = _TABLES[node.op]
      for name in ('container', 'shared_name', 'use_node_name_sharing'):
        node.attr.pop(name, None)
      handles.add(node.name)
  if not initialize_op:
    return
  initializers = _ancestors(graph_def, [initialize_op])
  for node in graph_def.node:
    sources = {source.split(':')[0] for source in node.input}
    if node.name not in initializers and sources & handles:
      node.input.append(f'^{initialize_op}')


def _drop_colocations(
    nodes: list[tf.compat.v1.NodeDef], names: set[str]
) -> None:
  """Removes requests to share the device of a node that is not in `names`."""
  possible = {f'loc:@{name}'.encode() for name in names}
  for node in nodes:
    if '_class' in node.attr:
      wishes = node.attr['_class'].list.s
      wishes[:] = [wish for wish in wishes if wish in possible]


def _as_functions(
    graph_def: tf.compat.v1.GraphDef,
    feeds: list[str],
    fetches: list[str],
    is_rewritten: bool,
) -> tuple[_Tensors, tf.types.experimental.ConcreteFunction]:
  """Converts a graph to functions from `feeds` to `fetches`.

  A function's arguments replace the graph's placeholders, control inputs from
  placeholders too. Colocations with nodes that go are dropped.
  (`WrappedFunction.prune` does the same but copies the graph op by op, which is
  slow.) Nodes that no output needs are left out: TFF's session does not run
  them either.

  Args:
    graph_def: The graph, which is changed in place.
    feeds: The names of the input tensors.
    fetches: The names of the output tensors.
    is_rewritten: Whether to simplify the graph, and to prepare it for being
      vectorised. It must only compute tensors from tensors.

  Returns:
    Two functions of as many tensors as there are `feeds`. The first writes the
    graph's nodes into the current graph. The second is a TensorFlow function.
  """
  needed = _ancestors(graph_def, [node_name(name) for name in feeds + fetches])
  kept = [node for node in graph_def.node if node.name in needed]
  placeholders = {node.name: node.attr for node in kept}
  signature = []
  for name in feeds:
    attributes = placeholders[node_name(name)]
    signature.append(
        tf.TensorSpec(attributes['shape'].shape, attributes['dtype'].type)
    )
  _drop_colocations(kept, needed - set(map(node_name, feeds)))
  del graph_def.node[:]
  graph_def.node.extend(kept)
  functions = []
  if is_rewritten:
    graph_def = graph_rewriting.simplify(graph_def, fetches)
    functions = graph_rewriting.take_functions(graph_def)

  def imported(*arguments: tf.Tensor) -> list[tf.Tensor]:
    graph = tf.compat.v1.get_default_graph()
    graph_rewriting.add_functions(graph, functions)
    given = dict(zip(feeds, arguments, strict=True))
    waits = {f'^{node_name(name)}': given[name] for name in feeds}
    num_operations = len(graph.get_operations())
    # In a scope of their own: nodes of simplified graphs have the names that
    # TensorFlow gives when it writes out a function, and would be mixed up.
    results = tf.graph_util.import_graph_def(
        graph_def,
        input_map=given | waits,
        return_elements=fetches,
        name='imported',
    )
    converters.attach(graph.get_operations()[num_operations:])
    return results

  return imported, tf.compat.v1.wrap_function(imported, signature)


class ImportedGraph:
  """A computation as a Python function of one TFF value.

  It is to be called inside a `tf.function`. If the computation has no argument,
  it takes `None`.

  Attributes:
    is_repeatable: Whether calls may run in any order, and side by side.
    vectorised: Functions of many clients that were made of this one, kept here
      by cohorts (`batched.py`), so that a later cohort need not make them.
  """

  def __init__(
      self,
      compiled: tff.framework.CompiledComputation,
      is_simplified: bool = True,
  ):
    """Imports a computation.

    Args:
      compiled: A TensorFlow computation.
      is_simplified: Whether to simplify it, if it is stateless: that takes some
        time, and pays if the graph is to be compiled.

    Raises:
      NotImplementedError: If `compiled` is not a TensorFlow computation, but
        for example one in JAX.
    """
    kind = compiled.proto.WhichOneof('computation')
    if kind != 'tensorflow':
      raise NotImplementedError(
          f'The in-process runtime runs TensorFlow computations, not {kind}.'
      )
    self.vectorised: dict[Hashable, Callable[..., list[tf.Tensor]]] = {}
    proto = compiled.proto.tensorflow
    graph_def = tf.compat.v1.GraphDef()
    proto.graph_def.Unpack(graph_def)
    _separate_variables(graph_def, proto.initialize_op)
    feeds = []
    if proto.HasField('parameter'):
      feeds = _tensor_names(proto.parameter)
    self.is_repeatable = graph_rewriting.is_repeatable(graph_def)
    self._tokens = []
    if proto.session_token_tensor_name:
      feeds.append(proto.session_token_tensor_name)
      self._tokens = ['']
    self._result_type = compiled.type_signature.result
    fetches = _tensor_names(proto.result)
    self._sources = [
        _ancestors(graph_def, [node_name(fetch)]) for fetch in fetches
    ]
    self._feeds = list(map(node_name, feeds))
    self._is_stateful = not graph_rewriting.is_stateless(compiled)
    self._write_nodes, self._function = _as_functions(
        graph_def, feeds, fetches, is_simplified and not self._is_stateful
    )

  def _arguments(self, argument: Value) -> list[tf.Tensor]:
    leaves = [] if argument is None else structures.leaves(argument)
    return leaves + [tf.constant(token) for token in self._tokens]

  def __call__(self, argument: Value = None) -> Value:
    """Calls the computation as a TensorFlow function."""
    arguments = self._arguments(argument)
    waits = self._is_stateful and not tf.executing_eagerly()
    if self.is_repeatable and waits:
      results = self._call_in_any_order(arguments)
    else:
      results = self._function(*arguments)
    return structures.pack(self._result_type, results)

  def _call_in_any_order(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
    """Writes a call into the current graph that waits for no other call.

    TensorFlow lets a function with variables or datasets wait for all such
    functions that were called before.
    """
    function = self._function
    function.add_to_graph(tf.compat.v1.get_default_graph())
    results = tf.raw_ops.PartitionedCall(
        args=[*arguments, *function.captured_inputs],
        Tout=[output.dtype for output in function.outputs],
        f=function,
    )
    for result, output in zip(results, function.outputs, strict=True):
      result.set_shape(output.shape)
    return results

  def depend(self, chosen: Sequence[bool]) -> list[bool]:
    """Tells for each leaf of the result whether it depends on certain leaves.

    Args:
      chosen: For each leaf of the argument, whether it is one of them.
    """
    names = {
        feed for feed, is_chosen in zip(self._feeds, chosen, strict=False)
        if is_chosen
    }
    return [bool(names & sources) for sources in self._sources]

  def write_nodes(self, argument: Value = None) -> Value:
    """Writes the computation into the current graph, not as a function.

    `tf.vectorized_map` is faster in converting nodes than functions.
    """
    results = self._write_nodes(*self._arguments(argument))
    return structures.pack(self._result_type, results)


class Importer:
  """Imports graphs. Equal ones share a function, while it is kept."""

  def __init__(self, is_simplified: bool = True) -> None:
    """Creates an importer; see `ImportedGraph`."""
    self._is_simplified = is_simplified
    self._functions: dict[bytes, ImportedGraph] = {}
    # From the id of a computation that is still there to a reference that
    # removes the entry when it goes, and to its function.
    self._known: dict[
        int,
        tuple[
            weakref.ref[tff.framework.CompiledComputation], ImportedGraph
        ],
    ] = {}

  def clear(self) -> None:
    """Forgets all functions."""
    self._functions.clear()
    self._known.clear()

  def __call__(
      self, compiled: tff.framework.CompiledComputation
  ) -> ImportedGraph:
    """Converts a computation to a Python function."""
    found = self._known.get(id(compiled))
    if found is not None:
      return found[1]
    if len(self._functions) >= _MAX_FUNCTIONS:
      self.clear()
    key = fingerprints.fingerprint(compiled)
    if key not in self._functions:
      self._functions[key] = ImportedGraph(compiled, self._is_simplified)
    known, entry = self._known, id(compiled)
    reference = weakref.ref(compiled, lambda _: known.pop(entry, None))
    known[entry] = reference, self._functions[key]
    return self._functions[key]
