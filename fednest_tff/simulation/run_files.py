"""The files of a run: their names, and which of them are there.

What is not listed here is not ours, and is never removed.
"""

import glob
import os
import shutil
import stat

from fednest_tff.simulation import checkpoints, errors, files
from fednest_tff.simulation.manifest import MANIFEST
from fednest_tff.simulation.records import TENSORBOARD
from fednest_tff.simulation.tables import METRICS
from fednest_tff.simulation.weights import WEIGHTS

CONFIG = 'config.json'
# A directory without this file is not ours, and nothing in it is removed.
MARKER = '.fednest_tff'
RUNS = 'runs'
# What a run writes, and so what starting anew may remove.
_FILES = (
    CONFIG,
    METRICS,
    MANIFEST,
    WEIGHTS,
    'not_finite.json',
    'summary.json',
    'plot.png',
    'plot.pdf',
    'traceback.txt',
    # Of a comparison.
    'search.db',
    'search.db-journal',
    'leaderboard.csv',
    'leaderboard.md',
    'leaderboard.png',
    'trials.csv',
)
_FOLDERS = (checkpoints.CHECKPOINTS, TENSORBOARD, RUNS, 'facts')
OURS = (*_FILES, *_FOLDERS)
# What a killed process had not finished writing, here and in the single runs.
LEFTOVERS = (
    *(f'{name}{files.TEMPORARY}' for name in (*_FILES, MARKER)),
    f'{checkpoints.CHECKPOINTS}/*{files.TEMPORARY}',
    'plot.tmp.*',
    'leaderboard.png.tmp.png',
)


def is_folder(path: str) -> bool:
  """Whether there is a folder, and no link to one."""
  return os.path.isdir(path) and not os.path.islink(path)


def remove(path: str) -> None:
  """Removes a file, a link or a folder."""
  if is_folder(path):
    shutil.rmtree(path)
  else:
    os.remove(path)


def is_ours(path: str) -> bool:
  """Whether a directory has the marker of a run."""
  return os.path.lexists(os.path.join(path, MARKER))


def is_recorded(directory: str) -> bool:
  """Whether a run has recorded an epoch."""
  here = glob.escape(directory)
  paths = [
      os.path.join(here, METRICS), os.path.join(here, RUNS, '*', METRICS)
  ]
  return any(glob.glob(path) for path in paths)


def check_kinds(directory: str) -> None:
  """Refuses folders in place of files, pipes, and the like."""
  for where in (
      directory, *glob.glob(os.path.join(glob.escape(directory), RUNS, '*'))
  ):
    for name in (*OURS, MARKER):
      path = os.path.join(where, name)
      try:
        mode = os.stat(path).st_mode
      except (FileNotFoundError, NotADirectoryError):
        continue
      is_right = stat.S_ISDIR if name in _FOLDERS else stat.S_ISREG
      if not is_right(mode):
        kind = 'directory' if name in _FOLDERS else 'file'
        raise errors.RunError(
            f'{path!r} is not a {kind}: move it away, or choose another'
            ' `output_dir`'
        )


def missing(path: str) -> list[str]:
  """The directories that have to be made for `path`, innermost first."""
  found = []
  path = os.path.abspath(path)
  while not os.path.lexists(path):
    found.append(path)
    path = os.path.dirname(path)
  return found
