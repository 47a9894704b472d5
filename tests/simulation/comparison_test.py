"""Comparisons: equal tuning, nothing lost when killed, honest tables."""

import csv
import json
import os
import shutil
import signal
import types

import numpy as np
import pytest

from fednest_tff import simulation
from fednest_tff.simulation import comparison, diverged_runs
from fednest_tff.simulation.search import Range, Search, StepRanges
from tests.helpers import comparing

RUNTIME = 'in_process'


@pytest.fixture(scope='module')
def compared(tmp_path_factory):
  """An uninterrupted comparison, and its directory.

  One of the methods joins later.
  """
  directory = tmp_path_factory.mktemp('compare') / 'all'
  comparing.compare(directory, ['simfbo'])
  return comparing.compare(directory), directory


def read(path):
  with open(path, newline='') as file:
    return list(csv.DictReader(file))


def without_seconds(outcomes):
  return {
      name: outcome._replace(runs=[
          [{k: v for k, v in row.items() if k != 'seconds'} for row in rows]
          for rows in outcome.runs
      ])
      for name, outcome in outcomes.items()
  }


def test_every_method_has_as_many_trials(compared):
  outcomes, directory = compared
  assert list(outcomes) == ['simfbo', 'simfbo_v0']
  for outcome in outcomes.values():
    assert len(outcome.tried) == comparing.PLAN.budget
    assert outcome.tried[0].hparams['outer_learning_rate'] == pytest.approx(0.1)
    finished = [t for t in outcome.tried if t.outcome == 'finished']
    assert outcome.chosen == min(finished, key=lambda t: t.value)
    assert len(outcome.runs) == comparing.PLAN.seeds
  trials = read(directory / 'trials.csv')
  assert len(trials) == 2 * comparing.PLAN.budget
  assert [t['is_chosen'] for t in trials].count('1') == 2


def test_the_ablation_keeps_v_at_zero(compared):
  outcomes, _ = compared
  for tried in outcomes['simfbo_v0'].tried:
    assert tried.hparams['linear_learning_rate'] == 0
  # Without the indirect part, x goes to the minimizer of |x|^2 / 2.
  assert 'linear_learning_rate' in outcomes['simfbo'].facts.space


def test_tables_have_the_runs_numbers(compared):
  outcomes, directory = compared
  lines = read(directory / 'leaderboard.csv')
  runs = outcomes['simfbo'].runs
  (line,) = [
      one for one in lines
      if one['method'] == 'simfbo' and one['axis'] == 'rounds'
  ]
  finals = [rows[-1]['x_distance'] for rows in runs]
  assert runs[0][-1]['communication_rounds'] == comparing.PLAN.rounds
  assert float(line['mean']) == pytest.approx(np.mean(finals))
  error = np.std(finals, ddof=1) / np.sqrt(2)
  assert float(line['standard_error']) == pytest.approx(error)
  # Two local steps with all examples, of which there is one: a gradient of f,
  # and one product with what comes along.
  work = outcomes['simfbo'].facts.work
  assert tuple(work) == (2, 2, 2, 2)
  assert runs[0][-1]['example_gradients'] == 2 * work.example_gradients == 12
  page = (directory / 'leaderboard.md').read_text()
  assert 'SimFBO, v = 0' in page and '±' in page
  assert (directory / 'leaderboard.png').stat().st_size > 1000


def test_run_again_it_reads_what_is_there(compared, monkeypatch):
  outcomes, directory = compared
  monkeypatch.setattr(comparison, 'TunedRuns', None)
  assert comparing.compare(directory) == outcomes


def test_a_line_tells_how_each_trial_and_each_run_ended(tmp_path, capsys):
  plan = comparing.PLAN._replace(seeds=1)
  found = comparing.compare(tmp_path, ['simfbo'], plan=plan)['simfbo']
  lines = capsys.readouterr().err.splitlines()
  values = [t.value for t in found.tried] + [found.runs[0][-1]['x_distance']]
  assert lines == [
      f'[{k + 1}/3] SimFBO, {what}: x_distance {value:.4g}'
      for k, (what, value) in enumerate(
          zip(['trial 1', 'trial 2', 'seed 0'], values, strict=True)
      )
  ]
  # What is only read is not told again.
  comparing.compare(tmp_path, ['simfbo'], plan=plan)
  assert capsys.readouterr().err == ''


