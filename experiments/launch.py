"""The life of a program from its first instant: signals, errors, exit codes.

`python -m experiments.NAME` imports this module before anything heavy. From
then on

- SIGINT, SIGTERM and SIGHUP end the program with one line and the exit code
  128 + the signal's number: also while it imports, traces or compiles. Python
  runs a handler only between two of its own instructions, and TensorFlow can
  keep it from that for minutes. So a thread watches, too: it ends the program
  if the main thread does not react in time, and at once at a second signal.
  Signals that were ignored at the start, as under nohup, stay ignored;
- an exception that nobody expected is one line that names a file with the
  traceback, and exit code 70.
"""

from collections.abc import Callable, Iterator
import contextlib
import io
import os
import resource
import select
import signal
import sys
import tempfile
import threading
import traceback
import types

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The exit code of an error that nobody expected.
UNEXPECTED = 70
_SECONDS_TO_REACT = 5.0
# TensorFlow with its logs, plots and checkpoints opens about 40.
_NEEDED_FILES = 64
TRACEBACK = 'traceback.txt'

_cleanups: list[Callable[[], None]] = []
# Held by the thread that ends the program.
_ending = threading.Lock()
_ending_thread: int | None = None


def say(text: str) -> None:
  """Prints one line to the standard error; it may be closed, or full."""
  with contextlib.suppress(OSError, ValueError, AttributeError):
    print(' '.join(text.split()), file=sys.stderr, flush=True)


def claim() -> None:
  """Makes this thread the one that ends the program and says why.

  Does not return if another one already does so.
  """
  global _ending_thread
  if _ending_thread == threading.get_ident():
    return
  if not _ending.acquire(blocking=False):
    threading.Event().wait()
  _ending_thread = threading.get_ident()


@contextlib.contextmanager
def cleanup(function: Callable[[], None]) -> Iterator[None]:
  """Has `function` called if a signal ends the program meanwhile."""
  _cleanups.append(function)
  try:
    yield
  finally:
    _cleanups.remove(function)


def _leave(number: int) -> None:
  """Ends the program because of a signal."""
  if _ending_thread == threading.get_ident():
    return  # It is ending already.
  claim()
  for function in reversed(_cleanups):
    with contextlib.suppress(Exception):
      function()
  with contextlib.suppress(OSError, ValueError, AttributeError):
    sys.stdout.flush()
  say(
      f'interrupted by {signal.Signals(number).name}; what is on disk is kept:'
      ' run the same command again to go on'
  )
  os._exit(128 + number)


def _on_signal(number: int, frame: types.FrameType | None) -> None:
  del frame
  _leave(number)


def _watch(descriptor: int) -> None:
  """Ends the program where its main thread does not."""
  count = 0
  while True:
    number = os.read(descriptor, 1)[0]
    if number not in SIGNALS:
      continue
    count += 1
    if count == 1:
      # A run that notes the signal ends after its epoch.
      if signal.getsignal(number) is not _on_signal:
        continue
      if select.select([descriptor], [], [], _SECONDS_TO_REACT)[0]:
        continue
    if not _ending.locked():
      _leave(number)
    # Another thread is ending the program, and has had its time.
    select.select([], [], [], _SECONDS_TO_REACT)
    os._exit(128 + number)


def catch_signals() -> None:
  """Takes care of signals from now on."""
  for number in SIGNALS:
    if signal.getsignal(number) is not signal.SIG_IGN:
      signal.signal(number, _on_signal)
  reading, writing = os.pipe()
  os.set_blocking(writing, False)
  signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
  threading.Thread(target=_watch, args=(reading,), daemon=True).start()


def _write_traceback(error: BaseException, directory: str | None) -> str:
  """Writes the traceback of an error; returns where it is."""
  text = ''.join(traceback.format_exception(error))
  if directory is not None and os.path.isdir(directory):
    path = os.path.join(directory, TRACEBACK)
    with contextlib.suppress(OSError):
      with open(path, 'w', errors='backslashreplace') as file:
        file.write(text)
      return path
  try:
    with tempfile.NamedTemporaryFile(
        'w', prefix='fednest_tff-', suffix='.txt', delete=False,
        errors='backslashreplace',
    ) as temporary:
      temporary.write(text)
    return temporary.name
  except OSError as failure:
    return f'no file ({failure.strerror})'


def describe(error: BaseException, directory: str | None = None) -> str:
  """One line about an error that nobody expected; writes its traceback.

  Args:
    error: The error.
    directory: Where the traceback goes; `None` for that of temporary files.

  Returns:
    The line.
  """
  text = ' '.join(str(error).split())
  if len(text) > 300:
    text = text[:300] + ' ...'
  path = _write_traceback(error, directory)
  return f'{type(error).__name__}: {text} (traceback in {path!r})'


def _on_error(
    kind: type[BaseException],
    error: BaseException,
    trace: types.TracebackType | None,
) -> None:
  del trace
  claim()
  if issubclass(kind, KeyboardInterrupt):
    say('interrupted')
    os._exit(128 + signal.SIGINT)
  say(f'error: {describe(error)}')
  os._exit(UNEXPECTED)


def flush_output() -> str | None:
  """Flushes the standard output.

  Returns:
    Why that is not possible; `None` if it is. Whatever is printed later is
    then lost without another error.
  """
  try:
    if sys.stdout is not None:
      sys.stdout.flush()
  except OSError as error:
    with contextlib.suppress(OSError):
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, sys.stdout.fileno())
      os.close(nowhere)
    return error.strerror
  return None


def _open_standard_streams() -> None:
  """Opens those that are closed, or else the next file takes their place."""
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)


def prepare() -> None:
  """Prepares this process for being a program."""
  catch_signals()
  sys.excepthook = _on_error
  _open_standard_streams()
  for stream in (sys.stdout, sys.stderr):
    # A path, or a plus-minus sign, may have no place in the encoding.
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors='backslashreplace')
  allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
  if 0 <= allowed < _NEEDED_FILES:
    say(
        f'error: this process may open only {allowed} files (ulimit -n); it'
        f' needs {_NEEDED_FILES}'
    )
    os._exit(2)
