"""Finds the operations of a function that cannot run on a GPU.

TensorFlow's registry of kernels says it, on a machine without a GPU too. An
operation without a kernel for GPUs runs on the host, and what it takes from
operations on the GPU, or gives to them, is copied: a transfer. Kernels for GPUs
also have arguments and results in the host's memory, such as shapes.
"""

import collections
from collections.abc import Iterator
import functools
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

HOST, DEVICE = 'host', 'device'
_CALLS = frozenset(['PartitionedCall', 'StatefulPartitionedCall'])
_LOOPS = frozenset(['StatelessWhile', 'While'])
_BRANCHES = frozenset(['Case', 'If', 'StatelessCase', 'StatelessIf'])
# Types whose tensors are in the host's memory when they enter a function, a
# loop or a branch.
_HOST_TYPES = frozenset([
    tf.int32.as_datatype_enum, tf.string.as_datatype_enum,
    tf.resource.as_datatype_enum,
])


class Placement(NamedTuple):
  """Where an operation runs, and where its arguments and results are."""

  is_host_only: bool
  inputs: list[str]
  outputs: list[str]


class Findings(NamedTuple):
  """What was found in a function.

  Attributes:
    num_nodes: How many operations were looked at.
    host_only: How many operations have no kernel for GPUs, by name and types.
    once: Transfers of such operations outside of loops.
    in_loops: The same in one iteration of each loop.
  """

  num_nodes: int
  host_only: collections.Counter
  once: int
  in_loops: int


def _types(node, name):
  """The types in an attribute of a node: of one tensor, or of a list."""
  value = node.attr[name]
  return tuple(value.list.type) or (value.type,)


@functools.cache
def _kernels(op):
  return [
      kernel
      for kernel in kernels.get_registered_kernels_for_op(op).kernel
      if kernel.device_type in ('GPU', 'DEFAULT') and not kernel.label
  ]


def _gpu_kernel(node):
  """A kernel for the node's types, or `None`."""
  for kernel in _kernels(node.op):
    if all(
        set(_types(node, c.name)) <= set(c.allowed_values.list.type)
        for c in kernel.constraint
    ):
      return kernel
  return None


def describe(node) -> str:
  """The name of an operation with its types: 'Split int32'."""
  attributes = op_def_registry.get(node.op).attr
  names = [
      tf.dtypes.as_dtype(one).name
      for attribute in attributes
      if attribute.type in ('type', 'list(type)')
      for one in _types(node, attribute.name)
      if one
  ]
  return ' '.join([node.op, *names])


def _tensors(node, arguments) -> Iterator[str]:
  """The name of each tensor's argument: lists count as often as they hold."""
  for argument in arguments:
    if argument.number_attr:
      count = node.attr[argument.number_attr].i
    elif argument.type_list_attr:
      count = len(node.attr[argument.type_list_attr].list.type)
    else:
      count = 1
    yield from [argument.name] * count


_placements: dict[tuple, Placement] = {}


def _place(node) -> Placement:
  """The placement of a node, found once for equal ones."""
  op_def = op_def_registry.get(node.op)
  key = node.op, *(
      (node.attr[a.name].i, *_types(node, a.name))
      for a in op_def.attr
      if a.type in ('type', 'list(type)', 'int')
  )
  if key not in _placements:
    kernel = _gpu_kernel(node)
    in_host = {a.name for a in [*op_def.input_arg, *op_def.output_arg]}
    if kernel is not None:
      in_host = set(kernel.host_memory_arg)
    _placements[key] = Placement(
        kernel is None,
        *(
            [HOST if name in in_host else DEVICE for name in names]
            for names in (
                _tensors(node, op_def.input_arg),
                _tensors(node, op_def.output_arg),
            )
        ),
    )
  return _placements[key]


class _Tensor(NamedTuple):
  """A tensor: where it is, and whether an operation on the host made it."""

  place: str
  is_from_host_only: bool = False
  # One tensor is copied once, however many operations need it.
  identity: object = None


def _default_place(datatype: int) -> str:
  return HOST if datatype in _HOST_TYPES else DEVICE


