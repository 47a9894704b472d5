"""The leaderboard's numbers, computed by hand."""

import itertools
import math

import matplotlib.figure
import pytest

from fednest_tff.simulation import leaderboard, leaderboard_page
from fednest_tff.simulation.client_work import ClientWork
from fednest_tff.simulation.leaderboard import COSTS, Facts, Outcome
from fednest_tff.simulation.plots import Curve
from fednest_tff.simulation.search import Range, Tried

CURVE = Curve('test_accuracy', 'test accuracy')
ROUNDS, MEGABYTES, GRADIENTS = COSTS


def run(values, rounds=1, megabytes=2.0, gradients=30, period=1):
  """Rows of a run that was evaluated every `period` epochs."""
  rows = []
  for k, value in enumerate(values):
    for epoch in range(k * period + 1, (k + 1) * period + 1):
      row = dict(
          epoch=epoch, communication_rounds=rounds * epoch,
          bytes_up=epoch * megabytes * 5e5, bytes_down=epoch * megabytes * 5e5,
          example_gradients=gradients * epoch,
      )
      if epoch == (k + 1) * period:
        row['test_accuracy'] = value
      rows.append(row)
  return rows


def outcome(label, runs, failures=None):
  tried = Tried(0, {'a': 0.1}, 'finished', 0.5, 4)
  facts = Facts(
      label, 1, ClientWork(5, 5, 10, 10), {'a': Range(0.01, 1.0, 0.1)}
  )
  return Outcome(facts, [tried], tried, runs, failures or {})


@pytest.mark.parametrize('cost, mark, expected', [
    (ROUNDS, 1, None),
    (ROUNDS, 5, 0.3),
    (ROUNDS, 6, 0.4),
    (ROUNDS, 100, 0.4),
    (MEGABYTES, 9, 0.25),
    (GRADIENTS, 60, 0.1),
])
def test_a_value_between_two_evaluations_is_on_their_line(cost, mark, expected):
  rows = run([0.1, 0.2, 0.4], period=2)  # Evaluated at 2, 4 and 6 rounds.
  found = leaderboard.value_at(rows, CURVE, cost, mark)
  assert found == (expected and pytest.approx(expected))


def test_a_value_on_a_logarithmic_line():
  rows = run([1.0, 0.01, 0.0])
  distance = CURVE._replace(logarithmic=True)
  found = leaderboard.value_at(rows[:2], distance, ROUNDS, 1.5)
  assert found == pytest.approx(0.1)
  # 0 has no logarithm.
  found = leaderboard.value_at(rows, distance, ROUNDS, 2.5)
  assert found == pytest.approx(0.005)


def test_a_line_stays_logarithmic_before_a_run_diverges():
  distance = CURVE._replace(logarithmic=True)
  rows = run([1.0, 1e-4, math.nan])
  found = leaderboard.value_at(rows, distance, ROUNDS, 1.5)
  assert found == pytest.approx(0.01)


def test_values_that_are_not_finite_are_none():
  rows = run([0.5, math.inf])
  assert leaderboard.value_at(rows, CURVE, ROUNDS, 2) is None


def test_cost_to_a_target():
  rows = run([0.1, 0.5, 0.4, 0.9])
  to = leaderboard.cost_to
  assert to(rows, 'test_accuracy', ROUNDS, 0.5, True) == 2
  assert to(rows, 'test_accuracy', MEGABYTES, 0.6, True) == 8.0
  assert to(rows, 'test_accuracy', ROUNDS, 0.95, True) is None
  assert to(rows, 'test_accuracy', ROUNDS, 0.2, False) == 1


def test_mean_and_standard_error():
  found = leaderboard.mean_of([0.8, 0.9, 1.0])
  assert found.mean == pytest.approx(0.9)
  assert found.error == pytest.approx(0.1 / math.sqrt(3))
  assert leaderboard.mean_of([0.5]).error is None
  some = leaderboard.mean_of([0.5, None])
  assert (some.mean, some.num_values, some.num_seeds) == (0.5, 1, 2)
  assert some.to_text() == '0.5 (1 of 2)'
  assert leaderboard.mean_of([None]).to_text() == '-'


@pytest.mark.parametrize('values, text', [
    ([0.87512, 0.87592], '0.8755 ± 0.0004'),
    ([240, 260, 300], '266.7 ± 20'),
    ([160_000, 180_000], '170,000 ± 10,000'),
    ([2e-5, 4e-5], '3e-05 ± 1e-05'),
    ([7e68, 7e68], '7e+68 ± 0'),
])
def test_means_as_text(values, text):
  assert leaderboard.mean_of(values).to_text() == text


