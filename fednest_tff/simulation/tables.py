"""Tables of numbers as CSV files: the rows of a run, one per epoch.

`Table` is the text of a run's file; `Manifest` has the checksum of each of its
lines.
"""

from collections.abc import Callable, Sequence
import csv
import dataclasses
import io
import json
import os
from typing import Any, TypeAlias
import zlib

from fednest_tff.simulation import errors, files
from fednest_tff.simulation.manifest import Manifest, checksum

# One epoch in a metrics file: numbers by name, and texts such as the method's
# name.
Row: TypeAlias = dict[str, Any]

METRICS = 'metrics.csv'


def _line(cells: Sequence[object]) -> bytes:
  text = io.StringIO(newline='')
  csv.writer(text).writerow(cells)
  return text.getvalue().encode()


def to_number(text: str) -> int | float | str:
  """A cell as a number, if it is one."""
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      continue
  return text


@dataclasses.dataclass
class Table:
  """The rows of a run, as text.

  Attributes:
    rows: Cells by name, one row per epoch; cells without a value are left out.
    evaluation: The names of the columns that come from the evaluation.
    last_evaluated: The last epoch that was evaluated.
  """

  rows: list[dict[str, str]] = dataclasses.field(default_factory=list)
  evaluation: list[str] = dataclasses.field(default_factory=list)
  last_evaluated: int = 0

  def lines(self) -> list[bytes]:
    """The lines of `metrics.csv`: the header and the rows."""
    names = list(dict.fromkeys(name for row in self.rows for name in row))
    names = names or ['epoch']
    cells = ([row.get(name, '') for name in names] for row in self.rows)
    return [_line(names), *map(_line, cells)]

  def without_evaluation(self, is_evaluated: Callable[[int], bool]) -> 'Table':
    """The table without evaluations of epochs that need none.

    The last epoch is always evaluated. If a run later goes further, that epoch
    is no longer the last, and a run that went as far at once would not have
    evaluated it.

    Args:
      is_evaluated: Whether an epoch is one that is evaluated.

    Returns:
      The table.
    """
    rows = [
        row if is_evaluated(epoch) else {
            name: text for name, text in row.items()
            if name not in self.evaluation
        }
        for epoch, row in enumerate(self.rows, start=1)
    ]
    return dataclasses.replace(self, rows=rows)

  def to_bytes(self) -> bytes:
    """The table for a checkpoint."""
    return zlib.compress(json.dumps(dataclasses.asdict(self)).encode())

  @classmethod
  def from_bytes(cls, content: bytes) -> 'Table':
    """The table of a checkpoint."""
    return cls(**json.loads(zlib.decompress(content)))


def read_table(directory: str, manifest: Manifest) -> tuple[Table, str]:
  """Reads `metrics.csv` as far as its checksums are right.

  Args:
    directory: Of the run.
    manifest: The checksums.

  Returns:
    The rows up to damage, and what is damaged; empty if nothing is.

  Raises:
    RunError: If the file cannot be read.
  """
  path = os.path.join(directory, METRICS)
  table = Table(
      evaluation=list(manifest.evaluation),
      last_evaluated=manifest.last_evaluated,
  )
  with errors.file_errors(path, 'read'):
    lines = files.read(path).splitlines(True) if os.path.lexists(path) else []
  if manifest.is_damaged:
    return table, f'{manifest.path!r} is damaged'
  if lines and not manifest.lines:
    # The checksums of the first row are written after it.
    what = f'{manifest.path!r} is missing' if len(lines) > 2 else ''
    return table, what
  header: list[str] = []
  for k, expected in enumerate(manifest.lines):
    if k >= len(lines) or checksum(lines[k]) != expected:
      what = 'the header' if k == 0 else f'the row of epoch {k}'
      is_there = 'is damaged' if k < len(lines) else 'is missing'
      return table, f'{what} of {path!r} {is_there}'
    cells = next(csv.reader([lines[k].decode()]))
    if k == 0:
      header = cells
    else:
      pairs = zip(header, cells, strict=True)
      table.rows.append({name: text for name, text in pairs if text})
  # One row more is no damage: a process was killed before it wrote the
  # checksum of that row.
  if len(lines) > len(manifest.lines) + 1:
    return table, f'{path!r} has rows that were not recorded'
  return table, ''


def check_length(path: str, table: Table, epochs: int) -> None:
  """Refuses a final run that has more epochs than it is to have.

  Args:
    path: The directory of the run.
    table: Its rows.
    epochs: How many it is to have.

  Raises:
    RunError: If it has more.
  """
  if len(table.rows) > epochs:
    raise errors.RunError(
        f'{path!r} has {len(table.rows)} epochs, more than {epochs}: `rounds`'
        ' may grow, but not shrink'
    )


def is_complete(path: str, epochs: int) -> bool:
  """Whether a metrics file has all of a run's rows, and none is damaged."""
  directory = os.path.dirname(path)
  with errors.file_errors(path, 'read'):
    manifest = Manifest(directory)
    table, damage = read_table(directory, manifest)
    return (
        len(table.rows) == epochs
        and not damage
        and manifest.last_evaluated == epochs
        and files.read(path) == b''.join(table.lines())
    )


def read_rows(path: str) -> list[Row]:
  """The rows of a metrics file; missing values are left out."""
  with errors.file_errors(path, 'read'):
    content = files.read(path)
  try:
    reader = csv.DictReader(io.StringIO(content.decode(), newline=''))
    return [
        {name: to_number(text) for name, text in row.items() if text}
        for row in reader
    ]
  except (csv.Error, TypeError, UnicodeDecodeError) as error:
    raise errors.RunError(f'{path!r} is damaged') from error


def write_rows(path: str, rows: list[Row]) -> None:
  """Writes rows as CSV, all or nothing."""
  names = list(dict.fromkeys(name for row in rows for name in row))
  table = [names, *([row.get(name, '') for name in names] for row in rows)]
  files.write(path, b''.join(map(_line, table)))
