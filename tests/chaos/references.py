"""Runs that nobody disturbed, to compare others with and to begin from."""

import collections
import pathlib
import re
import threading
from typing import Any, NamedTuple

from tests.helpers.killable import without_seconds

_STATE = re.compile(r'program_state_\d+\.npz')
_EVENTS = re.compile(r'events\.out\.tfevents\..*')


class FindingError(Exception):
  """Something that must not happen."""


def _results(directory):
  """What has to be the same: metrics but for their times, and weights."""
  found = {}
  for path in sorted(directory.rglob('*')):
    name = str(path.relative_to(directory))
    if path.name == 'metrics.csv':
      found[name] = without_seconds(path)
    elif path.name == 'weights.npz':
      found[name] = path.read_bytes()
  return found


def _names(directory):
  """Names of all files; how many states there are depends on signals."""
  return {
      str(path.relative_to(directory)) for path in directory.rglob('*')
      if not _STATE.fullmatch(path.name) and not _EVENTS.fullmatch(path.name)
  }


class Reference(NamedTuple):
  """A run.

  Attributes:
    directory: Of the finished run.
    copies: Folder with copies of it after each of its rows.
    seconds: That it took.
    results: See `_results`.
    names: Of its files.
  """

  directory: pathlib.Path
  copies: pathlib.Path
  seconds: float
  results: dict[str, Any]
  names: set[str]

  def check(self, directory) -> None:
    """Raises a `FindingError` if a run has not ended like this one."""
    try:
      results = _results(directory)
    except (OSError, AssertionError) as error:
      raise FindingError(f'another result: {error!r}') from error
    wrong = [
        name for name in sorted(self.results.keys() | results.keys())
        if self.results.get(name) != results.get(name)
    ]
    if wrong:
      raise FindingError(f'another result, in silence: {wrong}')
    left = _names(directory) - self.names
    if left:
      raise FindingError(f'leftovers: {sorted(left)}')


def read(directory, copies, seconds) -> Reference:
  """The reference that a finished run is."""
  return Reference(
      directory, copies, seconds, _results(directory), _names(directory)
  )


class References:
  """References by binary and method, made once; shared by threads."""

  def __init__(self):
    self._lock = threading.Lock()
    self._locks = collections.defaultdict(threading.Lock)
    self.made = {}

  def get(self, key, make):
    """That of `key`, made by `make(*key)` if it is not there yet."""
    with self._lock:
      lock = self._locks[key]
    with lock:
      if key not in self.made:
        self.made[key] = make(*key)
      return self.made[key]
