"""Bad input is one line that names it, and changes nothing."""

import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys

import matplotlib.figure
import numpy as np
import pytest
import tensorflow_federated as tff

from experiments import report, runs
from fednest_tff import data, simulation
from fednest_tff.simulation import checkpoints, files, manifest, tables
from tests.helpers.binaries import EXPERIMENTS, command

pytestmark = pytest.mark.usefixtures('default_context')

# Quick to compile.
TINY = [
    '--num_clients=2', '--dimension=2', '--nocompiled', '--epochs=2',
    '--method=fedavg_s',
]
FOREIGN = 'not ours'


def snapshot(directory):
  """Everything in a directory."""
  return {
      str(path.relative_to(directory)): path.is_file() and path.read_bytes()
      for path in pathlib.Path(directory).rglob('*')
      if path.name != '.lock'
  }


@pytest.fixture
def refused(tmp_path, capfd):
  """A function that runs a binary, which must refuse and change nothing."""

  def run(name, *arguments, directory=None, code=2):
    where = directory or tmp_path / 'made' / 'for' / 'it'
    before = snapshot(tmp_path)
    capfd.readouterr()
    found = command(name, f'--output_dir={where}', *arguments)
    printed = capfd.readouterr()
    assert found == code, printed
    assert printed.out == ''
    assert printed.err.count('\n') == 1, printed.err
    assert printed.err.startswith('error: ')
    assert snapshot(tmp_path) == before
    return printed.err

  return run


@pytest.fixture(scope='module')
def template(tmp_path_factory):
  directory = tmp_path_factory.mktemp('template') / 'finished'
  before = tff.framework.get_context_stack().current
  assert command('minimax', *TINY, f'--output_dir={directory}') == 0
  tff.framework.set_default_context(before)
  return directory


@pytest.fixture
def finished(template, tmp_path):
  """A directory with a run."""
  return pathlib.Path(shutil.copytree(template, tmp_path / 'finished'))


