"""Rounds on a Ray cluster: right numbers, whoever dies, and nothing left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading

from absl import logging as absl_logging
import grpc
import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff import runtime, simulation
from fednest_tff.runtime.distributed import cluster as cluster_lib
from fednest_tff.runtime.distributed import context as context_lib
from fednest_tff.runtime.distributed import pool as pool_lib
from fednest_tff.runtime.distributed import store as store_lib
from fednest_tff.simulation import checkpoints
from tests.helpers import quadratic
from tests.runtime.native_runtime_test import is_alive, wait_until

CLIENTS = quadratic.make_clients(num_clients=5)
EPOCHS = 2
PATIENCE = 240  # Seconds that a busy machine may need.
LIMITS = pool_lib.Limits(start=PATIENCE, probe=PATIENCE, call=PATIENCE)


def installed(context):
  return tff.framework.get_context_stack().install(context)


def children():
  return psutil.Process().children(recursive=True)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('nodes')


def make_opener(folder):
  """Opens client k of `CLIENTS`; one named 'wait' only once it is told to."""

  def open_client(name):
    if name == 'wait':
      (folder / f'waits-{os.getpid()}').touch()
      while not (folder / 'go').exists():
        threading.Event().wait(0.05)
      return tf.data.Dataset.range(3)
    if name not in range(len(CLIENTS)):
      raise FileNotFoundError(f'no client {name!r} on this node')
    return quadratic.to_datasets(CLIENTS)[name]

  return open_client


@pytest.fixture(scope='module')
def cluster():
  """The only cluster of these tests; contexts find the connection to it."""
  found = cluster_lib.Cluster(num_cpus=4)
  yield found
  found.close()
  wait_until(lambda: not [c for c in children() if 'ray' in c.name()], 30)


@pytest.fixture(scope='module')
def context(cluster, folder):
  return context_lib.build_ray_context(
      num_workers=2,
      num_shares=4,
      open_client=make_opener(folder),
      compiled=False,
      limits=LIMITS,
  )


@pytest.fixture(scope='module')
def process():
  """Three rounds an epoch, of two kinds: each has to be split and sent."""
  return fednest_tff.build(
      quadratic.build_problem(),
      'lfednest',
      outer_learning_rate=0.1,
      inner_learning_rate=0.15,
      inner_rounds=2,
      inner_local_steps=2,
      batch_size=1,
      neumann_terms=3,
      smoothness=4.0,
  )


@pytest.fixture(scope='module')
def expected(process, in_process_context):
  """The states after each epoch by `next` in this process."""
  datasets = quadratic.to_datasets(CLIENTS)
  with installed(in_process_context):
    states = [process.initialize()]
    for _ in range(EPOCHS):
      states.append(process.next(states[-1], datasets).state)
  return states


@pytest.fixture(scope='module')
def undisturbed(process, context):
  """The outputs of each epoch on Ray, and what was sent after each."""
  datasets = quadratic.to_datasets(CLIENTS)
  driven = fednest_tff.build_driver(process)
  outputs, traffic = [], []
  with installed(context):
    state = driven.initialize()
    for _ in range(EPOCHS):
      outputs.append(driven.next(state, datasets))
      state = outputs[-1].state
      traffic.append(context.traffic)
  return outputs, traffic


def assert_same_bytes(a, b):
  for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def plain_sum(values):
  return tff.federated_sum(values)


@tff.tensorflow.computation(tff.SequenceType(np.int64))
def _total(dataset):
  return dataset.reduce(np.int64(0), lambda total, value: total + value)


@tff.federated_computation(
    tff.FederatedType(tff.SequenceType(np.int64), tff.CLIENTS)
)
def total_sum(datasets):
  return tff.federated_sum(tff.federated_map(_total, datasets))


# Those without a cluster come first: a failure there costs no start.


def test_ray_that_is_not_installed(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  with pytest.raises(ValueError, match=r"pip install 'fednest_tff\[ray\]'"):
    fednest_tff.use_runtime('ray')


@pytest.mark.parametrize('address', ['', 'host', 'host:99999', 'ray://host'])
def test_malformed_address(address):
  with pytest.raises(ValueError, match=f'`address` must .*{address!r}'):
    fednest_tff.use_runtime('ray', address=address)


@pytest.mark.parametrize(
    ['options', 'words'],
    [
        (dict(num_workers=0), '`num_workers` must be at least 1; got 0'),
        (dict(num_shares=0), '`num_shares` must be at least 1; got 0'),
        (dict(gpus_per_worker=-1), '`gpus_per_worker` must be at least 0'),
        (dict(call_timeout=0), '`call_timeout` must be positive'),
        (dict(devices=['CPU:0']), '`devices` goes with the runtime in_process'),
    ],
)
def test_bad_arguments(options, words):
  with pytest.raises(ValueError, match=words):
    fednest_tff.use_runtime('ray', **options)


@pytest.mark.parametrize('address', ['127.0.0.1:1', 'ray://127.0.0.1:1'])
def test_cluster_that_is_not_there(address):
  with pytest.raises(runtime.WorkerError) as caught:
    fednest_tff.use_runtime('ray', address=address)
  assert str(caught.value) == (
      f'The Ray cluster at {address} is not there: Connection refused.'
  )


def test_listens_on_this_machine_only_and_asks_for_a_token(cluster):
  listening = {
      connection.laddr.ip.removeprefix('::ffff:')
      for process in [psutil.Process(), *children()]
      if not process.name().startswith('worker_binary')  # TFF's own.
      for connection in process.net_connections('tcp')
      if connection.status == psutil.CONN_LISTEN
  }
  assert listening == {'127.0.0.1'}
  assert os.environ['RAY_AUTH_MODE'] == 'token'
  (gcs,) = [c for c in children() if c.name() == 'gcs_server']
  found = gcs.environ()
  assert found['RAY_AUTH_MODE'] == 'token'
  assert len(found['RAY_AUTH_TOKEN']) == 64
  assert found['RAY_USAGE_STATS_ENABLED'] == '0'
  # Somebody without the token is refused.
  address = cluster.ray.get_runtime_context().gcs_address
  with grpc.insecure_channel(
      address, [('grpc.enable_http_proxy', 0)]
  ) as channel:
    check = channel.unary_unary('/ray.rpc.NodeInfoGcsService/CheckAlive')
    token = found['RAY_AUTH_TOKEN']
    check(b'', metadata=[('authorization', f'Bearer {token}')], timeout=60)
    for metadata in ([], [('authorization', f'Bearer {"f" * 64}')]):
      with pytest.raises(grpc.RpcError) as caught:
        check(b'', metadata=metadata, timeout=60)
      assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_second_connection_is_refused(cluster):
  with pytest.raises(ValueError, match='leave out `address`'):
    fednest_tff.use_runtime('ray', address='auto')


def test_shapes_of_calls(context):
  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def at_clients(values):
    return tff.federated_map(
        tff.tensorflow.computation(lambda v: v + 1, np.float32), values
    )

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def two_rounds(values):
    mean = tff.federated_broadcast(tff.federated_mean(values))
    return tff.federated_sum(
        tff.federated_map(
            tff.tensorflow.computation(lambda a, b: a * b), (values, mean)
        )
    )

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def mixed(values):
    return tff.federated_sum(values), values

  with installed(context):
    assert plain_sum([]) == 0
    assert plain_sum([1.0]) == 1
    assert plain_sum([float(k) for k in range(20)]) == 190
    assert at_clients([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 3.0, 4.0, 5.0, 6.0]
    with pytest.raises(ValueError, match='one communication round per call'):
      two_rounds([1.0, 2.0])
    with pytest.raises(ValueError, match='clients together with'):
      mixed([1.0])


def test_driver_returns_what_next_returns(undisturbed, expected):
  outputs, _ = undisturbed
  for output, wanted in zip(outputs, expected[1:], strict=True):
    np.testing.assert_allclose(output.state.outer, wanted.outer, rtol=1e-10)
    np.testing.assert_allclose(output.state.inner, wanted.inner, rtol=1e-10)
    assert output.state.epoch == wanted.epoch
    assert output.metrics['num_examples'] == 9
    assert output.metrics['num_clients'] == 5


def test_one_worker_returns_the_bytes_of_two(context, process, undisturbed):
  pool = context._pool
  alone = context_lib.RayContext(
      pool_lib.Pool(pool._cluster, pool._handles[:1], pool._start, LIMITS),
      store_lib.Store(pool._ray),
      context._server,
      num_shares=4,
  )
  driven = fednest_tff.build_driver(process)
  with installed(alone):
    output = driven.next(driven.initialize(), quadratic.to_datasets(CLIENTS))
  assert_same_bytes(output.state, undisturbed[0][0].state)
  alone._num_shares = 1  # The order of the sum is another.
  values = [1e8, 1.0, -1e8, 1.0]
  with installed(alone):
    assert plain_sum(values) == np.float32(1.0)
  with installed(context):
    assert plain_sum(values) == np.float32(1.0)


def test_data_are_sent_once(context, undisturbed):
  _, (first, second) = undisturbed
  size = sum(array.nbytes for client in CLIENTS for array in client.values())
  assert second.data_bytes - first.data_bytes == 0
  assert second.data_puts - first.data_puts == 0
  assert second.message_bytes > first.message_bytes
  assert second.result_bytes > first.result_bytes
  assert first.data_bytes >= size and first.data_puts >= len(CLIENTS)

  # Neither are those of other datasets with the same elements.
  before = context.traffic
  with installed(context):
    assert total_sum([tf.data.Dataset.range(k) for k in (4, 5)]) == 16
    once = context.traffic
    assert once.data_puts - before.data_puts == 2
    assert once.data_bytes - before.data_bytes == 8 * 9
    assert total_sum([tf.data.Dataset.range(k) for k in (5, 4)]) == 16
    assert context.traffic.data_puts == once.data_puts
    assert total_sum([tf.data.Dataset.range(1, 5)]) == 10
    assert context.traffic.data_puts == once.data_puts + 1


def test_names_in_place_of_datasets(context, process, undisturbed):
  driven = fednest_tff.build_driver(process)
  before = context.traffic
  with installed(context):
    output = driven.next(driven.initialize(), list(range(len(CLIENTS))))
    assert_same_bytes(output.state, undisturbed[0][0].state)
    assert output.metrics['num_examples'] == 9
    with pytest.raises(FileNotFoundError, match='no client 7 on this node'):
      driven.next(driven.initialize(), [0, 7])
  assert context.traffic.data_bytes == before.data_bytes


def test_error_of_a_client_is_passed_on_and_leaves_the_workers(context):
  @tff.tensorflow.computation(np.float32)
  def refuse(value):
    with tf.control_dependencies([tf.debugging.assert_less(value, 3.0)]):
      return tf.identity(value)

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def checked(values):
    return tff.federated_sum(tff.federated_map(refuse, values))

  before = context.pids()
  with installed(context):
    with pytest.raises(tf.errors.InvalidArgumentError, match='assertion'):
      checked([1.0, 5.0])
    assert checked([1.0, 2.0]) == 3
  assert context.pids() == before


def waiting(folder):
  """The pids of the workers that wait for the file 'go'."""
  return [int(path.name[6:]) for path in folder.glob('waits-*')]


def test_worker_killed_and_worker_stopped_in_mid_round(
    context, folder, process, undisturbed, monkeypatch, caplog
):
  """One round loses both; others take their places and do their shares."""
  monkeypatch.setattr(
      context._pool, '_limits', LIMITS._replace(probe=3.0)
  )
  before = context.pids()
  killed, stopped = before
  done = []

  def disturb():
    wait_until(lambda: set(waiting(folder)) == set(before), PATIENCE)
    os.kill(killed, signal.SIGKILL)
    os.kill(stopped, signal.SIGSTOP)
    wait_until(
        lambda: not is_alive(stopped) and not is_alive(killed), PATIENCE
    )
    (folder / 'go').touch()
    done.append(True)

  disturber = threading.Thread(target=disturb, daemon=True)
  disturber.start()
  absl_logging.use_absl_handler()
  with caplog.at_level('WARNING', logger='absl'), installed(context):
    assert total_sum(['wait'] * 4) == 12
  disturber.join(PATIENCE)
  assert done
  assert 'Ray worker 1 does not answer' in caplog.text
  assert not set(context.pids()) & set(before)
  driven = fednest_tff.build_driver(process)
  with installed(context):
    output = driven.next(
        undisturbed[0][0].state, quadratic.to_datasets(CLIENTS)
    )
  assert_same_bytes(output.state, undisturbed[0][1].state)


def test_call_beyond_its_deadline(context, folder, monkeypatch):
  (folder / 'go').unlink(missing_ok=True)
  context._pool.ask([  # They have opened 'wait' already.
      lambda worker: worker.forget.remote() for _ in range(2)
  ])
  monkeypatch.setattr(context._pool, '_limits', LIMITS._replace(call=2.0))
  with installed(context), pytest.raises(runtime.WorkerError) as caught:
    total_sum(['wait'])
  assert '\n' not in str(caught.value)
  assert 'took longer than call_timeout (2 s)' in str(caught.value)
  # Another worker takes the place of the one that still waits.
  monkeypatch.setattr(context._pool, '_limits', LIMITS)
  with installed(context):
    assert plain_sum([1.0, 2.0]) == 3


def test_all_nodes_gone_is_one_line_and_the_checkpoint_stays(
    cluster, context, process, undisturbed, tmp_path
):
  """The last test on the cluster, which it ends."""
  state = undisturbed[0][0].state
  manager = checkpoints.Checkpoints(str(tmp_path), 1)
  asyncio.run(manager.save(state, 1))

  def cohort(epoch, name, index):
    del epoch, name
    if index == 2:
      for child in children():
        if child.name() == 'gcs_server':
          child.kill()
    return quadratic.to_datasets(CLIENTS)

  with installed(context):
    with pytest.raises(runtime.WorkerError) as caught:
      fednest_tff.build_driver(process).next(state, cohort)
    assert str(caught.value) == (
        'The Ray cluster of this process is gone: Connection refused.'
    )
    with pytest.raises(runtime.WorkerError, match='have been ended'):
      plain_sum([1.0])
  restored, version = asyncio.run(manager.load_latest(state))
  assert version == 1
  assert_same_bytes(restored, state)
  # Ray would end this process a minute after its cluster, in a later test.
  cluster.close()


def test_binary_stops_on_ctrl_c_and_leaves_nothing(
    tmp_path, in_process_context
):
  """Also the numbers of a binary with `--runtime=ray`."""
  temporary = tempfile.mkdtemp(prefix='ray_test_')
  command = [
      *(sys.executable, '-m', 'experiments.minimax', '--runtime=ray'),
      *('--num_workers=1', '--num_shares=2', '--nocompiled', '--epochs=100000'),
      *('--num_clients=3', '--dimension=2', f'--output_dir={tmp_path / "run"}'),
  ]
  with open(tmp_path / 'log', 'w') as log:
    program = subprocess.Popen(
        command,
        stdout=log,
        stderr=log,
        env=os.environ | {'TMPDIR': temporary},
        start_new_session=True,
    )
  metrics = tmp_path / 'run' / 'metrics.csv'
  try:
    wait_until(
        lambda: program.poll() is not None
        or (metrics.exists() and len(simulation.read_rows(str(metrics))) > 1),
        PATIENCE,
    )
    assert program.poll() is None, (tmp_path / 'log').read_text()
    started = psutil.Process(program.pid).children(recursive=True)
    names = {process.name() for process in started}
    assert {'gcs_server', 'raylet'} < names
    os.killpg(program.pid, signal.SIGINT)  # As a terminal does.
    assert program.wait(PATIENCE) == 130
  finally:
    program.kill()
  text = (tmp_path / 'log').read_text()
  assert text.startswith('stopped after epoch') and text.count('\n') == 1, text
  wait_until(lambda: not any(is_alive(p.pid) for p in started), PATIENCE)
  assert not os.listdir(temporary)
  os.rmdir(temporary)

  rows = simulation.read_rows(str(metrics))
  config = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert config['flags']['runtime'] == 'ray' if 'flags' in config else config
  assert [row['communication_rounds'] for row in rows[:2]] == [4, 8]
  from experiments import minimax

  resolved = minimax.EXPERIMENT.resolve(
      dict(num_clients=3, dimension=2, epochs=2, compiled=False)
  )
  trial = minimax.EXPERIMENT.make_trial(resolved, 0)
  with installed(in_process_context):
    learning = trial.build('fednest')
    state = learning.initialize()
    for epoch in (1, 2):
      state = learning.next(state, trial.cohort(epoch)).state
      for name, value in trial.evaluate(
          learning.get_model_weights(state)
      ).items():
        np.testing.assert_allclose(
            rows[epoch - 1][name], value, rtol=1e-5, err_msg=name
        )

