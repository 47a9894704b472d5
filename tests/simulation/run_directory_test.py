"""A directory that belongs to one run."""

import fcntl
import json
import os

import pytest

from fednest_tff import simulation


def test_directory_is_locked_while_it_is_open(tmp_path):
  path = str(tmp_path / 'run')
  first = simulation.RunDirectory(path, {'a': 1}, {})
  with first:
    with pytest.raises(simulation.RunError, match='another process'):
      simulation.RunDirectory(path, {'a': 1}, {}).__enter__()
    assert os.path.exists(first.join('config.json'))
  with simulation.RunDirectory(path, {'a': 1}, {}):
    pass


def test_lock_that_its_owner_removed_meanwhile(tmp_path, monkeypatch):
  path = str(tmp_path / 'run')
  flock, calls = fcntl.flock, []

  def late(file, operation):
    if not calls:
      # Another start failed and tidied up; a third one has begun.
      os.remove(file.name)
      calls.append(open(file.name, 'a'))
      flock(calls[0], fcntl.LOCK_EX)
    flock(file, operation)

  monkeypatch.setattr(fcntl, 'flock', late)
  with pytest.raises(simulation.RunError, match='another process'):
    simulation.RunDirectory(path, {}, {}).__enter__()
  calls[0].close()
  with simulation.RunDirectory(path, {}, {}):
    pass


def test_directory_keeps_settings_and_what_is_about_them(tmp_path):
  path = str(tmp_path)
  with simulation.RunDirectory(path, {'a': (1, 2)}, {'commit': 'c'}) as found:
    content = json.loads((tmp_path / 'config.json').read_text())
    assert content == {'flags': {'a': [1, 2]}, 'layout': 2, 'commit': 'c'}
    assert found.join('x', 'y') == os.path.join(path, 'x', 'y')
  # What is about them may differ, and a tuple is read as a list.
  with simulation.RunDirectory(path, {'a': (1, 2)}, {'commit': 'd'}):
    pass
  with pytest.raises(simulation.RunError) as raised:
    simulation.RunDirectory(path, {'a': [1], 'b': 0}, {}).__enter__()
  message = str(raised.value)
  assert '`a` was [1, 2] and is [1]; `b` was None and is 0' in message


def test_length_may_change_but_not_below_what_is_on_record(tmp_path):
  def directory(epochs, **other):
    settings = {'a': 1, 'epochs': epochs} | other
    return simulation.RunDirectory(
        str(tmp_path), settings, {'commit': epochs}, length='epochs'
    )

  with directory(3):
    (tmp_path / 'metrics.csv').write_text('epoch\r\n1\r\n2\r\n3\r\n')
  with directory(9):
    content = json.loads((tmp_path / 'config.json').read_text())
  assert content['flags']['epochs'] == content['commit'] == 9
  assert content['earlier'] == {
      'flags': {'a': 1, 'epochs': 3}, 'layout': 2, 'commit': 3
  }
  # The larger number was a slip, and nothing has been computed for it.
  with directory(3):
    pass
  for wrong in (directory(2), directory(9, a=2)):
    with pytest.raises(simulation.RunError, match='with other settings'):
      wrong.__enter__()
  # Of several runs, the longest counts; `metrics.csv` has the rows of all.
  (tmp_path / 'runs' / 'x').mkdir(parents=True)
  (tmp_path / 'runs' / 'x' / 'metrics.csv').write_text('epoch\r\n1\r\n2\r\n')
  with directory(2):
    pass
  with pytest.raises(simulation.RunError, match='`epochs` was 2 and is 1'):
    directory(1).__enter__()


def test_directory_of_a_failed_start_goes_away(tmp_path):
  path = tmp_path / 'a' / 'b'
  with pytest.raises(ZeroDivisionError):
    with simulation.RunDirectory(str(path), {}, {}):
      assert path.exists()
      raise ZeroDivisionError
  assert not (tmp_path / 'a').exists()
  # Not what was there before.
  path.mkdir(parents=True)
  (path / 'mine.txt').write_text('mine')
  with pytest.raises(ZeroDivisionError):
    with simulation.RunDirectory(str(path), {}, {}):
      raise ZeroDivisionError
  assert [p.name for p in path.iterdir()] == ['mine.txt']
  # Nor that of a run that had begun.
  with pytest.raises(ZeroDivisionError):
    with simulation.RunDirectory(str(path), {}, {}):
      (path / 'runs' / 'x').mkdir(parents=True)
      (path / 'runs' / 'x' / 'metrics.csv').write_text('epoch\r\n')
      raise ZeroDivisionError
  assert (path / 'config.json').exists()


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
  path = tmp_path / 'x.json'
  simulation.write_json(str(path), {'a': 1})

  def full(*args):
    raise OSError('full')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError):
    simulation.write_json(str(path), {'a': 2})
  assert json.loads(path.read_text()) == {'a': 1}
  assert [p.name for p in tmp_path.iterdir()] == ['x.json']


@pytest.mark.parametrize('layout', [None, 1, 3, 'two'])
def test_run_of_another_layout_is_refused_in_one_line(tmp_path, layout):
  """As version 0.1.0.dev0 before the redesign left it: no layout at all."""
  config = {'flags': {'a': 1}, 'commit': 'c'}
  if layout is not None:
    config['layout'] = layout
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'checkpoints').mkdir()
  before = (tmp_path / 'config.json').read_bytes()
  with pytest.raises(simulation.RunError, match='another version') as raised:
    simulation.RunDirectory(str(tmp_path), {'a': 1}, {}).__enter__()
  assert '\n' not in str(raised.value)
  assert (tmp_path / 'config.json').read_bytes() == before
  # Asked to start anew, it does.
  with simulation.RunDirectory(str(tmp_path), {'a': 1}, {}, overwrite=True):
    assert not (tmp_path / 'checkpoints').exists()
