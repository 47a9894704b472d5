"""Several machines: the clients of a round spread over TFF's remote workers.

A computation with one aggregation is split by TFF into *up to merge* (what
clients do, and a partial aggregate), *merge* and *after merge*
(`tff.framework.MergeableCompForm`). Each worker runs the first part on its
share of the clients; the server, which is here, runs the rest, and everything
that has no clients. Shares and the order of merging depend on the number of
workers only, not on who is alive or fast: a round gives the same bytes whether
or not a worker was lost in it.

TFF's `MergeableCompExecutionContext` has no part in it, because it runs one
worker after the other (its stubs block the event loop), merges in the order of
completion, and waits for ever for a worker that is gone.

  python -m fednest_tff.runtime.workers --num=3

starts workers on this machine. TFF's worker speaks plain text, authenticates
nobody, listens on all interfaces and runs whatever it is sent: it belongs
behind a firewall, or on the loopback side of a TLS proxy that checks clients.
"""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import functools
import sys
import threading
import time
from typing import Any

from absl import app, flags, logging
import grpc
import tensorflow_federated as tff

from fednest_tff.runtime import local_worker, native, shares
from fednest_tff.runtime import remote as remote_lib

_MISSES = 2  # Unanswered probes in a row after which a worker counts as lost.
_RETRY_AFTER = 30.0  # Seconds after which a lost worker is asked again.


class _Call:
  """One call of the context.

  Attributes:
    started: When.
    cancelled: Whether nobody waits for it any more.
  """

  def __init__(self):
    self.started = time.monotonic()
    self.cancelled = False


class _Worker:
  """A worker at an address.

  Attributes:
    address: host:port.
    lost_at: When it was found lost, in monotonic seconds; `None` if it is not.
  """

  def __init__(
      self,
      address: str,
      connect: Callable[[str], remote_lib.RemoteContext],
      connect_timeout: float,
      probe_interval: float,
      call_timeout: float | None,
  ):
    self.address = address
    self.lost_at = None
    self._connect = connect
    self._connect_timeout = connect_timeout
    self._probe_interval = probe_interval
    self._call_timeout = call_timeout
    self._lock = threading.Lock()
    self._remote = None

  def close(self):
    with self._lock:
      remote, self._remote = self._remote, None
    if remote is not None:
      remote.close()

  def _connected(self) -> remote_lib.RemoteContext:
    with self._lock:
      if self._remote is None:
        remote = self._connect(self.address)
        if not remote.answers(self._connect_timeout):
          remote.close()
          raise remote_lib.WorkerLost('it does not answer')
        self._remote = remote
      if self.lost_at is not None:
        logging.warning('Worker %s is back.', self.address)
        self.lost_at = None
      return self._remote

  def _watch(self, remote: remote_lib.RemoteContext, finished: threading.Event):
    """Closes the connection when the worker does not answer during a call.

    A machine that vanishes closes no connection, and gRPC's own keepalive is
    more than the worker's server tolerates during a long call.
    """
    deadline = time.monotonic() + (self._call_timeout or float('inf'))
    misses = 0
    while not finished.wait(self._probe_interval):
      if remote.answers(self._probe_interval):
        misses = 0
      else:
        misses += 1
      if misses >= _MISSES or time.monotonic() > deadline:
        remote.close()
        return

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """The result of `comp`; `WorkerLost` if the worker is gone."""
    finished = threading.Event()
    remote = None
    try:
      remote = self._connected()
      threading.Thread(
          target=self._watch, args=(remote, finished), daemon=True
      ).start()
      return remote.invoke(comp, arg)
    except remote_lib.WorkerLost:
      if remote is self._remote:  # Else another share has closed it.
        self.close()
      self.lost_at = time.monotonic()
      raise
    finally:
      finished.set()


def _compile(comp: tff.Computation) -> tff.framework.MergeableCompForm:
  try:
    return tff.backends.native.compile_to_mergeable_comp_form(comp)
  except ValueError as error:
    reason = str(error).partition('.')[0]  # TFF prints both aggregates.
    raise ValueError(
        'The workers runtime takes one communication round per call, and this'
        f' computation has more: {reason}. fednest_tff.runtime.driver runs the'
        " rounds of this library's processes one by one."
    ) from None


