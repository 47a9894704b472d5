"""The runtime that the flags of a binary ask for."""

from typing import NoReturn

import tensorflow_federated as tff

from experiments import image_clients, threads
from experiments import settings as settings_lib
import fednest_tff


class NoRuntime(tff.framework.SyncContext):
  """Stands in for TFF's default, which complains when Python ends."""

  def invoke(self, comp: tff.Computation, arg: object) -> NoReturn:
    raise RuntimeError('Choose a runtime first: fednest_tff.use_runtime.')


def _use_one_thread_per_operation(settings: settings_lib.Settings) -> None:
  """Gives the cores to clients where they are as many."""
  clients = (
      getattr(settings, 'clients_per_round', None)
      or getattr(settings, 'num_clients', None)
      or image_clients.CLIENTS_PER_ROUND
  )
  if getattr(settings, 'centralised', False):
    clients = 1
  elif hasattr(settings, 'dataset') and not settings.clients_per_round:
    clients = min(clients, image_clients.CLIENTS_PER_ROUND)
  threads.give_cores_to_clients(clients)


_OPTIONS = (
    'devices', 'unroll', 'compiled', 'address', 'num_workers',
    'cpus_per_worker', 'gpus_per_worker', 'num_shares', 'call_timeout',
)
_runtimes: dict[tuple[object, ...], tff.framework.SyncContext] = {}
_KEPT_FUNCTIONS = 4  # Those of the last run.


def use_runtime(settings: settings_lib.Settings) -> None:
  """Makes the chosen runtime TFF's default; one that was there is reused.

  What it has compiled last serves the runs that follow; the rest is freed, so
  that a night of runs takes no more memory than two of them.
  """
  options = {name: getattr(settings, name) for name in _OPTIONS}
  key = settings.runtime, str(options)
  if key in _runtimes and not getattr(_runtimes[key], 'is_closed', False):
    tff.framework.set_default_context(_runtimes[key])
    if settings.runtime == 'in_process':
      _runtimes[key].runtime.forget(keep=_KEPT_FUNCTIONS)
    return
  _use_one_thread_per_operation(settings)
  for other in _runtimes.values():
    # A process has one connection to Ray.
    if settings.runtime == 'ray' and hasattr(other, 'traffic'):
      other.close()
  try:
    _runtimes[key] = fednest_tff.use_runtime(
        settings.runtime, **options
    )
  except ValueError as error:
    raise settings_lib.SettingsError(str(error)) from error
