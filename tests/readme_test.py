"""The examples of the README and of the pages run as they stand there."""

import contextlib
import io
import pathlib
import re
import sys

import numpy as np
import pytest
import tensorflow_federated as tff

import fednest_tff

ROOT = pathlib.Path(__file__).parent.parent
# Pages with examples; others quote lines of files that are tested elsewhere.
PAGES = {
    name: (ROOT / name).read_text()
    for name in ('README.md', 'docs/tutorial.md', 'docs/tuning.md')
}
BLOCKS = [
    block
    for text in PAGES.values()
    for block in re.findall(r'```python\n(.*?)```', text, re.DOTALL)
]


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
    exec(compile(block, 'example', 'exec'), names)
  return names | dict(printed=printed.getvalue())


@pytest.fixture(scope='module')
def problem_of_your_own():
  """The names of the first example."""
  return _run('Per-feature ridge')


def test_all_examples_are_tested():
  assert len(BLOCKS) == 9


def test_the_readme_is_short():
  assert len(PAGES['README.md'].splitlines()) <= 150


def test_links():
  sys.path.insert(0, str(ROOT / 'docs'))
  try:
    import links
  finally:
    sys.path.pop(0)
  assert links.main() == 0
  assert links.broken(ROOT / 'tests' / 'data' / 'links.md') == [
      'no_such_file.md', 'links.md#no-such-heading'
  ]


def test_problem_of_your_own(problem_of_your_own):
  names = problem_of_your_own
  assert names['output'].metrics['num_clients'] == 5
  # The ridge of a useful feature falls, that of a useless one rises.
  ridge = names['process'].get_model_weights(names['state']).outer
  assert ridge[:3].max() < ridge[3:].min()
  # It prints what the README says.
  _, _, after = PAGES['README.md'].partition('outer.round(1) + 0)\n```')
  expected = re.search(r'```\n(.*?)```', after, re.DOTALL)[1]
  assert names['printed'].split() == expected.split()


def test_from_a_problem_to_a_figure(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = _run('Shrunk means')
  assert (tmp_path / 'outputs' / 'tutorial' / 'plot.png').exists()
  for (rows,) in names['runs'].values():
    assert rows[-1]['distance'] < rows[0]['distance']
  compared = _run('simulation.Contest', names)
  assert '| SimFBO |' in compared['printed']
  for outcome in compared['outcomes'].values():
    assert len(outcome.tried) == 2 and len(outcome.runs) == 2
    assert 30 < outcome.runs[0][-1]['communication_rounds'] <= 40
    assert outcome.runs[0][-1]['distance'] < 2.5
  names = _run('load_weights', names)
  last = names['runs']['fednest'][0][-1]['distance']
  at = names['process'].get_model_weights(names['state'])
  np.testing.assert_allclose(np.abs(at.outer - 2.5).max(), last, rtol=1e-5)


def test_tuning():
  printed = _run('largest curvature')['printed']
  found = re.findall(r'l = (\S+): .* (\S+), residual (\S+)', printed)
  (small, curvature, diverged), (large, same, solved) = (
      map(float, row) for row in found
  )
  assert small < curvature and same < large
  assert diverged > 10 and solved < 0.3


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


def test_keras_and_other_processes():
  names = _run('backbone_and_head')
  found = re.findall(r"accuracy', ([\d.]+)", names['printed'])
  before, after = map(float, found)
  assert after > before + 0.3
  kernel = names['backbone'].trainable_variables[0]
  np.testing.assert_array_equal(kernel, names['after'].outer[0])


def test_differential_privacy():
  names = _run('dp_aggregator')
  x, y = names['process'].get_model_weights(names['state'])
  # On the way to the clients' mean, 1.5, which clipping makes a long one.
  assert np.all((x > 0) & (x < 1.5)) and np.all((y > 0) & (y < 1.5))
  # Noise makes equal features unequal.
  assert np.ptp(x) > 1e-3