DIGITS = 'hyper_representation'
BAD_FLAGS = [
    ('minimax', ['--epoch_count=3'], ['epoch_count']),
    ('minimax', ['--epochs=many'], ['--epochs', 'many']),
    ('minimax', ['--epochs=1.5'], ['--epochs', '1.5']),
    ('minimax', ['--epochs=0'], ['--epochs']),
    ('minimax', ['--epochs=-1'], ['--epochs']),
    ('minimax', ['--seeds=0'], ['--seeds']),
    ('minimax', ['--seed=-1'], ['--seed']),
    ('minimax', ['--inner_learning_rate=-0.1'], ['--inner_learning_rate']),
    ('minimax', ['--inner_learning_rate=0'], ['--inner_learning_rate must be']),
    ('minimax', ['--outer_learning_rate=0'], ['--outer_learning_rate']),
    ('minimax', ['--outer_learning_rate=nan'], ['--outer_learning_rate']),
    ('minimax', ['--spread=inf'], ['--spread']),
    ('minimax', ['--method=fednext'], ['--method', 'fednext', 'lfednest']),
    ('minimax', ['--method='], ['--method', 'fednest']),
    ('minimax', ['--method=fednest,fednest'], ['--method', 'twice']),
    ('minimax', ['--method=fedavg'], ['--method', 'fedavg_s']),
    ('minimax', ['--problem=sine'], ['--problem=sine', 'saddle']),
    ('minimax', ['--problem=nothing'], ['--problem']),
    ('minimax', ['--hidden=3'], ['--hidden', 'minimax']),
    ('minimax', ['--dataset=digits'], ['--dataset', '--problem=saddle']),
    ('minimax', ['--neumann_terms=3'], ['--neumann_terms']),
    (
        'minimax',
        ['--problem=robust_regression', '--dimension=3'],
        ['--dimension', 'robust_regression'],
    ),
    ('compositional', ['--hidden=3'], ['--hidden', 'portfolio']),
    ('compositional', ['--problem=sine', '--spread=2'], ['--spread', 'sine']),
    ('single_level', ['--inner_rounds=3'], ['--inner_rounds']),
    (
        'minimax',
        ['--num_clients=4', '--clients_per_round=5'],
        ['--clients_per_round=5', '--num_clients=4'],
    ),
    (DIGITS, ['--clients_per_round=30'], ['--clients_per_round=30', '20']),
    (DIGITS, ['--num_clients=100000'], ['clients']),
    (DIGITS, ['--partition=writers'], ['--partition']),
    (DIGITS, ['--partition=odd'], ['--partition']),
    (
        DIGITS,
        ['--partition=dirichlet', '--dirichlet_alpha=0'],
        ['--dirichlet_alpha'],
    ),
    (DIGITS, ['--dataset=cifar'], ['--dataset']),
    (DIGITS, ['--data_dir=/tmp'], ['--data_dir', 'digits']),
    (
        DIGITS,
        ['--dataset=mnist', '--data_dir=/no/such/place'],
        ['/no/such/place'],
    ),
    (DIGITS, ['--hidden=4,x'], ['--hidden=4,x']),
    (DIGITS, ['--hidden=0'], ['--hidden=0']),
    (DIGITS, ['--backbone=cnn', '--hidden=4,5'], ['--hidden', '--backbone']),
    (DIGITS, ['--inner_fraction=1.5'], ['--inner_fraction=1.5', '0 and 1']),
    ('hyper_cleaning', ['--inner_fraction=0'], ['--inner_fraction=0.0']),
    ('loss_tuning', ['--imbalance=0'], ['imbalance']),
    (
        'loss_tuning', ['--centralised', '--num_clients=3'], ['--centralised']
    ),
    ('minimax', ['--runtime=cloud'], ['--runtime']),
    ('minimax', ['--runtime=native', '--unroll=3'], ['unroll']),
    ('minimax', ['--runtime=ray', '--address=here'], ['--address', 'here']),
    ('minimax', ['--num_workers=2'], ['--num_workers', 'ray']),
    (
        'single_level',
        ['--method=fedavg', '--client_weighting=num_examples'],
        ['--client_weighting', '--method=fedavg'],
    ),
    ('minimax', ['--seed=9223372036854775808'], ['--seed']),
    ('minimax', ['--seed=2147483647'], ['--seed']),
    ('minimax', ['--epochs=99999999999999999999'], ['--epochs']),
    ('minimax', ['--seeds=1000000000'], ['--seeds', '10000']),
    ('minimax', ['--num_clients=1000000000000'], ['--num_clients']),
    (
        'minimax',
        ['--num_clients=100000', '--dimension=2000'],
        ['--num_clients', '--dimension'],
    ),
    ('minimax', ['--batch_size=9223372036854775808'], ['--batch_size']),
    ('minimax', ['--inner_rounds=1000000000'], ['--inner_rounds']),
    (
        'minimax',
        ['--inner_local_epochs=2'],
        ['--inner_local_epochs', 'no effect', '--inner_local_steps=5'],
    ),
    ('compositional', ['--inner_local_epochs=2'], ['--inner_local_epochs']),
    (
        'minimax',
        ['--inner_local_epochs=2', '--inner_local_steps=3'],
        ['--inner_local_epochs', '--inner_local_steps', 'together'],
    ),
    (
        DIGITS,
        ['--inner_local_epochs=2', '--inner_local_steps=3'],
        ['--inner_local_epochs', '--inner_local_steps', 'together'],
    ),
    (
        DIGITS,
        ['--method=lfednest', '--local_epochs=2', '--local_steps=3'],
        ['--local_epochs'],
    ),
    (DIGITS, ['--hidden=99999999999'], ['--hidden']),
    (
        DIGITS,
        ['--partition=dirichlet', '--dirichlet_alpha=1e-300'],
        ['--dirichlet_alpha'],
    ),
    (DIGITS, ['--dataset=mnist', '--data_dir=\udcff'], ['--data_dir', 'UTF-8']),
    ('minimax', ['--devices=GPU:7'], ['GPU:7']),
    ('minimax', ['surplus'], ['surplus']),
    ('minimax', ['--flagfile=/no/such/file'], ['/no/such/file']),
]


@pytest.mark.parametrize(
    'name, arguments, parts', BAD_FLAGS, ids=[' '.join(b[1]) for b in BAD_FLAGS]
)
def test_bad_flag(refused, name, arguments, parts):
  message = refused(name, *arguments)
  for part in parts:
    assert part in message


@pytest.mark.parametrize('kind', ['binary', 'pipe', 'folder', 'itself'])
def test_flag_file_that_is_no_text(refused, tmp_path, kind):
  path = tmp_path / 'some.flags'
  if kind == 'binary':
    path.write_bytes(bytes(range(256)))
  elif kind == 'pipe':
    os.mkfifo(path)
  elif kind == 'folder':
    path.mkdir()
  else:
    path.write_text(f'--epochs=1\n--flagfile={path}\n')
  assert str(path) in refused('minimax', f'--flagfile={path}')


