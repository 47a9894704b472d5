"""The in-process runtime against TFF's own, for processes and programs."""

import concurrent.futures
import functools
import gc
import json
import re
import threading

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.runtime import in_process
from tests.helpers import quadratic, small_problems
from tests.runtime.comparison import (
    assert_like_native,
    at_clients,
    checked_sum,
    run_in_process,
)


@tff.federated_computation(at_clients(np.int32))
def integers(x):
  return x, tff.federated_sum(x)


SPEC = (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None], tf.int32))


def _layers():
  return tf.keras.Sequential([
      tf.keras.layers.InputLayer([4]),
      tf.keras.layers.Dense(3, kernel_initializer='ones'),
  ])


def _loss():
  return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _keras():
  return tff.learning.models.from_keras_model(
      _layers(),
      loss=_loss(),
      input_spec=SPEC,
      metrics=[tf.keras.metrics.SparseCategoricalAccuracy()],
  )


def _functional():
  return tff.learning.models.functional_model_from_keras(
      _layers, _loss(), SPEC
  )


def _datasets():
  rng = np.random.default_rng(0)
  return [
      tf.data.Dataset.from_tensor_slices((
          rng.normal(size=(n, 4)).astype(np.float32),
          rng.integers(0, 3, n).astype(np.int32),
      )).batch(3)
      for n in (5, 7, 4)
  ]


def _algorithms():
  """One of each; with Keras only where its variables and metrics matter."""
  learning = tff.learning
  build, sgd = learning.algorithms, learning.optimizers.build_sgdm
  adam = learning.optimizers.build_adam
  return {
      'weighted FedAvg, Keras': lambda: build.build_weighted_fed_avg(
          _keras, sgd(0.1), adam(0.1)
      ),
      'unweighted FedAvg, functional': lambda: build.build_unweighted_fed_avg(
          _functional(), sgd(0.1, momentum=0.9), sgd(1.0)
      ),
      'FedProx': lambda: build.build_weighted_fed_prox(
          _functional(), 0.1, sgd(0.1), sgd(1.0)
      ),
      'MimeLite': lambda: build.build_weighted_mime_lite(
          _functional(), adam(0.1), sgd(1.0)
      ),
      'evaluation': lambda: build.build_fed_eval(_keras),
  }


@functools.cache
def _process(name):
  return _algorithms()[name]()


@pytest.mark.parametrize('name', list(_algorithms()))
def test_learning_algorithms(name):
  process = _process(name)

  def two_rounds():
    state = process.initialize()
    for _ in range(2):
      output = process.next(state, _datasets())
      state = output.state
    return output

  assert_like_native(two_rounds)


AGGREGATORS = {
    'robust': tff.learning.robust_aggregator,
    'DP': lambda: tff.learning.dp_aggregator(0.0, 3),
    'compression': tff.learning.compression_aggregator,
    'debug measurements': lambda: tff.learning.add_debug_measurements(
        tff.learning.robust_aggregator()
    ),
}


@pytest.mark.parametrize('name', list(AGGREGATORS))
def test_aggregators_of_learning_algorithms(name):
  """What a federated average around them would do with clients' updates."""
  factory = AGGREGATORS[name]()
  member = tff.types.to_type([(np.float32, [4, 3]), (np.float32, [3])])
  rng = np.random.default_rng(0)
  updates = [
      [np.float32(rng.normal(size=[4, 3])), np.float32(rng.normal(size=[3]))]
      for _ in range(3)
  ]
  if isinstance(factory, tff.aggregators.WeightedAggregationFactory):
    process = factory.create(member, tff.TensorType(np.float32))
    clients = updates, [5.0, 7.0, 4.0]
  else:
    process = factory.create(member)
    clients = (updates,)

  def two_rounds():
    output = process.next(process.initialize(), *clients)
    return process.next(output.state, *clients)

  assert_like_native(two_rounds)


def test_k_means_and_a_preprocessed_process():
  process = tff.learning.algorithms.build_fed_kmeans(
      2, (4,), random_seed=(1, 2)
  )
  points = [
      tf.data.Dataset.from_tensor_slices(np.float32(np.eye(4) * k))
      for k in (1, 2)
  ]
  double = tff.tensorflow.computation(
      lambda data: data.map(lambda point: 2 * point),
      tff.SequenceType(tff.TensorType(np.float32, [4])),
  )
  composed = tff.simulation.compose_dataset_computation_with_iterative_process(
      double, process
  )
  for built in (process, composed):
    assert_like_native(lambda p=built: p.next(p.initialize(), points))


