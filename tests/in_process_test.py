"""The in-process runtime against TFF's own, for all kinds of computations."""

import asyncio
import collections
import functools
import json
import os
import re
import subprocess
import sys

import attrs
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import forwardprop
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.runtime import in_process
from tests import quadratic

SERVER, CLIENTS = tff.SERVER, tff.CLIENTS
RUNTIMES = {
    'unrolled': in_process.InProcessRuntime(unroll=100),
    'mapped': in_process.InProcessRuntime(unroll=0),
}


@pytest.fixture(params=list(RUNTIMES))
def runtime(request):
  return RUNTIMES[request.param]


def _in_process(runtime, function):
  context = in_process.InProcessContext(runtime)
  with tff.framework.get_context_stack().install(context):
    return function()


def _leaves(value):
  """(description of the container or leaf type, leaf) in order."""
  if isinstance(value, tf.data.Dataset):
    yield 'dataset', str(value.element_spec)
    for element in value.as_numpy_iterator():
      yield from _leaves(element)
  elif isinstance(value, dict):
    yield type(value), list(value)
    for element in value.values():
      yield from _leaves(element)
  elif attrs.has(type(value)):
    yield type(value), None
    for field in attrs.fields(type(value)):
      yield from _leaves(getattr(value, field.name))
  elif isinstance(value, (list, tuple)):
    yield type(value), len(value)
    for element in value:
      yield from _leaves(element)
  else:
    kind = type(value), getattr(value, 'dtype', None)
    yield (*kind, getattr(value, 'shape', None)), value


def _assert_same(found, expected, rtol):
  found, expected = list(_leaves(found)), list(_leaves(expected))
  assert [kind for kind, _ in found] == [kind for kind, _ in expected]
  for (_, a), (_, b) in zip(found, expected, strict=True):
    if isinstance(b, (np.ndarray, np.generic)) and b.dtype.kind == 'f':
      np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-8)
    else:
      np.testing.assert_array_equal(a, b)


def _assert_like_native(runtime, function, rtol=1e-5):
  _assert_same(_in_process(runtime, function), function(), rtol)


def _federated(member, placement=CLIENTS, **options):
  return tff.FederatedType(member, placement, **options)


@tff.federated_computation(_federated(np.int32))
def integers(x):
  return (
      x,
      tff.federated_sum(x),
      tff.federated_min(x),
      tff.federated_max(x),
      tff.federated_value(3, SERVER),
      tff.federated_value(4, CLIENTS),
  )


@tff.federated_computation(_federated(np.float32))
def means(x):
  return tff.federated_mean(x), tff.federated_mean(x, x)


@tff.federated_computation(_federated(np.str_), _federated(np.str_, SERVER))
def strings(x, y):
  return x, y, tff.federated_broadcast(y)


@tff.federated_computation(_federated(tff.SequenceType(np.int32)))
def sequences(x):
  return x


@tff.federated_computation(_federated(tff.TensorType(np.float32, [None])))
def ragged(x):
  add = tff.tensorflow.computation(
      lambda v: tf.reduce_sum(v), tff.TensorType(np.float32, [None])
  )
  return x, tff.federated_sum(tff.federated_map(add, x))


@tff.federated_computation(_federated(tff.TensorType(np.int32, [2])))
def select(keys):
  pick = tff.tensorflow.computation(
      lambda value, key: value[0] * tf.cast(key, tf.float32),
      [(np.float32,), np.int32],
  )
  value = tff.federated_value((np.float32(2.0),), SERVER)
  return tff.federated_select(keys, tff.federated_value(9, SERVER), value, pick)


@tff.federated_computation(_federated(np.float32))
def evaluated(x):
  one = tff.tensorflow.computation(lambda: tf.constant(1.0))
  return tff.federated_eval(one, CLIENTS), tff.federated_eval(one, SERVER), x