def test_undecodable_directory(refused, tmp_path):
  where = os.path.join(tmp_path, os.fsdecode(b'run\xff'))
  assert '--output_dir' in refused('minimax', *TINY, directory=where)


def test_constant_images(refused, tmp_path):
  folder = tmp_path / 'mnist'
  folder.mkdir()
  for part in ('train', 't10k'):
    (folder / f'{part}-images-idx3-ubyte').write_bytes(
        struct.pack('>4I', 0x803, 20, 4, 4) + bytes(20 * 16)
    )
    (folder / f'{part}-labels-idx1-ubyte').write_bytes(
        struct.pack('>2I', 0x801, 20) + bytes(range(10)) * 2
    )
  message = refused(
      DIGITS, '--dataset=mnist', f'--data_dir={folder}', '--num_clients=2'
  )
  assert 'are equal' in message and '--nostandardize' in message


def test_damaged_data(refused, tmp_path):
  folder = tmp_path / 'mnist'
  folder.mkdir()
  options = ['--dataset=mnist', f'--data_dir={folder}']
  assert 'train-images-idx3-ubyte' in refused(DIGITS, *options)
  for name in (
      'train-images-idx3-ubyte', 'train-labels-idx1-ubyte',
      't10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte',
  ):
    (folder / name).write_bytes(b'rubbish')
  assert str(folder) in refused(DIGITS, *options)


def test_other_flags(refused, finished):
  message = refused(
      'minimax', *TINY, '--epochs=1', '--spread=2', directory=finished
  )
  assert '--epochs was 2 and is 1' in message
  assert '--spread was 1.0 and is 2.0' in message
  assert 'dimension' not in message and '--overwrite' in message
  message = refused('compositional', '--dimension=2', directory=finished)
  assert "`experiment` was 'minimax' and is 'compositional'" in message
  # What differs is named, and not all of it.
  assert message.count(' was ') == 5 and ' more)' in message
  assert 'was None and is None' not in message


def save_state(directory, state, epoch):
  """Puts a state in place of the run's own ones."""
  folder = directory / 'checkpoints'
  for path in folder.glob('program_state_*'):
    path.unlink()
  checkpoints.write_state(str(folder / f'program_state_{epoch}.npz'), state)
  found = manifest.Manifest(str(directory))
  found.states = {}
  found.write()


def make_old(directory):
  """Makes a run look like one of before the layout was on record."""
  config = json.loads((directory / 'config.json').read_text())
  del config['layout']
  (directory / 'config.json').write_text(json.dumps(config))
  (directory / 'checkpoints' / 'layout').unlink()
  point = np.zeros(2, np.float64)
  old = dict(
      outer=point, inner=point, epoch=np.int32(2), seed=np.zeros(2, np.int64),
      aggregators={'outer': (), 'inner': ()}, optimizer=(),
  )
  save_state(directory, old, 2)


@pytest.mark.parametrize('epochs', [2, 5])
def test_checkpoint_of_the_old_layout(refused, finished, epochs):
  make_old(finished)
  flags = [*TINY, f'--epochs={epochs}']
  message = refused('minimax', *flags, directory=finished)
  assert 'another version' in message and 'state layout 1, not 4' in message
  assert '--output_dir' in message and '--overwrite' in message


def test_old_layout_starts_anew_if_asked(finished):
  make_old(finished)
  code = command('minimax', *TINY, '--overwrite', f'--output_dir={finished}')
  assert code == 0
  assert json.loads((finished / 'config.json').read_text())['layout'] == 4
  # And goes on.
  more = [*TINY, '--epochs=3', f'--output_dir={finished}']
  assert command('minimax', *more) == 0
  rows = simulation.read_rows(str(finished / 'metrics.csv'))
  assert [row['epoch'] for row in rows] == [1, 2, 3]


def test_checkpoint_of_another_structure(finished, capfd):
  """The layout is on record, and yet the method's state is another."""
  save_state(finished, {'outer': np.zeros(2)}, 2)
  before = snapshot(finished)
  capfd.readouterr()
  code = command(
      'minimax', *TINY, '--epochs=3', f'--output_dir={finished}'
  )
  assert code == 2
  error = capfd.readouterr().err
  assert error.count('\n') == 1 and error.startswith('error: ')
  assert 'another structure' in error and '--overwrite' in error
  after = snapshot(finished)
  # TensorBoard has a file per start, and the number of epochs may change.
  for name, content in before.items():
    assert after[name] == content or name == 'config.json'
  assert {name.split('/')[0] for name in after.keys() - before.keys()} <= {
      'tensorboard'
  }


