"""The reproduction: one small figure in full, and its judgements."""

import json
import os
import re

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from experiments.reproduce import __main__ as reproduce
from experiments.reproduce import (
    claims,
    differences,
    figures,
    measures,
    sets,
    verdicts,
)
from tests.helpers import quadratic, reference


@pytest.fixture
def restored_context():
  """The flags of the program; afterwards they and the runtime are as before."""
  context = tff.framework.get_context_stack().current
  with flagsaver.flagsaver():
    reproduce.define_flags()
    flags.FLAGS.mark_as_parsed()
    yield
  tff.framework.set_default_context(context)


def _tiny(name, data_dir, seeds):
  preset = sets.Preset(name, seeds or 1, {}, {}, {}, 2, 3, ())
  hyper = dict(
      dataset='digits', num_clients=4, clients_per_round=2, hidden=['8'],
      batch_size=64, inner_local_epochs=1, neumann_terms=2, epochs=3,
      compiled=False,
  )
  return preset._replace(hyper=hyper)


def test_a_figure_from_runs_to_claims(tmp_path, monkeypatch, restored_context):
  monkeypatch.setattr(sets, 'make_preset', _tiny)
  with flagsaver.flagsaver(
      figure=['5'], preset='quick', output_dir=str(tmp_path)
  ):
    assert reproduce.main(['reproduce']) == 0
    first = (tmp_path / 'claims.md').read_text()
    # Again: nothing is run, everything is read.
    with monkeypatch.context() as patch:
      patch.setattr(
          'fednest_tff.simulation.train', lambda *a, **k: pytest.fail('ran')
      )
      assert reproduce.main(['reproduce']) == 0
  assert (tmp_path / 'claims.md').read_text() == first
  assert os.path.getsize(tmp_path / 'fig5.png') < 200_000
  claim, other = json.loads((tmp_path / 'claims.json').read_text())
  assert claim['figure'] == other['figure'] == '5'
  assert '--figure=5 --preset=quick' in claim['made_by']
  assert set(claim['measured']) > set(sets.LIGHT_METHODS)
  assert claim['verdict'] in (verdicts.HOLDS, verdicts.WEAKLY, verdicts.FAILS)


@pytest.mark.parametrize(
    'given, message',
    [
        (dict(figure=['7']), '--figure=7'),
        (dict(figure=['2c'], preset='tuned'), '--figure=2c'),
        (dict(figure=['2a'], preset='paper'), 'needs --data_dir'),
        (dict(figure=['2a'], preset='paper', data_dir='/nowhere'), '/nowhere'),
    ],
)
def test_bad_flags(given, message, tmp_path, capfd, restored_context):
  with flagsaver.flagsaver(output_dir=str(tmp_path / 'out'), **given):
    assert reproduce.main(['reproduce']) == 2
  error = capfd.readouterr().err
  assert error.startswith('error: ') and message in error
  assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    'preset, figure',
    [
        *((preset, figure) for preset in ('quick', 'paper')
          for figure in (*sets.FIGURES, 'code')),
        *(('tuned', figure) for figure in sets.TUNED_FIGURES),
    ],
)
def test_every_run_has_settings_that_its_experiment_knows(preset, figure):
  runs = sets.runs_of(figure, sets.make_preset(preset, 'somewhere', None))
  for run in runs.values():
    settings = run.experiment.resolve(run.given)
    assert settings.epochs >= 20
  names = [run.name for run in runs.values()]
  assert len(set(names)) == len(names)


def test_shared_runs_are_the_same():
  preset = sets.make_preset('paper', 'somewhere', 3)
  found = {}
  for figure in (*sets.FIGURES, 'code'):
    for run in sets.runs_of(figure, preset).values():
      assert found.setdefault(run.name, run.given) == run.given


