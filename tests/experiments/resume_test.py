"""A run that is killed and started again ends as if nothing had happened."""

import os
import random
import re
import signal
import time

import psutil
import pytest

from fednest_tff import simulation
from tests.helpers.killable import without_seconds

# Steps are short, so that many fit between two kills.
FLAGS = ['--num_clients=3', '--dimension=2', '--nocompiled']
# A method that is quick to build, since every start builds it.
RUN = [
    'minimax', *FLAGS, '--epochs=30', '--epochs_per_checkpoint=2',
    '--method=fedavg_s',
]
SEVERAL = [
    'minimax', *FLAGS, '--epochs=10', '--epochs_per_checkpoint=2',
    '--method=simfbo,fedbioacc', '--clients_per_round=2',
]
KILLS = 10  # of each


def column(path, name):
  if not path.exists():
    return []
  header, *rows = (
      line.split(',') for line in path.read_text().split('\n') if line
  )
  return [row[header.index(name)] for row in rows if name in header]


def in_directory(command, directory):
  return [*command, f'--output_dir={directory}']


def run_undisturbed(launcher, command, directory):
  """The metrics of a run that nobody interrupts, and the seconds it takes."""
  log = directory / 'log.txt'
  begin = time.monotonic()
  code = launcher.run(in_directory(command, directory / 'run'), log)
  assert code == 0, log.read_text()
  seconds = time.monotonic() - begin
  return without_seconds(directory / 'run' / 'metrics.csv'), seconds


@pytest.fixture(scope='module')
def undisturbed(launcher, tmp_path_factory):
  launcher.run(['minimax', '--help'], os.devnull)  # Its start does not count.
  directory = tmp_path_factory.mktemp('reference')
  found = run_undisturbed(launcher, RUN, directory)
  assert len(found[0]) == 1 + 30 + 1
  return found


@pytest.fixture(scope='module')
def reference(undisturbed):
  return undisturbed[0]


def leftovers(directory):
  return [
      str(path) for path in directory.rglob('*')
      if '_temp' in path.name or '.tmp' in path.name
  ]


def num_rows(directory):
  # Of the single runs only, if there are several.
  paths = list(directory.glob('runs/*/metrics.csv'))
  return sum(
      len(column(path, 'epoch'))
      for path in paths or [directory / 'metrics.csv']
  )


def kill_at_random(launcher, command, undisturbed, parent, seed):
  """Kills runs `KILLS` times; each that ends must equal the undisturbed one.

  A run that ends before it is killed is followed by another in a new
  directory, so that a fast machine sees as many kills as a slow one.
  """
  reference, seconds = undisturbed
  rng = random.Random(seed)
  log = parent / 'log.txt'
  kills = runs = 0

  def check(directory):
    assert without_seconds(directory / 'metrics.csv') == reference
    assert not leftovers(directory)

  while kills < KILLS:
    directory = parent / f'run_{runs}'
    child = launcher.start(in_directory(command, directory), log)
    begin = time.monotonic()
    if kills % 2:
      time.sleep(rng.uniform(0, seconds))
    else:
      # Not before it has got somewhere, or else it would never end.
      rows, more = num_rows(directory), rng.randint(2, 5)
      while num_rows(directory) < rows + more and psutil.pid_exists(child):
        assert time.monotonic() < begin + 60, log.read_text()
        time.sleep(0.002)
      time.sleep(rng.uniform(0, 0.1))
    try:
      os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
      pass
    code = launcher.wait()
    assert code in (0, -signal.SIGKILL), log.read_text()
    if code == 0:
      check(directory)
      runs += 1
    else:
      kills += 1
  directory = parent / f'run_{runs}'
  code = launcher.run(in_directory(command, directory), log)
  assert code == 0, log.read_text()
  check(directory)
  assert 'Traceback' not in log.read_text()


def test_killed_at_random_moments(launcher, undisturbed, tmp_path):
  kill_at_random(launcher, RUN, undisturbed, tmp_path, 0)


def test_several_runs_killed_at_random_moments(
    launcher, tmp_path, tmp_path_factory
):
  directory = tmp_path_factory.mktemp('several')
  undisturbed = run_undisturbed(launcher, SEVERAL, directory)
  assert len(undisturbed[0]) == 1 + 2 * 10 + 1
  kill_at_random(launcher, SEVERAL, undisturbed, tmp_path, 1)


