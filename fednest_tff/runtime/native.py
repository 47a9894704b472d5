"""Runs computations in TFF's own C++ worker, on this machine.

TFF's worker is a server in another process. TFF itself starts it without a time
limit, lets it inherit the standard streams, repeats a call for ever if the
worker is gone, and does not end the worker when Python ends. Here the worker

- has limited time to start, and if it fails to, a one-line error says why;
- ends when this process ends, in whatever way, because the kernel ends it;
- writes to a log file, which errors name, and inherits no pipe;
- makes the current call fail if it dies, or if the call takes too long, and the
  next call starts another.

The worker listens on all interfaces, does not authenticate, and runs whatever
it is sent. Use it only where nobody else can reach the machine's ports.
"""

import threading

from absl import logging
import tensorflow_federated as tff

from fednest_tff.runtime import local_worker, remote
from fednest_tff.structures import Value

CALL_TIMEOUT = 3600.0


class NativeContext(tff.framework.SyncContext):
  """TFF's C++ runtime on this machine; see `build_native_context`.

  Attributes:
    worker: The current `LocalWorker`; `None` before the first call.
  """

  def __init__(
      self,
      start_timeout: float,
      call_timeout: float | None,
      log_dir: str | None,
      binary: str | None,
  ):
    self._start_timeout = start_timeout
    self._call_timeout = call_timeout
    self._log_dir = log_dir
    self._binary = binary
    self._compiler = remote.cached_compiler()
    self._lock = threading.Lock()
    self.worker: local_worker.LocalWorker | None = None
    self._remote: remote.RemoteContext | None = None

  def close(self) -> None:
    """Ends the worker; the next call starts another."""
    if self._remote is not None:
      self._remote.close()
    if self.worker is not None:
      self.worker.stop()
    self.worker = self._remote = None

  def _running(self) -> tuple[local_worker.LocalWorker, remote.RemoteContext]:
    """Returns a worker that runs and the connection to it."""
    with self._lock:
      if self.worker is not None and not self.worker.is_running():
        logging.warning('%s Starting another.', self.worker.error('has ended'))
        self.close()
      if self.worker is None or self._remote is None:
        worker = local_worker.LocalWorker(
            log_dir=self._log_dir, binary=self._binary
        )
        self._remote = worker.connect(self._start_timeout, self._compiler)
        self.worker = worker
      return self.worker, self._remote

  def invoke(self, comp: tff.Computation, arg: Value) -> Value:
    """Runs `comp`; raises `WorkerError` if the worker dies during it."""
    worker, connection = self._running()
    expired = threading.Event()

    def expire() -> None:
      expired.set()
      worker.kill()

    timer = threading.Timer(self._call_timeout or 0, expire)
    timer.daemon = True
    if self._call_timeout is not None:
      timer.start()
    try:
      return connection.invoke(comp, arg)
    except remote.WorkerLost:
      if expired.is_set():
        what = f'was killed after call_timeout ({self._call_timeout:g} s)'
      else:
        what = 'ended during a call'
      worker.kill()  # It may be alive, if only the connection broke.
      raise worker.error(what) from None
    except KeyboardInterrupt:
      worker.kill()  # Otherwise the next call would wait for this one.
      raise
    finally:
      timer.cancel()


def build_native_context(
    start_timeout: float = 60.0,
    call_timeout: float | None = CALL_TIMEOUT,
    log_dir: str | None = None,
    binary: str | None = None,
) -> NativeContext:
  """Builds a context for `tff.framework.set_default_context` on a C++ worker.

  The first call starts the worker. If the start fails, that call fails.

  Args:
    start_timeout: Seconds within which a new worker must answer.
    call_timeout: Seconds that one call may take; then its worker is killed.
      `None` for no limit.
    log_dir: A directory for the workers' logs; `None` for temporary files,
      which are removed unless the worker died.
    binary: The worker's program; `None` for the one that comes with TFF.

  Returns:
    A `tff.framework.SyncContext`.

  Raises:
    ValueError: If a time is not positive.
  """
  if not start_timeout > 0:
    raise ValueError(
        f'`start_timeout` must be positive; got {start_timeout!r}.'
    )
  if call_timeout is not None and not call_timeout > 0:
    raise ValueError(f'`call_timeout` must be positive; got {call_timeout!r}.')
  return NativeContext(start_timeout, call_timeout, log_dir, binary)
