"""TFF's C++ worker as a process of ours, which ends with us.

The kernel ends it when this process ends, however that happens. Its output goes
to a log file, which errors name, so it holds no pipe of ours.
"""

from collections.abc import Callable
import concurrent.futures
import contextlib
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
import weakref

from fednest_tff.runtime import remote

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
      raise remote.WorkerError(
          f'There is no program {binary} to start as a worker.'
      )
    try:
      self._reserved = _reserve(port)
    except OSError as error:
      raise remote.WorkerError(f'Port {port} is not free: {error}.') from None
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

  def error(self, what: str) -> remote.WorkerError:
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
    return remote.WorkerError(
        f'The TFF worker (pid {self.pid}) {what}. Log: {self.log_file}.{last}'
    )

  def connect(self, timeout: float, compiler: Callable) -> remote.RemoteContext:
    """Waits until the worker answers.

    Args:
      timeout: How many seconds it may take.
      compiler: From `cached_compiler`.

    Returns:
      A context on the worker; `WorkerError` if it did not start.
    """
    # A proxy from the environment has no business on this machine.
    channel = remote.open_channel(
        self.address, None, [('grpc.enable_http_proxy', 0)]
    )
    connection = remote.RemoteContext(channel, compiler)
    deadline = time.monotonic() + timeout
    while not connection.answers(0.2, connecting=True):
      if self.is_running() and time.monotonic() < deadline:
        continue
      connection.close()
      self._reserved.close()
      error = self.error(
          f'did not answer within {timeout:g} s of its start'
          if self.is_running()
          else 'ended at its start'
      )
      self.kill()
      raise error
    self._reserved.close()
    return connection