class _Search:
  """Walks through a graph and the functions that it calls."""

  def __init__(self, graph_def):
    self._functions = {f.signature.name: f for f in graph_def.library.function}
    self._num_nodes = 0
    self._host_only = collections.Counter()
    self._transfers: dict[bool, int] = {True: 0, False: 0}

  def run(self, graph_def) -> Findings:
    self._walk(graph_def.node, {}, is_in_loop=False)
    return Findings(
        self._num_nodes,
        self._host_only,
        self._transfers[False],
        self._transfers[True],
    )

  def _call(self, name, arguments, is_in_loop) -> list[_Tensor]:
    """The results of a function in the library."""
    function = self._functions[name]
    signature = function.signature
    tensors = dict(
        zip((a.name for a in signature.input_arg), arguments, strict=True)
    )
    tensors = self._walk(function.node_def, tensors, is_in_loop)
    return [tensors[function.ret[a.name]] for a in signature.output_arg]

  def _walk(self, nodes, tensors, is_in_loop) -> dict[str, _Tensor]:
    """The tensors of a graph by name; `tensors` has its arguments."""
    tensors = dict(tensors)
    copied = set()

    def move(tensor, place, is_host_only=False):
      if tensor.place != place and (is_host_only or tensor.is_from_host_only):
        copied.add((tensor.identity, place))
      return _Tensor(place, identity=('moved', place, tensor.identity))

    for node in _in_order(nodes):
      inputs = [tensors[name] for name in node.input if name[0] != '^']
      place = _place(node)
      self._num_nodes += 1
      if place.is_host_only:
        self._host_only[describe(node)] += 1
      if node.op in _CALLS:
        results = self._call(node.attr['f'].func.name, inputs, is_in_loop)
      elif node.op in _LOOPS:
        # A variable of a loop stays in one place.
        places = list(map(_default_place, node.attr['T'].list.type))
        results = list(map(move, inputs, places))
        self._call(node.attr['cond'].func.name, results, True)
        ends = self._call(node.attr['body'].func.name, results, True)
        self._transfers[True] += sum(
            end.is_from_host_only and end.place != place
            for end, place in zip(ends, places, strict=True)
        )
      elif node.op in _BRANCHES:
        places = map(_default_place, node.attr['Tin'].list.type)
        inputs = list(map(move, inputs[1:], places))
        for name in _function_names(node):
          results = self._call(name, inputs, is_in_loop)
      else:
        # Functions of other operations are those of datasets: on the host.
        for tensor, wanted in zip(inputs, place.inputs, strict=True):
          move(tensor, wanted, place.is_host_only)
        results = [
            _Tensor(where, place.is_host_only, (node.name, k))
            for k, where in enumerate(place.outputs)
        ]
        if node.op == 'Placeholder':
          where = _default_place(node.attr['dtype'].type)
          results = [results[0]._replace(place=where)]
      tensors.update(_named(node, results))
    self._transfers[is_in_loop] += len(copied)
    return tensors


def _function_names(node) -> list[str]:
  if node.op.endswith('Case'):
    return [function.name for function in node.attr['branches'].list.func]
  return [node.attr[k].func.name for k in ('then_branch', 'else_branch')]


def _named(node, results) -> Iterator[tuple[str, _Tensor]]:
  """Results with the names by which graphs and functions refer to them."""
  yield node.name, results[0] if results else None
  counts = collections.Counter()
  names = _tensors(node, op_def_registry.get(node.op).output_arg)
  for k, (name, result) in enumerate(zip(names, results, strict=True)):
    yield f'{node.name}:{k}', result
    yield f'{node.name}:{name}:{counts[name]}', result
    counts[name] += 1


def _in_order(nodes) -> Iterator:
  """Nodes after those whose results they take."""
  waiting = {node.name: node for node in nodes}
  for first in list(waiting.values()):
    stack = [first]
    while stack:
      node = stack[-1]
      if node.name not in waiting:
        stack.pop()
        continue
      before = [
          waiting[name]
          for name in (i.lstrip('^').partition(':')[0] for i in node.input)
          if name in waiting
      ]
      if before:
        stack += before
      else:
        yield waiting.pop(stack.pop().name)


def search(function: tf.types.experimental.ConcreteFunction) -> Findings:
  """Searches a function, and those that it calls."""
  graph_def = function.graph.as_graph_def()
  return _Search(graph_def).run(graph_def)
