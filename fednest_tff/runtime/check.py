r"""Tries every device of this machine.

  python -m fednest_tff.runtime.check

Prints versions and devices, runs a small FedNest epoch on each device, and
prints its time or its error. The exit code is 0 if all devices worked and 1
otherwise.
"""

import platform
import sys
import time

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff import runtime
from fednest_tff.runtime import devices as devices_lib

_DIM = 64


def _small_epoch() -> tuple[fednest_tff.NestedProcess, list[tf.data.Dataset]]:
  """Builds a process, which tunes a ridge regression, and its clients."""
  spec = (tf.TensorSpec([_DIM], tf.float32), tf.TensorSpec([], tf.float32))

  def error(y: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    return tf.reduce_mean((tf.linalg.matvec(batch[0], y) - batch[1]) ** 2)

  problem = fednest_tff.bilevel(
      lambda x, y, batch: error(y, batch),
      lambda x, y, batch: error(y, batch) + tf.reduce_sum(tf.exp(x) * y**2),
      lambda seed: tf.zeros([_DIM]),
      lambda seed: tf.zeros([_DIM]),
      spec,
  )
  process = fednest_tff.build(
      problem, outer_learning_rate=0.01, inner_learning_rate=0.01
  )
  rng = np.random.default_rng(0)
  clients = [
      tf.data.Dataset.from_tensor_slices((
          rng.normal(size=(50, _DIM)).astype(np.float32),
          rng.normal(size=50).astype(np.float32),
      ))
      for _ in range(4)
  ]
  return process, clients


def _try_device(device: str) -> str:
  """Runs two epochs on `device`; returns a text with their times."""
  runtime.use_runtime('in_process', devices=[device])
  process, clients = _small_epoch()
  state = process.initialize()
  seconds = []
  for _ in range(2):
    begin = time.perf_counter()
    output = process.next(state, clients)
    seconds.append(time.perf_counter() - begin)
    state = output.state
  loss = float(output.metrics['outer_loss'])
  if not np.isfinite(loss):
    raise ArithmeticError(f'the outer loss is {loss}')
  first, again = seconds
  return f'ok, {again * 1e3:.1f} ms an epoch ({first:.1f} s the first time)'


def _gpu_advice() -> str | None:
  """Says why TensorFlow finds no GPU; returns `None` if it finds one."""
  if tf.config.list_physical_devices('GPU'):
    return None
  if not tf.test.is_built_with_cuda():
    return 'this TensorFlow was built without CUDA'
  build = tf.sysconfig.get_build_info()
  return (
      'TensorFlow sees no GPU; if there is one, install its driver and the'
      f' CUDA {build.get("cuda_version")} and cuDNN'
      f' {build.get("cudnn_version")} libraries: pip install --no-deps'
      ' --require-hashes -r requirements/gpu.txt'
  )


def main() -> int:
  """Prints the report; returns the exit code."""
  print(f'python {platform.python_version()}, {platform.machine()}')
  print(f'tensorflow {tf.__version__}, tff {tff.__version__}')
  names = devices_lib.visible_devices()
  print(f'devices {", ".join(names)}')
  advice = _gpu_advice()
  if advice:
    print(f'gpu {advice}')
  failures = 0
  for name in names:
    try:
      print(f'{name} {_try_device(name)}')
    except Exception as error:  # Any error is reported.
      failures += 1
      print(f'{name} failed: {type(error).__name__}: {error}')
  return 1 if failures else 0


if __name__ == '__main__':
  sys.exit(main())
