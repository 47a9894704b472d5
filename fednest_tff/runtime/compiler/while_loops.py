"""Vectorises loops: one loop over all clients in place of one for each.

TensorFlow does it, too, but it does not know beforehand which variables of a
loop differ between clients. It converts the loop's body, marks the variables
that turned out to differ, and begins again: three times for each loop, so nine
times for a loop in a loop. It also prepares for clients whose loops end at
different times, although here they mostly have the same number of steps.

Here the variables that differ are found by following the tensors through the
body. Then the body is converted once. If all clients stop together, the result
is a plain loop. TensorFlow's own conversion does the rest.
"""

from collections.abc import Sequence
import importlib

import tensorflow as tf

from fednest_tff.structures import Value

# An import statement would find the function `pfor`, not the module.
pfor = importlib.import_module('tensorflow.python.ops.parallel_for.pfor')

_LOOPS = frozenset(['StatelessWhile', 'While'])
_CALLS = frozenset(['PartitionedCall', 'StatefulPartitionedCall'])
# Operations with the same result for all clients, since shapes are equal.
_SAME = frozenset(['Rank', 'Shape', 'ShapeN', 'Size', 'ZerosLike'])


class _WrongGuessError(Exception):
  """A result differs between clients although it was not expected to."""


def _function(operation: tf.Operation, attribute: str) -> Value:
  """The function that an attribute of an operation names."""
  name = operation.get_attr(attribute).name
  return operation.graph._get_function(tf.compat.as_bytes(name))


def _outputs(function: Value) -> list[tf.Tensor]:
  """The tensors that a function returns."""
  return function.graph.outputs[: len(function.function_type.flat_outputs)]


def _follow(function: Value, differ: Sequence[bool]) -> list[bool]:
  """Tells which results of a function differ between clients.

  Args:
    function: The function.
    differ: Which of its arguments do.
  """
  marked = {
      id(tensor)
      for tensor, does in zip(function.graph.inputs, differ, strict=True)
      if does
  }
  # Operations are in the order in which they were created.
  for operation in function.graph.get_operations():
    inputs = [id(tensor) in marked for tensor in operation.inputs]
    if not any(inputs) or operation.type in _SAME:
      continue
    results = [True] * len(operation.outputs)
    if operation.type in _LOOPS:
      results = _follow_loop(_function(operation, 'body'), inputs)
    elif operation.type in _CALLS:
      results = _follow(_function(operation, 'f'), inputs)
    for tensor, does in zip(operation.outputs, results, strict=True):
      if does:
        marked.add(id(tensor))
  return [id(tensor) in marked for tensor in _outputs(function)]


def _follow_loop(body: Value, differ: Sequence[bool]) -> list[bool]:
  """Tells which variables of a loop differ, given those that do at first."""
  found = list(differ)
  while True:
    after = _follow(body, found)
    joined = [a or b for a, b in zip(found, after, strict=True)]
    if joined == found:
      return found
    found = joined


def _convert_function(
    outer: Value, function: Value, arguments: Sequence[Value]
) -> list[Value]:
  """Writes a function, vectorised, into the current graph.

  Args:
    outer: The conversion that the function is part of.
    function: The function.
    arguments: Its arguments, wrapped.

  Returns:
    Its results, wrapped.
  """
  conversion = pfor.PFor(
      loop_var=outer.loop_var,
      loop_len=outer.loop_len_vector[0],
      pfor_ops=function.graph.get_operations(),
      fallback_to_while_loop=outer.fallback_to_while_loop,
      all_indices=outer.all_indices,
      all_indices_partitioned=outer.all_indices_partitioned,
      pfor_config=outer.pfor_config,
  )
  for tensor, argument in zip(function.graph.inputs, arguments, strict=True):
    conversion._add_conversion(tensor, argument)
  return [conversion._convert_helper(t) for t in _outputs(function)]


def _convert_together(
    pfor_input: Value, cond: Value, body: Value
) -> list[Value]:
  """Converts a loop that ends for all clients at the same time."""
  outer = pfor_input.pfor
  stacked = [argument.is_stacked for argument in pfor_input.inputs]

  def wrapped(variables: Sequence[tf.Tensor]) -> list[Value]:
    return list(map(pfor.wrap, variables, stacked))

  def is_going_on(*variables: tf.Tensor) -> tf.Tensor:
    (result,) = _convert_function(outer, cond, wrapped(variables))
    if result.is_stacked:
      raise _WrongGuessError
    return result.t

  def step(*variables: tf.Tensor) -> list[tf.Tensor]:
    results = []
    for result, differs, shape in zip(
        _convert_function(outer, body, wrapped(variables)),
        stacked,
        shapes,
        strict=True,
    ):
      if result.is_stacked and not differs:
        raise _WrongGuessError
      if differs and not result.is_stacked:
        result = pfor._stack(result.t, outer.loop_len_vector)
      result.t.set_shape(shape)
      results.append(result.t)
    return results

  shapes = pfor.WhileV2(pfor_input)._output_shapes()
  results = tf.while_loop(
      is_going_on,
      step,
      [argument.t for argument in pfor_input.inputs],
      shape_invariants=shapes,
      parallel_iterations=pfor_input.get_attr('parallel_iterations'),
  )
  return wrapped(results)


def convert_while(pfor_input: Value) -> list[Value]:
  """Converts a loop.

  Args:
    pfor_input: The operation and its converted arguments, as TensorFlow gives
      them to a converter.

  Returns:
    The loop's converted results.
  """
  cond = _function(pfor_input.op, 'cond')
  body = _function(pfor_input.op, 'body')
  differ = _follow_loop(body, [a.is_stacked for a in pfor_input.inputs])
  pfor_input.stack_inputs(
      stack_indices=[
          k for k, argument in enumerate(pfor_input.inputs)
          if differ[k] and not argument.is_stacked
      ],
      tile_variants=True,
  )
  if not any(_follow(cond, differ)):
    try:
      return _convert_together(pfor_input, cond, body)
    except _WrongGuessError:
      pass
  return pfor.WhileV2(pfor_input)()
