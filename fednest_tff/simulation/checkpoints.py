"""Checkpoints of a run; a damaged one is skipped for the one before it.

TFF's manager writes a state under another name and renames it, so a killed
process leaves whole states, and leftovers that are never read.
"""

import glob
import os
import shutil

from absl import logging
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.simulation import errors
from fednest_tff.structures import Value

CHECKPOINTS = 'checkpoints'
# The layout of `NestedState`. States of another layout cannot be read.
LAYOUT = 2
_LAYOUT_FILE = 'layout'
_PREFIX = 'program_state_'
_KEPT = 3


def check_layout(found: str | None, path: str) -> None:
  """Refuses states of another layout.

  Args:
    found: The layout on record; `None` if there is none, as in the first.
    path: Where they are.

  Raises:
    RunError: If it is not this version's.
  """
  if found != str(LAYOUT):
    raise errors.RunError(
        f'{path!r} holds a run of another version of fednest_tff (state layout'
        f' {found or 1}, not {LAYOUT}), which cannot go on: choose another'
        ' `output_dir`, or `overwrite` to start anew'
    )


def check_states(directory: str) -> None:
  """Refuses a run whose states have another layout; changes nothing.

  Args:
    directory: Of the run.

  Raises:
    RunError: If there are states of another layout.
  """
  directory = os.path.join(directory, CHECKPOINTS)
  if not glob.glob(os.path.join(glob.escape(directory), f'{_PREFIX}*')):
    return
  found = None
  path = os.path.join(directory, _LAYOUT_FILE)
  if os.path.exists(path):
    with open(path, errors='replace') as file:
      found = file.read().strip()
  check_layout(found, directory)


def _is_readable(path: str) -> bool:
  """Whether a state's files are whole."""
  try:
    tf.saved_model.load(path)()
  except Exception:  # TensorFlow raises all kinds here.
    return False
  return True


class Checkpoints(tff.program.FileProgramStateManager):
  """TFF's manager of states on disk, which skips damaged ones."""

  def __init__(self, directory: str, newest: int):
    """Opens the states of a run.

    Args:
      directory: Of the run.
      newest: The last epoch whose metrics are on record. States of later ones
        are removed, since going on from there would leave a gap.
    """
    self._directory = os.path.join(directory, CHECKPOINTS)
    self._newest = newest
    with errors.file_errors(self._directory):
      check_states(directory)
      super().__init__(
          self._directory, _PREFIX, keep_total=_KEPT, keep_first=False
      )
      self._remove_leftovers()
      # Whole or not at all, and removed with the leftovers if it is not.
      temporary = os.path.join(self._directory, f'{_LAYOUT_FILE}_temp')
      with open(temporary, 'w') as file:
        file.write(f'{LAYOUT}\n')
      os.replace(temporary, os.path.join(self._directory, _LAYOUT_FILE))

  def _remove_leftovers(self) -> None:
    pattern = os.path.join(glob.escape(self._directory), '*_temp*')
    for leftover in glob.glob(pattern):
      if os.path.isdir(leftover):
        shutil.rmtree(leftover)
      else:
        os.remove(leftover)

  async def load_latest(self, structure: Value) -> tuple[Value, int]:
    """The newest state that can be read and its epoch.

    Args:
      structure: A state like those that were saved.

    Returns:
      The state and its epoch; `(None, 0)` if there is none.

    Raises:
      RunError: If a state can be read and has another structure.
    """
    for version in reversed(await self.get_versions() or []):
      if version > self._newest:
        logging.warning(
            'The checkpoint of epoch %d in %r is newer than the metrics; going'
            ' back to the one before it.',
            version,
            self._directory,
        )
        await self._remove(version)
        continue
      try:
        return await self.load(version, structure), version
      except Exception as error:  # TensorFlow raises all kinds here.
        if _is_readable(self._get_path_for_version(version)):
          raise errors.RunError(
              f'{self._directory!r} holds states of another structure than'
              " this method's: choose another `output_dir`, or `overwrite` to"
              ' start anew'
          ) from error
        logging.warning(
            'The checkpoint of epoch %d in %r is damaged (%s); going back to'
            ' the one before it.',
            version,
            self._directory,
            type(error).__name__,
        )
        # Or else its epoch could not be saved again.
        await self._remove(version)
    return None, 0

  async def save(self, program_state: Value, version: int) -> None:
    """Saves a state, unless that of this epoch is there already."""
    if version in (await self.get_versions() or []):
      return
    with errors.file_errors(self._directory):
      try:
        await super().save(program_state, version)
      except Exception:
        # Half a state takes up space that there may be none of.
        self._remove_leftovers()
        raise
