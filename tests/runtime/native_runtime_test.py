"""TFF's worker starts in time, fails clearly, and ends with its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO, NamedTuple

from absl import logging as absl_logging
import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import errors, native

# Forks a program for each argument 'name,stdout,stderr', so that TFF is
# imported once, and prints the process id of each and then their exit codes.
# The first call is from a thread that ends: the worker must not end with it.
SCRIPT = """
import os, sys, threading, time
import numpy as np
import tensorflow_federated as tff
from fednest_tff.runtime import native


def program(name):
  context = native.build_native_context()
  tff.framework.set_default_context(context)

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def total(values):
    return tff.federated_sum(values)

  def first_call():
    with tff.framework.get_context_stack().install(context):
      total([1.0])

  thread = threading.Thread(target=first_call)
  thread.start()
  thread.join()
  pid = context.worker.pid
  time.sleep(0.5)
  print(total([1.0, 2.0]), pid == context.worker.pid, pid, flush=True)
  if name == 'raise':
    raise RuntimeError('on purpose')
  if name == 'wait':
    time.sleep(600)


orders = [argument.split(',') for argument in sys.argv[1:]]
pipes = [int(number) for order in orders for number in order[1:]]
for name, out, err in orders:
  child = os.fork()
  if child == 0:
    os.dup2(int(out), 1)
    os.dup2(int(err), 2)
    for pipe in pipes:
      os.close(pipe)
    program(name)
    sys.exit()
  print(child, flush=True)
for pipe in pipes:
  os.close(pipe)
for _ in orders:
  child, status = os.wait()
  print(child, os.waitstatus_to_exitcode(status), flush=True)
