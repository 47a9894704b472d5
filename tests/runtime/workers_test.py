"""Rounds over several workers: right numbers, whoever dies."""

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

from absl import flags
from absl import logging as absl_logging
import grpc
import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.runtime import local_worker, native, workers
from fednest_tff.runtime import remote as remote_lib
from tests.helpers import quadratic
from tests.runtime.native_runtime_test import is_alive, wait_until

CLIENTS = quadratic.make_clients(num_clients=5)
EPOCHS = 3


@pytest.fixture(scope='module')
def server():
  context = native.build_native_context()
  yield context
  context.close()


@pytest.fixture(scope='module')
def process():
  return fednest_tff.build(
      quadratic.build_problem(),
      outer_learning_rate=0.1,
      inner_learning_rate=0.15,
      inner_local_steps=2,
      batch_size=1,
      neumann_terms=3,
      smoothness=4.0,
  )


@pytest.fixture(scope='module')
def expected(process, server):
  """The states after each epoch by `next` in one native worker."""
  datasets = quadratic.to_datasets(CLIENTS)
  with installed(server):
    states = [process.initialize()]
    for _ in range(EPOCHS):
      states.append(process.next(states[-1], datasets).state)
  return states


@pytest.fixture
def started(tmp_path):
  with workers.local_workers(3, log_dir=str(tmp_path / 'logs')) as local:
    yield local


@pytest.fixture
def warnings(caplog):
  absl_logging.use_absl_handler()
  with caplog.at_level('WARNING', logger='absl'):
    yield caplog


def installed(context):
  return tff.framework.get_context_stack().install(context)


def connect(local, server, **options):
  return workers.build_workers_context(
      [worker.address for worker in local], server_context=server, **options
  )


def assert_state(actual, expected):
  np.testing.assert_allclose(actual.outer, expected.outer, rtol=1e-10)
  np.testing.assert_allclose(actual.inner, expected.inner, rtol=1e-10)
  assert actual.epoch == expected.epoch


def seconds(local):
  """How long each worker has computed."""
  times = [psutil.Process(worker.pid).cpu_times() for worker in local]
  return np.array([t.user + t.system for t in times])


@tff.tensorflow.computation(np.float32)
def _slowly_doubled(value):
  _, spun = tf.while_loop(
      lambda k, _: k < 2000,
      lambda k, v: (k + 1, tf.math.sin(v)),
      (0, tf.ones([300, 300])),
  )
  return 2 * value + 0 * spun[0, 0]


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def slow_sum(values):
  return tff.federated_sum(tff.federated_map(_slowly_doubled, values))


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def quick_sum(values):
  return tff.federated_sum(values)


def test_run_with_a_worker_killed_in_the_middle(
    process, expected, started, server, warnings
):
  """The same numbers before, in and after the round that loses a worker."""
  datasets = quadratic.to_datasets(CLIENTS)
  addresses = [worker.address for worker in started]

  def cohort(epoch, name, index):
    if (epoch, name) == (1, 'hypergradient'):
      started[1].kill()
    return datasets

  driven = fednest_tff.build_driver(process)
  with installed(connect(started, server)):
    state = driven.initialize()
    assert_state(state, expected[0])
    for epoch in range(EPOCHS):
      assert ('is lost' in warnings.text) == (epoch > 1)
      state = driven.next(state, cohort).state
      assert_state(state, expected[epoch + 1])
  lost = [r.getMessage() for r in warnings.records]
  assert f'Worker {addresses[1]} is lost' in lost[0]
  assert 'run again on another worker' in lost[0]
  assert f'Worker {addresses[2]} did the lost share' in lost[1]
  assert len(lost) == 2  # Later rounds leave it out without a word.


def test_call_whose_worker_is_killed_under_it(started, server, warnings):
  context = connect(started, server)
  with installed(context):
    assert quick_sum([1.0, 2.0, 3.0]) == 6
    before = seconds(started)[0]

    def kill_when_busy():
      wait_until(lambda: seconds(started)[0] > before + 0.05, 30)
      started[0].kill()

    threading.Thread(target=kill_when_busy).start()
    assert slow_sum([1.0, 2.0, 3.0, 4.0]) == 20
  assert f'Worker {started[0].address} is lost' in warnings.text


