"""Checkpoints of a run; a damaged one is skipped for the one before it.

A state is one file of plain arrays (NumPy's .npz, never pickled) and of the
names and types of its leaves in JSON. Reading it runs no code. The file is
written under another name, forced to the disk and renamed, so a killed process
leaves whole states, and leftovers that are never read. Every array has a
checksum, and the file has one in the manifest. With a state goes the table of
the metrics up to its epoch, so that they can be restored.
"""

from collections.abc import Callable
import glob
import io
import json
import os
import re
import shutil
from typing import Any, TypeAlias

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tree

from fednest_tff.simulation import errors, files
from fednest_tff.simulation.manifest import Manifest, digest
from fednest_tff.simulation.tables import Table
from fednest_tff.structures import Value

CHECKPOINTS = 'checkpoints'
# The layout of `NestedState` and of its file. Others cannot be read.
LAYOUT = 4
_LAYOUT_FILE = 'layout'
_PREFIX = 'program_state_'
_KEPT = 3
_LEAVES = 'leaves'
_TABLE = 'table'

# The name of a leaf in its state, its type and its shape.
_Leaf: TypeAlias = tuple[str, str, tuple[int, ...]]
_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class DamagedError(Exception):
  """The content of a file is not what was written."""


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
  if os.path.lexists(path):
    with errors.file_errors(path, 'read'):
      found = files.read(path).decode(errors='replace').strip()
  check_layout(found, directory)


def _describe(state: Value) -> tuple[list[_Leaf], list[_Array]]:
  """Lists the leaves of a state, and their arrays."""
  leaves: list[_Leaf] = []
  arrays = []
  for path, value in tree.flatten_with_path(state):
    array = np.asarray(value)
    leaves.append((
        '/'.join(map(str, path)),
        tf.as_dtype(array.dtype).name,
        array.shape,
    ))
    arrays.append(array)
  return leaves, arrays


def _to_bytes(array: _Array) -> bytes:
  if array.dtype.kind in 'OSU':  # Strings, such as those of a privacy event.
    texts = map(tf.compat.as_bytes, array.ravel().tolist())
    return json.dumps([text.hex() for text in texts]).encode()
  return array.tobytes()


def _from_bytes(content: bytes, kind: str, shape: tuple[int, ...]) -> _Array:
  if kind == tf.string.name:
    texts = [bytes.fromhex(text) for text in json.loads(content)]
    return np.array(texts, object).reshape(shape)
  found = np.frombuffer(content, tf.as_dtype(kind).as_numpy_dtype)
  return found.reshape(shape).copy()


def write_state(path: str, state: Value, table: Table | None = None) -> bytes:
  """Writes a state, whole or not at all.

  Args:
    path: Of the file.
    state: Arrays, numbers and strings, in any structure.
    table: The metrics up to its epoch.

  Returns:
    The content of the file.
  """
  leaves, arrays = _describe(state)
  # Bytes, since NumPy cannot name types such as bfloat16.
  contents = {
      f'leaf_{k}': np.frombuffer(_to_bytes(array), np.uint8)
      for k, array in enumerate(arrays)
  }
  if table is not None:
    contents[_TABLE] = np.frombuffer(table.to_bytes(), np.uint8)
  file = io.BytesIO()
  np.savez(file, **{_LEAVES: np.array(json.dumps(leaves))}, **contents)
  files.write(path, file.getvalue())
  return file.getvalue()


def _convert(array: _Array, like: Value) -> Value:
  """Gives an array the Python type of a leaf: an array, a number, a string."""
  if isinstance(like, str):
    return tf.compat.as_str(array.item())
  if isinstance(like, bytes):
    return array.item()
  if isinstance(like, np.generic):
    return array[()]
  if isinstance(like, (bool, int, float)):
    return type(like)(array.item())
  return array


def _parse(content: bytes) -> tuple[list[_Leaf], list[_Array]]:
  """The leaves of a file by `write_state`, and their arrays."""
  with np.load(io.BytesIO(content), allow_pickle=False) as file:
    return _parse_members(file)


def _parse_members(file: Any) -> tuple[list[_Leaf], list[_Array]]:
  leaves = [
      (name, kind, tuple(shape))
      for name, kind, shape in json.loads(str(file[_LEAVES]))
  ]
  arrays = [
      _from_bytes(file[f'leaf_{k}'].tobytes(), kind, shape)
      for k, (_, kind, shape) in enumerate(leaves)
  ]
  return leaves, arrays


def _read_table(path: str) -> Table | None:
  """The table that goes with a state; `None` if it cannot be read."""
  try:
    with np.load(io.BytesIO(files.read(path)), allow_pickle=False) as file:
      _parse_members(file)
      table = Table.from_bytes(file[_TABLE].tobytes())
  except Exception:  # NumPy and zipfile raise all kinds here.
    return None
  name = f'{_PREFIX}{len(table.rows)}.npz'
  return table if os.path.basename(path) == name else None


def newest_table(directory: str) -> Table | None:
  """The longest table that goes with a state of a run.

  Args:
    directory: Of the run.

  Returns:
    The table; `None` if no state can be read.
  """
  pattern = os.path.join(
      glob.escape(directory), CHECKPOINTS, f'{_PREFIX}*.npz'
  )
  tables = [_read_table(path) for path in glob.glob(pattern)]
  found = [table for table in tables if table is not None]
  return max(found, key=lambda table: len(table.rows)) if found else None


