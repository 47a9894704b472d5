"""A directory that belongs to one run."""

import fcntl
import json
import os
import pathlib

import pytest

from fednest_tff import simulation
from fednest_tff.simulation import checkpoints


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
    layout = checkpoints.LAYOUT
    assert content == {'flags': {'a': [1, 2]}, 'layout': layout, 'commit': 'c'}
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
      'flags': {'a': 1, 'epochs': 3}, 'layout': checkpoints.LAYOUT, 'commit': 3
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


@pytest.mark.parametrize('layout', [None, 1, 3, 5, 'three'])
def test_run_of_another_layout_is_refused_in_one_line(tmp_path, layout):
  """As version 0.1.0.dev0 before the redesign left it: no layout at all."""
  config = {'flags': {'a': 1}, 'commit': 'c'}
  if layout is not None:
    config['layout'] = layout
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / '.fednest_tff').write_text('')
  (tmp_path / 'checkpoints').mkdir()
  before = (tmp_path / 'config.json').read_bytes()
  with pytest.raises(simulation.RunError, match='another version') as raised:
    simulation.RunDirectory(str(tmp_path), {'a': 1}, {}).__enter__()
  assert '\n' not in str(raised.value)
  assert (tmp_path / 'config.json').read_bytes() == before
  # Asked to start anew, it does.
  with simulation.RunDirectory(str(tmp_path), {'a': 1}, {}, overwrite=True):
    assert not (tmp_path / 'checkpoints').exists()


def snapshot(directory):
  """Everything in a directory."""
  return {
      str(path.relative_to(directory)): path.is_file() and path.read_bytes()
      for path in pathlib.Path(directory).rglob('*')
      if path.name != '.lock'
  }


def begin(path, number, **options):
  """A run with one row."""
  with simulation.RunDirectory(
      str(path), {'a': number}, {}, **options
  ) as directory:
    (path / 'metrics.csv').write_text(f'epoch\r\n{number}\r\n')
    (path / 'checkpoints').mkdir()
    (path / 'checkpoints' / 'state').write_text('state')
  return directory


@pytest.mark.parametrize(
    'config', ['', '{"flags', '{"flags": {}}', '{"flags": {}, "layout": 4}']
)
def test_nothing_is_removed_without_the_marker(tmp_path, config):
  (tmp_path / 'config.json').write_text(config)
  (tmp_path / 'checkpoints').mkdir()
  (tmp_path / 'checkpoints' / 'thesis.txt').write_text('mine')
  before = snapshot(tmp_path)
  for overwrite in (False, True):
    with pytest.raises(simulation.RunError, match='not a run of ours'):
      simulation.RunDirectory(str(tmp_path), {}, {}, overwrite).__enter__()
  assert snapshot(tmp_path) == before


class Killed(BaseException):
  pass


def test_old_run_stays_until_the_new_one_has_a_row(tmp_path):
  begin(tmp_path, 1)
  (tmp_path / 'weights.npz').write_bytes(b'1')
  before = snapshot(tmp_path)
  # The new one fails before its first row.
  with pytest.raises(ZeroDivisionError):
    with simulation.RunDirectory(str(tmp_path), {'a': 2}, {}, True):
      assert not (tmp_path / 'metrics.csv').exists()
      assert not (tmp_path / 'weights.npz').exists()
      (tmp_path / 'checkpoints').mkdir()
      raise ZeroDivisionError
  assert snapshot(tmp_path) == before
  # It is given up while it is computed, as a signal does.
  directory = simulation.RunDirectory(str(tmp_path), {'a': 2}, {}, True)
  directory.__enter__()
  directory.give_up()
  assert snapshot(tmp_path) == before
  directory.__exit__(None, None, None)
  # Once it has a row, the old run goes.
  begin(tmp_path, 2, overwrite=True)
  after = snapshot(tmp_path)
  assert after.keys() == before.keys() - {'weights.npz'}
  assert after['metrics.csv'] == b'epoch\r\n2\r\n'