# Two groups of clients with equally many examples: a vectorised cohort.
CLIENT_DATA = quadratic.to_datasets(quadratic.make_clients(4, (1, 3)))


@functools.cache
def _fednest():
  """An epoch with every kind of round; clients take 2 and 4 local steps."""
  return fednest_tff.build(
      quadratic.build_problem(),
      outer_learning_rate=0.05,
      inner_learning_rate=0.2,
      inner_local_epochs=2,
      inner_rounds=1,
      neumann_terms=2,
      batch_size=2,
  )


@functools.cache
def _small_process(seed, batch_size):
  """One that compiles quickly, and has products of second derivatives."""
  return fednest_tff.build(
      quadratic.new_problem(),
      'simfbo',
      outer_learning_rate=0.05,
      inner_learning_rate=0.2,
      linear_learning_rate=0.1,
      local_steps=2,
      batch_size=batch_size,
      seed=seed,
  )


def _epochs(process, number, clients):
  state = process.initialize()
  for _ in range(number):
    output = process.next(state, clients)
    state = output.state
  return output


def test_ten_epochs_of_fednest_equal_the_native_ones():
  process = _fednest()
  assert_like_native(lambda: _epochs(process, 10, CLIENT_DATA), rtol=1e-9)


def test_equal_processes_share_a_compiled_function():
  runtime = in_process.InProcessRuntime(unroll=2)
  clients = CLIENT_DATA[:2]
  for seed in (0, 1):
    process = _small_process(seed, 1)
    run_in_process(runtime, lambda p=process: _epochs(p, 1, clients))
  # One `next` for both, also with other numbers. Initial points are not kept.
  assert runtime.num_functions == 1
  start = run_in_process(runtime, process.initialize)
  numbers = process.get_hparams(start)
  changed = process.set_hparams(start, {k: v / 2 for k, v in numbers.items()})
  run_in_process(runtime, lambda: process.next(changed, clients))
  assert runtime.num_functions == 1
  other = _small_process(0, 2)
  run_in_process(runtime, lambda: _epochs(other, 1, clients))
  assert runtime.num_functions == 2


def test_runs_that_are_over_leave_nothing_behind():
  runtime = in_process.InProcessRuntime()

  def run(seed):
    process = _small_process(seed, 1)
    run_in_process(runtime, lambda: _epochs(process, 1, CLIENT_DATA))

  def num_graphs():
    gc.collect()
    return sum(isinstance(found, tf.Graph) for found in gc.get_objects())

  run(0)
  before = num_graphs()
  for seed in range(1, 4):
    run(seed)
  assert num_graphs() == before


def test_what_was_compiled_can_be_forgotten():
  runtime = in_process.InProcessRuntime(unroll=3)  # A function for each size.
  for size in (1, 2, 3):
    run_in_process(runtime, lambda n=size: integers([1] * n))
  runtime.forget(keep=2)
  assert runtime.num_functions == 2
  # Those of two and three clients; that of one is compiled again.
  for size, count in ((2, 2), (3, 2), (1, 3)):
    found = run_in_process(runtime, lambda n=size: integers([1] * n))
    assert found[1] == size and runtime.num_functions == count
  runtime.forget()
  assert runtime.num_functions == 0


def test_ragged_clients_do_not_compile_again():
  runtime = in_process.InProcessRuntime()
  process = fednest_tff.build(
      small_problems.single_level(), outer_learning_rate=0.1, batch_size=1
  )
  state = run_in_process(runtime, process.initialize)
  for examples in ((1, 2), (3, 5), (4, 4)):
    data = [
        tf.data.Dataset.from_tensor_slices(
            dict(a=np.ones([n, 2], np.float32), b=np.arange(n))
        )
        for n in examples
    ]
    run_in_process(runtime, lambda d=data: process.next(state, d))
  # One for two groups of equal clients, and one for one.
  assert runtime.num_functions == 2


def test_errors_name_the_quantity_and_leave_the_runtime_usable(runtime):
  process = _fednest()

  def diverge():
    start = process.initialize()
    numbers = process.get_hparams(start) | {'inner_learning_rate': 1e200}
    return process.next(process.set_hparams(start, numbers), CLIENT_DATA)

  with pytest.raises(Exception, match='Try a smaller inner_learning_rate'):
    run_in_process(runtime, diverge)
  assert run_in_process(runtime, lambda: integers([1, 2]))[1] == 3


