"""Runs TFF's intrinsics inside a TensorFlow function.

An intrinsic is one of TFF's own operators, such as `federated_sum` or
`sequence_map`. TFF names it by a URI. Values at the server are TFF values;
values at the clients are values of a cohort (`cohort.py`).
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import (
    graph_rewriting,
    reductions,
    secure_sums,
    sequences,
    values,
)
from fednest_tff.runtime.compiler.batched import Batched
from fednest_tff.runtime.compiler.broadcast import (
    Broadcast,
    broadcast_value,
    is_broadcast,
    split_broadcasts,
)
from fednest_tff.runtime.compiler.cohort import Cohort
from fednest_tff.structures import Value

Struct: TypeAlias = tff.structure.Struct
# From the argument's value and the building block of the call to the result.
_Handler = Callable[[Value, tff.framework.Call], Value]


def _relax_shapes(value: Value, value_type: tff.Type) -> Value:
  """Makes TensorFlow forget sizes that the type of a value leaves open.

  An accumulator may grow from client to client, for example from no rows. A
  loop wants to know before it starts that the number of rows changes.

  Args:
    value: A TFF value.
    value_type: Its type.

  Returns:
    The value, with the shapes of its type.
  """

  def relax(tensor: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    if tensor.shape.is_fully_defined() and not spec.shape.is_fully_defined():
      return tf.compat.v1.placeholder_with_default(tensor, spec.shape)
    return tensor

  specs = structures.pack(value_type, values.leaf_specs(value_type))
  return structures.map_leaves(relax, value, specs)


def is_structural(block: tff.framework.ComputationBuildingBlock) -> bool:
  """Tells whether a function only rearranges elements of its argument."""
  if not isinstance(block, tff.framework.Lambda):
    return False
  rearranging = (
      tff.framework.Reference,
      tff.framework.Selection,
      tff.framework.Struct,
  )
  return all(
      isinstance(inner, rearranging)
      for inner in structures.inner_blocks(block.result)
  )


def is_stateless(block: tff.framework.ComputationBuildingBlock) -> bool:
  """Tells whether a function only computes tensors from tensors."""
  for inner in structures.inner_blocks(block):
    if isinstance(inner, tff.framework.CompiledComputation):
      if not graph_rewriting.is_stateless(inner):
        return False
    elif isinstance(inner, tff.framework.Intrinsic):
      return False
  return True


class Intrinsics:
  """Runs calls of intrinsics for one cohort."""

  def __init__(self, cohort: Cohort, server_device: str):
    """Prepares the intrinsics.

    Args:
      cohort: The clients.
      server_device: The device for all that does not run at clients.
    """
    self._cohort = cohort
    self._server_device = server_device
    self._handlers: dict[str, _Handler] = {
        'federated_aggregate': self._aggregate,
        'federated_apply': self._apply,
        'federated_broadcast': self._broadcast,
        'federated_eval_at_clients': self._eval_at_clients,
        'federated_eval_at_server': self._eval_at_server,
        'federated_map': self._map,
        'federated_map_all_equal': self._map_all_equal,
        'federated_max': self._max,
        'federated_mean': self._unweighted_mean,
        'federated_min': self._min,
        'federated_secure_modular_sum': self._secure_modular_sum,
        'federated_secure_select': self._select,
        'federated_secure_sum': self._secure_sum,
        'federated_secure_sum_bitwidth': self._secure_sum_bitwidth,
        'federated_select': self._select,
        'federated_sum': self._sum,
        'federated_value_at_clients': self._broadcast,
        'federated_value_at_server': self._unchanged,
        'federated_weighted_mean': self._weighted_mean,
        'federated_zip_at_clients': self._unchanged,
        'federated_zip_at_server': self._unchanged,
        'sequence_map': sequences.map_elements,
        'sequence_reduce': sequences.reduce_elements,
        'sequence_sum': sequences.sum_elements,
    }

  def run(self, call: tff.framework.Call, argument: Value) -> Value:
    """Runs a call.

    Args:
      call: A call of an intrinsic.
      argument: The value of the call's argument.

    Returns:
      The result's value.

    Raises:
      NotImplementedError: If the intrinsic is none of those above.
    """
    uri = call.function.uri
    handler = self._handlers.get(uri)
    if handler is None:
      raise NotImplementedError(f'The in-process runtime cannot run {uri}.')
    if uri in ('federated_map', 'federated_map_all_equal'):
      return handler(argument, call)  # These choose devices themselves.
    with tf.device(self._server_device):
      return handler(argument, call)

  # Placement.

  def _unchanged(self, argument: Value, call: tff.framework.Call) -> Value:
    del call
    return argument

  def _broadcast(self, argument: Value, call: tff.framework.Call) -> Broadcast:
    del call
    return Broadcast(argument)

  # Computation.

  def _eval_at_server(self, argument: Value, call: tff.framework.Call) -> Value:
    del call
    return argument()

  def _eval_at_clients(
      self, argument: Value, call: tff.framework.Call
  ) -> Value:
    member = call.type_signature.member
    return self._cohort.map(
        lambda _: argument(), Broadcast(Struct([])), member
    )

  def _apply(self, argument: Value, call: tff.framework.Call) -> Value:
    del call
    function, value = argument
    return function(value)

  def _map(self, argument: Value, call: tff.framework.Call) -> Value:
    function, value = argument
    block = call.argument[0]
    if isinstance(self._cohort, Batched) and is_structural(block):
      # The whole cohort at once, without a loop.
      return function(split_broadcasts(value))
    member = call.type_signature.member
    return self._cohort.map(function, value, member, is_stateless(block))

  def _map_all_equal(self, argument: Value, call: tff.framework.Call) -> Value:
    function, value = argument
    if not is_broadcast(value):
      return self._map(argument, call)
    with tf.device(self._server_device):
      return Broadcast(function(broadcast_value(value)))

  def _select(self, argument: Value, call: tff.framework.Call) -> Value:
    """Gives each client a dataset of slices, one for each of its keys."""
    keys, _, server_value, select = argument
    member = call.type_signature.member

    def select_one(key: tf.Tensor) -> Value:
      picked = select(Struct.unnamed(server_value, key))
      return values.to_container(picked, member.element)

    def select_all(client_keys: tf.Tensor) -> tf.Tensor:
      dataset = tf.data.Dataset.from_tensor_slices(client_keys)
      return tf.data.experimental.to_variant(dataset.map(select_one))

    return self._cohort.map(select_all, keys, member)

  # Aggregation.

  def _aggregate(self, argument: Value, call: tff.framework.Call) -> Value:
    value, zero, accumulate, merge, report = argument
    accumulator = call.argument.type_signature[2].result
    zero = _relax_shapes(zero, accumulator)
    return report(self._cohort.reduce(value, zero, accumulate, merge))

  def _sum(self, argument: Value, call: tff.framework.Call) -> Value:
    member = call.argument.type_signature.member
    return self._cohort.reduce(
        argument,
        values.zeros(member),
        values.add,
        values.add,
        reductions.sum_rows,
    )

  def _secure_sum(self, argument: Value, call: tff.framework.Call) -> Value:
    value, max_input = argument
    member = call.argument.type_signature[0].member
    add = secure_sums.build_checked_add(max_input)
    return self._cohort.reduce(value, values.zeros(member), add, values.add)

  def _secure_sum_bitwidth(
      self, argument: Value, call: tff.framework.Call
  ) -> Value:
    value, bitwidth = argument
    bounded = Struct.unnamed(value, secure_sums.max_input(bitwidth))
    return self._secure_sum(bounded, call)

  def _secure_modular_sum(
      self, argument: Value, call: tff.framework.Call
  ) -> Value:
    value, modulus = argument
    member = call.argument.type_signature[0].member
    zero = values.zeros(member)
    total = self._cohort.reduce(value, zero, values.add, values.add)
    return secure_sums.modulo(total, modulus)

  def _min(self, argument: Value, call: tff.framework.Call) -> Value:
    return self._extreme(
        argument, call, tf.minimum, tf.reduce_min, lambda dtype: dtype.max
    )

  def _max(self, argument: Value, call: tff.framework.Call) -> Value:
    return self._extreme(
        argument, call, tf.maximum, tf.reduce_max, lambda dtype: dtype.min
    )

  def _extreme(
      self,
      argument: Value,
      call: tff.framework.Call,
      choose: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
      choose_row: Callable[..., tf.Tensor],
      limit: Callable[[tf.DType], Value],
  ) -> Value:
    """Finds the minimum or the maximum, starting from the dtype's limit."""

    def step(pair: Struct) -> Value:
      return structures.map_leaves(choose, pair[0], pair[1])

    def choose_rows(value: Value, size: tf.Tensor) -> Value:
      del size  # The extreme of equal values does not depend on it.
      return structures.map_leaves(
          lambda leaf: leaf.value
          if isinstance(leaf, Broadcast) else choose_row(leaf, axis=0),
          value,
      )

    zero = values.fill(
        call.argument.type_signature.member,
        lambda spec: tf.fill(spec.shape, limit(spec.dtype)),
    )
    return self._cohort.reduce(
        argument,
        zero,
        step,
        step,
        at_once=choose_rows,
    )

  def _unweighted_mean(
      self, argument: Value, call: tff.framework.Call
  ) -> Value:
    return self._mean(
        Struct.unnamed(argument, Broadcast(tf.constant(1.0))),
        call.argument.type_signature.member,
        tff.TensorType(np.float32),
    )

  def _weighted_mean(self, argument: Value, call: tff.framework.Call) -> Value:
    types = call.argument.type_signature
    return self._mean(argument, types[0].member, types[1].member)

  def _mean(
      self, pair: Struct, value_type: tff.Type, weight_type: tff.Type
  ) -> Value:
    """Computes sum_i w_i v_i / sum_i w_i, in the order of the clients i."""

    def accumulate(step: Struct) -> Struct:
      total, (value, weight) = step
      weighted = structures.map_leaves(
          lambda v: v * tf.cast(weight, v.dtype), value
      )
      return Struct.unnamed(
          values.add(Struct.unnamed(total[0], weighted)), total[1] + weight
      )

    def merge(totals: Struct) -> Struct:
      return Struct.unnamed(
          values.add(Struct.unnamed(totals[0][0], totals[1][0])),
          totals[0][1] + totals[1][1],
      )

    def sum_rows(stacked: Struct, size: tf.Tensor) -> Struct:
      value, weight = stacked
      if isinstance(weight, Broadcast):
        weight = tf.fill([size], weight.value)
      weighted = structures.map_leaves(
          lambda leaf: reductions.weighted_sum(leaf, weight), value
      )
      return Struct.unnamed(weighted, tf.reduce_sum(weight))

    zero = Struct.unnamed(values.zeros(value_type), values.zeros(weight_type))
    total, weight = self._cohort.reduce(
        pair, zero, accumulate, merge, at_once=sum_rows
    )
    return structures.map_leaves(
        lambda v: v / tf.cast(weight, v.dtype), total
    )
