"""TFF's own C++ runtime, started, watched and ended by us.

TFF's worker is a server in a process of its own. TFF starts it without a time
limit, lets it inherit the standard streams, retries a call for ever when it is
gone, and leaves it behind when Python ends. Here it

- starts under a time limit, and a start that fails says why in one line;
- ends with this process, however that ends, because the kernel sees to it;
- writes to a log file, which errors name, and holds no pipe of ours;
- fails a call when it dies, and is started anew by the next.

It listens on all interfaces, without authentication, and runs whatever it is
sent: use it only where nobody else can reach the machine's ports.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import contextlib
import functools
import importlib.util
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any
import weakref

from absl import logging
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
# Asks the kernel for SIGKILL when the parent ends (PR_SET_PDEATHSIG is 1), then
# becomes the worker. A process of its own, because a `preexec_fn` would run
# Python after a fork from a process full of TensorFlow's and gRPC's threads.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0):
  sys.exit('prctl(PR_SET_PDEATHSIG) failed')
if os.getppid() == int(parent):  # else it ended before we asked
  try:
    os.execv(command[0], command)
  except OSError as error:
    sys.exit(f'{command[0]}: {error.strerror}')
"""


class WorkerError(RuntimeError):
  """A worker did not start, or ended while it was needed."""


class WorkerLost(Exception):  # noqa: N818
  """A worker no longer answers; `RemoteContext` raises it to its users."""


class _Outdated(Exception):  # noqa: N818
  """A worker does not know our executor: it is not the one it was."""


