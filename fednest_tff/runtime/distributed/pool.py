"""The workers of a cluster: starts them, asks them, and replaces lost ones.

Ray places the workers on nodes, replaces one that died and repeats what it was
doing. It does not notice one that stands still. Such a worker is found by
probes, and Ray is asked to replace it.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import contextlib
import threading
import time
from typing import NamedTuple, TypeAlias

from absl import logging

from fednest_tff.runtime import errors
from fednest_tff.runtime.distributed import cluster as cluster_lib
from fednest_tff.runtime.distributed import worker as worker_lib
from fednest_tff.runtime.distributed.cluster import Handle, Ray, Reference
from fednest_tff.structures import Value

_Future: TypeAlias = concurrent.futures.Future[Value]

_POLL_SECONDS = 1.0
_MAX_RETRIES = 3  # How often a share is run again if its worker dies.


class Limits(NamedTuple):
  """How long things may take, in seconds.

  Attributes:
    start: The workers' start, and the restart of one.
    probe: The answer to a probe, which a worker gives also while it computes.
    call: One call.
  """

  start: float = 300.0
  probe: float = 60.0
  call: float = 3600.0


def _probe(handle: Handle) -> Reference:
  """Asks a worker whether it is there; Ray does not repeat the question."""
  options = dict(concurrency_group='probe', max_task_retries=0)
  return handle.ping.options(**options).remote()


class _Watch:
  """Probes one worker during a call."""

  def __init__(self, ray: Ray, handle: Handle, limits: Limits):
    self._ray = ray
    self._handle = handle
    self._limits = limits
    self._answer: _Future | None = None
    self._since = time.monotonic()
    self._allowed = limits.probe

  def stands_still(self) -> bool:
    """Tells whether the worker has not answered for too long."""
    if self._answer is not None and self._answer.done():
      if self._answer.exception() is None:
        self._since, self._allowed = time.monotonic(), self._limits.probe
      else:  # Ray is replacing it.
        self._allowed = self._limits.start
      self._answer = None
    if self._answer is None:
      self._answer = _probe(self._handle).future()
    return time.monotonic() - self._since > self._allowed

  def restart(self) -> None:
    """Has Ray kill the worker and start another one."""
    self._ray.kill(self._handle, no_restart=False)
    self._answer = None
    self._since, self._allowed = time.monotonic(), self._limits.start


class Pool:
  """The workers; see `start_pool`."""

  def __init__(
      self,
      cluster: cluster_lib.Cluster,
      handles: Sequence[Handle],
      start: Callable[[], Handle],
      limits: Limits,
  ):
    self._cluster = cluster
    self._ray = cluster.ray
    self._handles = list(handles)
    self._abandoned: set[int] = set()
    self._start = start
    self._limits = limits
    self._cancelled = threading.Event()

  @property
  def is_closed(self) -> bool:
    """Tells whether the workers have been ended."""
    return not self._handles or not self._cluster.is_open

  def close(self) -> None:
    """Ends the workers, and the cluster if it was started here."""
    handles, self._handles = self._handles, []
    if self._cluster.is_open and not self._cluster.is_local:
      for handle in handles:
        self._ray.kill(handle)
    self._cluster.close()

  def pids(self) -> list[int]:
    """The process ids of the workers, each on its node."""
    return self._ray.get(
        list(map(_probe, self._handles)), timeout=self._limits.start
    )

  def supervise(self, function: Callable[[], Value]) -> Value:
    """Runs a function that uses the workers; see `Cluster.supervise`."""
    if self.is_closed:
      raise errors.WorkerError(
          "The Ray workers have been ended; choose the runtime 'ray' again."
      )
    self._cancelled.clear()
    try:
      return self._cluster.supervise(function, self._cancelled.set)
    except errors.WorkerError:
      try:
        self._cluster.check()
      except errors.WorkerError:
        # Otherwise Ray would end this process a minute later. Nothing is asked
        # of the workers any more: that would hang.
        self._handles = []
        self._cluster.close()
      raise

  def ask(
      self, questions: Sequence[Callable[[Handle], Reference]]
  ) -> list[Value]:
    """Asks the workers in turn, and waits for all answers.

    Args:
      questions: Functions that call a method of a worker.

    Returns:
      The answers, in the order of the questions.

    Raises:
      WorkerError: If the workers are lost, or something takes too long.
    """
    asked: dict[_Future, int] = {}
    waiting: set[_Future] = set()
    try:
      self._replace_abandoned()
      for k, question in enumerate(questions):
        number = k % len(self._handles)
        asked[question(self._handles[number]).future()] = number
      waiting.update(asked)
      self._wait(asked, waiting)
      answers = [future.result() for future in asked]
    except BaseException as error:
      self._abandon({asked[future] for future in waiting})
      lost = (self._ray.exceptions.RayError, ConnectionError)
      if isinstance(error, lost):
        raise errors.WorkerError(
            f'The workers of {self._cluster.name} are lost:'
            f' {cluster_lib.first_line(error)}'
        ) from error
      raise
    for answer in answers:
      if isinstance(answer, worker_lib.Failure):
        raise answer.rebuild()
    return answers

  def _wait(self, asked: dict[_Future, int], waiting: set[_Future]) -> None:
    """Removes from `waiting` what is answered, until nothing is left."""
    deadline = time.monotonic() + self._limits.call
    watches = [
        _Watch(self._ray, handle, self._limits) for handle in self._handles
    ]
    while True:
      done, _ = concurrent.futures.wait(waiting, timeout=_POLL_SECONDS)
      waiting -= done
      if not waiting:
        return
      if self._cancelled.is_set():
        raise errors.WorkerError('The call was cancelled.')
      if time.monotonic() > deadline:
        raise errors.WorkerError(
            f'A call on {self._cluster.name} took longer than call_timeout'
            f' ({self._limits.call:g} s): {len(waiting)} of {len(asked)} shares'
            ' are missing.'
        )
      for number in sorted({asked[future] for future in waiting}):
        if watches[number].stands_still():
          logging.warning(
              'Ray worker %d does not answer. Another one takes its place.',
              number,
          )
          watches[number].restart()

  def _abandon(self, busy: set[int]) -> None:
    """Ends workers whose answers nobody waits for any more.

    Ray would repeat the call if it replaced them, so that the next call starts
    others.
    """
    for number in busy:
      self._abandoned.add(number)
      with contextlib.suppress(Exception):  # The first error is reported.
        self._ray.kill(self._handles[number])

  def _replace_abandoned(self) -> None:
    while self._abandoned:
      self._handles[self._abandoned.pop()] = self._start()


def start_pool(
    cluster: cluster_lib.Cluster,
    num_workers: int,
    num_cpus: float,
    num_gpus: float,
    arguments: Sequence[object],
    limits: Limits,
) -> Pool:
  """Starts workers, and waits until all of them answer.

  Args:
    cluster: Where.
    num_workers: How many.
    num_cpus: CPUs that Ray reserves for each.
    num_gpus: GPUs that Ray reserves for each.
    arguments: Of `Worker`.
    limits: How long things may take.

  Returns:
    The workers.

  Raises:
    WorkerError: If not all of them start, or a node has other versions.
  """
  ray = cluster.ray
  actor = ray.remote(
      num_cpus=num_cpus,
      num_gpus=num_gpus,
      max_restarts=-1,
      max_task_retries=_MAX_RETRIES,
      concurrency_groups={'probe': 1},
  )(worker_lib.Worker)

  def start() -> Handle:
    return actor.remote(*arguments)

  try:
    handles = [start() for _ in range(num_workers)]
    found = ray.get(
        [handle.describe.remote() for handle in handles], timeout=limits.start
    )
  except ray.exceptions.GetTimeoutError:
    there = cluster.resources()
    raise errors.WorkerError(
        f'{num_workers} workers with {num_cpus:g} CPUs and {num_gpus:g} GPUs'
        f' each did not start within {limits.start:g} s. {cluster.title} has'
        f' {there["CPU"]:g} CPUs and {there["GPU"]:g} GPUs.'
    ) from None
  except (ray.exceptions.RayError, ConnectionError) as error:
    raise errors.WorkerError(
        f'A worker of {cluster.name} did not start:'
        f' {cluster_lib.last_line(error)}'
    ) from error
  here = worker_lib.versions()
  for versions in found:
    if versions != here:
      raise errors.WorkerError(
          f'A node of {cluster.name} has {versions}, and this process has'
          f' {here}: install the same on all nodes.'
      )
  return Pool(cluster, handles, start, limits)
