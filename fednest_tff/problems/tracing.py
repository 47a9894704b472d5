"""Runs a user's function as TFF will: traced into a graph of its own.

A function that works eagerly may fail there. The commonest mistakes have one
line each, which names the argument and the cure.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.vector_space import Structure

_VARIABLE = 'VarHandleOp'
_SIGNS_OF_CAPTURE = (
    'capture an EagerTensor',
    'out of scope',
    # A Keras layer that was built eagerly.
    'Layer or Model is in an invalid state',
)


def _operations(graph: tf.Graph) -> Iterator[str]:
  """The types of its operations, also of those inside functions."""
  definition = graph.as_graph_def()
  for node in definition.node:
    yield node.op
  for function in definition.library.function:
    for node in function.node_def:
      yield node.op


def _refuse_random(name: str, graph: tf.Graph) -> None:
  """Refuses draws that nobody can repeat."""
  for kind in _operations(graph):
    if 'Random' in kind and 'Stateless' not in kind or kind == 'Multinomial':
      raise ValueError(
          f'`{name}` draws random numbers ({kind}): it must be a function of'
          ' its arguments alone. Leave dropout and noise out, or draw with'
          ' tf.random.stateless_* and a fixed seed.'
      )


def _refuse_variables(name: str, graph: tf.Graph) -> None:
  if _VARIABLE in _operations(graph):
    raise ValueError(
        f'`{name}` creates a tf.Variable, as a Keras layer does: weights are'
        ' arguments here. Build the model outside and call it with'
        ' fednest_tff.models.network.'
    )


def _captured(name: str) -> ValueError:
  return ValueError(
      f'`{name}` holds a tf.constant, a tf.Variable or a Keras model that was'
      ' made outside of it, and TFF traces it into another graph. Keep'
      ' constants as NumPy arrays (`.numpy()`), and call Keras models with'
      ' fednest_tff.models.network.'
  )


def explain(name: str, error: Exception) -> ValueError | None:
  """One line for a common mistake; `None` for any other error.

  Args:
    name: The argument that the function came through.
    error: What tracing it raised.

  Returns:
    The error to raise in its place.
  """
  text = str(error)
  if any(sign in text for sign in _SIGNS_OF_CAPTURE):
    return _captured(name)
  if isinstance(error, NotImplementedError) and 'to a numpy array' in text:
    return ValueError(
        f'`{name}` calls NumPy on a tensor: while TFF traces it, tensors have'
        ' no values yet. Use the function of tf of that name.'
    )
  if isinstance(error, AttributeError) and "attribute 'numpy'" in text:
    return ValueError(
        f'`{name}` calls .numpy(): while TFF traces it, tensors have no values'
        ' yet. Use functions of tf.'
    )
  return None


def _call(
    name: str, function: Callable[..., Structure], arguments: Structure
) -> Structure:
  try:
    return function(*arguments)
  except Exception as error:  # Whatever a user's function raises.
    reason = ' '.join(str(error).split())
    raise explain(name, error) or ValueError(
        f'`{name}` fails when it is tried: {type(error).__name__}: {reason}'
    ) from error


def run(
    name: str,
    function: Callable[..., Structure],
    *arguments: Structure,
    check: Callable[[Structure], None] | None = None,
) -> Structure:
  """What `function` returns, in a graph, as NumPy arrays.

  Args:
    name: The argument that the function came through, for messages.
    function: A function of tensors.
    *arguments: Its arguments, eager tensors or arrays.
    check: Looks at the tensors that it returned, before they have values.

  Returns:
    The result.

  Raises:
    ValueError: For the mistakes that this module knows.
  """
  values = tf.nest.map_structure(_value, arguments)
  with tf.Graph().as_default() as graph:
    try:
      found = _call(name, function, vector_space.tensors(values))
      _refuse_variables(name, graph)
      _refuse_random(name, graph)
      try:
        result = tf.nest.map_structure(
            lambda t: t if tf.is_tensor(t) else vector_space.tensors(t), found
        )
      except (TypeError, ValueError) as error:
        raise ValueError(
            f'`{name}` must return tensors; got {found!r}.'
        ) from error
      if check is not None:
        check(result)
      fetches = tf.nest.flatten(result)
      if any(hasattr(tensor, 'numpy') for tensor in fetches):
        raise _captured(name)
      with tf.compat.v1.Session(graph=graph) as session:
        found = session.run(fetches) if fetches else []
    except Exception as error:  # Whatever a user's function raises.
      reason = explain(name, error)
      if reason is None:
        raise
      raise reason from error
  return tf.nest.pack_sequence_as(result, found)


def _value(leaf: Structure) -> np.ndarray[Any, np.dtype[Any]]:
  return leaf.numpy() if tf.is_tensor(leaf) else np.asarray(leaf)
