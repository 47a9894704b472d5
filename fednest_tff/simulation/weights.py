"""Weights of a run in a file: plain NumPy arrays by name."""

import io
import os

import numpy as np
import tree

from fednest_tff.simulation import errors, files
from fednest_tff.simulation.manifest import Manifest, digest
from fednest_tff.structures import Value

WEIGHTS = 'weights.npz'


def _names(weights: Value) -> list[str]:
  return [
      '/'.join(map(str, path)) for path, _ in tree.flatten_with_path(weights)
  ]


def save_weights(path: str, weights: Value) -> bytes:
  """Writes weights, whole or not at all.

  Args:
    path: Of a .npz file. Each array has the name of its place, such as
      'outer/0/weight'; `numpy.load` reads it.
    weights: What `process.get_model_weights` returns.

  Returns:
    The content of the file.
  """
  arrays = dict(
      zip(_names(weights), map(np.asarray, tree.flatten(weights)), strict=True)
  )
  file = io.BytesIO()
  np.savez(file, **arrays)
  with errors.file_errors(path):
    files.write(path, file.getvalue())
  return file.getvalue()


def has_weights(directory: str, epoch: int) -> bool:
  """Whether a run has the weights of an epoch, undamaged.

  Args:
    directory: Of the run.
    epoch: Its last one.

  Returns:
    Whether `weights.npz` is what the manifest says.

  Raises:
    RunError: If a file cannot be read.
  """
  path = os.path.join(directory, WEIGHTS)
  with errors.file_errors(path, 'read'):
    expected = Manifest(directory).weights
    # Not through a link: it is replaced by a file.
    if os.path.islink(path) or not os.path.exists(path):
      return False
    return expected == (epoch, digest(files.read(path)))


def load_weights(path: str, like: Value) -> Value:
  """Reads the weights of a run.

  Args:
    path: Of a `weights.npz`, or of the directory of a run that has ended.
    like: Weights of the same structure, such as those of
      `process.initialize()`.

  Returns:
    The weights, for `process.set_model_weights`.

  Raises:
    RunError: If the file cannot be read, or holds other weights.
  """
  if os.path.isdir(path):
    path = os.path.join(path, WEIGHTS)
  try:
    content = files.read(path)
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
      found = {name: file[name] for name in file.files}
  except OSError as error:
    raise errors.RunError(
        f'cannot read {path!r}: {error.strerror or error}'
    ) from error
  except Exception as error:  # NumPy and zipfile raise all kinds here.
    raise errors.RunError(f'{path!r} is no file of weights') from error
  expected = {
      name: np.shape(leaf)
      for name, leaf in zip(_names(like), tree.flatten(like), strict=True)
  }
  shapes = {name: array.shape for name, array in found.items()}
  if shapes != expected:
    raise errors.RunError(
        f'{path!r} holds weights of another model: {shapes}, not {expected}'
    )
  return tree.unflatten_as(like, [found[name] for name in expected])
