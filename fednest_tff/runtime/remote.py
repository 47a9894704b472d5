"""Connections to TFF's C++ workers, here or elsewhere, that fail in time.

TFF's own stub retries a call for ever when its worker is gone; this one raises
`WorkerLost`, and can ask a worker whether it is there.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
import threading
from typing import Any
import weakref

import grpc
import tensorflow_federated as tff

_MAX_MESSAGE_BYTES = 2 * 1000 * 1000 * 1000
_CHANNEL_OPTIONS = (
    ('grpc.max_receive_message_length', _MAX_MESSAGE_BYTES),
    ('grpc.max_send_message_length', _MAX_MESSAGE_BYTES),
    # A worker takes a second or two to start; the default backs off to minutes.
    ('grpc.initial_reconnect_backoff_ms', 100),
    ('grpc.max_reconnect_backoff_ms', 1000),
)


class WorkerError(RuntimeError):
  """A worker did not start, or ended while it was needed."""


class WorkerLost(Exception):  # noqa: N818
  """A worker no longer answers; `RemoteContext` raises it to its users."""


class _Outdated(Exception):  # noqa: N818
  """A worker does not know our executor: it is not the one it was."""


class _Unwatched:
  """A channel that TFF's stub cannot watch.

  The stub would keep a thread on it that prints a traceback when it is closed.
  """

  def __init__(self, channel: grpc.Channel):
    self.unary_unary = channel.unary_unary

  def subscribe(self, callback, try_to_connect=False):
    pass


class _Stub(tff.framework.RemoteExecutorStub):
  """TFF's stub, with errors that nobody retries for ever."""

  def __init__(self, channel: grpc.Channel):
    self._stub = tff.framework.RemoteExecutorGrpcStub(_Unwatched(channel))
    self._channel = channel
    self._closed = False

  def close(self):
    """Ends the connection and every call that waits for it."""
    self._closed = True
    self._channel.close()

  def _call(self, method: str, request: Any) -> Any:
    try:
      return getattr(self._stub, method)(request)
    except (grpc.RpcError, ValueError) as error:
      if self._closed:  # gRPC says CANCELLED, or raises a ValueError.
        raise WorkerLost('the connection was closed') from None
      if isinstance(error, grpc.RpcError):
        if error.code() == grpc.StatusCode.UNAVAILABLE:
          raise WorkerLost(error.details()) from None
        if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
          raise _Outdated(error.details()) from None
      raise

  def _tidy(self, method: str, request: Any):
    # These come from finalizers. A worker that is gone has nothing to free.
    with contextlib.suppress(WorkerLost, _Outdated, grpc.RpcError):
      self._call(method, request)

  get_executor = functools.partialmethod(_call, 'get_executor')
  create_value = functools.partialmethod(_call, 'create_value')
  create_struct = functools.partialmethod(_call, 'create_struct')
  create_call = functools.partialmethod(_call, 'create_call')
  create_selection = functools.partialmethod(_call, 'create_selection')
  compute = functools.partialmethod(_call, 'compute')
  dispose = functools.partialmethod(_tidy, 'dispose')
  dispose_executor = functools.partialmethod(_tidy, 'dispose_executor')


def cached_compiler() -> Callable[[tff.Computation], Any]:
  """The native compiler, once per computation for all that share it."""
  compiled = functools.lru_cache(maxsize=128)(
      tff.backends.native.desugar_and_transform_to_native
  )
  lock = threading.Lock()

  def compile_once(computation):
    with lock:
      return compiled(computation)

  return compile_once


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.Channel:
  """A channel to a worker, with TLS if there are `credentials`."""
  options = [*_CHANNEL_OPTIONS, *options]
  if credentials is None:
    return grpc.insecure_channel(address, options)
  return grpc.secure_channel(address, credentials, options)


class RemoteContext:
  """Runs computations on one worker, wherever it is."""

  def __init__(self, channel: grpc.Channel, compiler: Callable):
    """Connects to nothing yet.

    Args:
      channel: From `open_channel`; it is closed with this object.
      compiler: From `cached_compiler`.
    """
    # No such method exists. Being told so shows that the worker is there.
    self._ping = channel.unary_unary('/fednest_tff.Worker/Ping')
    stub = _Stub(channel)

    def build_executor(cardinalities):
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
    """Whether the worker answers, also while it computes.

    Args:
      timeout: How many seconds it may take.
      connecting: Whether it may still have to start listening.

    Returns:
      Whether it did.
    """
    try:
      self._ping(b'', timeout=timeout, wait_for_ready=connecting)
    except grpc.RpcError as error:
      return error.code() == grpc.StatusCode.UNIMPLEMENTED
    except ValueError:  # The channel was closed.
      return False
    return True

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """The result of `comp`; `WorkerLost` if the worker is gone."""
    try:
      return self._context.invoke(comp, arg)
    except _Outdated:
      pass  # TFF has dropped the executor, and makes a new one.
    try:
      return self._context.invoke(comp, arg)
    except _Outdated as error:
      raise RuntimeError(f'The worker refused the call: {error}') from None