def read_state(
    path: str, structure: Value, expected_digest: str | None = None
) -> Value:
  """Reads a state.

  Args:
    path: Of a file by `write_state`.
    structure: A state of the same structure.
    expected_digest: Of the file, as the manifest has it.

  Returns:
    The state.

  Raises:
    DamagedError: If the file was read and its content is damaged.
    RunError: If the file cannot be read, or if it holds a state of another
      structure.
  """
  expected, _ = _describe(structure)
  # An error here says nothing about the content, which may be good.
  with errors.file_errors(path, 'read'):
    content = files.read(path)
  if expected_digest is not None and digest(content) != expected_digest:
    raise DamagedError('its checksum differs')
  try:
    found, arrays = _parse(content)
  except Exception as error:  # NumPy and zipfile raise all kinds here.
    raise DamagedError(f'{type(error).__name__}: {error}') from error
  if found != expected:
    raise errors.RunError(
        f'{os.path.dirname(path)!r} holds states of another structure than'
        " this method's: choose another `output_dir`, or `overwrite` to start"
        ' anew'
    )
  pairs = zip(arrays, tree.flatten(structure), strict=True)
  return tree.unflatten_as(
      structure, [_convert(array, like) for array, like in pairs]
  )


class Checkpoints(tff.program.ProgramStateManager):
  """The states of a run on disk, for TFF's training loop.

  The last three are kept.
  """

  def __init__(
      self,
      directory: str,
      newest: int,
      manifest: Manifest | None = None,
      table: Callable[[], Table] | None = None,
      compare: Callable[[Value, Value], None] | None = None,
  ):
    """Opens the states of a run.

    Args:
      directory: Of the run.
      newest: The last epoch whose metrics are on record. States of later ones
        are removed, since going on from there would leave a gap.
      manifest: The checksums; `None` for those in the directory.
      table: The metrics so far; `None` if states come without them.
      compare: Called with the initial state and the newest one that was saved.
    """
    self._directory = os.path.join(directory, CHECKPOINTS)
    self._newest = newest
    self._table = table
    self._compare = compare
    with errors.file_errors(directory, 'read'):
      self._manifest = manifest or Manifest(directory)
    with errors.file_errors(self._directory):
      check_states(directory)
      os.makedirs(self._directory, exist_ok=True)
      self._remove_leftovers()
      files.write(
          os.path.join(self._directory, _LAYOUT_FILE), f'{LAYOUT}\n'.encode()
      )

  def _remove_leftovers(self) -> None:
    """Removes what a killed process had not finished writing."""
    here = glob.escape(self._directory)
    for leftover in glob.glob(os.path.join(here, f'*{files.TEMPORARY}')):
      if os.path.isdir(leftover) and not os.path.islink(leftover):
        shutil.rmtree(leftover)
      else:
        os.remove(leftover)

  def _path(self, version: int) -> str:
    return os.path.join(self._directory, f'{_PREFIX}{version}.npz')

  def _versions(self) -> list[int]:
    found = (
        re.fullmatch(rf'{_PREFIX}(\d+)\.npz', name)
        for name in os.listdir(self._directory)
    )
    return sorted(int(match[1]) for match in found if match)

  def _remove(self, version: int) -> None:
    with errors.file_errors(self._directory):
      os.remove(self._path(version))
      self._manifest.states.pop(version, None)

  async def get_versions(self) -> list[int] | None:
    """The epochs of which there is a state, in order."""
    return self._versions() or None

  async def load(self, version: int, structure: Value) -> Value:
    """The state of an epoch; see `read_state`."""
    return read_state(
        self._path(version), structure, self._manifest.states.get(version)
    )

  async def load_latest(self, structure: Value) -> tuple[Value, int]:
    """The newest state that can be read and its epoch.

    Args:
      structure: A state like those that were saved.

    Returns:
      The state and its epoch; `(None, 0)` if there is none.

    Raises:
      RunError: If a state can be read and has another structure.
    """
    for version in reversed(self._versions()):
      if version > self._newest:
        logging.warning(
            'The checkpoint of epoch %d in %r is newer than the metrics; going'
            ' back to the one before it.',
            version,
            self._directory,
        )
        self._remove(version)
        continue
      try:
        found = await self.load(version, structure)
      except DamagedError as error:
        logging.warning(
            'The checkpoint of epoch %d in %r is damaged (%s); going back to'
            ' the one before it.',
            version,
            self._directory,
            error,
        )
        # Or else its epoch could not be saved again.
        self._remove(version)
        continue
      if self._compare is not None:
        self._compare(structure, found)
      return found, version
    return None, 0

  async def save(self, program_state: Value, version: int) -> None:
    """Saves a state, unless that of this epoch is there already."""
    state = await tff.program.materialize_value(program_state)
    with errors.file_errors(self._directory):
      if version in self._versions():
        return
      content = write_state(
          self._path(version), state, self._table and self._table()
      )
      for old in self._versions()[:-_KEPT]:
        self._remove(old)
      self._manifest.states[version] = digest(content)
      self._manifest.write()
