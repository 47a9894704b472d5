"""Damage to a file of a run: every kind that a disk or a person does."""

import os
import shutil

KINDS = (
    'truncate', 'flip', 'delete', 'empty', 'garbage', 'folder', 'pipe', 'link',
    'nested', 'grow',
)


def files_of(directory):
  """Every file and folder of a run."""
  return sorted(path for path in directory.rglob('*') if path.name != '.lock')


def _remove(path):
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink()


def damage(path, kind, rng) -> None:
  """Damages a file, or puts something else in its place."""
  content = path.read_bytes() if path.is_file() else b''
  if kind == 'flip' and content:
    at = rng.randrange(len(content))
    changed = content[at] ^ 1 << rng.randrange(8)
    path.write_bytes(content[:at] + bytes([changed]) + content[at + 1 :])
    return
  if kind == 'truncate' and content:
    path.write_bytes(content[: rng.randrange(len(content))])
    return
  _remove(path)
  if kind == 'folder':
    path.mkdir()
  elif kind == 'pipe':
    os.mkfifo(path)
  elif kind == 'link':
    path.symlink_to(path.with_name('nowhere'))
  elif kind == 'empty':
    path.touch()
  elif kind == 'nested':
    path.write_bytes(b'[' * 200_000)
  elif kind == 'grow':
    path.write_bytes(content + content)
  elif kind != 'delete':
    path.write_bytes(rng.randbytes(rng.randrange(1, 2000)))
