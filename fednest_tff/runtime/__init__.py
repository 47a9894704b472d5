"""Where TFF computations run: in this process, in TFF's worker, or on several.

Importing this changes nothing; `use_runtime` chooses.
"""

from collections.abc import Sequence
from typing import Any

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
) -> Any:
  """Makes a runtime TFF's default: computations called from now on use it.

  Args:
    name: 'in_process', which compiles a computation to one TensorFlow function
      and runs it here, on GPUs if there are any; 'native', TFF's own C++
      worker; or 'workers', several of those, one communication round per call.
    devices: For 'in_process': names such as ['GPU:0', 'GPU:1'] that a cohort's
      clients are spread over; `None` for every GPU, or else the CPU.
    unroll: For 'in_process': the largest cohort that is compiled client by
      client, for the quickest epochs. Larger ones, or all with 0, become a
      loop, which compiles in a third of the time. `None` decides by the number
      of clients and the size of the computation.
    workers: For 'workers': their addresses, ['host:port', ...].
    credentials: For 'workers': TLS credentials of the channels; `None` for
      plain text, which belongs behind a firewall.

  Returns:
    The context, which is also TFF's default now.

  Raises:
    ValueError: If an argument does not fit; it names the argument.
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
  # The other two are modules that most programs never need, one of them a
  # program itself.
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