def test_figure_6_at_equal_rounds():
  preset = sets.make_preset('paper', 'somewhere', None)
  runs = sets.runs_of('6_rounds', preset)
  # T = 1 and N = 5.
  rounds = dict(fednest=9, fednest_sgd=8, lfednest=2, lfednest_svrg=3)
  for (step, method), run in runs.items():
    assert run.given['epochs'] * rounds[method] == 18 * 72
    assert run.given['smoothness'] == 1 / step
    assert run.given['outer_learning_rate'] == step
    assert 'epochs' not in run.name
  assert len(runs) == 16
  longer = sets.runs_of('6_rounds', preset._replace(step_epochs=300))
  assert {r.name for r in longer.values()} == {r.name for r in runs.values()}
  for key, run in longer.items():
    assert run.given['epochs'] > runs[key].given['epochs']


@pytest.mark.parametrize(
    'figure, rounds_per_epoch', [('6', 1), ('6_rounds', 2)]
)
def test_figure_6_says_who_diverged(
    figure, rounds_per_epoch, tmp_path, monkeypatch
):
  # Half the epochs are all rounds of a method with two rounds per epoch.
  rows = {
      (step, method): [_rows([0.5] * 4)]
      for step in (1, 2, 3, 4) for method in sets.STEP_METHODS
  }
  rows[1, 'lfednest'] = [_rows([0.5] * 2, rounds_per_epoch)]
  labels = []
  monkeypatch.setattr(
      figures.plots, 'draw_curves',
      lambda axes, found, *_: labels.extend(found),
  )
  figures.DRAW[figure](rows, str(tmp_path / 'figure'))
  diverged = ['LFedNest (diverges)'] if figure == '6' else []
  assert [label for label in labels if 'diverges' in label] == diverged


def test_paper_preset_has_the_settings_of_appendix_h():
  preset = sets.make_preset('paper', 'somewhere', None)
  for settings in (preset.hyper, preset.tuning):
    assert settings['batch_size'] == 64
    assert settings['inner_local_epochs'] == 5
    assert settings['num_clients'] == 100
    assert settings['clients_per_round'] == 10
  assert preset.hyper['inner_rounds'] == 1
  assert preset.hyper['neumann_terms'] == 5
  assert preset.hyper['inner_learning_rate'] == 0.01
  assert preset.saddle['ridge'] == 10 and preset.seeds == 3


def _rows(accuracies, rounds_per_epoch=1, column='test_accuracy'):
  return [
      {
          'epoch': k + 1,
          'communication_rounds': (k + 1) * rounds_per_epoch,
          column: accuracy,
      }
      for k, accuracy in enumerate(accuracies)
  ]


@pytest.mark.parametrize(
    'other, verdict',
    [
        ([0.5, 0.5], verdicts.HOLDS),
        ([0.895, 0.895], verdicts.WEAKLY),
        ([0.91, 0.91], verdicts.FAILS),
        # A larger mean that the spread over seeds does not bear out.
        ([0.7, 0.99], verdicts.WEAKLY),
        # A run without rows diverged and counts as nothing.
        ([None, None], verdicts.HOLDS),
    ],
)
def test_better_is_judged_by_size_and_spread(other, verdict):
  rows = {
      ('fednest', 'shards'): [_rows([0.1, 0.9]), _rows([0.1, 0.9])],
      ('lfednest', 'shards'): [
          _rows([0.1, value]) if value is not None else [] for value in other
      ],
  }
  measured, found = measures.better_than_light(rows)
  assert found == verdict
  assert measured['FedNest'].mean == pytest.approx(0.9)
  ends = [value for value in other if value is not None]
  if ends:
    assert measured['its best'].mean == pytest.approx(np.mean(ends))


def test_equal_rounds_are_those_of_the_shorter_run():
  rows = {
      ('fednest', 'shards'): [_rows([0.1, 0.2, 0.3], 9)],
      ('fednest_sgd', 'shards'): [_rows([0.15, 0.25, 0.35], 8)],
  }
  measured, _ = measures.svrg('test_accuracy')(rows)
  # After 24 rounds, the end of the second, the first has had two epochs.
  assert measured['SVRG'].mean == 0.2
  assert measured['SGD'].mean == 0.35