def test_methods_that_are_left_out_are_named(compared, capsys):
  _, directory = compared
  # What a crash may leave is not a method.
  (directory / 'facts' / 'fednest.json.tmp').touch()
  page = (directory / 'leaderboard.md').read_bytes()
  comparing.compare(directory, ['simfbo_v0'])
  assert capsys.readouterr().err == (
      'left out of the tables: simfbo; what was run stays\n'
  )
  comparing.compare(directory)
  assert (directory / 'leaderboard.md').read_bytes() == page


def test_a_mistake_in_the_last_method_is_told_before_the_first_runs(tmp_path):
  contest, entries = comparing.contest_and_entries()
  entries['wrong'] = simulation.Entry('Wrong', 'simfbo', {'no_such': 1.0})
  with pytest.raises(ValueError, match='no_such'):
    simulation.compare(contest, entries, comparing.PLAN, str(tmp_path / 'a'))
  assert not list((tmp_path / 'a').glob('runs/*'))


@pytest.mark.parametrize('damage', ['number', 'weights'])
def test_a_damaged_run_is_made_again(compared, damage):
  outcomes, directory = compared
  path = directory / 'runs' / 'simfbo-seed1'
  metrics, weights = path / 'metrics.csv', path / 'weights.npz'
  content = weights.read_bytes()
  if damage == 'number':
    lines = metrics.read_text().splitlines(keepends=True)
    value = str(outcomes['simfbo'].runs[1][-1]['x_distance'])
    assert value in lines[-1]
    lines[-1] = lines[-1].replace(value, '0.0001')
    metrics.write_text(''.join(lines))
  else:
    weights.unlink()
  found = comparing.compare(directory)
  assert without_seconds(found) == without_seconds(outcomes)
  assert weights.read_bytes() == content


def test_another_method_under_a_known_name_is_refused(compared):
  _, directory = compared
  contest, entries = comparing.contest_and_entries()
  page = (directory / 'leaderboard.md').read_bytes()
  for other, message in [
      (entries['simfbo']._replace(method='fedmsa'), "not of 'fedmsa' with"),
      (entries['simfbo_v0'], "'linear_learning_rate': 0.0"),
      (
          entries['simfbo']._replace(steps=StepRanges(*[Range(1, 3, 2)] * 3)),
          "of 'simfbo' with the step ranges of the contest, which are others",
      ),
  ]:
    with pytest.raises(simulation.RunError, match=message):
      simulation.compare(
          contest, {'simfbo': other}, comparing.PLAN, str(directory)
      )
  assert (directory / 'leaderboard.md').read_bytes() == page


@pytest.mark.parametrize('change, name', [
    (dict(larger_is_better=True), 'larger_is_better'),
    (dict(steps=StepRanges(*[Range(0.2, 0.3, 0.25)] * 3)), 'step_ranges'),
])
def test_another_way_to_choose_is_refused(compared, change, name):
  _, directory = compared
  contest, entries = comparing.contest_and_entries()
  page = (directory / 'leaderboard.md').read_bytes()
  with pytest.raises(simulation.RunError, match=name):
    simulation.compare(
        contest._replace(**change), entries, comparing.PLAN, directory
    )
  assert (directory / 'leaderboard.md').read_bytes() == page


def test_an_entry_may_have_steps_of_its_own(tmp_path):
  contest, entries = comparing.contest_and_entries(['simfbo'])
  own = StepRanges(*[Range(0.001, 0.003, 0.002)] * 3)
  entry = entries['simfbo']._replace(steps=own)
  plan = comparing.PLAN._replace(seeds=1)
  (found,) = simulation.compare(
      contest, {'simfbo': entry}, plan, tmp_path
  ).values()
  first, second = (trial.hparams for trial in found.tried)
  assert set(first.values()) == {0.002}
  assert all(0.001 <= value <= 0.003 for value in second.values())
  assert first != second
  assert simulation.compare(
      contest, {'simfbo': entry}, plan, tmp_path
  ) == {'simfbo': found}


def test_integers_of_numpy_are_the_same_plan(compared):
  outcomes, directory = compared
  plan = simulation.Plan(*map(np.int64, comparing.PLAN))
  assert comparing.compare(directory, plan=plan) == outcomes


def test_fewer_rounds_than_there_are_refused(compared):
  _, directory = compared
  with pytest.raises(simulation.RunError, match='may grow, but not shrink'):
    comparing.compare(directory, plan=comparing.PLAN._replace(rounds=1))


