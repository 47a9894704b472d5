"""Records that are damaged, and runs that go further than they were to."""

import os
import shutil
import time
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff import simulation
from fednest_tff.simulation import training
from tests.helpers.killable import without_seconds

COST = fednest_tff.CommunicationCost(1, 8, 8, 1.0, 8.0, 8.0)


class Output(NamedTuple):
  state: object
  metrics: dict


class Process:
  """A process without TensorFlow: x halves in every epoch."""

  def __init__(self):
    self.calls = 0

  def initialize(self):
    return {'x': np.float64(1.0)}

  def next(self, state, cohort):
    self.calls += 1
    x = state['x'] / 2 + len(cohort)
    return Output({'x': x}, {'loss': x})

  def get_model_weights(self, state):
    return state['x']


class StopError(Exception):
  pass


@pytest.fixture(autouse=True)
def cost():
  with mock.patch.object(training, 'communication_cost', lambda process: COST):
    yield


def run(directory, epochs, stop=None, **options):
  """Runs to an epoch; returns how many were computed."""
  process = Process()

  def cohort(epoch):
    if epoch == stop:
      raise StopError
    return [None] * (1 + epoch % 3)

  directory.mkdir(exist_ok=True)
  trial = simulation.Trial(
      lambda method: process, cohort, lambda x: {'accuracy': float(x)}, 2
  )
  options = dict(epochs_per_checkpoint=2) | options
  try:
    simulation.train(trial, 'm', epochs, str(directory), **options)
  except StopError:
    assert stop is not None
  return process.calls


@pytest.fixture(scope='module')
def template(tmp_path_factory):
  directory = tmp_path_factory.mktemp('finished')
  with mock.patch.object(training, 'communication_cost', lambda process: COST):
    assert run(directory, 7) == 7
  return directory


@pytest.fixture
def finished(template, tmp_path):
  return shutil.copytree(template, tmp_path / 'finished')


def flip(path, part):
  content = path.read_bytes()
  at = content.index(part)
  path.write_bytes(
      content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
  )


@pytest.mark.parametrize(
    'part, name',
    [
        (b'loss', 'the header'),
        (b'\n2,', 'the row of epoch 1'),
        (b'.5', 'the row of epoch'),
        (b'm,0', 'the row of epoch 1'),
    ],
)
def test_damaged_row_is_restored_from_the_checkpoint(
    finished, caplog, part, name
):
  path = finished / 'metrics.csv'
  before = path.read_bytes()
  flip(path, part)
  assert not simulation.is_complete(str(path), 7)
  assert run(finished, 7) == 0
  assert path.read_bytes() == before
  assert name in caplog.text and 'up to epoch 7 are restored' in caplog.text
  assert simulation.is_complete(str(path), 7)


@pytest.mark.parametrize('name', ['metrics.csv', 'manifest.json'])
@pytest.mark.parametrize(
    'content',
    [None, b'', b'garbage\n' * 9, b'[' * 99999],
    ids=['deleted', 'empty', 'garbage', 'nested'],
)
def test_lost_file_is_restored_from_the_checkpoint(finished, name, content):
  path = finished / name
  before = (finished / 'metrics.csv').read_bytes()
  path.unlink()
  if content is not None:
    path.write_bytes(content)
  assert run(finished, 7) == 0
  assert (finished / 'metrics.csv').read_bytes() == before
  assert simulation.is_complete(str(finished / 'metrics.csv'), 7)


@pytest.mark.parametrize('content', [None, b'', b'garbage'])
def test_lost_weights_are_restored_from_the_checkpoint(finished, content):
  path = finished / 'weights.npz'
  before = path.read_bytes()
  assert simulation.has_weights(str(finished), 7)
  path.unlink()
  if content is not None:
    path.write_bytes(content)
  assert not simulation.has_weights(str(finished), 7)
  assert run(finished, 7) == 0
  assert path.read_bytes() == before
  assert simulation.has_weights(str(finished), 7)
  # Those of an earlier end are not those of a later one.
  assert not simulation.has_weights(str(finished), 8)


def test_damaged_row_without_a_checkpoint_is_refused(finished):
  path = finished / 'metrics.csv'
  flip(path, b'\n2,')
  damaged = path.read_bytes()
  for state in (finished / 'checkpoints').glob('*.npz'):
    state.unlink()
  with pytest.raises(simulation.RunError, match='row of epoch 1') as raised:
    run(finished, 7)
  assert 'no checkpoint' in str(raised.value)
  assert path.read_bytes() == damaged