def test_a_run_that_diverged_does_not_cut_the_other_short():
  rows = {
      'whole': [_rows([0.1, 0.2, 0.3, 0.4])],
      'diverged': [_rows([0.5, 0.6, 0.7]), _rows([0.5]), []],
  }
  whole, diverged = verdicts.at_same_rounds(
      rows, ['whole', 'diverged'], 'test_accuracy'
  )
  assert whole.mean == 0.4
  # Its last values, and nothing where there is none.
  assert diverged.mean == pytest.approx((0.7 + 0.5 + 0) / 3)


def _ends(column='test_accuracy', **values):
  """Two equal seeds that end at a value, by key."""
  return {
      key.replace('__', ' '): [_rows([0.1, value], column=column)] * 2
      for key, value in values.items()
  }


def _split(column='test_accuracy', **values):
  """The same for keys such as fednest__iid."""
  return {
      tuple(key.split(' ')): runs
      for key, runs in _ends(column, **values).items()
  }


HOLDS, WEAKLY, FAILS = verdicts.HOLDS, verdicts.WEAKLY, verdicts.FAILS
BALANCED = measures.BALANCED
JUDGED = [
    (measures.both_do_well_iid, _split(fednest__iid=0.92, lfednest__iid=0.91),
     HOLDS),
    (measures.both_do_well_iid, _split(fednest__iid=0.92, lfednest__iid=0.8),
     FAILS),
    (measures.shards_as_iid, _split(fednest__iid=0.92, fednest__shards=0.915),
     HOLDS),
    (measures.shards_as_iid, _split(fednest__iid=0.92, fednest__shards=0.9),
     WEAKLY),
    (measures.better_than_light,
     _split(fednest__shards=0.92, lfednest__shards=0.905), WEAKLY),
    (measures.near_centralised,
     _split(BALANCED, fednest__iid=0.9) | _ends(BALANCED, centralised=0.91),
     HOLDS),
    # Better is near enough.
    (measures.near_centralised,
     _split(BALANCED, fednest__iid=0.97) | _ends(BALANCED, centralised=0.91),
     HOLDS),
    (measures.shards_as_iid, _split(fednest__iid=0.92, fednest__shards=0.95),
     HOLDS),
    (measures.near_centralised,
     _split(BALANCED, fednest__iid=0.8) | _ends(BALANCED, centralised=0.91),
     FAILS),
    (measures.better_than_untuned('untuned clients'),
     _split(BALANCED, fednest__iid=0.9)
     | _ends(BALANCED, untuned__clients=0.85), HOLDS),
    (measures.better_than_untuned('untuned'),
     _split(BALANCED, fednest__iid=0.9) | _ends(BALANCED, untuned=0.91), FAILS),
    (measures.svrg_gains(measures.ACCURACY),
     _split(fednest__iid=0.9, fednest_sgd__iid=0.89, fednest__shards=0.9,
            fednest_sgd__shards=0.8), HOLDS),
    (measures.svrg_gains(measures.ACCURACY),
     _split(fednest__iid=0.9, fednest_sgd__iid=0.8, fednest__shards=0.9,
            fednest_sgd__shards=0.89), FAILS),
    (measures.alternation,
     _ends(lfednest=0.9, lfednest_svrg=0.91, lfednest_nonalt=0.8), HOLDS),
    (measures.alternation,
     _ends(lfednest=0.9, lfednest_svrg=0.7, lfednest_nonalt=0.8), FAILS),
    (measures.light_svrg, _ends(lfednest=0.8, lfednest_svrg=0.9), HOLDS),
    (measures.light_svrg, _ends(lfednest=0.9, lfednest_svrg=0.8), FAILS),
]


@pytest.mark.parametrize('measure, rows, verdict', JUDGED)
def test_verdicts(measure, rows, verdict):
  assert measure(rows)[1] == verdict


def test_verdicts_on_tau():
  rows = {
      (tau, partition): [_rows([0.5, 0.6 + tau / 100])]
      for tau in (1, 5) for partition in sets.PARTITIONS
  }
  measured, verdict = measures.larger_tau(rows)
  assert measured['shards, tau = 5'].mean == 0.65 and verdict == HOLDS
  rows[5, 'iid'] = [_rows([0.5, 0.6])]
  assert measures.larger_tau(rows)[1] == FAILS


