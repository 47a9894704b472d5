"""Runs binaries in children that can be killed; imports TensorFlow once.

`python -m tests.helpers.killable` reads orders, a line of JSON each, and
answers with the child's process id and, once it has ended, its exit code
(negative: the signal that ended it). Children are forked before TensorFlow
starts threads.
"""

import gc
import hashlib
import importlib
import io
import json
import os
import pathlib
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import traceback


def _die():
  os.kill(os.getpid(), signal.SIGKILL)
  threading.Event().wait()


def _replace_nth(owner, name, part, call, substitute):
  """Has the `call`-th call about a path with `part` do something else."""
  original = getattr(owner, name)
  count = 0

  def replacement(*args, **kwargs):
    nonlocal count
    if args and part in str(args[-1 if name == 'replace' else 0]):
      count += 1
      if count == call:
        return substitute(original, *args, **kwargs)
    return original(*args, **kwargs)

  setattr(owner, name, replacement)


def _before(original, *args, **kwargs):
  _die()


def _after(original, *args, **kwargs):
  original(*args, **kwargs)
  _die()


def _half(original, path, content):
  with open(f'{path}.tmp', 'wb') as file:
    file.write(content[: len(content) // 2])
  _die()


def _soon_after(seconds):
  def substitute(original, *args, **kwargs):
    original(*args, **kwargs)
    # Nobody handles this signal: the system ends the process, whatever it does.
    signal.setitimer(signal.ITIMER_REAL, seconds)

  return substitute


def die_at(where: str, call: int, seconds: float = 0) -> None:
  """Arranges for this process to be killed at a certain moment.

  Args:
    where: What is written then, and whether before, after or in the middle.
    call: The how many-th time.
    seconds: How much later; only after something was written.
  """
  from fednest_tff.simulation import files

  parts = {'csv': 'metrics.csv', 'checkpoint': 'program_state'}
  what, _, when = where.partition('_')
  part = parts.get(what, where)
  if when == 'half':
    _replace_nth(files, 'write', part, call, _half)
  elif when == 'after':
    substitute = _soon_after(seconds) if seconds else _after
    _replace_nth(os, 'replace', part, call, substitute)
  elif where == 'old_checkpoint':
    _replace_nth(os, 'remove', 'program_state', call, _before)
  else:
    # config.json, layout, manifest.json, summary.json, plot.png, and so on.
    _replace_nth(os, 'replace', part, call, _before)


def keep_copies(directory: str, folder: str) -> None:
  """Copies a run after each of its rows: what is left if it is killed then."""
  replace, count = os.replace, 0

  def replacement(source, target):
    nonlocal count
    replace(source, target)
    if os.path.basename(target) == 'metrics.csv':
      count += 1
      shutil.copytree(directory, os.path.join(folder, str(count)))

  os.replace = replacement


def _places():
  """Functions of a run in the order in which they are called."""
  from experiments import program, runs
  import fednest_tff
  from fednest_tff import simulation
  from fednest_tff.runtime.compiler import lowering
  from fednest_tff.simulation import records, run_files

  return {
      'flags': (program, '_import_methods'),
      'data': (runs, 'make_trial'),
      'directory': (run_files, 'check_kinds'),
      'tracing': (fednest_tff, 'build'),
      'compiling': (lowering, 'build_function'),
      'recording': (records.Recorder, 'write'),
      'drawing': (simulation, 'draw'),
      'printing': (runs, '_show'),
  }


def _keep_busy():
  """Keeps the main thread from Python's own instructions, as TensorFlow may."""
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)


def at(where: str, call: int, number: int | None, marker: str) -> None:
  """Has a signal come, or the process stuck, in the `call`-th call there."""
  owner, name = _places()[where]
  original, count = getattr(owner, name), 0

  def replacement(*args, **kwargs):
    nonlocal count
    count += 1
    if count == call:
      pathlib.Path(marker).touch()
      if number is None:
        _keep_busy()
      os.kill(os.getpid(), number)
    return original(*args, **kwargs)

  setattr(owner, name, replacement)


def _run(order: dict) -> None:
  log = os.open(order['log'], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(log, 1)
  os.dup2(log, 2)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  signal.signal(signal.SIGINT, signal.default_int_handler)
  if order['largest_file'] is not None:
    limit = order['largest_file']
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
  if order['die_at'] is not None:
    die_at(*order['die_at'])
  if order['at'] is not None:
    at(*order['at'])
  if order['copies'] is not None:
    keep_copies(*order['copies'])
  if 'call' in order:
    module, name = order['call'].split(':')
    result = getattr(importlib.import_module(module), name)(*order['with'])
    print(json.dumps(result))
    sys.exit(0)
  from experiments import launch

  launch.prepare()
  launch._SECONDS_TO_REACT = order['seconds_to_react']
  module, *arguments = order['arguments']
  sys.argv = [f'{module}.py', *arguments]
  # It is imported already, and runs once more as the program itself.
  sys.modules.pop(f'experiments.{module}', None)
  runpy.run_module(f'experiments.{module}', run_name='__main__')


def _draw():
  """Reads the fonts, and fills matplotlib's caches."""
  from matplotlib.figure import Figure

  figure = Figure(layout='constrained')
  axes = figure.subplots()
  axes.plot([1, 100], [1, 100], label='a')
  axes.set_yscale('log')
  figure.legend()
  for kind in ('pdf', 'png'):
    figure.savefig(io.BytesIO(), format=kind)


def main():
  # What children would otherwise import or compute, each for itself.
  import matplotlib

  from experiments import minimax  # noqa: F401
  from tests.helpers import protocols

  protocols.cache_attributes()

  matplotlib.use('Agg')
  import matplotlib.pyplot  # noqa: F401

  _draw()
  # Children need not look at what is there already, nor copy its pages.
  gc.collect()
  gc.freeze()
  for line in sys.stdin:
    child = os.fork()
    if child == 0:
      code = 1
      try:
        _run(json.loads(line))
      except SystemExit as error:
        code = error.code or 0
      except BaseException:
        traceback.print_exc()
      finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)


def without_seconds(path):
  """The bytes of a metrics file but for the times."""
  lines = path.read_bytes().split(b'\r\n')
  header = lines[0].split(b',')
  assert header[4] == b'seconds'
  return [b','.join(line.split(b',')[:4] + line.split(b',')[5:])
          for line in lines]


class Launcher:
  """Starts binaries, one at a time, in another process."""

  def __init__(self):
    self._process = subprocess.Popen(
        [sys.executable, '-m', 'tests.helpers.killable'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=str(pathlib.Path(__file__).parents[2]),
    )

  def start(
      self, arguments, log, die_at=None, largest_file=None, at=None, copies=None
  ) -> int:
    """Starts a run; returns its process id."""
    order = dict(
        arguments=arguments,
        log=str(log),
        die_at=die_at,
        largest_file=largest_file,
        at=at,
        copies=copies,
        seconds_to_react=0.2,
    )
    return self._send(order)

  def call(self, function, arguments, log) -> int:
    """Starts a function, named 'module:function'; returns its process id."""
    order = dict(
        log=str(log),
        largest_file=None,
        die_at=None,
        at=None,
        copies=None,
        call=function,
    )
    return self._send(order | {'with': arguments})

  def _send(self, order) -> int:
    self._process.stdin.write(json.dumps(order) + '\n')
    self._process.stdin.flush()
    return int(self._process.stdout.readline())

  def wait(self) -> int:
    """The exit code of what was started last."""
    return int(self._process.stdout.readline())

  def run(self, *args, **kwargs) -> int:
    self.start(*args, **kwargs)
    return self.wait()

  def close(self):
    self._process.stdin.close()
    self._process.stdout.close()
    self._process.wait(timeout=60)


if __name__ == '__main__':
  main()
