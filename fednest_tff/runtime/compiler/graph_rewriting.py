"""Simplifies TensorFlow graphs, and takes the functions out of them.

Both prepare a graph for being imported (`graphs.py`). Both need modules of
TensorFlow that are not public: there is no other way to either.
"""

from collections.abc import Iterable, Iterator
import itertools
from typing import TypeAlias

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import function_def_to_graph, op_def_registry
from tensorflow.python.grappler import tf_optimizer
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import converters
from fednest_tff.structures import Value

# A function that graphs can call.
Function: TypeAlias = atomic_function.AtomicFunction

# Numbers that make the names of imported functions unique in this process.
_function_numbers = itertools.count()
# What TensorFlow does to a graph before it is copied for each client.
_SIMPLIFICATIONS = (
    'function',  # Writes functions out where they are called.
    'constfold',
    'common_subgraph_elimination',
    'dependency',
    'pruning',
)
# Has TensorFlow write out a loop before it runs a graph, which is faster.
_LOWER = '_lower_using_switch_merge'
_LOOPS_AND_BRANCHES = frozenset([
    'Case', 'If', 'StatelessCase', 'StatelessIf', 'StatelessWhile', 'While'
])


# Stateful by their declaration, but only because they must not be dropped.
_CHECKS = frozenset(['Assert', 'CheckNumerics', 'CheckNumericsV2'])

# Stateful by their declaration, so that TensorFlow does not run them while it
# simplifies a graph.
_DATASET_OPERATIONS = frozenset([
    'DatasetToSingleElement', 'RangeDataset', 'ReduceDataset', 'TensorDataset',
    'TensorSliceDataset',
])

# Not stateful by their declaration; but files may change.
READING_FILES = frozenset(['MatchingFiles', 'ReadFile'])

# Stateful, but with a state that begins and ends with one run of the graph
# (variables and iterators are made anew for each), or with none of their own.
_STATE_OF_ONE_RUN = _CHECKS | _DATASET_OPERATIONS | frozenset([
    'AnonymousIteratorV2', 'AnonymousIteratorV3', 'AssignAddVariableOp',
    'AssignSubVariableOp', 'AssignVariableOp', 'Case', 'DeleteIterator', 'If',
    'IteratorGetNext', 'MakeIterator', 'NoOp', 'ReadVariableOp',
    'StatefulPartitionedCall', 'VarHandleOp', 'VarIsInitializedOp', 'While',
])


def node_name(name: str) -> str:
  """Returns the node that a tensor or a control input belongs to."""
  return name.lstrip('^').split(':')[0]


def _all_nodes(
    graph_def: tf.compat.v1.GraphDef,
) -> Iterator[tf.compat.v1.NodeDef]:
  """Iterates over the nodes of a graph and of its functions."""
  yield from graph_def.node
  for function in graph_def.library.function:
    yield from function.node_def


def simplify(
    graph_def: tf.compat.v1.GraphDef, fetches: list[str]
) -> tf.compat.v1.GraphDef:
  """Simplifies a graph, and writes out the functions that it calls.

  A graph is copied for each client or converted op by op, which takes time for
  every node. Products with second derivatives lose more than half of their
  nodes here.

  Args:
    graph_def: The graph.
    fetches: The names of the output tensors.

  Returns:
    A graph with the same outputs. Loops and branches stay functions. It is
    `graph_def` itself if TensorFlow cannot simplify it.
  """
  meta_graph = meta_graph_pb2.MetaGraphDef()
  meta_graph.graph_def.CopyFrom(graph_def)
  for node in _all_nodes(meta_graph.graph_def):
    if _LOWER in node.attr:
      del node.attr[_LOWER]
  wanted = list(dict.fromkeys(fetches))
  meta_graph.collection_def['train_op'].node_list.value.extend(wanted)
  config = config_pb2.ConfigProto()
  options = config.graph_options.rewrite_options
  options.min_graph_nodes = -1
  options.meta_optimizer_iterations = options.ONE
  options.optimizers.extend(_SIMPLIFICATIONS)
  try:
    simplified = tf_optimizer.OptimizeGraph(config, meta_graph)
  except ValueError:  # Some graphs of Keras layers cannot be read.
    return graph_def
  for node in _all_nodes(simplified):
    if node.op in _LOOPS_AND_BRANCHES:
      node.attr[_LOWER].b = True
  return simplified


def _function_references(
    nodes: Iterable[tf.compat.v1.NodeDef],
) -> Iterator[Value]:
  """Iterates over the attributes by which nodes refer to functions."""
  for node in nodes:
    for attribute in node.attr.values():
      if attribute.HasField('func'):
        yield attribute.func
      yield from attribute.list.func


