"""Each binary, as its flags describe it, on small problems."""

import csv
import json
import os

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from experiments import (
    compositional,
    hyper_representation,
    loss_tuning,
    minimax,
    personalization,
    program,
    report,
    runtimes,
    settings,
    single_level,
)
import fednest_tff
from fednest_tff import simulation
from fednest_tff.simulation import checkpoints

pytestmark = pytest.mark.usefixtures('default_context')

CONTRACT = [
    'epoch', 'communication_rounds', 'bytes_up', 'bytes_down', 'seconds',
    'method', 'seed',
]
IMAGES = dict(
    epochs=2, compiled=False, num_clients=4, clients_per_round=3, hidden=['6'],
    inner_local_epochs=1, batch_size=32, neumann_terms=2,
)
# Quicker to compile.
LIGHT = IMAGES | dict(method=['lfednest'])
ALONE = LIGHT | dict(num_clients=None, clients_per_round=None)
SMALL = dict(epochs=3, compiled=False, num_clients=3)
DISTANCES = ['x_distance', 'y_distance']
ACCURACY = ['test_accuracy', 'test_loss']
BALANCED = ['balanced_accuracy', *ACCURACY]
ROBUST = [
    'worst_client_loss', 'mean_client_loss', 'worst_client_accuracy',
    'test_accuracy', 'y_distance',
]

# Name: module, flags, clients that take part, columns of the evaluation.
CASES = {
    'mlp': (hyper_representation, IMAGES, 3, ACCURACY),
    'cnn_shards': (
        hyper_representation,
        LIGHT | dict(backbone='cnn', partition='shards', seed=3),
        3,
        ACCURACY,
    ),
    'loss_tuning': (loss_tuning, LIGHT, 3, BALANCED),
    'no_tuning': (loss_tuning, LIGHT | dict(no_tuning=True), 3, BALANCED),
    'centralised': (loss_tuning, ALONE | dict(centralised=True), 1, BALANCED),
    'class_weights': (
        loss_tuning, LIGHT | dict(tune_class_weights=True), 3, BALANCED
    ),
    'saddle': (minimax, SMALL | dict(clients_per_round=2), 2, DISTANCES),
    'robust_regression': (
        minimax,
        SMALL | dict(
            problem='robust_regression', outer_learning_rate=0.01,
            inner_learning_rate=0.01,
        ),
        3,
        ROBUST,
    ),
    'portfolio': (compositional, SMALL, 3, DISTANCES),
    'sine': (
        compositional,
        SMALL | dict(problem='sine', hidden=['4']),
        3,
        ['adapted_loss', 'held_out_loss'],
    ),
    'fed_out': (
        single_level,
        SMALL | dict(method=['fednest']),
        3,
        ['x_distance', 'excess_loss', 'test_accuracy'],
    ),
    'fed_avg': (
        single_level,
        SMALL | dict(method=['fedavg'], epochs_per_evaluation=2),
        3,
        ['x_distance', 'excess_loss', 'test_accuracy'],
    ),
}


def experiment_options(experiment, methods):
  """The names of all settings of an experiment with these methods."""
  return vars(experiment.resolve(dict(method=methods)))


def run(experiment, directory, **chosen):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(output_dir=str(directory), **chosen):
    return program.main(experiment, ['x'])


def read(path):
  """Header and rows, as text."""
  with open(path, newline='') as file:
    header, *rows = csv.reader(file)
  return header, rows


def is_equal(a, b):
  pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
  return all(np.array_equal(x, y) for x, y in pairs)


def last_weights(directory, process, epoch):
  """What the last checkpoint holds."""
  path = os.path.join(
      directory, checkpoints.CHECKPOINTS, f'program_state_{epoch}.npz'
  )
  state = checkpoints.read_state(path, process.initialize())
  return process.get_model_weights(state)


def noting(experiment):
  """The experiment, and the trials and processes that it will make."""
  trials, processes = [], []

  def make_trial(resolved, seed):
    trial = experiment.make_trial(resolved, seed)
    trials.append(trial)

    def build(method):
      processes.append(trial.build(method))
      return processes[-1]

    return trial._replace(build=build)

  return experiment._replace(make_trial=make_trial), trials, processes


