"""Computations that processes on one problem share."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.federated import tracing
from fednest_tff.local.descent import LocalWork
from tests.helpers import small_problems


@pytest.fixture
def problem():
  return small_problems.bilevel()


def _build(problem, value, parameter_type=np.float32, use=None):
  """A computation with `value` around it; `use` says what it does with it."""
  use = use or (lambda value: value)

  @tracing.computation(problem, parameter_type)
  def computation(argument):
    return argument * use(value)

  return computation


@pytest.mark.parametrize('value', [2, 2.5])
def test_an_equal_function_is_not_traced_again(problem, value):
  first = _build(problem, value)
  assert _build(problem, value) is first
  assert first(3.0) == 3 * value


def _double(value):
  return 2 * value


@pytest.mark.parametrize(
    ['one', 'other', 'use'],
    [
        (2.0, 3.0, None),
        ((1.0, 2.0), (1.0, 3.0), lambda value: value[1]),
        (
            LocalWork(steps=2), LocalWork(steps=3),
            lambda value: float(value.steps),
        ),
        (lambda: 2.0, lambda: 3.0, lambda value: value()),
        (
            LocalWork(steps=lambda n: 2.0), LocalWork(steps=lambda n: 3.0),
            lambda value: value.steps(1),
        ),
        (functools.partial(_double, 1.0), functools.partial(_double, 1.5),
         lambda value: value()),
    ],
)
def test_other_values_around_it_count(problem, one, other, use):
  first, second = (_build(problem, value, use=use) for value in (one, other))
  assert (first(1.0), second(1.0)) == (2.0, 3.0)
  assert _build(problem, one, use=use) is first


def test_values_inside_of_functions_count(problem):
  def add(number):
    return lambda: number + 1.0

  first, second, third = (
      _build(problem, add(number), use=lambda value: value())
      for number in (1.0, 2.0, 1.0)
  )
  assert first is third
  assert (first(1.0), second(1.0)) == (2.0, 3.0)


def test_types_count(problem):
  first = _build(problem, 2)
  assert _build(problem, 2, np.int32) is not first
  # 2 and 2.0 are equal, but a tensor of one is not one of the other.
  assert _build(problem, True, use=lambda v: 2 if v is True else 3)(1.0) == 2
  assert _build(problem, 1, use=lambda v: 2 if v is True else 3)(1.0) == 3


def test_another_problem_has_its_own(problem):
  first = _build(problem, 2)
  assert _build(small_problems.bilevel(), 2) is not first
  # The problem may be among the values, too.
  size = lambda value: float(value.outer_spec.shape[0])  # noqa: E731
  found = _build(problem, problem, use=size)
  assert _build(problem, problem, use=size) is found
  assert found(3.0) == 6.0


def test_values_that_can_change_are_not_shared(problem):
  values = [2.0]
  first = _build(problem, values, use=lambda value: value[0])
  values[0] = 3.0
  second = _build(problem, values, use=lambda value: value[0])
  assert (first(1.0), second(1.0)) == (2.0, 3.0)
  assert not problem.computations


def test_functions_that_refer_to_themselves_are_not_shared(problem):
  def count(n):
    return 0.0 if n == 0 else 1.0 + count(n - 1)

  first, second = (
      _build(problem, count, use=lambda value: value(3)) for _ in range(2)
  )
  assert first is not second
  assert first(1.0) == second(1.0) == 3.0


def test_only_the_last_are_kept(problem, monkeypatch):
  monkeypatch.setattr(tracing, '_MAX_KEPT', 2)
  first, second, third = (_build(problem, k) for k in (1, 2, 3))
  assert len(problem.computations) == 2
  assert _build(problem, 3) is third and _build(problem, 2) is second
  assert _build(problem, 1) is not first


def _client_work(process):
  return {round_.name: round_.client_work for round_ in process.method.rounds}


def test_processes_share_what_their_clients_compute(problem):
  options = dict(
      inner_learning_rate=0.1, outer_learning_rate=0.1, batch_size=2,
      neumann_terms=3,
  )
  first = _client_work(fednest_tff.build(problem, 'fednest', **options))
  again = fednest_tff.build(
      problem, 'fednest',
      **(options | dict(
          inner_learning_rate=lambda epoch: 0.2, neumann_terms=4,
          client_weighting='num_examples',
      )),
  )
  assert all(
      work is first[name] for name, work in _client_work(again).items()
  )
  # FedNest_SGD has other inner steps, and the outer ones of FedNest.
  light = _client_work(fednest_tff.build(problem, 'fednest_sgd', **options))
  assert {name for name in light if light[name] is first[name]} == {
      'ihgp_gradient', 'ihgp_product', 'hypergradient', 'outer_update'
  }
  # Minibatches are no part of the two gradients outside the local loops.
  other = fednest_tff.build(
      problem, 'fednest', **(options | dict(batch_size=3))
  )
  changed = _client_work(other)
  assert {name for name in first if changed[name] is not first[name]} == {
      'inner_update', 'outer_update'
  }


def test_weights_of_clients_are_not_shared(problem):
  readers = [
      fednest_tff.ProblemTypes(problem, weighting).read_client
      for weighting in ('uniform', 'num_examples', 'uniform')
  ]
  dataset = tf.data.Dataset.from_tensor_slices(small_problems.BATCH)
  assert [reader(dataset).weight for reader in readers] == [1.0, 2.0, 1.0]
  assert readers[0] is readers[2]