@pytest.mark.parametrize('calls', range(7))
def test_killed_while_the_old_run_is_put_aside(tmp_path, monkeypatch, calls):
  """At any of the renames; then started as before, it is all there."""
  begin(tmp_path, 1)
  before = snapshot(tmp_path)
  replace, count = os.replace, 0

  def killed(source, target):
    nonlocal count
    if count == calls:
      raise Killed
    count += 1
    replace(source, target)

  directory = simulation.RunDirectory(str(tmp_path), {'a': 2}, {}, True)
  with monkeypatch.context() as patched:
    patched.setattr(os, 'replace', killed)
    patched.setattr(directory, '_leave', lambda: None)
    with pytest.raises(Killed):
      directory.__enter__()
  directory._lock.close()
  with simulation.RunDirectory(str(tmp_path), {'a': 1}, {}):
    assert snapshot(tmp_path) == before


def test_other_data_are_refused_once_something_is_recorded(tmp_path):
  def directory():
    return simulation.RunDirectory(str(tmp_path), {'a': 1}, {})

  with directory() as run:
    run.check_data('first')
  with directory() as run:
    run.check_data('second')
    (tmp_path / 'metrics.csv').write_text('epoch\r\n1\r\n')
  with directory() as run:
    run.check_data('second')
    before = snapshot(tmp_path)
    with pytest.raises(simulation.RunError) as raised:
      run.check_data('third')
    assert snapshot(tmp_path) == before
  message = str(raised.value)
  assert 'other data' in message and 'second' in message and 'third' in message
  assert '`output_dir`' in message and '\n' not in message


def test_places_may_change_and_versions_give_a_warning(tmp_path, caplog):
  def directory(place, version, commit='c', a=1):
    return simulation.RunDirectory(
        str(tmp_path),
        {'a': a, 'data_dir': place},
        {'versions': {'tensorflow': version}, 'commit': commit},
        places=['data_dir'],
    )

  with directory('x', '1') as run:
    run.check_data('hash')
  caplog.clear()
  with directory('y', '1') as run:
    run.check_data('hash')
  assert not caplog.records
  content = json.loads((tmp_path / 'config.json').read_text())
  assert content['flags']['data_dir'] == 'y' and content['data'] == 'hash'
  assert content['earlier']['flags']['data_dir'] == 'x'
  with directory('y', '2', 'd'):
    pass
  assert "`tensorflow` was '1' and is '2'" in caplog.text
  assert "`commit` was 'c' and is 'd'" in caplog.text
  with pytest.raises(simulation.RunError, match='`a` was 1 and is 2'):
    directory('y', '1', a=2).__enter__()


@pytest.mark.parametrize('kind', ['link', 'folder', 'pipe', 'text'])
def test_lock_that_is_not_ours(tmp_path, kind):
  mine = tmp_path / 'mine.txt'
  mine.write_text('mine')
  path = tmp_path / 'run' / '.lock'
  path.parent.mkdir()
  if kind == 'link':
    path.symlink_to(mine)
  elif kind == 'folder':
    path.mkdir()
  elif kind == 'pipe':
    os.mkfifo(path)
  else:
    path.write_text('a lock of a package manager, with a long text')
  with pytest.raises(simulation.RunError, match=r'\.lock'):
    simulation.RunDirectory(str(path.parent), {}, {}).__enter__()
  assert mine.read_text() == 'mine' and path.exists()
  if kind == 'text':
    assert 'package manager' in path.read_text()


@pytest.mark.parametrize('name', ['metrics.csv', 'config.json', 'checkpoints'])
@pytest.mark.parametrize('kind', ['folder', 'pipe', 'text', 'nested'])
def test_something_else_in_place_of_a_file(tmp_path, name, kind):
  begin(tmp_path, 1)
  path = tmp_path / name
  if name == 'checkpoints':
    (path / 'state').unlink()
    path.rmdir()
  else:
    path.unlink()
  if kind == 'folder' and name == 'checkpoints':
    return
  if kind == 'folder':
    path.mkdir()
  elif kind == 'pipe':
    os.mkfifo(path)
  else:
    path.write_text('[' * 100_000 if kind == 'nested' else 'text')
  directory = simulation.RunDirectory(str(tmp_path), {'a': 1}, {})
  if name == 'metrics.csv' and path.is_file():
    with directory:
      return  # It is found to be damaged when it is read.
  with pytest.raises(simulation.RunError, match=name) as raised:
    directory.__enter__()
  assert '\n' not in str(raised.value)
