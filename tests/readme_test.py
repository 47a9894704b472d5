"""The README's examples run as they stand there."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow_federated as tff

README = pathlib.Path(__file__).parent.parent / 'README.md'
BLOCKS = re.findall(r'```python\n(.*?)```', README.read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def restored_context():
  context = tff.framework.get_context_stack().current
  yield
  tff.framework.set_default_context(context)


def _run(text):
  """The names of the one example that has `text` in it."""
  (block,) = [block for block in BLOCKS if text in block]
  names = {}
  exec(compile(block, str(README), 'exec'), names)
  return names


def test_all_examples_are_tested():
  assert len(BLOCKS) == 3


def test_problem_of_your_own(capfd):
  names = _run('Per-feature ridge')
  assert names['output'].metrics['num_clients'] == 5
  # The ridge of a useful feature falls, that of a useless one rises.
  ridge = names['process'].get_model_weights(names['state']).outer
  assert ridge[:3].max() < ridge[3:].min()
  assert 'rounds=' in capfd.readouterr().out


def test_with_other_processes(capfd):
  _run('build_fed_eval')
  found = re.findall(
      r"sparse_categorical_accuracy', ([\d.]+)", capfd.readouterr().out
  )
  before, after = map(float, found)
  assert after > before + 0.3


def test_differential_privacy():
  names = _run('dp_aggregator')
  x, y = names['process'].get_model_weights(names['state'])
  # On the way to the clients' mean, 1.5, which clipping makes a long one.
  assert np.all((x > 0) & (x < 1.5)) and np.all((y > 0) & (y < 1.5))
  # Noise makes equal features unequal.
  assert np.ptp(x) > 1e-3