def test_damaged_row_after_the_checkpoint_is_computed_again(tmp_path, caplog):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  run(whole, 7)
  assert run(parts, 7, stop=6) == 5  # The state of epoch 4 is saved.
  flip(parts / 'metrics.csv', b'\n5,')
  flip(parts / 'checkpoints' / 'program_state_4.npz', b'leaf_0')
  assert run(parts, 7) == 5  # From epoch 2.
  assert 'computed again' in caplog.text
  assert without_seconds(parts / 'metrics.csv') == without_seconds(
      whole / 'metrics.csv'
  )


@pytest.mark.parametrize('first', [1, 3, 5])
@pytest.mark.parametrize('last', [5, 7])
def test_longer_run_equals_a_direct_one(tmp_path, first, last):
  """Though the evaluation of its first end is not one of the direct run."""
  direct, further = tmp_path / 'direct', tmp_path / 'further'
  run(direct, last, epochs_per_evaluation=2)
  run(further, first, epochs_per_evaluation=2)
  rows = simulation.read_rows(str(further / 'metrics.csv'))
  assert 'accuracy' in rows[-1]
  run(further, last, epochs_per_evaluation=2)
  assert without_seconds(direct / 'metrics.csv') == without_seconds(
      further / 'metrics.csv'
  )
  rows = simulation.read_rows(str(further / 'metrics.csv'))
  assert [row['epoch'] for row in rows if 'accuracy' in row] == [
      *range(2, last, 2), last
  ]


def test_shorter_run_equals_a_direct_one(tmp_path):
  """Its last epoch was computed when it was not to be the last."""
  direct, shorter = tmp_path / 'direct', tmp_path / 'shorter'
  run(direct, 5, epochs_per_evaluation=2)
  assert run(shorter, 9, stop=6, epochs_per_evaluation=2) == 5
  metrics = shorter / 'metrics.csv'
  assert not simulation.is_complete(str(metrics), 5)
  assert run(shorter, 5, epochs_per_evaluation=2) == 1
  assert simulation.is_complete(str(metrics), 5)
  assert without_seconds(direct / 'metrics.csv') == without_seconds(metrics)


@pytest.mark.parametrize('kind', ['none', 'empty', 'error'])
def test_cohort_without_examples(tmp_path, kind):
  """The message is not about step sizes."""
  empty = tf.data.Dataset.range(3).take(0)

  class Nan(Process):

    def next(self, state, cohort):
      if kind == 'error':
        raise tf.errors.InvalidArgumentError(
            None, None, 'q is not finite. Try a smaller rate : Tensor had NaN'
        )
      return Output(state, {'loss': np.nan, 'num_examples': np.int64(0)})

  clients = [] if kind == 'none' else [empty, empty]
  trial = simulation.Trial(lambda _: Nan(), lambda _: clients, lambda _: {}, 2)
  with pytest.raises(simulation.RunError) as raised:
    simulation.train(trial, 'm', 2, str(tmp_path))
  assert str(raised.value) == (
      f'epoch 1: none of the {len(clients)} clients of its cohort has an'
      ' example'
  )
  assert not (tmp_path / 'metrics.csv').exists()


def test_wall_clock_that_is_set_back(tmp_path, monkeypatch):
  now = iter(range(10**6, 0, -1000))
  monkeypatch.setattr(time, 'time', lambda: next(now))
  run(tmp_path, 2)
  monkeypatch.undo()
  rows = simulation.read_rows(str(tmp_path / 'metrics.csv'))
  assert all(0 <= row['seconds'] < 100 for row in rows)


def test_files_reach_the_disk_before_their_checksums(tmp_path, monkeypatch):
  """Data, then the name, and the manifest last."""
  log = []
  fsync, replace = os.fsync, os.replace

  def noted_fsync(descriptor):
    log.append(('sync', os.readlink(f'/proc/self/fd/{descriptor}')))
    fsync(descriptor)

  def noted_replace(source, target):
    log.append(('name', str(target)))
    replace(source, target)

  monkeypatch.setattr(os, 'fsync', noted_fsync)
  monkeypatch.setattr(os, 'replace', noted_replace)
  run(tmp_path, 1)
  here = str(tmp_path)
  for name in ('metrics.csv', 'checkpoints/program_state_1.npz'):
    path = os.path.join(here, name)
    at = log.index(('name', path))
    assert log[at - 1] == ('sync', f'{path}.tmp')
    assert log[at + 1] == ('sync', os.path.dirname(path))
    manifest = os.path.join(here, 'manifest.json')
    assert log[at + 2 : at + 5] == [
        ('sync', f'{manifest}.tmp'), ('name', manifest), ('sync', here)
    ]
