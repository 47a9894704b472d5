"""Devices by name: those there are, and those that are chosen."""

import pytest
import tensorflow as tf

from fednest_tff.runtime import devices


class _Logical:

  def __init__(self, name):
    self.name = f'/device:{name}'
    self.device_type = name.partition(':')[0]


@pytest.fixture
def two_gpus(monkeypatch):
  """As if there were two, and something that is neither CPU nor GPU."""
  names = ['CPU:0', 'GPU:0', 'XLA_CPU_JIT:0', 'GPU:1']
  monkeypatch.setattr(
      tf.config, 'list_logical_devices', lambda: list(map(_Logical, names))
  )


@pytest.mark.parametrize(
    ['name', 'short'],
    [
        ('/device:GPU:1', 'GPU:1'),
        ('/physical_device:gpu:0', 'GPU:0'),
        ('/job:localhost/replica:0/task:0/device:CPU:2', 'CPU:2'),
        ('gpu', 'GPU:0'),
        ('cpu:3', 'CPU:3'),
        ('/CPU:0', 'CPU:0'),
    ],
)
def test_names_are_shortened(name, short):
  assert devices._short_name(name) == short


def test_this_machine_has_a_cpu():
  assert 'CPU:0' in devices.visible_devices()
  # Where there is no GPU, as in these tests, computations run on the CPU.
  if not tf.config.list_physical_devices('GPU'):
    assert devices.choose(None) == ['/device:CPU:0']


@pytest.mark.usefixtures('two_gpus')
def test_all_gpus_unless_others_are_named():
  assert devices.visible_devices() == ['CPU:0', 'GPU:0', 'GPU:1']
  assert devices.choose(None) == ['/device:GPU:0', '/device:GPU:1']
  assert devices.choose(['gpu:1']) == ['/device:GPU:1']
  # The order is that of the user.
  chosen = devices.choose(['GPU:1', 'CPU:0'])
  assert chosen == ['/device:GPU:1', '/device:CPU:0']


@pytest.mark.usefixtures('two_gpus')
@pytest.mark.parametrize(
    ['wrong', 'message'],
    [
        (['GPU:2'], r"`devices` has GPU:2, .*; there are \['CPU:0', 'GPU:0',"),
        (['XLA_CPU_JIT:0'], '`devices` has XLA_CPU_JIT:0'),
        ([], '`devices` must be a list of names'),
        ('GPU:0', "`devices` must be a list of names .*; got 'GPU:0'"),
    ],
)
def test_wrong_names(wrong, message):
  with pytest.raises(ValueError, match=message):
    devices.choose(wrong)


def test_memory_grows_on_gpus_that_are_not_in_use(monkeypatch):
  asked = []

  def set_memory_growth(gpu, is_wanted):
    asked.append((gpu, is_wanted))
    if gpu == 'in use':
      raise RuntimeError('Physical devices cannot be modified')

  experimental = tf.config.experimental
  monkeypatch.setattr(
      tf.config, 'list_physical_devices', lambda kind: ['in use', 'free']
  )
  monkeypatch.setattr(experimental, 'set_memory_growth', set_memory_growth)
  devices.grow_memory()
  assert asked == [('in use', True), ('free', True)]
