"""Vectorised operations against the same operations row by row."""

import logging

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff.runtime.compiler import converters

RNG = np.random.default_rng(0)
A = RNG.normal(size=(4, 3, 2)).astype(np.float32)
B = RNG.normal(size=(4, 2)).astype(np.float32)
C = RNG.normal(size=(4, 1)).astype(np.float32)
S = RNG.normal(size=4).astype(np.float32)
SHARED = RNG.normal(size=(3, 2)).astype(np.float32)
D = RNG.normal(size=(4, 3, 2, 5)).astype(np.float32)
E = RNG.normal(size=(4, 3, 5, 2)).astype(np.float32)
LABELS = np.array([[0, 1, 1]] * 4, np.int32)
SEEDS = np.array([[0, 0], [1, -5], [2**62 + 7, -(2**63)], [12345, 42]])


def _bias_gradient(a, b):
  """Sums over axes that TensorFlow finds from shapes when it runs."""
  a = tf.boolean_mask(a, a[:, 0] > -10)  # All rows, which is not known before.
  with tf.GradientTape() as tape:
    tape.watch(b)
    value = (a + b) ** 2
  return tape.gradient(value, b)


def _gradient_of_bias_add(a, b):
  with tf.GradientTape() as tape:
    tape.watch(b)
    value = tf.nn.bias_add(a, b) ** 2
  return tape.gradient(value, b)


def _minibatch(a, y):
  """Rows and labels of which TensorFlow does not know how many there are."""
  kept = a[:, 0] > -10
  return tf.boolean_mask(a, kept), tf.boolean_mask(y, kept)


def _cross_entropy_of_a_minibatch(a, y):
  rows, labels = _minibatch(a, y)
  return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, rows * 2)


def _gradient_of_a_mean(a, y):
  """Its slopes are divided by a number that comes from a shape."""
  rows, labels = _minibatch(a, y)
  with tf.GradientTape() as tape:
    tape.watch(rows)
    logits = tf.nn.bias_add(rows, SHARED[0])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    mean = tf.reduce_mean(losses) + tf.reduce_mean(tf.nn.relu(logits))
  return tape.gradient(mean, rows)


CASES = {
    'sums of other ranks': (lambda a, b: a + b, [A, B]),
    'scalars': (lambda a, s: a * s - s, [A, S]),
    'the lower rank first': (lambda s, a: s / a, [S, A]),
    'a row of one': (lambda a, c: tf.maximum(a, c), [A, C]),
    'shared arguments': (lambda b: b - SHARED, [B]),
    'a shared scalar': (lambda s: tf.pow(tf.abs(s), 2.0), [S]),
    'choices': (lambda a, s: tf.where(s > 0, a, s), [A, S]),
    'one sum': (lambda a: tf.reduce_sum(a, axis=0), [A]),
    'all axes': (lambda a: tf.reduce_mean(a), [A]),
    'the last axis': (lambda a: tf.reduce_max(a, axis=-1), [A]),
    'kept axes': (lambda a: tf.reduce_sum(a, axis=1, keepdims=True), [A]),
    'axes that are not known': (
        lambda a, s: tf.reduce_sum(a, axis=tf.cast(s > 9, tf.int32)), [A, S]
    ),
    'axes of a gradient': (_bias_gradient, [A, B]),
    'many terms': (lambda a, b: tf.add_n([a, SHARED, a * b, SHARED]), [A, B]),
    'one term of each': (lambda a: tf.add_n([SHARED, a]), [A]),
    'order': (lambda a: tf.argsort(a, axis=-1), [A]),
    'largest': (lambda b: tf.math.top_k(b, k=1).values, [B]),
    'cross entropy': (
        lambda a, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, a),
        [A, LABELS],
    ),
    'cross entropy of shared labels': (
        lambda a: tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS[0], a),
        [A],
    ),
    'cross entropy of a minibatch': (
        _cross_entropy_of_a_minibatch, [A, LABELS]
    ),
    'gradient of a mean': (_gradient_of_a_mean, [A, LABELS]),
    'shape of a cross entropy': (
        lambda a, y: tf.shape(_cross_entropy_of_a_minibatch(a, y)), [A, LABELS]
    ),
    'shape of an activation': (
        lambda a, y: tf.shape(tf.nn.relu(-_minibatch(a, y)[0])), [A, LABELS]
    ),
    'draws': (
        lambda seed: tf.random.stateless_uniform([3, 5], seed), [SEEDS]
    ),
    'draws of a number that is not known': (
        lambda a, y, seed: tf.random.stateless_uniform(
            tf.shape(_minibatch(a, y)[0]), seed
        ),
        [A, LABELS, SEEDS],
    ),
    'draws of a shared seed': (
        lambda s: s * tf.random.stateless_uniform([2], [3, 4]), [S]
    ),
    'draws of another type': (
        lambda seed: tf.random.stateless_uniform([3], seed, dtype=tf.float64),
        [SEEDS],
    ),
    'draws of another distribution': (
        lambda seed: tf.random.stateless_normal([3], seed), [SEEDS]
    ),
    'draws in a loop': (
        lambda seed: tf.while_loop(
            lambda i, _: i < 3,
            lambda i, v: (i + 1, v + tf.random.stateless_uniform([2], seed)),
            (tf.constant(0), tf.zeros([2])),
        )[1],
        [SEEDS],
    ),
    'a new seed': (
        lambda seed: tf.random.experimental.stateless_fold_in(seed, 7), [SEEDS]
    ),
    'a known shape': (lambda a: tf.shape(a * 2) + tf.rank(a), [A]),
    'a new axis': (lambda a: tf.expand_dims(a, 1), [A]),
    'a new first axis': (lambda a: tf.expand_dims(a, 0), [A]),
    'a new last axis': (lambda a: tf.expand_dims(a, -1), [A]),
    'rows by a shared matrix': (
        lambda a: tf.matmul(a, SHARED, transpose_b=True), [A]
    ),
    'columns by a shared matrix': (
        lambda a: tf.matmul(a, SHARED, transpose_a=True), [A]
    ),
    'a shared matrix by columns': (
        lambda a: tf.matmul(SHARED, a, transpose_a=True), [A]
    ),
    'some rows by a shared matrix': (
        lambda a: tf.boolean_mask(a, a[:, 0] > -10) @ SHARED[:2], [A]
    ),
    'two matrices': (lambda a: tf.matmul(a, a, transpose_b=True), [A]),
    'batches of matrices': (lambda d, e: d @ e, [D, E]),
    'batches by shared ones': (lambda d: d @ E[0], [D]),
    'a bias': (lambda a, b: tf.nn.bias_add(a, b), [A, B]),
    'a shared bias': (lambda a: tf.nn.bias_add(a, SHARED[0]), [A]),
    'a bias of shared rows': (lambda b: tf.nn.bias_add(SHARED, b), [B]),
    'gradient of a bias': (_gradient_of_bias_add, [A, B]),
    'a loop': (
        lambda a, s: tf.while_loop(
            lambda i, _: i < 3, lambda i, v: (i + 1, v * s + a[i]),
            (tf.constant(0), tf.zeros([2])),
        )[1],
        [A, S],
    ),
}