def test_an_error_in_a_sum_of_large_tensors_leaves_the_runtime_usable(runtime):
  """TensorFlow would add them up in a variable, and the error leave it."""

  @tff.tensorflow.computation(np.float32)
  def add_tensors_and_logarithm(a):
    first = [tf.fill([2**23], a * k) for k in range(8)]  # 32 MB each.
    with tf.control_dependencies(first):
      logarithm = tf.debugging.check_numerics(tf.math.log(a), 'logarithm')
    return tf.add_n([*first, tf.fill([2**23], logarithm)])[0]

  for _ in range(2):
    with pytest.raises(tf.errors.InvalidArgumentError, match='logarithm'):
      run_in_process(runtime, lambda: add_tensors_and_logarithm(-1.0))
  found = run_in_process(runtime, lambda: add_tensors_and_logarithm(1.0))
  assert found == sum(range(8))
  # So would a call at the same time.
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    calls = [
        pool.submit(runtime.run, add_tensors_and_logarithm, 1.0)
        for _ in range(4)
    ]
    assert {call.result() for call in calls} == {sum(range(8))}


@pytest.mark.parametrize('value,message', [
    ([1, 'a'], None), (3, 'a list with a value per client')
])
def test_wrong_arguments(runtime, value, message):
  with pytest.raises((TypeError, ValueError), match=message):
    run_in_process(runtime, lambda: integers(value))


def test_unknown_device_is_one_line_with_those_there_are():
  with pytest.raises(ValueError, match=r"GPU:7.*there are \['CPU:0'\]"):
    in_process.InProcessRuntime(devices=['GPU:7'])
  with pytest.raises(ValueError, match='`devices` must be a list'):
    in_process.InProcessRuntime(devices='CPU:0')
  with pytest.raises(ValueError, match='`name` must be one of'):
    fednest_tff.use_runtime('gpu')


def test_clients_are_spread_over_two_devices(launcher, tmp_path):
  """By the device of each executed matrix product, and with equal numbers."""
  log = tmp_path / 'log.txt'
  launcher.call('tests.helpers.two_devices:run', [], log)
  code = launcher.wait()
  printed = log.read_text()
  assert code == 0, printed[-2000:]
  found = json.loads(printed.splitlines()[-1])
  assert len(found) == 6
  for other in found[1:]:
    np.testing.assert_allclose(found[0], other, rtol=1e-12)
  logs = printed.split('RUN')[1:]

  def devices_of(log):
    return set(re.findall(r'MatMul\S*.*device:(CPU:\d)', log))

  for single, double in (logs[:2], logs[2:4], logs[4:]):
    assert devices_of(single) == {'CPU:0'}
    assert devices_of(double) == {'CPU:0', 'CPU:1'}


def test_calls_in_several_threads_do_not_mix():
  sequence = tff.SequenceType(np.float32)

  @tff.tensorflow.computation(sequence)
  def total(dataset):
    return dataset.reduce(np.float32(0), lambda a, b: a + b)

  @tff.federated_computation(at_clients(sequence))
  def sum_all(datasets):
    return tff.federated_sum(tff.federated_map(total, datasets))

  runtime = in_process.InProcessRuntime()
  cohorts = [
      [tf.data.Dataset.from_tensor_slices(np.float32([k] * 3))] * 4
      for k in range(4)
  ]

  def run(k):
    return k, {
        run_in_process(runtime, lambda: sum_all(cohorts[k]))
        for _ in range(200)
    }

  run(0)
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(run, range(4))) == [(k, {12.0 * k}) for k in range(4)]


def test_what_could_not_be_compiled_is_compiled_anew(monkeypatch):
  runtime = in_process.InProcessRuntime()
  build = in_process.lowering.build_function
  errors = iter([RuntimeError('no memory')])

  def fail_once(*arguments):
    for error in errors:
      raise error
    return build(*arguments)

  monkeypatch.setattr(in_process.lowering, 'build_function', fail_once)
  with pytest.raises(RuntimeError, match='no memory'):
    run_in_process(runtime, lambda: integers([1, 2]))
  assert run_in_process(runtime, lambda: integers([1, 2]))[1] == 3


@pytest.mark.parametrize('compiled', [True, False])
def test_after_an_error_another_thread_can_call(compiled):
  runtime = in_process.InProcessRuntime(compiled=compiled)
  with pytest.raises(tf.errors.InvalidArgumentError, match='not finite'):
    run_in_process(runtime, lambda: checked_sum([1.0, np.inf]))
  found = []
  other = threading.Thread(
      target=lambda: found.append(
          run_in_process(runtime, lambda: checked_sum([1.0, 2.0]))
      ),
      daemon=True,  # It may wait for ever.
  )
  other.start()
  other.join(timeout=60)
  assert found == [3.0]