def test_fewer_rounds_than_a_diverged_run_has_are_refused(compared, tmp_path):
  _, directory = compared
  path = tmp_path / 'run'
  shutil.copytree(directory / 'runs' / 'simfbo-seed0', path)
  diverged_runs.mark(str(path), 'x is inf')
  rows, reason = diverged_runs.read(str(path), 'x_distance', 2)
  assert len(rows) == 2 and reason == 'x is inf'
  with pytest.raises(simulation.RunError, match='may grow, but not shrink'):
    diverged_runs.read(str(path), 'x_distance', 1)


def test_damaged_facts_are_named(compared):
  _, directory = compared
  path = directory / 'facts' / 'simfbo.json'
  content = path.read_text()
  path.write_text(content[:9])
  with pytest.raises(simulation.RunError, match=r'simfbo.json. is damaged'):
    comparing.compare(directory)
  path.write_text(content)


@pytest.mark.parametrize('name', ['rounds', 'tuning_rounds'])
def test_fewer_rounds_than_an_epoch_are_refused(tmp_path, name):
  """An epoch of FedNest with three terms has seven rounds here."""
  plan = comparing.PLAN._replace(**{'rounds': 7, 'tuning_rounds': 7, name: 6})
  with pytest.raises(
      ValueError, match=f'`{name}` must be at least 7, .* of FedNest; got 6'
  ):
    comparing.compare(tmp_path / 'none', ['fednest'], plan=plan)
  assert not (tmp_path / 'none').exists()


@pytest.mark.parametrize('folder', ['a?1', 'a{1', 'a}1'])
def test_a_path_with_a_meaning_for_databases_is_refused(tmp_path, folder):
  with pytest.raises(simulation.RunError, match='must not contain'):
    comparing.compare(tmp_path / folder)
  assert not list(tmp_path.iterdir())


def test_work_is_counted_on_clients_of_the_final_runs(tmp_path):
  contest, entries = comparing.contest_and_entries(['simfbo'])
  counted = []

  def make_trial(seed, is_tuning):
    trial = contest.make_trial(seed, is_tuning)

    def cohort(epoch):
      counted.append(is_tuning)
      return trial.cohort(epoch)

    return trial._replace(cohort=cohort)

  simulation.compare(
      contest._replace(make_trial=make_trial), entries, comparing.PLAN,
      str(tmp_path),
  )
  assert counted[:5] == [False, False, False, False, True]


def test_other_data_are_refused(tmp_path):
  contest, entries = comparing.contest_and_entries(['simfbo'])

  def compare(data, seeds):
    def make_trial(seed, is_tuning):
      return contest.make_trial(seed, is_tuning)._replace(fingerprint=data)

    return simulation.compare(
        contest._replace(make_trial=make_trial), entries,
        comparing.PLAN._replace(seeds=seeds), str(tmp_path),
    )

  compare('a', 1)
  with pytest.raises(simulation.RunError, match='other data'):
    compare('b', 2)
  assert len(compare('a', 2)['simfbo'].runs) == 2


def test_other_tuning_is_refused(compared):
  _, directory = compared
  with pytest.raises(simulation.RunError, match='budget'):
    comparing.compare(directory, plan=comparing.PLAN._replace(budget=5))


def test_killed_in_a_trial_it_ends_like_one_that_was_not(
    compared, launcher, tmp_path, tmp_path_factory
):
  outcomes, whole = compared
  # Four epochs are counted; it dies in the second trial.
  log = tmp_path_factory.mktemp('log') / 'log.txt'
  launcher.call(
      'tests.helpers.comparing:compare_and_die', [str(tmp_path), 7], log
  )
  assert launcher.wait() == -signal.SIGKILL, log.read_text()[-2000:]
  before = sorted(p.name for p in (tmp_path / 'runs').iterdir())
  assert before == ['simfbo-trial000', 'simfbo-trial001']
  assert not (tmp_path / 'leaderboard.csv').exists()
  found = comparing.compare(tmp_path, ['simfbo'])
  assert without_seconds(found) == without_seconds(
      {'simfbo': outcomes['simfbo']}
  )
  of_simfbo = [t for t in read(whole / 'trials.csv') if t['method'] == 'simfbo']
  assert read(tmp_path / 'trials.csv') == of_simfbo


def test_settings_are_in_the_directory(compared):
  outcomes, directory = compared
  chosen = outcomes['simfbo'].chosen.hparams
  path = directory / 'runs' / 'simfbo-seed1' / 'hparams.json'
  assert json.loads(path.read_text()) == chosen


CHANGES = dict(budget=1, seeds=1, tuning_seeds=2)
TWO_SEEDS = comparing.PLAN._replace(**CHANGES)