class WorkersContext(tff.framework.SyncContext):
  """Remote workers as a TFF context; see `build_workers_context`."""

  def __init__(
      self, workers: Sequence[_Worker], server: tff.framework.SyncContext
  ):
    self._workers = list(workers)
    self._server = server
    self._compile = functools.lru_cache(maxsize=128)(_compile)
    self._pool = concurrent.futures.ThreadPoolExecutor(len(self._workers))

  def close(self):
    """Closes all connections; another call would open them again."""
    for worker in self._workers:
      worker.close()

  def _candidates(self, part: int, call: _Call) -> list[_Worker]:
    """The workers for a share of the clients, in the order to try them."""
    first = part % len(self._workers)
    order = self._workers[first:] + self._workers[:first]

    def is_lost(worker):
      lost_at = worker.lost_at
      return lost_at is not None and call.started - lost_at < _RETRY_AFTER

    # Those just lost come last: they are tried only if nobody else is there.
    return sorted(order, key=is_lost)

  def _run(self, comp: tff.Computation, arg: Any, part: int, call: _Call):
    """Runs `comp` on one of the workers."""
    reasons = []
    for worker in self._candidates(part, call):
      lost_at = worker.lost_at
      if lost_at is not None and lost_at > call.started:
        continue  # Another share has just found out.
      was_lost = lost_at is not None
      try:
        result = worker.invoke(comp, arg)
      except remote_lib.WorkerLost as error:
        if call.cancelled:
          raise
        reasons.append(f'{worker.address}: {error}')
        if not was_lost:
          logging.warning(
              'Worker %s is lost (%s). Its share of the round is run again on'
              ' another worker.', worker.address, error,
          )
        continue
      if reasons:
        logging.warning('Worker %s did the lost share.', worker.address)
      return result
    addresses = ', '.join(worker.address for worker in self._workers)
    raise remote_lib.WorkerError(
        f'None of the workers {addresses} answers. Last errors:'
        f' {"; ".join(reasons) or "see the log"}'
    )

  def _on_all(self, comp: tff.Computation, args: Sequence[Any]) -> list:
    """The results of `comp` for all `args`, in parallel."""
    call = _Call()
    futures = [
        self._pool.submit(self._run, comp, arg, part, call)
        for part, arg in enumerate(args)
    ]
    try:
      concurrent.futures.wait(futures)
    except BaseException:  # Ctrl-C: nobody waits for the workers any more.
      call.cancelled = True
      self.close()
      raise
    return [future.result() for future in futures]

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """The result of `comp`; `WorkerError` if no worker is left."""
    parameter = comp.type_signature.parameter
    if not shares.has_clients(parameter):
      return self._server.invoke(comp, arg)
    form = self._compile(comp)
    lists = shares.lists_at_clients(arg, parameter)
    num_clients = max(map(len, lists), default=0)
    num_parts = max(1, min(num_clients, len(self._workers)))
    parts = [
        shares.share(arg, parameter, k, num_parts) for k in range(num_parts)
    ]
    merged, *others = self._on_all(form.up_to_merge, parts)
    for other in others:
      merged = self._server.invoke(
          form.merge, tff.structure.Struct.unnamed(merged, other)
      )
    result_type = form.after_merge.type_signature.result
    if not shares.has_clients(result_type):
      # What is left is the server's, and needs no client's data.
      rest = shares.share(arg, parameter, 0, 0)
      return self._server.invoke(
          form.after_merge, tff.structure.Struct.unnamed(rest, merged)
      )
    if not shares.is_at_clients(result_type):
      raise ValueError(
          'The workers runtime cannot return values of clients together with'
          f' others; got a computation that returns {result_type}.'
      )
    results = self._on_all(
        form.after_merge,
        [tff.structure.Struct.unnamed(part, merged) for part in parts],
    )
    return results[0] if result_type.all_equal else sum(results, [])


