"""Chooses where TFF computations run, by `use_runtime`.

There are three runtimes: this process, TFF's C++ worker on this machine, and
the machines of a Ray cluster. Importing this package chooses none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow_federated as tff

from fednest_tff.runtime import in_process
from fednest_tff.runtime.errors import WorkerError as WorkerError
from fednest_tff.structures import Value

RUNTIMES = ('in_process', 'native', 'ray')


def _refuse(name: str, runtimes: Sequence[str], **options: object) -> None:
  """Raises a `ValueError` if an option was given to another runtime."""
  for option, value in options.items():
    if value is not None and name not in runtimes:
      raise ValueError(
          f'`{option}` goes with the runtime {" or ".join(runtimes)} only.'
      )


def use_runtime(
    name: str = 'in_process',
    *,
    devices: Sequence[str] | None = None,
    unroll: int | None = None,
    compiled: bool = True,
    address: str | None = None,
    num_workers: int | None = None,
    cpus_per_worker: float | None = None,
    gpus_per_worker: float | None = None,
    num_shares: int | None = None,
    open_client: Callable[[str | int | bytes], Value] | None = None,
    call_timeout: float | None = None,
) -> tff.framework.SyncContext:
  """Makes a runtime TFF's default, for all computations from now on.

  Args:
    name: 'in_process' compiles a computation to one TensorFlow function and
      runs it in this process, on GPUs if there are any. 'native' runs it in
      TFF's own C++ worker. 'ray' runs the clients' part on workers of a Ray
      cluster, each with the in-process compiler, and the server's part here,
      with at most one communication round per computation.
    devices: For 'in_process': names such as ['GPU:0', 'GPU:1']. The clients of
      a cohort are divided among these devices. `None` means every GPU, or the
      CPU if there is none.
    unroll: For 'in_process' and 'ray': the largest cohort that is compiled
      client by client, which makes the fastest epochs. A larger one becomes a
      loop, which compiles in a third of the time; 0 makes every cohort a loop.
      `None` decides by the number of clients and the size of the computation.
    compiled: For 'in_process' and 'ray': `False` runs the graphs of a
      computation one after the other instead of compiling all of them to one
      function. The first epoch then starts at once, and every epoch takes
      several times as long: for short runs, and to find the operation that
      fails.
    address: For 'ray': 'auto' for the cluster of this machine, 'host:port' for
      that of another one, 'ray://host:port' through Ray's client server. `None`
      starts a cluster on this machine, which ends with this process; if this
      process is connected to one already, that one is used.
    num_workers: For 'ray': how many workers, each a process on a node; two if
      not given.
    cpus_per_worker: For 'ray': CPUs that Ray reserves for each worker, and the
      number of its threads; one if not given.
    gpus_per_worker: For 'ray': GPUs that Ray reserves for each worker, also a
      fraction; none if not given.
    num_shares: For 'ray': into how many shares the clients of a round are
      divided; one per worker if not given. With the same number of shares, any
      number of workers returns the same bytes.
    open_client: For 'ray': a function that runs on the nodes, from the name of
      a client, a string or an integer, to its dataset. Names may then stand in
      place of datasets. Every node must be able to open every client.
    call_timeout: For 'native' and 'ray': seconds that one call may take; an
      hour if not given.

  Returns:
    The context, which is now TFF's default.

  Raises:
    ValueError: If an argument is wrong; the message names the argument.
    WorkerError: If there is no cluster, or its workers do not start.
  """
  if name not in RUNTIMES:
    raise ValueError(f'`name` must be one of {RUNTIMES}; got {name!r}.')
  if unroll is not None and (
      isinstance(unroll, bool) or not isinstance(unroll, int) or unroll < 0
  ):
    raise ValueError(
        f'`unroll` must be a number of clients, 0 or more; got {unroll!r}.'
    )
  if not isinstance(compiled, bool):
    raise ValueError(f'`compiled` must be True or False; got {compiled!r}.')
  compiler = dict(unroll=unroll, compiled=None if compiled else False)
  cluster: dict[str, Any] = dict(
      address=address,
      num_workers=num_workers,
      cpus_per_worker=cpus_per_worker,
      gpus_per_worker=gpus_per_worker,
      num_shares=num_shares,
      open_client=open_client,
  )
  _refuse(name, ('in_process',), devices=devices)
  _refuse(name, ('in_process', 'ray'), **compiler)
  _refuse(name, ('ray',), **cluster)
  _refuse(name, ('native', 'ray'), call_timeout=call_timeout)
  if call_timeout is not None and not call_timeout > 0:
    raise ValueError(
        f'`call_timeout` must be positive; got {call_timeout!r}.'
    )
  if unroll is not None and not compiled:
    raise ValueError('`unroll` has no effect without `compiled`.')
  # The modules of the other two are imported only if needed.
  context: tff.framework.SyncContext
  if name == 'in_process':
    context = in_process.InProcessContext(
        in_process.InProcessRuntime(devices, unroll, compiled)
    )
  elif name == 'native':
    from fednest_tff.runtime import native

    context = native.build_native_context(
        call_timeout=call_timeout or native.CALL_TIMEOUT
    )
  else:
    from fednest_tff.runtime.distributed import context as ray_context
    from fednest_tff.runtime.distributed import pool

    given = {key: value for key, value in cluster.items() if value is not None}
    limits = pool.Limits()
    if call_timeout is not None:
      limits = limits._replace(call=call_timeout)
    context = ray_context.build_ray_context(
        **given, unroll=unroll, compiled=compiled, limits=limits
    )
  tff.framework.set_default_context(context)
  return context
