"""States of a run on disk, by TFF's manager, of which a damaged one is no end.

TFF writes a state under another name and renames it, so a killed process leaves
whole states, and rubbish that nobody reads. A disk can still damage a state:
then the one before it is used.
"""

import glob
import os
import shutil
from typing import Any

from absl import logging
import tensorflow_federated as tff

from fednest_tff.simulation import errors

CHECKPOINTS = 'checkpoints'
_PREFIX = 'program_state_'
_KEPT = 3


class Checkpoints(tff.program.FileProgramStateManager):
  """TFF's manager, with the last states that can be read."""

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
      super().__init__(
          self._directory, _PREFIX, keep_total=_KEPT, keep_first=False
      )
      self._remove_leftovers()

  def _remove_leftovers(self) -> None:
    pattern = os.path.join(glob.escape(self._directory), '*_temp*')
    for leftover in glob.glob(pattern):
      shutil.rmtree(leftover)

  async def load_latest(self, structure: Any) -> tuple[Any, int]:
    """The newest state that can be read and its epoch; `(None, 0)` if none."""
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

  async def save(self, program_state: Any, version: int) -> None:
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
