"""Vectorises functions with fewer operations than `tf.vectorized_map`.

TensorFlow vectorises an operation without knowing the ranks of its arguments:
an addition becomes 26 nodes, most of them about shapes. A graph from TFF mostly
has known ranks, so one or two nodes do. This makes compiling faster, and there
is less to run.

A converter here is attached to a single operation (`attach`), and changes
nothing for other users of TensorFlow. It falls back to TensorFlow's own where
it does not apply.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import importlib
import logging

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.parallel_for import control_flow_ops

from fednest_tff.runtime.compiler import philox, while_loops
from fednest_tff.structures import Value

# An import statement would find the function `pfor`, not the module.
pfor = importlib.import_module('tensorflow.python.ops.parallel_for.pfor')

# From an operation with converted arguments to its converted results.
_Converter = Callable[[Value], Value]

_ELEMENTWISE = frozenset([
    'Add', 'AddV2', 'Atan2', 'Div', 'DivNoNan', 'Equal', 'FloorDiv', 'FloorMod',
    'Greater', 'GreaterEqual', 'Less', 'LessEqual', 'LogicalAnd', 'LogicalOr',
    'Maximum', 'Minimum', 'Mod', 'Mul', 'MulNoNan', 'NotEqual', 'Pow',
    'RealDiv', 'SelectV2', 'SquaredDifference', 'Sub', 'TruncateDiv',
    'TruncateMod', 'Xdivy', 'Xlog1py', 'Xlogy',
])
# For each result of these operations, the argument that has its shape.
_SHAPE_OF_INPUT = {
    **dict.fromkeys(
        ['BiasAdd', 'Cast', 'Exp', 'Identity', 'Log', 'Neg', 'Relu', 'Sigmoid',
         'Softmax', 'Sqrt', 'Square', 'Tanh'],
        (0,),
    ),
    'SparseSoftmaxCrossEntropyWithLogits': (1, 0),
}
_KEY_COUNTER = 'StatelessRandomGetKeyCounter'
# Random operations, and the type that each can draw for all clients at once.
_DRAWN = {
    'StatelessRandomUniformV2': tf.float32,
    'StatelessRandomUniformFullIntV2': tf.int64,
}
# TensorFlow's numbers of generators: Philox, and the one that it chooses.
_PHILOX = (1, 3)
_REDUCTIONS = frozenset(['All', 'Any', 'Max', 'Mean', 'Min', 'Prod', 'Sum'])


def _create(pfor_input: Value, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
  """Creates an operation like the original one, with other arguments."""
  return pfor._create_op(
      pfor_input.op_type,
      inputs,
      [output.dtype for output in pfor_input.outputs],
      attrs=pfor_input.op.node_def.attr,
  ).outputs


def _by_tensorflow(pfor_input: Value) -> Value:
  """Converts an operation as TensorFlow does."""
  return pfor._pfor_converter_registry[pfor_input.op_type](pfor_input)


def _convert_elementwise(pfor_input: Value) -> Value:
  """Gives stacked arguments of lower rank the axes that they lack."""
  ranks = [tensor.shape.rank for tensor in pfor_input.op.inputs]
  if None in ranks:
    return _by_tensorflow(pfor_input)
  inputs = []
  for rank, (tensor, is_stacked, _) in zip(
      ranks, pfor_input.inputs, strict=True
  ):
    if is_stacked and rank < max(ranks):
      new_axes = [tf.newaxis] * (max(ranks) - rank)
      tensor = tensor[(slice(None), *new_axes, Ellipsis)]
    inputs.append(tensor)
  return pfor.wrap(_create(pfor_input, inputs)[0], True)


def _convert_reduction(pfor_input: Value) -> Value:
  """Adds 1 to the axes, for the axis of the clients, if none is negative."""
  rows, is_stacked, _ = pfor_input.input(0)
  axes, axes_are_stacked, _ = pfor_input.input(1)
  if not is_stacked or axes_are_stacked:
    return _by_tensorflow(pfor_input)
  known = tf.get_static_value(axes)
  if known is not None and (known >= 0).all():
    axes = tf.constant(known + 1, axes.dtype)
  elif pfor_input.op.inputs[1].op.type == 'BroadcastGradientArgs':
    axes += 1  # None of these is negative.
  else:
    return _by_tensorflow(pfor_input)
  return pfor.wrap(_create(pfor_input, [rows, axes])[0], True)


def _convert_add_n(pfor_input: Value) -> Value:
  """Adds what is the same for all clients without copying it for each."""
  stacked = [t for t, is_stacked, _ in pfor_input.inputs if is_stacked]
  same = [t for t, is_stacked, _ in pfor_input.inputs if not is_stacked]
  total = stacked[0] if len(stacked) == 1 else tf.add_n(stacked)
  for tensor in same:
    total += tensor
  return pfor.wrap(total, True)


def _divide_among_clients(
    pfor_input: Value, rows: tf.Tensor, rest: list[int]
) -> Value:
  """Gives rows of all clients, equally many of each, an axis for the clients.

  Args:
    pfor_input: The operation.
    rows: The rows, one client's after the other's.
    rest: The shape of a row.

  Returns:
    The stacked rows, wrapped.
  """
  clients = pfor_input.pfor.loop_len_vector
  shape = tf.concat([clients, [-1, *rest]], axis=0)
  return pfor.wrap(tf.reshape(rows, shape), True)


def _convert_sparse_cross_entropy(pfor_input: Value) -> Value:
  """Treats the examples of all clients as one batch.

  A local step needs the gradients alone, which are a softmax minus the labels:
  TensorFlow's operation takes four times as long on a CPU.
  """
  logits, logits_are_stacked, _ = pfor_input.input(0)
  labels, labels_are_stacked, _ = pfor_input.input(1)
  num_classes = logits.shape[-1]
  if not logits_are_stacked or not labels_are_stacked or num_classes is None:
    return _by_tensorflow(pfor_input)
  loss, _ = _create(
      pfor_input,
      [tf.reshape(logits, [-1, num_classes]), tf.reshape(labels, [-1])],
  )
  # A label that is no class is an error on a CPU, and a row of zeros on a GPU.
  # There the division makes NaN of it, as TensorFlow's operation does.
  targets = tf.gather(tf.eye(num_classes, dtype=logits.dtype), labels)
  targets /= tf.reduce_max(targets, axis=-1, keepdims=True)
  return [
      _divide_among_clients(pfor_input, loss, []),
      pfor.wrap(tf.nn.softmax(logits) - targets, True),
  ]


def _convert_top_k(pfor_input: Value) -> Value:
  """Sorts all rows at once, as the operation itself can."""
  rows, is_stacked, _ = pfor_input.input(0)
  k, k_is_stacked, _ = pfor_input.input(1)
  if not is_stacked or k_is_stacked:
    return pfor._fallback_converter(pfor_input)
  return [pfor.wrap(t, True) for t in _create(pfor_input, [rows, k])]


def _convert_shape(pfor_input: Value) -> Value:
  """Writes a shape that is known as a constant, or takes it from the source.

  Gradients at two points ask for the shapes of two tensors that are computed
  from one minibatch. If both shapes are taken from the minibatch, TensorFlow
  sees that they are equal, and so is all that follows from them.
  """
  tensor = pfor_input.op.inputs[0]
  dtype = pfor_input.op.outputs[0].dtype
  if tensor.dtype == tf.variant:
    return _by_tensorflow(pfor_input)
  if tensor.shape.is_fully_defined():
    return pfor.wrap(tf.constant(tensor.shape.as_list(), dtype), False)
  source = tensor
  while source.op.type in _SHAPE_OF_INPUT:
    number = _SHAPE_OF_INPUT[source.op.type][source.value_index]
    source = source.op.inputs[number]
  rows, is_stacked, _ = pfor_input.pfor._convert_helper(source)
  if source is tensor or not is_stacked:
    return _by_tensorflow(pfor_input)
  return pfor.wrap(tf.shape(rows, dtype)[1:], False)


def _convert_expand_dims(pfor_input: Value) -> Value:
  """Adds 1 to a known axis, for the axis of the clients, unless negative."""
  tensor, is_stacked, _ = pfor_input.input(0)
  axis = tf.get_static_value(pfor_input.op.inputs[1])
  if not is_stacked or axis is None or np.size(axis) != 1:
    return _by_tensorflow(pfor_input)
  axis = int(np.reshape(axis, []))
  return pfor.wrap(tf.expand_dims(tensor, axis + (axis >= 0)), True)


def _convert_matmul(pfor_input: Value) -> Value:
  """Multiplies the rows of all clients with one shared matrix at once."""
  a, a_is_stacked, _ = pfor_input.input(0)
  b, b_is_stacked, _ = pfor_input.input(1)
  rows, columns = pfor_input.op.outputs[0].shape
  if (
      not a_is_stacked
      or b_is_stacked
      or pfor_input.get_attr('transpose_a')
      or a.shape[-1] is None
      or columns is None
  ):
    return _by_tensorflow(pfor_input)
  (product,) = _create(pfor_input, [tf.reshape(a, [-1, a.shape[-1]]), b])
  if rows is None:
    return _divide_among_clients(pfor_input, product, [columns])
  return pfor.wrap(tf.reshape(product, [-1, rows, columns]), True)


def _convert_batch_matmul(pfor_input: Value) -> Value:
  """Takes the clients as one more axis of a batch."""
  ranks = {tensor.shape.rank for tensor in pfor_input.op.inputs}
  if len(ranks) > 1 or None in ranks:
    return _by_tensorflow(pfor_input)
  inputs = [tensor for tensor, _, _ in pfor_input.inputs]
  return pfor.wrap(_create(pfor_input, inputs)[0], True)


def _convert_bias_add(pfor_input: Value) -> Value:
  """Adds each client's bias to its rows."""
  tensor, _, _ = pfor_input.input(0)
  bias, bias_is_stacked, _ = pfor_input.input(1)
  rank = pfor_input.op.inputs[0].shape.rank
  if (
      not bias_is_stacked
      or rank is None
      or pfor_input.get_attr('data_format') != b'NHWC'
  ):
    return _by_tensorflow(pfor_input)
  axes = [tf.newaxis] * (rank - 1)
  return pfor.wrap(tensor + bias[(slice(None), *axes, slice(None))], True)


