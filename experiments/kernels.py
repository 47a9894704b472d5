"""What TensorFlow executes: operations counted, products measured.

`count_operations` counts the operations that a call executes, from a trace of
TensorFlow's profiler. `count_flops` counts the floating-point operations of a
function's matrix products from its graph. `matmul_rate` measures how many a
machine does per second.
"""

import collections
from collections.abc import Callable
import glob
import os
import tempfile
import time

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

# Operations that only pass tensors on, or call others.
_BOOKKEEPING = frozenset([
    'Const', 'Enter', 'Exit', 'Identity', 'IdentityN', 'LoopCond', 'Merge',
    'NextIteration', 'NoOp', 'PartitionedCall', 'StatefulPartitionedCall',
    'Switch', '_Arg', '_Retval', '_SwitchN',
])
_LOOPS = frozenset(['StatelessWhile', 'While'])
_CALLS = frozenset(['PartitionedCall', 'StatefulPartitionedCall'])


def count_operations(function: Callable[[], object]) -> collections.Counter:
  """Counts the operations that a call executes in this process, by type.

  An operation in a loop counts as often as it is executed. Operations that only
  pass tensors on, or call others, are left out. Those that TensorFlow leaves to
  oneDNN, as it does by default on processors with instructions for it, count
  under the names that they have elsewhere. TensorFlow takes a time to
  digest its trace that grows with the square of the graph: seconds for an epoch
  of a few thousand operations, minutes for one of some ten thousand.

  Args:
    function: What to call; it should have been called before, or else what
      compiling executes is counted, too.

  Returns:
    How often each type of operation was executed.
  """
  # At level 2 TensorFlow leaves out operations that it has found to be cheap.
  options = tf.profiler.experimental.ProfilerOptions(
      host_tracer_level=3, python_tracer_level=0, device_tracer_level=0
  )
  with tempfile.TemporaryDirectory() as directory:
    tf.profiler.experimental.start(directory, options)
    try:
      function()
    finally:
      tf.profiler.experimental.stop()
    pattern = os.path.join(directory, '**', '*.xplane.pb')
    (path,) = glob.glob(pattern, recursive=True)
    with open(path, 'rb') as file:
      space = xplane_pb2.XSpace.FromString(file.read())
  counts: collections.Counter[str] = collections.Counter()
  for plane in space.planes:
    for line in plane.lines:
      for event in line.events:
        # 'name:type' with the type for display; other events have none.
        event_type = plane.event_metadata[event.metadata_id]
        shown = event_type.display_name
        if event_type.name.endswith(f':{shown}') and shown:
          counts[_without_library(shown)] += 1
  for name in _BOOKKEEPING:
    counts.pop(name, None)
  return counts


def _without_library(name: str) -> str:
  """'MatMul' of '_MklMatMul' and '_MklNativeMatMul', which are oneDNN's."""
  return name.removeprefix('_Mkl').removeprefix('Native')


def count_flops(
    function: tf.types.experimental.ConcreteFunction, iterations: int
) -> int:
  """Counts the floating-point operations of matrix products.

  Args:
    function: A function whose products have known shapes.
    iterations: How often each loop in it repeats.

  Returns:
    Two for each multiplication with its addition. Other operations, such as
    activations, are not counted: products are nearly all there is.

  Raises:
    ValueError: If a product's shape is not known.
  """
  return _count_flops(function.graph, iterations)


def _needed(graph: tf.Graph) -> list[tf.Operation]:
  """The operations behind a function's results; no others are executed."""
  waiting = [tensor.op for tensor in graph.outputs]
  found: dict[str, tf.Operation] = {}
  while waiting:
    op = waiting.pop()
    if op.name not in found:
      found[op.name] = op
      waiting += [tensor.op for tensor in op.inputs]
      waiting += op.control_inputs
  return list(found.values())


def _count_flops(graph: tf.Graph, iterations: int) -> int:
  total = 0
  for op in _needed(graph):
    if op.type in ('MatMul', 'BatchMatMul', 'BatchMatMulV2'):
      is_transposed = op.get_attr(
          'transpose_a' if op.type == 'MatMul' else 'adj_x'
      )
      inner = op.inputs[0].shape[-2 if is_transposed else -1]
      size = op.outputs[0].shape.num_elements()
      if inner is None or size is None:
        raise ValueError(f'The shape of {op.name} is not known.')
      total += 2 * size * inner
    elif op.type in _LOOPS:
      body = graph._get_function(op.get_attr('body').name)
      total += iterations * _count_flops(body.graph, iterations)
    elif op.type in _CALLS:
      called = graph._get_function(op.get_attr('f').name)
      total += _count_flops(called.graph, iterations)
  return total


def matmul_rate(size: int = 1024, repeats: int = 20) -> float:
  """Measures the rate of float32 matrix products on all cores.

  As many products as there are cores run at the same time, so that all cores
  work also if TensorFlow takes one thread per operation.

  Args:
    size: Rows and columns of the matrices.
    repeats: How often it is measured; the best counts.

  Returns:
    Floating-point operations per second.
  """
  cores = os.cpu_count() or 1
  matrices = [
      tf.random.stateless_uniform([size, size], [0, k]) for k in range(cores)
  ]

  @tf.function(autograph=False)
  def multiply(matrices: list[tf.Tensor]) -> list[tf.Tensor]:
    return [matrix @ matrix for matrix in matrices]

  multiply(matrices)
  seconds = []
  for _ in range(repeats):
    begin = time.perf_counter()
    multiply(matrices)[-1].numpy()
    seconds.append(time.perf_counter() - begin)
  return cores * 2 * size**3 / min(seconds)