def test_overwrite(refused, finished, capfd):
  mine = finished / 'notes.txt'
  mine.write_text(FOREIGN)
  half = finished / 'metrics.csv.tmp'
  half.write_text('epo')
  # What fails does so before anything is removed.
  other = ['--overwrite', '--outer_learning_rate=0.01']
  for wrong in ('--method=fednest,x', '--devices=GPU:7'):
    refused('minimax', *TINY, *other, wrong, directory=finished)
  refused(
      'hyper_representation', '--overwrite', '--dataset=mnist',
      '--data_dir=/no/such/place', directory=finished,
  )
  before = snapshot(finished)
  code = command('minimax', *TINY, *other, f'--output_dir={finished}')
  assert code == 0, capfd.readouterr().err
  after = snapshot(finished)
  assert after.keys() >= before.keys() - {half.name} - {
      name for name in before if 'tfevents' in name
  }
  assert mine.read_text() == FOREIGN and not half.exists()
  assert after['metrics.csv'] != before['metrics.csv']
  flags = json.loads(after['config.json'])['flags']
  assert flags['outer_learning_rate'] == 0.01
  # One run's events, not two.
  assert sum('tfevents' in name for name in after) == 1


@pytest.mark.parametrize('extra', [[], ['--overwrite']])
@pytest.mark.parametrize(
    'file', ['metrics.csv', 'runs/mine/thesis.txt', 'config.json']
)
def test_directory_of_somebody_else(refused, tmp_path, file, extra):
  path = tmp_path / 'project' / file
  path.parent.mkdir(parents=True)
  path.write_text('{"name": "mine"}')
  message = refused('minimax', *TINY, *extra, directory=tmp_path / 'project')
  assert file.split('/')[0] in message
  assert not (tmp_path / 'project' / '.lock').exists()


def test_damaged_settings(refused, finished):
  (finished / 'config.json').write_text('{"flags": {"epo')
  message = refused('minimax', *TINY, directory=finished)
  assert 'config.json' in message and 'damaged' in message
  code = command('minimax', *TINY, '--overwrite', f'--output_dir={finished}')
  assert code == 0


def test_output_is_a_file(refused, tmp_path):
  file = tmp_path / 'file'
  file.write_text(FOREIGN)
  assert str(file) in refused('minimax', *TINY, directory=file)
  assert str(file) in refused('minimax', *TINY, directory=file / 'below')
  assert str(file) in refused('minimax', '--overwrite', directory=file)


def test_read_only_directory(refused, tmp_path):
  # Not even root can write there.
  assert '/proc/mine' in refused('minimax', *TINY, directory='/proc/mine')
  assert '/proc/self' in refused('minimax', *TINY, directory='/proc/self')


def test_refused_by_permissions(refused, tmp_path):
  directory = tmp_path / 'locked'
  directory.mkdir(mode=0o500)
  if os.access(directory, os.W_OK):
    pytest.skip('root may write everywhere')
  assert 'Permission' in refused('minimax', *TINY, directory=directory)


@pytest.mark.parametrize('kind', ['empty', 'garbage', 'number', 'folder'])
def test_damaged_note_of_what_was_not_finite(finished, capfd, caplog, kind):
  path = finished / 'not_finite.json'
  if kind == 'folder':
    path.mkdir()
  else:
    texts = dict(empty='', garbage='{"flags', number='3')
    path.write_text(texts[kind])
  before = (finished / 'metrics.csv').read_bytes()
  capfd.readouterr()
  code = command('minimax', *TINY, f'--output_dir={finished}')
  assert code == (2 if kind == 'folder' else 0)
  error = capfd.readouterr().err + caplog.text
  assert error.count('\n') == 1 and str(path) in error
  assert (finished / 'metrics.csv').read_bytes() == before
  assert path.exists() == (kind == 'folder')


@pytest.mark.parametrize('name', ['checkpoints', 'tensorboard', 'runs'])
def test_file_in_place_of_a_folder(refused, finished, name):
  shutil.rmtree(finished / name, ignore_errors=True)
  (finished / name).write_text(FOREIGN)
  message = refused('minimax', *TINY, '--epochs=3', directory=finished)
  assert str(finished / name) in message and 'not a directory' in message


