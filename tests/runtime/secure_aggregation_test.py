"""Secure aggregation in process: metrics, private sums, and methods of ours."""

import collections
import functools

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from tests.helpers import small_problems
from tests.runtime.comparison import (
    RUNTIMES,
    assert_same,
    at_clients,
    run_in_process,
)


def test_metrics_are_summed_securely():
  """Accuracy and a count, of what each client has counted."""
  counts = collections.OrderedDict(correct=[np.float32, np.float32], n=np.int64)
  finalizers = collections.OrderedDict(
      correct=tf.function(lambda pair: pair[0] / pair[1]),
      n=tf.function(lambda n: n),
  )

  @tff.federated_computation(at_clients(counts))
  def finalize(x):
    return tff.learning.metrics.secure_sum_then_finalize(finalizers)(x)

  clients = [
      collections.OrderedDict(correct=[float(k), 4.0], n=10 * k)
      for k in (1, 2, 4)
  ]
  metrics = run_in_process(RUNTIMES['looped'], lambda: finalize(clients))
  # Numbers are rounded to integers of 2^20 / 2^32.
  np.testing.assert_allclose(metrics['correct'], 7 / 12, atol=1e-3)
  assert metrics['n'] == 70


@functools.cache
def _single_level():
  """One round, with its result in TFF's test backend."""
  summation = tff.aggregators.SecureSumFactory(1.0)
  process = fednest_tff.build(
      small_problems.single_level(),
      outer_learning_rate=0.1,
      outer_aggregator=tff.aggregators.MeanFactory(summation, summation),
  )
  clients = [
      tf.data.Dataset.from_tensor_slices(
          dict(a=np.full([n, 2], n, np.float32), b=np.arange(n))
      )
      for n in (1, 2, 3)
  ]

  def run():
    return process.next(process.initialize(), clients)

  context = tff.backends.test.create_sync_test_cpp_execution_context()
  with tff.framework.get_context_stack().install(context):
    return run, run()


def test_a_method_of_ours_has_the_results_of_the_test_backend(runtime):
  run, expected = _single_level()
  found = run_in_process(runtime, run)
  assert_same(found, expected)
  # x = 1 less 0.1 times the mean of the clients' data, up to rounding.
  np.testing.assert_allclose(found.state.outer, [0.8, 0.8], rtol=1e-6)


def test_distributed_differential_privacy():
  """The mean of the clients, up to noise that is small here."""
  values = np.float32([[0.01, -0.02], [0.05, 0.0], [-0.03, 0.02]])
  factory = tff.learning.ddp_secure_aggregator(
      noise_multiplier=1e-3, expected_clients_per_round=3, zeroing=False
  )
  process = factory.create(tff.TensorType(np.float32, [2]))
  output = run_in_process(
      RUNTIMES['looped'],
      lambda: process.next(process.initialize(), list(values)),
  )
  mean = np.mean(values, axis=0)
  np.testing.assert_allclose(output.result, mean, atol=1e-3)
  assert np.any(output.result != mean)