@pytest.mark.parametrize('name', CASES)
def test_binary(name, tmp_path, capfd):
  module, chosen, cohort_size, columns = CASES[name]
  experiment, trials, processes = noting(module.EXPERIMENT)
  assert run(experiment, tmp_path, **chosen) == 0
  printed = capfd.readouterr()
  assert printed.err == ''
  assert str(tmp_path / 'plot.png') in printed.out

  resolved = experiment.resolve(chosen)
  method, seed = resolved.method[0], resolved.seed
  epochs = resolved.epochs
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['flags'] == {
      'experiment': experiment.name, **vars(resolved)
  }
  assert config['versions']['tensorflow-federated'] == '0.87.0'
  assert config['flags'].keys() > set(settings.COMMON)

  for file in ('plot.png', 'plot.pdf'):
    assert (tmp_path / file).stat().st_size > 5_000
  assert list((tmp_path / 'tensorboard').glob('events.out.tfevents.*'))

  (trial,), (process,) = trials, processes
  cost = fednest_tff.communication_cost(process)
  header, rows = read(tmp_path / 'metrics.csv')
  assert header[: len(CONTRACT)] == CONTRACT
  if resolved.epochs_per_evaluation == 1:
    assert header[len(CONTRACT) :][: len(columns)] == columns
  assert set(columns) < set(header)
  assert len(rows) == epochs
  table = [dict(zip(header, row, strict=True)) for row in rows]
  for k, row in enumerate(table, start=1):
    assert row['epoch'] == str(k)
    assert row['communication_rounds'] == str(k * cost.rounds)
    assert row['bytes_up'] == str(k * cost.bytes_up * cohort_size)
    assert row['bytes_down'] == str(k * cost.bytes_down * cohort_size)
    assert float(row['seconds']) > 0
    assert (row['method'], row['seed']) == (method, str(seed))
    if 'num_clients' in row:
      assert row['num_clients'] == str(cohort_size)
    is_evaluated = k % resolved.epochs_per_evaluation == 0 or k == epochs
    assert all((row[name] != '') == is_evaluated for name in columns)

  # The last row is about the state that was saved last.
  weights = last_weights(tmp_path, process, epochs)
  assert is_equal(simulation.load_weights(str(tmp_path), weights), weights)
  for key, value in trial.evaluate(weights).items():
    np.testing.assert_allclose(float(table[-1][key]), value, rtol=1e-6)

  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert summary['num_seeds'] == 1
  assert set(summary['methods']) == {method}
  for column in columns:
    values = [float(row[column]) for row in table if row[column]]
    best = max(values) if column.endswith('accuracy') else min(values)
    found = summary['methods'][method][column]
    assert (found['last'], found['best']) == (values[-1], best)
    assert found['last_std'] == 0

  if name == 'no_tuning':
    start = process.get_model_weights(process.initialize())
    assert is_equal(weights.outer, start.outer)
    assert not is_equal(weights.inner, start.inner)


# Methods since FedNest: each in some binary, some in each. Module: methods,
# flags, and (T, N) of their rounds.
LATER = {
    hyper_representation: (
        ['simfbo', 'aggitd'], IMAGES | dict(local_steps=2, inner_rounds=1),
        (1, 2),
    ),
    loss_tuning: (
        ['fedbioacc', 'penalty'], IMAGES | dict(local_steps=2), (1, 2)
    ),
    personalization: (
        ['simfbo', 'personal'],
        dict(num_clients=4, clients_per_round=3, hidden=['6']),
        (1, 5),
    ),
    minimax: (['fedmsa', 'fedmbo'], SMALL, (1, 0)),
    compositional: (
        ['shrofbo', 'penalty'], SMALL | dict(local_steps=2), (1, 1)
    ),
    single_level: (['fedmsa', 'fedmbo'], SMALL, (0, 0)),
}


@pytest.mark.parametrize(
    'module', LATER, ids=lambda module: module.EXPERIMENT.name
)
def test_later_methods(module, tmp_path, capfd):
  """Each moves x, and has the rounds that the registry names."""
  methods, chosen, (T, N) = LATER[module]
  known = experiment_options(module.EXPERIMENT, methods)
  chosen = {
      name: value for name, value in chosen.items() if name in known
  } | dict(method=methods, epochs=1, compiled=False)
  assert run(module.EXPERIMENT, tmp_path, **chosen) == 0
  assert capfd.readouterr().err == ''
  rows = simulation.read_rows(str(tmp_path / 'metrics.csv'))
  assert [row['method'] for row in rows] == methods
  for row in rows:
    formula = fednest_tff.get_method(row['method']).rounds
    rounds = eval(formula.replace('2T', '2 * T'), dict(T=T, N=N))
    assert row['communication_rounds'] == rounds
    assert 0 < row['outer_update_norm'] < 100
  moves = [row['outer_update_norm'] for row in rows]
  # On a single level both are federated SVRG. On a compositional problem, where
  # beta = 1, one step makes y and v exact, and x takes the same step.
  same = module in (single_level, compositional)
  assert (moves[0] == pytest.approx(moves[1])) == same


