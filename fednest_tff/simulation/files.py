"""Files of a run: written whole or not at all, and read only if they are files.

A file is written under another name, forced to the disk and renamed, and then
its directory is forced to the disk: after a crash there is the old file or the
new one. Symbolic links are not followed where something is written.
"""

import contextlib
import json
import os
import stat

# What a file is called while it is being written.
TEMPORARY = '.tmp'


def sync_directory(path: str) -> None:
  """Forces the names in a directory to the disk."""
  folder = os.open(path or '.', os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def write(path: str, content: bytes) -> None:
  """Writes a file so that a reader finds all of it or the old one.

  Args:
    path: Of the file.
    content: What it will hold.

  Raises:
    OSError: If that is not possible; the old file is then as it was.
  """
  temporary = path + TEMPORARY
  with contextlib.suppress(FileNotFoundError):
    os.remove(temporary)
  try:
    # It must not be there, not even as a link.
    with open(temporary, 'xb') as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      os.remove(temporary)
    raise
  sync_directory(os.path.dirname(path))


def write_json(path: str, value: object) -> None:
  """Writes `value` as JSON, all or nothing."""
  text = json.dumps(value, indent=2, default=str) + '\n'
  write(path, text.encode())


def _open(path: str, flags: int) -> int:
  # Of a pipe, opening alone would wait.
  return os.open(path, flags | os.O_NONBLOCK)


def read(path: str) -> bytes:
  """The content of a file.

  Args:
    path: Of the file, or of a link to one.

  Returns:
    Its content.

  Raises:
    OSError: If it cannot be read, or if it is no plain file: a pipe, for
      example, would be waited for without end.
  """
  with open(path, 'rb', opener=_open) as file:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
      raise OSError(None, 'it is not a file', path)
    return file.read()


def read_json(path: str) -> object:
  """What is in a JSON file.

  Args:
    path: Of the file.

  Returns:
    The value.

  Raises:
    OSError: If it cannot be read.
    ValueError: If it is not JSON, or nested too deeply for what we write.
  """
  try:
    return json.loads(read(path))
  except RecursionError as error:
    raise ValueError('nested too deeply') from error
