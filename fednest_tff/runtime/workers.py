"""Runs computations on several machines, with a TFF worker on each.

TFF splits a computation with one aggregation into three
(`tff.framework.MergeableCompForm`): *up to merge* does the clients' work and
aggregates over some of the clients, *merge* merges two such aggregates, and
*after merge* computes the result. Each worker runs the first one for its share
of the clients. The server, which is this process, runs the other two, and all
computations without clients.

The shares and the order of merging depend only on the number of workers, not on
which of them are alive or fast. If a worker is lost during a round, the result
is the same to the last bit.

TFF's own `MergeableCompExecutionContext` is not used: it runs one worker after
the other (its stubs block the event loop), merges in the order in which workers
finish, and waits for ever for a worker that is gone.

To start workers on this machine:

  python -m fednest_tff.runtime.workers --num=3

TFF's worker does not encrypt, does not authenticate, listens on all interfaces
and runs whatever it is sent. Run it behind a firewall, or on a machine whose
only open port is that of a TLS proxy that checks clients.
"""

from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import functools
import sys
import time

from absl import app, flags, logging
import grpc
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime import local_worker, native, shares
from fednest_tff.runtime import remote as remote_lib
from fednest_tff.structures import Value

_RETRY_AFTER = 30.0  # Seconds after which a lost worker is tried again.


class _Call:
  """One call of the context.

  Attributes:
    started: When it started, in seconds of `time.monotonic`.
    cancelled: Whether nobody waits for its result any more.
  """

  def __init__(self) -> None:
    self.started = time.monotonic()
    self.cancelled = False


def _compile(comp: tff.Computation) -> tff.framework.MergeableCompForm:
  """Splits a computation; raises a `ValueError` if it has several rounds."""
  try:
    return tff.backends.native.compile_to_mergeable_comp_form(comp)
  except ValueError as error:
    # Without the rest, in which TFF prints both aggregations.
    reason = str(error).partition('.')[0]
    raise ValueError(
        'The workers runtime takes one communication round per call, and this'
        f' computation has more: {reason}. fednest_tff.build_driver runs the'
        " rounds of this library's processes one by one."
    ) from None


class WorkersContext(tff.framework.SyncContext):
  """Runs computations on remote workers; see `build_workers_context`."""

  def __init__(
      self,
      workers: Sequence[remote_lib.RemoteWorker],
      server: tff.framework.SyncContext,
  ):
    self._workers = list(workers)
    self._server = server
    self._compile = functools.lru_cache(maxsize=128)(_compile)
    self._pool = concurrent.futures.ThreadPoolExecutor(len(self._workers))

  def close(self) -> None:
    """Closes all connections; the next call opens others."""
    for worker in self._workers:
      worker.close()

  def _candidates(
      self, part: int, call: _Call
  ) -> list[remote_lib.RemoteWorker]:
    """Lists the workers in the order in which to try them for a share."""
    first = part % len(self._workers)
    order = self._workers[first:] + self._workers[:first]

    def is_lost(worker: remote_lib.RemoteWorker) -> bool:
      lost_at = worker.lost_at
      return lost_at is not None and call.started - lost_at < _RETRY_AFTER

    # Lost workers come last. They are tried only if all others fail.
    return sorted(order, key=is_lost)

  def _run(
      self, comp: tff.Computation, arg: Value, part: int, call: _Call
  ) -> Value:
    """Runs a share, on another worker if the first one is lost."""
    reasons = []
    for worker in self._candidates(part, call):
      lost_at = worker.lost_at
      if lost_at is not None and lost_at > call.started:
        continue  # It was lost during this call, while it ran another share.
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

  def _run_all(
      self, comp: tff.Computation, args: Sequence[Value]
  ) -> list[Value]:
    """Runs `comp` for each of `args`, on all workers at the same time."""
    call = _Call()
    futures = [
        self._pool.submit(self._run, comp, arg, part, call)
        for part, arg in enumerate(args)
    ]
    try:
      concurrent.futures.wait(futures)
    except BaseException:  # Ctrl-C, for example.
      call.cancelled = True
      self.close()
      raise
    return [future.result() for future in futures]

  def invoke(self, comp: tff.Computation, arg: Value) -> Value:
    """Runs `comp`; raises `WorkerError` if no worker is left."""
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
    merged, *others = self._run_all(form.up_to_merge, parts)
    for other in others:
      merged = self._server.invoke(
          form.merge, tff.structure.Struct.unnamed(merged, other)
      )
    result_type = form.after_merge.type_signature.result
    if not shares.has_clients(result_type):
      # The server does the rest, without the clients' data.
      rest = shares.share(arg, parameter, 0, 0)
      return self._server.invoke(
          form.after_merge, tff.structure.Struct.unnamed(rest, merged)
      )
    if not structures.is_at_clients(result_type):
      raise ValueError(
          'The workers runtime cannot return values of clients together with'
          f' others; got a computation that returns {result_type}.'
      )
    results = self._run_all(
        form.after_merge,
        [tff.structure.Struct.unnamed(part, merged) for part in parts],
    )
    return results[0] if result_type.all_equal else sum(results, [])


