"""What the five builders make of their arguments."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.local import derivatives
from tests.helpers.small_problems import (
    ALL,
    BATCH,
    SPEC,
    bilevel,
    compositional,
    loss,
    minimax,
    personal,
    single_level,
)

Pair = collections.namedtuple('Pair', ['first', 'second'])

STRUCTURES = [
    tf.constant([1.0, 2.0]),
    tf.constant(1.0, tf.float64),
    {'w': tf.ones([2, 3]), 'b': tf.ones([3])},
    (tf.ones([2], tf.float64), [tf.ones([1], tf.float32)]),
    Pair(tf.ones([2]), {'a': tf.ones([])}),
]


def _total(*structures):
  leaves = tf.nest.flatten(structures)
  return sum(tf.reduce_sum(tf.cast(leaf, tf.float64)) ** 2 for leaf in leaves)


@pytest.mark.parametrize('value', STRUCTURES)
def test_variables_of_any_structure(value):
  def build(x, y):
    def loss(x, y, batch):
      return _total(x, y) * tf.reduce_mean(tf.cast(batch['a'], tf.float64))

    return bilevel(
        outer_loss=loss,
        inner_loss=loss,
        init_outer=lambda seed: x,
        init_inner=lambda seed: y,
    )

  expected = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, t.dtype), value
  )
  for problem, spec in (
      (build(value, tf.ones([2])), 'outer_spec'),
      (build(tf.ones([2]), value), 'inner_spec'),
  ):
    actual = getattr(problem, spec)
    tf.nest.assert_same_structure(actual, expected)
    assert tf.nest.flatten(actual) == tf.nest.flatten(expected)
    wide = any(t.dtype == tf.float64 for t in tf.nest.flatten(value))
    assert problem.scalar_dtype == (tf.float64 if wide else tf.float32)


@pytest.mark.parametrize('value', STRUCTURES)
def test_inner_maps_of_any_structure(value):
  problem = compositional(
      outer_loss=lambda y, batch: _total(y),
      inner_map=lambda x, batch: tf.nest.map_structure(lambda t: 2 * t, x),
      init_outer=lambda seed: value,
      init_inner=lambda seed: value,
  )
  tf.nest.assert_same_structure(problem.inner_spec, value)
  loss = problem.inner_loss(value, value, BATCH)
  squares = [np.sum(np.square(t)) for t in tf.nest.flatten(value)]
  np.testing.assert_allclose(loss, sum(squares) / 2, rtol=1e-6)


def test_variables_may_be_numbers_and_arrays():
  problem = bilevel(
      init_outer=lambda seed: 1.0, init_inner=lambda seed: np.ones(2, 'float32')
  )
  assert problem.outer_spec == tf.TensorSpec([], tf.float32)
  assert problem.inner_spec == tf.TensorSpec([2], tf.float32)


def test_values_of_variables_may_depend_on_the_seed():
  problem = bilevel(init_outer=lambda seed: tf.ones([2]) * seed)
  assert problem.outer_spec == tf.TensorSpec([2], tf.float32)


def test_kinds():
  for build, kind, has_inner, is_implicit in (
      (bilevel, 'bilevel', True, True),
      (minimax, 'minimax', True, False),
      (compositional, 'compositional', True, True),
      (single_level, 'single_level', False, False),
      (personal, 'personal', True, True),
  ):
    problem = build()
    assert problem.kind == kind
    assert problem.has_inner == has_inner
    assert problem.is_implicit == is_implicit
    assert problem.inner_is_personal == (kind == 'personal')
    assert problem.element_spec == SPEC
    assert (problem.inner_spec == ()) != has_inner


def test_losses_are_passed_on():
  x, y = tf.constant([1.0, -2.0]), tf.constant([0.5, 2.0])
  first = bilevel(inner_loss=lambda x, y, batch: 3 * loss(x, y, batch))
  expected = np.mean(BATCH['a'] @ np.array([[0.5], [-4.0]]))
  np.testing.assert_allclose(first.outer_loss(x, y, BATCH), expected)
  np.testing.assert_allclose(first.inner_loss(x, y, BATCH), 3 * expected)
  single = single_level()
  np.testing.assert_allclose(
      single.outer_loss(x, (), BATCH), np.mean(BATCH['a'] @ np.c_[[1.0, -2.0]])
  )
  assert single.init_inner(0) == ()


def test_the_representation_is_declared_or_the_batch_itself():
  x = tf.constant([1.0, -2.0])
  assert bilevel().representation(x, BATCH) is BATCH
  assert not bilevel().has_representation

  def representation(x, batch):
    return batch['a'] * x

  def of_features(x, y, features):
    return tf.reduce_mean(tf.linalg.matvec(features, y))

  problem = bilevel(
      outer_loss=of_features,
      inner_loss=of_features,
      representation=representation,
  )
  assert problem.has_representation
  y = tf.constant([0.5, 2.0])
  features = problem.representation(x, BATCH)
  np.testing.assert_allclose(
      problem.inner_loss(x, y, features), loss(x, y, BATCH)
  )


def test_the_inner_loss_of_minimax_is_minus_the_loss():
  problem = minimax()
  x, y = tf.constant([1.0, -2.0]), tf.constant([0.5, 2.0])
  value = loss(x, y, BATCH).numpy()
  assert value != 0
  assert problem.outer_loss(x, y, BATCH).numpy() == value
  assert problem.inner_loss(x, y, BATCH).numpy() == -value


def test_the_inner_loss_of_compositional_is_half_a_squared_distance():
  problem = compositional()
  x, y = tf.constant([1.0, -2.0]), tf.constant([0.5, 2.0])
  r = np.array([1.0, -2.0]) * np.mean(BATCH['a'], axis=0)
  residual = y.numpy() - r
  np.testing.assert_allclose(
      problem.inner_loss(x, y, BATCH), np.sum(residual**2) / 2, rtol=1e-6
  )

  def inner_loss(y):
    return problem.inner_loss(x, y, BATCH)

  np.testing.assert_allclose(
      derivatives.gradient(inner_loss, y), residual, rtol=1e-6
  )
  v = tf.constant([3.0, -1.0])
  np.testing.assert_allclose(
      derivatives.hessian_vector_product(inner_loss, y, v), v, rtol=1e-6
  )
  # -grad^2_xy g p = Jr(x)' p.
  mixed = derivatives.mixed_product(
      lambda x, y: problem.inner_loss(x, y, BATCH), x, y, v
  )
  np.testing.assert_allclose(
      -mixed, np.mean(BATCH['a'], axis=0) * v, rtol=1e-6
  )
  assert problem.outer_loss(x, y, BATCH).numpy() == 2.5


@pytest.mark.parametrize('build', ALL)
def test_without_projections_the_sets_are_whole_spaces(build):
  problem = build()
  assert problem.project_outer is vector_space.identity
  assert problem.project_inner is vector_space.identity