class _Spawner:
  """Starts processes from a thread that lives as long as this process.

  The kernel takes the *thread* that started a process for its parent, and would
  end a worker with the thread that happened to need it first.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._requests = queue.SimpleQueue()
    self._pid = None

  def _serve(self, requests):
    while True:
      future, args, options = requests.get()
      try:
        future.set_result(subprocess.Popen(args, **options))
      except BaseException as error:  # The thread must go on.
        future.set_exception(error)

  def start(self, args: list[str], **options) -> subprocess.Popen:
    with self._lock:
      if self._pid != os.getpid():  # At first, and again after a fork.
        self._pid, self._requests = os.getpid(), queue.SimpleQueue()
        threading.Thread(
            target=self._serve, args=(self._requests,), daemon=True
        ).start()
    future = concurrent.futures.Future()
    self._requests.put((future, args, options))
    return future.result()


_spawner = _Spawner()


def _default_binary() -> str:
  package = importlib.util.find_spec('tensorflow_federated')
  return os.path.join(
      package.submodule_search_locations[0], 'data', 'worker_binary'
  )


def _reserve(port: int) -> socket.socket:
  """A socket that keeps `port`, or a free one if 0, for the worker.

  gRPC servers share a port that another one has (SO_REUSEPORT) and then answer
  each other's calls, so nobody else may take it before the worker does.
  """
  if port:
    with socket.socket() as plain:  # Fails where a sharing one would not.
      plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      plain.bind(('', port))
  reserved = socket.socket()
  reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  reserved.bind(('', port))
  return reserved


def _end(process: subprocess.Popen, owner: int, log_file: str, keep_log: bool):
  if os.getpid() != owner:
    return  # A forked child; the worker is its parent's.
  was_well = process.poll() is None
  process.kill()
  process.wait()
  if was_well and not keep_log and os.path.exists(log_file):
    os.remove(log_file)


class LocalWorker:
  """A worker process on this machine; it ends with this object, or by `stop`.

  Attributes:
    address: host:port, for this machine.
    log_file: Where it writes. Stopping a healthy worker removes it, unless
      `log_dir` was given.
    pid: Its process id.
  """

  def __init__(
      self,
      port: int = 0,
      log_dir: str | None = None,
      binary: str | None = None,
  ):
    """Starts the process; `connect` waits until it answers.

    Args:
      port: Where it listens, on all interfaces; 0 for a free port.
      log_dir: Where its log goes; `None` for a temporary file.
      binary: The worker's program; `None` for the one that TFF brings.
    """
    binary = os.path.abspath(binary or _default_binary())
    if not os.access(binary, os.X_OK) or os.path.isdir(binary):
      raise WorkerError(f'There is no program {binary} to start as a worker.')
    try:
      self._reserved = _reserve(port)
    except OSError as error:
      raise WorkerError(f'Port {port} is not free: {error}.') from None
    port = self._reserved.getsockname()[1]
    if log_dir is not None:
      os.makedirs(log_dir, exist_ok=True)
    log, self.log_file = tempfile.mkstemp('.log', 'tff_worker_', log_dir)
    try:
      self._process = _spawner.start(
          [
              *(sys.executable, '-I', '-S', '-c', _LAUNCHER),
              *(str(os.getpid()), binary, f'--port={port}'),
          ],
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=log,
          start_new_session=True,  # Ctrl-C is for us to handle.
      )
    finally:
      os.close(log)
    self.address = f'127.0.0.1:{port}'
    self.pid = self._process.pid
    keep_log = log_dir is not None
    self.stop = weakref.finalize(
        self, _end, self._process, os.getpid(), self.log_file, keep_log
    )

  def is_running(self) -> bool:
    return self._process.poll() is None

  def kill(self):
    """Ends the process and keeps its log, for an error to point to."""
    self._process.kill()
    self._process.wait()

  def error(self, what: str) -> WorkerError:
    """One line: what happened, how the process ended, where to read more."""
    code = self._process.poll()
    if code is not None and code < 0:
      what += f' by {signal.Signals(-code).name} ({signal.strsignal(-code)})'
    elif code is not None:
      what += f' with exit code {code}'
    lines = []
    with contextlib.suppress(OSError), open(
        self.log_file, errors='replace'
    ) as log:
      lines = [line.strip() for line in log if line.strip()]
    last = f' Its last line: {lines[-1][:300]}' if lines else ''
    return WorkerError(
        f'The TFF worker (pid {self.pid}) {what}. Log: {self.log_file}.{last}'
    )

  def connect(self, timeout: float, compiler: Callable) -> 'RemoteContext':
    """Waits until the worker answers.

    Args:
      timeout: How many seconds it may take.
      compiler: From `cached_compiler`.

    Returns:
      A context on the worker; `WorkerError` if it did not start.
    """
    # A proxy from the environment has no business on this machine.
    channel = open_channel(self.address, None, [('grpc.enable_http_proxy', 0)])
    remote = RemoteContext(channel, compiler)
    deadline = time.monotonic() + timeout
    while not remote.answers(0.2, connecting=True):
      if self.is_running() and time.monotonic() < deadline:
        continue
      remote.close()
      self._reserved.close()
      error = self.error(
          f'did not answer within {timeout:g} s of its start'
          if self.is_running()
          else 'ended at its start'
      )
      self.kill()
      raise error
    self._reserved.close()
    return remote


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


class NativeContext(tff.framework.SyncContext):
  """TFF's C++ runtime on this machine; see `build_native_context`.

  Attributes:
    worker: The present `LocalWorker`; `None` before the first call.
  """

  def __init__(self, start_timeout, call_timeout, log_dir, binary):
    self._start_timeout = start_timeout
    self._call_timeout = call_timeout
    self._options = dict(log_dir=log_dir, binary=binary)
    self._compiler = cached_compiler()
    self._lock = threading.Lock()
    self.worker = self._remote = None

  def close(self):
    """Ends the worker; another call would start a new one."""
    if self.worker is not None:
      self._remote.close()
      self.worker.stop()
      self.worker = self._remote = None

  def _running(self) -> tuple[LocalWorker, 'RemoteContext']:
    with self._lock:
      if self.worker is not None and not self.worker.is_running():
        logging.warning('%s Starting another.', self.worker.error('has ended'))
        self.close()
      if self.worker is None:
        worker = LocalWorker(**self._options)
        self._remote = worker.connect(self._start_timeout, self._compiler)
        self.worker = worker
      return self.worker, self._remote

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """The result of `comp`; `WorkerError` if the worker died under it."""
    worker, remote = self._running()
    expired = threading.Event()

    def expire():
      expired.set()
      worker.kill()

    timer = threading.Timer(self._call_timeout or 0, expire)
    timer.daemon = True
    if self._call_timeout is not None:
      timer.start()
    try:
      return remote.invoke(comp, arg)
    except WorkerLost:
      if expired.is_set():
        what = f'was killed after call_timeout ({self._call_timeout:g} s)'
      else:
        what = 'ended during a call'
      worker.kill()  # Also if only its connection broke.
      raise worker.error(what) from None
    except KeyboardInterrupt:
      worker.kill()  # Else the next call would wait for this one.
      raise
    finally:
      timer.cancel()


def build_native_context(
    start_timeout: float = 60.0,
    call_timeout: float | None = None,
    log_dir: str | None = None,
    binary: str | None = None,
) -> NativeContext:
  """TFF's C++ runtime as a context for `tff.framework.set_default_context`.

  The worker starts with the first call, in which a failure to start shows.

  Args:
    start_timeout: Seconds that a worker may take to answer after its start.
    call_timeout: Seconds that one call may take before its worker is killed;
      `None` for no limit.
    log_dir: Where workers' logs go and stay; `None` for temporary files, kept
      only of workers that died.
    binary: The worker's program; `None` for the one that TFF brings.

  Returns:
    A `tff.framework.SyncContext`.
  """
  if not start_timeout > 0:
    raise ValueError(
        f'`start_timeout` must be positive; got {start_timeout!r}.'
    )
  if call_timeout is not None and not call_timeout > 0:
    raise ValueError(f'`call_timeout` must be positive; got {call_timeout!r}.')
  return NativeContext(start_timeout, call_timeout, log_dir, binary)