def test_marks_are_parts_of_what_the_cheapest_needs():
  outcomes = {
      'cheap': outcome('Cheap', [run([0.5] * 4)]),
      'dear': outcome('Dear', [run([0.5] * 4, megabytes=7.0)]),
  }
  marks = leaderboard.marks_of(outcomes, 4)
  assert marks == {'rounds': [4], 'megabytes': [8], 'client gradients': [120]}
  assert leaderboard.marks_of({}, 300)['rounds'] == [100, 250, 300]


def test_marks_if_every_method_has_a_seed_that_diverged():
  diverged = [run([0.5], megabytes=1.0), run([0.5] * 4, megabytes=3.0)]
  outcomes = {'a': outcome('A', diverged, {0: 'epoch 1: x is inf'})}
  assert leaderboard.marks_of(outcomes, 4)['megabytes'] == [12]


def test_equal_marks_are_one():
  """100 and 101 rounds need 1.03 and 1.04 MB, both rounded up to 1.1."""
  rows = run([0.5] * 101, megabytes=0.0103)
  outcomes = {'a': outcome('A', [rows])}
  marks = leaderboard.marks_of(outcomes, 101)
  assert marks['rounds'] == [100, 101]
  assert marks['megabytes'] == pytest.approx([1.1])
  lines = leaderboard.standings(outcomes, CURVE, True, 101, None)
  of_megabytes = [line.at for line in lines if line.axis == 'megabytes']
  assert of_megabytes == marks['megabytes']


def test_the_best_comes_first_and_diverged_ones_last(tmp_path):
  outcomes = {
      'b': outcome('B', [run([0.5, 0.6]), run([0.5, 0.8])]),
      'c': outcome('C', [run([0.9]), []], {1: 'epoch 1: x is inf'}),
      'a': outcome('A', [run([0.5, 0.9]), run([0.5, 0.9])]),
  }
  lines = leaderboard.standings(outcomes, CURVE, True, 2, 0.7)
  assert list(dict.fromkeys(line.method for line in lines)) == ['a', 'b', 'c']
  smallest = leaderboard.standings(outcomes, CURVE, False, 2, None)
  assert [line.method for line in smallest][0] == 'b'
  page = leaderboard_page.write(
      outcomes, str(tmp_path), CURVE, True, 2, 0.7, 'Title', 'About.'
  )
  assert '| A | 0.9 ± 0 |' in page
  assert '| B | 0.7 ± 0.1 |' in page
  assert '| B | 2 (1 of 2) | 4 (1 of 2) | 60 (1 of 2) |' in page
  assert 'C, seed 1: epoch 1: x is inf' in page
  assert page == (tmp_path / 'leaderboard.md').read_text()
  assert (tmp_path / 'leaderboard.png').exists()


def test_a_diverged_run_counts_only_as_far_as_it_came():
  outcomes = {
      'a': outcome('A', [run([0.5] * 300), run([0.7] * 150)], {1: 'inf'})
  }
  lines = leaderboard.standings(outcomes, CURVE, True, 300, None)
  found = {line.at: line.mean for line in lines if line.axis == 'rounds'}
  assert found[100].mean == pytest.approx(0.6)
  # In its last row, too, it has diverged.
  lines = leaderboard.standings(outcomes, CURVE, True, 150, None)
  found |= {line.at: line.mean for line in lines if line.axis == 'rounds'}
  assert (found[150].mean, found[150].num_values) == (0.5, 1)
  assert (found[250].mean, found[250].num_values) == (0.5, 1)
  assert (found[300].mean, found[300].num_seeds) == (0.5, 2)


@pytest.mark.parametrize(
    'last, scale', [(0.97, 'logit'), (0.6, 'linear'), (1.0, 'linear')]
)
def test_shares_near_one_have_room(last, scale):
  figure = matplotlib.figure.Figure()
  axes = figure.subplots()
  rows = [{'accuracy': value} for value in (0.3, last)]
  leaderboard_page._spread_shares(
      axes, {'a': [rows], 'b': [rows]}, Curve('accuracy', 'accuracy')
  )
  assert axes.get_yscale() == scale
  if scale == 'logit':
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert {'0.9', '0.95'} < set(labels)


@pytest.mark.parametrize('largest', [2e4, 1e5, 1e6, 5e6])
def test_labels_of_costs_do_not_touch(largest):
  figure = matplotlib.figure.Figure(figsize=(3.7, 3))
  axes = figure.subplots()
  axes.plot([6e3, largest], [0, 1])
  leaderboard_page._spread_costs(axes)
  figure.canvas.draw()
  left, right = axes.get_xlim()
  labels = [
      label.get_window_extent()
      for place, label in zip(
          axes.get_xticks(), axes.get_xticklabels(), strict=True
      )
      if left <= place <= right
  ]
  assert len(labels) >= 2
  for one, other in itertools.pairwise(labels):
    assert one.x1 + 2 < other.x0
