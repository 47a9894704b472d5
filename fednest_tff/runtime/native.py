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

import threading
from typing import Any

from absl import logging
import tensorflow_federated as tff

from fednest_tff.runtime import local_worker, remote


class NativeContext(tff.framework.SyncContext):
  """TFF's C++ runtime on this machine; see `build_native_context`.

  Attributes:
    worker: The present `LocalWorker`; `None` before the first call.
  """

  def __init__(self, start_timeout, call_timeout, log_dir, binary):
    self._start_timeout = start_timeout
    self._call_timeout = call_timeout
    self._options = dict(log_dir=log_dir, binary=binary)
    self._compiler = remote.cached_compiler()
    self._lock = threading.Lock()
    self.worker = self._remote = None

  def close(self):
    """Ends the worker; another call would start a new one."""
    if self.worker is not None:
      self._remote.close()
      self.worker.stop()
      self.worker = self._remote = None

  def _running(self) -> tuple[local_worker.LocalWorker, remote.RemoteContext]:
    with self._lock:
      if self.worker is not None and not self.worker.is_running():
        logging.warning('%s Starting another.', self.worker.error('has ended'))
        self.close()
      if self.worker is None:
        worker = local_worker.LocalWorker(**self._options)
        self._remote = worker.connect(self._start_timeout, self._compiler)
        self.worker = worker
      return self.worker, self._remote

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """The result of `comp`; `WorkerError` if the worker died under it."""
    worker, connection = self._running()
    expired = threading.Event()

    def expire():
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
