"""The types tell a batch from its features, and know users' own functions."""

import os
import pathlib

from mypy import api
import pytest

ROOT = pathlib.Path(__file__).parent.parent
USER = '''
import tensorflow as tf

from fednest_tff.local import derivatives, sampling
from fednest_tff.local.client import Client, ClientFeatures
from fednest_tff.problems import Problem, bilevel
from fednest_tff.vector_space import Structure


def right(
    problem: Problem, x: Structure, client: Client, features: ClientFeatures
) -> None:
  derivatives.inner_gradient(problem, x, x, features.inner)
  at_x = problem.representation(x, client.inner)
  derivatives.inner_gradient(problem, x, x, at_x)
  problem.inner_loss(x, x, sampling.sample(at_x, 1, tf.zeros([2])))
  derivatives.direct_gradient(problem, x, x, client.outer)


def wrong(
    problem: Problem, x: Structure, client: Client, features: ClientFeatures
) -> None:
  derivatives.inner_gradient(problem, x, x, client.inner)  # Batch
  problem.inner_loss(x, x, client.inner)  # Batch
  problem.outer_loss(  # Batch
      x, x, sampling.sample(client.outer, 1, tf.zeros([2]))
  )
  derivatives.direct_gradient(problem, x, x, features.outer)  # Features
  problem.representation(x, features.inner)  # Features


def loss(x: tf.Tensor, y: tf.Tensor, batch: dict[str, tf.Tensor]) -> tf.Tensor:
  return tf.reduce_mean(batch['a'] * x * y)


def users_problem() -> Problem:
  return bilevel(
      loss, loss, lambda seed: tf.zeros([]), lambda seed: tf.zeros([]),
      {'a': tf.TensorSpec([])},
  )
'''
WRONG_KIND = {'Batch': 'Features', 'Features': 'Batch'}
# Nothing of it has to do with batches and features, but mypy reads all that a
# file imports, and what that imports: numpy alone takes it seconds.
NOT_READ = """
[[tool.mypy.overrides]]
module = [
  "fednest_tff.algorithms.*", "fednest_tff.data.*", "fednest_tff.federated.*",
  "fednest_tff.models.*", "fednest_tff.registry", "fednest_tff.runtime.*",
  "fednest_tff.simulation.*", "matplotlib.*", "numpy.*",
]
follow_imports = "skip"
"""


@pytest.fixture(scope='module')
def errors(tmp_path_factory):
  """What mypy says about `USER`, which it reads once: messages by line."""
  folder = tmp_path_factory.mktemp('types')
  path, config = folder / 'user.py', folder / 'mypy.toml'
  path.write_text(USER)
  config.write_text((ROOT / 'pyproject.toml').read_text() + NOT_READ)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('MYPYPATH', str(ROOT))
    found, problems, _ = api.run([
        f'--config-file={config}',
        f'--cache-dir={os.devnull}',
        '--follow-imports=silent',  # `make lint` checks the package itself.
        '--no-error-summary',
        str(path),
    ])
  assert not problems
  messages = {}
  for line in found.splitlines():
    name, number, message = line.split(':', 2)
    assert name.endswith('user.py'), line
    messages.setdefault(int(number), []).append(message.strip())
  return messages


def test_a_batch_is_no_features(errors):
  lines = USER.splitlines()
  expected = {
      k: line.partition('# ')[2]
      for k, line in enumerate(lines, 1)
      if line.endswith(('# Batch', '# Features'))
  }
  assert len(expected) == 5
  for k, given in expected.items():
    # The call may begin on that line and have the argument on the next.
    found = errors.get(k) or errors.get(k + 1) or []
    assert len(found) == 1, (lines[k - 1], errors)
    message = found[0]
    assert '[arg-type]' in message
    assert f'"{given}"' in message, message
    assert f'expected "{WRONG_KIND[given]}"' in message, message


def test_nothing_else_is_wrong(errors):
  first = USER[: USER.index('def wrong')].count('\n') + 1
  last = USER[: USER.index('def loss')].count('\n') + 1
  assert all(first < k < last for k in errors), errors
  assert sum(map(len, errors.values())) == 5, errors
