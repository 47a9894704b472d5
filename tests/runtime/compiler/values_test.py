"""Unplaced Python values as flat lists of tensors, and back."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import values

Struct = tff.structure.Struct
# Its names are not in alphabetic order: tf.nest would sort them.
NAMED = tff.to_type([('b', np.int32), ('a', (np.float32, np.str_))])
MIXED = tff.to_type([
    ('x', tff.TensorType(np.float32, [2])),
    ('rest', [('data', tff.SequenceType(NAMED)), ('n', np.int64)]),
    ('none', ()),
])


@pytest.mark.parametrize(
    ['value_type', 'spec'],
    [
        (tff.TensorType(np.int32), tf.TensorSpec([], tf.int32)),
        (tff.TensorType(np.str_, [3]), tf.TensorSpec([3], tf.string)),
        (
            tff.TensorType(np.float32, [None, 2]),
            tf.TensorSpec([None, 2], tf.float32),
        ),
    ],
)
def test_specs_of_tensors(value_type, spec):
  assert values.tensor_spec(value_type) == spec
  assert values.leaf_specs(value_type) == [spec]


def test_specs_of_all_leaves():
  assert values.leaf_specs(MIXED) == [
      tf.TensorSpec([2], tf.float32),
      tf.TensorSpec([], tf.variant),
      tf.TensorSpec([], tf.int64),
  ]


def test_specs_of_elements():
  spec = values.element_spec(NAMED)
  assert type(spec) is collections.OrderedDict
  assert list(spec) == ['b', 'a']
  assert spec['b'] == tf.TensorSpec([], tf.int32)
  assert spec['a'] == (
      tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.string)
  )
  assert values.element_spec(tff.to_type(())) == ()


ROWS = [
    collections.OrderedDict(b=1, a=(0.5, 'one')),
    dict(a=[1.5, 'two'], b=2),
    Struct([('b', 3), ('a', Struct.unnamed(2.5, 'three'))]),
]


def _elements(dataset):
  return [
      (int(row['b']), float(row['a'][0]), row['a'][1].decode())
      for row in dataset.as_numpy_iterator()
  ]


@pytest.mark.parametrize('rows', [ROWS, []])
def test_there_and_back(rows):
  value = dict(
      none=[], rest=dict(n=7, data=rows), x=np.array([1.0, 2.0])
  )
  tensors = values.to_tensors(value, MIXED)
  assert [t.dtype for t in tensors] == [tf.float32, tf.variant, tf.int64]
  remaining = iter([*tensors, 'not its own'])
  found = values.to_python(remaining, MIXED)
  assert next(remaining) == 'not its own'
  assert [name for name, _ in tff.structure.iter_elements(found)] == [
      'x', 'rest', 'none'
  ]
  assert (found.x.dtype, found.x.tolist()) == (np.float32, [1.0, 2.0])
  assert (type(found.rest.n), found.rest.n) == (np.int64, 7)
  assert found.none == Struct([])
  expected = [(1, 0.5, 'one'), (2, 1.5, 'two'), (3, 2.5, 'three')]
  assert _elements(found.rest.data) == expected[: len(rows)]
  assert found.rest.data.element_spec == values.element_spec(NAMED)


BATCH = tff.to_type([
    ('x', tff.TensorType(np.float32, [None, 2])),
    ('name', tff.TensorType(np.str_, [None])),
    ('k', np.int32),
])


def test_a_list_of_batches_of_different_sizes():
  sizes = [3, 0, 3, 1]
  batches = [
      dict(x=np.full([n, 2], k), name=[str(k)] * n, k=k)
      for k, n in enumerate(sizes)
  ]
  sequence = tff.SequenceType(BATCH)
  (variant,) = values.to_tensors(batches, sequence)
  found = list(values.to_dataset(variant, sequence).as_numpy_iterator())
  assert [batch['x'].shape for batch in found] == [(n, 2) for n in sizes]
  for k, (batch, n) in enumerate(zip(found, sizes, strict=True)):
    np.testing.assert_array_equal(batch['x'], np.full([n, 2], k))
    assert list(batch['name']) == [str(k).encode()] * n
    assert batch['k'] == k


def test_an_empty_list_of_batches():
  sequence = tff.SequenceType(BATCH)
  (variant,) = values.to_tensors([], sequence)
  assert not list(values.to_dataset(variant, sequence))


def test_datasets_are_taken_as_they_are():
  sequence = tff.SequenceType(np.int64)
  (variant,) = values.to_tensors(tf.data.Dataset.range(3), sequence)
  dataset = values.to_dataset(variant, sequence)
  assert list(dataset.as_numpy_iterator()) == [0, 1, 2]


def test_elements_of_a_dataset():
  element = values.element_spec(NAMED)
  filled = tf.nest.map_structure(lambda spec: spec.dtype.name, element)
  expected = Struct([
      ('b', 'int32'), ('a', Struct.unnamed('float32', 'string'))
  ])
  assert values.from_dataset_element(filled, NAMED) == expected
  assert values.from_dataset_element('x', tff.TensorType(np.int32)) == 'x'


@pytest.mark.parametrize(
    ['value', 'value_type', 'message'],
    [
        ([1.0], tff.TensorType(np.float32, [2]), r'got shape \[1\]'),
        (
            tf.data.Dataset.range(2),
            tff.SequenceType(np.int32),
            'Expected a dataset of int32; got elements of',
        ),
        (
            tf.data.Dataset.from_tensors((1, 2)),
            tff.SequenceType(np.int32),
            'Expected a dataset of int32',
        ),
        (
            tf.data.Dataset.from_tensors(1).batch(2),
            tff.SequenceType(np.int32),
            'Expected a dataset of int32; .* add `unbatch',
        ),
        (
            np.zeros([2], np.int32),
            tff.SequenceType(np.int32),
            'Expected a dataset of int32; got ndarray.*from_tensor_slices',
        ),
        ((1,), NAMED, 'Expected 2 elements'),
        ([dict(b=1)], tff.SequenceType(NAMED), 'Expected .* keys'),
    ],
)
def test_values_of_another_type(value, value_type, message):
  with pytest.raises(TypeError, match=message):
    values.to_tensors(value, value_type)


@pytest.mark.parametrize(
    'value_type',
    [tff.FunctionType(None, np.int32), tff.FederatedType(np.int32, tff.SERVER)],
)
def test_only_unplaced_values(value_type):
  with pytest.raises(NotImplementedError, match='Cannot take a value of type'):
    values.leaf_specs(value_type)
  with pytest.raises(NotImplementedError, match='Cannot take a value of type'):
    values.to_tensors(1, value_type)
