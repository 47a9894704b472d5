"""A connection to TFF's C++ worker that notices when the worker is gone.

TFF's own connection repeats a call for ever if its worker is gone. Here the
call raises `WorkerLost`.
"""

from collections.abc import Callable
import contextlib
import functools
import threading
from typing import Any, TypeAlias
import weakref

import grpc
import tensorflow_federated as tff

from fednest_tff.structures import Value

# From a computation to the one that a worker runs.
Compiler = Callable[[tff.Computation], tff.Computation]
# A request or an answer of TFF's service. Generated code has no types.
_Proto: TypeAlias = Any

_MAX_MESSAGE_BYTES = 2 * 1000 * 1000 * 1000
_CHANNEL_OPTIONS = (
    ('grpc.max_receive_message_length', _MAX_MESSAGE_BYTES),
    ('grpc.max_send_message_length', _MAX_MESSAGE_BYTES),
    # A worker takes a second or two to start. By default, gRPC would wait for
    # minutes between attempts to connect.
    ('grpc.initial_reconnect_backoff_ms', 100),
    ('grpc.max_reconnect_backoff_ms', 1000),
    # A proxy that the environment names cannot reach this machine's ports.
    ('grpc.enable_http_proxy', 0),
)


class WorkerLost(Exception):  # noqa: N818
  """A worker no longer answers."""


class _UnwatchedChannel:
  """A channel without the method by which TFF's stub would watch it.

  The stub would start a thread for that, which prints a traceback when the
  channel is closed.
  """

  def __init__(self, channel: grpc.Channel):
    self.unary_unary = channel.unary_unary

  def subscribe(self, callback: object, try_to_connect: bool = False) -> None:
    pass


class _Stub(tff.framework.RemoteExecutorStub):
  """TFF's stub, with errors that TFF does not retry."""

  def __init__(self, channel: grpc.Channel):
    self._stub = tff.framework.RemoteExecutorGrpcStub(
        _UnwatchedChannel(channel)
    )
    self._channel = channel
    self._closed = False

  def close(self) -> None:
    """Closes the connection. Calls that wait for an answer fail."""
    self._closed = True
    self._channel.close()

  def _call(self, method: str, request: _Proto) -> _Proto:
    try:
      return getattr(self._stub, method)(request)
    except (grpc.RpcError, ValueError) as error:
      if self._closed:  # gRPC says CANCELLED, or raises a ValueError.
        raise WorkerLost('the connection was closed') from None
      if isinstance(error, grpc.RpcError):
        if error.code() == grpc.StatusCode.UNAVAILABLE:
          raise WorkerLost(error.details()) from None
      raise

  def _dispose(self, method: str, request: _Proto) -> None:
    # Finalizers call this. A worker that is gone has nothing to free.
    with contextlib.suppress(WorkerLost, grpc.RpcError):
      self._call(method, request)

  get_executor = functools.partialmethod(_call, 'get_executor')
  create_value = functools.partialmethod(_call, 'create_value')
  create_struct = functools.partialmethod(_call, 'create_struct')
  create_call = functools.partialmethod(_call, 'create_call')
  create_selection = functools.partialmethod(_call, 'create_selection')
  compute = functools.partialmethod(_call, 'compute')
  dispose = functools.partialmethod(_dispose, 'dispose')
  dispose_executor = functools.partialmethod(_dispose, 'dispose_executor')


def cached_compiler() -> Compiler:
  """Returns TFF's native compiler with a cache, for several connections."""
  compiled = functools.lru_cache(maxsize=128)(
      tff.backends.native.desugar_and_transform_to_native
  )
  lock = threading.Lock()

  def compile_once(computation: tff.Computation) -> tff.Computation:
    with lock:
      return compiled(computation)

  return compile_once


def open_channel(address: str) -> grpc.Channel:
  """Opens a channel to a worker on this machine."""
  return grpc.insecure_channel(address, _CHANNEL_OPTIONS)


class RemoteContext:
  """Runs computations on one worker."""

  def __init__(self, channel: grpc.Channel, compiler: Compiler):
    """Prepares the connection; the first call opens it.

    Args:
      channel: From `open_channel`; it is closed with this object.
      compiler: From `cached_compiler`.
    """
    # No worker has this method. One that says so is there.
    self._ping = channel.unary_unary('/fednest_tff.Worker/Ping')
    stub = _Stub(channel)

    def build_executor(
        cardinalities: dict[tff.framework.PlacementLiteral, int],
    ) -> tff.framework.RemoteExecutor:
      executor = tff.framework.RemoteExecutor(stub)
      executor.set_cardinalities({tff.CLIENTS: 0} | cardinalities)
      return executor

    self._context = tff.framework.SyncExecutionContext(
        executor_fn=tff.framework.ResourceManagingExecutorFactory(
            build_executor
        ),
        compiler_fn=compiler,
        transform_args=tff.tensorflow.transform_args,
        transform_result=tff.tensorflow.transform_result,
    )
    self.close = weakref.finalize(self, stub.close)

  def answers(self, timeout: float, connecting: bool = False) -> bool:
    """Asks the worker whether it is there, which it answers also when busy.

    Args:
      timeout: How many seconds the answer may take.
      connecting: Whether to wait for a worker that does not listen yet.

    Returns:
      Whether the worker answered in time.
    """
    try:
      self._ping(b'', timeout=timeout, wait_for_ready=connecting)
    except grpc.RpcError as error:
      return error.code() == grpc.StatusCode.UNIMPLEMENTED
    except ValueError:  # The channel was closed.
      return False
    return True

  def invoke(self, comp: tff.Computation, arg: Value) -> Value:
    """Runs `comp`; raises `WorkerLost` if the worker is gone."""
    return self._context.invoke(comp, arg)
