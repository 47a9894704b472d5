"""Graphs are simplified, their functions taken out, their kind told."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import graph_rewriting, graphs


def compiled(function, *types):
  return tff.tensorflow.computation(function, *types).to_building_block()


@tf.function
def _square(x):
  return x * x


def _loop(x):
  return tf.while_loop(
      lambda i, _: i < 3,
      lambda i, v: (i + 1, _square(v) + x),
      (tf.constant(0), x),
  )[1]


def _graph_def(block):
  graph_def = tf.compat.v1.GraphDef()
  block.proto.tensorflow.graph_def.Unpack(graph_def)
  return graph_def


def test_functions_are_written_out_and_loops_stay():
  block = compiled(lambda x: _square(_square(x)) + _loop(x), np.float32)
  fetches = graphs._tensor_names(block.proto.tensorflow.result)
  simple = graph_rewriting.simplify(_graph_def(block), fetches)
  kinds = {node.op for node in simple.node}
  assert 'StatelessWhile' in kinds
  assert not kinds & {'PartitionedCall', 'StatefulPartitionedCall'}
  (loop,) = [node for node in simple.node if node.op == 'StatelessWhile']
  assert loop.attr['_lower_using_switch_merge'].b
  functions = graph_rewriting.take_functions(simple)
  assert not simple.library.function
  assert len(functions) >= 2  # The condition and the body.
  names = {tf.compat.as_str(function.name) for function in functions}
  loop = [node for node in simple.node if node.op == 'StatelessWhile'][0]
  assert {loop.attr['cond'].func.name, loop.attr['body'].func.name} <= names


def test_results_stay():
  block = compiled(lambda x: (_loop(x), _square(x) + 0.0 * x, x), np.float32)
  imported = graphs.ImportedGraph(block)

  @tf.function(autograph=False)
  def call(x):
    return list(imported(x)), list(imported.write_nodes(x))

  expected = [float(_loop(tf.constant(0.5))), 0.25, 0.5]
  for found in call(tf.constant(0.5)):
    np.testing.assert_allclose([float(v) for v in found], expected, rtol=1e-6)


def test_what_results_depend_on():
  block = compiled(
      lambda a, b: (a + b, b * 2, tf.constant(1.0)), np.float32, np.float32
  )
  imported = graphs.ImportedGraph(block)
  assert imported.depend([True, False]) == [True, False, False]
  assert imported.depend([False, True]) == [True, True, False]


SEQUENCE = tff.SequenceType(np.float32)


def _with_variable(x):
  variable = tf.Variable(1.0)
  with tf.control_dependencies([variable.assign_add(x)]):
    return variable.read_value()


@pytest.mark.parametrize(['function', 'argument', 'expected'], [
    (lambda x: x + 1, np.float32, True),
    (_loop, np.float32, True),
    (lambda x: tf.random.stateless_uniform([], [1, 2]) + x, np.float32, True),
    (lambda x: tf.debugging.check_numerics(x, 'x'), np.float32, True),
    (lambda x: x + tf.random.uniform([]), np.float32, False),
    (_with_variable, np.float32, False),
    (lambda d: d.reduce(0.0, lambda a, b: a + b), SEQUENCE, False),
])
def test_stateless(function, argument, expected):
  block = compiled(function, argument)
  assert graph_rewriting.is_stateless(block) == expected


def test_reading_datasets():
  total = compiled(lambda d: d.reduce(0.0, lambda a, b: a + b), SEQUENCE)
  assert graph_rewriting.reads_datasets(total)
  assert graph_rewriting.only_reads_datasets(total)
  assert not graph_rewriting.reads_datasets(compiled(lambda d: d, SEQUENCE))
  plus_one = compiled(lambda x: x + 1, np.float32)
  assert not graph_rewriting.reads_datasets(plus_one)


@pytest.mark.parametrize(['function', 'argument', 'expected'], [
    (lambda x: x + 1, np.float32, True),
    (_with_variable, np.float32, True),
    (lambda d: d.reduce(0.0, lambda a, b: a + b), SEQUENCE, True),
    # The second run would draw other numbers than the first.
    (lambda x: x + tf.random.uniform([]), np.float32, False),
    (
        lambda d: d.reduce(0.0, lambda a, b: a + tf.random.uniform([])),
        SEQUENCE,
        False,
    ),
])
def test_repeatable(function, argument, expected):
  assert graphs.ImportedGraph(
      compiled(function, argument)
  ).is_repeatable == expected
