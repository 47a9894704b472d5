"""The README's examples run as they stand there."""

import contextlib
import io
import pathlib
import re

import numpy as np
import pytest
import tensorflow_federated as tff

import fednest_tff

README = pathlib.Path(__file__).parent.parent / 'README.md'
BLOCKS = re.findall(r'```python\n(.*?)```', README.read_text(), re.DOTALL)


@pytest.fixture(scope='module', autouse=True)
def restored_context():
  context = tff.framework.get_context_stack().current
  yield
  tff.framework.set_default_context(context)


def _run(text, names=None):
  """The names of the one example that has `text` in it.

  Args:
    text: Found in no other example.
    names: Of an example before it, if it goes on from there.

  Returns:
    Its names, and what it prints as `printed`.
  """
  (block,) = [block for block in BLOCKS if text in block]
  names = dict(names or {})
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec(compile(block, str(README), 'exec'), names)
  return names | dict(printed=printed.getvalue())


@pytest.fixture(scope='module')
def problem_of_your_own():
  """The names of the first example."""
  return _run('Per-feature ridge')


def test_all_examples_are_tested():
  assert len(BLOCKS) == 5


def test_problem_of_your_own(problem_of_your_own):
  names = problem_of_your_own
  assert names['output'].metrics['num_clients'] == 5
  # The ridge of a useful feature falls, that of a useless one rises.
  ridge = names['process'].get_model_weights(names['state']).outer
  assert ridge[:3].max() < ridge[3:].min()
  assert 'rounds=' in names['printed']


def test_another_step_size(problem_of_your_own):
  names = _run('set_hparams', problem_of_your_own)
  process, state = names['process'], names['state']
  assert state.hparams['outer_learning_rate'] == np.float32(0.1)
  before = problem_of_your_own['state'].hparams
  assert before['outer_learning_rate'] == np.float32(0.5)
  assert state.hparams['inner_learning_rate'] == np.float32(0.05)
  # An epoch with it compiles nothing, and x moves less.
  other = process.next(problem_of_your_own['state'], names['clients'])
  runtime = tff.framework.get_context_stack().current.runtime
  compiled = runtime.num_functions
  output = process.next(state, names['clients'])
  assert runtime.num_functions == compiled
  np.testing.assert_allclose(
      output.metrics['outer_update_norm'],
      other.metrics['outer_update_norm'] / 5,
      rtol=1e-3,
  )


def test_groups_of_options(problem_of_your_own):
  process = _run('FederatedInverseHessian(', problem_of_your_own)['process']
  assert isinstance(process, fednest_tff.NestedProcess)
  assert process is not problem_of_your_own['process']
  hparams = process.method.hparams
  assert hparams['inner_learning_rate'].initial == 0.05
  assert hparams['outer_learning_rate'].initial == 0.5
  # T = 2 and N = 5.
  assert fednest_tff.communication_cost(process).rounds == 2 * 2 + 5 + 2


def test_with_other_processes():
  printed = _run('build_fed_eval')['printed']
  found = re.findall(r"sparse_categorical_accuracy', ([\d.]+)", printed)
  before, after = map(float, found)
  assert after > before + 0.3


def test_differential_privacy():
  names = _run('dp_aggregator')
  x, y = names['process'].get_model_weights(names['state'])
  # On the way to the clients' mean, 1.5, which clipping makes a long one.
  assert np.all((x > 0) & (x < 1.5)) and np.all((y > 0) & (y < 1.5))
  # Noise makes equal features unequal.
  assert np.ptp(x) > 1e-3
