"""The parts of a run: directory, records, checkpoints, plots, settings."""

import asyncio
import csv
import fcntl
import json
import os
import shutil
import signal

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments import minimax, report, settings
import fednest_tff
from fednest_tff import simulation
from fednest_tff.simulation import checkpoints, plots, records, training

COST = fednest_tff.CommunicationCost(4, 100, 60, 4.0, 100.0, 60.0)


def in_loop(coroutine):
  with training._event_loop() as loop:
    return loop.run_until_complete(coroutine)


# Directory.


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
    assert content == {'flags': {'a': [1, 2]}, 'commit': 'c'}
    assert found.join('x', 'y') == os.path.join(path, 'x', 'y')
  # What is about them may differ, and a tuple is read as a list.
  with simulation.RunDirectory(path, {'a': (1, 2)}, {'commit': 'd'}):
    pass
  with pytest.raises(simulation.RunError) as raised:
    simulation.RunDirectory(path, {'a': [1], 'b': 0}, {}).__enter__()
  message = str(raised.value)
  assert '--a was [1, 2] and is [1]; --b was None and is 0' in message


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
  assert content['earlier'] == {'flags': {'a': 1, 'epochs': 3}, 'commit': 3}
  # The larger number was a slip, and nothing has been computed for it.
  with directory(3):
    pass
  for wrong in (directory(2), directory(9, a=2)):
    with pytest.raises(simulation.RunError, match='with other flags'):
      wrong.__enter__()
  # Of several runs, the longest counts; `metrics.csv` has the rows of all.
  (tmp_path / 'runs' / 'x').mkdir(parents=True)
  (tmp_path / 'runs' / 'x' / 'metrics.csv').write_text('epoch\r\n1\r\n2\r\n')
  with directory(2):
    pass
  with pytest.raises(simulation.RunError, match='epochs was 2 and is 1'):
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


# Records.


def make_recorder(directory):
  return records.Recorder(
      str(directory), {'method': 'm', 'seed': 2}, COST, cohort_size=3
  )


def metrics(loss, **evaluation):
  found = {
      'z_loss': np.float32(loss),
      'nested': {'count': np.int64(7)},
      'vector': np.zeros(3),
      'round_number': 1,
      'communication_rounds': 99,
      'training_time_in_seconds': 1.23456,
  }
  return found | {f'evaluation/{k}': v for k, v in evaluation.items()}


def release(recorder, value, epoch):
  asyncio.run(recorder.release(value, epoch))


def read(path):
  with open(path, newline='') as file:
    return list(csv.reader(file))


def test_recorder_writes_rows(tmp_path):
  recorder = make_recorder(tmp_path)
  release(recorder, {'evaluation/b_accuracy': 0.1}, 0)
  for epoch in (1, 2):
    value = metrics(epoch / 2, b_accuracy=0.5, a_distance=3.0)
    release(recorder, value, epoch)
  assert read(recorder.path) == [
      [
          'epoch', 'communication_rounds', 'bytes_up', 'bytes_down', 'seconds',
          'method', 'seed', 'b_accuracy', 'a_distance', 'z_loss',
          'nested/count',
      ],
      ['1', '4', '300', '180', '1.2346', 'm', '2', '0.5', '3.0', '0.5', '7'],
      ['2', '8', '600', '360', '1.2346', 'm', '2', '0.5', '3.0', '1.0', '7'],
  ]
  assert os.listdir(tmp_path / 'tensorboard')


def test_recorder_replaces_rows_that_come_again(tmp_path):
  recorder = make_recorder(tmp_path)
  for epoch in (1, 2, 3):
    release(recorder, metrics(epoch), epoch)
  (tmp_path / 'metrics.csv_temp1234').write_text('epo')
  again = make_recorder(tmp_path)
  assert again.last_epoch == 3
  assert not (tmp_path / 'metrics.csv_temp1234').exists()
  release(again, metrics(20), 2)
  rows = simulation.read_rows(again.path)
  assert [(r['epoch'], r['z_loss']) for r in rows] == [(1, 1), (2, 20)]


