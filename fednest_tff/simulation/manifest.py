"""Checksums of a run's records, so that damaged records are noticed.

`manifest.json` has a checksum of the header and of every row of `metrics.csv`,
one of every state in `checkpoints/`, one of `weights.npz`, and one of itself.
It is written after what it describes: what it does not list had not been
finished.
"""

from collections.abc import Sequence
import hashlib
import json
import os
from typing import Any
import zlib

from fednest_tff.simulation import files

MANIFEST = 'manifest.json'


def checksum(content: bytes) -> str:
  """The checksum of a row."""
  return f'{zlib.crc32(content):08x}'


def digest(content: bytes) -> str:
  """The SHA-256 digest of a whole file."""
  return hashlib.sha256(content).hexdigest()


def _seal(content: dict[str, Any]) -> str:
  return digest(json.dumps(content, sort_keys=True).encode())


class Manifest:
  """The manifest of a run.

  Attributes:
    path: Of the file.
    is_damaged: Whether there was a file, but a damaged one.
    lines: Checksums of the lines of `metrics.csv`, that of the header first.
    states: Digests of the states, by epoch.
    weights: The epoch of `weights.npz` and its digest; `None` if there is none.
    evaluation: The columns that come from the evaluation.
    last_evaluated: The last epoch on record that was evaluated.
  """

  def __init__(self, directory: str):
    """Reads the manifest of a run, if there is one.

    Args:
      directory: Of the run.

    Raises:
      OSError: If there is a file that cannot be read.
    """
    self.path = os.path.join(directory, MANIFEST)
    self.is_damaged = False
    self.lines: list[str] = []
    self.states: dict[int, str] = {}
    self.weights: tuple[int, str] | None = None
    self.evaluation: list[str] = []
    self.last_evaluated = 0
    if os.path.lexists(self.path):
      try:
        self._parse(files.read_json(self.path))
      except (AttributeError, KeyError, TypeError, ValueError):
        self.is_damaged = True

  def _parse(self, content: Any) -> None:
    seal = content.pop('seal')
    if seal != _seal(content):
      raise ValueError('changed')
    self.lines = content['lines']
    self.states = {int(key): text for key, text in content['states'].items()}
    # Earlier versions did not write them.
    weights = content.get('weights')
    self.weights = weights and (int(weights[0]), str(weights[1]))
    self.evaluation = content['evaluation']
    self.last_evaluated = content['last_evaluated']

  def set_lines(self, lines: Sequence[bytes]) -> None:
    """Takes the checksums of `metrics.csv`."""
    self.lines = [checksum(line) for line in lines]

  def write(self) -> None:
    """Writes the file."""
    content: dict[str, Any] = dict(
        lines=self.lines,
        states={str(key): text for key, text in sorted(self.states.items())},
        weights=self.weights,
        evaluation=self.evaluation,
        last_evaluated=self.last_evaluated,
    )
    # One line: it is written in every epoch.
    text = json.dumps(content | {'seal': _seal(content)})
    files.write(self.path, text.encode() + b'\n')
    self.is_damaged = False
