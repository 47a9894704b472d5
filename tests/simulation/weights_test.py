"""Weights in files."""

import numpy as np
import pytest

from fednest_tff import simulation
from fednest_tff.federated.process import NestedWeights

WEIGHTS = NestedWeights(
    [{'weight': np.float32([[1, 2]]), 'bias': np.float32([3])}],
    (np.float64(4.5),),
)


def test_they_come_back(tmp_path):
  path = tmp_path / 'weights.npz'
  simulation.save_weights(str(path), WEIGHTS)
  with np.load(path) as file:  # Plain arrays, by name.
    assert sorted(file.files) == [
        'inner/0', 'outer/0/bias', 'outer/0/weight'
    ]
    np.testing.assert_array_equal(file['outer/0/weight'], [[1, 2]])
  like = NestedWeights(
      [{'weight': np.zeros([1, 2]), 'bias': np.zeros(1)}], (0.0,)
  )
  for where in (path, tmp_path):  # The file or its directory.
    found = simulation.load_weights(str(where), like)
    assert isinstance(found, NestedWeights) and isinstance(found.inner, tuple)
    np.testing.assert_array_equal(found.outer[0]['weight'], [[1, 2]])
    np.testing.assert_array_equal(found.outer[0]['bias'], [3])
    assert found.inner[0] == 4.5
  assert [p.name for p in tmp_path.iterdir()] == ['weights.npz']


def test_bad_files_are_named(tmp_path):
  path = str(tmp_path / 'weights.npz')
  with pytest.raises(simulation.RunError, match='cannot read .*weights.npz'):
    simulation.load_weights(path, WEIGHTS)
  (tmp_path / 'weights.npz').write_text('no weights')
  with pytest.raises(simulation.RunError, match='no file of weights'):
    simulation.load_weights(path, WEIGHTS)
  content = simulation.save_weights(path, WEIGHTS)
  for damaged in (
      content[:-30], content.replace(b'\x40\x40', b'\x40\x41'), b'PK\3\4', b''
  ):
    assert damaged != content
    (tmp_path / 'weights.npz').write_bytes(damaged)
    with pytest.raises(simulation.RunError, match='no file of weights'):
      simulation.load_weights(path, WEIGHTS)
  simulation.save_weights(path, WEIGHTS)
  with pytest.raises(simulation.RunError, match='another model'):
    simulation.load_weights(path, WEIGHTS._replace(inner=(np.zeros(2),)))
  with pytest.raises(simulation.RunError, match='another model'):
    simulation.load_weights(path, WEIGHTS._replace(inner=()))
  with pytest.raises(simulation.RunError, match='cannot write'):
    simulation.save_weights(str(tmp_path / 'no' / 'weights.npz'), WEIGHTS)


def test_cohorts():
  clients = list(range(6))
  cohort = simulation.sample_cohorts(clients, 3, seed=1)
  draws = [cohort(epoch) for epoch in range(5)]
  assert draws == [cohort(epoch) for epoch in range(5)]
  assert all(len(set(draw)) == 3 for draw in draws)
  assert len({tuple(draw) for draw in draws}) > 1
  other = simulation.sample_cohorts(clients, 3, seed=2)
  assert draws != [other(epoch) for epoch in range(5)]
  assert simulation.sample_cohorts(clients, 6)(1) == clients
  with pytest.raises(ValueError, match='from 1 to .* 6; got 7'):
    simulation.sample_cohorts(clients, 7)
