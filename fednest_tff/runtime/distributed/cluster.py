"""Connects to a Ray cluster, or starts one on this machine and ends it.

A cluster that is started here listens on 127.0.0.1 only and asks for a token
that nobody else knows. Its files are in a private directory, which is removed
with it. It ends with this process, in whatever way that ends.
"""

from collections.abc import Callable
import concurrent.futures
import logging
import os
import shutil
import socket
import tempfile
import threading
from typing import Any, TypeAlias
import weakref

from fednest_tff.runtime import errors
from fednest_tff.runtime.distributed import starting
from fednest_tff.structures import Value

# The module `ray`, which is an optional dependency, its handle of a worker, and
# its reference to a value.
Ray: TypeAlias = Any
Handle: TypeAlias = Any
Reference: TypeAlias = Any

# Ray reads these when it is imported.
_QUIET = {
    # Otherwise Ray reports its use to its makers.
    'RAY_USAGE_STATS_ENABLED': '0',
    # Otherwise a driver prints what happens to its workers, for pages.
    'RAY_DEDUP_LOGS_SKIP_REGEX': '.*',
}
_OBJECT_STORE_BYTES = 2**30
_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 1.0
_SHUTDOWN_SECONDS = 15.0


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's message that says something."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return lines[0] if lines else type(error).__name__