def test_verdicts_on_steps():
  methods = ('fednest', 'fednest_sgd', 'lfednest', 'lfednest_svrg')
  swings = (0.0, 0.02, 0.08, 0.04)
  rows = {}
  for method, swing in zip(methods, swings, strict=True):
    runs = [_rows([0.5, 0.7, 0.8, 0.9, 0.9 - swing, 0.9], 9)]
    rows |= {(step, method): runs for step in (0.1, 0.01)}
  assert measures.steadier(rows)[1] == HOLDS
  rows[0.1, 'lfednest'] = rows[0.1, 'fednest']
  assert measures.steadier(rows)[1] == FAILS
  assert measures.small_steps(rows)[1] == HOLDS
  # It has turned back; it never got anywhere.
  for other in ([0.5, 0.9, 0.6], [0.1, 0.1, 0.1]):
    rows[0.01, 'lfednest'] = [_rows(other)]
    assert measures.small_steps(rows)[1] == FAILS
  # After 12 rounds, the end of the light method, FedNest has had one epoch.
  rows[0.1, 'lfednest'] = [_rows([0.1, 0.1, 0.2, 0.2, 0.3, 0.3], 2)]
  measured, verdict = measures.large_steps(rows)
  assert measured['FedNest'].mean == 0.5 and verdict == HOLDS


def _distances(x, y=None):
  return [
      dict(epoch=k + 1, x_distance=a, y_distance=b)
      for k, (a, b) in enumerate(zip(x, y or x, strict=True))
  ]


LINEAR = [10.0**-k for k in range(1, 12)]
FLAT = [10.0 ** -min(k, 4) for k in range(1, 12)]


@pytest.mark.parametrize(
    'runs, verdict',
    [
        ([_distances(LINEAR)] * 2, HOLDS),
        ([_distances([1 / k for k in range(1, 12)])], FAILS),
        # One seed or one variable that does not is enough.
        ([_distances(LINEAR), _distances(FLAT)], FAILS),
        ([_distances(LINEAR, FLAT)], FAILS),
    ],
)
def test_linear_convergence(runs, verdict):
  rows = {('fednest', spread, False): runs for spread in sets.SPREADS}
  assert measures.linear(False)(rows)[1] == verdict


def test_squares_are_squares():
  rows = {'a': [[{'x_distance': 3.0, 'y_distance': 0.5, 'epoch': 1}]]}
  (row,) = figures.squared(rows)['a'][0]
  assert row['x_squared'] == 9 and row['y_squared'] == 0.25


def test_series_against_their_definitions():
  """By powers of matrices; over equal clients the code differs by 1/n alone."""
  rng = np.random.default_rng(0)
  H = np.array([np.diag(rng.uniform(0.5, 1.5, 3)) for _ in range(4)])
  b, step = rng.normal(size=3), 0.5
  mean = np.eye(3) - step * H.mean(axis=0)
  power = np.linalg.matrix_power
  expected = step * sum(power(mean, n) @ b for n in range(6))
  np.testing.assert_allclose(
      differences.paper_series(H, b, step, 6), expected, rtol=1e-12
  )
  exact = np.linalg.solve(H.mean(axis=0), b)
  np.testing.assert_allclose(
      differences.paper_series(H, b, step, 200), exact, rtol=1e-12
  )
  expected = step * b + step * sum(
      np.mean([power(np.eye(3) - step * one, n) for one in H], axis=0) @ b / n
      for n in (1, 2, 3)
  )
  np.testing.assert_allclose(
      differences.authors_series(H, b, step, 3), expected, rtol=1e-12
  )


