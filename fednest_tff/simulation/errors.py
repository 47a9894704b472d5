"""The errors that end a run; each has a message of one line."""

from collections.abc import Iterator
import contextlib
import re

import tensorflow as tf


class RunError(Exception):
  """The run cannot start or go on: a file, a directory, a setting."""


class NonFiniteError(Exception):
  """Something became infinite or not a number.

  Attributes:
    reason: What, without the names of files, for tables that are published.
  """

  def __init__(self, reason: str, about_files: str = ''):
    super().__init__(reason + (f' ({about_files})' if about_files else ''))
    self.reason = reason


class StoppedError(Exception):
  """A signal asked the run to stop; its state has been saved."""

  def __init__(self, message: str, signal_number: int):
    super().__init__(message)
    self.signal_number = signal_number


class InterruptedRunError(KeyboardInterrupt):
  """A second signal ended an epoch; the last checkpoint is kept."""

  def __init__(self, signal_number: int):
    super().__init__(f'signal {signal_number}')
    self.signal_number = signal_number


def _reason(error: BaseException) -> str:
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  # TensorFlow begins with the nodes of a graph.
  text = re.sub(r'\{\{.*?\}\}', '', str(error)).strip()
  return (text or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def file_errors(path: str, action: str = 'write to') -> Iterator[None]:
  """Turns what the file system refuses into a `RunError`.

  Args:
    path: What the message names; if something was to be read, the file that
      the error itself names comes first.
    action: What was tried: 'write to' or 'read'.

  Yields:
    Once.
  """
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
    if action == 'read' and getattr(error, 'filename', None):
      path = str(error.filename)
    raise RunError(f'cannot {action} {path!r}: {_reason(error)}') from error