@tff.tensorflow.computation(np.int32)
def unplaced(x):
  return collections.OrderedDict(
      integer=x,
      float=tf.cast(x, tf.float32),
      strings=tf.constant(['a', 'b']),
      string=tf.constant('s'),
      truth=tf.constant(True),
      vector=tf.ones([2]),
      dataset=tf.data.Dataset.range(tf.cast(x, tf.int64)),
      empty=(),
  )


@tff.tensorflow.computation(np.float32, np.float32, np.float32)
def arguments_in_every_role(given_back, waited_for, ignored):
  tf.raw_ops.Assert(condition=ignored < 0.0, data=[ignored])  # Never runs.
  with tf.control_dependencies([waited_for]):
    return given_back, tf.constant(2.0), given_back


def _range(stop):
  return tf.data.Dataset.range(stop, output_type=tf.int32)


@pytest.mark.parametrize('function', [
    lambda: integers([3, 1, 2]),
    lambda: means([1.0, 2.0, 4.0]),
    lambda: strings(['a', 'bc'], 'd'),
    lambda: sequences([_range(3), _range(0)]),
    lambda: sequences([[1, 2, 3], [4]]),
    lambda: ragged([np.ones(2, np.float32), np.ones(3, np.float32)]),
    lambda: select([np.int32([1, 2]), np.int32([5, 6])]),
    lambda: evaluated([1.0, 2.0]),
    lambda: unplaced(3),
    lambda: arguments_in_every_role(1.0, 2.0, 3.0),
])
def test_small_computations(runtime, function):
  _assert_like_native(runtime, function)


def test_what_the_native_runtime_cannot_do(runtime):
  """Clients' values without clients, and sequences outside TensorFlow."""
  @tff.federated_computation
  def no_argument():
    return tff.federated_value(5, SERVER), tff.federated_value(4, CLIENTS)

  @tff.federated_computation(tff.SequenceType(np.int32))
  def sequence(x):
    increment = tff.tensorflow.computation(lambda v: v + 1, np.int32)
    fold = tff.tensorflow.computation(
        lambda a, v: a * v + 1, [np.int32, np.int32]
    )
    total = tff.sequence_sum(tff.sequence_map(increment, x))
    return total, tff.sequence_reduce(x, 0, fold)

  assert _in_process(runtime, no_argument) == (5, 4)
  assert _in_process(runtime, lambda: sequence([1, 2, 3])) == (9, 10)
  assert _in_process(runtime, lambda: integers([]))[:2] == ([], 0)


def test_refused_by_name_before_anything_runs(runtime):
  @tff.federated_computation(_federated(np.int32))
  def secure(x):
    return tff.federated_secure_sum_bitwidth(x, 8)

  with pytest.raises(NotImplementedError, match='federated_secure_sum'):
    _in_process(runtime, lambda: secure([1, 2]))


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
          _keras, 0.1, sgd(0.1), sgd(1.0)
      ),
      'MimeLite': lambda: build.build_weighted_mime_lite(
          _keras, adam(0.1), sgd(1.0)
      ),
      'robust': lambda: build.build_weighted_fed_avg(
          _functional(), sgd(0.1), sgd(1.0),
          model_aggregator=learning.robust_aggregator(),
      ),
      'DP': lambda: build.build_unweighted_fed_avg(
          _functional(), sgd(0.1), sgd(1.0),
          model_aggregator=learning.dp_aggregator(0.0, 3),
      ),
      'compression': lambda: build.build_weighted_fed_avg(
          _functional(), sgd(0.1), sgd(1.0),
          model_aggregator=learning.compression_aggregator(),
      ),
      'evaluation': lambda: build.build_fed_eval(_keras),
  }


@pytest.mark.parametrize('name', list(_algorithms()))
def test_learning_algorithms(name):
  process = _algorithms()[name]()

  def two_rounds():
    state = process.initialize()
    for _ in range(2):
      output = process.next(state, _datasets())
      state = output.state
    return output

  expected = two_rounds()
  for runtime in RUNTIMES.values():
    _assert_same(_in_process(runtime, two_rounds), expected, 1e-5)


