"""Computes before a loop what is the same in all of its iterations.

Rounds that follow each other have much in common: all products with a Hessian,
for example, need the same derivatives at the same point. TensorFlow computes
what is equal only once if the rounds are written out, but in each iteration if
they are a loop.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import tensorflow as tf

from fednest_tff.runtime.compiler import graph_rewriting
from fednest_tff.runtime.compiler.graph_rewriting import node_name

# A function of tensors.
_Function = Callable[..., list[tf.Tensor]]


class _Graph(NamedTuple):
  """A function as a graph without calls of functions.

  Attributes:
    graph_def: The graph.
    functions: The functions of its loops and branches.
    arguments: The names of its arguments.
    captured: From the names of further inputs to the tensors that they are.
    results: The names of its results.
  """

  graph_def: tf.compat.v1.GraphDef
  functions: list[graph_rewriting.Function]
  arguments: list[str]
  captured: dict[str, tf.Tensor]
  results: list[str]


def _trace(function: _Function, specs: list[tf.TensorSpec]) -> _Graph:
  """Traces and simplifies a function."""
  traced = tf.function(
      lambda *tensors: list(map(tf.identity, function(*tensors))),
      input_signature=specs,
      autograph=False,
  ).get_concrete_function()
  graph = traced.graph
  captured = {inner.name: outer for outer, inner in graph.captures}
  results = [tensor.name for tensor in graph.outputs]
  graph_def = graph_rewriting.simplify(graph.as_graph_def(), results)
  functions = graph_rewriting.take_functions(graph_def)
  return _Graph(
      graph_def,
      functions,
      [t.name for t in graph.inputs if t.name not in captured],
      captured,
      results,
  )


def _tensor_name(source: str) -> str:
  """Returns the name of a tensor that is the input of a node."""
  return source if ':' in source else f'{source}:0'


def _dependent(
    graph_def: tf.compat.v1.GraphDef, names: Iterable[str]
) -> set[str]:
  """Finds the nodes `names` and all nodes that depend on them."""
  users: dict[str, list[str]] = {}
  for node in graph_def.node:
    for source in node.input:
      users.setdefault(node_name(source), []).append(node.name)
  found: set[str] = set()
  stack = list(names)
  while stack:
    current = stack.pop()
    if current not in found:
      found.add(current)
      stack += users.get(current, [])
  return found


def _part(
    graph_def: tf.compat.v1.GraphDef, names: set[str]
) -> tf.compat.v1.GraphDef:
  """Copies the nodes `names`, without control inputs from other nodes."""
  part = tf.compat.v1.GraphDef(versions=graph_def.versions)
  for node in graph_def.node:
    if node.name in names:
      copy = part.node.add()
      copy.CopyFrom(node)
      copy.ClearField('input')
      copy.input.extend(
          source for source in node.input
          if not source.startswith('^') or node_name(source) in names
      )
      if '_class' in copy.attr:  # A request to share another node's device.
        del copy.attr['_class']
  return part


def _write(
    graph_def: tf.compat.v1.GraphDef,
    functions: list[graph_rewriting.Function],
    given: dict[str, tf.Tensor],
    results: list[str],
) -> list[tf.Tensor]:
  """Writes nodes into the current graph; returns the tensors of some names."""
  graph = tf.compat.v1.get_default_graph()
  graph_rewriting.add_functions(graph, functions)
  needed = {
      _tensor_name(source) for node in graph_def.node for source in node.input
  }
  written = tf.graph_util.import_graph_def(
      graph_def,
      input_map={
          # By default an input has the name of its tensor, which may begin with
          # the name of a node here. TensorFlow then renames that node, and may
          # give two nodes the same name.
          name: graph.capture(tensor, name='known')
          for name, tensor in given.items() if name in needed
      },
      return_elements=[name for name in results if name not in given],
      name='part',
  )
  remaining = iter(written)
  return [
      given[name] if name in given else next(remaining) for name in results
  ]


def separate(function: _Function, specs: list[tf.TensorSpec]) -> _Function:
  """Computes now what does not depend on a function's arguments.

  Args:
    function: A function of tensors that may also use tensors of the current
      graph. It must not change anything.
    specs: The specs of its arguments.

  Returns:
    A function with the same results that computes only the rest.
  """
  graph = _trace(function, specs)
  nodes = {node.name: node for node in graph.graph_def.node}
  depend = _dependent(graph.graph_def, map(node_name, graph.arguments))
  inputs = {node_name(name) for name in [*graph.arguments, *graph.captured]}
  constants = {
      name for name, node in nodes.items()
      if node.op == 'Const' and name not in depend
  }
  rest = _part(graph.graph_def, (depend | constants) - inputs)
  sources = [
      _tensor_name(source)
      for node in rest.node for source in node.input
      if not source.startswith('^')
  ]
  known = [
      name for name in dict.fromkeys(sources + graph.results)
      if node_name(name) not in depend | constants | inputs
  ]
  before = _part(graph.graph_def, set(nodes) - depend - inputs)
  computed = _write(before, graph.functions, graph.captured, known)
  found = graph.captured | dict(zip(known, computed, strict=True))

  def do_rest(*tensors: tf.Tensor) -> list[tf.Tensor]:
    given = found | dict(zip(graph.arguments, tensors, strict=True))
    return _write(rest, graph.functions, given, graph.results)

  return do_rest
