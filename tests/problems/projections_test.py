"""Projections against brute force and the property that defines them."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from fednest_tff import projections

QUICK = settings(
    deadline=None, derandomize=True, database=None, max_examples=40
)
VECTORS = st.lists(
    st.floats(-5, 5, allow_subnormal=False), min_size=1, max_size=5
).map(np.array)
TOTALS = st.floats(0.1, 4.0)


def _apply(project, v):
  return project(tf.constant(v, tf.float64)).numpy()


def _on_simplex_by_brute_force(v, total):
  """The nearest of all points with one set of positive entries each."""
  candidates = []
  for size in range(1, len(v) + 1):
    for support in itertools.combinations(range(len(v)), size):
      u = np.zeros(len(v))
      support = list(support)
      u[support] = v[support] - (v[support].sum() - total) / size
      if np.all(u >= 0):
        candidates.append(u)
  return min(candidates, key=lambda u: np.linalg.norm(u - v))


@QUICK
@given(VECTORS, TOTALS)
def test_simplex_is_the_nearest_point_by_brute_force(v, total):
  projected = _apply(projections.simplex(total), v)
  expected = _on_simplex_by_brute_force(v, total)
  np.testing.assert_allclose(projected, expected, rtol=0, atol=1e-12)
  assert np.all(projected >= 0)
  np.testing.assert_allclose(projected.sum(), total, rtol=1e-12)


@QUICK
@given(VECTORS, st.floats(-3, 3), st.floats(0, 3))
def test_box_and_half_line_cut_off(v, low, width):
  high = low + width
  projected = _apply(projections.box(low, high), v)
  np.testing.assert_array_equal(projected, np.minimum(np.maximum(v, low), high))
  np.testing.assert_array_equal(
      _apply(projections.non_negative(), v), np.where(v > 0, v, 0)
  )


@QUICK
@given(VECTORS, st.floats(0.1, 4))
def test_ball_shortens_what_is_too_long(v, radius):
  projected = _apply(projections.ball(radius), v)
  length = np.linalg.norm(v)
  if length <= radius:
    np.testing.assert_allclose(projected, v, rtol=1e-14)
  else:
    np.testing.assert_allclose(projected, radius * v / length, rtol=1e-12)


SETS = {
    'simplex': projections.simplex(1.5),
    'box': projections.box(-0.5, 0.8),
    'ball': projections.ball(1.2),
    'non_negative': projections.non_negative(),
}


@pytest.mark.parametrize('name', SETS)
def test_a_projection_is_the_nearest_point(name):
  """<v - P v, u - P v> <= 0 for all feasible u, and P P v = P v."""
  project, rng = SETS[name], np.random.default_rng(0)
  points = 3 * rng.normal(size=(30, 4))
  feasible = [_apply(project, v) for v in points]
  for v, projected in zip(points, feasible, strict=True):
    np.testing.assert_allclose(
        _apply(project, projected), projected, rtol=0, atol=1e-14
    )
    for u in feasible:
      assert (v - projected) @ (u - projected) <= 1e-12
  assert any(
      np.linalg.norm(u - v) > 0.1
      for u, v in zip(feasible, points, strict=True)
  )


def test_simplex_is_along_the_last_axis_of_each_tensor():
  rng = np.random.default_rng(1)
  a = {'rows': 2 * rng.normal(size=(2, 3, 4)), 'one': (rng.normal(size=5),)}
  projected = projections.simplex()(tf.nest.map_structure(tf.constant, a))
  tf.nest.assert_same_structure(projected, a)
  for i, j in np.ndindex(2, 3):
    expected = _on_simplex_by_brute_force(a['rows'][i, j], 1.0)
    np.testing.assert_allclose(projected['rows'][i, j], expected, atol=1e-14)
  expected = _on_simplex_by_brute_force(a['one'][0], 1.0)
  np.testing.assert_allclose(projected['one'][0], expected, atol=1e-14)


def test_the_ball_is_over_all_tensors_together():
  a = {'x': tf.constant([3.0, 0.0]), 'y': (tf.constant(4.0, tf.float64),)}
  projected = projections.ball(2.5)(a)
  np.testing.assert_allclose(projected['x'], [1.5, 0.0], rtol=1e-6)
  np.testing.assert_allclose(projected['y'][0], 2.0, rtol=1e-12)
  assert projected['x'].dtype == tf.float32
  assert projected['y'][0].dtype == tf.float64


@pytest.mark.parametrize('name', SETS)
@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
@pytest.mark.parametrize('traced', [False, True])
def test_types_and_shapes_stay(name, dtype, traced):
  a = {'a': tf.constant([[1.0, -2.0], [0.3, 0.4]], dtype)}
  project = tf.function(SETS[name]) if traced else SETS[name]
  projected = project(a)['a']
  assert projected.dtype == dtype
  assert projected.shape == [2, 2]
  np.testing.assert_allclose(
      projected,
      SETS[name](tf.nest.map_structure(lambda t: tf.cast(t, tf.float64), a))[
          'a'
      ],
      rtol=1e-6,
  )


def test_simplex_of_large_numbers_in_single_precision():
  """Where the numbers are so large that adding 1 to them changes nothing."""
  for v in ([1e9, 0.0], [-1e9, -1e9 - 1000], [3e8, -3e8]):
    projected = projections.simplex()(tf.constant(v, tf.float32))
    np.testing.assert_array_equal(projected, [1.0, 0.0])


@pytest.mark.parametrize('name', SETS)
@pytest.mark.parametrize('traced', [False, True])
def test_what_is_not_finite_is_not_hidden(name, traced):
  """The server's check, which has a better message, must be able to fail."""
  project = tf.function(SETS[name]) if traced else SETS[name]
  v = tf.constant([1.0, np.nan, 0.5])
  assert np.any(np.isnan(project(v)))


@pytest.mark.parametrize(
    ('build', 'name'),
    [
        (lambda: projections.simplex(0.0), 'total'),
        (lambda: projections.simplex(-1.0), 'total'),
        (lambda: projections.simplex(np.inf), 'total'),
        (lambda: projections.simplex(np.nan), 'total'),
        (lambda: projections.box(1.0, 0.5), 'low'),
        (lambda: projections.box(np.nan, 1.0), 'low'),
        (lambda: projections.ball(0.0), 'radius'),
        (lambda: projections.ball(-2.0), 'radius'),
        (lambda: projections.ball(np.nan), 'radius'),
        (lambda: projections.ball(np.inf), 'radius'),
    ],
)
def test_empty_and_endless_sets_are_refused(build, name):
  with pytest.raises(ValueError, match=f'`{name}` must'):
    build()
