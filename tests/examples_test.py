"""A method of a user's own: docs/examples/soba.py, in code and in binaries."""

import importlib
import json
import pathlib
import sys

import numpy as np
import pytest

import fednest_tff
from fednest_tff import registry, simulation
from tests.helpers import binaries, processes, quadratic

RUNTIME = 'in_process'
ROOT = pathlib.Path(__file__).parent.parent
MODULE = 'docs.examples.soba'
BY_MODULE = f'{MODULE}:build_soba'
ALPHA, BETA = 0.1, 0.2
CLIENTS = quadratic.make_clients()
DATASETS = quadratic.to_datasets(CLIENTS)
FORM = quadratic.ClosedForm(CLIENTS)
# Of a small network on digits.
SMALL = [
    '--nocompiled', '--num_clients=3', '--clients_per_round=2', '--hidden=6',
    '--inner_learning_rate=0.1', '--outer_learning_rate=0.1',
]  # fmt: skip


@pytest.fixture(scope='module', autouse=True)
def known():
  """The names of methods before the file and after its import.

  Other tests know nothing of it.
  """
  before = registry._METHODS
  registry._METHODS = dict(before)
  assert MODULE not in sys.modules
  importlib.import_module(MODULE)
  yield tuple(before), registry.method_names()
  registry._METHODS = before
  del sys.modules[MODULE]


@pytest.fixture(scope='module')
def process():
  return fednest_tff.build(
      quadratic.build_problem(),
      'soba',
      inner_learning_rate=BETA,
      outer_learning_rate=ALPHA,
  )


# ---- The file ---------------------------------------------------------------


def test_it_is_one_short_file():
  lines = (ROOT / 'docs' / 'examples' / 'soba.py').read_text().splitlines()
  assert 40 < len(lines) <= 80
  assert max(map(len, lines)) <= 80


def test_nothing_else_knows_it():
  for folder in ('fednest_tff', 'experiments'):
    for path in (ROOT / folder).rglob('*.py'):
      assert 'soba' not in path.read_text().lower(), path


def test_one_call_registers_it(known):
  before, after = known
  assert after == (*before, 'soba')
  method = fednest_tff.get_method('soba')
  assert (method.label, method.rounds) == ('SOBA', '1')
  options = ['inner_learning_rate', 'outer_learning_rate', 'seed']
  assert list(method.options) == options
  # By its module it is the same, with the same label.
  by_module = fednest_tff.get_method(BY_MODULE)
  assert by_module.builder is method.builder
  assert by_module.label == 'SOBA'


# ---- In code ----------------------------------------------------------------


def _losses(x, y):
  outer = np.mean([quadratic.outer_loss(x, y, c).numpy() for c in CLIENTS])
  inner = np.mean([quadratic.inner_loss(x, y, c).numpy() for c in CLIENTS])
  return dict(inner_loss=inner, outer_loss=outer)


def test_steps_equal_numpy(process):
  start = process.initialize()
  x, y, v = start.outer, start.inner, np.zeros(quadratic.DY)
  np.testing.assert_array_equal(start.method, v)
  for output in processes.outputs(process, DATASETS, 4, start):
    metrics = _losses(x, y) | dict(num_clients=3, num_examples=6)
    x, y, v = (
        x - ALPHA * (FORM.direct_gradient(x, y) - FORM.mixed_product(v)),
        y - BETA * FORM.inner_gradient(x, y),
        v - BETA * (FORM.A @ v - FORM.gradient_in_inner(x, y)),
    )
    np.testing.assert_allclose(output.state.outer, x, rtol=1e-10)
    np.testing.assert_allclose(output.state.inner, y, rtol=1e-10)
    np.testing.assert_allclose(output.state.method, v, rtol=1e-10)
    assert list(output.metrics) == [*metrics, 'client_work']
    for name, value in metrics.items():
      np.testing.assert_allclose(output.metrics[name], value, rtol=1e-10)


def test_it_solves_the_problem(process, compiled):
  state = processes.run(process, DATASETS, 400).state
  x, y = FORM.solution()
  np.testing.assert_allclose(state.outer, x, atol=1e-6)
  np.testing.assert_allclose(state.inner, y, atol=1e-6)
  v = np.linalg.solve(FORM.A, FORM.gradient_in_inner(x, y))
  np.testing.assert_allclose(state.method, v, atol=1e-6)


def test_driver_equals_next(process):
  driver = fednest_tff.build_driver(process)
  expected = processes.outputs(process, DATASETS, 3)
  found = processes.outputs(driver, DATASETS, 3)
  for output, other in zip(found, expected, strict=True):
    processes.assert_equal(output.state, other.state)
    for name, value in other.metrics.items():
      np.testing.assert_array_equal(output.metrics[name], value)
    assert output.metrics['communication_rounds'] == 1


def test_cost(process):
  cost = fednest_tff.communication_cost(process)
  point = 8 * (quadratic.DX + 2 * quadratic.DY)
  # Down: x, y and v. Up: their directions, two losses, a weight, two counts.
  assert cost[:3] == (1, point + 5 * 8, point)
  assert cost[3:] == cost[:3]


def test_other_step_sizes_without_building_it_again(process):
  start = process.initialize()
  hparams = dict(inner_learning_rate=0.05, outer_learning_rate=0.3)
  changed = process.set_hparams(start, hparams)
  output = process.next(changed, DATASETS)
  x, y = start.outer, start.inner
  step = 0.05 * FORM.inner_gradient(x, y)
  np.testing.assert_allclose(output.state.inner, y - step, rtol=1e-10)
  step = 0.3 * FORM.direct_gradient(x, y)
  np.testing.assert_allclose(output.state.outer, x - step, rtol=1e-10)