def test_k_means_and_a_preprocessed_process(runtime):
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
  _assert_like_native(
      runtime, lambda: process.next(process.initialize(), points)
  )
  _assert_like_native(
      runtime, lambda: composed.next(composed.initialize(), points)
  )


def _fednest(**options):
  return fednest_tff.build_fed_nest(
      quadratic.build_problem(),
      outer_learning_rate=0.05,
      inner_learning_rate=0.2,
      inner_local_epochs=2,
      batch_size=2,
      neumann_terms=3,
      **options,
  )


CLIENT_DATA = quadratic.to_datasets(quadratic.make_clients(4))


@functools.cache
def _plain_fednest():
  return _fednest()


def _ten_epochs(process):
  state = process.initialize()
  for _ in range(10):
    output = process.next(state, CLIENT_DATA)
    state = output.state
  return output


def test_ten_epochs_of_fednest_equal_the_native_ones(runtime):
  process = _plain_fednest()
  _assert_like_native(runtime, lambda: _ten_epochs(process), rtol=1e-9)


def test_equal_processes_share_a_compiled_function(monkeypatch):
  # TensorFlow relaxes the shapes of a JVP from its 33rd trace on. Between two
  # builds that would make their graphs differ.
  monkeypatch.setattr(forwardprop, '_TRACE_COUNT_LIMIT', 0)
  runtime = in_process.InProcessRuntime()
  for seed in (0, 1):
    process = _fednest(seed=seed)
    _in_process(
        runtime, lambda p=process: p.next(p.initialize(), CLIENT_DATA)
    )
  # Two initial points, and one `next` for both.
  assert runtime.num_functions == 3
  other = _fednest(ihgp='truncated')
  _in_process(runtime, lambda: other.next(other.initialize(), CLIENT_DATA))
  assert runtime.num_functions == 5 - 1  # The initial point is known already.


def test_what_was_compiled_can_be_forgotten():
  runtime = in_process.InProcessRuntime()
  for size in (1, 2, 3):
    _in_process(runtime, lambda n=size: integers([1] * n))
  runtime.forget(keep=2)
  assert runtime.num_functions == 2
  # Those of two and three clients; that of one is compiled again.
  for size, count in ((2, 2), (3, 2), (1, 3)):
    found = _in_process(runtime, lambda n=size: integers([1] * n))
    assert found[1] == size and runtime.num_functions == count
  runtime.forget()
  assert runtime.num_functions == 0


def test_ragged_clients_do_not_compile_again():
  runtime = in_process.InProcessRuntime()
  process = _plain_fednest()
  state = _in_process(runtime, process.initialize)
  for examples in ((1, 2), (3, 5), (4, 4)):
    data = quadratic.to_datasets(quadratic.make_clients(2, examples))
    _in_process(runtime, lambda d=data: process.next(state, d))
  assert runtime.num_functions == 2


def test_errors_name_the_quantity_and_leave_the_runtime_usable(runtime):
  process = fednest_tff.build_fed_nest(
      quadratic.build_problem(),
      outer_learning_rate=0.1,
      inner_learning_rate=1e200,
      inner_local_steps=5,
      smoothness=4.0,
  )

  def epoch():
    return process.next(process.initialize(), CLIENT_DATA)

  with pytest.raises(Exception, match='Try a smaller inner_learning_rate'):
    _in_process(runtime, epoch)
  assert _in_process(runtime, lambda: integers([1, 2]))[1] == 3


@pytest.mark.parametrize('value,message', [
    ([1, 'a'], None), (3, 'a list with a value per client')
])
def test_wrong_arguments(runtime, value, message):
  with pytest.raises((TypeError, ValueError), match=message):
    _in_process(runtime, lambda: integers(value))


def test_asynchronous_context():
  runtime = in_process.InProcessRuntime()
  context = tff.program.NativeFederatedContext(
      in_process.AsyncInProcessContext(runtime)
  )

  async def run():
    return await tff.program.materialize_value(means([1.0, 4.0]))

  with tff.framework.get_context_stack().install(context):
    assert asyncio.run(run()) == (2.5, np.float32(17 / 5))


