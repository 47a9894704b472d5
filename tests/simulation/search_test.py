"""The search: ranges, determinism, early stops, divergence."""

import math

import pytest

from fednest_tff.simulation import errors, search
from fednest_tff.simulation.search import Range, Search

STEPS = search.StepRanges(
    Range(0.01, 1.0, 0.1), Range(0.001, 1.0, 0.2), Range(1.0, 100.0, 10.0)
)
SPACE = {'a': Range(0.01, 1.0, 0.1), 'b': Range(1.0, 100.0, 10.0), 'c': 0.0}


def open_search(path, name='m', rounds=8):
  return Search(str(path / 'search.db'), name, SPACE, True, rounds, seed=7)


def quality(hparams):
  return -abs(math.log(hparams['a'] / 0.3)) - abs(math.log(hparams['b'] / 30))


@pytest.mark.parametrize('content', [b'rubbish ' * 100, b'SQLite format 3'])
def test_a_damaged_file_is_named(tmp_path, content):
  (tmp_path / 'search.db').write_bytes(content)
  with pytest.raises(errors.RunError, match='search.db. is damaged'):
    open_search(tmp_path)
  assert (tmp_path / 'search.db').read_bytes() == content


def test_all_methods_search_the_same_steps():
  rates = ('inner_learning_rate', 'linear_learning_rate', 'outer_learning_rate')
  found = search.space_of(dict.fromkeys([*rates, 'radius']), STEPS)
  assert found == dict(zip(rates, STEPS[:3], strict=True))
  found = search.space_of(
      dict.fromkeys(['inner_learning_rate', 'smoothness']), STEPS
  )
  # 1 / l is the step of v.
  assert found['smoothness'] == Range(1.0, 1000.0, 5.0)
  assert found.keys() == {'inner_learning_rate', 'smoothness'}
  # Where l is, x may have other steps.
  other = STEPS._replace(series_outer=Range(2.0, 4.0, 3.0))
  for names, expected in (
      (['outer_learning_rate', 'linear_learning_rate'], STEPS.outer),
      (['outer_learning_rate', 'smoothness'], other.series_outer),
  ):
    found = search.space_of(dict.fromkeys(names), other)
    assert found['outer_learning_rate'] == expected


def test_a_search_that_is_opened_anew_tries_the_same(tmp_path):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  for path in (whole, parts):
    path.mkdir()
  one = open_search(whole)
  for _ in range(7):
    trial = one.next()
    trial.finish(quality(trial.hparams))
  for k in range(7):
    trial = open_search(parts).next()
    if k == 5:  # It is killed here, and goes on with the same setting.
      again = open_search(parts).next()
      assert (again.number, again.hparams) == (trial.number, trial.hparams)
    trial.finish(quality(trial.hparams))
  tried = open_search(parts).tried()
  assert tried == one.tried()
  assert [t.number for t in tried] == list(range(7))
  assert tried[0].hparams == {'a': 0.1, 'b': 10.0, 'c': 0.0}
  for setting in tried:
    assert 0.01 <= setting.hparams['a'] <= 1 <= setting.hparams['b'] <= 100
  assert len({t.hparams['a'] for t in tried}) == 7
  assert one.best() == max(tried, key=lambda t: t.value)


def test_a_proposal_that_was_cut_short_is_made_again(tmp_path):
  searching = open_search(tmp_path)
  searching._study.enqueue_trial({'a': 0.1, 'b': 10.0})
  searching._study.ask()  # Killed before the trial had its numbers.
  trial = open_search(tmp_path).next()
  assert trial.number == 0
  assert trial.hparams == {'a': 0.1, 'b': 10.0, 'c': 0.0}
  trial.finish(1.0)
  assert [t.outcome for t in open_search(tmp_path).tried()] == ['finished']


def test_bad_trials_are_stopped_and_diverged_ones_count(tmp_path):
  searching = open_search(tmp_path)
  for value in (0.7, 0.8, 0.9):
    trial = searching.next()
    assert not any(trial.report(rounds, value) for rounds in (2, 4, 8))
    trial.finish(value)
  good = searching.next()
  assert not good.report(2, 0.85)
  assert not good.report(2, 0.85)  # Again, after a kill.
  good.finish(0.95)
  bad = searching.next()
  # Below the median of the others, but so early that it may go on.
  assert not bad.report(1, 0.1)
  assert bad.report(4, 0.2)
  bad.stop()
  trial = searching.next()
  assert not trial.report(2, 0.99)
  trial.diverge('epoch 3: x is inf')
  tried = searching.tried()
  assert [t.outcome for t in tried] == ['finished'] * 4 + [
      'stopped', 'diverged'
  ]
  assert tried[4].value == 0.2 and tried[4].rounds == 4
  assert tried[5].value is None and tried[5].reason == 'epoch 3: x is inf'
  assert searching.best() == tried[3]


def test_without_a_finished_trial_there_is_no_best(tmp_path):
  searching = open_search(tmp_path, 'other')
  assert searching.best() is None
  searching.next().diverge('at once')
  assert searching.best() is None and len(searching.tried()) == 1
  assert open_search(tmp_path, 'third').tried() == []


def test_the_best_distance_is_the_smallest(tmp_path):
  searching = Search(
      str(tmp_path / 'search.db'), 'm', SPACE, False, 8, seed=7
  )
  for value in (0.7, 0.2, 0.9):
    searching.next().finish(value)
  searching.next().diverge('at once')
  assert searching.best() == searching.tried()[1]