def test_killed_while_writing(launcher, reference, tmp_path):
  directory, log = tmp_path / 'run', tmp_path / 'log.txt'
  moments = [
      ('.fednest_tff', 1),
      ('config.json', 1),
      ('layout', 1),
      ('csv_before', 4),
      ('manifest.json', 3),
      ('checkpoint_half', 2),
      ('csv_half', 4),
      ('checkpoint_before', 2),
      ('csv_after', 5),
      ('checkpoint_after', 3),
      ('old_checkpoint', 1),
      ('weights.npz', 1),
      ('summary.json', 1),
      ('plot.png', 1),
  ]
  for moment in moments:
    code = launcher.run(in_directory(RUN, directory), log, die_at=moment)
    assert code == -signal.SIGKILL, (moment, log.read_text())
    if moment[0] in ('layout', 'csv_half', 'manifest.json', 'checkpoint_half'):
      # There is something to tidy up.
      assert leftovers(directory), moment
  assert launcher.run(in_directory(RUN, directory), log) == 0
  assert without_seconds(directory / 'metrics.csv') == reference
  assert not leftovers(directory)
  assert (directory / 'plot.png').exists()
  assert simulation.has_weights(str(directory), 30)
  assert 'Traceback' not in log.read_text()


def test_damaged_checkpoint_and_full_disk(launcher, reference, tmp_path):
  directory, log = tmp_path / 'run', tmp_path / 'log.txt'
  command = in_directory(RUN, directory)
  # Epochs 0, 2, 4, 6 and 8 are saved.
  code = launcher.run(command, log, die_at=('checkpoint_after', 5))
  assert code == -signal.SIGKILL
  states = directory / 'checkpoints'
  saved = states.glob('program_state_*')
  assert {int(p.stem.split('_')[-1]) for p in saved} > {6, 8}
  seconds = column(directory / 'metrics.csv', 'seconds')
  assert len(seconds) == 8

  # Nothing of the size of a state fits on the disk: 8 cannot be read, 6 can.
  size = os.path.getsize(states / 'program_state_8.npz')
  os.truncate(states / 'program_state_8.npz', size // 2)
  log.unlink()
  assert launcher.run(command, log, largest_file=size - 1) == 2
  printed = log.read_text()
  assert 'checkpoint of epoch 8' in printed
  assert 'Traceback' not in printed
  error, = re.findall('^error: .*$', printed, re.MULTILINE)
  assert 'cannot write' in error and 'File too large' in error
  assert (states / 'program_state_6.npz').exists()
  assert not leftovers(directory)
  assert column(directory / 'metrics.csv', 'seconds')[:6] == seconds[:6]

  assert launcher.run(command, log) == 0
  assert without_seconds(directory / 'metrics.csv') == reference
  # Epochs up to the sixth have not been computed again.
  assert column(directory / 'metrics.csv', 'seconds')[:6] == seconds[:6]


def test_more_epochs_go_on(launcher, reference, tmp_path):
  directory, log = tmp_path / 'run', tmp_path / 'log.txt'
  metrics = directory / 'metrics.csv'
  command = in_directory(RUN, directory)
  assert launcher.run([*command, '--epochs=7'], log) == 0, log.read_text()
  seconds = column(metrics, 'seconds')
  assert len(seconds) == 7
  assert launcher.run(command, log) == 0, log.read_text()
  assert without_seconds(metrics) == reference
  assert column(metrics, 'seconds')[:7] == seconds
  # Fewer would be another run.
  assert launcher.run([*command, '--epochs=7'], log) == 2
  assert '--epochs was 30 and is 7' in log.read_text()
  assert without_seconds(metrics) == reference


def test_signals_save_the_state(launcher, tmp_path):
  directory = tmp_path / 'run'
  metrics = directory / 'metrics.csv'
  command = in_directory(
      ['minimax', *FLAGS, '--epochs=2000', '--epochs_per_checkpoint=5000'],
      directory,
  )
  seconds = []
  for number in (signal.SIGINT, signal.SIGTERM):
    log = tmp_path / f'{number}.txt'
    child = launcher.start(command, log)
    begin = time.monotonic()
    while len(column(metrics, 'epoch')) < len(seconds) + 3:
      assert time.monotonic() < begin + 60, log.read_text()
      time.sleep(0.01)
    os.kill(child, number)
    assert launcher.wait() == 128 + number
    printed = log.read_text()
    last = len(column(metrics, 'epoch'))
    assert printed == (
        f'stopped after epoch {last} of 2000; run the same command again to go'
        ' on\n'
    )
    assert (directory / 'checkpoints' / f'program_state_{last}.npz').exists()
    # It went on where it had stopped.
    now = column(metrics, 'seconds')
    assert len(now) > len(seconds) and now[: len(seconds)] == seconds
    seconds = now
