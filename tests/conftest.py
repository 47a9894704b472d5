"""Tests share one runtime per process and leave no worker behind.

Tests of algorithms run in process, which compiles quickly; those of the runtime
itself in TFF's own, unless their module has `RUNTIME = 'in_process'`.
"""

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


# `make test-quick` leaves out tests with the mark `slow`, which compile many
# processes or start programs: these folders and files, without the exceptions.
_SLOW_FOLDERS = {
    'algorithms', 'compiler', 'experiments', 'federated', 'runtime'
}
_SLOW_FILES = {
    'docs_test.py', 'examples_test.py', 'readme_test.py', 'training_test.py'
}
_QUICK_FILES = {
    'call_dominant_test.py', 'fed_inn_test.py', 'settings_test.py',
    'shares_test.py',
}


def pytest_collection_modifyitems(items):
  for item in items:
    path = item.path
    is_slow = path.parent.name in _SLOW_FOLDERS or path.name in _SLOW_FILES
    if is_slow and path.name not in _QUICK_FILES:
      item.add_marker(pytest.mark.slow)


# Folders whose tests run in process.
_IN_PROCESS = {'algorithms', 'federated', 'local', 'problems'}


@pytest.fixture(scope='module', autouse=True)
def runtime_of_module(request):
  """Runs the module's tests, and its own fixtures, in the right runtime."""
  default = 'in_process' if request.path.parent.name in _IN_PROCESS else None
  if getattr(request.module, 'RUNTIME', default) is None:
    yield
    return
  import tensorflow_federated as tff

  context = request.getfixturevalue('in_process_context')
  with tff.framework.get_context_stack().install(context):
    yield


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
