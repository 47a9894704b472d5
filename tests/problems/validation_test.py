"""What the builders of problems refuse, and that they name the argument."""

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff import projections
from tests.helpers.small_problems import (
    ALL,
    LOSSES,
    SPEC,
    WITH_INNER,
    bilevel,
    compositional,
    minimax,
)

# Splits.


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
    bilevel(split=bad)


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
        (compositional, 'inner_map'),
        (bilevel, 'representation'),
        (minimax, 'representation'),
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
    compositional(inner_map=bad)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_inner_maps_that_are_not_finite_are_refused(bad):
  with pytest.raises(ValueError, match='`inner_map` is not finite'):
    compositional(inner_map=lambda x, batch: x * bad)


# The representation and the examples.


@pytest.mark.parametrize('build', [bilevel, minimax])
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


# Projections.

PROJECTIONS = [
    *((build, 'outer') for build in ALL),
    (minimax, 'inner'),
]


@pytest.mark.parametrize(('build', 'level'), PROJECTIONS)
@pytest.mark.parametrize('bad', [0, 3, 'simplex', (), tf.zeros([2])], ids=str)
def test_projections_that_are_no_functions_are_refused(build, level, bad):
  with pytest.raises(ValueError, match=f'`project_{level}` must be a function'):
    build(**{f'project_{level}': bad})


@pytest.mark.parametrize(('build', 'level'), PROJECTIONS)
@pytest.mark.parametrize(
    'bad',
    [
        lambda a: (a,),
        lambda a: {'a': a},
        lambda a: a[:1],
        lambda a: tf.reduce_sum(a),
        lambda a: tf.cast(a, tf.float64),
        lambda a: a[tf.newaxis],
    ],
    ids=['tuple', 'dict', 'shape', 'scalar', 'type', 'rank'],
)
def test_projections_on_another_space_are_refused(build, level, bad):
  with pytest.raises(
      ValueError, match=f'`project_{level}` must return the structure'
  ):
    build(**{f'project_{level}': bad})


@pytest.mark.parametrize(('build', 'level'), PROJECTIONS)
@pytest.mark.parametrize('bad', [None, {'a': None}])
def test_projections_that_forget_their_result_are_refused(build, level, bad):
  with pytest.raises(ValueError, match=f'`project_{level}` must return tens'):
    build(**{f'project_{level}': lambda a: bad})


@pytest.mark.parametrize(('build', 'level'), PROJECTIONS)
@pytest.mark.parametrize(
    'project',
    [
        projections.simplex(),
        projections.box(-1.0, 0.99),
        projections.ball(1.4),
        lambda a: a + np.nan,
    ],
    ids=['simplex', 'box', 'ball', 'nan'],
)
def test_a_start_that_is_not_feasible_is_refused(build, level, project):
  with pytest.raises(
      ValueError, match=f'`init_{level}` must start in .*`project_{level}`'
  ):
    build(**{f'project_{level}': project})


@pytest.mark.parametrize(('build', 'level'), PROJECTIONS)
def test_a_feasible_start_is_accepted(build, level):
  for project in (
      projections.simplex(2.0),
      projections.box(1.0, 1.0),
      projections.ball(1.5),
      projections.non_negative(),
  ):
    problem = build(**{f'project_{level}': project})
    assert getattr(problem, f'project_{level}') is project


@pytest.mark.parametrize('build', [bilevel, compositional])
def test_implicit_problems_have_no_constrained_inner_variable(build):
  with pytest.raises(TypeError, match='project_inner'):
    build(project_inner=projections.non_negative())
