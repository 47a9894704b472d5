"""Loops at clients are vectorised once, with the numbers of one by one."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import in_process
from fednest_tff.runtime.compiler import while_loops
from tests.runtime.comparison import at_clients, run_in_process

VALUES = [1.0, 2.0, -3.0]
STEPS = [2, 0, 5]


@pytest.fixture
def conversions(monkeypatch):
  """How often bodies and conditions were converted, and by whom."""
  found = dict(functions=0, by_tensorflow=0)
  convert = while_loops._convert_function
  call = while_loops.pfor.WhileV2.__call__

  def counted(*arguments):
    found['functions'] += 1
    return convert(*arguments)

  def counted_call(self):
    found['by_tensorflow'] += 1
    return call(self)

  monkeypatch.setattr(while_loops, '_convert_function', counted)
  monkeypatch.setattr(while_loops.pfor.WhileV2, '__call__', counted_call)
  return found


def run(function, types, values):
  """The results of a function at clients, vectorised; one struct for each."""
  work = tff.tensorflow.computation(function, tff.to_type(types))

  @tff.federated_computation(at_clients(types))
  def mapped(values):
    return tff.federated_map(work, values)

  runtime = in_process.InProcessRuntime()
  return run_in_process(runtime, lambda: mapped(values))


def power(x):
  """x^3, by a variable that is the same for all clients at first."""
  return tf.while_loop(
      lambda k, _: k < 3,
      lambda k, total: (k + 1, total * x),
      (tf.constant(0), tf.constant(1.0)),
  )[1]


def chain(x):
  """A variable that differs only because another one comes to differ."""
  return tf.while_loop(
      lambda k, *_: k < 4,
      lambda k, a, b: (k + 1, a + x, b + a),
      (tf.constant(0), tf.constant(0.0), tf.constant(0.0)),
  )[2]


def nested(x):
  """A loop in a loop: ((x + 1) * 2^3, twice)."""

  def double(total):
    return tf.while_loop(
        lambda k, _: k < 3,
        lambda k, t: (k + 1, 2 * t),
        (tf.constant(0), total),
    )[1]

  return tf.while_loop(
      lambda k, _: k < 2,
      lambda k, total: (k + 1, double(total + x)),
      (tf.constant(0), tf.constant(1.0)),
  )[1]


@pytest.mark.parametrize(
    ('function', 'expected', 'functions'),
    [
        (power, lambda x: x**3, 2),
        (chain, lambda x: 6 * x, 2),
        (nested, lambda x: ((1 + x) * 8 + x) * 8, 4),
    ],
)
def test_one_conversion(conversions, function, expected, functions):
  found = run(function, np.float32, VALUES)
  np.testing.assert_allclose(found, expected(np.array(VALUES)), rtol=1e-6)
  # One condition and one body for each loop.
  assert conversions == dict(functions=functions, by_tensorflow=0)


def test_clients_with_different_numbers_of_steps(conversions):
  def repeated(value):
    x, steps = value
    return tf.while_loop(
        lambda k, _: k < steps,
        lambda k, total: (k + 1, total + x),
        (tf.constant(0), tf.constant(0.0)),
    )[1]

  found = run(
      repeated, [np.float32, np.int32], list(zip(VALUES, STEPS, strict=True))
  )
  np.testing.assert_allclose(found, np.multiply(VALUES, STEPS), rtol=1e-6)
  assert conversions == dict(functions=0, by_tensorflow=1)


def test_number_of_steps_by_the_shape(conversions):
  """Shapes are equal: clients end together, though their tensors differ."""

  def by_shape(x):
    row = x * tf.ones([4])
    return tf.while_loop(
        lambda k, _: k < tf.size(row),
        lambda k, total: (k + 1, total + row[k]),
        (tf.constant(0), tf.constant(0.0)),
    )[1]

  found = run(by_shape, np.float32, VALUES)
  np.testing.assert_allclose(found, 4 * np.array(VALUES), rtol=1e-6)
  assert conversions['by_tensorflow'] == 0


def test_a_wrong_guess_is_noticed(conversions, monkeypatch):
  """Then TensorFlow converts the loop."""
  monkeypatch.setattr(while_loops, '_SAME', frozenset(['Mul']))
  found = run(power, np.float32, VALUES)
  np.testing.assert_allclose(found, np.power(VALUES, 3), rtol=1e-6)
  assert conversions['by_tensorflow'] > 0


def test_a_result_that_is_the_same_is_repeated(conversions):
  """A variable that differs at first need not do so later."""

  def reset(x):
    return tf.while_loop(
        lambda k, _: k < 2,
        lambda k, total: (k + 1, tf.zeros_like(total) + 7.0),
        (tf.constant(0), x),
    )[1]

  assert run(reset, np.float32, VALUES) == [7.0] * 3
  assert conversions['by_tensorflow'] == 0
