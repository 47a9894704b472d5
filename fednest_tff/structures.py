"""Walks nested TFF types and values, so that no other module has to recurse.

A `tff.StructType` and a `tff.structure.Struct` are trees. Their elements have a
name or only a position. All other types and values are leaves: tensors,
sequences, and also placed types (`tff.FederatedType`) with all they hold.

Leaves are listed in TFF's order, the order of the elements. `tf.nest` has a
different order: it sorts the keys of a dictionary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import attrs
import numpy as np
import tensorflow_federated as tff

# A TFF type, or a value of one: a tensor, a dataset, a list with a value per
# client, a function, or a container of values. TFF declares no type for it.
Value: TypeAlias = Any

_Node = TypeVar('_Node')
_Result = TypeVar('_Result')


def iterate_leaves(
    root: _Node, children: Callable[[_Node], Iterable[_Node] | None]
) -> Iterator[_Node]:
  """Iterates over the leaves of any tree, from left to right.

  Args:
    root: The tree's root.
    children: Maps a node to its children; returns `None` for a leaf.

  Yields:
    The leaves.
  """
  inner = children(root)
  if inner is None:
    yield root
  else:
    for child in inner:
      yield from iterate_leaves(child, children)


def fold(
    structure: Value,
    leaf: Callable[[Value], _Result],
    struct: Callable[[list[tuple[str | None, _Result]]], _Result],
) -> _Result:
  """Computes a result for a type or a value from the leaves upwards.

  Args:
    structure: A TFF type or a TFF value.
    leaf: Maps a leaf to its result. Leaves are visited from left to right.
    struct: Maps the results of a struct's elements, as pairs of name and
      result, to the result of the struct. The name of an unnamed element is
      `None`.

  Returns:
    The result of `structure`.
  """
  if isinstance(structure, tff.structure.Struct):
    return struct([
        (name, fold(element, leaf, struct))
        for name, element in tff.structure.iter_elements(structure)
    ])
  return leaf(structure)


def leaves(structure: Value) -> list[Value]:
  """Lists the leaves of a TFF type or a TFF value.

  Args:
    structure: A type or a value. Of a value, only `tff.structure.Struct`s are
      taken apart; a Python list, for example, is a leaf.

  Returns:
    The leaves. A placed type is one leaf.
  """
  return list(
      iterate_leaves(
          structure,
          lambda s: s if isinstance(s, tff.structure.Struct) else None,
      )
  )


def is_at_clients(value_type: tff.Type) -> bool:
  """Tells whether a value of that type is placed at the clients."""
  return (
      isinstance(value_type, tff.FederatedType)
      and value_type.placement is tff.CLIENTS
  )


def inner_blocks(
    block: tff.framework.ComputationBuildingBlock,
) -> list[tff.framework.ComputationBuildingBlock]:
  """Lists the building blocks inside a building block, and the block itself.

  Args:
    block: A computation as TFF's building blocks.

  Returns:
    The blocks, each after those that are inside of it.
  """
  found = []

  def visit(
      inner: tff.framework.ComputationBuildingBlock,
  ) -> tuple[tff.framework.ComputationBuildingBlock, bool]:
    found.append(inner)
    return inner, False  # Unchanged.

  tff.framework.transform_postorder(block, visit)
  return found


def elements(value: Value, struct_type: tff.StructType) -> list[Value]:
  """Lists the elements of a Python container in the order of its type.

  Args:
    value: A `tff.structure.Struct`, attrs object, mapping, sequence or array.
      Elements of attrs objects and of mappings are found by name, all others
      by position.
    struct_type: The type of `value`.

  Returns:
    The elements; they are not taken apart themselves.

  Raises:
    TypeError: If `value` is no container, or has other elements than its type.
  """
  names = [name for name, _ in tff.structure.iter_elements(struct_type)]
  if isinstance(value, tff.structure.Struct):
    found = list(value)
  elif attrs.has(type(value)):
    found = [getattr(value, name) for name in names]
  elif isinstance(value, Mapping):
    if set(value) != set(names):
      raise TypeError(f'Expected the keys {names}; got {list(value)}.')
    found = [value[name] for name in names]
  elif isinstance(value, (Sequence, np.ndarray)):
    found = list(value)
  else:
    raise TypeError(f'Expected a value of type {struct_type}; got {value!r}.')
  if len(found) != len(names):
    raise TypeError(
        f'Expected {len(names)} elements for {struct_type}; got {len(found)}.'
    )
  return found


def typed_leaves(
    value: Value, value_type: tff.Type
) -> list[tuple[Value, tff.Type]]:
  """Takes a Python value apart along its type.

  Args:
    value: Containers as in `elements`, nested as `value_type` is.
    value_type: The type of `value`.

  Returns:
    Pairs of a leaf of `value` and its type. The leaf of a placed type is the
    whole placed value.
  """

  def children(
      pair: tuple[Value, tff.Type]
  ) -> Iterable[tuple[Value, tff.Type]] | None:
    inner, inner_type = pair
    if not isinstance(inner_type, tff.StructType):
      return None
    return zip(elements(inner, inner_type), inner_type, strict=True)

  return list(iterate_leaves((value, value_type), children))


def pack(structure: Value, new_leaves: Iterable[Value]) -> Value:
  """Replaces the leaves of a type or of a value.

  Args:
    structure: A TFF type or a TFF value.
    new_leaves: As many values as `structure` has leaves, or more. Of an
      iterator, only as many as needed are taken.

  Returns:
    A TFF value, nested as `structure` is.
  """
  remaining = iter(new_leaves)
  return fold(structure, lambda _: next(remaining), tff.structure.Struct)


def map_leaves(function: Callable[..., Value], *values: Value) -> Value:
  """Applies a function to the leaves of TFF values.

  Args:
    function: Takes one leaf of each of the values.
    *values: TFF values that are all nested in the same way.

  Returns:
    A TFF value, nested as the first of `values`, of the function's results.
  """
  rows = zip(*map(leaves, values), strict=True)
  return pack(values[0], [function(*row) for row in rows])
