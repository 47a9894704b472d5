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
    ({'a': ENTRY._replace(steps=0.1)}, '`steps` of .* must be'),
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