def test_several_methods_and_seeds(tmp_path, capfd):
  chosen = dict(
      method=['lfednest', 'fedavg_s'], seeds=2, seed=5, epochs=3,
      compiled=False, num_clients=3, dimension=2,
  )
  assert run(minimax.EXPERIMENT, tmp_path, **chosen) == 0
  pairs = [(m, s) for m in chosen['method'] for s in (5, 6)]
  assert {p.name for p in (tmp_path / 'runs').iterdir()} == {
      f'{method}-seed{seed}' for method, seed in pairs
  }
  header, rows = read(tmp_path / 'metrics.csv')
  assert header[: len(CONTRACT)] == CONTRACT
  parts = {}
  for pair in pairs:
    names, parts[pair] = read(
        tmp_path / 'runs' / '{}-seed{}'.format(*pair) / 'metrics.csv'
    )
    assert len(parts[pair]) == 3
    merged = [
        dict(zip(header, row, strict=True)) for row in rows
        if (row[5], row[6]) == (pair[0], str(pair[1]))
    ]
    # A column that one method does not have is empty.
    assert [[row[name] for name in names] for row in merged] == parts[pair]
  assert len(rows) == 12
  # Seeds differ, and so do methods.
  lasts = {pair: float(parts[pair][-1][7]) for pair in pairs}
  assert header[7] == 'x_distance' and len(set(lasts.values())) == 4

  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert summary['num_seeds'] == 2
  out = capfd.readouterr().out
  for method in chosen['method']:
    a, b = lasts[method, 5], lasts[method, 6]
    found = summary['methods'][method]['x_distance']
    np.testing.assert_allclose(found['last'], (a + b) / 2, rtol=1e-12)
    np.testing.assert_allclose(found['last_std'], abs(a - b) / 2, rtol=1e-9)
    assert f'{(a + b) / 2:.4g} ± {abs(a - b) / 2:.2g}' in out

  # Once more with the same flags: nothing is computed again.
  before = (tmp_path / 'metrics.csv').read_bytes()
  assert run(minimax.EXPERIMENT, tmp_path, **chosen) == 0
  assert (tmp_path / 'metrics.csv').read_bytes() == before


def test_saddle_converges_to_the_closed_form(tmp_path):
  chosen = dict(num_clients=6, dimension=4, spread=5.0, epochs=60, unroll=0)
  assert run(minimax.EXPERIMENT, tmp_path, **chosen) == 0
  rows = simulation.read_rows(str(tmp_path / 'metrics.csv'))
  assert rows[0]['x_distance'] > 0.1
  assert rows[-1]['x_distance'] < 1e-5
  assert rows[-1]['y_distance'] < 1e-5


@pytest.mark.parametrize(
    'cores, chosen, expected',
    [
        (4, dict(clients_per_round=3, num_clients=9), []),
        (4, dict(clients_per_round=4, num_clients=9), [1]),
        (4, dict(clients_per_round=None, num_clients=4), [1]),
        (4, dict(clients_per_round=None, num_clients=None), [1]),
        (4, dict(clients_per_round=None, num_clients=9, centralised=True), []),
        # All of them take part, or ten, where there are images.
        (32, dict(clients_per_round=None, num_clients=100), [1]),
        (32, dict(clients_per_round=None, num_clients=100, dataset='x'), []),
        (32, dict(clients_per_round=50, num_clients=100, dataset='x'), [1]),
    ],
)
def test_many_clients_have_one_thread_per_operation(
    cores, chosen, expected, monkeypatch
):
  found = []
  monkeypatch.setattr(os, 'cpu_count', lambda: cores)
  monkeypatch.delenv('TF_NUM_INTRAOP_THREADS')
  monkeypatch.setattr(
      tf.config.threading, 'set_intra_op_parallelism_threads', found.append
  )
  runtimes._use_one_thread_per_operation(settings.Settings(**chosen))
  assert found == expected


def test_runs_free_what_earlier_runs_compiled(default_context):
  chosen = settings.Settings(**settings.COMMON)
  runtimes.use_runtime(chosen)
  runtime = tff.framework.get_context_stack().current.runtime
  for length in range(1, 12):
    add = tff.federated_computation(
        lambda x: tff.federated_sum(x),
        tff.FederatedType((np.int32, [length]), tff.CLIENTS),
    )
    np.testing.assert_array_equal(add([[2] * length] * 3), [6] * length)
  assert runtime.num_functions >= 11
  runtimes.use_runtime(chosen)
  assert tff.framework.get_context_stack().current.runtime is runtime
  assert runtime.num_functions == 4


def test_table_of_runs_that_diverged_before_an_evaluation():
  row = dict(communication_rounds=3, bytes_up=1, bytes_down=1, seconds=0.1)
  table = report.table(
      {'fednest': [[row], [row]]}, simulation.Curve('test_accuracy', 'accuracy')
  )
  assert 'nan ± nan' in table
