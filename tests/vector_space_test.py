"""Vector-space operations against NumPy on the concatenated leaves."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from fednest_tff import vector_space

QUICK = settings(
    deadline=None, derandomize=True, database=None, max_examples=25
)

Pair = collections.namedtuple('Pair', ['first', 'second'])

LEAVES = st.builds(
    tf.TensorSpec,
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([tf.float32, tf.float64]),
)


def _containers(children):
  return st.one_of(
      st.dictionaries(st.sampled_from('abc'), children, max_size=3),
      st.lists(children, max_size=3),
      st.lists(children, max_size=3).map(tuple),
      st.builds(Pair, children, children),
  )


# A structure of specs, which stands for the space of vectors of that structure.
SPACES = st.recursive(LEAVES, _containers, max_leaves=5)
SEEDS = st.integers(0, 2**16)
FACTORS = st.floats(-10, 10)


def _vectors(space, seed, count):
  rng = np.random.default_rng(seed)
  return [
      tf.nest.map_structure(
          lambda spec: tf.constant(rng.normal(size=spec.shape), spec.dtype),
          space,
      )
      for _ in range(count)
  ]


def _flat(a):
  leaves = [np.ravel(leaf).astype(np.float64) for leaf in tf.nest.flatten(a)]
  return np.concatenate([np.zeros(0), *leaves])


def _assert_in_space(a, space):
  tf.nest.assert_same_structure(a, space)
  leaves = zip(tf.nest.flatten(a), tf.nest.flatten(space), strict=True)
  for leaf, spec in leaves:
    assert leaf.shape == spec.shape
    assert leaf.dtype == spec.dtype


def _close(actual, expected, space):
  exact = all(spec.dtype == tf.float64 for spec in tf.nest.flatten(space))
  tolerance = 1e-12 if exact else 2e-5
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@QUICK
@given(SPACES, SEEDS, FACTORS)
def test_linear_operations_are_those_of_the_concatenation(space, seed, c):
  a, b = _vectors(space, seed, 2)
  for actual, expected in (
      (vector_space.add(a, b), _flat(a) + _flat(b)),
      (vector_space.subtract(a, b), _flat(a) - _flat(b)),
      (vector_space.scale(c, a), c * _flat(a)),
      (vector_space.add_scaled(a, c, b), _flat(a) + c * _flat(b)),
  ):
    _assert_in_space(actual, space)
    _close(_flat(actual), expected, space)


@QUICK
@given(SPACES, SEEDS, FACTORS, st.sampled_from([tf.float32, tf.float64]))
def test_a_scalar_tensor_of_either_type_scales(space, seed, c, dtype):
  a, b = _vectors(space, seed, 2)
  factor = tf.constant(c, dtype)
  value = factor.numpy().astype(np.float64)
  scaled = vector_space.scale(factor, a)
  total = vector_space.add_scaled(a, factor, b)
  _assert_in_space(scaled, space)
  _assert_in_space(total, space)
  _close(_flat(scaled), value * _flat(a), space)
  _close(_flat(total), _flat(a) + value * _flat(b), space)


@QUICK
@given(SPACES, SEEDS, FACTORS, FACTORS)
def test_scaling_is_linear(space, seed, c, d):
  a, b = _vectors(space, seed, 2)
  left = vector_space.scale(c, vector_space.add_scaled(a, d, b))
  right = vector_space.add(
      vector_space.scale(c, a), vector_space.scale(c * d, b)
  )
  magnitude = 1 + abs(c) * (1 + abs(d))
  _close(_flat(left) / magnitude, _flat(right) / magnitude, space)


@QUICK
@given(SPACES, SEEDS, FACTORS)
def test_dot_is_symmetric_and_bilinear(space, seed, c):
  a, b, e = _vectors(space, seed, 3)
  dot = vector_space.dot
  value = dot(a, b)
  assert value.shape == []
  assert value.dtype == vector_space.scalar_dtype(space)
  _close(value, np.dot(_flat(a), _flat(b)), space)
  assert dot(b, a).numpy() == value.numpy()
  magnitude = (1 + abs(c)) * (1 + len(_flat(a)))
  left = dot(vector_space.add_scaled(a, c, e), b) / magnitude
  right = (value + c * dot(e, b)) / magnitude
  _close(left, right, space)


@QUICK
@given(SPACES, SEEDS)
def test_norm_is_that_of_the_concatenation(space, seed):
  (a,) = _vectors(space, seed, 1)
  expected = np.linalg.norm(_flat(a))
  _close(vector_space.norm(a), expected, space)
  _close(vector_space.squared_norm(a), expected**2, space)


@QUICK
@given(SPACES, SEEDS)
def test_zeros_are_neutral(space, seed):
  (a,) = _vectors(space, seed, 1)
  for zero in (vector_space.zeros_like(a), vector_space.zeros_like(space)):
    _assert_in_space(zero, space)
    assert not np.any(_flat(zero))
    np.testing.assert_array_equal(_flat(vector_space.add(a, zero)), _flat(a))


@QUICK
@given(SPACES, SEEDS, st.booleans())
def test_where_selects_a_whole_structure(space, seed, condition):
  a, b = _vectors(space, seed, 2)
  selected = vector_space.where(tf.constant(condition), a, b)
  _assert_in_space(selected, space)
  np.testing.assert_array_equal(_flat(selected), _flat(a if condition else b))


@QUICK
@given(SPACES, SEEDS)
def test_specs_and_tensors(space, seed):
  (a,) = _vectors(space, seed, 1)
  arrays = tf.nest.map_structure(lambda t: t.numpy(), a)
  _assert_in_space(vector_space.tensors(arrays), space)
  for value in (a, arrays):
    spec = vector_space.specs(value)
    tf.nest.assert_same_structure(spec, space)
    assert tf.nest.flatten(spec) == tf.nest.flatten(space)


def test_tensors_takes_python_numbers():
  value = vector_space.tensors({'a': 1.5, 'b': (np.float64(2.0), [1.0])})
  assert value['a'].dtype == tf.float32
  assert value['b'][0].dtype == tf.float64
  assert all(tf.is_tensor(leaf) for leaf in tf.nest.flatten(value))


@QUICK
@given(FACTORS)
def test_python_floats_keep_their_double_digits(c):
  one = {'a': tf.constant(1.0, tf.float64), 'b': tf.zeros([2], tf.float64)}
  assert vector_space.scale(c, one)['a'].numpy() == c
  zero = vector_space.zeros_like(one)
  assert vector_space.add_scaled(zero, c, one)['a'].numpy() == c
  for value in (c, np.float64(c), tf.constant(c, tf.float64)):
    assert vector_space.scalar(value, tf.float64).numpy() == c
  assert vector_space.scalar(c, tf.float32).numpy() == np.float32(c)
  assert vector_space.scalar(3, tf.float64).numpy() == 3.0


def test_a_tenth_does_not_go_through_single_precision():
  assert float(np.float32(0.1)) != 0.1
  ten = tf.constant(10.0, tf.float64)
  assert vector_space.scale(0.1, ten).numpy() == 1.0
  assert vector_space.add_scaled(ten, -0.1, ten).numpy() == 9.0
  assert vector_space.scalar(0.1, tf.float64).numpy() == 0.1


def test_double_digits_survive_beside_single_precision_leaves():
  a = (tf.constant(1.0, tf.float32), tf.constant(1e-5, tf.float64))
  assert vector_space.dot(a, a).numpy() == 1.0 + 1e-10
  assert vector_space.dot(a[::-1], a[::-1]).numpy() == 1.0 + 1e-10


def test_half_precision_is_summed_in_single():
  a = {'a': tf.constant([300.0, 300.0], tf.float16)}
  value = vector_space.squared_norm(a)
  assert value.dtype == tf.float32
  assert value.numpy() == 180000.0  # Infinite in float16.
  assert vector_space.scale(0.5, a)['a'].dtype == tf.float16


@pytest.mark.parametrize(
    ('dtypes', 'expected'),
    [
        ((), tf.float32),
        ((tf.float32,), tf.float32),
        ((tf.float16, tf.bfloat16), tf.float32),
        ((tf.float64,), tf.float64),
        ((tf.float32, tf.float64), tf.float64),
        ((tf.float64, tf.float16), tf.float64),
    ],
)
def test_scalar_dtype(dtypes, expected):
  value = [tf.zeros([2], dtype) for dtype in dtypes]
  assert vector_space.scalar_dtype(value) == expected
  assert vector_space.scalar_dtype(vector_space.specs(value)) == expected


@pytest.mark.parametrize('empty', [(), [], {}, {'a': (), 'b': []}])
def test_empty_structures_form_the_null_space(empty):
  assert vector_space.add(empty, empty) == empty
  assert vector_space.subtract(empty, empty) == empty
  assert vector_space.scale(2.0, empty) == empty
  assert vector_space.add_scaled(empty, 2.0, empty) == empty
  assert vector_space.zeros_like(empty) == empty
  assert vector_space.where(tf.constant(True), empty, empty) == empty
  assert vector_space.check_finite(empty, 'never') == empty
  for zero in (vector_space.dot(empty, empty), vector_space.norm(empty)):
    assert zero.dtype == tf.float32
    assert zero.shape == []
    assert zero.numpy() == 0.0


@QUICK
@given(SPACES, SEEDS)
def test_check_finite_passes_finite_values(space, seed):
  (a,) = _vectors(space, seed, 1)
  checked = vector_space.check_finite(a, 'never')
  _assert_in_space(checked, space)
  np.testing.assert_array_equal(_flat(checked), _flat(a))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
@pytest.mark.parametrize('traced', [False, True])
def test_check_finite_fails_with_its_message(bad, dtype, traced):
  def check(value):
    return vector_space.check_finite(value, 'The p of FedIHGP is lost.')

  value = {'a': tf.zeros([2]), 'b': (tf.constant([1.0, bad, 2.0], dtype),)}
  with pytest.raises(
      tf.errors.InvalidArgumentError, match='The p of FedIHGP is lost.'
  ):
    (tf.function(check) if traced else check)(value)


def test_structures_must_agree():
  a = {'a': tf.zeros([2])}
  b = (tf.zeros([2]),)
  for operation in (vector_space.add, vector_space.subtract, vector_space.dot):
    with pytest.raises((TypeError, ValueError)):
      operation(a, b)
