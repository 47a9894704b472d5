"""Forward accumulators with little to trace.

TensorFlow takes the forward derivative of an operation by a function that it
traces. It traces that function anew in every graph, which takes a third of the
time to trace a product of second derivatives, and keeps it for ever, though no
other graph can use it. From the 33rd function of an operation on it relaxes
shapes, which changes the graph and the last bits of its numbers.

Here these functions are traced outside all graphs, once for an operation, its
attributes and its shapes, so that all graphs share them and none depends on
what was traced before. There is no public switch for it.

TensorFlow also multiplies by zeros: an argument that does not move, such as a
client's images, has a tangent of zeros, and a product with it costs as much as
any other. Here such products are left out.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.function.polymorphism import function_cache
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, forwardprop
from tensorflow.python.eager.polymorphic_function import tracing_compilation
from tensorflow.python.framework import op_def_registry

from fednest_tff.vector_space import Structure

# pylint: disable=protected-access

# How many functions are kept; a product of a small network needs about 50.
_MAX_KEPT = 4096
# A graph outside those that are being traced.
_OUTSIDE = tf.Graph()
_OPTIONS = tracing_compilation.TracingOptions(
    forwardprop._jvp_helper_wrapper,
    name='forward_derivative',
    function_cache=function_cache.FunctionCache(),
)


# Operations that are linear in each of these arguments, and whose derivative in
# the others is 0. TensorFlow's own derivative needs the operation's result, if
# only for its shape, so that a gradient would be computed beside its tangent.
_LINEAR = {
    'BatchMatMulV2': (0, 1),
    'BiasAddGrad': (0,),
    'Conv2D': (0, 1),
    'Conv2DBackpropFilter': (0, 2),
    'Conv2DBackpropInput': (1, 2),
    'MatMul': (0, 1),
    'ReluGrad': (0,),
}


def _is_zero(tangent: tf.Tensor | None) -> bool:
  """Tells whether a tangent is known to be 0: its argument does not move."""
  if tangent is None:
    return True
  if tf.executing_eagerly():  # It is not known, and there is little to save.
    return False
  operation = tangent.op
  if operation.type == 'Fill':  # What TensorFlow writes for many zeros.
    return not np.any(tf.get_static_value(operation.inputs[1]))
  if operation.type == 'Const':
    return not np.any(tf.get_static_value(tangent))
  return operation.type == 'ZerosLike'


def _product_rule(
    operation: str,
    attributes: tuple[Any, ...],
    inputs: Sequence[tf.Tensor],
    tangents: Sequence[tf.Tensor | None],
) -> list[tf.Tensor]:
  """The sum over the arguments that move, each replaced by its tangent."""
  definition = op_def_registry.get(operation)
  types = {a.name for a in definition.attr if a.type == 'type'}
  pairs = zip(attributes[::2], attributes[1::2], strict=True)
  options = {
      name: value.decode() if isinstance(value, bytes) else value
      for name, value in pairs
      if name not in types
  }
  names = [argument.name for argument in definition.input_arg]
  terms = []
  for k in _LINEAR[operation]:
    if not _is_zero(tangents[k]):
      factors = dict(zip(names, inputs, strict=True)) | {names[k]: tangents[k]}
      terms.append(getattr(tf.raw_ops, operation)(**factors, **options))
  return [terms[0] if len(terms) == 1 else tf.add_n(terms)]


def _specs(tensors: Sequence[tf.Tensor | None]) -> Sequence[Any]:
  return type(tensors)(  # type: ignore[call-arg]
      None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in tensors
  )


def _derivative(
    operation: str,
    attributes: tuple[Any, ...],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    tangents: Sequence[tf.Tensor | None],
    use_batch: bool = False,
) -> Sequence[tf.Tensor | None]:
  """The derivatives of an operation's outputs along `tangents`."""
  moving = [not _is_zero(tangents[k]) for k in _LINEAR.get(operation, ())]
  if any(moving) and not use_batch:
    return _product_rule(operation, attributes, inputs, tangents)
  arguments = operation, attributes, inputs, outputs, tangents, use_batch
  # Functions are shared by shapes and types, which do not tell handles apart:
  # operations with handles are left to TensorFlow.
  handles = tf.resource, tf.variant
  if any(t.dtype in handles for t in (*inputs, *outputs)):
    return forwardprop._jvp_dispatch(*arguments)
  with _OUTSIDE.as_default(), context.eager_mode():
    function = tracing_compilation.trace_function(
        (operation, attributes, *map(_specs, (inputs, outputs, tangents)),
         use_batch),
        tracing_options=_OPTIONS,
    )
  signature = function.function_type
  tensors = signature.unpack_inputs(signature.bind(*arguments))
  return function._call_flat(tensors, captured_inputs=function.captured_inputs)


@contextlib.contextmanager
def accumulator(
    primals: Structure, tangents: Structure
) -> Iterator[tf.autodiff.ForwardAccumulator]:
  """A `tf.autodiff.ForwardAccumulator`, to be entered.

  Args:
    primals: The values that move.
    tangents: The directions in which they move, of the same structure.

  Yields:
    The accumulator.
  """
  # For the operations that are left to TensorFlow: its count of functions
  # starts anew, and it keeps no functions of other graphs.
  forwardprop._TRACE_COUNT.clear()
  if not tf.executing_eagerly():
    forwardprop._jvp_function_cache.clear()
  if len(_OPTIONS.function_cache) > _MAX_KEPT:
    _OPTIONS.function_cache.clear()
  pywrap_tfe.TFE_Py_RegisterJVPFunction(_derivative)
  try:
    with tf.autodiff.ForwardAccumulator(
        tf.nest.flatten(primals), tf.nest.flatten(tangents)
    ) as found:
      yield found
  finally:
    pywrap_tfe.TFE_Py_RegisterJVPFunction(forwardprop._jvp_dispatch)
