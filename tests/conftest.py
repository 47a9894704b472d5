"""Tests share one runtime per process and leave no worker behind.

Tests of algorithms run in process, without compiling; those of the runtime
itself in TFF's own, unless their module has `RUNTIME = 'in_process'`.
"""

import gc
import os
import pathlib
import signal
import sys

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# Tests run on all cores, one process each.
os.environ.setdefault('TF_NUM_INTRAOP_THREADS', '1')

import psutil
import pytest

from tests import long_tests
from tests.helpers import protocols

# Ignored in a background job of a shell or under nohup, and then in Python and
# in programs that tests start, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


protocols.cache_attributes()
_ROOT = pathlib.Path(__file__).parent


def pytest_collection_finish():
  # Modules stay: a look at all their objects takes Python a tenth of the time.
  gc.collect()
  gc.freeze()
  gc.set_threshold(10_000, 20, 20)


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
def launcher(native_runtime):
  """Starts binaries in other processes, without importing TFF again."""
  from tests.helpers import killable

  found = killable.Launcher()
  yield found
  found.close()


@pytest.fixture(scope='session')
def in_process_context():
  """One runtime for all that ask: it compiles nothing, and shares graphs.

  TFF is imported only by those who use it.
  """
  from fednest_tff.runtime import in_process

  return in_process.InProcessContext(
      in_process.InProcessRuntime(compiled=False)
  )


@pytest.fixture(scope='session')
def compiled_context():
  """One runtime that compiles, for tests with hundreds of calls."""
  from fednest_tff.runtime import in_process

  return in_process.InProcessContext(in_process.InProcessRuntime(unroll=0))


# `make test-quick` leaves out tests with the mark `slow`, which trace or
# compile much or start programs: these folders and files, without the
# exceptions, and the tests of `long_tests`.
_SLOW_FOLDERS = {
    'algorithms', 'chaos', 'compiler', 'distributed', 'experiments',
    'federated', 'models', 'runtime',
}
_SLOW_FILES = {
    'api_mistakes_test.py', 'comparison_test.py', 'docs_test.py',
    'examples_test.py', 'notebook_test.py', 'personal_steps_test.py',
    'readme_test.py', 'training_test.py', 'types_test.py',
}
_QUICK_FILES = {
    'call_dominant_test.py', 'fed_inn_test.py', 'settings_test.py',
    'shares_test.py',
}


# Files that take longest, the longest first: what is left to the end keeps one
# core waiting for the other.
_FIRST_FILES = (
    'ray_test.py', 'in_process_test.py', 'resume_test.py', 'binaries_test.py',
    'vectorised_test.py', 'gpu_kernels_test.py', 'benchmark_test.py',
    'driver_test.py', 'repeats_test.py', 'bad_input_test.py', 'readme_test.py',
    'chaos_test.py', 'hparams_test.py', 'later_methods_test.py',
    'native_runtime_test.py', 'comparison_test.py', 'theory_test.py',
    'fed_nest_test.py', 'secure_aggregation_test.py',
    'special_problems_test.py', 'composition_test.py', 'examples_test.py',
    'personalization_test.py', 'local_hypergradient_test.py',
    'personal_steps_test.py', 'personal_test.py', 'communication_test.py',
    'signals_test.py', 'sim_fbo_test.py', 'types_test.py', 'fed_mbo_test.py',
    'constraints_test.py', 'sine_meta_learning_test.py', 'reproduce_test.py',
    'fed_out_test.py', 'learning_problems_test.py',
    'logistic_regression_test.py', 'aggregation_test.py', 'notebook_test.py',
    'derivatives_test.py',
)


def pytest_collection_modifyitems(items):
  order = {name: k for k, name in enumerate(_FIRST_FILES)}
  items.sort(key=lambda item: order.get(item.path.name, len(order)))
  for item in items:
    path = item.path
    is_long = long_tests.is_long(
        path.relative_to(_ROOT).as_posix(), item.name
    )
    if is_long:
      item.add_marker(pytest.mark.long)
    is_slow = path.parent.name in _SLOW_FOLDERS or path.name in _SLOW_FILES
    if is_long or (is_slow and path.name not in _QUICK_FILES):
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


@pytest.fixture(autouse=True)
def restored_registry(monkeypatch):
  """Methods that one test registers are unknown to the next."""
  # TFF is imported only by those who use it.
  registry = sys.modules.get('fednest_tff.registry')
  if registry is not None:
    monkeypatch.setattr(registry, '_METHODS', dict(registry._METHODS))


@pytest.fixture
def in_process(in_process_context):
  """Runs a test in process; afterwards the previous context is back."""
  import tensorflow_federated as tff

  with tff.framework.get_context_stack().install(in_process_context):
    yield


@pytest.fixture
def compiled(compiled_context):
  """Runs a test in process, compiled."""
  import tensorflow_federated as tff

  with tff.framework.get_context_stack().install(compiled_context):
    yield


@pytest.fixture
def default_context():
  """A test may choose a runtime; afterwards the previous one is the default."""
  import tensorflow_federated as tff

  before = tff.framework.get_context_stack().current
  yield
  tff.framework.set_default_context(before)