@pytest.mark.parametrize(
    'keep, last',
    [(-1, 2), (-2, 2), (-30, 2), (40, 0), (3, 0), (0, 0)],
)
def test_recorder_recognises_half_a_file(tmp_path, keep, last):
  recorder = make_recorder(tmp_path)
  for epoch in (1, 2, 3):
    release(recorder, metrics(epoch), epoch)
  content = (tmp_path / 'metrics.csv').read_bytes()
  (tmp_path / 'metrics.csv').write_bytes(content[:keep])
  assert not simulation.is_complete(recorder.path, 3)
  again = make_recorder(tmp_path)
  assert again.last_epoch == last
  for epoch in range(last + 1, 4):
    release(again, metrics(epoch), epoch)
  assert (tmp_path / 'metrics.csv').read_bytes() == content
  assert simulation.is_complete(recorder.path, 3)
  assert not simulation.is_complete(recorder.path, 4)


@pytest.mark.parametrize('loss', [float('nan'), float('inf'), -float('inf')])
def test_recorder_stops_after_writing_what_is_not_finite(tmp_path, loss):
  recorder = make_recorder(tmp_path)
  release(recorder, metrics(1), 1)
  with pytest.raises(simulation.NonFiniteError) as raised:
    release(recorder, metrics(loss), 2)
  assert f'epoch 2: z_loss is {loss}; try smaller' in str(raised.value)
  rows = simulation.read_rows(recorder.path)
  assert str(rows[1]['z_loss']) == str(loss)


def test_recorder_takes_numbers_beyond_float32(tmp_path):
  recorder = make_recorder(tmp_path)
  release(recorder, metrics(1, x_distance=1e200), 1)
  assert simulation.read_rows(recorder.path)[0]['x_distance'] == 1e200


def test_rows_survive_writing_and_reading(tmp_path):
  path = str(tmp_path / 'rows.csv')
  rows = [{'epoch': 1, 'a': 0.1, 'm': 'x'}, {'epoch': 2, 'b': 1e-30}]
  simulation.write_rows(path, rows)
  assert simulation.read_rows(path) == rows


def test_summarize():
  rows = [
      {'epoch': 1, 'method': 'm', 'seed': 0, 'loss': float('nan')},
      {'epoch': 2, 'method': 'm', 'seed': 0, 'loss': 1.0, 'accuracy': 0.9},
      {'epoch': 3, 'method': 'm', 'seed': 0, 'loss': 2.0, 'accuracy': 0.8},
      {'epoch': 4, 'method': 'm', 'seed': 0, 'loss': float('nan')},
  ]
  found = simulation.summarize(rows)
  assert found.keys() == {'loss', 'accuracy'}
  assert found['accuracy'] == {'last': 0.8, 'best': 0.9, 'best_epoch': 2}
  assert (found['loss']['best'], found['loss']['best_epoch']) == (1.0, 2)
  assert np.isnan(found['loss']['last'])
  # A number that is not finite has no place in JSON.
  summary = report.summary({'m': [rows]})['methods']['m']
  assert summary['loss']['last'] is None and summary['loss']['best'] == 1.0
  json.dumps(summary, allow_nan=False)


# Checkpoints.


def state(k):
  return {'x': np.full(3, k, np.float32), 'n': np.int32(k)}


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
      f'program_state_{k}' for k in (2, 3, 4)
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
  assert os.listdir(directory / 'checkpoints') == []


# Signals.


def test_signals_are_noted_and_handlers_come_back():
  before = signal.getsignal(signal.SIGTERM)
  with training._Signals() as signals:
    signal.raise_signal(signal.SIGTERM)
    assert signals.received == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  assert signal.getsignal(signal.SIGTERM) == before


