"""Simulates TFF's secure sums: the right integers, and no protection at all.

A real secure sum is a cryptographic protocol: the server sees the sum and no
client's value. In a simulation all values are in one process. These functions
compute what the protocol would compute and refuse what it would refuse, as the
test backend of TFF does. They hide nothing from anyone.

Sums and bounds are integers, or structs of them. A bound, a bit width or a
modulus is a struct like the value, or one number for all of its leaves.
"""

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler.broadcast import Function
from fednest_tff.structures import Value

# Sums are int64, and the sum of two clients' values must fit.
_MAX_BITWIDTH = 62


def _like(value: Value, number: Value) -> Value:
  """Repeats one number for each leaf of `value`; a struct stays as it is."""
  if isinstance(number, tff.structure.Struct):
    return number
  return structures.map_leaves(lambda _: number, value)


def _check_at_most(value: tf.Tensor, bound: tf.Tensor) -> tf.Tensor:
  """Returns `value`, and fails if one of its elements exceeds `bound`."""
  is_valid = tf.reduce_all(tf.cast(value, tf.int64) <= tf.cast(bound, tf.int64))
  # TFF's tests look for this message.
  message = 'client value larger than maximum specified for secure sum'
  check = tf.debugging.Assert(
      is_valid, [message, value, 'not less than or equal to', bound]
  )
  with tf.control_dependencies([check]):
    return tf.identity(value)


def build_checked_add(max_input: Value) -> Function:
  """Builds the addition of one client's value to a sum.

  Args:
    max_input: The largest number that a client may add.

  Returns:
    A function of the pair (sum, client's value). It fails if the client's value
    is too large.
  """

  def add(pair: tff.structure.Struct) -> Value:
    total, value = pair
    checked = structures.map_leaves(
        _check_at_most, value, _like(value, max_input)
    )
    return structures.map_leaves(tf.add, total, checked)

  return add


def max_input(bitwidth: Value) -> Value:
  """Computes the largest number of so many bits, 2^bits - 1."""

  def largest(bits: tf.Tensor) -> tf.Tensor:
    check = tf.debugging.Assert(
        bits <= _MAX_BITWIDTH,
        [bits, f'is greater than maximum bitwidth {_MAX_BITWIDTH}'],
    )
    with tf.control_dependencies([check]):
      one = tf.constant(1, tf.int64)
      return tf.bitwise.left_shift(one, tf.cast(bits, tf.int64)) - 1

  return structures.map_leaves(largest, bitwidth)


def modulo(total: Value, modulus: Value) -> Value:
  """Reduces a sum to the numbers from 0 to `modulus` - 1."""
  return structures.map_leaves(
      lambda t, m: tf.math.floormod(t, tf.cast(m, t.dtype)),
      total,
      _like(total, modulus),
  )