"""
ENDS = {  # From how the parent ends to the script's argument and a signal.
    'exit': ('exit', None),
    'exception': ('raise', None),
    'SIGTERM': ('wait', signal.SIGTERM),
    'SIGKILL': ('wait', signal.SIGKILL),
}


def is_alive(pid):
  return (
      psutil.pid_exists(pid)
      and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  )


def wait_until(condition, seconds):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'It took too long.'
    time.sleep(0.05)


class Parent(NamedTuple):
  """A program that has a worker.

  Attributes:
    pid: Its process id.
    out: Its standard output.
    err: Its standard error.
  """

  pid: int
  out: IO[str]
  err: IO[str]


@pytest.fixture(scope='module')
def script(tmp_path_factory):
  """The script, and its programs, each with pipes for its streams."""
  logs = str(tmp_path_factory.mktemp('logs'))
  environment = os.environ | {'PYTHONPATH': os.getcwd(), 'TMPDIR': logs}
  pipes = {name: (os.pipe(), os.pipe()) for name in ENDS}
  written = [end for pair in pipes.values() for _, end in pair]
  started = subprocess.Popen(
      [sys.executable, '-c', SCRIPT]
      + [
          f'{ENDS[name][0]},{out[1]},{err[1]}'
          for name, (out, err) in pipes.items()
      ],
      stdout=subprocess.PIPE,
      pass_fds=written,
      env=environment,
      text=True,
  )
  for end in written:
    os.close(end)
  parents = {
      name: Parent(
          int(started.stdout.readline()), os.fdopen(out[0]), os.fdopen(err[0])
      )
      for name, (out, err) in pipes.items()
  }
  yield started, parents
  started.kill()
  started.communicate()
  for parent in parents.values():
    if psutil.pid_exists(parent.pid):
      os.kill(parent.pid, signal.SIGKILL)
    parent.out.close()
    parent.err.close()


@pytest.fixture(scope='module')
def parents(script):
  return script[1]


@pytest.fixture(scope='module')
def exit_code(script):
  """A function that waits for a program and returns its exit code."""
  codes = {}

  def wait(pid):
    while pid not in codes:
      ended, code = map(int, script[0].stdout.readline().split())
      codes[ended] = code
    return codes[pid]

  return wait


@pytest.mark.parametrize('name', ENDS)
def test_worker_ends_with_its_parent_and_holds_no_pipe(
    parents, name, exit_code
):
  parent, end = parents[name], ENDS[name][1]
  line = parent.out.readline()
  assert line, parent.err.read()
  total, same_worker, pid = line.split()
  assert (total, same_worker) == ('3.0', 'True')
  if end is not None:
    assert is_alive(int(pid))
    os.kill(parent.pid, end)
  # Returns when both pipes are closed, as `python script.py | tail` would.
  errors = parent.out.read() + parent.err.read()
  wait_until(lambda: not is_alive(int(pid)), 5)
  expected = {'exit': 0, 'exception': 1}.get(name, -(end or 0))
  assert exit_code(parent.pid) == expected, errors
  if name == 'exception':
    assert 'on purpose' in errors


@tff.tensorflow.computation(np.int32)
def add_one(value):
  return value + 1


@tff.tensorflow.computation(np.int32)
def spin(steps):
  """Takes about a millisecond per step."""
  _, value = tf.while_loop(
      lambda k, _: k < steps,
      lambda k, v: (k + 1, tf.math.sin(v)),
      (0, tf.ones([300, 300])),
  )
  return value[0, 0]


def call(context, computation, value):
  with tff.framework.get_context_stack().install(context):
    return computation(value)


def program(directory, body):
  path = directory / 'worker'
  path.write_text(f'#!/bin/sh\n{body}\n')
  path.chmod(0o755)
  return str(path)


@pytest.mark.parametrize(
    ['body', 'timeout', 'words'],
    [
        ('echo "cannot load libfoo" >&2; exit 127', 60, ['127', 'libfoo']),
        ('kill -ILL $$', 60, ['SIGILL', 'Illegal instruction']),
        ('exec sleep 600', 1, ['did not answer within 1 s']),
    ],
)
def test_worker_that_does_not_start_is_one_clear_line(
    tmp_path, body, timeout, words
):
  logs = tmp_path / 'logs'
  context = native.build_native_context(
      start_timeout=timeout, log_dir=str(logs), binary=program(tmp_path, body)
  )
  start = time.monotonic()
  with pytest.raises(errors.WorkerError) as caught:
    call(context, add_one, 1)
  # Not after the time of one that hangs.
  assert time.monotonic() - start < 50
  (log,) = logs.iterdir()
  message = str(caught.value)
  assert '\n' not in message
  for word in [*words, str(log)]:
    assert word in message
  children = psutil.Process().children()
  assert not [c for c in children if c.name() in ('sleep', 'worker')]


def test_program_that_is_not_there():
  with pytest.raises(errors.WorkerError, match='no program /nowhere/worker'):
    call(native.build_native_context(binary='/nowhere/worker'), add_one, 1)


def test_bad_arguments():
  with pytest.raises(ValueError, match='`start_timeout` must be positive'):
    native.build_native_context(start_timeout=0)
  with pytest.raises(ValueError, match='`call_timeout` must be positive'):
    native.build_native_context(call_timeout=-1)


def test_worker_killed_in_a_call_fails_it_and_the_next_call_works(caplog):
  context = native.build_native_context()
  assert call(context, add_one, 1) == 2
  first = context.worker
  threading.Timer(1.0, lambda: os.kill(first.pid, signal.SIGKILL)).start()
  start = time.monotonic()
  with pytest.raises(errors.WorkerError) as caught:
    call(context, spin, 10**6)
  assert time.monotonic() - start < 30
  message = str(caught.value)
  assert '\n' not in message
  assert 'during a call by SIGKILL' in message and first.log_file in message
  assert os.path.exists(first.log_file)
  assert call(context, add_one, 2) == 3
  second = context.worker
  assert second.pid != first.pid

  # One that dies between calls is replaced with a word in the log.
  os.kill(second.pid, signal.SIGKILL)
  wait_until(lambda: not second.is_running(), 5)
  absl_logging.use_absl_handler()
  with caplog.at_level('WARNING', logger='absl'):
    assert call(context, add_one, 3) == 4
  assert f'(pid {second.pid}) has ended' in caplog.text

  pid, log = context.worker.pid, context.worker.log_file
  context.close()
  assert not is_alive(pid)
  assert not os.path.exists(log)  # Nothing went wrong.
  os.remove(first.log_file)
  os.remove(second.log_file)


def test_interrupted_call_leaves_the_next_one_free(tmp_path):
  context = native.build_native_context(log_dir=str(tmp_path))
  assert call(context, add_one, 1) == 2
  main = threading.main_thread().ident
  threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
  with pytest.raises(KeyboardInterrupt):
    call(context, spin, 10**6)
  assert call(context, add_one, 2) == 3


def test_call_timeout(tmp_path):
  context = native.build_native_context(
      call_timeout=3.0, log_dir=str(tmp_path)
  )
  with pytest.raises(errors.WorkerError, match=r'call_timeout \(3 s\)'):
    call(context, spin, 10**6)
  assert call(context, add_one, 1) == 2
  # A worker that stands still would otherwise hold its call for ever.
  os.kill(context.worker.pid, signal.SIGSTOP)
  with pytest.raises(errors.WorkerError, match=r'call_timeout \(3 s\)'):
    call(context, add_one, 1)
  assert call(context, add_one, 1) == 2


def test_proxies_of_the_environment_are_not_for_this_machine(monkeypatch):
  for name in ('http_proxy', 'https_proxy', 'grpc_proxy'):
    monkeypatch.setenv(name, 'http://127.0.0.1:9')
  context = native.build_native_context(start_timeout=20.0)
  assert call(context, add_one, 1) == 2


def test_error_of_a_computation_is_passed_on_and_leaves_the_worker():
  @tff.tensorflow.computation(np.int32)
  def refuse(value):
    with tf.control_dependencies([tf.debugging.assert_equal(value, 0)]):
      return tf.identity(value)

  context = native.build_native_context()
  assert call(context, refuse, 0) == 0
  pid = context.worker.pid
  with pytest.raises(Exception, match='assertion failed'):
    call(context, refuse, 1)
  assert call(context, refuse, 0) == 0
  assert context.worker.pid == pid


def test_context_that_nobody_holds_takes_its_worker_along():
  context = native.build_native_context()
  call(context, add_one, 1)
  pid = context.worker.pid
  del context
  wait_until(lambda: not is_alive(pid), 5)