def test_event_loop_comes_back():
  mine = asyncio.new_event_loop()
  asyncio.set_event_loop(mine)
  try:
    with training._event_loop() as loop:
      assert asyncio.get_event_loop() is loop is not mine
    assert asyncio.get_event_loop() is mine
  finally:
    mine.close()
    asyncio.set_event_loop(asyncio.new_event_loop())


def test_signal_in_the_last_epoch_stops_what_follows(
    in_process, tmp_path, monkeypatch
):
  resolved = minimax.EXPERIMENT.resolve(
      dict(num_clients=2, dimension=2, epochs=2)
  )
  trial = minimax.EXPERIMENT.make_trial(resolved, 0)

  def cohort(epoch):
    if epoch == 2:
      signal.raise_signal(signal.SIGINT)
    return trial.cohort(epoch)

  with pytest.raises(simulation.StoppedError, match='epoch 2 of 2') as stopped:
    simulation.train(
        trial._replace(cohort=cohort), 'fedavg_s', 2, str(tmp_path)
    )
  assert stopped.value.signal_number == signal.SIGINT
  assert simulation.is_complete(str(tmp_path / 'metrics.csv'), 2)
  assert (tmp_path / 'checkpoints' / 'program_state_2').exists()


# Plots.


def rows_of(values, scale=1):
  return [
      {
          'epoch': k,
          'communication_rounds': 4 * k,
          'bytes_up': 1_000_000 * k * scale,
          'bytes_down': 500_000 * k * scale,
          'accuracy': value,
      }
      for k, value in enumerate(values, start=1)
  ]


CURVE = simulation.Curve('accuracy', 'test accuracy')


def test_series():
  runs = [rows_of([0.1, 0.2, 0.3]), rows_of([0.5, 0.4])]
  del runs[0][0]['accuracy']
  at, values = plots.series(runs, 'epoch', 'accuracy')
  # Only what both have, and what is finite.
  runs[1].append(dict(rows_of([0, 0, float('inf')])[2]))
  at, values = plots.series(runs, 'epoch', 'accuracy')
  assert at.tolist() == [2] and values.tolist() == [[0.2], [0.4]]
  runs = [rows_of([0.1, 0.2]), rows_of([0.3, 0.4])]
  at, values = plots.series(runs, 'bytes', 'accuracy')
  assert at.tolist() == [1.5, 3.0]
  assert values.tolist() == [[0.1, 0.2], [0.3, 0.4]]
  at, _ = plots.series(runs, 'communication_rounds', 'accuracy')
  assert at.tolist() == [4, 8]


def test_curves_show_mean_and_band():
  figure, axes = plt.subplots()
  runs = {
      'two': [rows_of([0.1, 0.2]), rows_of([0.3, 0.8])],
      'one': [rows_of([0.5, 0.6])],
  }
  plots.draw_curves(axes, runs, CURVE, 'epoch')
  two, one = axes.get_lines()
  np.testing.assert_allclose(two.get_ydata(), [0.2, 0.5])
  np.testing.assert_allclose(one.get_ydata(), [0.5, 0.6])
  # Readable without colour.
  assert two.get_linestyle() != one.get_linestyle()
  assert two.get_marker() != one.get_marker()
  band, = axes.collections
  corners = band.get_paths()[0].vertices
  for x, low, high in ((1, 0.1, 0.3), (2, 0.2, 0.8)):
    found = corners[corners[:, 0] == x, 1]
    np.testing.assert_allclose((found.min(), found.max()), (low, high))
  plt.close(figure)


