"""What the four builders make of their arguments, and what they refuse."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.local import derivatives
from fednest_tff.problems import splits

QUICK = settings(
    deadline=None, derandomize=True, database=None, max_examples=30
)

Pair = collections.namedtuple('Pair', ['first', 'second'])

SPEC = {
    'a': tf.TensorSpec([2], tf.float32),
    'b': tf.TensorSpec([], tf.int64),
}
BATCH = {
    'a': tf.constant([[1.0, 2.0], [3.0, 5.0]]),
    'b': tf.constant([0, 1], tf.int64),
}


def _ones(seed):
  del seed
  return tf.ones([2])


def _loss(x, y, batch):
  return tf.reduce_mean(tf.linalg.matvec(batch['a'], x * y))


def _bilevel(**changes):
  arguments = dict(
      outer_loss=_loss,
      inner_loss=_loss,
      init_outer=_ones,
      init_inner=_ones,
      element_spec=SPEC,
  )
  return fednest_tff.bilevel(**(arguments | changes))


def _minimax(**changes):
  arguments = dict(
      loss=_loss, init_outer=_ones, init_inner=_ones, element_spec=SPEC
  )
  return fednest_tff.minimax(**(arguments | changes))


def _compositional(**changes):
  arguments = dict(
      outer_loss=lambda y, batch: tf.reduce_sum(y),
      inner_map=lambda x, batch: x * tf.reduce_mean(batch['a'], axis=0),
      init_outer=_ones,
      init_inner=_ones,
      element_spec=SPEC,
  )
  return fednest_tff.compositional(**(arguments | changes))


def _single_level(**changes):
  arguments = dict(
      loss=lambda x, batch: tf.reduce_mean(tf.linalg.matvec(batch['a'], x)),
      init_outer=_ones,
      element_spec=SPEC,
  )
  return fednest_tff.single_level(**(arguments | changes))


ALL = [_bilevel, _minimax, _compositional, _single_level]
WITH_INNER = ALL[:3]
# Each loss: its builder and its argument.
LOSSES = [
    (_bilevel, 'outer_loss'),
    (_bilevel, 'inner_loss'),
    (_minimax, 'loss'),
    (_compositional, 'outer_loss'),
    (_single_level, 'loss'),
]


# Splits.


def _examples(n):
  return {
      'a': tf.tile(tf.range(n, dtype=tf.float32)[:, tf.newaxis], [1, 2]),
      'b': [tf.range(n, dtype=tf.int64)],
  }


def _ids(part):
  rows = part['b'][0].numpy().tolist()
  np.testing.assert_array_equal(part['a'], np.tile(np.c_[rows], [1, 2]))
  return rows


@QUICK
@given(st.integers(2, 40), st.floats(0.01, 0.99))
def test_a_fraction_divides_the_examples(n, fraction):
  inner, outer = map(_ids, splits.to_split(fraction)(_examples(n)))
  assert sorted(inner + outer) == list(range(n))
  assert inner and outer
  assert abs(len(inner) - min(max(fraction * n, 1), n - 1)) <= 0.5 + 1e-4


@pytest.mark.parametrize(
    ('n', 'fraction', 'num_inner'),
    [(10, 0.3, 3), (10, 0.5, 5), (10, 0.96, 9), (10, 0.01, 1), (300, 0.8, 240)],
)
def test_sizes_of_a_fraction(n, fraction, num_inner):
  inner, outer = splits.to_split(fraction)(_examples(n))
  assert len(_ids(inner)) == num_inner
  assert len(_ids(outer)) == n - num_inner


@pytest.mark.parametrize('fraction', [0.01, 0.5, 0.99])
def test_two_examples_serve_one_level_each(fraction):
  inner, outer = map(_ids, splits.to_split(fraction)(_examples(2)))
  assert len(inner) == len(outer) == 1
  assert inner != outer


@pytest.mark.parametrize('fraction', [0.01, 0.5, 0.99])
def test_one_example_serves_both_levels(fraction):
  inner, outer = map(_ids, splits.to_split(fraction)(_examples(1)))
  assert inner == outer == [0]


def test_a_fraction_is_fixed_and_shuffled():
  split = splits.to_split(0.5)
  inner, outer = map(_ids, split(_examples(40)))
  assert list(map(_ids, split(_examples(40)))) == [inner, outer]
  assert list(map(_ids, splits.to_split(0.5)(_examples(40)))) == [inner, outer]
  # Examples often come sorted by label: neither part is one end of them.
  for part in (inner, outer):
    assert part != sorted(part)
    assert 5 <= sum(i < 20 for i in part) <= 15
  other = list(map(_ids, splits.by_fraction(0.5, seed=1)(_examples(40))))
  assert other != [inner, outer]


def test_a_fraction_inside_a_tf_function_of_unknown_length():
  split = splits.to_split(0.3)
  signature = {
      'a': tf.TensorSpec([None, 2]), 'b': [tf.TensorSpec([None], tf.int64)]
  }  # fmt: skip
  traced = tf.function(split, input_signature=[signature])
  for n in (1, 2, 11):
    assert list(map(_ids, traced(_examples(n)))) == list(
        map(_ids, split(_examples(n)))
    )


def test_a_fraction_inside_a_plain_graph():
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    examples = tf.compat.v1.placeholder_with_default(tf.range(11), [None])
    inner, outer = session.run(splits.to_split(0.3)(examples))
  eager = splits.to_split(0.3)(tf.range(11))
  np.testing.assert_array_equal(inner, eager[0])
  np.testing.assert_array_equal(outer, eager[1])


def test_same_gives_all_to_both():
  inner, outer = splits.to_split('same')(_examples(3))
  assert _ids(inner) == _ids(outer) == [0, 1, 2]


def test_a_function_splits_as_it_likes():
  def split(examples):
    return (
        tf.nest.map_structure(lambda t: t[:1], examples),
        tf.nest.map_structure(lambda t: t[1:], examples),
    )

  problem = _bilevel(split=split)
  inner, outer = problem.split(_examples(4))
  assert _ids(inner) == [0]
  assert _ids(outer) == [1, 2, 3]


def test_default_splits():
  inner, outer = _bilevel().split(_examples(10))
  assert len(_ids(inner)) == len(_ids(outer)) == 5
  for build in (_minimax, _compositional, _single_level):
    inner, outer = build().split(_examples(10))
    assert _ids(inner) == _ids(outer) == list(range(10))


@pytest.mark.parametrize(
    'bad', [0.0, 1.0, -0.5, 1.5, float('nan'), 1, 'half', None, (0.5, 0.5)]
)
@pytest.mark.parametrize('build', WITH_INNER)
def test_bad_splits_are_refused(build, bad):
  with pytest.raises(ValueError, match='`split`'):
    build(split=bad)


@pytest.mark.parametrize(
    'bad',
    [
        lambda examples: examples,
        lambda examples: [examples, examples],
        lambda examples: (examples,) * 3,
        lambda examples: None,
        lambda examples: (examples, None),
        lambda examples: (examples, examples['a']),
        lambda examples: (examples['a'], examples),
        lambda examples: ({'a': examples['a']}, examples),
        lambda examples: (examples, examples | {'a': examples['a'][:, :1]}),
        lambda examples: (
            examples, examples | {'b': tf.cast(examples['b'], tf.int32)}
        ),
        lambda examples: (examples | {'a': examples['a'][0]}, examples),
    ],
)  # fmt: skip
@pytest.mark.parametrize('build', WITH_INNER)
def test_splits_of_another_structure_are_refused(build, bad):
  with pytest.raises(ValueError, match='`split` must return'):
    build(split=bad)


@pytest.mark.parametrize(
    'bad',
    [
        # One number per example, of which one is left without its axis.
        lambda examples: (examples | {'b': examples['b'][0]}, examples),
        # Leaves of different lengths.
        lambda examples: (examples, examples | {'b': examples['b'][:1]}),
    ],
)
def test_splits_whose_leaves_lose_their_rows_are_refused(bad):
  with pytest.raises(ValueError, match='`split` must return'):
    _bilevel(split=bad)


def test_a_split_may_leave_a_level_without_examples():
  def split(examples):
    return examples, tf.nest.map_structure(lambda t: t[:0], examples)

  assert _bilevel(split=split).split is split


# Losses.


@pytest.mark.parametrize(('build', 'name'), LOSSES)
@pytest.mark.parametrize(
    'bad',
    [
        tf.zeros([2]),
        tf.zeros([1]),
        tf.constant(1),
        tf.constant(True),
        tf.constant('loss'),
    ],
    ids=['vector', 'one row', 'integer', 'boolean', 'text'],
)
def test_losses_that_are_no_float_scalar_are_refused(build, name, bad):
  with pytest.raises(ValueError, match=f'`{name}` must return a float scalar'):
    build(**{name: lambda *arguments: bad})


@pytest.mark.parametrize(('build', 'name'), LOSSES)
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_losses_that_are_not_finite_at_the_start_are_refused(build, name, bad):
  with pytest.raises(ValueError, match=f'`{name}` is .* must be finite'):
    build(**{name: lambda *arguments: tf.constant(bad)})


@pytest.mark.parametrize(
    ('build', 'name'),
    [
        *LOSSES,
        *((build, 'init_outer') for build in ALL),
        *((build, 'init_inner') for build in WITH_INNER),
        (_compositional, 'inner_map'),
        (_bilevel, 'representation'),
        (_minimax, 'representation'),
    ],
)
@pytest.mark.parametrize('bad', [None, {'a': None}])
def test_a_forgotten_result_is_refused_by_name(build, name, bad):
  with pytest.raises(ValueError, match=f'`{name}`'):
    build(**{name: lambda *arguments: bad})


# Variables.


def _bad_variables(name):
  builders = ALL if name == 'init_outer' else WITH_INNER
  return [(build, name) for build in builders]


VARIABLES = _bad_variables('init_outer') + _bad_variables('init_inner')


@pytest.mark.parametrize(('build', 'name'), VARIABLES)
@pytest.mark.parametrize('empty', [(), {}, {'a': []}])
def test_empty_variables_are_refused(build, name, empty):
  with pytest.raises(ValueError, match=f'`{name}` returned an empty'):
    build(**{name: lambda seed: empty})


@pytest.mark.parametrize(('build', 'name'), VARIABLES)
@pytest.mark.parametrize('dtype', [tf.int32, tf.bool, tf.string, tf.complex64])
def test_variables_that_are_no_floats_are_refused(build, name, dtype):
  value = {'a': tf.ones([2]), 'b': tf.zeros([2], dtype)}
  with pytest.raises(ValueError, match=f'`{name}` .* float.*{dtype.name}'):
    build(**{name: lambda seed: value})


@pytest.mark.parametrize(('build', 'name'), VARIABLES)
@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_variables_that_are_not_finite_are_refused(build, name, bad):
  value = tf.constant([1.0, bad])
  with pytest.raises(ValueError, match=f'`{name}` .* not finite'):
    build(**{name: lambda seed: value})


@pytest.mark.parametrize(('build', 'name'), VARIABLES)
@pytest.mark.parametrize(
    'other',
    [
        tf.ones([3]),
        tf.ones([2], tf.float64),
        (tf.ones([2]),),
        {'a': tf.ones([2])},
        (tf.ones([2]), tf.ones([2])),
    ],
    ids=['shape', 'type', 'tuple', 'dict', 'leaves'],
)
def test_structures_that_depend_on_the_seed_are_refused(build, name, other):
  with pytest.raises(ValueError, match=f'`{name}` must return the same'):
    build(**{name: lambda seed: tf.ones([2]) if seed == 0 else other})


# The inner map.


@pytest.mark.parametrize(
    'bad',
    [
        lambda x, batch: (x,),
        lambda x, batch: {'a': x},
        lambda x, batch: x[:1],
        lambda x, batch: tf.reduce_sum(x),
        lambda x, batch: x * batch['a'],
        lambda x, batch: tf.cast(x, tf.float64),
    ],
    ids=['tuple', 'dict', 'shape', 'scalar', 'rows', 'type'],
)
def test_inner_maps_of_another_structure_are_refused(bad):
  with pytest.raises(ValueError, match='`inner_map` must return the structure'):
    _compositional(inner_map=bad)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_inner_maps_that_are_not_finite_are_refused(bad):
  with pytest.raises(ValueError, match='`inner_map` is not finite'):
    _compositional(inner_map=lambda x, batch: x * bad)


# The representation and the examples.


@pytest.mark.parametrize('build', [_bilevel, _minimax])
@pytest.mark.parametrize(
    'bad',
    [
        lambda x, batch: tf.reduce_mean(batch['a']),
        lambda x, batch: tf.reduce_mean(batch['a'], axis=0, keepdims=True),
        lambda x, batch: batch | {'c': x[0]},
        lambda x, batch: tf.tile(batch['a'], [2, 1]),
    ],
)
def test_representations_that_lose_the_rows_are_refused(build, bad):
  with pytest.raises(ValueError, match='`representation` must keep'):
    build(representation=bad)


@pytest.mark.parametrize('build', ALL)
@pytest.mark.parametrize('empty', [(), {}, [], {'a': ()}])
def test_empty_element_specs_are_refused(build, empty):
  with pytest.raises(ValueError, match='`element_spec` is empty'):
    build(element_spec=empty)


@pytest.mark.parametrize('build', ALL)
@pytest.mark.parametrize('shape', [None, [None], [None, 2], [2, None]])
def test_element_specs_of_unknown_shape_are_refused(build, shape):
  spec = SPEC | {'a': tf.TensorSpec(shape, tf.float32)}
  with pytest.raises(ValueError, match='`element_spec` .* known'):
    build(element_spec=spec)


@pytest.mark.parametrize('build', ALL)
@pytest.mark.parametrize(
    'bad',
    [None, 3, tf.float32, tf.RaggedTensorSpec([None]), tf.zeros([2])],
    ids=['none', 'number', 'type', 'ragged', 'tensor'],
)
def test_element_specs_of_other_things_are_refused(build, bad):
  with pytest.raises(ValueError, match='`element_spec` must be'):
    build(element_spec=SPEC | {'a': bad})


# What is accepted.


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

    return _bilevel(
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
  problem = _compositional(
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
  problem = _bilevel(
      init_outer=lambda seed: 1.0, init_inner=lambda seed: np.ones(2, 'float32')
  )
  assert problem.outer_spec == tf.TensorSpec([], tf.float32)
  assert problem.inner_spec == tf.TensorSpec([2], tf.float32)


def test_values_of_variables_may_depend_on_the_seed():
  problem = _bilevel(init_outer=lambda seed: tf.ones([2]) * seed)
  assert problem.outer_spec == tf.TensorSpec([2], tf.float32)


def test_kinds():
  for build, kind, has_inner, is_implicit in (
      (_bilevel, 'bilevel', True, True),
      (_minimax, 'minimax', True, False),
      (_compositional, 'compositional', True, True),
      (_single_level, 'single_level', False, False),
  ):
    problem = build()
    assert problem.kind == kind
    assert problem.has_inner == has_inner
    assert problem.is_implicit == is_implicit
    assert problem.element_spec == SPEC
    assert (problem.inner_spec == ()) != has_inner


def test_losses_are_passed_on():
  x, y = tf.constant([1.0, -2.0]), tf.constant([0.5, 2.0])
  first = _bilevel(inner_loss=lambda x, y, batch: 3 * _loss(x, y, batch))
  expected = np.mean(BATCH['a'] @ np.array([[0.5], [-4.0]]))
  np.testing.assert_allclose(first.outer_loss(x, y, BATCH), expected)
  np.testing.assert_allclose(first.inner_loss(x, y, BATCH), 3 * expected)
  single = _single_level()
  np.testing.assert_allclose(
      single.outer_loss(x, (), BATCH), np.mean(BATCH['a'] @ np.c_[[1.0, -2.0]])
  )
  assert single.init_inner(0) == ()


def test_the_representation_is_declared_or_the_batch_itself():
  x = tf.constant([1.0, -2.0])
  assert _bilevel().representation(x, BATCH) is BATCH
  assert not _bilevel().has_representation

  def representation(x, batch):
    return batch['a'] * x

  def loss(x, y, features):
    return tf.reduce_mean(tf.linalg.matvec(features, y))

  problem = _bilevel(
      outer_loss=loss, inner_loss=loss, representation=representation
  )
  assert problem.has_representation
  y = tf.constant([0.5, 2.0])
  features = problem.representation(x, BATCH)
  np.testing.assert_allclose(
      problem.inner_loss(x, y, features), _loss(x, y, BATCH)
  )


def test_the_inner_loss_of_minimax_is_minus_the_loss():
  problem = _minimax()
  x, y = tf.constant([1.0, -2.0]), tf.constant([0.5, 2.0])
  value = _loss(x, y, BATCH).numpy()
  assert value != 0
  assert problem.outer_loss(x, y, BATCH).numpy() == value
  assert problem.inner_loss(x, y, BATCH).numpy() == -value


def test_the_inner_loss_of_compositional_is_half_a_squared_distance():
  problem = _compositional()
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
