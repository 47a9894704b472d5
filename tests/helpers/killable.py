"""Runs experiments in children that can be killed; imports TensorFlow once.

`python -m tests.helpers.killable` reads orders, a line of JSON each, and
answers with the child's process id and, once it has ended, its exit code
(negative: the signal that ended it). Children are forked before TensorFlow
starts threads.
"""

import importlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading


def _die():
  os.kill(os.getpid(), signal.SIGKILL)
  threading.Event().wait()


def _replace_nth(owner, name, part, call, substitute):
  """Has the `call`-th call about a path with `part` do something else."""
  original = getattr(owner, name)
  count = 0

  def replacement(*args, **kwargs):
    nonlocal count
    if any(part in str(a) for a in args):
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


def _half_a_file(original, path, content, *args, **kwargs):
  with open(path, 'wb') as file:
    data = content.encode() if isinstance(content, str) else content
    file.write(data[: len(data) // 2])
  _die()


def _half_a_table(original, self, rows):
  # Two rows and a half reach the disk.
  rows = list(rows)
  original(self, rows[:2])
  self.writer.writerow(list(rows[-1].values())[:4])
  FILES[-1].flush()
  _die()


FILES = []


def die_at(where: str, call: int) -> None:
  """Arranges for this process to be killed at a certain moment."""
  import csv

  import tensorflow as tf
  from tensorflow.python.lib.io import file_io
  from tensorflow_federated.python.program import file_utils

  if where == 'csv_half':

    class Noted(tf.io.gfile.GFile):
      def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        FILES.append(self)

    tf.io.gfile.GFile = Noted
    original, count = csv.DictWriter.writerows, 0

    def writerows(self, rows):
      nonlocal count
      rows = list(rows)
      count += 1
      if count >= call and len(rows) > 2:
        _half_a_table(original, self, rows)
      original(self, rows)

    csv.DictWriter.writerows = writerows
  elif where == 'csv_before':
    _replace_nth(tf.io.gfile, 'rename', 'metrics.csv', call, _before)
  elif where == 'csv_after':
    _replace_nth(tf.io.gfile, 'rename', 'metrics.csv', call, _after)
  elif where == 'checkpoint_half':
    # The variables are there, the rest is not.
    _replace_nth(
        file_io, 'atomic_write_string_to_file', 'program_state', call,
        _half_a_file,
    )
  elif where == 'checkpoint_before':
    _replace_nth(tf.io.gfile, 'rename', 'program_state', call, _before)
  elif where == 'checkpoint_after':
    _replace_nth(tf.io.gfile, 'rename', 'program_state', call, _after)
  elif where == 'old_checkpoint':

    async def rmtree(path):
      os.remove(os.path.join(path, 'saved_model.pb'))
      _die()

    file_utils.rmtree = rmtree
  else:
    # config.json, layout, metrics.csv of several runs, summary.json, plot.png.
    _replace_nth(os, 'replace', where, call, _before)


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
  from experiments import program

  module, *arguments = order['arguments']
  sys.argv = [f'{module}.py', *arguments]
  experiment = importlib.import_module(f'experiments.{module}').EXPERIMENT
  program.run(experiment)


def main():
  # What children would otherwise import, each for itself.
  import matplotlib

  from experiments import minimax  # noqa: F401

  matplotlib.use('Agg')
  import matplotlib.pyplot  # noqa: F401

  for line in sys.stdin:
    child = os.fork()
    if child == 0:
      code = 1
      try:
        _run(json.loads(line))
      except SystemExit as error:
        code = error.code or 0
      finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)


class Launcher:
  """Starts experiments, one at a time, in another process."""

  def __init__(self):
    self._process = subprocess.Popen(
        [sys.executable, '-m', 'tests.helpers.killable'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=str(pathlib.Path(__file__).parents[2]),
    )

  def start(self, arguments, log, die_at=None, largest_file=None) -> int:
    """Starts a run; returns its process id."""
    order = dict(
        arguments=arguments,
        log=str(log),
        die_at=die_at,
        largest_file=largest_file,
    )
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
