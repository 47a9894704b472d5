"""Walking TFF types and values."""

import collections

import attrs
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures

Struct = tff.structure.Struct
PLACED = tff.FederatedType([('x', np.int32), ('w', np.float32)], tff.CLIENTS)
# Its names are not in alphabetic order: tf.nest would sort them.
NESTED = tff.to_type([('b', np.int32), ('a', [np.float32, (), PLACED])])


@attrs.define
class _Pair:
  b: int
  a: tuple


def test_leaves_of_types_and_of_values():
  number = tff.TensorType(np.int32), tff.TensorType(np.float32)
  assert structures.leaves(NESTED) == [*number, PLACED]
  assert structures.leaves(number[0]) == [number[0]]
  value = Struct([('b', [1, 2]), (None, Struct([('a', 3), (None, (4,))]))])
  assert structures.leaves(value) == [[1, 2], 3, (4,)]
  assert structures.leaves(5) == [5]
  assert structures.leaves(Struct([])) == []


def test_leaves_of_any_tree_from_left_to_right():
  tree = [1, [2, [], [3]], 4]
  found = structures.iterate_leaves(
      tree, lambda node: node if isinstance(node, list) else None
  )
  assert list(found) == [1, 2, 3, 4]


def test_fold_sees_names_and_the_results_of_elements():
  text = structures.fold(
      NESTED,
      lambda leaf: 'placed' if leaf is PLACED else 'number',
      lambda elements: ' '.join(f'({n}: {e})' for n, e in elements),
  )
  assert text == '(b: number) (a: (None: number) (None: ) (None: placed))'


def test_placement():
  at_server = tff.FederatedType(np.int32, tff.SERVER)
  assert structures.is_at_clients(PLACED)
  assert not structures.is_at_clients(at_server)
  assert not structures.is_at_clients(NESTED)


@pytest.mark.parametrize('value', [
    Struct([('b', 1), ('a', (2.0, (), 'placed'))]),
    collections.OrderedDict(b=1, a=[2.0, [], 'placed']),
    dict(a=(2.0, {}, 'placed'), b=1),
    _Pair(1, (2.0, (), 'placed')),
    (1, [2.0, Struct([]), 'placed']),
])
def test_python_containers_by_type(value):
  found = structures.typed_leaves(value, NESTED)
  assert [leaf for leaf, _ in found] == [1, 2.0, 'placed']
  assert [leaf_type for _, leaf_type in found] == structures.leaves(NESTED)


@pytest.mark.parametrize(['value', 'message'], [
    (dict(a=1, c=2), r"the keys \['b', 'a'\]"),
    ([1, 2, 3], 'Expected 2 elements'),
    (4, 'Expected a value of type'),
])
def test_containers_of_another_type(value, message):
  with pytest.raises(TypeError, match=message):
    structures.elements(value, NESTED)


def test_an_array_is_a_container():
  pair = tff.to_type([np.float32, np.float32])
  assert structures.elements(np.array([1.0, 2.0]), pair) == [1.0, 2.0]


def test_pack_is_the_opposite_of_leaves():
  packed = structures.pack(NESTED, range(3))
  expected = Struct([
      ('b', 0), ('a', Struct([(None, 1), (None, Struct([])), (None, 2)]))
  ])
  assert packed == expected
  assert structures.pack(packed, structures.leaves(packed)) == packed
  # Of an iterator it takes what it needs.
  values = iter(range(10))
  pair = Struct([('x', None), ('y', None)])
  assert structures.pack(pair, values) == Struct([('x', 0), ('y', 1)])
  assert next(values) == 2


def test_map_leaves():
  value = Struct([('x', 1), (None, Struct([('y', 2)]))])
  expected = Struct([('x', 11), (None, Struct([('y', 22)]))])
  other = structures.map_leaves(lambda v: 10 * v, value)
  assert structures.map_leaves(lambda a, b: a + b, value, other) == expected
  assert structures.map_leaves(lambda a, b: a + b, 1, 2) == 3
  with pytest.raises(ValueError, match='argument 2'):
    structures.map_leaves(lambda a, b: a + b, value, Struct([('x', 1)]))


def test_inner_blocks_come_before_the_blocks_around_them():
  @tff.tensorflow.computation(np.int32)
  def double(x):
    return tf.add(x, x)

  block = tff.framework.Call(
      double.to_building_block(),
      tff.framework.Selection(
          tff.framework.Reference('x', tff.to_type([np.int32])), index=0
      ),
  )
  kinds = [type(inner).__name__ for inner in structures.inner_blocks(block)]
  assert kinds == ['CompiledComputation', 'Reference', 'Selection', 'Call']