def test_damaged_row_of_a_finished_run(finished, caplog):
  """It is restored when the run is read again."""
  path = finished / 'metrics.csv'
  before = path.read_bytes()
  path.write_bytes(before.replace(b'\n2,', b'\n3,', 1))
  assert command('minimax', *TINY, f'--output_dir={finished}') == 0
  assert 'the row of epoch 2' in caplog.text
  assert path.read_bytes() == before


def test_other_data(finished, capfd, monkeypatch):
  """Refused once a row is there."""
  make = runs.make_trial

  def read(fingerprint):
    monkeypatch.setattr(
        runs,
        'make_trial',
        lambda *args: make(*args)._replace(fingerprint=fingerprint),
    )

  read('a' * 64)
  flags = [*TINY, f'--output_dir={finished}']
  assert command('minimax', *flags, '--epochs=3') == 0
  config = json.loads((finished / 'config.json').read_text())
  assert config['data'] == 'a' * 64
  read('b' * 64)
  before = (finished / 'metrics.csv').read_bytes()
  capfd.readouterr()
  assert command('minimax', *flags, '--epochs=4') == 2
  error = capfd.readouterr().err
  assert error.count('\n') == 1 and 'other data' in error
  assert '--overwrite' in error
  assert (finished / 'metrics.csv').read_bytes() == before


def test_experiments_with_images_know_what_they_read(monkeypatch):
  trial = simulation.Trial(lambda method: None, None, None, 2)
  experiment = EXPERIMENTS[DIGITS]._replace(make_trial=lambda *args: trial)
  settings = experiment.resolve({})
  found = runs.make_trial(experiment, settings, 0).fingerprint
  assert found == data.fingerprint(data.load('digits'))
  assert len(found) == 64


def test_unexpected_error(tmp_path, capfd, monkeypatch):
  """One line, the traceback in a file that it names, a code of its own."""

  def fails(*args):
    raise RuntimeError('a worker\nis gone')

  directory = tmp_path / 'run'
  arguments = [*TINY, f'--output_dir={directory}']
  with monkeypatch.context() as patched:
    patched.setattr(runs, 'make_trial', fails)
    assert command('minimax', *arguments) == 70
  error = capfd.readouterr().err
  assert error.count('\n') == 1
  assert error.startswith('error: RuntimeError: a worker is gone (traceback')
  path = pathlib.Path(error.split("'")[1])
  assert 'Traceback' in path.read_text() and 'in fails' in path.read_text()
  path.unlink()
  # The run had not begun; once it has, the file is beside it.
  assert not directory.exists()
  assert command('minimax', *arguments) == 0
  monkeypatch.setattr(report, 'summary', fails)
  capfd.readouterr()
  assert command('minimax', *arguments) == 70
  assert str(directory / 'traceback.txt') in capfd.readouterr().err


def test_standard_output_that_is_full(finished, capfd, monkeypatch):
  with open('/dev/full', 'w') as full:
    monkeypatch.setattr(sys, 'stdout', full)
    code = command('minimax', *TINY, f'--output_dir={finished}')
    monkeypatch.undo()
  assert code == 2
  error = capfd.readouterr().err
  assert error == (
      'error: cannot write to standard output: No space left on device\n'
  )


def test_files_that_cannot_be_read(finished, capfd, monkeypatch):
  """The message does not say that something cannot be written."""
  read = files.read

  def refuse(path):
    if str(path).endswith('metrics.csv'):
      raise PermissionError(errno.EACCES, 'Permission denied', path)
    return read(path)

  monkeypatch.setattr(files, 'read', refuse)
  assert command('minimax', *TINY, f'--output_dir={finished}') == 2
  error = capfd.readouterr().err
  assert 'cannot read' in error and 'write' not in error
  assert 'untouched' not in error


def test_second_process(refused, finished):
  with open(finished / '.lock', 'a') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    for extra in ([], ['--overwrite']):
      message = refused('minimax', *TINY, *extra, directory=finished)
      assert 'another process' in message and str(os.getpid()) in message
  # With the lock free, the finished run is read and drawn again.
  assert command('minimax', *TINY, f'--output_dir={finished}') == 0