def test_draw(tmp_path, monkeypatch):
  figures = []
  close = plt.close
  monkeypatch.setattr(plt, 'close', figures.append)
  runs = {'fednest': [rows_of([0.1, 0.7])], 'lfednest': [rows_of([0.2, 0.6])]}
  path = simulation.draw(runs, CURVE, str(tmp_path / 'plot'), 'Title')
  assert path == str(tmp_path / 'plot.png')
  assert sorted(os.listdir(tmp_path)) == ['plot.pdf', 'plot.png']
  figure, = figures
  assert [a.get_xlabel() for a in figure.axes] == [
      'epochs', 'communication rounds', 'megabytes, up and down'
  ]
  assert figure.axes[0].get_ylabel() == 'test accuracy'
  legend, = figure.legends
  assert [t.get_text() for t in legend.get_texts()] == ['fednest', 'lfednest']
  # The legend is outside of all panels.
  box = legend.get_window_extent()
  assert not any(box.overlaps(a.get_window_extent()) for a in figure.axes)
  close(figure)
  image = matplotlib.image.imread(path)
  assert image.shape[1] > 1000
  # Not blank: the curves' colours are there.
  for colour in ('#0b3c6f', '#c8511b'):
    rgb = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    assert (np.abs(image[..., :3] - rgb).max(axis=-1) < 0.02).sum() > 100
  # The same rows give the same bytes.
  first = [(tmp_path / f'plot.{x}').read_bytes() for x in ('png', 'pdf')]
  simulation.draw(runs, CURVE, str(tmp_path / 'plot'), 'Title')
  assert first == [
      (tmp_path / f'plot.{x}').read_bytes() for x in ('png', 'pdf')
  ]
  close('all')


@pytest.mark.filterwarnings('error')
def test_draw_without_a_value(tmp_path):
  """Runs that ended before their first evaluation, or diverged."""
  rows = rows_of([0.1, 0.2])
  for row in rows:
    del row['accuracy']
  runs = {'a': [rows], 'b': [rows_of([0.3, 0.4])]}
  assert os.path.exists(simulation.draw(runs, CURVE, str(tmp_path / 'plot')))
  logarithmic = CURVE._replace(logarithmic=True)
  for values in ([float('inf')] * 2, [0.0, 0.0], [1e300, 1e-300], [1e-3, 0.0]):
    figure, panels = plt.subplots(1, 2)
    for axes, curve in zip(panels, (CURVE, logarithmic), strict=True):
      runs = {'a': [rows_of(values), rows_of(values[::-1])]}
      plots.draw_curves(axes, runs, curve, 'epoch')
    figure.canvas.draw()
    plt.close(figure)
  assert os.path.exists(
      simulation.draw({'a': [rows]}, logarithmic, str(tmp_path / 'log'))
  )


# Settings.


def test_resolve():
  found = settings.resolve('x', {'ridge': 0.1, 'epochs': 7}, {'seed': 3})
  assert vars(found) == settings.COMMON | dict(ridge=0.1, epochs=7, seed=3)
  assert settings.resolve('x', {'ridge': 0.1}, {'ridge': 0.2}).ridge == 0.2


@pytest.mark.parametrize(
    'given, message',
    [
        (dict(hidden=['3']), '--hidden has no effect in x'),
        (dict(clients_per_round=9), '--clients_per_round=9 is more than'),
        (dict(inner_learning_rate=0.0), '--inner_learning_rate must be'),
        (dict(ridge=float('nan')), '--ridge=nan must be finite'),
    ],
)
def test_resolve_refuses(given, message):
  defaults = dict(
      num_clients=8, clients_per_round=None, inner_learning_rate=1.0, ridge=0.1
  )
  with pytest.raises(settings.SettingsError, match=message):
    settings.resolve('x', defaults, given)


def test_variants_have_their_own_flags():
  resolve = minimax.EXPERIMENT.resolve
  assert 'dataset' not in vars(resolve({}))
  robust = vars(resolve({'problem': 'robust_regression'}))
  assert 'dataset' in robust and 'dimension' not in robust
  with pytest.raises(settings.SettingsError, match='robust_regression: leave'):
    resolve({'problem': 'robust_regression', 'dimension': 3})
  # All of them are offered on the command line.
  assert minimax.EXPERIMENT.flags().keys() > {'dataset', 'dimension', 'epochs'}
