"""A directory that belongs to one run: its settings, and one process at a time.

A second process is refused, and so are other settings than those that the run
began with. Files are replaced, never overwritten in place.
"""

import contextlib
import fcntl
import glob
import json
import os
import shutil
from typing import Any

from fednest_tff.simulation import errors

_CONFIG = 'config.json'
_LOCK = '.lock'
# What a run writes, and so what starting anew may remove.
_OURS = (
    _CONFIG,
    'metrics.csv',
    'not_finite.json',
    'summary.json',
    'plot.png',
    'plot.pdf',
    'checkpoints',
    'tensorboard',
    'runs',
)


def _write(path: str, text: str) -> None:
  """Writes `text` so that a reader finds all of it or the old file."""
  temporary = f'{path}.tmp'
  with open(temporary, 'w') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def write_json(path: str, value: Any) -> None:
  """Writes `value` as JSON, all or nothing."""
  _write(path, json.dumps(value, indent=2, default=str) + '\n')


def _differences(before: dict, now: dict) -> list[str]:
  names = sorted(before.keys() | now.keys())
  missing = object()
  return [
      f'--{name} was {before.get(name)!r} and is {now.get(name)!r}'
      for name in names
      if before.get(name, missing) != now.get(name, missing)
  ]


class RunDirectory:
  """An output directory, locked while it is open (use it in a `with`)."""

  def __init__(
      self,
      path: str,
      settings: dict[str, Any],
      about: dict[str, Any],
      overwrite: bool = False,
  ):
    """Names the directory; nothing is touched before `with`.

    Args:
      path: Where everything goes; made if it is not there.
      settings: What decides the numbers. A directory that holds a run with
        other settings is refused.
      about: What else `config.json` tells, such as versions.
      overwrite: Whether to remove an earlier run and start anew.
    """
    self.path = path
    # As they will look when read back.
    self._settings = json.loads(json.dumps(settings, default=str))
    self._about = about
    self._overwrite = overwrite
    self._lock = None
    self._is_new = False

  def __enter__(self) -> 'RunDirectory':
    with errors.file_errors(self.path):
      os.makedirs(self.path, exist_ok=True)
      self._take_lock()
      try:
        if self._overwrite:
          self._remove_run()
        self._check_settings()
      except BaseException:
        self._lock.close()
        raise
    return self

  def __exit__(self, kind, error, trace):
    if kind is not None and self._is_new:
      self._forget_if_empty()
    self._lock.close()

  def _forget_if_empty(self) -> None:
    """A run that failed before it began does not hold the directory."""
    pattern = os.path.join(glob.escape(self.path), '**', 'metrics.csv')
    if not glob.glob(pattern, recursive=True):
      self._remove_run()
      os.remove(self.join(_LOCK))
      with contextlib.suppress(OSError):  # The user has something there.
        os.rmdir(self.path)

  def join(self, *names: str) -> str:
    """The path of something in the directory."""
    return os.path.join(self.path, *names)

  def _take_lock(self) -> None:
    # The system drops the lock when the process ends, however it ends.
    self._lock = open(self.join(_LOCK), 'a+')
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._lock.seek(0)
      owner = self._lock.read().strip() or 'unknown'
      self._lock.close()
      raise errors.RunError(
          f'another process ({owner}) is running in {self.path!r}: wait for it,'
          ' or choose another --output_dir'
      ) from None
    self._lock.truncate(0)
    self._lock.write(f'{os.getpid()}\n')
    self._lock.flush()

  def _remove_run(self) -> None:
    for name in _OURS:
      path = self.join(name)
      if os.path.isdir(path):
        shutil.rmtree(path)
      elif os.path.exists(path):
        os.remove(path)

  def _check_settings(self) -> None:
    path = self.join(_CONFIG)
    if not os.path.exists(path):
      found = [name for name in _OURS if os.path.exists(self.join(name))]
      if found:
        raise errors.RunError(
            f'{self.path!r} has {found[0]} but no {_CONFIG}: it is not a run of'
            ' ours; choose another --output_dir, or --overwrite'
        )
      write_json(path, {'flags': self._settings, **self._about})
      self._is_new = True
      return
    try:
      with open(path) as file:
        before = json.load(file)['flags']
    except (ValueError, KeyError, TypeError):
      raise errors.RunError(
          f'{path!r} is damaged: choose another --output_dir, or --overwrite'
      ) from None
    differences = _differences(before, self._settings)
    if differences:
      raise errors.RunError(
          f'{self.path!r} holds a run with other flags ('
          + '; '.join(differences)
          + '): choose another --output_dir, or --overwrite to start anew'
      )