def _check_address(address: object) -> None:
  host, _, port = str(address).rpartition(':')
  if not host or not port.isdigit() or not 0 < int(port) < 65536:
    raise ValueError(f"`workers` must be 'host:port' each; got {address!r}.")


def build_workers_context(
    workers: Sequence[str] | None,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    connect_timeout: float = 10.0,
    probe_interval: float = 5.0,
    call_timeout: float | None = None,
    channel_options: Sequence[tuple[str, str | int]] = (),
    server_context: tff.framework.SyncContext | None = None,
) -> WorkersContext:
  """Builds a context for `tff.framework.set_default_context` on workers.

  If a worker is lost, before a call or during it, other workers run its share.
  It is tried again after half a minute. If no worker is left, the call fails.

  Args:
    workers: The addresses, 'host:port' each.
    credentials: Credentials for TLS, such as from
      `grpc.ssl_channel_credentials`, if there is a TLS proxy in front of each
      worker; `None` for plain text.
    connect_timeout: Seconds within which a worker must answer at first.
    probe_interval: Seconds between two probes while a worker computes, and the
      longest that the answer to a probe may take. A worker that does not
      answer two probes in a row is lost.
    call_timeout: Seconds that one share may take; `None` for no limit.
    channel_options: More gRPC options, for example another TLS host name.
    server_context: A context for the server's work and for computations
      without clients; `None` for TFF's C++ runtime on this machine
      (`build_native_context`).

  Returns:
    A `tff.framework.SyncContext`.

  Raises:
    ValueError: If an address is wrong, or given twice.
  """
  if isinstance(workers, str) or not workers:
    raise ValueError(f'`workers` must be a list of host:port; got {workers!r}.')
  for address in workers:
    _check_address(address)
  if len(set(workers)) < len(workers):
    raise ValueError(f'`workers` must differ; got {list(workers)}.')
  compiler = remote_lib.cached_compiler()

  def connect(address: str) -> remote_lib.RemoteContext:
    channel = remote_lib.open_channel(address, credentials, channel_options)
    return remote_lib.RemoteContext(channel, compiler)

  limits = connect_timeout, probe_interval, call_timeout
  return WorkersContext(
      [
          remote_lib.RemoteWorker(address, connect, *limits)
          for address in workers
      ],
      server_context or native.build_native_context(),
  )


@contextlib.contextmanager
def local_workers(
    num: int,
    first_port: int = 0,
    log_dir: str | None = None,
    start_timeout: float = 60.0,
) -> Iterator[list[local_worker.LocalWorker]]:
  """Starts workers on this machine, for tests and for trying them out.

  Args:
    num: The number of workers.
    first_port: The port of the first worker. The others get the ports after
      it. 0 for any free ports.
    log_dir: A directory for the workers' logs; `None` for temporary files.
    start_timeout: Seconds that each worker may take to start.

  Yields:
    The `LocalWorker`s, each with an `address`. They end with the context.
  """
  started: list[local_worker.LocalWorker] = []
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


def _main(argv: Sequence[str]) -> None:
  """Starts workers and waits for a signal."""
  values = flags.FLAGS
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
  try:
    log_dir = values.log_dir or None  # A flag that absl defines.
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
  # Not at import, so that a program that imports this does not get the flags.
  flags.DEFINE_integer('num', 1, 'How many workers.', lower_bound=1)
  flags.DEFINE_integer(
      'port', 0, 'Port of the first; the others follow. 0 for free ports.'
  )
  app.run(_main)
