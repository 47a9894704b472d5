"""Checkpoints, damaged ones and those of another layout."""

import os
import shutil

import numpy as np
import pytest

from fednest_tff import simulation
from fednest_tff.simulation import checkpoints, training


def in_loop(coroutine):
  with training._event_loop() as loop:
    return loop.run_until_complete(coroutine)


def state(k):
  return {'x': np.full(3, k, np.float32), 'n': np.int32(k)}


def snapshot(directory):
  """Everything in a directory."""
  return {
      str(path.relative_to(directory)): path.is_file() and path.read_bytes()
      for path in directory.rglob('*')
  }


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A directory with the states of epochs 2, 3 and 4."""
  directory = tmp_path_factory.mktemp('saved')
  manager = checkpoints.Checkpoints(str(directory), newest=0)
  for k in range(5):
    in_loop(manager.save(state(k), k))
  return directory


def load(directory, newest=9):
  manager = checkpoints.Checkpoints(str(directory), newest)
  return manager, in_loop(manager.load_latest(state(0)))


def test_checkpoints_keep_the_last_three(saved, tmp_path):
  directory = shutil.copytree(saved, tmp_path / 'run')
  assert sorted(os.listdir(directory / 'checkpoints')) == [
      'layout', *(f'program_state_{k}' for k in (2, 3, 4))
  ]
  leftover = directory / 'checkpoints' / 'program_state_5_temp77'
  leftover.mkdir()
  _, (found, epoch) = load(directory)
  assert epoch == 4
  np.testing.assert_array_equal(found['x'], state(4)['x'])
  assert not leftover.exists()


def test_no_checkpoint(tmp_path):
  assert load(tmp_path)[1] == (None, 0)


@pytest.mark.parametrize('part', ['empty', 'half', 'changed', 'missing'])
@pytest.mark.parametrize(
    'file',
    [
        'saved_model.pb',
        'variables/variables.index',
        'variables/variables.data-00000-of-00001',
    ],
)
def test_damaged_checkpoint(saved, tmp_path, caplog, file, part):
  directory = shutil.copytree(saved, tmp_path / 'run')
  path = directory / 'checkpoints' / 'program_state_4' / file
  content = bytearray(path.read_bytes())
  if part == 'missing':
    path.unlink()
  elif part == 'changed':
    if file == 'saved_model.pb':
      pytest.skip('TensorFlow has no checksum of this one')
    # The numbers come first.
    content[3] ^= 0xFF
    path.write_bytes(content)
  else:
    path.write_bytes(content[: len(content) // 2] if part == 'half' else b'')
  manager, (found, epoch) = load(directory)
  assert epoch == 3
  np.testing.assert_array_equal(found['x'], state(3)['x'])
  assert 'epoch 4' in caplog.text and 'damaged' in caplog.text
  # Its epoch can be saved again.
  in_loop(manager.save(state(4), 4))
  assert load(directory)[1][1] == 4


def test_checkpoint_without_its_metrics(saved, tmp_path, caplog):
  directory = shutil.copytree(saved, tmp_path / 'run')
  assert load(directory, newest=3)[1][1] == 3
  assert 'newer than the metrics' in caplog.text


def test_all_checkpoints_damaged(saved, tmp_path):
  directory = shutil.copytree(saved, tmp_path / 'run')
  for path in directory.glob('checkpoints/*/saved_model.pb'):
    path.write_bytes(b'')
  assert load(directory)[1] == (None, 0)
  assert os.listdir(directory / 'checkpoints') == ['layout']


@pytest.mark.parametrize('layout', [None, '1', '', 'x'])
def test_states_of_another_layout_are_refused_and_kept(
    saved, tmp_path, layout
):
  directory = shutil.copytree(saved, tmp_path / 'run')
  path = directory / 'checkpoints' / 'layout'
  path.unlink()
  if layout is not None:
    path.write_text(layout)
  before = snapshot(directory)
  with pytest.raises(simulation.RunError, match='state layout') as raised:
    load(directory)
  assert '\n' not in str(raised.value)
  assert snapshot(directory) == before


def test_states_of_another_structure_are_refused_and_kept(saved, tmp_path):
  """As a method leaves them whose state has changed since."""
  directory = shutil.copytree(saved, tmp_path / 'run')
  before = snapshot(directory)
  manager = checkpoints.Checkpoints(str(directory), newest=9)
  for other in (
      {'x': np.zeros(3, np.float32)},
      {'x': np.zeros(3, np.float32), 'm': np.int32(0)},
      {'x': [np.zeros(3, np.float32)], 'n': np.int32(0)},
      state(0) | {'v': np.int32(0)},
  ):
    with pytest.raises(simulation.RunError, match='structure') as raised:
      in_loop(manager.load_latest(other))
    assert '\n' not in str(raised.value)
    assert snapshot(directory) == before
  assert load(directory)[1][1] == 4


def test_killed_while_the_layout_is_written(tmp_path):
  path = tmp_path / 'checkpoints'
  path.mkdir()
  half = path / 'layout_temp'
  half.write_text('')
  manager, (_, epoch) = load(tmp_path)
  assert epoch == 0 and not half.exists()
  assert (path / 'layout').read_text() == f'{checkpoints.LAYOUT}\n'
  in_loop(manager.save(state(1), 1))
  assert load(tmp_path)[1][1] == 1
