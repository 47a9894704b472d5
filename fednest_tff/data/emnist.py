"""EMNIST by writer: from an .npz file, or from TFF's SQLite database."""

from collections.abc import Iterator, Mapping
import contextlib
import os
import pathlib
import socket
import tempfile
from typing import Any, TypeAlias
import zipfile

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.data.images import (
    DataError,
    Images,
    Integers,
    LabelledImages,
    Labels,
    brief,
    check_file,
    check_labels,
    check_size,
    to_unit,
)

# Images, labels and writers.
_Part: TypeAlias = tuple[Images, Integers, Integers]

_NUM_DIGITS = 10
_NUM_CLASSES = 62
_SHAPE = (28, 28)

LAYOUT = (
    '`data_dir` must be an .npz file, or a directory with exactly one, with the'
    ' arrays {train,test}_images (uint8 [n, 28, 28], background 255),'
    ' {train,test}_labels (integers 0 to 61), {train,test}_writer (integers,'
    ' positions in writer_ids) and writer_ids'
)

# Numbers of training and test examples in TFF's database, by `only_digits`.
_DATABASE_SIZES = {True: (341_873, 40_832), False: (671_585, 77_483)}
_DATABASE = 'emnist_all.sqlite'
_SECONDS_WITHOUT_ANSWER = 20


def load_npz(data_dir: pathlib.Path, only_digits: bool) -> LabelledImages:
  """Reads a file of images by writer; see `LAYOUT`.

  Args:
    data_dir: The file, or a directory with one .npz file.
    only_digits: Whether to leave out letters, and with them writers of nothing
      else.

  Returns:
    The images. Writers are positions in the file's `writer_ids`.
  """
  path = _find(data_dir)
  arrays = _read_npz(path)
  parts = [_check_part(path, arrays, part) for part in ('train', 'test')]
  kept: list[_Part] = []
  for images, labels, writers in parts:
    if only_digits:
      digits = labels < _NUM_DIGITS
      images, labels, writers = images[digits], labels[digits], writers[digits]
    if not len(labels):
      raise DataError(f'{path}: no digits; pass `emnist_only_digits`=False.')
    kept.append((to_unit(255 - images), labels, writers))
  return _join(kept[0], kept[1], only_digits)


def _join(train: _Part, test: _Part, only_digits: bool) -> LabelledImages:
  return LabelledImages(
      train_images=train[0],
      train_labels=train[1].astype(np.int32),
      test_images=test[0],
      test_labels=test[1].astype(np.int32),
      num_classes=_NUM_DIGITS if only_digits else _NUM_CLASSES,
      train_writers=train[2].astype(np.int32),
      test_writers=test[2].astype(np.int32),
  )


def _find(data_dir: pathlib.Path) -> pathlib.Path:
  if data_dir.exists() and not data_dir.is_dir():
    return data_dir
  if not data_dir.is_dir():
    raise DataError(f'`data_dir`={data_dir} does not exist; {LAYOUT}.')
  paths = sorted(data_dir.glob('*.npz'))
  if len(paths) != 1:
    names = ', '.join(path.name for path in paths[:3]) or 'none'
    raise DataError(
        f'`data_dir`={data_dir} has {len(paths)} .npz files ({names});'
        f' {LAYOUT}.'
    )
  return paths[0]


def _read_npz(path: pathlib.Path) -> dict[str, Integers]:
  keys = [
      f'{part}_{kind}'
      for kind in ('labels', 'writer', 'images')
      for part in ('train', 'test')
  ]
  keys.append('writer_ids')
  try:
    # `np.load` takes anything that is no zip for a pickle, and says so.
    check_file(path)
    if not zipfile.is_zipfile(path):
      raise DataError(
          f'{path}: no .npz file, or one cut short; fetch it again. {LAYOUT}.'
      )
    with np.load(path, allow_pickle=False) as archive:
      missing = [key for key in keys if key not in archive.files]
      if missing:
        raise DataError(f'{path}: lacks {", ".join(missing)}; {LAYOUT}.')
      for key in keys:
        _check_member(path, archive, key)
      return {key: archive[key] for key in keys}
  except DataError:
    raise
  # A damaged header makes NumPy raise almost anything.
  except Exception as error:
    raise DataError(
        f'{path}: damaged ({brief(error)}); fetch it again. {LAYOUT}.'
    ) from error


def _check_member(path: pathlib.Path, archive: Any, key: str) -> None:
  """Refuses what is no array, or unpacks to more than its header promises."""
  with archive.zip.open(f'{key}.npy') as file:
    try:
      version = np.lib.format.read_magic(file)
      read = getattr(
          np.lib.format, f'read_array_header_{version[0]}_{version[1]}'
      )
      shape, _, dtype = read(file)
    except (AttributeError, ValueError) as error:
      raise DataError(
          f'{path}: {key} is not an array ({brief(error)}); {LAYOUT}.'
      ) from error
    promised = int(np.prod(shape, dtype=object)) * dtype.itemsize
    unpacked = archive.zip.getinfo(f'{key}.npy').file_size - file.tell()
  check_size(path, promised)
  # Objects are refused when they are read.
  if unpacked != promised and not dtype.hasobject:
    raise DataError(
        f'{path}: {key} has {unpacked} bytes where its header promises'
        f' {promised}; fetch it again. {LAYOUT}.'
    )