def test_it_refuses_problems_without_an_inner_one():
  with pytest.raises(ValueError, match='SOBA needs a bilevel problem; got min'):
    fednest_tff.build(
        fednest_tff.minimax(
            quadratic.outer_loss, quadratic.init_outer, quadratic.init_inner,
            quadratic.element_spec(),
        ),
        'soba', inner_learning_rate=BETA, outer_learning_rate=ALPHA,
    )  # fmt: skip


# ---- In binaries ------------------------------------------------------------


def _rows(directory):
  return simulation.read_rows(str(directory / 'metrics.csv'))


def _without_seconds(path, method=b''):
  """The bytes of a metrics file but for the times and the method's name."""
  lines = [line.split(b',') for line in path.read_bytes().split(b'\r\n')]
  assert lines[0][4:6] == [b'seconds', b'method']
  return [line[:4] + [method] + line[6:] for line in lines]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run by the name of its module that nobody interrupted."""
  directory = tmp_path_factory.mktemp('whole')
  code = binaries.command(
      'hyper_representation', f'--method={BY_MODULE}', '--epochs=6', *SMALL,
      f'--output_dir={directory}',
  )  # fmt: skip
  assert code == 0
  return directory


@pytest.mark.usefixtures('default_context')
def test_binary(whole):
  experiment = binaries.EXPERIMENTS['hyper_representation']
  config = json.loads((whole / 'config.json').read_text())
  assert config['flags']['method'] == [BY_MODULE]
  # Flags of other methods are not there.
  assert 'neumann_terms' not in config['flags']
  resolved = experiment.resolve({
      name: value
      for name, value in config['flags'].items()
      if name != 'experiment'
  })
  cost = fednest_tff.communication_cost(
      experiment.make_trial(resolved, 0).build(BY_MODULE)
  )
  rows = _rows(whole)
  assert len(rows) == 6
  for k, row in enumerate(rows, start=1):
    assert row['method'] == BY_MODULE
    assert row['communication_rounds'] == k
    assert row['bytes_up'] == k * 2 * cost.bytes_up
    assert row['bytes_down'] == k * 2 * cost.bytes_down
    assert row['num_clients'] == 2
  assert rows[-1]['outer_loss'] < rows[0]['outer_loss']
  for name in ('plot.png', 'plot.pdf'):
    assert (whole / name).stat().st_size > 5_000
  summary = json.loads((whole / 'summary.json').read_text())
  accuracy = summary['methods'][BY_MODULE]['test_accuracy']
  assert accuracy['last'] == rows[-1]['test_accuracy']


@pytest.mark.usefixtures('default_context')
def test_by_its_short_name_with_another_method(whole, tmp_path, capfd):
  code = binaries.command(
      'hyper_representation', '--method=soba,lfednest', '--epochs=6', *SMALL,
      '--inner_local_steps=1', '--neumann_terms=1', f'--output_dir={tmp_path}',
  )  # fmt: skip
  assert code == 0
  printed = capfd.readouterr().out
  assert 'SOBA' in printed and 'LFedNest' in printed
  assert (tmp_path / 'plot.png').stat().st_size > 5_000
  own = tmp_path / 'runs' / 'soba-seed0' / 'metrics.csv'
  assert _without_seconds(own) == _without_seconds(whole / 'metrics.csv')


def test_killed_and_started_again_it_ends_in_the_same_bytes(
    launcher, whole, tmp_path
):
  command = [
      'hyper_representation', f'--method={BY_MODULE}', '--epochs=6', *SMALL,
      '--epochs_per_checkpoint=2', f'--output_dir={tmp_path / "run"}',
  ]  # fmt: skip
  log = tmp_path / 'log.txt'
  # While the second checkpoint, that of epoch 2, is being written.
  code = launcher.run(command, log, die_at=['checkpoint_half', 2])
  assert code == -9, log.read_text()
  assert launcher.run(command, log) == 0, log.read_text()
  found = _without_seconds(tmp_path / 'run' / 'metrics.csv')
  assert found == _without_seconds(whole / 'metrics.csv')


@pytest.mark.usefixtures('default_context')
@pytest.mark.parametrize(
    ['binary', 'flags'],
    [
        ('loss_tuning', SMALL),
        ('compositional', ['--num_clients=3', '--nocompiled']),
    ],
)
def test_other_binaries(binary, flags, tmp_path):
  code = binaries.command(
      binary, f'--method={BY_MODULE}', '--epochs=2', *flags,
      f'--output_dir={tmp_path}',
  )  # fmt: skip
  assert code == 0
  assert [row['communication_rounds'] for row in _rows(tmp_path)] == [1, 2]


@pytest.mark.usefixtures('default_context')
@pytest.mark.parametrize(
    ['binary', 'flags', 'message'],
    [
        ('minimax', [], 'SOBA needs a bilevel problem; got minimax.'),
        ('hyper_representation', ['--neumann_terms=2'], '--neumann_terms has'),
    ],
)
def test_bad_input_is_one_line(binary, flags, message, tmp_path, capfd):
  code = binaries.command(
      binary, '--method=soba', *flags, f'--output_dir={tmp_path}'
  )
  assert code == 2
  printed = capfd.readouterr().err
  assert printed.startswith(f'error: {message}')
  assert printed.count('\n') == 1
