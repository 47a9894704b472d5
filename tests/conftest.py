"""Tests share one native TFF runtime per process and leave no worker behind."""

import os
import signal

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# Tests run on all cores, one process each.
os.environ.setdefault('TF_NUM_INTRAOP_THREADS', '1')

import psutil
import pytest

# Ignored in a background job of a shell, and then in Python, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _workers():
  return [
      child
      for child in psutil.Process().children(recursive=True)
      if child.name().startswith('worker_binary')
  ]


@pytest.fixture(scope='session', autouse=True)
def native_runtime():
  """Ends the worker that TFF's default context starts; TFF itself does not."""
  yield
  for worker in _workers():
    worker.kill()
    worker.wait(timeout=10)
  assert not psutil.Process().children(recursive=True), 'left behind'


@pytest.fixture(scope='session')
def in_process_context():
  """One runtime for all that ask: quick to compile, and it keeps what it has.

  TFF is imported only by those who use it.
  """
  from fednest_tff.runtime import in_process

  return in_process.InProcessContext(in_process.InProcessRuntime(unroll=0))


@pytest.fixture
def in_process(in_process_context):
  """Runs a test in process; afterwards the previous context is back."""
  import tensorflow_federated as tff

  with tff.framework.get_context_stack().install(in_process_context):
    yield


@pytest.fixture
def default_context():
  """A test may choose a runtime; afterwards the previous one is the default."""
  import tensorflow_federated as tff

  before = tff.framework.get_context_stack().current
  yield
  tff.framework.set_default_context(before)