@pytest.fixture(scope='module')
def on_two_seeds(tmp_path_factory):
  """A comparison whose trial runs on two seeds, and its directory."""
  directory = tmp_path_factory.mktemp('compare') / 'two_seeds'
  return comparing.compare(directory, ['simfbo'], plan=TWO_SEEDS), directory


def test_a_trial_counts_with_the_mean_over_its_seeds(on_two_seeds):
  outcomes, directory = on_two_seeds
  (tried,) = outcomes['simfbo'].tried
  found = [
      np.mean([
          float(row['x_distance'])
          for row in read(directory / 'runs' / folder / 'metrics.csv')
      ])
      for folder in ('simfbo-trial000', 'simfbo-trial000-again1')
  ]
  assert found[0] != found[1]
  assert tried.value == pytest.approx(np.mean(found), rel=1e-12)
  with pytest.raises(simulation.RunError, match='tuning_seeds'):
    comparing.compare(
        directory, ['simfbo'], plan=TWO_SEEDS._replace(tuning_seeds=1)
    )


def test_killed_on_the_second_seed_a_trial_ends_like_one_that_was_not(
    on_two_seeds, launcher, tmp_path, tmp_path_factory
):
  outcomes, whole = on_two_seeds
  log = tmp_path_factory.mktemp('log') / 'log.txt'
  launcher.call(
      'tests.helpers.comparing:compare_and_die', [str(tmp_path), 7, CHANGES],
      log,
  )
  assert launcher.wait() == -signal.SIGKILL, log.read_text()[-2000:]
  before = sorted(p.name for p in (tmp_path / 'runs').iterdir())
  assert before == ['simfbo-trial000', 'simfbo-trial000-again1']
  found = comparing.compare(tmp_path, ['simfbo'], plan=TWO_SEEDS)
  assert without_seconds(found) == without_seconds(outcomes)
  assert read(tmp_path / 'trials.csv') == read(whole / 'trials.csv')


def test_a_trial_that_diverges_on_its_second_seed_diverged(
    tmp_path, monkeypatch
):
  train = comparison.TunedRuns.train

  def diverge(self, *arguments):
    if 1001 in arguments:
      raise simulation.NonFiniteError('x is not finite')
    return train(self, *arguments)

  monkeypatch.setattr(comparison.TunedRuns, 'train', diverge)
  outcomes = comparing.compare(tmp_path, ['simfbo'], plan=TWO_SEEDS)
  assert [t.outcome for t in outcomes['simfbo'].tried] == ['diverged']
  assert outcomes['simfbo'].chosen is None


def test_a_distance_that_grows_without_bound_diverged(tmp_path, monkeypatch):
  train = comparison.TunedRuns.train

  def grow(self, *arguments):
    rows = train(self, *arguments)
    if 0 in arguments:  # The seed of the final run.
      rows[1]['x_distance'] = 7e68
    return rows

  monkeypatch.setattr(comparison.TunedRuns, 'train', grow)
  (outcome,) = comparing.compare(
      tmp_path, ['simfbo'], plan=TWO_SEEDS._replace(tuning_seeds=1)
  ).values()
  assert outcome.tried[0].outcome == 'finished'
  assert outcome.failures == {0: 'x_distance grew to 7e+68'}


def try_once(directory, monkeypatch, train, plan=comparing.PLAN):
  """A trial whose runs are calls of `train(report)`: its outcome."""
  contest = types.SimpleNamespace(curve=simulation.Curve('d', 'distance'))
  folder = types.SimpleNamespace(
      join=lambda *parts: os.path.join(directory, *parts)
  )
  compared = comparison._Comparison(contest, plan, folder, num_entries=1)
  runs = types.SimpleNamespace(train=lambda *arguments: train(arguments[-1]))
  monkeypatch.setattr(compared, '_builder', lambda seed, method: runs)
  searching = Search(
      str(directory / 'search.db'), 'm', {'a': Range(0.1, 1.0, 0.5)}, False,
      plan.tuning_rounds, seed=7,
  )
  compared._try(searching, 'm', simulation.Entry('M', 'm'))
  (tried,) = searching.tried()
  return tried


def test_a_trial_ends_with_the_mean_of_its_seeds(tmp_path, monkeypatch):
  values = iter([0.25, 0.75])
  tried = try_once(
      tmp_path, monkeypatch, lambda report: [{'epoch': 1, 'd': next(values)}],
      TWO_SEEDS,
  )
  assert (tried.outcome, tried.value) == ('finished', 0.5)


