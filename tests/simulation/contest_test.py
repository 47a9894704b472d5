"""Methods and plans that do not fit are refused before anything is written."""

import math

import numpy as np
import pytest

from fednest_tff import simulation
from fednest_tff.simulation import contest
from tests.helpers import comparing

RUNTIME = 'in_process'
ENTRY = simulation.Entry('SimFBO', 'simfbo')
OTHER = simulation.Entry('Other', 'simfbo')


@pytest.mark.parametrize('change, name', [
    (dict(rounds=0), 'rounds'), (dict(budget=-1), 'budget'),
    (dict(seeds=1.5), 'seeds'), (dict(seeds=1001), 'seeds'),
    (dict(seeds=True), 'seeds'),
])
def test_plans_that_do_not_fit(tmp_path, change, name):
  plan = comparing.PLAN._replace(**change)
  with pytest.raises(ValueError, match=f'`{name}` must be'):
    comparing.compare(tmp_path / 'none', plan=plan)
  assert not (tmp_path / 'none').exists()


def test_a_plan_that_is_none(tmp_path):
  problem, entries = comparing.contest_and_entries()
  with pytest.raises(ValueError, match='`plan` must be a `simulation.Plan`'):
    simulation.compare(problem, entries, (4, 4, 2), tmp_path / 'none')
  assert not (tmp_path / 'none').exists()


RANGE = simulation.Range(0.1, 1.0, 0.5)


@pytest.mark.parametrize('change, message', [
    (dict(make_trial=None), '`make_trial` must be a function'),
    (dict(make_trial=lambda *_: None), '`make_trial` must return'),
    (dict(curve='d'), '`curve` must be a `simulation.Curve`'),
    (dict(curve=simulation.Curve('a\nb', 'a')), '`curve` must be'),
    (dict(larger_is_better='no'), '`larger_is_better` must be True or False'),
    (dict(target='0.5'), '`target` must be a finite number'),
    (dict(target=math.nan), '`target` must be a finite number'),
    (dict(steps=None), '`steps` must be `simulation.StepRanges`'),
    (dict(steps=(RANGE,) * 3), '`steps` must be `simulation.StepRanges`'),
    *(
        (
            dict(steps=simulation.StepRanges(RANGE, wrong, RANGE)),
            '`steps.linear` must be a `simulation.Range` of finite numbers',
        )
        for wrong in (
            None, (0.1, 1.0, 0.5), simulation.Range(0.1, math.nan, 0.5),
            simulation.Range(0.1, math.inf, 0.5),
            simulation.Range(0.1, 1.0, 5.0), simulation.Range(1.0, 0.1, 0.5),
            simulation.Range(0.0, 1.0, 0.5), simulation.Range('0.1', 1.0, 0.5),
        )
    ),
])
def test_contests_that_do_not_fit(tmp_path, change, message):
  problem, entries = comparing.contest_and_entries(['simfbo'])
  with pytest.raises(ValueError, match=message):
    simulation.compare(
        problem._replace(**change), entries, comparing.PLAN, tmp_path / 'none'
    )
  assert not list((tmp_path / 'none').glob('runs/*'))


def test_a_contest_that_is_none(tmp_path):
  with pytest.raises(ValueError, match='`contest` must be a `simulation.Cont'):
    simulation.compare(None, {'a': ENTRY}, comparing.PLAN, tmp_path / 'none')


def test_numbers_of_numpy_in_a_contest():
  problem, _ = comparing.contest_and_entries(['simfbo'])
  numbers = simulation.Range(*map(np.float32, RANGE))
  checked = problem._replace(
      steps=simulation.StepRanges(*[numbers] * 3), target=np.float32(0.5),
      larger_is_better=np.bool_(False),
  ).checked()
  assert checked.steps.outer == tuple(map(float, numbers))
  assert all(type(value) is float for value in checked.steps.outer)
  assert checked.larger_is_better is False and checked.target == 0.5


