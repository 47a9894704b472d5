"""What every source of images gives, and the error that all of them raise."""

import hashlib
import pathlib
import re
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Images: TypeAlias = npt.NDArray[np.float32]
Labels: TypeAlias = npt.NDArray[np.int32]
# Integers of any width.
Integers: TypeAlias = npt.NDArray[np.integer[Any]]
_LARGEST_FILE = 2**32


class DataError(ValueError):
  """Data or a flag about data is unusable; the message is a single line."""

  def __init__(self, message: str):
    super().__init__(' '.join(str(message).splitlines()))


class LabelledImages(NamedTuple):
  """Images with labels, not yet divided among clients.

  Attributes:
    train_images: float32 [n, height, width] in [0, 1]: ink 1, background 0.
    train_labels: int32 [n].
    test_images: As `train_images`.
    test_labels: As `train_labels`.
    num_classes: Labels lie in [0, num_classes).
    train_writers: int32 [n], a number for each writer; `None` if the data does
      not say who wrote what.
    test_writers: As `train_writers`, with the same numbers.
  """

  train_images: Images
  train_labels: Labels
  test_images: Images
  test_labels: Labels
  num_classes: int
  train_writers: Labels | None = None
  test_writers: Labels | None = None

  def __repr__(self) -> str:
    return (
        f'<LabelledImages: {len(self.train_labels)} training and'
        f' {len(self.test_labels)} test examples, {self.num_classes} classes,'
        f' images {"x".join(map(str, self.train_images.shape[1:]))}>'
    )


def fingerprint(images: LabelledImages) -> str:
  """A hash of all images, labels and writers, the same wherever they are."""
  found = hashlib.sha256()
  for name, value in images._asdict().items():
    array = np.asarray(value) if value is not None else np.zeros(0)
    found.update(f'{name} {array.dtype} {array.shape}\n'.encode())
    found.update(np.ascontiguousarray(array).data)
  return found.hexdigest()


def to_unit(images: Integers) -> Images:
  """From uint8 to float32 in [0, 1]."""
  return images.astype(np.float32) / np.float32(255)


def check_labels(where: str, labels: Integers, num_classes: int) -> None:
  """Raises a `DataError` unless all labels lie in [0, num_classes)."""
  wrong = (labels < 0) | (labels >= num_classes)
  if wrong.any():
    raise DataError(
        f'{where}: label {labels[wrong][0]} at position {np.argmax(wrong)} is'
        f' outside of 0 to {num_classes - 1}; the file is damaged or of another'
        ' data set.'
    )


def brief(error: BaseException) -> str:
  """An error's type and the beginning of its message, in one line."""
  # TensorFlow begins with the node of a graph.
  text = re.sub(r'^\{\{.*?\}\}', '', str(error))
  text = ' '.join(text.split())
  if len(text) > 200:
    text = text[:200] + '...'
  return f'{type(error).__name__}: {text}' if text else type(error).__name__


def check_file(path: pathlib.Path) -> None:
  """Raises a `DataError` if something that is there is no plain file.

  A pipe, for example, would be waited for without end.
  """
  if path.exists() and not path.is_file():
    raise DataError(f'{path}: cannot be read (it is not a file).')


def check_size(path: pathlib.Path, size: int) -> None:
  """Raises a `DataError` if a file promises more than it can sensibly hold."""
  if size > _LARGEST_FILE:
    raise DataError(
        f'{path}: its header promises {size} bytes, more than the'
        f' {_LARGEST_FILE} that are read; the file is damaged.'
    )
