"""The problems of the comparison: their methods, ablations and schedules."""

import numpy as np
import pytest

from experiments import contest_presets, contests
import fednest_tff
from fednest_tff import simulation

RUNTIME = 'in_process'
PLAN = simulation.Plan(rounds=40, tuning_rounds=20, budget=1)
QUADRATIC = contest_presets.PRESETS['quadratic']


def make_contest(decay):
  return contests.contest(QUADRATIC, contests.resolve(QUADRATIC, {}), decay)


def steps(process, epoch, **hparams):
  """The numbers that a process uses in an epoch."""
  state = process.initialize()
  known = process.get_hparams(state)
  assert hparams.keys() <= known.keys()
  state = process.set_hparams(state, known | hparams)
  return process.plan(state.seed, np.int32(epoch), state.hparams)[0]


@pytest.mark.parametrize('is_tuning', [True, False])
def test_steps_fall_in_the_second_half_of_the_rounds(is_tuning):
  trial = make_contest(PLAN).make_trial(0, is_tuning)
  process = trial.build('fedmsa')
  rounds = PLAN.tuning_rounds if is_tuning else PLAN.rounds
  epochs = rounds // fednest_tff.communication_cost(process).rounds
  assert epochs == rounds // 2
  given = dict(
      inner_learning_rate=np.float32(0.5),
      linear_learning_rate=np.float32(0.25),
      outer_learning_rate=np.float32(0.125),
  )
  for epoch, share in [
      (0, 1), (epochs // 2, 1), (epochs - 1, 2 / epochs), (epochs, 0)
  ]:
    found = steps(process, epoch, **given)
    for name, value in given.items():
      np.testing.assert_allclose(found[name], share * value, rtol=1e-5)


def test_steps_stay_if_not_asked():
  process = make_contest(None).make_trial(0, False).build('simfbo')
  found = steps(process, 39, outer_learning_rate=np.float32(0.5))
  assert found['outer_learning_rate'] == 0.5


def test_variants_have_their_settings_and_fall_likewise():
  trial = make_contest(PLAN).make_trial(0, False)
  process = trial.build('simfbo_momentum')
  start = steps(process, 0, outer_learning_rate=np.float32(0.5))
  assert start['server_momentum'] == 0.9
  end = steps(process, 39, outer_learning_rate=np.float32(0.5))
  np.testing.assert_allclose(
      end['outer_learning_rate'], 0.5 * 2 / 40, rtol=1e-5
  )
  assert 'server_momentum' not in steps(trial.build('simfbo'), 0)


def test_fednest_has_more_rounds_with_five_terms():
  # T = 1; quadratics have N = 3 for all other methods.
  trial = make_contest(PLAN).make_trial(0, False)
  rounds = [
      fednest_tff.communication_cost(trial.build(name)).rounds
      for name in ('fednest', 'fednest_n5')
  ]
  assert rounds == [2 + 3 + 2, 2 + 5 + 2]


def test_entries():
  found = contests.entries(QUADRATIC)
  assert found['simfbo_v0'].fixed == {'linear_learning_rate': 0.0}
  assert found['simfbo_v0'].method == 'simfbo'
  assert found['simfbo_momentum'].method == 'simfbo_momentum'
  assert not found['simfbo_momentum'].fixed
  assert found['simfbo_momentum_v0'].fixed == {'linear_learning_rate': 0.0}
  assert 'personal' not in found
  assert set(contests.choose(found, ['simfbo'])) == {'simfbo'}
  with pytest.raises(ValueError, match='`methods`=fednest_paper is none of'):
    contests.choose(found, ['fednest_paper'])
  with pytest.raises(ValueError, match='`methods` is empty: choose from fedn'):
    contests.choose(found, [])
  with pytest.raises(ValueError, match='`methods` names a method twice'):
    contests.choose(found, ['simfbo', 'fednest', 'simfbo'])


def test_baselines_of_hyper_cleaning_search_the_steps_of_the_classifier():
  preset = contest_presets.PRESETS['hyper_cleaning']
  found = contests.entries(preset)
  for name in ('no_cleaning', 'true_labels', 'validation_only'):
    assert found[name].method == name
    assert found[name].steps.outer == preset.steps.inner
  assert found['simfbo'].steps is None
  settings = contests.resolve(preset, dict(num_clients=4, clients_per_round=2))
  trial = contests.contest(preset, settings, PLAN).make_trial(1000, True)
  process = trial.build('validation_only')
  known = process.get_hparams(process.initialize())
  assert 'outer_learning_rate' in known and 'inner_learning_rate' not in known
  start, end = (
      steps(process, epoch, outer_learning_rate=np.float32(0.5))
      for epoch in (0, 19)
  )
  assert start['outer_learning_rate'] == 0.5
  np.testing.assert_allclose(end['outer_learning_rate'], 0.05, rtol=1e-5)


def test_builders_of_one_name_have_two_labels(tmp_path, monkeypatch):
  for name in ('first', 'second'):
    (tmp_path / f'own_{name}.py').write_text(
        'import fednest_tff\n'
        'build_mine = fednest_tff.build_sim_fbo\n'
    )
  monkeypatch.syspath_prepend(str(tmp_path))
  names = ['own_first:build_mine', 'own_second:build_mine']
  found = contests.choose(contests.entries(QUADRATIC), names)
  assert [entry.method for entry in found.values()] == names
  first, second = (entry.label for entry in found.values())
  assert first != second == names[1]
  known = contests.entries(QUADRATIC)
  # That of the library comes later.
  found = contests.choose(known, ['fednest_tff:build_sim_fbo', 'simfbo'])
  assert found['fednest_tff:build_sim_fbo'].label == 'fednest_tff:build_sim_fbo'