def test_worker_that_no_longer_answers(started, server, warnings):
  """As a machine that vanishes: its connections stay open."""
  context = connect(started, server, probe_interval=0.3)
  with installed(context):
    assert quick_sum([1.0, 2.0, 3.0]) == 6
    os.kill(started[2].pid, signal.SIGSTOP)
    start = time.monotonic()
    assert quick_sum([1.0, 2.0, 3.0]) == 6
  assert time.monotonic() - start < 20
  assert f'Worker {started[2].address} is lost' in warnings.text


def test_all_killed_is_an_error_and_the_checkpoint_stays(
    process, expected, started, server, tmp_path
):
  datasets = quadratic.to_datasets(CLIENTS)
  manager = tff.program.FileProgramStateManager(str(tmp_path))

  def cohort(epoch, name, index):
    if (epoch, name) == (1, 'ihgp_gradient'):
      for worker in started:
        worker.kill()
    return datasets

  driven = fednest_tff.build_driver(process)
  with installed(connect(started, server)):
    state = driven.next(driven.initialize(), cohort).state
    asyncio.run(manager.save(state, 1))
    start = time.monotonic()
    with pytest.raises(remote_lib.WorkerError) as caught:
      driven.next(state, cohort)
  assert time.monotonic() - start < 60
  message = str(caught.value)
  assert '\n' not in message
  assert all(worker.address in message for worker in started)
  restored, version = asyncio.run(manager.load_latest(state))
  assert version == 1
  assert_state(restored, expected[1])


def test_workers_that_come_back(server, warnings, monkeypatch, tmp_path):
  monkeypatch.setattr(workers, '_RETRY_AFTER', 0.0)
  with workers.local_workers(2, log_dir=str(tmp_path)) as first:
    ports = [int(w.address.rpartition(':')[2]) for w in first]
    context = connect(first, server)
    with installed(context):
      assert quick_sum([1.0, 2.0]) == 3
      first[0].kill()
      assert quick_sum([1.0, 2.0]) == 3
      again = local_worker.LocalWorker(ports[0])
      again.connect(30.0, remote_lib.cached_compiler())
      assert quick_sum([1.0, 2.0]) == 3
      assert f'Worker {again.address} is back' in warnings.text
      warnings.clear()

      # One that was replaced between two calls does not know our executors.
      first[1].kill()
      other = local_worker.LocalWorker(ports[1])
      other.connect(30.0, remote_lib.cached_compiler())
      time.sleep(1.5)  # The connection is made anew.
      assert quick_sum([1.0, 2.0]) == 3
    again.stop()
    other.stop()


