"""IDX files, the format that MNIST and Fashion-MNIST are published in."""

import gzip
import pathlib
import struct
import zlib

import numpy as np
import numpy.typing as npt

from fednest_tff.data.images import (
    DataError,
    Images,
    LabelledImages,
    Labels,
    brief,
    check_file,
    check_labels,
    check_size,
    to_unit,
)

_NUM_CLASSES = 10
_GZIP = b'\x1f\x8b'
_PART = 2**20

# The magic number says: unsigned bytes, in so many dimensions.
_IMAGES_MAGIC = 0x0803
_LABELS_MAGIC = 0x0801

LAYOUT = (
    '`data_dir` must hold train-images-idx3-ubyte, train-labels-idx1-ubyte,'
    ' t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each plain or with .gz'
)


def load(data_dir: pathlib.Path) -> LabelledImages:
  """Reads the four files of a directory.

  Args:
    data_dir: Holds train-images-idx3-ubyte and so on, plain or .gz;
      train-images.idx3-ubyte is as good.

  Returns:
    The images. Their number and size are those the files themselves declare.
  """
  if not data_dir.is_dir():
    what = 'is not a directory' if data_dir.exists() else 'does not exist'
    raise DataError(f'`data_dir`={data_dir} {what}; {LAYOUT}.')
  # All four are looked for before the first is read, which takes a while.
  paths = {
      (part, kind): _find(data_dir, f'{part}-{kind}')
      for part in ('train', 't10k')
      for kind in ('images-idx3-ubyte', 'labels-idx1-ubyte')
  }
  train = _read_pair(*(p for (part, _), p in paths.items() if part == 'train'))
  test = _read_pair(*(p for (part, _), p in paths.items() if part == 't10k'))
  if train[0].shape[1:] != test[0].shape[1:]:
    raise DataError(
        f'{data_dir}: training images of {_size(train[0])} pixels, but test'
        f' images of {_size(test[0])}; the files are of different data sets.'
    )
  return LabelledImages(*train, *test, num_classes=_NUM_CLASSES)


def _size(images: Images) -> str:
  return 'x'.join(map(str, images.shape[1:]))


def _find(data_dir: pathlib.Path, name: str) -> pathlib.Path:
  spellings = (name, name.replace('-idx', '.idx'))
  for spelling in spellings:
    for path in (data_dir / spelling, data_dir / f'{spelling}.gz'):
      if path.exists():
        return path
  raise DataError(f'{data_dir / name}[.gz] does not exist; {LAYOUT}.')


def _read_pair(
    images_path: pathlib.Path, labels_path: pathlib.Path
) -> tuple[Images, Labels]:
  # Labels first: they are small, so mistakes show at once.
  labels = read(labels_path, _LABELS_MAGIC)
  images = read(images_path, _IMAGES_MAGIC)
  if len(images) != len(labels):
    raise DataError(
        f'{images_path} has {len(images)} images, but {labels_path} has'
        f' {len(labels)} labels; {LAYOUT}, all four of the same data set.'
    )
  check_labels(str(labels_path), labels, _NUM_CLASSES)
  return to_unit(images), labels.astype(np.int32)


def read(path: pathlib.Path, magic: int) -> npt.NDArray[np.uint8]:
  """Reads one file of unsigned bytes.

  Args:
    path: The file, plain or compressed by gzip, whatever its name says (some
      programs decompress a download and keep the name).
    magic: The number that it has to start with.

  Returns:
    uint8, shaped as the header says.
  """
  num_dims = magic & 0xFF
  header = 4 * (1 + num_dims)
  content = _read_bytes(path, header)
  found = struct.unpack('>I', content[:4])[0] if len(content) >= 4 else None
  if found is not None and found != magic:
    raise DataError(
        f'{path}: magic number {found} instead of {magic}, so this is no IDX'
        f' file of {"images" if num_dims == 3 else "labels"}; {LAYOUT}.'
    )
  if len(content) < header:
    raise DataError(
        f'{path}: {len(content)} bytes are too short for an IDX file; fetch it'
        f' again. {LAYOUT}.'
    )
  shape = struct.unpack(f'>{num_dims}I', content[4:header])
  expected = header + int(np.prod(shape, dtype=object))
  check_size(path, expected)
  content = _read_bytes(path, expected + 1)
  if len(content) != expected:
    what, more = (
        ('cut short', '') if len(content) < expected
        else ('too long', ' or more')
    )
    raise DataError(
        f'{path}: {what}, {len(content)} bytes{more} where its header promises'
        f' {expected}; fetch it again. {LAYOUT}.'
    )
  if 0 in shape:
    raise DataError(f'{path}: holds no examples; fetch it again. {LAYOUT}.')
  return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read_bytes(path: pathlib.Path, limit: int) -> bytes:
  """The first bytes of a file, decompressed; no more than that is unpacked."""
  check_file(path)
  try:
    with path.open('rb') as plain:
      is_compressed = plain.read(len(_GZIP)) == _GZIP
      if not is_compressed:
        plain.seek(0)
        return plain.read(min(limit, path.stat().st_size + 1))
  except OSError as error:
    raise DataError(f'{path}: cannot be read ({brief(error)}).') from error
  try:
    # In parts, since a read takes all the memory that it is asked for.
    content = bytearray()
    with gzip.open(path, 'rb') as unpacked:
      while part := unpacked.read(min(_PART, limit - len(content))):
        content += part
    return bytes(content)
  except (EOFError, OSError, zlib.error) as error:
    raise DataError(
        f'{path}: cut short or damaged gzip ({brief(error)}); fetch it again.'
        f' {LAYOUT}.'
    ) from error
