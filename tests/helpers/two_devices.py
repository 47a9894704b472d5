"""Runs clients on two devices; a process of its own sees them."""

import os

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import in_process

_MATRIX = tff.TensorType(np.float64, [2, 2])


def _build_rounds():
  """As many rounds as become a loop in the compiler."""
  product = tff.tensorflow.computation(lambda a, b: a @ b, [_MATRIX, _MATRIX])

  @tff.federated_computation(
      tff.FederatedType(_MATRIX, tff.SERVER),
      tff.FederatedType(_MATRIX, tff.CLIENTS),
  )
  def rounds(value, factors):
    for _ in range(6):
      sent = tff.federated_broadcast(value)
      products = tff.federated_map(product, (sent, factors))
      value = tff.federated_mean(products)
    return value

  return rounds


def run() -> list:
  """Results of one device and two, unrolled, looped and vectorised.

  The log has the device of each operation that is executed.
  """
  os.environ['TF_CPP_MIN_LOG_LEVEL'] = '0'
  (cpu,) = tf.config.list_physical_devices('CPU')
  two = [tf.config.LogicalDeviceConfiguration()] * 2
  tf.config.set_logical_device_configuration(cpu, two)
  tf.debugging.set_log_device_placement(True)
  # Not before: TensorFlow cannot change devices once it has run something.
  rounds = _build_rounds()
  rng = np.random.default_rng(0)
  factors = list(rng.normal(size=[2, 2, 2]))
  found = []
  for unroll in (100, 0, None):
    for devices in (['CPU:0'], ['CPU:0', 'CPU:1']):
      print('RUN', unroll, devices, flush=True)
      context = in_process.InProcessContext(
          in_process.InProcessRuntime(devices=devices, unroll=unroll)
      )
      with tff.framework.get_context_stack().install(context):
        found.append(rounds(np.eye(2), factors).tolist())
  return found
