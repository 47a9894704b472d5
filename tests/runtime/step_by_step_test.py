"""The runtime that compiles nothing, against the one that does.

`comparison.assert_like_native` also runs it, in the other tests of the runtime.
"""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.runtime import in_process
from fednest_tff.runtime.compiler import graphs
from tests.helpers import processes, quadratic
from tests.runtime.comparison import RUNTIMES, at_clients, run_in_process


def test_epochs_equal_those_of_the_compiled_function():
  process = processes.sampling_process('fednest')
  datasets = quadratic.to_datasets(quadratic.make_clients())

  def two_epochs():
    state = process.initialize()
    for _ in range(2):
      output = process.next(state, datasets)
      state = output.state
    return output

  found = run_in_process(RUNTIMES['step by step'], two_epochs)
  expected = run_in_process(RUNTIMES['looped'], two_epochs)
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13),
      (found.state.outer, found.state.inner),
      (expected.state.outer, expected.state.inner),
  )
  again = run_in_process(RUNTIMES['step by step'], two_epochs)
  processes.assert_equal(found.state, again.state)


def _add(amount):
  @tff.tensorflow.computation(np.int32)
  def add(x):
    return x + amount

  @tff.federated_computation(at_clients(np.int32))
  def add_and_sum(x):
    return tff.federated_sum(tff.federated_map(add, x))

  return add_and_sum


def test_equal_graphs_are_imported_once(monkeypatch):
  imported = []
  original = graphs.ImportedGraph

  def counted(*arguments):
    imported.append(arguments)
    return original(*arguments)

  monkeypatch.setattr(graphs, 'ImportedGraph', counted)
  runtime = in_process.InProcessRuntime(compiled=False)

  def run(computation, values):
    return run_in_process(runtime, lambda: computation(values))

  assert run(_add(1), [1, 2]) == 5
  before = len(imported)
  assert before > 0
  # Traced again, and with another number of clients: nothing new.
  assert run(_add(1), [1, 2, 3]) == 9
  assert len(imported) == before
  # `+ 2` is another graph than `+ 1`; the sum is the same.
  assert run(_add(2), [1, 2]) == 7
  assert len(imported) == before + 1
  assert runtime.num_functions == 0
  runtime.forget()
  assert run(_add(2), [1, 2]) == 7
  assert len(imported) > before + 1


def test_an_error_is_that_of_the_operation():
  @tff.tensorflow.computation(np.int32)
  def check(x):
    with tf.control_dependencies([tf.debugging.assert_positive(x, 'negative')]):
      return tf.identity(x)

  @tff.federated_computation(at_clients(np.int32))
  def checked(x):
    return tff.federated_sum(tff.federated_map(check, x))

  runtime = RUNTIMES['step by step']
  assert run_in_process(runtime, lambda: checked([1, 2])) == 3
  with pytest.raises(tf.errors.InvalidArgumentError, match='negative'):
    run_in_process(runtime, lambda: checked([1, -2]))


def test_only_the_runtime_of_this_process_has_the_choice(default_context):
  context = fednest_tff.use_runtime('in_process', compiled=False)
  assert _add(1)([1, 2]) == 5
  assert context.runtime.num_functions == 0
  with pytest.raises(ValueError, match='`compiled`'):
    fednest_tff.use_runtime('native', compiled=False)
  with pytest.raises(ValueError, match='`unroll` has no effect'):
    fednest_tff.use_runtime('in_process', unroll=3, compiled=False)
