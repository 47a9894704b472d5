"""Runs computations on the workers of a Ray cluster.

TFF splits a computation with one aggregation into three
(`tff.framework.MergeableCompForm`): *up to merge* does the clients' work and
aggregates over some of the clients, *merge* merges two such aggregates, and
*after merge* computes the result. Workers run the first one, each for shares of
the clients, with the in-process compiler. This process is the server: it runs
the other two, and all computations without clients.

The shares and the order of merging depend on the number of shares only, not on
the number of workers, nor on which of them is lost or fast.
"""

from collections.abc import Sequence
import functools
import threading

import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime import in_process, shares
from fednest_tff.runtime.compiler import placed
from fednest_tff.runtime.distributed import client_data, messages
from fednest_tff.runtime.distributed import cluster as cluster_lib
from fednest_tff.runtime.distributed import pool as pool_lib
from fednest_tff.runtime.distributed import store as store_lib
from fednest_tff.runtime.distributed.cluster import Handle, Reference
from fednest_tff.runtime.distributed.pool import Limits
from fednest_tff.runtime.distributed.worker import OpenClient
from fednest_tff.structures import Value

_DEFAULT_LIMITS = Limits()


def _compile(comp: tff.Computation) -> tff.framework.MergeableCompForm:
  """Splits a computation; raises a `ValueError` if it has several rounds."""
  try:
    return tff.backends.native.compile_to_mergeable_comp_form(comp)
  except ValueError as error:
    # Without the rest, in which TFF prints both aggregations.
    reason = str(error).partition('.')[0]
    raise ValueError(
        "The runtime 'ray' takes one communication round per call, and this"
        f' computation has more: {reason}. fednest_tff.build_driver runs the'
        " rounds of this library's processes one by one."
    ) from None


class RayContext(tff.framework.SyncContext):
  """Runs computations on a Ray cluster; see `build_ray_context`."""

  def __init__(
      self,
      pool: pool_lib.Pool,
      store: store_lib.Store,
      server: tff.framework.SyncContext,
      num_shares: int,
  ):
    self._pool = pool
    self._store = store
    self._server = server
    self._num_shares = num_shares
    self._compile = functools.lru_cache(maxsize=128)(_compile)
    self._counts: dict[client_data.ClientId, int] = {}
    self._lock = threading.RLock()

  @property
  def traffic(self) -> store_lib.Traffic:
    """What was sent and received since the start."""
    return self._store.traffic

  @property
  def is_closed(self) -> bool:
    """Tells whether the workers have been ended."""
    return self._pool.is_closed

  def close(self) -> None:
    """Ends the workers, and the cluster if it was started here."""
    self._store.clear()
    self._pool.close()

  def pids(self) -> list[int]:
    """The process ids of the workers, each on its node."""
    return self._pool.pids()

  def count_examples(self, clients: Sequence[Value]) -> int:
    """Counts the examples of clients, also of those given by their names."""
    new = [
        client
        for client in clients
        if client_data.is_client_id(client) and client not in self._counts
    ]
    if new:
      questions = [lambda worker: worker.count_examples.remote(new)]
      (found,) = self._pool.supervise(lambda: self._pool.ask(questions))
      self._counts.update(zip(new, found, strict=True))
    return sum(
        self._counts[client] if client_data.is_client_id(client)
        else shares.count_elements(client)
        for client in clients
    )

  def _run_shares(
      self, comp: tff.Computation, arg: Value, num_shares: int
  ) -> list[Value]:
    """Runs `comp` for each share of the clients; returns all results."""
    pairs = structures.typed_leaves(arg, comp.type_signature.parameter)
    fixed: list[Value] = []
    of_clients: list[list[Value] | None] = []
    for value, value_type in pairs:
      sent = messages.encode(value, value_type, self._store.put_sequence)
      is_cut = shares.is_per_client(value_type)
      fixed.append(None if is_cut else sent)
      of_clients.append(sent if is_cut else None)
    stored = self._store.put_computation(comp)
    message = self._store.put_message(fixed, messages.num_bytes(of_clients))

    def ask(share: int, worker: Handle) -> Reference:
      own = [
          None if column is None else shares.cut(column, share, num_shares)
          for column in of_clients
      ]
      return worker.run.remote(stored, message, own)

    answers = self._pool.ask(
        [functools.partial(ask, share) for share in range(num_shares)]
    )
    self._store.count_results(answers)
    result_type = comp.type_signature.result
    return [
        messages.decode(answer[0], result_type, client_data.to_dataset)
        for answer in answers
    ]

  def invoke(self, comp: tff.Computation, arg: Value) -> Value:
    """Runs `comp`; raises `WorkerError` if no worker is left."""
    parameter = comp.type_signature.parameter
    if not shares.has_clients(parameter):
      return self._server.invoke(comp, arg)
    form = self._compile(comp)
    result_type = form.after_merge.type_signature.result
    is_at_clients = shares.has_clients(result_type)
    if is_at_clients and not structures.is_at_clients(result_type):
      raise ValueError(
          "The runtime 'ray' cannot return values of clients together with"
          f' others; got a computation that returns {result_type}.'
      )
    size = placed.cohort_size(parameter, arg) or 0
    num_shares = max(1, min(size, self._num_shares))
    with self._lock:
      merged, *others = self._pool.supervise(
          lambda: self._run_shares(form.up_to_merge, arg, num_shares)
      )
      for other in others:
        merged = self._server.invoke(
            form.merge, tff.structure.Struct.unnamed(merged, other)
        )
      if not is_at_clients:
        # The server does the rest, without the clients' data.
        rest = shares.without_clients(arg, parameter)
        return self._server.invoke(
            form.after_merge, tff.structure.Struct.unnamed(rest, merged)
        )
      both = tff.structure.Struct.unnamed(arg, merged)
      results = self._pool.supervise(
          lambda: self._run_shares(form.after_merge, both, num_shares)
      )
    result = results[0] if result_type.all_equal else sum(results, [])
    return tff.types.type_to_py_container(result, result_type)


