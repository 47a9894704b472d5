"""A run that is killed and started again ends as if nothing had happened."""

import concurrent.futures
import os
import random
import re
import signal
import time

import pytest

from tests.helpers import killable

# Steps are short, so that many fit between two kills.
FLAGS = ['--num_clients=3', '--dimension=2', '--unroll=0']
# A method that is quick to compile, since every start compiles it.
RUN = [
    'minimax', *FLAGS, '--epochs=30', '--epochs_per_checkpoint=2',
    '--method=fedavg_s',
]
SEVERAL = [
    'minimax', *FLAGS, '--epochs=10', '--epochs_per_checkpoint=2',
    '--method=fedavg_s,lfednest_nonalt', '--clients_per_round=2',
]
KILLS = 10  # of each


@pytest.fixture(scope='module')
def launchers():
  """Two, since there are two cores."""
  found = [killable.Launcher(), killable.Launcher()]
  yield found
  for launcher in found:
    launcher.close()


@pytest.fixture(scope='module')
def launcher(launchers):
  return launchers[0]


def without_seconds(path):
  """The bytes of a metrics file but for the times."""
  lines = path.read_bytes().split(b'\r\n')
  header = lines[0].split(b',')
  assert header[4] == b'seconds'
  return [b','.join(line.split(b',')[:4] + line.split(b',')[5:])
          for line in lines]


def column(path, name):
  if not path.exists():
    return []
  header, *rows = (
      line.split(',') for line in path.read_text().split('\n') if line
  )
  return [row[header.index(name)] for row in rows if name in header]


def in_directory(command, directory):
  return [*command, f'--output_dir={directory}']


@pytest.fixture(scope='module')
def references(launchers, tmp_path_factory):
  """Metrics of runs that nobody interrupted."""
  root = tmp_path_factory.mktemp('reference')

  def run(launcher, command, name):
    directory = root / name
    log = root / f'{name}.txt'
    code = launcher.run(in_directory(command, directory), log)
    assert code == 0, log.read_text()
    return without_seconds(directory / 'metrics.csv')

  with concurrent.futures.ThreadPoolExecutor() as pool:
    one = pool.submit(run, launchers[0], RUN, 'one')
    several = pool.submit(run, launchers[1], SEVERAL, 'several')
    found = one.result(), several.result()
  assert len(found[0]) == 1 + 30 + 1
  assert len(found[1]) == 1 + 2 * 10 + 1
  return found


@pytest.fixture(scope='module')
def reference(references):
  return references[0]


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


def kill_at_random(launcher, command, directory, seed):
  """Kills a run again and again; returns how often it was still running."""
  rng = random.Random(seed)
  log = directory.parent / 'log.txt'
  kills = 0
  for k in range(KILLS):
    child = launcher.start(in_directory(command, directory), log)
    begin = time.monotonic()
    if k % 2:
      time.sleep(rng.uniform(0, 3))
    else:
      # Not before it has got somewhere, or else it would never end.
      rows, more = num_rows(directory), rng.randint(1, 4)
      while num_rows(directory) == rows and time.monotonic() < begin + 60:
        time.sleep(0.005)
      rows = num_rows(directory)
      while num_rows(directory) < rows + more and time.monotonic() < begin + 60:
        time.sleep(0.001)
      time.sleep(rng.uniform(0, 0.1))
    try:
      os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
      pass
    code = launcher.wait()
    assert code in (0, -signal.SIGKILL), log.read_text()
    kills += code == -signal.SIGKILL
  code = launcher.run(in_directory(command, directory), log)
  assert code == 0, log.read_text()
  assert 'Traceback' not in log.read_text()
  return kills


def test_killed_at_random_moments(launchers, references, tmp_path):
  commands = [RUN, SEVERAL]
  directories = [tmp_path / 'one' / 'run', tmp_path / 'several' / 'run']
  for directory in directories:
    directory.parent.mkdir()
  with concurrent.futures.ThreadPoolExecutor() as pool:
    kills = pool.map(kill_at_random, launchers, commands, directories, (0, 1))
    assert sum(kills) == 2 * KILLS
  for directory, reference in zip(directories, references, strict=True):
    assert without_seconds(directory / 'metrics.csv') == reference
    assert not leftovers(directory)


def test_killed_while_writing(launcher, reference, tmp_path):
  directory, log = tmp_path / 'run', tmp_path / 'log.txt'
  moments = [
      ('config.json', 1),
      ('layout', 1),
      ('csv_before', 4),
      ('checkpoint_half', 2),
      ('csv_half', 4),
      ('checkpoint_before', 2),
      ('csv_after', 5),
      ('checkpoint_after', 3),
      ('old_checkpoint', 1),
      ('summary.json', 1),
      ('plot.png', 1),
  ]
  for moment in moments:
    code = launcher.run(in_directory(RUN, directory), log, die_at=moment)
    assert code == -signal.SIGKILL, (moment, log.read_text())
    if moment[0] in ('layout', 'csv_half', 'csv_before', 'checkpoint_half'):
      # There is something to tidy up.
      assert leftovers(directory), moment
  assert launcher.run(in_directory(RUN, directory), log) == 0
  assert without_seconds(directory / 'metrics.csv') == reference
  assert not leftovers(directory)
  assert (directory / 'plot.png').exists()
  assert 'Traceback' not in log.read_text()


def test_damaged_checkpoint_and_full_disk(launcher, reference, tmp_path):
  directory, log = tmp_path / 'run', tmp_path / 'log.txt'
  command = in_directory(RUN, directory)
  # Epochs 0, 2, 4, 6 and 8 are saved.
  code = launcher.run(command, log, die_at=('checkpoint_after', 5))
  assert code == -signal.SIGKILL
  states = directory / 'checkpoints'
  saved = states.glob('program_state_*')
  assert {int(p.name.split('_')[-1]) for p in saved} > {6, 8}
  seconds = column(directory / 'metrics.csv', 'seconds')
  assert len(seconds) == 8

  # Nothing as large as a state fits on the disk: 8 cannot be read, 6 can.
  os.truncate(states / 'program_state_8' / 'saved_model.pb', 5_000)
  log.unlink()
  assert launcher.run(command, log, largest_file=10_000) == 2
  printed = log.read_text()
  assert 'checkpoint of epoch 8' in printed
  assert 'Traceback' not in printed
  error, = re.findall('^error: .*$', printed, re.MULTILINE)
  assert 'cannot write' in error and 'checkpoints' in error
  assert (states / 'program_state_6' / 'saved_model.pb').exists()
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
    assert (directory / 'checkpoints' / f'program_state_{last}').exists()
    # It went on where it had stopped.
    now = column(metrics, 'seconds')
    assert len(now) > len(seconds) and now[: len(seconds)] == seconds
    seconds = now
