"""The program that tries every device."""

import re

import pytest
import tensorflow as tf

from fednest_tff.runtime import check

pytestmark = pytest.mark.usefixtures('default_context')


def test_report_of_this_machine(capfd):
  assert check.main() == 0
  lines = capfd.readouterr().out.splitlines()
  assert re.fullmatch(r'python 3\.11\.\d+, \w+', lines[0])
  assert lines[1] == f'tensorflow {tf.__version__}, tff 0.87.0'
  names = lines[2].removeprefix('devices ').split(', ')
  assert 'CPU:0' in names
  # A line for each, with two times.
  for name in names:
    (line,) = [found for found in lines if found.startswith(f'{name} ')]
    times = r'ok, [\d.]+ ms an epoch \([\d.]+ s the first time\)'
    assert re.fullmatch(f'{name} {times}', line)
  has_advice = any(line.startswith('gpu ') for line in lines)
  assert has_advice == (not tf.config.list_physical_devices('GPU'))


def test_a_device_that_does_not_work(capfd, monkeypatch):
  def try_device(name):
    if name == 'GPU:0':
      raise ArithmeticError('the outer loss is nan')
    return 'ok'

  monkeypatch.setattr(
      check.devices_lib, 'visible_devices', lambda: ['CPU:0', 'GPU:0']
  )
  monkeypatch.setattr(check, '_try_device', try_device)
  assert check.main() == 1
  lines = capfd.readouterr().out.splitlines()
  assert lines[-2:] == [
      'CPU:0 ok', 'GPU:0 failed: ArithmeticError: the outer loss is nan'
  ]


@pytest.mark.parametrize(
    ['gpus', 'has_cuda', 'advice'],
    [
        (['a GPU'], True, None),
        ([], False, 'this TensorFlow was built without CUDA'),
        ([], True, 'TensorFlow sees no GPU; .* pip install .*gpu.txt'),
    ],
)
def test_advice_about_gpus(monkeypatch, gpus, has_cuda, advice):
  monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: gpus)
  monkeypatch.setattr(tf.test, 'is_built_with_cuda', lambda: has_cuda)
  found = check._gpu_advice()
  if advice is None:
    assert found is None
  else:
    assert re.fullmatch(advice, found)
