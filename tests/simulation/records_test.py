"""Metrics of a run in a CSV file."""

import asyncio
import csv
import json
import os

import numpy as np
import pytest
import tensorflow as tf

from experiments import report
import fednest_tff
from fednest_tff import simulation
from fednest_tff.simulation import manifest, records, tables

COST = fednest_tff.CommunicationCost(4, 100, 60, 4.0, 100.0, 60.0)


def make_recorder(directory):
  directory.mkdir(exist_ok=True)
  return records.Recorder(
      str(directory), {'method': 'm', 'seed': 2}, COST, cohort_size=3
  )


def metrics(loss, **evaluation):
  found = {
      'z_loss': np.float32(loss),
      'nested': {'count': np.int64(7)},
      'vector': np.zeros(3),
      'round_number': 1,
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


@pytest.mark.parametrize('name', ['z_loss', 'seconds', 'bytes_up', 'epoch'])
def test_recorder_refuses_evaluations_named_like_other_numbers(tmp_path, name):
  recorder = make_recorder(tmp_path)
  with pytest.raises(ValueError, match=f'`evaluate` returns {name!r}, '):
    release(recorder, metrics(0.5, **{name: 1.0}), 1)
  assert not os.path.exists(recorder.path)


def test_recorder_adds_up_rounds_and_bytes_that_were_measured(tmp_path):
  """A driver measures them; they differ from epoch to epoch."""
  recorder = make_recorder(tmp_path)
  rounds, up, down = [3, 5, 4], [10, 30, 20], [7, 9, 8]

  def measured(epoch):
    return metrics(epoch) | dict(
        communication_rounds=np.int64(rounds[epoch - 1]),
        bytes_up=np.int64(up[epoch - 1]),
        bytes_down=np.int64(down[epoch - 1]),
    )

  for epoch in (1, 2):
    release(recorder, measured(epoch), epoch)
  # Another process goes on from epoch 1, and then further.
  again = make_recorder(tmp_path)
  for epoch in (2, 3):
    release(again, measured(epoch), epoch)
  rows = simulation.read_rows(again.path)
  for name, of_epoch in (
      ('communication_rounds', rounds), ('bytes_up', up), ('bytes_down', down)
  ):
    assert [row[name] for row in rows] == list(np.cumsum(of_epoch))


def test_recorder_replaces_rows_that_come_again(tmp_path):
  recorder = make_recorder(tmp_path)
  for epoch in (1, 2, 3):
    release(recorder, metrics(epoch), epoch)
  # A killed process has left it, or somebody has put a link there.
  mine = tmp_path / 'mine.txt'
  mine.write_text('mine')
  (tmp_path / 'metrics.csv.tmp').symlink_to(mine)
  again = make_recorder(tmp_path)
  assert again.last_epoch == 3
  release(again, metrics(20), 2)
  rows = simulation.read_rows(again.path)
  assert [(r['epoch'], r['z_loss']) for r in rows] == [(1, 1), (2, 20)]
  assert not (tmp_path / 'metrics.csv.tmp').exists()
  assert mine.read_text() == 'mine'


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
    again.table.last_evaluated = epoch
    release(again, metrics(epoch), epoch)
  assert (tmp_path / 'metrics.csv').read_bytes() == content
  assert simulation.is_complete(recorder.path, 3)
  assert not simulation.is_complete(recorder.path, 4)


def flip(path, at):
  content = bytearray(path.read_bytes())
  content[at] ^= 1
  path.write_bytes(content)


def test_any_flipped_bit_of_the_metrics_is_found(tmp_path):
  recorder = make_recorder(tmp_path)
  recorder.table.last_evaluated = 3
  for epoch in (1, 2, 3):
    release(recorder, metrics(epoch, accuracy=0.5), epoch)
  path = tmp_path / 'metrics.csv'
  content = path.read_bytes()
  ends = [k + 2 for k in range(len(content)) if content[k:k + 2] == b'\r\n']
  assert simulation.is_complete(str(path), 3)
  for at in range(len(content)):
    flip(path, at)
    assert not simulation.is_complete(str(path), 3)
    line = sum(end <= at for end in ends)
    table, damage = tables.read_table(
        str(tmp_path), manifest.Manifest(str(tmp_path))
    )
    assert len(table.rows) == max(0, line - 1)
    named = f'the row of epoch {line}' if line else 'the header'
    assert f'{named} of {str(path)!r} is damaged' == damage
    flip(path, at)
  # Rows that nobody recorded are not believed, either.
  path.write_bytes(content + content[ends[2]:])
  assert not simulation.is_complete(str(path), 3)
  path.write_bytes(content)
  # The checksums themselves: a flipped bit is noticed or changes nothing.
  path = tmp_path / 'manifest.json'
  for at in range(len(path.read_bytes())):
    flip(path, at)
    found = manifest.Manifest(str(tmp_path))
    assert found.is_damaged or found.lines == recorder.manifest.lines
    flip(path, at)
  assert simulation.is_complete(recorder.path, 3)


def events(directory):
  """The points in TensorBoard's files: numbers by name and epoch."""
  found = []
  for path in (directory / 'tensorboard').iterdir():
    for event in tf.compat.v1.train.summary_iterator(str(path)):
      for value in event.summary.value:
        number = tf.make_ndarray(value.tensor).item()
        found.append((value.tag, event.step, number))
  return sorted(found)


def test_tensorboard_has_every_epoch_once(tmp_path):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  for directory in (whole, parts):
    recorder = make_recorder(directory)
    for epoch in (1, 2, 3):
      release(recorder, metrics(epoch), epoch)
  # Killed, and gone on from the checkpoint of epoch 1.
  recorder = make_recorder(parts)
  mine = parts / 'tensorboard' / 'mine.txt'
  mine.write_text('mine')
  for epoch in (2, 3):
    release(recorder, metrics(epoch), epoch)
  assert mine.read_text() == 'mine'
  mine.unlink()
  assert events(parts) == events(whole)
  assert len(events(whole)) == 3 * 6


@pytest.mark.parametrize('loss', [float('nan'), float('inf'), -float('inf')])
def test_recorder_stops_after_writing_what_is_not_finite(tmp_path, loss):
  recorder = make_recorder(tmp_path)
  release(recorder, metrics(1), 1)
  with pytest.raises(simulation.NonFiniteError) as raised:
    release(recorder, metrics(loss), 2)
  assert f'epoch 2: z_loss is {loss}; try smaller' in str(raised.value)
  assert recorder.path in str(raised.value)
  # For tables that are published.
  assert recorder.path not in raised.value.reason
  rows = simulation.read_rows(recorder.path)
  assert str(rows[1]['z_loss']) == str(loss)


def test_recorder_takes_numbers_beyond_float32(tmp_path):
  recorder = make_recorder(tmp_path)
  release(recorder, metrics(1, x_distance=1e200), 1)
  assert simulation.read_rows(recorder.path)[0]['x_distance'] == 1e200


def test_summarize():
  rows = [
      {'epoch': 1, 'method': 'm', 'seed': 0, 'loss': float('nan')},
      {'epoch': 2, 'method': 'm', 'seed': 0, 'loss': 1.0, 'accuracy': 0.9},
      {'epoch': 3, 'method': 'm', 'seed': 0, 'loss': 2.0, 'accuracy': 0.8},
      {'epoch': 4, 'method': 'm', 'seed': 0, 'loss': float('nan')},
  ]
  found = simulation.summarize([
      row | {'communication_rounds': k, 'bytes_up': k, 'seconds': 1.0}
      for k, row in enumerate(rows)
  ])
  found_auc = simulation.summarize([
      {'epoch': 1, 'weights_auc': 0.7}, {'epoch': 2, 'weights_auc': 0.9},
  ])['weights_auc']
  assert found_auc == {'last': 0.9, 'best': 0.9, 'best_epoch': 2}
  # Costs have no best.
  assert found.pop('communication_rounds') == {'last': 3}
  assert found.pop('bytes_up') == {'last': 3}
  assert found.pop('seconds') == {'last': 1.0}
  assert found.keys() == {'loss', 'accuracy'}
  assert found['accuracy'] == {'last': 0.8, 'best': 0.9, 'best_epoch': 2}
  assert (found['loss']['best'], found['loss']['best_epoch']) == (1.0, 2)
  assert np.isnan(found['loss']['last'])
  # A number that is not finite has no place in JSON.
  summary = report.summary({'m': [rows]})['methods']['m']
  assert summary['loss']['last'] is None and summary['loss']['best'] == 1.0
  # The best epoch of an accuracy was chosen on the data that it is of.
  assert summary['accuracy']['best_chosen_on'] == 'test data'
  assert 'best_chosen_on' not in summary['loss']
  json.dumps(summary, allow_nan=False)