def last_line(error: BaseException) -> str:
  """Returns the last line of an error's message, the cause in a traceback."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return lines[-1] if lines else type(error).__name__


def import_ray() -> Ray:
  """Imports Ray; raises a `ValueError` if it is not installed."""
  for name, value in _QUIET.items():
    os.environ.setdefault(name, value)
  try:
    import ray
  except ImportError as error:
    if error.name != 'ray':
      raise
    raise ValueError(
        "The runtime 'ray' needs Ray, which is not installed: pip install"
        " 'fednest_tff[ray]'."
    ) from None
  return ray


def _reach(host: str, port: int, timeout: float) -> str | None:
  """Tries to connect; returns why it does not work, or `None`."""
  try:
    socket.create_connection((host, port), timeout).close()
  except OSError as error:
    return error.strerror or str(error)
  return None


def _parse(address: str) -> tuple[str, int] | None:
  """Splits '[ray://]host:port'; returns `None` for 'auto'."""
  if address == 'auto':
    return None
  host, _, port = address.removeprefix('ray://').rpartition(':')
  if not host or not port.isdigit() or not 0 < int(port) < 65536:
    raise ValueError(
        "`address` must be 'auto', 'host:port', 'ray://host:port', or `None`"
        f' for a cluster on this machine; got {address!r}.'
    )
  return host.strip('[]'), int(port)


def _remove(directory: str, owner: int) -> None:
  if os.getpid() == owner:
    shutil.rmtree(directory, ignore_errors=True)


def _shut_down(ray: Ray, owner: int) -> None:
  """Ends the connection; gives up if Ray does not come back from it."""
  if os.getpid() == owner:  # Otherwise this is a fork.
    _Thread(ray.shutdown).wait(_SHUTDOWN_SECONDS)


class _Thread:
  """A function that runs in a thread, which does not keep Python from ending.

  Attributes:
    result: A function that returns what the function returned, or raises what
      it raised.
  """

  def __init__(self, function: Callable[[], Value]):
    self._future: concurrent.futures.Future[Value] = (
        concurrent.futures.Future()
    )
    self.result = self._future.result
    threading.Thread(target=self._run, args=(function,), daemon=True).start()

  def _run(self, function: Callable[[], Value]) -> None:
    try:
      self._future.set_result(function())
    except BaseException as error:  # It is raised where the result is wanted.
      self._future.set_exception(error)

  def wait(self, timeout: float) -> bool:
    """Tells whether it ended within `timeout` seconds."""
    done, _ = concurrent.futures.wait([self._future], timeout)
    return bool(done)


class Cluster:
  """A connection of this process to a Ray cluster.

  Attributes:
    ray: The module `ray`.
    name: The cluster, for messages.
    is_local: Whether it was started here.
  """

  def __init__(
      self, address: str | None = None, num_cpus: float = 1, num_gpus: float = 0
  ):
    """Connects to a cluster or starts one.

    Args:
      address: 'auto' for the cluster of this machine, 'host:port' for that of
        another, 'ray://host:port' through Ray's client server; `None` to start
        one, or to use the one that this process is connected to.
      num_cpus: How many CPUs a cluster that is started here has for workers.
        It may be more than the machine has: they are only counted.
      num_gpus: How many GPUs it must have.

    Raises:
      ValueError: If the address is malformed, Ray is not installed, or there
        are not enough GPUs.
      WorkerError: If there is no cluster, or it refuses.
    """
    parsed = None if address is None else _parse(address)
    self.ray = import_ray()
    self.is_local = False
    self._finish: list[Callable[[], object]] = []
    if self.ray.is_initialized():
      if address is not None:
        raise ValueError(
            'This process is connected to a Ray cluster already: leave out'
            f' `address`; got {address!r}.'
        )
      self.name = 'the Ray cluster of this process'
    elif address is None:
      self.name = 'the local Ray cluster'
      self._start(num_cpus, num_gpus)
    else:
      self.name = f'the Ray cluster at {address}'
      if parsed is not None:
        reason = _reach(*parsed, _CONNECT_SECONDS)
        if reason:
          raise errors.WorkerError(f'{self.title} is not there: {reason}.')
      self._connect(address=address)
    self._services = self._find_services()

  @property
  def title(self) -> str:
    """The name, at the beginning of a sentence."""
    return self.name[0].upper() + self.name[1:]

  def _connect(self, **options: object) -> None:
    """Connects this process, until `close`."""
    logging.getLogger('ray').setLevel(logging.ERROR)
    try:
      self.ray.init(
          log_to_driver=False,
          logging_level='ERROR',
          configure_logging=False,
          **options,
      )
    except Exception as error:  # Ray raises all sorts, also this one itself.
      self.ray.shutdown()
      raise errors.WorkerError(
          f'Cannot connect to {self.name}: {first_line(error)}'
      ) from error
    self._finish.append(
        weakref.finalize(self, _shut_down, self.ray, os.getpid())
    )

  def _start(self, num_cpus: float, num_gpus: float) -> None:
    """Starts a cluster on this machine."""
    directory = tempfile.mkdtemp(prefix='fednest_ray_')
    removal = weakref.finalize(self, _remove, directory, os.getpid())
    try:
      with (
          starting.only_on_this_machine(self.ray),
          starting.patient(self.ray),
          starting.no_half_cluster(),
      ):
        self._connect(
            address='local',
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=directory,
        )
    except BaseException:
      removal()
      raise
    self._finish.append(removal)
    self.is_local = True
    found = self.ray.cluster_resources().get('GPU', 0)
    if found < num_gpus:
      self.close()
      raise ValueError(
          f'`gpus_per_worker` asks for {num_gpus:g} GPUs in all; this machine'
          f' has {found:g}.'
      )

  def _find_services(self) -> list[tuple[str, int]]:
    """Finds the services without which this process cannot work.

    Returns:
      Host and port of the cluster's control service, and of the service on this
      node; nothing if this process talks to Ray's client server instead.
    """
    if self.ray.util.client.ray.is_connected():
      return []
    about = self.ray.get_runtime_context()
    host, _, port = about.gcs_address.rpartition(':')
    return [(host.strip('[]'), int(port))] + [
        (node['NodeManagerAddress'], int(node['NodeManagerPort']))
        for node in self.ray.nodes()
        if node['NodeID'] == about.get_node_id()
    ]

  @property
  def is_open(self) -> bool:
    """Tells whether this process is still connected."""
    return self.ray.is_initialized()

  def check(self) -> None:
    """Raises a `WorkerError` if the cluster is gone.

    Ray itself waits for a minute and then ends this process.
    """
    if not self.is_open:
      raise errors.WorkerError(f'{self.title} is gone: it was shut down.')
    for host, port in self._services:
      reason = _reach(host, port, _CONNECT_SECONDS)
      if reason:
        raise errors.WorkerError(f'{self.title} is gone: {reason}.')

  def supervise(
      self, function: Callable[[], Value], cancel: Callable[[], None]
  ) -> Value:
    """Runs a function that uses Ray, unless the cluster is gone.

    Any call of Ray may hang if the cluster is gone, so that the function runs
    in another thread.

    Args:
      function: The function.
      cancel: Called if the result is not wanted any more.

    Returns:
      The function's result.

    Raises:
      WorkerError: If the cluster is gone.
    """
    self.check()
    thread = _Thread(function)
    try:
      while not thread.wait(_POLL_SECONDS):
        self.check()
    except BaseException:  # Ctrl-C, for example.
      cancel()
      raise
    try:
      return thread.result()
    except SystemExit:  # Ray wants this process to end.
      raise errors.WorkerError(f'{self.title} is gone.') from None

  def resources(self) -> dict[str, float]:
    """Counts the CPUs and GPUs of the cluster."""
    found = self.ray.cluster_resources()
    return {kind: found.get(kind, 0.0) for kind in ('CPU', 'GPU')}

  def close(self) -> None:
    """Ends the connection, and the cluster if it was started here."""
    for finish in self._finish:
      finish()


