"""Hyper-parameters in the state: other numbers without tracing or compiling.

A state whose numbers were changed runs like a process that was built with them,
bit for bit.
"""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff import options as options_lib
from fednest_tff.runtime.compiler import graphs
from tests.helpers import personal, processes, quadratic

COHORT = quadratic.to_datasets(quadratic.make_clients())
BUILDERS = {
    name: fednest_tff.get_method(name).builder for name in fednest_tff.METHODS
} | {
    # The other stages have no numbers that the methods lack.
    'lfed_inn': fednest_tff.build_lfed_inn,
    'fed_ihgp': fednest_tff.build_fed_ihgp,
}
# As far as a builder has them. Minibatches and N' are drawn.
OPTIONS = dict(
    inner_learning_rate=0.15,
    outer_learning_rate=0.1,
    smoothness=4.0,
    neumann_terms=2,
    inner_local_steps=2,
    outer_local_steps=1,
    batch_size=1,
    inner_rounds=1,
    linear_learning_rate=0.2,
    local_steps=2,
    server_outer_learning_rate=0.3,
    server_inner_learning_rate=0.25,
    server_linear_learning_rate=0.35,
    radius=0.5,
)


class Counter:
  """Counts calls of a function."""

  def __init__(self, function):
    self._function = function
    self.calls = 0

  def __call__(self, *arguments):
    self.calls += 1
    return self._function(*arguments)


@pytest.fixture
def imported(monkeypatch):
  """Counts the graphs that the runtime imports."""
  counter = Counter(graphs.ImportedGraph)
  monkeypatch.setattr(graphs, 'ImportedGraph', counter)
  return counter


@functools.cache
def _counting_problem(is_personal):
  """Its loss is called in Python whenever something is traced."""
  problem = (personal if is_personal else quadratic).build_problem()
  return dataclasses.replace(
      problem,
      outer_loss=Counter(problem.outer_loss),
      inner_loss=Counter(problem.inner_loss),
  )


def _build(name, problem, **numbers):
  builder = BUILDERS[name]
  known = options_lib.options_of(builder)
  options = {k: v for k, v in OPTIONS.items() if k in known}
  return processes.build_flat(builder, problem, **(options | numbers))


@pytest.mark.parametrize('name', BUILDERS)
def test_other_numbers_give_the_same_bits_as_a_new_process(name, imported):
  problem = _counting_problem(name == 'personal')

  def traced():
    return problem.inner_loss.calls + problem.outer_loss.calls

  process = _build(name, problem)
  start = process.initialize()
  numbers = process.get_hparams(start)
  assert numbers
  for key, value in numbers.items():
    assert OPTIONS.get(key, value) == value
  others = {key: 0.75 * value for key, value in numbers.items()}
  # Whatever is needed once.
  first = process.next(process.set_hparams(start, numbers), COHORT)

  before = imported.calls, traced()
  changed = process.set_hparams(start, others)
  outputs = processes.outputs(process, COHORT, 2, changed)
  assert process.get_hparams(changed) == others
  assert (imported.calls, traced()) == before

  # What was traced once serves any numbers.
  built = _build(name, problem, **others)
  assert traced() == before[1] > 0
  processes.assert_equal(built.initialize(), changed)
  for output, expected in zip(
      outputs, processes.outputs(built, COHORT, 2), strict=True
  ):
    processes.assert_equal(output.state, expected.state)
    processes.assert_equal(output.metrics, expected.metrics)
  # The numbers matter.
  values = tf.nest.flatten((first.state.method, first.metrics))
  found = tf.nest.flatten((outputs[0].state.method, outputs[0].metrics))
  assert any(np.any(a != b) for a, b in zip(values, found, strict=True))


def test_number_of_a_schedule_is_a_factor():
  def schedule(factor):
    return lambda epoch: factor / tf.cast(epoch + 1, tf.float64)

  problem = quadratic.build_problem()
  process = _build('lfed_inn', problem, inner_learning_rate=schedule(0.1))
  start = process.initialize()
  assert process.get_hparams(start) == dict(inner_learning_rate=1.0)
  changed = process.set_hparams(start, dict(inner_learning_rate=2.0))
  built = _build('lfed_inn', problem, inner_learning_rate=schedule(0.2))
  for output, expected in zip(
      processes.outputs(process, COHORT, 2, changed),
      processes.outputs(built, COHORT, 2),
      strict=True,
  ):
    np.testing.assert_array_equal(output.state.inner, expected.state.inner)


def test_driver_reads_the_same_numbers(imported):
  process = _build('lfed_inn', quadratic.build_problem())
  driver = fednest_tff.build_driver(process)
  start = process.initialize()
  driver.next(start, COHORT)
  changed = process.set_hparams(start, dict(inner_learning_rate=0.11))

  before = imported.calls
  found = driver.next(changed, COHORT)
  assert imported.calls == before

  expected = process.next(changed, COHORT)
  np.testing.assert_allclose(
      found.state.inner, expected.state.inner, rtol=1e-10
  )
  unchanged = process.next(start, COHORT)
  assert np.any(unchanged.state.inner != expected.state.inner)
