"""What can end a run; each has a message of one line."""

from collections.abc import Iterator
import contextlib

import tensorflow as tf


class RunError(Exception):
  """The run cannot start or go on: a file, a directory, a setting."""


class NonFiniteError(Exception):
  """Something became infinite or not a number."""


class StoppedError(Exception):
  """A signal asked the run to stop; its state has been saved."""

  def __init__(self, message: str, signal_number: int):
    super().__init__(message)
    self.signal_number = signal_number


def _first_line(error: BaseException) -> str:
  return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def file_errors(path: str) -> Iterator[None]:
  """Turns what the file system refuses into a `RunError` that names `path`."""
  try:
    yield
  except (
      OSError,
      # What tf.io.gfile raises in place of OSError.
      tf.errors.FailedPreconditionError,
      tf.errors.NotFoundError,
      tf.errors.OutOfRangeError,
      tf.errors.PermissionDeniedError,
      tf.errors.ResourceExhaustedError,
      tf.errors.UnavailableError,
      tf.errors.UnknownError,
  ) as error:
    raise RunError(
        f'cannot write to {path!r}: {_first_line(error)}; what was there is'
        ' untouched'
    ) from error