def test_a_trial_that_is_worse_than_others_is_stopped(tmp_path, monkeypatch):
  monkeypatch.setattr(
      'fednest_tff.simulation.search.RunningTrial.report',
      lambda self, rounds, value: value > 0.5,
  )
  told = []

  def train(report):
    for rounds, value in enumerate([0.4, 0.6, 0.3], start=1):
      told.append(value)
      report(rounds, {'d': value})
    return [{'epoch': 1, 'd': 0.3}]

  assert try_once(tmp_path, monkeypatch, train).outcome == 'stopped'
  assert told == [0.4, 0.6]


def test_a_trial_that_is_not_finite_diverged(tmp_path, monkeypatch):
  def train(report):
    if report is None:  # Only the first seed can be stopped.
      raise simulation.NonFiniteError('x is not finite')
    return [{'epoch': 1, 'd': 0.3}]

  tried = try_once(tmp_path, monkeypatch, train, TWO_SEEDS)
  assert (tried.outcome, tried.reason) == ('diverged', 'x is not finite')


@pytest.mark.parametrize('diverging_seed', [1000, 0])
def test_reasons_of_divergence_name_no_files(
    tmp_path, monkeypatch, diverging_seed
):
  """They are in tables, which are published."""
  train = comparison.TunedRuns.train

  def diverge(self, *arguments):
    if diverging_seed in arguments:
      raise simulation.NonFiniteError('x is not finite', f'see {tmp_path}')
    return train(self, *arguments)

  monkeypatch.setattr(comparison.TunedRuns, 'train', diverge)
  plan = comparing.PLAN._replace(budget=1, seeds=1)
  (found,) = comparing.compare(tmp_path, ['simfbo'], plan=plan).values()
  if diverging_seed:
    assert found.tried[0].reason == 'x is not finite'
  else:
    assert found.failures == {0: 'x is not finite'}
  for name in ('trials.csv', 'leaderboard.md'):
    assert str(tmp_path) not in (tmp_path / name).read_text()


def test_a_damaged_reason_is_named(tmp_path, monkeypatch):
  train = comparison.TunedRuns.train

  def diverge(self, *arguments):
    if 0 in arguments:  # The seed of the final run.
      raise simulation.NonFiniteError('x is not finite')
    return train(self, *arguments)

  monkeypatch.setattr(comparison.TunedRuns, 'train', diverge)
  plan = comparing.PLAN._replace(budget=1, seeds=1)
  found = comparing.compare(tmp_path, ['simfbo'], plan=plan)
  assert comparing.compare(tmp_path, ['simfbo'], plan=plan) == found
  path = tmp_path / 'runs' / 'simfbo-seed0' / 'not_finite.json'
  path.write_text('"x is')
  with pytest.raises(simulation.RunError, match=r'not_finite.json. is damaged'):
    comparing.compare(tmp_path, ['simfbo'], plan=plan)


def test_damaged_rows_of_a_diverged_run_are_named(tmp_path):
  entries = {'simfbo': simulation.Entry(
      'SimFBO', 'simfbo', {'inner_learning_rate': 30.0}
  )}
  contest, _ = comparing.contest_and_entries()
  plan = comparing.PLAN._replace(rounds=60, budget=1, seeds=1)
  found = simulation.compare(contest, entries, plan, tmp_path)
  assert found['simfbo'].failures
  assert simulation.compare(contest, entries, plan, tmp_path) == found
  path = tmp_path / 'runs' / 'simfbo-seed0' / 'metrics.csv'
  path.write_bytes(path.read_bytes().replace(b'\n2,', b'\n3,'))
  with pytest.raises(simulation.RunError, match='epoch 2 of .*damaged'):
    simulation.compare(contest, entries, plan, tmp_path)


def test_a_page_before_all_methods_are_done(tmp_path, monkeypatch):
  run = comparison._Comparison.outcome

  def stop_at_the_second(self, k, *arguments):
    if k:
      raise KeyboardInterrupt
    return run(self, k, *arguments)

  with monkeypatch.context() as patch:
    patch.setattr(comparison._Comparison, 'outcome', stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
      comparing.compare(tmp_path)
  page = (tmp_path / 'leaderboard.md').read_text()
  assert 'Not done yet, and not in the tables: SimFBO, v = 0.' in page
  comparing.compare(tmp_path)
  assert 'Not done yet' not in (tmp_path / 'leaderboard.md').read_text()
