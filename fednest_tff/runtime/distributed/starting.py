"""Contexts in which a Ray cluster is started on this machine.

Each of them changes what Ray does by default while the cluster starts.
"""

from collections.abc import Iterator
import contextlib
import os
import secrets
import time
from typing import Any

import psutil

_START_SECONDS = 300.0


@contextlib.contextmanager
def only_on_this_machine(ray: Any) -> Iterator[None]:
  """Has a cluster that starts listen on 127.0.0.1, and makes up its token.

  By default, Ray on Linux listens on all interfaces and keeps its token in the
  home directory, for all clusters.
  """
  if 'RAY_AUTH_TOKEN_PATH' not in os.environ:
    # Ray keeps the first token of a process.
    os.environ.setdefault('RAY_AUTH_TOKEN', secrets.token_hex(32))
  constants = ray._private.ray_constants
  name = 'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'
  before = constants.ENABLE_RAY_CLUSTER
  os.environ[name] = '0'
  constants.ENABLE_RAY_CLUSTER = False
  try:
    yield
  finally:
    del os.environ[name]
    constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def patient(ray: Any) -> Iterator[None]:
  """Gives a cluster minutes to start, which a busy machine may need.

  By default, Ray gives most of its processes 30 seconds.
  """
  seconds = int(_START_SECONDS)
  for name, value in {
      'RAY_agent_register_timeout_ms': 1000 * seconds,
      'RAY_gcs_server_port_wait_time_s': seconds,
      'RAY_worker_register_timeout_seconds': seconds,
  }.items():
    os.environ.setdefault(name, str(value))
  services = ray._private.services
  get_node, deadline = services.get_node, time.monotonic() + seconds

  def wait_for_node(*arguments: Any, **options: Any) -> Any:
    while True:
      try:
        return get_node(*arguments, **options)
      except RuntimeError:
        if time.monotonic() > deadline:
          raise
        time.sleep(0.1)

  services.get_node = wait_for_node
  try:
    yield
  finally:
    services.get_node = get_node


@contextlib.contextmanager
def no_half_cluster() -> Iterator[None]:
  """Ends the processes that a start of Ray leaves behind if it fails."""
  before = {child.pid for child in psutil.Process().children(recursive=True)}
  try:
    yield
  except BaseException:
    started = psutil.Process().children(recursive=True)
    started = [child for child in started if child.pid not in before]
    for child in started:
      with contextlib.suppress(psutil.NoSuchProcess):
        child.kill()
    psutil.wait_procs(started, timeout=10)
    raise
