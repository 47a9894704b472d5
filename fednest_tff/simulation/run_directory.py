"""A directory that belongs to one run: its settings, and one process at a time.

A second process is refused, and so are other settings than those that the run
began with, except how far it goes. Files are replaced, never overwritten in
place.
"""

from collections.abc import Iterable, Mapping
import contextlib
import fcntl
import glob
import json
import os
import shutil
import types
from typing import IO

from absl import logging

from fednest_tff.simulation import checkpoints, errors, files, run_files
from fednest_tff.simulation.tables import METRICS

_LOCK = '.lock'
# How many settings an error names.
_MOST_DIFFERENCES = 5
_LONGEST_LOCK = 32  # Bytes: it holds the number of a process.
_MARK = b'This directory is a run of fednest_tff, which may remove it.\n'
# Where an earlier run is kept until the new one has recorded an epoch; and its
# name while it is being moved there or back.
_EARLIER = '.earlier'
_MOVING = '.earlier_moving'


def _differences(
    before: dict[str, object], now: dict[str, object]
) -> list[str]:
  names = sorted(before.keys() | now.keys())
  missing = object()
  found = [
      f'`{name}` was {before.get(name)!r} and is {now.get(name)!r}'
      for name in names
      if before.get(name, missing) != now.get(name, missing)
      # A setting of one experiment that another one lacks.
      and (before.get(name) is not None or now.get(name) is not None)
  ]
  if len(found) > _MOST_DIFFERENCES:
    more = len(found) - _MOST_DIFFERENCES
    found[_MOST_DIFFERENCES:] = [f'and {more} more']
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
      places: Iterable[str] = (),
  ):
    """Names the directory; nothing is touched before `with`.

    Args:
      path: Where everything goes; made if it is not there.
      settings: What decides the numbers. A directory that holds a run with
        other settings is refused.
      about: What else `config.json` tells, such as versions. If `versions` or
        `commit` are others than those that a run began with, there is a
        warning.
      overwrite: Whether to start anew where there is an earlier run. It is kept
        until the new one has recorded an epoch.
      length: The setting that says how many rows `metrics.csv` will have. It
        may change to anything that is not less than the rows on record.
      places: Settings that say where a run runs and where its data are. They
        may change.
    """
    self.path = path
    # As they will look when read back.
    self._settings = json.loads(json.dumps(settings, default=str))
    self._about = about
    self._overwrite = overwrite
    self._length = length
    self._places = frozenset(places)
    self._lock: IO[str] | None = None
    self._is_new = self._is_open = False
    # What this object has created.
    self._made: list[str] = []
    self._made_lock = False

  def __enter__(self) -> 'RunDirectory':
    with errors.file_errors(self.path):
      self._made = run_files.missing(self.path)
      try:
        os.makedirs(self.path, exist_ok=True)
        self._take_lock()
        self._settle()
        before = self._read_settings()
        if before is not None and self._overwrite:
          self._put_aside()
          before = None
        self._remove_leftovers()
        run_files.check_kinds(self.path)
        self._is_new = before is None
        config = {
            'flags': self._settings,
            'layout': checkpoints.LAYOUT,
            **self._about,
        }
        if before is not None:
          self._check_settings(before)
          earlier = self._read_config()
          self._compare_versions(earlier)
          config |= {name: earlier[name] for name in ('data',) & earlier.keys()}
          # How it began, if it is to go further now.
          config['earlier'] = earlier
        else:
          files.write(self.join(run_files.MARKER), _MARK)
        if before != self._settings:
          files.write_json(self.join(run_files.CONFIG), config)
      except BaseException:
        self._leave()
        raise
    self._is_open = True
    return self

  def __exit__(
      self,
      kind: type[BaseException] | None,
      error: BaseException | None,
      trace: types.TracebackType | None,
  ) -> None:
    if kind is not None:
      self.give_up()
    elif self._lock is not None:
      self._settle()
    if self._lock is not None:
      self._lock.close()
      self._lock = None
      self._made, self._made_lock = [], False

  def give_up(self) -> None:
    """Frees the directory if the run ends before it has recorded an epoch.

    An earlier run that was to be replaced comes back.
    """
    if self._lock is None:
      self._leave()
      return
    had_earlier = os.path.lexists(self.join(_EARLIER))
    self._settle()
    if had_earlier or run_files.is_recorded(self.path):
      return
    if self._is_new:
      self._remove_run()
    if self._is_new or not self._is_open:
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

  def check_data(self, fingerprint: str) -> None:
    """Refuses to go on with other data than those that the run began with.

    Args:
      fingerprint: A hash of what was read; empty if nothing was.

    Raises:
      RunError: If it is another one.
    """
    with errors.file_errors(self.path):
      config = self._read_config()
      before = config.get('data')
      if not fingerprint or before == fingerprint:
        return
      if before is not None and run_files.is_recorded(self.path):
        raise errors.RunError(
            f'{self.path!r} holds a run on other data (their hash was'
            f' {str(before)[:12]} and is {fingerprint[:12]}): put the old data'
            ' back, choose another `output_dir`, or `overwrite` to start anew'
        )
      files.write_json(
          self.join(run_files.CONFIG), config | {'data': fingerprint}
      )

  def _take_lock(self) -> None:
    path = self.join(_LOCK)

    def opener(name: str, flags: int) -> int:
      # Neither follows a link nor waits for a pipe.
      return os.open(
          name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
      )

    while True:
      is_there = os.path.lexists(path)
      try:
        lock = open(path, 'r+', opener=opener)
      except OSError as error:
        raise errors.RunError(
            f'{path!r} cannot be locked ({error.strerror}): choose another'
            ' `output_dir`'
        ) from error
      # The system drops the lock when the process ends, however it ends.
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        owner = lock.read(_LONGEST_LOCK).strip() or 'unknown'
        lock.close()
        raise errors.RunError(
            f'another process ({owner}) is running in {self.path!r}: wait for'
            ' it, or choose another `output_dir`'
        ) from None
      # The process that had the lock may have removed the file just now.
      with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock.fileno()), os.lstat(path)):
          break
      lock.close()
    self._lock, self._made_lock = lock, not is_there
    if os.fstat(lock.fileno()).st_size > _LONGEST_LOCK:
      raise errors.RunError(
          f'{path!r} is not a lock of ours; choose another `output_dir`'
      )
    lock.truncate(0)
    lock.write(f'{os.getpid()}\n')
    lock.flush()

  def _move(self, source: str, target: str) -> None:
    """Moves what a run has written from one folder to another."""
    for name in (*run_files.OURS, run_files.MARKER):
      if os.path.lexists(os.path.join(source, name)):
        os.replace(os.path.join(source, name), os.path.join(target, name))

  def _put_aside(self) -> None:
    """Keeps the run that is there until the new one has recorded an epoch."""
    moving = self.join(_MOVING)
    os.mkdir(moving)
    self._move(self.path, moving)
    files.sync_directory(moving)
    os.replace(moving, self.join(_EARLIER))
    files.sync_directory(self.path)

  def _settle(self) -> None:
    """Removes an earlier run if the new one has begun, or else restores it."""
    moving, earlier = self.join(_MOVING), self.join(_EARLIER)
    if run_files.is_folder(earlier):
      if run_files.is_recorded(self.path):
        shutil.rmtree(earlier)
        return
      self._remove_run()
      os.replace(earlier, moving)
    if run_files.is_folder(moving):
      self._move(moving, self.path)
      os.rmdir(moving)
      files.sync_directory(self.path)

  def settle(self) -> None:
    """Removes the earlier run that was replaced, once there is a new one."""
    earlier = self.join(_EARLIER)
    if run_files.is_recorded(self.path) and run_files.is_folder(earlier):
      with errors.file_errors(self.path):
        shutil.rmtree(earlier)

  def _remove_run(self) -> None:
    # The marker last: while it is there, the rest is known to be ours.
    for name in (*reversed(run_files.OURS), run_files.MARKER):
      if os.path.lexists(self.join(name)):
        run_files.remove(self.join(name))

  def _remove_leftovers(self) -> None:
    if not run_files.is_ours(self.path):
      return
    here = glob.escape(self.path)
    for name in run_files.LEFTOVERS:
      for where in (here, os.path.join(here, run_files.RUNS, '*')):
        for path in glob.glob(os.path.join(where, name)):
          run_files.remove(path)

  def _read_config(self) -> dict[str, object]:
    content = files.read_json(self.join(run_files.CONFIG))
    if not isinstance(content, dict) or not isinstance(
        content.get('flags'), dict
    ):
      raise ValueError('not settings')
    return content

  def _read_settings(self) -> dict[str, object] | None:
    """The settings of the run that is there; `None` if there is none."""
    found = [
        name for name in run_files.OURS if os.path.lexists(self.join(name))
    ]
    if not run_files.is_ours(self.path):
      if found:
        raise errors.RunError(
            f'{self.path!r} has {found[0]} but no {run_files.MARKER}: it is'
            ' not a run of ours, or one of another version; choose another'
            ' `output_dir`'
        )
      return None
    if not found:
      return None
    path = self.join(run_files.CONFIG)
    try:
      with errors.file_errors(path, 'read'):
        content = self._read_config()
    except (ValueError, errors.RunError) as error:
      if self._overwrite:
        return {}
      reason = str(error) if isinstance(error, errors.RunError) else (
          f'{path!r} is damaged'
      )
      raise errors.RunError(
          f'{reason}: choose another `output_dir`, or `overwrite` to start anew'
      ) from None
    if not self._overwrite:
      layout = content.get('layout')
      checkpoints.check_layout(str(layout) if layout else None, self.path)
    flags = content['flags']
    assert isinstance(flags, dict)
    return flags

  def _compare_versions(self, before: dict[str, object]) -> None:
    """Warns if the code is not that with which the run began."""
    now = json.loads(json.dumps(self._about, default=str))
    found: list[str] = []
    versions = before.get('versions'), now.get('versions')
    if isinstance(versions[0], dict) and isinstance(versions[1], dict):
      found += _differences(versions[0], versions[1])
    if before.get('commit') != now.get('commit'):
      found += _differences(
          {'commit': before.get('commit')}, {'commit': now.get('commit')}
      )
    if found:
      logging.warning(
          'The run in %r goes on with other code than it began with: %s.',
          self.path,
          '; '.join(found),
      )

  def _num_recorded(self) -> int:
    """Counts the rows of the run, or of the longest if there are several."""
    here = glob.escape(self.path)
    paths = glob.glob(os.path.join(here, run_files.RUNS, '*', METRICS))
    found = [0]
    for path in paths or glob.glob(os.path.join(here, METRICS)):
      with errors.file_errors(path, 'read'):
        found.append(files.read(path).count(b'\n') - 1)
    return max(found)

  def _check_settings(self, before: dict[str, object]) -> None:
    known = dict(before)
    for name in self._places & known.keys() & self._settings.keys():
      known[name] = self._settings[name]
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