def take_functions(
    graph_def: tf.compat.v1.GraphDef,
) -> list[Function]:
  """Takes the functions out of a graph, and makes Python objects of them.

  `tf.vectorized_map` converts a loop by its Python functions, and does not know
  those that come with a graph.

  Args:
    graph_def: The graph, which is changed in place: its nodes refer to the new
      names of the functions.

  Returns:
    The functions, each after those that it calls. A graph into which
    `graph_def` is imported must have them (`add_functions`).
  """
  definitions = {f.signature.name: f for f in graph_def.library.function}
  loaded: dict[str, Function] = {}

  def load_all(nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
    for reference in _function_references(nodes):
      if reference.name in definitions:
        if reference.name not in loaded:
          load(reference.name)
        reference.name = tf.compat.as_str(loaded[reference.name].name)

  def load(name: str) -> None:
    definition = type(definitions[name])()
    definition.CopyFrom(definitions[name])
    load_all(definition.node_def)
    with tf.Graph().as_default() as outside:
      add_functions(outside, loaded.values())
      graph = function_def_to_graph.function_def_to_graph(definition)
    add_functions(graph, loaded.values())
    converters.attach(graph.get_operations())
    loaded[name] = atomic_function.from_func_graph(
        f'{name}_imported_{next(_function_numbers)}', graph, {}
    )

  load_all(graph_def.node)
  graph_def.library.Clear()
  return list(loaded.values())


def add_functions(
    graph: tf.Graph, functions: Iterable[Function]
) -> None:
  """Lets the nodes of `graph` refer to `functions`."""
  for function in functions:
    if not graph._is_function(function.name):
      graph._add_function(function)


def _is_stateful(op: str) -> bool:
  if op in _CHECKS or op.startswith('Stateless') or op == 'Placeholder':
    return False
  definition = op_def_registry.get(op)
  return definition is None or definition.is_stateful


def _has_resources(node: tf.compat.v1.NodeDef) -> bool:
  kinds = (tf.variant.as_datatype_enum, tf.resource.as_datatype_enum)
  return node.op == 'Placeholder' and node.attr['dtype'].type in kinds


def _graph_def(
    compiled: tff.framework.CompiledComputation,
) -> tf.compat.v1.GraphDef | None:
  """Returns the graph of a computation that has one and no variables."""
  proto = compiled.proto
  if proto.WhichOneof('computation') != 'tensorflow':
    return None
  if proto.tensorflow.initialize_op:
    return None
  graph_def = tf.compat.v1.GraphDef()
  proto.tensorflow.graph_def.Unpack(graph_def)
  return graph_def


def is_stateless(compiled: tff.framework.CompiledComputation) -> bool:
  """Tells whether a computation only computes tensors from tensors.

  Such a computation has no datasets, variables, tables or other resources, so
  it can be done for all clients at once.
  """
  graph_def = _graph_def(compiled)
  return graph_def is not None and not any(
      _is_stateful(node.op) or _has_resources(node)
      for node in _all_nodes(graph_def)
  )


def reads_datasets(compiled: tff.framework.CompiledComputation) -> bool:
  """Tells whether a computation takes datasets and returns tensors only."""
  signature = compiled.type_signature

  def has_sequences(value_type: tff.Type) -> bool:
    return any(
        isinstance(leaf, tff.SequenceType)
        for leaf in structures.leaves(value_type)
    )

  return has_sequences(signature.parameter) and not has_sequences(
      signature.result
  )


def is_repeatable(graph_def: tf.compat.v1.GraphDef) -> bool:
  """Tells whether runs of a graph do not depend on each other or their order.

  A graph that draws random numbers from a seed of its own is not: the second
  run draws other numbers than the first.

  Args:
    graph_def: The graph, in which each run has its own variables.
  """
  return not any(
      _is_stateful(node.op) and node.op not in _STATE_OF_ONE_RUN
      for node in _all_nodes(graph_def)
  )


def is_random_dataset(name: str) -> bool:
  """Tells whether a dataset orders or draws its elements at random.

  TensorFlow does not declare all such operations stateful.

  Args:
    name: The name of its operation or of its class.
  """
  return 'Dataset' in name and any(
      word in name for word in ('Random', 'Sampling', 'Shuffle')
  )


def only_reads_datasets(compiled: tff.framework.CompiledComputation) -> bool:
  """Tells whether a computation has the same result for the same data."""
  graph_def = _graph_def(compiled)
  return graph_def is not None and not any(
      is_random_dataset(node.op)
      or node.op in READING_FILES
      or _is_stateful(node.op) and node.op not in _DATASET_OPERATIONS
      for node in _all_nodes(graph_def)
  )
