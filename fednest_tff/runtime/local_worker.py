"""Starts TFF's C++ worker in another process, and ends it with this one.

When this process ends, in whatever way, the kernel ends the worker. The worker
writes to a log file, which errors name, and inherits no pipe.
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
from typing import TypeAlias
import weakref

from fednest_tff.runtime import errors, remote

# Asks the kernel for SIGKILL when the parent ends (PR_SET_PDEATHSIG is 1), then
# becomes the worker. A `preexec_fn` could do that too, but would run in a fork
# of this process, which can hang because of TensorFlow's and gRPC's threads.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0):
  sys.exit('prctl(PR_SET_PDEATHSIG) failed')
if os.getppid() == int(parent):  # Otherwise the parent has ended already.
  try:
    os.execv(command[0], command)
  except OSError as error:
    sys.exit(f'{command[0]}: {error.strerror}')
"""


_Process: TypeAlias = subprocess.Popen[bytes]
# Requests for processes: where the process goes, and how to start it.
_Requests: TypeAlias = queue.SimpleQueue[
    tuple[concurrent.futures.Future[_Process], Callable[[], _Process]]
]


class _Spawner:
  """Starts processes from a thread that lives as long as this process.

  For the kernel, the parent of a process is the *thread* that started it. If
  just any thread started a worker, the worker would end with that thread.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._requests: _Requests = queue.SimpleQueue()
    self._pid: int | None = None

  def _serve(self, requests: _Requests) -> None:
    while True:
      future, start = requests.get()
      try:
        future.set_result(start())
      except BaseException as error:  # The thread must not end.
        future.set_exception(error)

  def start(self, start: Callable[[], _Process]) -> _Process:
    """Calls `start`, which starts a process, and returns the process."""
    with self._lock:
      if self._pid != os.getpid():  # The first call, also after a fork.
        self._pid, self._requests = os.getpid(), queue.SimpleQueue()
        threading.Thread(
            target=self._serve, args=(self._requests,), daemon=True
        ).start()
    future: concurrent.futures.Future[_Process] = concurrent.futures.Future()
    self._requests.put((future, start))
    return future.result()


_spawner = _Spawner()


def _default_binary() -> str:
  """Finds the worker that comes with TFF, without importing TFF."""
  package = importlib.util.find_spec('tensorflow_federated')
  assert package is not None and package.submodule_search_locations
  return os.path.join(
      package.submodule_search_locations[0], 'data', 'worker_binary'
  )


def _reserve() -> socket.socket:
  """Opens a socket that keeps a free port for the worker.

  A gRPC server can use a port that another gRPC server uses (SO_REUSEPORT), and
  then gets some of its calls. The socket keeps others from the port until the
  worker uses it.

  Returns:
    The socket; close it when the worker listens.
  """
  reserved = socket.socket()
  reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
  reserved.bind(('', 0))
  return reserved


def _end(
    process: _Process, owner: int, log_file: str, keep_log: bool
) -> None:
  """Ends a worker, and removes its log if it was still running."""
  if os.getpid() != owner:
    return  # This is a fork of the worker's parent.
  was_running = process.poll() is None
  process.kill()
  process.wait()
  if was_running and not keep_log and os.path.exists(log_file):
    os.remove(log_file)


class LocalWorker:
  """A worker process on this machine.

  The process ends with this object, or when `stop` is called.

  Attributes:
    address: host:port, for use on this machine.
    log_file: The log of the worker. It is removed if the worker still runs when
      it is stopped and `log_dir` was not given.
    pid: The process id.
    stop: A function that ends the process.
  """

  def __init__(
      self,
      log_dir: str | None = None,
      binary: str | None = None,
  ):
    """Starts the process; `connect` waits until the worker answers.

    Args:
      log_dir: A directory for the log; `None` for a temporary file.
      binary: The worker's program; `None` for the one that comes with TFF.

    Raises:
      WorkerError: If the program does not exist.
    """
    binary = os.path.abspath(binary or _default_binary())
    if not os.access(binary, os.X_OK) or os.path.isdir(binary):
      raise errors.WorkerError(
          f'There is no program {binary} to start as a worker.'
      )
    self._reserved = _reserve()
    port = self._reserved.getsockname()[1]
    if log_dir is not None:
      os.makedirs(log_dir, exist_ok=True)
    log, self.log_file = tempfile.mkstemp('.log', 'tff_worker_', log_dir)
    command = [
        *(sys.executable, '-I', '-S', '-c', _LAUNCHER),
        *(str(os.getpid()), binary, f'--port={port}'),
    ]
    try:
      self._process = _spawner.start(
          lambda: subprocess.Popen(
              command,
              stdin=subprocess.DEVNULL,
              stdout=log,
              stderr=log,
              start_new_session=True,  # Ctrl-C does not reach the worker.
          )
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
    """Tells whether the process has not ended."""
    return self._process.poll() is None

  def kill(self) -> None:
    """Ends the process but keeps its log, which an error can then name."""
    self._process.kill()
    self._process.wait()

  def error(self, what: str) -> errors.WorkerError:
    """Makes an error of one line.

    Args:
      what: What happened to the worker, such as 'has ended'.

    Returns:
      An error that says what happened, how the process ended, and where the log
      is.
    """
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
    return errors.WorkerError(
        f'The TFF worker (pid {self.pid}) {what}. Log: {self.log_file}.{last}'
    )

  def connect(
      self, timeout: float, compiler: remote.Compiler
  ) -> remote.RemoteContext:
    """Waits until the worker answers.

    Args:
      timeout: How many seconds that may take.
      compiler: From `remote.cached_compiler`.

    Returns:
      A connection to the worker.

    Raises:
      WorkerError: If the worker did not start in time.
    """
    channel = remote.open_channel(self.address)
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