DATA_TYPE = tff.FederatedType(
    tff.SequenceType(tff.types.tensorflow_to_type(SPEC)), CLIENTS
)


class _Clients(tff.program.FederatedDataSourceIterator):
  """The same clients every time; TFF copies and stores its iterators."""

  federated_type = DATA_TYPE

  @classmethod
  def from_bytes(cls, buffer):
    return cls()

  def to_bytes(self):
    return b''

  def select(self, k=None):
    return _datasets()[:k]


class _Source(tff.program.FederatedDataSource):
  federated_type = DATA_TYPE
  capabilities = ()

  def iterator(self):
    return _Clients()


def test_train_model_program(tmp_path):
  """TFF's own training program, resumable, in the asynchronous context."""
  process = _algorithms()['unweighted FedAvg, functional']()
  context = tff.program.NativeFederatedContext(
      in_process.AsyncInProcessContext(in_process.InProcessRuntime(unroll=0))
  )
  released = tff.program.MemoryReleaseManager()

  async def train():
    await tff.learning.programs.train_model(
        train_process=process,
        train_data_source=_Source(),
        train_per_round_clients=2,
        train_total_rounds=2,
        program_state_manager=tff.program.FileProgramStateManager(tmp_path),
        model_output_manager=tff.program.MemoryReleaseManager(),
        train_metrics_manager=released,
        evaluation_manager=None,
        evaluation_periodicity=1,
    )

  with tff.framework.get_context_stack().install(context):
    asyncio.run(train())
  assert sorted(released.values()) == [1, 2]


def test_unknown_device_is_one_line_with_those_there_are():
  with pytest.raises(ValueError, match=r"GPU:7.*there are \['CPU:0'\]"):
    in_process.InProcessRuntime(devices=['GPU:7'])
  with pytest.raises(ValueError, match='`devices` must be a list'):
    in_process.InProcessRuntime(devices='CPU:0')
  with pytest.raises(ValueError, match='`name` must be one of'):
    fednest_tff.use_runtime('gpu')


_TWO_DEVICES = """
import json
import tensorflow as tf
cpu = tf.config.list_physical_devices('CPU')[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
tf.debugging.set_log_device_placement(True)
from fednest_tff.runtime import in_process
from tests import in_process_test
process = in_process_test._fednest()
for unroll in (100, 0):
  for devices in (['CPU:0'], ['CPU:0', 'CPU:1']):
    context = in_process.InProcessRuntime(devices=devices, unroll=unroll)
    print('RUN', unroll, devices, flush=True)
    output = in_process_test._in_process(
        context, lambda: in_process_test._ten_epochs(process)
    )
    found = output.state.outer.tolist() + output.state.inner.tolist()
    print('RESULT', json.dumps(found), flush=True)
"""


def test_clients_are_spread_over_two_devices():
  """By the device of each executed matrix product, and with equal numbers."""
  done = subprocess.run(
      [sys.executable, '-c', _TWO_DEVICES],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=200,
      env=os.environ | {'TF_CPP_MIN_LOG_LEVEL': '0'},
      check=False,
  )
  assert done.returncode == 0, done.stdout[-2000:]
  found = list(map(json.loads, re.findall(r'RESULT (.*)', done.stdout)))
  assert len(found) == 4
  for other in found[1:]:
    np.testing.assert_allclose(found[0], other, rtol=1e-12)
  logs = done.stdout.split('RUN')[1:]

  def devices_of(log):
    """Devices of the executed products: einsum and matrix products."""
    return set(re.findall(r'(?:Einsum|MatMul)\S*.*device:(CPU:\d)', log))

  for single, double in (logs[:2], logs[2:]):
    assert devices_of(single) == {'CPU:0'}
    assert devices_of(double) == {'CPU:0', 'CPU:1'}