def test_full_disk_at_the_end(finished, capfd, monkeypatch):
  def savefig(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  before = snapshot(finished)
  monkeypatch.setattr(matplotlib.figure.Figure, 'savefig', savefig)
  capfd.readouterr()
  assert command('minimax', *TINY, f'--output_dir={finished}') == 2
  error = capfd.readouterr().err
  assert error.count('\n') == 1 and 'No space left' in error
  assert snapshot(finished) == before


@pytest.mark.parametrize('place', ['metrics.csv', 'program_state_2'])
def test_full_disk_while_running(tmp_path, capfd, monkeypatch, place):
  directory = tmp_path / 'run'
  replace = os.replace

  def full_replace(source, target):
    if place in target:
      raise OSError(errno.ENOSPC, 'No space left on device', target)
    replace(source, target)

  flags = [*TINY, '--epochs_per_checkpoint=1', f'--output_dir={directory}']
  with monkeypatch.context() as patched:
    patched.setattr(os, 'replace', full_replace)
    assert command('minimax', *flags) == 2
  error = capfd.readouterr().err
  assert error.count('\n') == 1 and error.startswith('error: cannot write')
  assert 'No space left' in error
  assert not list(directory.glob('checkpoints/*.tmp'))
  # A run without a row has not begun.
  has_begun = place != 'metrics.csv'
  states = directory / 'checkpoints'
  assert (states / 'program_state_0.npz').exists() == has_begun
  # There is space again.
  assert command('minimax', *flags) == 0
  rows = simulation.read_rows(str(directory / 'metrics.csv'))
  assert [row['epoch'] for row in rows] == [1, 2]


@pytest.mark.parametrize('epochs', [2, 30])
def test_not_finite(tmp_path, capfd, epochs):
  directory = tmp_path / 'run'
  flags = [
      *TINY, '--method=fednest', f'--epochs={epochs}',
      '--outer_learning_rate=1e200', f'--output_dir={directory}',
  ]
  messages = []
  # The second time, what is on disk says the same.
  for _ in range(2):
    assert command('minimax', *flags) == 3
    error = capfd.readouterr().err
    assert error.count('\n') == 1 and error.startswith('error: ')
    messages.append(error)
  assert messages[0] == messages[1]
  assert 'epoch ' in messages[0] and 'learning' in messages[0]
  rows = simulation.read_rows(str(directory / 'metrics.csv'))
  assert [row['epoch'] for row in rows] == list(range(1, len(rows) + 1))
  assert 0 < len(rows) < 30


def test_not_finite_in_the_last_epoch(finished, capfd):
  """Killed after the row was written, before the message was."""
  found = manifest.Manifest(str(finished))
  table, _ = tables.read_table(str(finished), found)
  table.rows[-1]['outer_loss'] = 'nan'
  found.set_lines(table.lines())
  found.write()
  (finished / 'metrics.csv').write_bytes(b''.join(table.lines()))
  assert command('minimax', *TINY, f'--output_dir={finished}') == 3
  assert 'epoch 2: outer_loss is nan' in capfd.readouterr().err


def test_one_method_diverges_and_the_other_goes_on(tmp_path, capfd):
  directory = tmp_path / 'run'
  code = command(
      'single_level', '--nocompiled', '--num_clients=2', '--epochs=3',
      '--outer_learning_rate=1e30', '--epochs_per_evaluation=2',
      f'--output_dir={directory}',
  )
  assert code == 3
  assert capfd.readouterr().err.startswith('error: fednest, seed 0, epoch ')
  assert len(list((directory / 'runs').iterdir())) == 2


def test_interrupted_before_the_first_epoch(tmp_path, capfd, monkeypatch):
  def interrupted(*args):
    signal.raise_signal(signal.SIGINT)

  monkeypatch.setattr(runs, 'make_trial', interrupted)
  directory = tmp_path / 'a' / 'b'
  assert command('minimax', *TINY, f'--output_dir={directory}') == 130
  error = capfd.readouterr().err
  assert error.count('\n') == 1 and 'interrupted' in error
  assert not (tmp_path / 'a').exists()


def test_real_process(tmp_path):
  """The same from outside: no traceback, nothing else on stderr."""
  done = subprocess.run(
      [
          sys.executable, '-m', 'experiments.minimax', '--epochs=none',
          f'--output_dir={tmp_path / "run"}',
      ],
      capture_output=True, text=True, check=False, timeout=120,
      cwd=pathlib.Path(__file__).parents[2],
  )
  assert done.returncode == 2
  assert done.stdout == ''
  assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1
  assert not (tmp_path / 'run').exists()
