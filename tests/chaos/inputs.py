"""Bad inputs, drawn by hypothesis: flags of the binaries, arguments of the API.

An input is accepted, or refused in one line that names what is wrong. Runs that
are accepted are not begun.
"""

import contextlib
import io
import os
import tempfile
from unittest import mock

from absl import logging
import hypothesis
from hypothesis import strategies as st
import tensorflow as tf

from experiments import program, settings
import fednest_tff
from fednest_tff import simulation
from tests.helpers.binaries import EXPERIMENTS, command

# Numbers and texts that somebody may have typed; none asks for much work.
_TEXTS = (
    '0', '-1', '1', '2', '3', '0.5', '-0.5', 'nan', 'inf', '-inf', '1e308',
    '1e-300', '', ' ', 'many', 'true', 'None', '1,2', ',', '[1]', '{}', '0x10',
    '\udcff', '9' * 12, '9' * 30, str(2**31), str(2**63), '-' + '9' * 30,
    'fednest', 'fednest,fedavg_s', 'lfednest', 'shards', 'dirichlet', 'a:b',
)
# These go to the network or to other machines, or say where things are.
_LEFT_OUT = frozenset(['runtime', 'workers', 'output_dir', 'data_dir'])
_DATASETS = ('digits', 'cifar', '')


class AcceptedError(BaseException):
  """The run would begin."""


def _options(count, seed):
  """Decorates a test that hypothesis calls `count` times."""
  chosen = hypothesis.settings(
      max_examples=count,
      deadline=None,
      database=None,
      suppress_health_check=list(hypothesis.HealthCheck),
      phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
      print_blob=False,
  )
  return lambda function: hypothesis.seed(seed)(chosen(function))


def _flag_names():
  found = program.FLAGS.flags_by_module_dict()[settings.__name__]
  return sorted({flag.name for flag in found} - _LEFT_OUT)


def _values(name):
  if name == 'dataset':
    return st.sampled_from(_DATASETS)
  choices = getattr(program.FLAGS[name].parser, 'enum_values', None)
  if choices:
    return st.sampled_from([*choices, *_TEXTS[:14]])
  return st.sampled_from(_TEXTS) | st.text(max_size=5)


def _arguments():
  flag = st.sampled_from(_flag_names()).flatmap(
      lambda name: _values(name).map(lambda value: f'--{name}={value}')
  )
  return st.lists(flag, min_size=1, max_size=3)


def fuzz_flags(seed: int, count: int) -> int:
  """Tries flags; returns how many inputs there were."""
  tried = 0

  @_options(count, seed)
  @hypothesis.given(st.sampled_from(sorted(EXPERIMENTS)), _arguments())
  def check(name, arguments):
    nonlocal tried
    tried += 1
    printed, where = io.StringIO(), os.path.join(folder, 'made', 'run')
    with (
        mock.patch.object(simulation, 'train', side_effect=AcceptedError),
        contextlib.redirect_stderr(printed),
        contextlib.redirect_stdout(io.StringIO()),
    ):
      try:
        code = command(name, f'--output_dir={where}', *arguments)
      except AcceptedError:
        code = None
    assert os.listdir(folder) == [], 'leftovers'
    if code is not None:
      text = printed.getvalue()
      assert code == 2, text
      assert text.count('\n') == 1 and text.startswith('error: '), text
      assert len(text) > len('error: \n') + 5, text

  verbosity = logging.get_verbosity()
  with tempfile.TemporaryDirectory() as folder:
    logging.set_verbosity(logging.ERROR)
    try:
      check()
    finally:
      logging.set_verbosity(verbosity)
  return tried


_SPEC = tf.TensorSpec([2], tf.float32)


def _init(seed):
  del seed
  return tf.ones([2])


def _outer(x, y, batch):
  return tf.reduce_sum((x - y) ** 2) + tf.reduce_mean(batch)


def _inner(x, y, batch):
  rows = tf.reduce_sum((y - batch) ** 2, axis=1)
  return tf.reduce_mean(rows) + tf.reduce_sum(x * y)


_WRONG = st.sampled_from([
    3, -1, 0, 2.5, float('nan'), float('inf'), 'a', '', b'a', [], {}, (), True,
    2**31, 2**63, -(2**63) - 1, object(), tf.ones([2]), lambda: 1.0,
    lambda a, b, c, d, e: 1.0, lambda *all: 'a', lambda *all: None,
    lambda *all: tf.ones([3]), lambda *all: float('nan'), type, len,
    lambda *all: tf.Tensor, lambda *all: [], lambda *all: tf.constant('a'),
    lambda *all: 10**400, 10**400,
])
_PROBLEM = (
    'outer_loss', 'inner_loss', 'init_outer', 'init_inner', 'element_spec',
    'split', 'representation', 'project_outer',
)
_OPTIONS = ('outer_learning_rate', 'inner_learning_rate', 'batch_size')


def fuzz_api(seed: int, count: int) -> int:
  """Tries arguments; returns how many there were."""
  tried = 0
  right = dict(
      outer_loss=_outer, inner_loss=_inner, init_outer=_init, init_inner=_init,
      element_spec=_SPEC,
  )
  problem = fednest_tff.bilevel(**right)
  @_options(count, seed)
  @hypothesis.given(st.sampled_from([*_PROBLEM, *_OPTIONS]), _WRONG)
  def check(name, wrong):
    nonlocal tried
    tried += 1
    try:
      if name in _PROBLEM:
        fednest_tff.bilevel(**(right | {name: wrong}))
      else:
        options = dict(outer_learning_rate=0.1, inner_learning_rate=0.1)
        fednest_tff.build(problem, 'fednest', **(options | {name: wrong}))
    except (TypeError, ValueError) as error:
      text = str(error)
      # A start of another shape shows in what is computed from it.
      known = _PROBLEM if name in _PROBLEM else (name, name.split('_', 1)[-1])
      assert any(f'`{each}`' in text for each in known), f'{wrong!r}: {text}'
      assert '\n' not in text, text

  check()
  return tried