def _convert_bias_add_grad(pfor_input: Value) -> Value:
  """Sums over all axes but the clients and the last one."""
  tensor = pfor_input.stacked_input(0)
  rank = pfor_input.op.inputs[0].shape.rank
  if rank is None or pfor_input.get_attr('data_format') != b'NHWC':
    return _by_tensorflow(pfor_input)
  return pfor.wrap(tf.reduce_sum(tensor, axis=list(range(1, rank))), True)


def _convert_key_counter(pfor_input: Value) -> Value:
  """Scrambles the seeds of all clients at once."""
  return [
      pfor.wrap(tensor, True)
      for tensor in philox.keys_and_counters(pfor_input.stacked_input(0))
  ]


def _convert_draw(pfor_input: Value) -> Value:
  """Draws for all clients at once, if they differ by their seeds alone."""
  shape, shape_is_stacked, _ = pfor_input.input(0)
  keys, keys_are_stacked, _ = pfor_input.input(1)
  counters, counters_are_stacked, _ = pfor_input.input(2)
  (result,) = pfor_input.op.outputs
  if (
      shape_is_stacked
      or not keys_are_stacked
      or not counters_are_stacked
      or pfor_input.op.inputs[2].op.type != _KEY_COUNTER
      or tf.get_static_value(pfor_input.op.inputs[3]) not in _PHILOX
      or result.dtype != _DRAWN[pfor_input.op_type]
  ):
    return pfor._fallback_converter(pfor_input)
  return pfor.wrap(philox.draw(shape, keys, counters, result.dtype), True)


