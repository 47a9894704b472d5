"""The data sets, by name."""

import os
import pathlib
import types
from typing import TYPE_CHECKING
import urllib.error
import urllib.request

import numpy as np

from fednest_tff.data import emnist, idx
from fednest_tff.data.images import (
    DataError,
    Images,
    LabelledImages,
    Labels,
    brief,
    check_labels,
    to_unit,
)

if TYPE_CHECKING:  # Otherwise imported where it is used, because it is slow.
  from tensorflow_datasets.core import DatasetBuilder

DATASETS = ('digits', 'mnist', 'fashion_mnist', 'emnist')

# Numbers of training and test examples that tensorflow-datasets must deliver.
_SIZES = {'mnist': (60_000, 10_000), 'fashion_mnist': (60_000, 10_000)}
_SECONDS_WITHOUT_ANSWER = 20


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    only_digits: bool = True,
) -> LabelledImages:
  """Loads a data set.

  Args:
    name: One of `DATASETS`.
    data_dir: Where the files are; `None` for the copy that scikit-learn brings
      along (digits) or a download that is kept for the next time. Four IDX
      files for mnist and fashion_mnist, an .npz file for emnist.
    only_digits: Of emnist, whether to leave out the letters.

  Returns:
    The images.

  Raises:
    DataError: If files are missing or damaged, or a download fails.
  """
  if name not in DATASETS:
    raise DataError(
        f'`dataset`={name} is not known; choose from {", ".join(DATASETS)}.'
    )
  # What a flag that nobody set may hold.
  if data_dir == '':
    data_dir = None
  if name == 'digits':
    if data_dir is not None:
      raise DataError(
          f'`data_dir`={data_dir} has no use with `dataset`=digits, which comes'
          ' with scikit-learn; leave it out, or choose another `dataset`.'
      )
    return _load_digits()
  if data_dir is None:
    if name == 'emnist':
      return emnist.load_database(only_digits)
    return _load_tfds(name)
  path = pathlib.Path(data_dir).expanduser()
  try:
    if name == 'emnist':
      return emnist.load_npz(path, only_digits)
    return idx.load(path)
  except OSError as error:
    raise DataError(
        f'`data_dir`={data_dir} cannot be read ({brief(error)}).'
    ) from error


def _load_digits() -> LabelledImages:
  """Loads digits; a fifth of each class, always the same, is for testing."""
  # Imported here because it is slow.
  from sklearn import datasets

  digits = datasets.load_digits()
  images = (digits.images / 16).astype(np.float32)
  labels = digits.target.astype(np.int32)
  rng = np.random.default_rng(0)
  is_test = np.zeros(len(labels), bool)
  for label in range(10):
    members = rng.permutation(np.flatnonzero(labels == label))
    is_test[members[: round(len(members) / 5)]] = True
  return LabelledImages(
      images[~is_test],
      labels[~is_test],
      images[is_test],
      labels[is_test],
      num_classes=10,
  )


def _load_tfds(name: str) -> LabelledImages:
  # Imported here because it is slow.
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name)
    if not pathlib.Path(builder.data_dir).exists():
      _check_network(builder)
    builder.download_and_prepare()
  except DataError:
    raise
  # No list of what a download may raise is complete.
  except Exception as error:
    raise DataError(
        f'`dataset`={name}: the download failed ({brief(error)}); try again, or'
        f' fetch the files yourself: {idx.LAYOUT}.'
    ) from error
  try:
    parts = [
        _read_split(tfds, builder, split, size)
        for split, size in zip(('train', 'test'), _SIZES[name], strict=True)
    ]
  except DataError:
    raise
  except Exception as error:
    raise _damaged(builder, brief(error)) from error
  (train_images, train_labels), (test_images, test_labels) = parts
  return LabelledImages(
      train_images, train_labels, test_images, test_labels, num_classes=10
  )


def _check_network(builder: 'DatasetBuilder') -> None:
  """Fails soon if there is no network, where tfds would retry for minutes."""
  url = next(iter(builder.url_infos), None)
  if url is None:
    return
  request = urllib.request.Request(url, method='HEAD')
  try:
    urllib.request.urlopen(request, timeout=_SECONDS_WITHOUT_ANSWER).close()
  except urllib.error.HTTPError:
    # There is a network, and this server does not like such requests.
    return


def _damaged(builder: 'DatasetBuilder', what: str) -> DataError:
  return DataError(
      f'{builder.data_dir}: incomplete or damaged ({what}); delete it and run'
      f' again, or fetch the files yourself: {idx.LAYOUT}.'
  )


def _read_split(
    tfds: types.ModuleType,
    builder: 'DatasetBuilder',
    split: str,
    size: int,
) -> tuple[Images, Labels]:
  """Images and labels of a split, which has to have `size` examples."""
  # Not `batch_size=-1`, which ends the process if the size is not on record.
  dataset = builder.as_dataset(split=split, as_supervised=True).batch(1000)
  batches = list(tfds.as_numpy(dataset))
  count = sum(len(labels) for _, labels in batches)
  if count != size:
    raise _damaged(builder, f'{count} of {size} examples for {split}')
  images, labels = (
      np.concatenate(arrays) for arrays in zip(*batches, strict=True)
  )
  check_labels(str(builder.data_dir), labels, 10)
  return to_unit(images[..., 0]), labels.astype(np.int32)
