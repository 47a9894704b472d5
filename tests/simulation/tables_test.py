"""Tables of numbers as CSV files."""

from fednest_tff import simulation
from fednest_tff.simulation import tables


def test_rows_survive_writing_and_reading(tmp_path):
  path = str(tmp_path / 'rows.csv')
  rows = [{'epoch': 1, 'a': 0.1, 'm': 'x'}, {'epoch': 2, 'b': 1e-30}]
  simulation.write_rows(path, rows)
  assert simulation.read_rows(path) == rows


def test_lines_have_a_column_for_every_name():
  table = tables.Table([{'epoch': '1', 'b': '2'}, {'epoch': '2', 'a': '3'}])
  assert table.lines() == [b'epoch,b,a\r\n', b'1,2,\r\n', b'2,,3\r\n']
  assert tables.Table().lines() == [b'epoch\r\n']


def test_evaluations_that_a_longer_run_would_not_have_are_left_out():
  rows = [{'epoch': str(k), 'a': '1', 'loss': '2'} for k in (1, 2, 3)]
  table = tables.Table(rows, evaluation=['a'], last_evaluated=3)
  found = table.without_evaluation(lambda epoch: epoch == 2)
  assert [list(row) for row in found.rows] == [
      ['epoch', 'loss'], ['epoch', 'a', 'loss'], ['epoch', 'loss']
  ]
  assert found.last_evaluated == 3
  assert table.rows == rows


def test_a_table_survives_a_checkpoint():
  table = tables.Table([{'epoch': '1', 'a': '0.1'}], ['a'], 1)
  assert tables.Table.from_bytes(table.to_bytes()) == table


def test_cells_are_numbers_if_they_can():
  found = [tables.to_number(text) for text in ('7', '1e-3', 'nan', 'fednest')]
  assert found[:2] == [7, 1e-3] and type(found[0]) is int
  assert found[2] != found[2] and found[3] == 'fednest'
