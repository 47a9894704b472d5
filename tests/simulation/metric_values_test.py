"""The value of a run, and the rows before it diverged."""

import pytest

from fednest_tff import simulation
from fednest_tff.simulation import metric_values


def rows(*values):
  return [{'epoch': k, 'd': v} for k, v in enumerate(values)]


def test_value_is_the_mean_of_the_last_three():
  found = metric_values.value_of(
      [*rows(9.0, 1.0, 2.0), {'epoch': 3}, *rows(6.0)], 'd'
  )
  assert found == 3.0


def test_rows_before_a_metric_grew():
  fine = [{'epoch': 0}, *rows(0.5, 900.0)]
  assert metric_values.bounded(fine, 'd') == fine
  metric_values.check_growth(fine, 'd')
  assert metric_values.bounded([{'epoch': 0}], 'd') == [{'epoch': 0}]
  grown = rows(50.0, 1.0, -7e68, 9e70)
  assert metric_values.bounded(grown, 'd') == rows(50.0, 1.0)
  with pytest.raises(simulation.NonFiniteError, match='d grew to 7e.68'):
    metric_values.check_growth(grown, 'd')