def _check(least: float, **numbers: float | None) -> None:
  for name, number in numbers.items():
    if number is not None and not number >= least:
      raise ValueError(f'`{name}` must be at least {least}; got {number!r}.')


def build_ray_context(
    address: str | None = None,
    num_workers: int = 2,
    *,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    num_shares: int | None = None,
    open_client: OpenClient | None = None,
    unroll: int | None = None,
    compiled: bool = True,
    limits: Limits = _DEFAULT_LIMITS,
) -> RayContext:
  """Builds a context for `tff.framework.set_default_context` on Ray.

  Args:
    address: 'auto' for the Ray cluster of this machine, 'host:port' for that of
      another one, 'ray://host:port' through Ray's client server. `None` starts
      a cluster on this machine and ends it with the context; if this process
      is connected to one already, that one is used.
    num_workers: How many workers, each a process on a node.
    cpus_per_worker: CPUs that Ray reserves for each of them, and the number of
      its threads.
    gpus_per_worker: GPUs that Ray reserves for each of them; also a fraction.
    num_shares: Into how many shares the clients of a round are divided; `None`
      for one per worker. With the same number of shares, any number of workers
      returns the same bytes.
    open_client: A function that runs on the nodes, from the name of a client,
      a string or an integer, to its dataset. Names may then stand in place of
      datasets. Every node must be able to open every client.
    unroll: As in the in-process runtime, for the workers.
    compiled: Likewise, also for the server.
    limits: How long things may take.

  Returns:
    A `tff.framework.SyncContext`.

  Raises:
    ValueError: If an argument is wrong.
    WorkerError: If there is no cluster, or its workers do not start.
  """
  _check(1, num_workers=num_workers, num_shares=num_shares)
  _check(0, cpus_per_worker=cpus_per_worker, gpus_per_worker=gpus_per_worker)
  server = in_process.InProcessContext(
      in_process.InProcessRuntime(devices=['CPU:0'], compiled=compiled)
  )
  cluster = cluster_lib.Cluster(
      address, num_workers * cpus_per_worker, num_workers * gpus_per_worker
  )
  devices = None if gpus_per_worker else ['CPU:0']
  num_threads = max(1, int(cpus_per_worker))
  try:
    pool = pool_lib.start_pool(
        cluster,
        num_workers,
        cpus_per_worker,
        gpus_per_worker,
        (num_threads, devices, unroll, compiled, open_client),
        limits,
    )
  except BaseException:
    cluster.close()
    raise
  store = store_lib.Store(cluster.ray)
  return RayContext(pool, store, server, num_shares or num_workers)
