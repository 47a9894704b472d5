"""Checkpoints, damaged ones and those of another layout."""

import errno
import os
import shutil
from typing import NamedTuple

import attrs
import numpy as np
import pytest
import tensorflow as tf
import tree

from fednest_tff import simulation
from fednest_tff.simulation import checkpoints, files, training


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
      'layout', *(f'program_state_{k}.npz' for k in (2, 3, 4))
  ]
  leftover = directory / 'checkpoints' / 'program_state_5.npz.tmp'
  leftover.mkdir()
  _, (found, epoch) = load(directory)
  assert epoch == 4
  np.testing.assert_array_equal(found['x'], state(4)['x'])
  assert not leftover.exists()


class Pair(NamedTuple):
  first: np.ndarray
  second: dict


@attrs.define
class Record:
  value: np.ndarray


def test_what_is_read_is_what_was_written(tmp_path):
  """Types of numbers and containers, and every bit."""
  written = Pair(
      np.array([[np.nan, -0.0], [np.inf, 1e-310]]),
      {
          'half': np.array([1.5], np.float16),
          'brain': tf.constant([1.5, -2.0], tf.bfloat16).numpy(),
          'empty': np.zeros([0, 3], np.int64),
          'scalar': np.float32(0.1),
          'zero_dim': np.array(3, np.int32),
          'flag': np.bool_(True),
          'int': 7,
          'bytes': b'a\0b\xff',
          'text': 'a',
          'texts': np.array([[b'', b'x\0']], object),
          'float': 0.1,
          'nested': [(), (Record(np.arange(3, dtype=np.uint8)),)],
      },
  )
  path = str(tmp_path / 'state.npz')
  checkpoints.write_state(path, written)
  found = checkpoints.read_state(path, written)
  assert os.listdir(tmp_path) == ['state.npz']
  tree.assert_same_structure(found, written, check_types=True)
  for a, b in zip(tree.flatten(found), tree.flatten(written), strict=True):
    assert type(a) is type(b)
    assert np.asarray(a).dtype == np.asarray(b).dtype
    assert np.shape(a) == np.shape(b)
    if np.asarray(a).dtype == object:
      assert a.tolist() == b.tolist()
    else:
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


class Planted:
  """Runs code when it is unpickled."""

  def __reduce__(self):
    return os.mkdir, ('planted',)


def test_reading_runs_no_code(saved, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  directory = shutil.copytree(saved, tmp_path / 'run')
  path = directory / 'checkpoints' / 'program_state_4.npz'
  with np.load(path) as file:
    contents = dict(file)
  contents['leaf_0'] = np.array([Planted()], object)
  np.savez(path, **contents)
  assert load(directory)[1][1] == 3
  assert not (tmp_path / 'planted').exists()


def test_no_checkpoint(tmp_path):
  assert load(tmp_path)[1] == (None, 0)


def damage(content, how):
  if how == 'empty':
    return b''
  if how == 'half':
    return content[: len(content) // 2]
  if how == 'text':
    return b'not a state'
  # One bit of a number, or of the names of the leaves.
  at = content.index(np.full(3, 4, np.float32).tobytes())
  if how == 'names':
    at = content.index('float32'.encode('utf-32-le'))
  return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize('how', ['empty', 'half', 'text', 'number', 'names'])
def test_damaged_checkpoint(saved, tmp_path, caplog, how):
  directory = shutil.copytree(saved, tmp_path / 'run')
  path = directory / 'checkpoints' / 'program_state_4.npz'
  path.write_bytes(damage(path.read_bytes(), how))
  manager, (found, epoch) = load(directory)
  assert epoch == 3
  np.testing.assert_array_equal(found['x'], state(3)['x'])
  assert 'epoch 4' in caplog.text and 'damaged' in caplog.text
  # Its epoch can be saved again.
  in_loop(manager.save(state(4), 4))
  assert load(directory)[1][1] == 4


def test_any_flipped_bit_is_found_or_changes_nothing(saved, tmp_path):
  """Of every third byte of a file, the names and checksums included."""
  content = (saved / 'checkpoints' / 'program_state_4.npz').read_bytes()
  path = tmp_path / 'state.npz'
  damaged = 0
  for at in range(0, len(content), 3):
    bit = 1 << at % 8
    path.write_bytes(
        content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
    )
    try:
      found = checkpoints.read_state(str(path), state(0))
    except checkpoints.DamagedError:
      damaged += 1
      continue
    # A bit that nobody reads, such as one of a date.
    np.testing.assert_array_equal(found['x'], state(4)['x'])
    assert found['n'] == 4
  assert damaged > len(content) // 6


@pytest.mark.parametrize('place', ['directory', 'no_permission'])
def test_checkpoint_that_cannot_be_read_is_kept(
    saved, tmp_path, monkeypatch, place
):
  """It may be good: another try, or another user, may read it."""
  directory = shutil.copytree(saved, tmp_path / 'run')
  path = directory / 'checkpoints' / 'program_state_4.npz'
  if place == 'directory':
    path.unlink()
    path.mkdir()
  else:

    def refused(name):
      if str(name) == str(path):
        raise PermissionError(errno.EACCES, 'Permission denied', name)
      return read(name)

    read = files.read
    monkeypatch.setattr(files, 'read', refused)
  before = snapshot(directory)
  with pytest.raises(simulation.RunError, match='cannot read') as raised:
    load(directory)
  assert str(path) in str(raised.value) and '\n' not in str(raised.value)
  assert snapshot(directory) == before


def test_checkpoint_without_its_metrics(saved, tmp_path, caplog):
  directory = shutil.copytree(saved, tmp_path / 'run')
  assert load(directory, newest=3)[1][1] == 3
  assert 'newer than the metrics' in caplog.text


def test_all_checkpoints_damaged(saved, tmp_path):
  directory = shutil.copytree(saved, tmp_path / 'run')
  for path in directory.glob('checkpoints/*.npz'):
    path.write_bytes(b'')
  assert load(directory)[1] == (None, 0)
  assert os.listdir(directory / 'checkpoints') == ['layout']


@pytest.mark.parametrize('layout', [None, '1', '2', '', 'x'])
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
  half = path / 'layout.tmp'
  half.write_text('')
  manager, (_, epoch) = load(tmp_path)
  assert epoch == 0 and not half.exists()
  assert (path / 'layout').read_text() == f'{checkpoints.LAYOUT}\n'
  in_loop(manager.save(state(1), 1))
  assert load(tmp_path)[1][1] == 1


def test_checksum_of_the_manifest(saved, tmp_path, caplog):
  """A state that is whole and yet another than was saved is not believed."""
  directory = shutil.copytree(saved, tmp_path / 'run')
  path = directory / 'checkpoints' / 'program_state_4.npz'
  checkpoints.write_state(str(path), state(7))
  assert load(directory)[1][1] == 3
  assert 'its checksum differs' in caplog.text
  # Without a manifest, each state has checksums of its own.
  shutil.rmtree(directory)
  directory = shutil.copytree(saved, tmp_path / 'run')
  (directory / 'manifest.json').write_text('{"lines": [')
  assert load(directory)[1][1] == 4