def test_shapes_of_calls(started, server):
  context = connect(started, server)

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def at_clients(values):
    return tff.federated_map(
        tff.tensorflow.computation(lambda v: v + 1, np.float32), values
    )

  @tff.federated_computation(
      tff.FederatedType(np.float32, tff.SERVER),
      tff.FederatedType(np.float32, tff.CLIENTS),
  )
  def two_rounds(start, values):
    mean = tff.federated_mean(values)
    del start
    return tff.federated_sum(
        tff.federated_map(
            tff.tensorflow.computation(lambda a, b: a * b),
            (values, tff.federated_broadcast(mean)),
        )
    )

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def mixed(values):
    return tff.federated_sum(values), values

  with installed(context):
    assert quick_sum([]) == 0
    assert quick_sum([1.0]) == 1
    assert quick_sum([float(k) for k in range(20)]) == 190
    assert at_clients([1.0, 2.0, 3.0, 4.0]) == [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(ValueError, match='one communication round per call'):
      two_rounds(0.0, [1.0, 2.0])
    with pytest.raises(ValueError, match='clients together with'):
      mixed([1.0])


def test_clients_are_spread_over_the_workers(started, server):
  with installed(connect(started, server)):
    before = seconds(started)
    slow_sum([1.0, 2.0, 3.0])
  assert np.all(seconds(started) - before > 0.05)


def test_error_of_a_client_is_no_lost_worker(started, server, warnings):
  @tff.tensorflow.computation(np.float32)
  def refuse(value):
    with tf.control_dependencies([tf.debugging.assert_less(value, 3.0)]):
      return tf.identity(value)

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def checked(values):
    return tff.federated_sum(tff.federated_map(refuse, values))

  with installed(connect(started, server)):
    assert checked([1.0, 2.0]) == 3
    with pytest.raises(Exception, match='assertion failed'):
      checked([1.0, 5.0])
    assert checked([1.0, 2.0]) == 3
  assert 'is lost' not in warnings.text


@pytest.mark.parametrize(
    ['addresses', 'words'],
    [
        ([], 'must be a list'),
        ('host:1', 'must be a list'),
        (['host'], "'host:port' each"),
        (['host:99999'], "'host:port' each"),
        (['a:1', 'a:1'], 'must differ'),
    ],
)
def test_bad_addresses(addresses, words):
  with pytest.raises(ValueError, match=f'`workers`.*{words}'):
    workers.build_workers_context(addresses)


def _forward(source, target):
  try:
    while data := source.recv(65536):
      target.sendall(data)
  except OSError:
    pass
  for end in (source, target):
    end.close()


def _serve_tls(listener, context, port):
  """A TLS proxy in front of a plain worker, as a real cluster would have."""
  while True:
    try:
      outside = context.wrap_socket(listener.accept()[0], server_side=True)
    except ssl.SSLError:
      continue
    except OSError:
      return
    inside = socket.create_connection(('127.0.0.1', port))
    for pair in ((outside, inside), (inside, outside)):
      threading.Thread(target=_forward, args=pair, daemon=True).start()


@pytest.mark.skipif(not shutil.which('openssl'), reason='needs openssl')
def test_tls(tmp_path, server):
  key, certificate = tmp_path / 'key.pem', tmp_path / 'certificate.pem'
  subprocess.run(
      ['openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days',
       '1', '-subj', '/CN=localhost', '-addext',
       'subjectAltName=DNS:localhost', '-keyout', key, '-out', certificate],
      check=True, capture_output=True,
  )
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  context.load_cert_chain(certificate, key)
  context.set_alpn_protocols(['h2'])
  with workers.local_workers(1) as (worker,), socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    listener.listen()
    port = int(worker.address.rpartition(':')[2])
    threading.Thread(
        target=_serve_tls, args=(listener, context, port), daemon=True
    ).start()
    address = f'localhost:{listener.getsockname()[1]}'
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    options = dict(server_context=server, connect_timeout=5.0)
    with installed(
        workers.build_workers_context([address], credentials, **options)
    ):
      assert quick_sum([1.0, 2.0]) == 3
    # A server that cannot show the right certificate is refused.
    stranger = workers.build_workers_context(
        [address], grpc.ssl_channel_credentials(), **options
    )
    with installed(stranger), pytest.raises(remote_lib.WorkerError):
      quick_sum([1.0, 2.0])


@pytest.fixture(scope='module')
def programs(tmp_path_factory):
  """`python -m fednest_tff.runtime.workers --num=2`, twice at once."""
  started = {
      end: subprocess.Popen(
          [sys.executable, '-m', 'fednest_tff.runtime.workers', '--num=2'],
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          env=os.environ | {'TMPDIR': str(tmp_path_factory.mktemp('logs'))},
          text=True,
      )
      for end in (signal.SIGTERM, signal.SIGKILL)
  }
  yield started
  for process in started.values():
    process.kill()
    process.communicate()


@pytest.mark.parametrize('end', [signal.SIGTERM, signal.SIGKILL])
def test_program_starts_workers_and_ends_them_with_itself(
    programs, server, end
):
  process = programs[end]
  addresses = [process.stdout.readline().strip() for _ in range(2)]
  assert all(addresses), process.communicate()[1]
  with installed(
      workers.build_workers_context(addresses, server_context=server)
  ):
    assert quick_sum([1.0, 2.0, 3.0]) == 6
  pids = [child.pid for child in psutil.Process(process.pid).children()]
  assert len(pids) == 2
  process.send_signal(end)
  output, errors = process.communicate(timeout=30)
  assert not output
  assert 'firewall' in errors
  wait_until(lambda: not any(map(is_alive, pids)), 5)


def test_importing_defines_no_flags():
  assert 'num' not in flags.FLAGS