_CONVERTERS: dict[str, _Converter] = {
    **dict.fromkeys(_ELEMENTWISE, _convert_elementwise),
    **dict.fromkeys(_REDUCTIONS, _convert_reduction),
    **dict.fromkeys(_DRAWN, _convert_draw),
    _KEY_COUNTER: _convert_key_counter,
    'AddN': _convert_add_n,
    'BatchMatMulV2': _convert_batch_matmul,
    'BiasAdd': _convert_bias_add,
    'BiasAddGrad': _convert_bias_add_grad,
    'ExpandDims': _convert_expand_dims,
    'MatMul': _convert_matmul,
    'Shape': _convert_shape,
    'SparseSoftmaxCrossEntropyWithLogits': _convert_sparse_cross_entropy,
    'StatelessWhile': while_loops.convert_while,
    'While': while_loops.convert_while,
    'TopKV2': _convert_top_k,
}


def attach(operations: Iterable[tf.Operation]) -> None:
  """Has operations vectorised as described above."""
  for operation in operations:
    converter = _CONVERTERS.get(operation.type)
    if converter is not None:
      operation.pfor_converter = converter


def _is_for_users(record: logging.LogRecord) -> bool:
  return 'Fix that!' not in record.getMessage()


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
  """Hides log lines that TensorFlow's authors wrote for themselves."""
  logger = tf.get_logger()
  logger.addFilter(_is_for_users)
  try:
    yield
  finally:
    logger.removeFilter(_is_for_users)


def vectorized_map(
    function: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    rows: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
  """Applies a function to all rows at once, as `tf.vectorized_map` does.

  Unlike that, it does not copy all rows first if their number is not known.

  Args:
    function: A function of one row of each tensor.
    rows: The tensors, at least one, all with equally many rows.

  Returns:
    The results, stacked.
  """

  def compute(i: tf.Tensor) -> list[tf.Tensor]:
    picked = []
    for tensor in rows:
      row = tf.gather(tensor, i)
      row.op.pfor_converter = lambda _, tensor=tensor: pfor.wrap(tensor, True)
      picked.append(row)
    return function(picked)

  # Or else AutoGraph reads the source of TensorFlow's own functions.
  at_once = tf.autograph.experimental.do_not_convert(control_flow_ops.pfor)
  with _without_notes():
    return at_once(compute, tf.shape(rows[0])[0], warn=False)