def run_at_once(function, arguments):
  """The function of all rows, vectorised."""
  specs = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in arguments]

  @tf.function(input_signature=specs, autograph=False)
  def at_once(*stacked):
    def compute(rows):
      graph = tf.compat.v1.get_default_graph()
      before = len(graph.get_operations())
      result = function(*rows)
      converters.attach(graph.get_operations()[before:])
      return [result]

    return converters.vectorized_map(compute, stacked)

  (found,) = at_once(*arguments)
  return found


@pytest.mark.parametrize('name', CASES)
def test_rows(name):
  function, arguments = CASES[name]
  found = run_at_once(function, arguments)
  rows = zip(*arguments, strict=True)
  expected = [function(*map(tf.constant, row)) for row in rows]
  np.testing.assert_allclose(found, np.stack(expected), rtol=1e-6)


def test_draws_need_no_loop_over_the_rows(monkeypatch):
  """TensorFlow has no converter for them, and would loop."""
  looped = []
  fall_back = converters.pfor._fallback_converter

  def note(pfor_input, *arguments, **options):
    looped.append(pfor_input.op_type)
    return fall_back(pfor_input, *arguments, **options)

  monkeypatch.setattr(converters.pfor, '_fallback_converter', note)
  run_at_once(*CASES['draws'])
  assert looped == []
  run_at_once(*CASES['draws of another distribution'])
  assert looped == ['StatelessRandomNormalV2']


def test_a_label_that_is_no_class_is_refused():
  def compute(rows):
    with tf.GradientTape() as tape:
      tape.watch(rows[0])
      losses = tf.nn.sparse_softmax_cross_entropy_with_logits(rows[1], rows[0])
    slopes = tape.gradient(losses, rows[0])
    converters.attach(tf.compat.v1.get_default_graph().get_operations())
    return [slopes]

  at_once = tf.function(converters.vectorized_map, autograph=False)
  (found,) = at_once(compute, [tf.constant(A), tf.constant(LABELS)])
  assert np.isfinite(found).all()
  wrong = tf.constant(LABELS) + np.array([[0, 0, 0]] * 3 + [[0, 1, 0]])
  with pytest.raises(tf.errors.InvalidArgumentError, match='not in'):
    at_once(compute, [tf.constant(A), tf.cast(wrong, tf.int32)])


def test_fewer_operations_than_tensorflow():
  def count(vectorise):
    @tf.function(autograph=False)
    def at_once(a, b):
      return vectorise(a, b)

    specs = [tf.TensorSpec([None, *v.shape[1:]], v.dtype) for v in (A, B)]
    return len(at_once.get_concrete_function(*specs).graph.get_operations())

  def ours(a, b):
    def compute(rows):
      result = rows[0] + rows[1]
      converters.attach([result.op])
      return [result]

    return converters.vectorized_map(compute, [a, b])

  def tensorflows(a, b):
    return tf.vectorized_map(lambda rows: rows[0] + rows[1], [a, b])

  assert count(ours) < count(tensorflows) / 2


def test_notes_of_tensorflows_authors_are_hidden():
  """Gradients of convolutions, for example, are "to be fixed" there."""
  said = []
  handler = logging.Handler()
  handler.emit = lambda record: said.append(record.getMessage())
  images, slopes = tf.ones([2, 1, 4, 4, 1]), tf.ones([2, 1, 2, 2, 1])

  def gradient(row):
    return [
        tf.raw_ops.Conv2DBackpropFilter(
            input=row[0], filter_sizes=[3, 3, 1, 1], out_backprop=row[1],
            strides=[1, 1, 1, 1], padding='VALID',
        )
    ]

  logger = tf.get_logger()
  logger.addHandler(handler)
  try:
    (found,) = tf.function(converters.vectorized_map)(
        gradient, [images, slopes]
    )
    assert found.shape == [2, 3, 3, 1, 1] and not said
    logger.warning('Fix that!')
    assert said == ['Fix that!']
  finally:
    logger.removeHandler(handler)
