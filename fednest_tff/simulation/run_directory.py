"""A directory that belongs to one run: its settings, and one process at a time.

A second process is refused, and so are other settings than those that the run
began with, except how far it goes. Files are replaced, never overwritten in
place.
"""

from collections.abc import Mapping
import contextlib
import fcntl
import glob
import json
import os
import shutil
import types
from typing import TextIO

from fednest_tff.simulation import checkpoints, errors

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
# What a killed process had not finished writing, here and in the single runs.
_LEFTOVERS = (
    'checkpoints/*_temp*',
    'config.json.tmp',
    'metrics.csv.tmp',
    'metrics.csv_temp*',
    'not_finite.json.tmp',
    'summary.json.tmp',
    'plot.tmp.*',
)


def _write(path: str, text: str) -> None:
  """Writes `text` so that a reader finds all of it or the old file."""
  temporary = f'{path}.tmp'
  try:
    with open(temporary, 'w') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except OSError:
    with contextlib.suppress(OSError):
      os.remove(temporary)
    raise


def write_json(path: str, value: object) -> None:
  """Writes `value` as JSON, all or nothing."""
  _write(path, json.dumps(value, indent=2, default=str) + '\n')


def _differences(
    before: dict[str, object], now: dict[str, object]
) -> list[str]:
  names = sorted(before.keys() | now.keys())
  missing = object()
  return [
      f'`{name}` was {before.get(name)!r} and is {now.get(name)!r}'
      for name in names
      if before.get(name, missing) != now.get(name, missing)
  ]


def _remove(path: str) -> None:
  if os.path.isdir(path) and not os.path.islink(path):
    shutil.rmtree(path)
  else:
    os.remove(path)


def _missing(path: str) -> list[str]:
  """The directories that have to be made for `path`, innermost first."""
  found = []
  path = os.path.abspath(path)
  while not os.path.lexists(path):
    found.append(path)
    path = os.path.dirname(path)
  return found


class RunDirectory:
  """An output directory, locked while it is open (use it in a `with`)."""

  def __init__(
      self,
      path: str,
      settings: Mapping[str, object],
      about: Mapping[str, object],
      overwrite: bool = False,
      length: str | None = None,
  ):
    """Names the directory; nothing is touched before `with`.

    Args:
      path: Where everything goes; made if it is not there.
      settings: What decides the numbers. A directory that holds a run with
        other settings is refused.
      about: What else `config.json` tells, such as versions.
      overwrite: Whether to remove an earlier run and start anew.
      length: The setting that says how many rows `metrics.csv` will have. It
        may change to anything that is not less than the rows on record.
    """
    self.path = path
    # As they will look when read back.
    self._settings = json.loads(json.dumps(settings, default=str))
    self._about = about
    self._overwrite = overwrite
    self._length = length
    self._lock: TextIO | None = None
    self._is_new = False
    # What there was not before.
    self._made: list[str] = []
    self._made_lock = False

  def __enter__(self) -> 'RunDirectory':
    with errors.file_errors(self.path):
      self._made = _missing(self.path)
      try:
        os.makedirs(self.path, exist_ok=True)
        self._take_lock()
        before = self._read_settings()
        if before is not None and self._overwrite:
          self._remove_run()
          before = None
        self._remove_leftovers()
        self._is_new = before is None
        config = {
            'flags': self._settings,
            'layout': checkpoints.LAYOUT,
            **self._about,
        }
        if before is not None:
          self._check_settings(before)
          # How it began, if it is to go further now.
          with open(self.join(_CONFIG)) as file:
            config['earlier'] = json.load(file)
        if before != self._settings:
          write_json(self.join(_CONFIG), config)
      except BaseException:
        self._leave()
        raise
    return self

  def __exit__(
      self,
      kind: type[BaseException] | None,
      error: BaseException | None,
      trace: types.TracebackType | None,
  ) -> None:
    if kind is not None and self._is_new:
      self._forget_if_empty()
    if self._lock is not None:
      self._lock.close()

  def _forget_if_empty(self) -> None:
    """A run that failed before it began does not hold the directory."""
    pattern = os.path.join(glob.escape(self.path), '**', 'metrics.csv')
    if not glob.glob(pattern, recursive=True):
      self._remove_run()
      self._leave()

  def _leave(self) -> None:
    """Gives the directory back as it was found."""
    with contextlib.suppress(OSError):
      if self._made_lock:
        os.remove(self.join(_LOCK))
      for path in self._made:
        os.rmdir(path)
    if self._lock is not None:
      self._lock.close()
      self._lock = None

  def join(self, *names: str) -> str:
    """The path of something in the directory."""
    return os.path.join(self.path, *names)

  def _take_lock(self) -> None:
    path = self.join(_LOCK)
    while True:
      is_there = os.path.exists(path)
      lock = open(path, 'a+')
      # The system drops the lock when the process ends, however it ends.
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or 'unknown'
        lock.close()
        raise errors.RunError(
            f'another process ({owner}) is running in {self.path!r}: wait for'
            ' it, or choose another `output_dir`'
        ) from None
      # Who had it may have removed the file just now.
      with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
          break
      lock.close()
    self._lock, self._made_lock = lock, not is_there
    lock.truncate(0)
    lock.write(f'{os.getpid()}\n')
    lock.flush()

  def _remove_run(self) -> None:
    # The settings last: while they are there, the rest is known to be ours.
    for name in reversed(_OURS):
      if os.path.lexists(self.join(name)):
        _remove(self.join(name))

  def _remove_leftovers(self) -> None:
    here = glob.escape(self.path)
    for name in _LEFTOVERS:
      for where in (here, os.path.join(here, 'runs', '*')):
        for path in glob.glob(os.path.join(where, name)):
          _remove(path)

  def _read_settings(self) -> dict[str, object] | None:
    """Those of the run that is there; `None` if there is none."""
    path = self.join(_CONFIG)
    if not os.path.lexists(path):
      found = [name for name in _OURS if os.path.lexists(self.join(name))]
      if found:
        raise errors.RunError(
            f'{self.path!r} has {found[0]} but no {_CONFIG}: it is not a run of'
            ' ours; choose another `output_dir`'
        )
      return None
    try:
      with open(path) as file:
        content = json.load(file)
    except ValueError:
      if self._overwrite:
        return {}
      raise errors.RunError(
          f'{path!r} is damaged: choose another `output_dir`, or `overwrite` to'
          ' start anew'
      ) from None
    if not isinstance(content, dict) or not isinstance(
        content.get('flags'), dict
    ):
      raise errors.RunError(
          f'{path!r} is not of a run of ours; choose another `output_dir`'
      )
    if not self._overwrite:
      layout = content.get('layout')
      checkpoints.check_layout(layout and str(layout), self.path)
    return content['flags']

  def _num_recorded(self) -> int:
    """Rows of the run, or of the longest if there are several."""
    here = glob.escape(self.path)
    paths = glob.glob(os.path.join(here, 'runs', '*', 'metrics.csv'))
    found = [0]
    for path in paths or glob.glob(os.path.join(here, 'metrics.csv')):
      with open(path, 'rb') as file:
        found.append(file.read().count(b'\n') - 1)
    return max(found)

  def _check_settings(self, before: dict[str, object]) -> None:
    known = dict(before)
    if self._length in before:
      if self._num_recorded() <= self._settings[self._length]:
        known[self._length] = self._settings[self._length]
    differences = _differences(known, self._settings)
    if differences:
      raise errors.RunError(
          f'{self.path!r} holds a run with other settings ('
          + '; '.join(differences)
          + '): choose another `output_dir`, or `overwrite` to start anew'
      )
