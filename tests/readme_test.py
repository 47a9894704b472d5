"""The README's example runs as it stands there."""

import pathlib
import re


def test_example_runs(capfd):
  readme = pathlib.Path(__file__).parent.parent / 'README.md'
  blocks = re.findall(r'```python\n(.*?)```', readme.read_text(), re.DOTALL)
  assert blocks
  for block in blocks:
    names = {}
    exec(compile(block, str(readme), 'exec'), names)
    assert names['output'].metrics['num_clients'] == 5
    # The ridge of a useful feature falls, that of a useless one rises.
    ridge = names['process'].get_model_weights(names['state']).outer
    assert ridge[:3].max() < ridge[3:].min()
  assert 'rounds=' in capfd.readouterr().out