@pytest.mark.parametrize('value', [None, 'low', True, np.zeros(1)])
def test_a_metric_that_is_no_number(value):
  problem, _ = comparing.contest_and_entries(['simfbo'])
  trial = problem.make_trial(0, False)._replace(
      evaluate=lambda weights: {'x_distance': value}
  )
  other = problem._replace(make_trial=lambda seed, is_tuning: trial)
  with pytest.raises(ValueError, match="'x_distance' must be evaluated as a"):
    other.checked_trial(0, False).evaluate(None)


def test_an_evaluation_without_the_metric_is_named(tmp_path):
  problem, entries = comparing.contest_and_entries(['simfbo'])
  other = problem._replace(curve=problem.curve._replace(column='distance'))
  with pytest.raises(
      ValueError, match="`curve.column` 'distance' is none .*: x_distance"
  ):
    # A directory may be a path.
    simulation.compare(other, entries, comparing.PLAN, tmp_path / 'some')


def test_pages_name_what_is_not_done_yet():
  page = comparing.PLAN.describe(['FedMSA', 'FedNest'])
  assert page.startswith(
      '**Not done yet, and not in the tables: FedMSA, FedNest.**'
  )
  assert comparing.PLAN.describe().startswith('Every method had')


def test_rounds_and_seeds_may_grow():
  grown = comparing.PLAN._replace(rounds=9, seeds=9)
  assert grown.tuning() == comparing.PLAN.tuning()
  assert set(grown.tuning()) == {*grown._fields} - {'rounds', 'seeds'}


@pytest.mark.parametrize('entries, message', [
    ({}, 'must be a mapping with at least one method'),
    ([ENTRY], 'must be a mapping with at least one method'),
    ({'a/b': ENTRY}, "The name 'a/b'"), ({'': ENTRY}, "The name ''"),
    ({'..': ENTRY}, r"The name '\.\.'"), ({'ü': ENTRY}, "The name 'ü'"),
    ({'a b': ENTRY}, "The name 'a b'"), ({'a' * 101: ENTRY}, 'The name'),
    ({1: ENTRY}, 'The name 1'),
    ({'a': 'simfbo'}, r"`entries\['a'\]` must be a `simulation.Entry`"),
    ({'a': ENTRY, 'b': ENTRY}, "'a' and 'b' .* same label, 'SimFBO'"),
    ({'a:b': ENTRY, 'a.b': OTHER}, "'a:b' and 'a.b' .* same files, 'a.b'"),
    ({'A': ENTRY, 'a': OTHER}, "'A' and 'a' .* same files, 'a'"),
    ({'a': ENTRY._replace(label=None)}, 'must be a line of text'),
    ({'a': ENTRY._replace(label=' ')}, 'must be a line of text'),
    ({'a': ENTRY._replace(label='a|b')}, 'must be a line of text'),
    ({'a': ENTRY._replace(label='a\nb')}, 'must be a line of text'),
    ({'a': ENTRY._replace(steps=0.1)}, r"`entries\['a'\].steps` must be"),
    ({'a': ENTRY._replace(fixed=None)}, '`fixed` of .* must be a mapping'),
    ({'a': ENTRY._replace(fixed={'s': None})}, "'s' must be a finite number"),
    ({'a': ENTRY._replace(fixed={'s': True})}, "'s' must be a finite number"),
    ({'a': ENTRY._replace(fixed={'s': math.nan})}, "'s' must be a finite"),
])
def test_entries_that_do_not_fit(tmp_path, entries, message):
  problem, _ = comparing.contest_and_entries()
  with pytest.raises(ValueError, match=message):
    simulation.compare(
        problem, entries, comparing.PLAN, str(tmp_path / 'none')
    )
  assert not (tmp_path / 'none').exists()


def test_numbers_of_numpy_become_numbers_of_python():
  """They are kept in files, and compared with what is there."""
  entries = {'a' * 100: ENTRY._replace(fixed={'step': np.float32(0.5)})}
  (found,) = contest.checked_entries(entries).values()
  assert found == ENTRY._replace(fixed={'step': 0.5})
  assert type(found.fixed['step']) is float
