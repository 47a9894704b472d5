"""Connections to TFF's C++ workers that notice when a worker is gone.

TFF's own connection repeats a call for ever if its worker is gone. Here the
call raises `WorkerLost`. A worker may be on this machine or on another.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
import threading
import time
from typing import Any, TypeAlias
import weakref

from absl import logging
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
)
_MAX_MISSES = 2  # A worker that misses so many probes in a row is lost.


class WorkerError(RuntimeError):
  """A worker did not start, or ended while it was needed."""


class WorkerLost(Exception):  # noqa: N818
  """A worker no longer answers."""


class _ExecutorUnknown(Exception):  # noqa: N818
  """A worker does not know our executor, because it was started anew."""


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
        if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
          raise _ExecutorUnknown(error.details()) from None
      raise

  def _dispose(self, method: str, request: _Proto) -> None:
    # Finalizers call this. A worker that is gone has nothing to free.
    with contextlib.suppress(WorkerLost, _ExecutorUnknown, grpc.RpcError):
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
  """Returns TFF's native compiler with a cache.

  All connections that share it compile a computation only once.
  """
  compiled = functools.lru_cache(maxsize=128)(
      tff.backends.native.desugar_and_transform_to_native
  )
  lock = threading.Lock()

  def compile_once(computation: tff.Computation) -> tff.Computation:
    with lock:
      return compiled(computation)

  return compile_once


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    options: Sequence[tuple[str, str | int]] = (),
) -> grpc.Channel:
  """Opens a channel to a worker, with TLS if there are `credentials`."""
  options = [*_CHANNEL_OPTIONS, *options]
  if credentials is None:
    return grpc.insecure_channel(address, options)
  return grpc.secure_channel(address, credentials, options)


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
    try:
      return self._context.invoke(comp, arg)
    except _ExecutorUnknown:
      pass  # TFF has dropped the executor and creates another one.
    try:
      return self._context.invoke(comp, arg)
    except _ExecutorUnknown as error:
      raise RuntimeError(f'The worker refused the call: {error}') from None


class RemoteWorker:
  """A worker at an address, watched during its calls.

  Attributes:
    address: host:port.
    lost_at: When the worker was found to be lost, in seconds of
      `time.monotonic`; `None` if it is not lost.
  """

  def __init__(
      self,
      address: str,
      connect: Callable[[str], RemoteContext],
      connect_timeout: float,
      probe_interval: float,
      call_timeout: float | None,
  ):
    """Prepares the worker; the first call connects to it.

    Args:
      address: host:port.
      connect: Creates a connection to an address.
      connect_timeout: Seconds within which the worker must answer at first.
      probe_interval: Seconds between two probes during a call, and the longest
        that the answer to a probe may take.
      call_timeout: Seconds that a call may take; `None` for no limit.
    """
    self.address = address
    self.lost_at: float | None = None
    self._connect = connect
    self._connect_timeout = connect_timeout
    self._probe_interval = probe_interval
    self._call_timeout = call_timeout
    self._lock = threading.Lock()
    self._remote: RemoteContext | None = None

  def close(self) -> None:
    """Closes the connection; the next call opens another."""
    with self._lock:
      remote, self._remote = self._remote, None
    if remote is not None:
      remote.close()

  def _connected(self) -> RemoteContext:
    with self._lock:
      remote = self._remote
      if remote is None:
        remote = self._connect(self.address)
        if not remote.answers(self._connect_timeout):
          remote.close()
          raise WorkerLost('it does not answer')
        self._remote = remote
      if self.lost_at is not None:
        logging.warning('Worker %s is back.', self.address)
        self.lost_at = None
      return remote

  def _watch(self, remote: RemoteContext, finished: threading.Event) -> None:
    """Closes the connection if the worker stops answering during a call.

    A machine that vanishes does not close its connections. gRPC can notice that
    by itself (keepalive), but the worker's server does not allow as many probes
    as a long call needs.
    """
    deadline = time.monotonic() + (self._call_timeout or float('inf'))
    misses = 0
    while not finished.wait(self._probe_interval):
      misses = 0 if remote.answers(self._probe_interval) else misses + 1
      if misses >= _MAX_MISSES or time.monotonic() > deadline:
        remote.close()
        return

  def invoke(self, comp: tff.Computation, arg: Value) -> Value:
    """Runs `comp`; raises `WorkerLost` if the worker is gone."""
    finished = threading.Event()
    remote = None
    try:
      remote = self._connected()
      threading.Thread(
          target=self._watch, args=(remote, finished), daemon=True
      ).start()
      return remote.invoke(comp, arg)
    except WorkerLost:
      if remote is self._remote:  # Otherwise another call has closed it.
        self.close()
      self.lost_at = time.monotonic()
      raise
    finally:
      finished.set()
