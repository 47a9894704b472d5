"""How a client's examples become its inner and its outer examples."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from fednest_tff.problems import splits
from tests.helpers.small_problems import (
    WITH_INNER,
    bilevel,
    compositional,
    minimax,
    single_level,
)

QUICK = settings(
    deadline=None, derandomize=True, database=None, max_examples=30
)


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

  problem = bilevel(split=split)
  inner, outer = problem.split(_examples(4))
  assert _ids(inner) == [0]
  assert _ids(outer) == [1, 2, 3]


def test_default_splits():
  inner, outer = bilevel().split(_examples(10))
  assert len(_ids(inner)) == len(_ids(outer)) == 5
  for build in (minimax, compositional, single_level):
    inner, outer = build().split(_examples(10))
    assert _ids(inner) == _ids(outer) == list(range(10))


@pytest.mark.parametrize(
    'bad', [0.0, 1.0, -0.5, 1.5, float('nan'), 1, 'half', None, (0.5, 0.5)]
)
@pytest.mark.parametrize('build', WITH_INNER)
def test_bad_splits_are_refused(build, bad):
  with pytest.raises(ValueError, match='`split`'):
    build(split=bad)



def test_a_split_may_leave_a_level_without_examples():
  def split(examples):
    return examples, tf.nest.map_structure(lambda t: t[:0], examples)

  assert bilevel(split=split).split is split
