"""Vectorised cohorts: the numbers of other cohorts, and one function for all.

The reference runs the same graphs client by client, without compiling.
"""

import concurrent.futures
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import in_process
from fednest_tff.runtime.compiler import side_by_side
from tests.helpers import personal, processes, quadratic, reference
from tests.runtime.comparison import at_clients, checked_sum, run_in_process

SETTINGS = reference.Settings(
    alpha=0.1, beta=0.15, inner_rounds=1, inner_steps=2, outer_steps=2,
    neumann_terms=2, smoothness=4.0,
)
VECTORISED = in_process.InProcessRuntime()
LOOPED = in_process.InProcessRuntime(unroll=0)
ONE_BY_ONE = in_process.InProcessRuntime(compiled=False)
# One of each family: compiling takes seconds.
METHODS = ['fednest', 'lfednest', 'simfbo', 'fedmbo', 'personal']


@functools.cache
def build(method):
  """A process that draws minibatches and N', so that all seeds matter."""
  module = personal if method == 'personal' else quadratic
  options = dict(
      ihgp='stochastic', linear_learning_rate=0.1, batch_size=2,
      local_steps=3,
  )
  known = processes.options_of(method)
  return processes.build(
      module.build_problem(),
      method,
      SETTINGS,
      **{name: value for name, value in options.items() if name in known},
  )


def make_datasets(sizes, seed=0):
  return quadratic.to_datasets(
      quadratic.make_clients(len(sizes), sizes, seed=seed)
  )


def run_epochs(runtime, process, cohorts):
  def run():
    state, outputs = process.initialize(), []
    for datasets in cohorts:
      output = process.next(state, datasets)
      state = output.state
      outputs.append(output)
    return outputs

  found = run_in_process(runtime, run)
  # No client was left to a loop after an error.
  assert not runtime._uneven
  return found


def assert_close(found, expected, rtol):
  tf.nest.assert_same_structure(found, expected)
  for one, other in zip(
      tf.nest.flatten(found), tf.nest.flatten(expected), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


@pytest.mark.parametrize('method', METHODS)
def test_numbers_of_methods(method):
  process = build(method)
  # As many clients as examples vary: equal sizes, two groups, one client.
  cohorts = [make_datasets(sizes) for sizes in ([3] * 4, [3, 2, 3], [2])]
  found = run_epochs(VECTORISED, process, cohorts)
  assert_close(found, run_epochs(ONE_BY_ONE, process, cohorts), 1e-12)
  again = run_epochs(VECTORISED, process, cohorts)
  processes.assert_equal(again[-1].state, found[-1].state)


@pytest.mark.parametrize(
    'runtime', [VECTORISED, LOOPED], ids=['vectorised', 'looped']
)
@pytest.mark.parametrize('method', ['fednest', 'simfbo'])
def test_numbers_by_chunks(small_chunks, method, runtime):
  process = build(method)
  # Chunks that are full or not, two groups, and one client.
  cohorts = [make_datasets(s) for s in ([3] * 5, [3, 2, 3, 3, 2], [2])]
  found = run_epochs(runtime, process, cohorts)
  assert_close(found, run_epochs(ONE_BY_ONE, process, cohorts), 1e-12)


@tff.tensorflow.computation(tff.SequenceType(np.float32))
def total_and_rows(dataset):
  rows = dataset.batch(100).take(1).get_single_element()
  return tf.reduce_sum(rows), rows


@tff.tensorflow.computation(
    tff.to_type([np.float32, tff.TensorType(np.float32, [None])])
)
def scaled(total, rows):
  order = tf.argsort(rows)
  return tf.while_loop(
      lambda i, _: i < tf.size(rows),
      lambda i, v: (i + 1, v + rows[order[i]] * total),
      (tf.constant(0), tf.constant(0.0)),
  )[1]


@tff.federated_computation(at_clients(tff.SequenceType(np.float32)))
def mean_of_loops(datasets):
  read = tff.federated_map(total_and_rows, datasets)
  results = tff.federated_map(scaled, read)
  return tff.federated_mean(results), results


def floats(*sizes):
  return [
      tf.data.Dataset.from_tensor_slices(np.arange(n, dtype=np.float32))
      for n in sizes
  ]


def expect(sizes):
  sums = [n * (n - 1) / 2 for n in sizes]
  return np.mean(np.square(sums)), np.square(sums)


def test_one_function_for_all_numbers_of_clients():
  runtime = in_process.InProcessRuntime()
  for sizes in ([4], [4, 4], [4] * 7, [6] * 3):
    mean, results = run_in_process(
        runtime, lambda sizes=sizes: mean_of_loops(floats(*sizes))
    )
    expected = expect(sizes)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-6)
    np.testing.assert_allclose(results, expected[1], rtol=1e-6)
  assert runtime.num_functions == 1
  # Two groups are another function; the order of clients is kept.
  for sizes in ([4, 5, 4], [5, 5, 5, 2]):
    _, results = run_in_process(
        runtime, lambda sizes=sizes: mean_of_loops(floats(*sizes))
    )
    np.testing.assert_allclose(results, expect(sizes)[1], rtol=1e-6)
  assert runtime.num_functions == 2


def test_many_shapes():
  runtime = in_process.InProcessRuntime()
  sizes = list(range(1, 9))
  mean, results = run_in_process(
      runtime, lambda: mean_of_loops(floats(*sizes))
  )
  np.testing.assert_allclose(mean, expect(sizes)[0], rtol=1e-6)
  np.testing.assert_allclose(results, expect(sizes)[1], rtol=1e-6)


@tff.tensorflow.computation(np.int32)
def ones(n):
  return tf.ones([n])


@tff.federated_computation(at_clients(np.int32))
def vectors(sizes):
  return tff.federated_map(ones, sizes)


def test_shapes_that_depend_on_values():
  """They cannot be stacked, which shows only when the function runs."""
  runtime = in_process.InProcessRuntime()
  for _ in range(2):
    found = run_in_process(runtime, lambda: vectors([2, 0, 3]))
    assert [v.tolist() for v in found] == [[1.0] * 2, [], [1.0] * 3]


def test_errors_are_those_of_the_computation():
  runtime = in_process.InProcessRuntime()
  with pytest.raises(tf.errors.InvalidArgumentError, match='not finite'):
    run_in_process(runtime, lambda: checked_sum([1.0, np.nan]))
  assert run_in_process(runtime, lambda: checked_sum([1.0, 2.0])) == 3.0
  # It goes on being vectorised.
  assert not runtime._uneven


def test_errors_in_several_threads_are_those_of_the_computation():
  runtime = in_process.InProcessRuntime()

  def fail(_):
    with pytest.raises(tf.errors.InvalidArgumentError, match='not finite'):
      run_in_process(runtime, lambda: checked_sum([1.0, np.nan]))

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(fail, range(40)))


def test_clients_of_one_shape_are_not_looped_over(monkeypatch):
  looped = []
  map_clients = side_by_side.map_clients

  def note(*arguments, **options):
    looped.append(arguments)
    return map_clients(*arguments, **options)

  monkeypatch.setattr(side_by_side, 'map_clients', note)
  for runtime, expected in (
      (in_process.InProcessRuntime(), 0),
      (in_process.InProcessRuntime(unroll=0), 1),
  ):
    assert run_in_process(runtime, lambda: checked_sum([1.0, 2.0])) == 3.0
    assert len(looped) == expected
