"""Options with which TensorFlow optimizes and runs functions.

TensorFlow has no public way to set this one.
"""

from collections.abc import Iterator
import contextlib
import functools

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context as eager_context


@functools.lru_cache(maxsize=8)
def _without_scheduling(serialized: bytes) -> config_pb2.ConfigProto:
  config = config_pb2.ConfigProto.FromString(serialized)
  options = config.graph_options.rewrite_options
  # By default large tensors may be swapped and their sums rewritten; with this
  # they may only be swapped.
  options.memory_optimization = (
      rewriter_config_pb2.RewriterConfig.SWAPPING_HEURISTICS
  )
  return config


@contextlib.contextmanager
def without_temporary_variables() -> Iterator[None]:
  """Keeps TensorFlow from adding large tensors up in a temporary variable.

  TensorFlow does so where it expects a graph to need more than 205 MB on a CPU.
  The variable has the same name in all calls. A call that ends with an error,
  such as a run that diverges, leaves it behind, and every later call then fails
  with "Resource ... already exists". So do two calls at the same time.

  It must be active where a function is traced and where it is called first. It
  holds for the thread that enters it.

  Yields:
    Nothing.
  """
  context = eager_context.context()
  before = context.function_call_options
  context.function_call_options = eager_context.FunctionCallOptions(
      before.executor_type,
      _without_scheduling(before.config_proto_serialized),
  )
  try:
    yield
  finally:
    context.function_call_options = before
