"""Chooses where TFF computations run, by `use_runtime`.

There are three runtimes: this process, TFF's C++ worker on this machine, and
several such workers on other machines. Importing this package chooses none.
"""

from collections.abc import Sequence

import grpc
import tensorflow_federated as tff

from fednest_tff.runtime import in_process

RUNTIMES = ('in_process', 'native', 'workers')


def use_runtime(
    name: str = 'in_process',
    *,
    devices: Sequence[str] | None = None,
    unroll: int | None = None,
    workers: Sequence[str] | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> tff.framework.SyncContext:
  """Makes a runtime TFF's default, for all computations from now on.

  Args:
    name: 'in_process' compiles a computation to one TensorFlow function and
      runs it in this process, on GPUs if there are any. 'native' runs it in
      TFF's own C++ worker. 'workers' runs it on several such workers, with at
      most one communication round per computation.
    devices: For 'in_process': names such as ['GPU:0', 'GPU:1']. The clients of
      a cohort are divided among these devices. `None` means every GPU, or the
      CPU if there is none.
    unroll: For 'in_process': the largest cohort that is compiled client by
      client, which makes the fastest epochs. A larger one becomes a loop, which
      compiles in a third of the time; 0 makes every cohort a loop. `None`
      decides by the number of clients and the size of the computation.
    workers: For 'workers': the addresses, ['host:port', ...].
    credentials: For 'workers': TLS credentials; `None` for plain text, which
      is safe only behind a firewall.

  Returns:
    The context, which is now TFF's default.

  Raises:
    ValueError: If an argument is wrong; the message names the argument.
  """
  if name not in RUNTIMES:
    raise ValueError(f'`name` must be one of {RUNTIMES}; got {name!r}.')
  if (devices is not None or unroll is not None) and name != 'in_process':
    raise ValueError(
        "`devices` and `unroll` go with the runtime 'in_process' only."
    )
  if (workers is not None or credentials is not None) and name != 'workers':
    raise ValueError(
        "`workers` and `credentials` go with the runtime 'workers' only."
    )
  # The modules of the other two are imported only if needed. One of them is
  # also a program, which must not be imported before it runs.
  context: tff.framework.SyncContext
  if name == 'in_process':
    context = in_process.InProcessContext(
        in_process.InProcessRuntime(devices, unroll)
    )
  elif name == 'native':
    from fednest_tff.runtime import native

    context = native.build_native_context()
  else:
    from fednest_tff.runtime import workers as workers_lib

    context = workers_lib.build_workers_context(
        workers,
        credentials,
        server_context=in_process.InProcessContext(
            in_process.InProcessRuntime(['CPU:0'])
        ),
    )
  tff.framework.set_default_context(context)
  return context
