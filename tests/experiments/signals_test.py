"""Signals end a program from its first instant to its last, with one line."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RUN = ['minimax', '--num_clients=2', '--dimension=2', '--method=fedavg_s']
STEPS = [*RUN, '--nocompiled', '--epochs=3']
COMPILED = [*RUN, '--epochs=2']


def wait_until(condition):
  end = time.monotonic() + 120
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)


def catches(process, number):
  """Whether a process has a handler for a signal."""
  try:
    status = pathlib.Path(f'/proc/{process.pid}/status').read_text()
  except FileNotFoundError:
    return False
  caught, = (
      line.split()[1] for line in status.splitlines()
      if line.startswith('SigCgt')
  )
  return int(caught, 16) >> (number - 1) & 1


def assert_one_line(text, number):
  assert text.count('\n') == 1, text
  assert 'Traceback' not in text
  assert signal.Signals(number).name in text or 'stopped after' in text


def start(tmp_path, **options):
  return subprocess.Popen(
      [
          sys.executable, '-m', 'experiments.minimax',
          f'--output_dir={tmp_path / "run"}',
      ],
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
      **options,
  )


@pytest.mark.parametrize(
    'number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
)
def test_while_it_imports(tmp_path, number):
  """Within milliseconds of the start, long before TensorFlow is there."""
  process = start(tmp_path)
  # Python itself has a handler for SIGINT; ours come with those of the others.
  wait_until(lambda: catches(process, signal.SIGHUP))
  process.send_signal(number)
  printed, _ = process.communicate(timeout=120)
  assert process.returncode == 128 + number
  assert_one_line(printed, number)
  assert not (tmp_path / 'run').exists()


def test_under_nohup(tmp_path):
  """SIGHUP that is ignored at the start stays ignored."""
  process = start(
      tmp_path,
      preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
  )
  wait_until(lambda: catches(process, signal.SIGTERM))
  process.send_signal(signal.SIGHUP)
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=120)
  assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    'place, number, call',
    [
        ('flags', signal.SIGINT, 1),
        ('data', signal.SIGTERM, 1),
        ('directory', signal.SIGHUP, 1),
        ('tracing', signal.SIGINT, 1),
        ('compiling', signal.SIGTERM, 1),
        ('recording', signal.SIGHUP, 1),
        ('recording', signal.SIGINT, 2),
        ('drawing', signal.SIGTERM, 1),
        ('printing', signal.SIGINT, 1),
    ],
)
def test_in_every_phase(launcher, tmp_path, place, number, call):
  directory, log = tmp_path / 'a' / 'run', tmp_path / 'log.txt'
  command = COMPILED if place == 'compiling' else STEPS
  code = launcher.run(
      [*command, f'--output_dir={directory}'], log,
      at=(place, call, number, str(tmp_path / 'marker')),
  )
  assert (tmp_path / 'marker').exists()
  assert code == 128 + number
  assert_one_line(log.read_text(), number)
  # What had no row yet is gone.
  has_row = place in ('recording', 'drawing', 'printing')
  assert directory.exists() == has_row
  assert (tmp_path / 'a').exists() == has_row


@pytest.mark.parametrize('where', ['compiling', 'recording'])
def test_while_the_main_thread_does_not_react(launcher, tmp_path, where):
  """A thread ends the program; in an epoch, at the second signal."""
  directory, log = tmp_path / 'run', tmp_path / 'log.txt'
  marker = tmp_path / 'marker'
  command = COMPILED if where == 'compiling' else STEPS
  child = launcher.start(
      [*command, f'--output_dir={directory}'], log,
      at=(where, 1, None, str(marker)),
  )
  wait_until(marker.exists)
  os.kill(child, signal.SIGTERM)
  if where == 'recording':
    # The first one was for the end of the epoch.
    time.sleep(0.5)
    assert log.read_text() == ''
    os.kill(child, signal.SIGTERM)
  assert launcher.wait() == 128 + signal.SIGTERM
  assert_one_line(log.read_text(), signal.SIGTERM)
  assert not directory.exists()


def test_old_run_comes_back(launcher, tmp_path):
  directory, log = tmp_path / 'run', tmp_path / 'log.txt'
  command = [*STEPS, f'--output_dir={directory}']
  assert launcher.run(command, log) == 0
  before = (directory / 'metrics.csv').read_bytes()
  code = launcher.run(
      [*command, '--overwrite', '--spread=2'], log,
      at=('recording', 1, signal.SIGKILL, str(tmp_path / 'marker')),
  )
  assert code == -signal.SIGKILL
  assert not (directory / 'metrics.csv').exists()
  # The next start finds it, whatever it is about.
  assert launcher.run([*command, '--spread=3'], log) == 2
  assert (directory / 'metrics.csv').read_bytes() == before
  assert not list(directory.glob('.earlier*'))
  assert launcher.run(command, log) == 0