def _check_part(
    path: pathlib.Path, arrays: Mapping[str, Integers], part: str
) -> tuple[Integers, Integers, Integers]:
  """The images, labels and writers of a part, if they are as they should be."""
  images, labels, writers = (
      arrays[f'{part}_{kind}'] for kind in ('images', 'labels', 'writer')
  )
  if images.dtype != np.uint8 or images.shape[1:] != _SHAPE:
    raise DataError(
        f'{path}: {part}_images is {images.dtype} {list(images.shape)};'
        f' {LAYOUT}.'
    )
  if not len(images):
    raise DataError(f'{path}: {part}_images is empty; {LAYOUT}.')
  for name, array in (('labels', labels), ('writer', writers)):
    if array.dtype.kind not in 'iu' or array.ndim != 1:
      raise DataError(
          f'{path}: {part}_{name} is {array.dtype} {list(array.shape)};'
          f' {LAYOUT}.'
      )
    if len(array) != len(images):
      raise DataError(
          f'{path}: {len(images)} {part}_images, but {len(array)}'
          f' {part}_{name}; {LAYOUT}.'
      )
  check_labels(f'{path}: {part}_labels', labels, _NUM_CLASSES)
  num_writers = arrays['writer_ids'].size
  if writers.min() < 0 or writers.max() >= num_writers:
    raise DataError(
        f'{path}: {part}_writer goes from {writers.min()} to {writers.max()},'
        f' but writer_ids has {num_writers} entries; {LAYOUT}.'
    )
  return images, labels, writers


def load_database(only_digits: bool) -> LabelledImages:
  """Reads TFF's database, which is downloaded if it is not in ~/.tff yet."""
  path = pathlib.Path.home() / '.tff' / _DATABASE
  if not path.exists():
    _download(path)
  try:
    train, test = tff.simulation.datasets.emnist.load_data(
        only_digits, cache_dir=str(path.parent)
    )
    sizes = _DATABASE_SIZES[only_digits]
    numbers = {name: k for k, name in enumerate(train.client_ids)}
    parts = [
        _read_clients(path, clients, numbers, size)
        for clients, size in zip((train, test), sizes, strict=True)
    ]
  except DataError:
    raise
  # Neither TFF nor TensorFlow says what a damaged database makes them raise.
  except Exception as error:
    raise _damaged(path, brief(error)) from error
  num_classes = _NUM_DIGITS if only_digits else _NUM_CLASSES
  for _, labels, _ in parts:
    check_labels(str(path), labels, num_classes)
  return _join(parts[0], parts[1], only_digits)


def _damaged(path: pathlib.Path, what: str) -> DataError:
  return DataError(
      f'{path}: incomplete or damaged ({what}); delete it and run again, or'
      f' use a file of your own: {LAYOUT}.'
  )


def _download(path: pathlib.Path) -> None:
  """Downloads the database; it appears under its name only when complete.

  TFF itself writes to the final name from the start, and takes whatever it
  finds there for the whole.

  Args:
    path: Where it goes.
  """
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory('.incomplete', dir=path.parent) as staging,
        _default_timeout(_SECONDS_WITHOUT_ANSWER),
    ):
      tff.simulation.datasets.emnist.load_data(cache_dir=staging)
      os.replace(pathlib.Path(staging) / _DATABASE, path)
  except Exception as error:
    raise DataError(
        f'`dataset`=emnist: the download failed ({brief(error)}); try again, or'
        f' use a file of your own: {LAYOUT}.'
    ) from error


@contextlib.contextmanager
def _default_timeout(seconds: float) -> Iterator[None]:
  """Sets a default timeout for sockets: TFF downloads without one."""
  before = socket.getdefaulttimeout()
  socket.setdefaulttimeout(seconds)
  try:
    yield
  finally:
    socket.setdefaulttimeout(before)


def _read_clients(
    path: pathlib.Path,
    clients: tff.simulation.datasets.ClientData,
    numbers: Mapping[str, int],
    size: int,
) -> tuple[Images, Labels, Labels]:
  """All examples of a `ClientData`, in an order that is always the same.

  Args:
    path: Of the database, for messages.
    clients: The `ClientData`.
    numbers: From client ids to numbers of writers.
    size: How many examples there have to be.

  Returns:
    Images, labels and writers.
  """
  # Into place at once: lists of parts would need twice the memory.
  images = np.empty((size, *_SHAPE), np.float32)
  labels, writers = np.empty(size, np.int32), np.empty(size, np.int32)
  ids = tf.constant(clients.client_ids)

  # A single dataset, since one for each client takes minutes to construct.
  def one_client(k: tf.Tensor) -> tf.data.Dataset:
    batches = clients.serializable_dataset_fn(ids[k]).batch(1000)
    return batches.map(lambda batch: (k, batch['pixels'], batch['label']))

  batches = tf.data.Dataset.range(len(clients.client_ids)).interleave(
      one_client, cycle_length=8, num_parallel_calls=8, deterministic=True
  )
  start = 0
  for k, some_images, some_labels in batches.as_numpy_iterator():
    stop = start + len(some_labels)
    if stop > size:
      raise _damaged(path, f'more than the {size} examples it should have')
    # The database has ink 0 on background 1.
    images[start:stop] = 1 - some_images
    labels[start:stop] = some_labels
    writers[start:stop] = numbers[clients.client_ids[k]]
    start = stop
  if start != size:
    raise _damaged(path, f'{start} of {size} examples')
  return images, labels, writers
