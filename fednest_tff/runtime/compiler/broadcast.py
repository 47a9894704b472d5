"""Values that are the same at all clients."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from fednest_tff import structures
from fednest_tff.structures import Value

# A function of one TFF value.
Function = Callable[[Value], Value]
# From the values of several clients, stacked, and their number to an aggregate.
ReduceAtOnce = Callable[[Value, tf.Tensor], Value]


class Broadcast(NamedTuple):
  """A value that is the same at all clients."""

  value: Value


def is_broadcast(value: Value) -> bool:
  """Tells whether all leaves of a value at the clients are `Broadcast`s."""
  return all(isinstance(v, Broadcast) for v in structures.leaves(value))


def broadcast_value(value: Value) -> Value:
  """Returns what each client has of a value for which `is_broadcast` holds."""
  return structures.map_leaves(lambda v: v.value, value)


def split_broadcasts(value: Value) -> Value:
  """Replaces each `Broadcast` of a struct by a struct of `Broadcast`s."""

  def split(leaf: Value) -> Value:
    if isinstance(leaf, Broadcast):
      return structures.map_leaves(Broadcast, leaf.value)
    return leaf

  return structures.map_leaves(split, value)