def _check_address(address: Any):
  host, _, port = str(address).rpartition(':')
  if not host or not port.isdigit() or not 0 < int(port) < 65536:
    raise ValueError(f"`workers` must be 'host:port' each; got {address!r}.")


def build_workers_context(
    workers: Sequence[str],
    credentials: grpc.ChannelCredentials | None = None,
    *,
    connect_timeout: float = 10.0,
    probe_interval: float = 5.0,
    call_timeout: float | None = None,
    channel_options: Sequence[tuple[str, Any]] = (),
    server_context: tff.framework.SyncContext | None = None,
) -> WorkersContext:
  """Remote workers as a context for `tff.framework.set_default_context`.

  A worker that is lost, before or in the middle of a call, is left out, and the
  others do its share; it is asked again after half a minute. When none is left,
  the call fails.

  Args:
    workers: Addresses, 'host:port' each.
    credentials: For TLS, e.g. `grpc.ssl_channel_credentials(...)`; `None` for
      plain text. The workers need a TLS proxy in front of them.
    connect_timeout: Seconds within which a worker must answer at first.
    probe_interval: Seconds between probes while a worker computes, and within
      which it must answer them; it is lost if it misses two.
    call_timeout: Seconds that one share may take; `None` for no limit.
    channel_options: Further gRPC options, e.g. to override the TLS host name.
    server_context: What runs the server's part and all that has no clients;
      `None` for TFF's C++ runtime on this machine (`build_native_context`).

  Returns:
    A `tff.framework.SyncContext`.
  """
  if isinstance(workers, str) or not workers:
    raise ValueError(f'`workers` must be a list of host:port; got {workers!r}.')
  for address in workers:
    _check_address(address)
  if len(set(workers)) < len(workers):
    raise ValueError(f'`workers` must differ; got {list(workers)}.')
  compiler = remote_lib.cached_compiler()

  def connect(address):
    channel = remote_lib.open_channel(address, credentials, channel_options)
    return remote_lib.RemoteContext(channel, compiler)

  limits = connect_timeout, probe_interval, call_timeout
  return WorkersContext(
      [_Worker(address, connect, *limits) for address in workers],
      server_context or native.build_native_context(),
  )


@contextlib.contextmanager
def local_workers(
    num: int,
    first_port: int = 0,
    log_dir: str | None = None,
    start_timeout: float = 60.0,
) -> Iterator[list[local_worker.LocalWorker]]:
  """Workers on this machine, for tests and for trying it out.

  Args:
    num: How many.
    first_port: Where the first listens, the others at the ports after it; 0
      for free ports.
    log_dir: Where their logs go and stay; `None` for temporary files.
    start_timeout: Seconds that each may take to start.

  Yields:
    The `LocalWorker`s, each with an `address`.
  """
  started = []
  try:
    for k in range(num):
      port = first_port + k if first_port else 0
      started.append(local_worker.LocalWorker(port, log_dir))
    for worker in started:
      worker.connect(start_timeout, remote_lib.cached_compiler()).close()
    yield started
  finally:
    for worker in started:
      worker.stop()


def _main(argv: Sequence[str]):
  """Starts workers and waits for a signal."""
  values = flags.FLAGS
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
  try:
    log_dir = values.log_dir or None  # absl's own flag.
    with local_workers(values.num, values.port, log_dir) as started:
      for worker in started:
        print(worker.address, flush=True)
      print(
          'These workers speak plain text on all interfaces and run whatever'
          ' they are sent: keep their ports behind a firewall. Ctrl-C ends'
          ' them.', file=sys.stderr, flush=True,
      )
      while all(worker.is_running() for worker in started):
        time.sleep(0.5)
      ended = next(w for w in started if not w.is_running())
      raise ended.error('has ended')
  except remote_lib.WorkerError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
  except KeyboardInterrupt:
    pass


if __name__ == '__main__':
  # Not at import: a program's flags are its own.
  flags.DEFINE_integer('num', 1, 'How many workers.', lower_bound=1)
  flags.DEFINE_integer(
      'port', 0, 'Port of the first; the others follow. 0 for free ports.'
  )
  app.run(_main)