def test_hypergradients_against_the_closed_form():
  clients = quadratic.make_clients()
  form = quadratic.ClosedForm(clients)
  x, y = quadratic.init_outer(0).numpy(), quadratic.init_inner(0).numpy()
  tensors = [tf.nest.map_structure(tf.constant, client) for client in clients]
  found = differences.hypergradients(
      quadratic.build_problem(), tensors, x, y, 0.25, 3
  )
  direct = form.direct_gradient(x, y)
  b = form.gradient_in_inner(x, y)
  H = np.array([c.A for c in form.locals])
  for name, p in (
      ('direct', np.zeros_like(b)),
      ('exact', np.linalg.solve(form.A, b)),
      ('paper', reference.neumann(form.A, b, 4.0, 3)),
      ('code', differences.authors_series(H, b, 0.25, 3)),
  ):
    expected = direct - form.mixed_product(p)
    np.testing.assert_allclose(found[name], expected, rtol=1e-10)


def test_differences_are_told(monkeypatch):
  monkeypatch.setattr(differences, 'on_digits', lambda: {'cosine': 0.5})
  preset = sets.make_preset('quick', None, 2)
  rows = {}
  for key, run in sets.runs_of('code', preset).items():
    if key[:6] == 'tuning':
      rows[key] = [_rows([0.1, 0.7], column=BALANCED)]
    elif isinstance(key, tuple):
      value = 0.8 if run.given['standardize'] else 0.6
      rows[key] = [_rows([0.1, value])] * 2
    else:
      end = 0.1 * run.given['spread']
      rows[key] = [[{'x_distance': end, 'y_distance': 2 * end}]]
  text = differences.to_markdown(differences.run(rows), '# Here')
  assert 'N = 100, code 0.19' in text
  assert 'with b: x 0.01; with b: y 0.04; without: x 0; without: y 0' in text
  assert 'shards, standardised 0.8 ± 0; shards, 0 to 1 0.6 ± 0' in text
  assert 'not divided 0.7; no tuning 0.7' in text
  assert 'iid, four fifths' not in text and 'shards, four fifths' in text


def test_rounding_errors_are_not_compared():
  def rows(end):
    return {
        (method, spread, False): [_distances([1.0, last])] * 2
        for method, last in (('fednest', 1e-19), ('lfednest', end))
        for spread in sets.SPREADS
    }

  compare = measures.compare_saddle('fednest', 'lfednest', False, 10)
  measured, verdict = compare(rows(1e-16))
  assert verdict == FAILS
  # What is told is what was measured.
  assert measured['s = 1: fednest'].mean == pytest.approx(2e-38)
  assert compare(rows(1e-9))[1] == HOLDS
  assert compare(rows(1.5e-12))[1] == WEAKLY


def test_tables_have_a_cell_per_column_and_say_what_made_them():
  found = [
      dict(figure=figure, claim='|a| < b', measured={'x': 1.0},
           published='|b|', verdict=HOLDS, made_by=made_by)
      for figure, made_by in (('2a', 'this'), ('2b', 'this'), ('4', 'that'))
  ]
  text = claims.to_markdown(found, '# Claims')
  assert '- 2a, 2b: this\n- 4: that\n' in text
  rows = [line for line in text.split('\n') if line.startswith('|')]
  assert len(rows) == 5
  for row in rows:
    assert len(re.findall(r'(?<!\\)\|', row)) == 6


def test_runs_that_diverged_before_an_evaluation():
  runs = [_rows([0.5, 0.7]), [{'epoch': 1}], []]
  assert figures.last(runs, 'test_accuracy') == [0.7]
  assert verdicts.final(runs, 'test_accuracy').mean == pytest.approx(0.7 / 3)
  assert verdicts.best(runs, 'test_accuracy') == (0.7, 0.0, 1)


def test_a_method_that_diverges_is_said_to(tmp_path, monkeypatch):
  labels = []
  monkeypatch.setattr(
      figures.plots, 'draw_curves', lambda axes, found, *_: labels.extend(found)
  )
  rows = {
      (method, partition): [_rows([0.1, 0.2, 0.3])]
      for method in ('fednest', 'lfednest') for partition in sets.PARTITIONS
  }
  rows['lfednest', 'shards'].append(_rows([0.1, 0.2]))
  path = figures.DRAW['2a'](rows, str(tmp_path / 'figure'))
  assert os.path.getsize(path) < 200_000
  assert [name.endswith('(diverges)') for name in labels] == [
      False, False, False, True
  ]
