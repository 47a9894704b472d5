"""Runs TFF's intrinsics on sequences, which are variant tensors of datasets.

Each function takes the value of a call's argument, and the building block of
the call.
"""

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import values
from fednest_tff.runtime.compiler.broadcast import Function
from fednest_tff.structures import Value


def _reduce(
    dataset: tf.data.Dataset,
    element_type: tff.Type,
    zero: Value,
    accumulate: Function,
    result_type: tff.Type,
) -> Value:
  """Aggregates the elements of a dataset, starting from `zero`."""

  def step(
      state: tuple[tf.Tensor, ...], element: Value
  ) -> tuple[tf.Tensor, ...]:
    value = values.from_dataset_element(element, element_type)
    so_far = structures.pack(result_type, state)
    pair = tff.structure.Struct.unnamed(so_far, value)
    return tuple(structures.leaves(accumulate(pair)))

  found = dataset.reduce(tuple(structures.leaves(zero)), step)
  return structures.pack(result_type, found)


def map_elements(argument: Value, call: tff.framework.Call) -> Value:
  """`sequence_map`."""
  function, variant = argument
  source = call.argument.type_signature[1]
  is_tuple = isinstance(values.element_spec(source.element), tuple)

  def step(*parts: Value) -> Value:
    # tf.data passes the elements of a tuple as arguments.
    element = parts if is_tuple else parts[0]
    value = values.from_dataset_element(element, source.element)
    return values.to_container(function(value), call.type_signature.element)

  dataset = values.to_dataset(variant, source).map(step)
  return tf.data.experimental.to_variant(dataset)


def reduce_elements(argument: Value, call: tff.framework.Call) -> Value:
  """`sequence_reduce`."""
  variant, zero, function = argument
  source = call.argument.type_signature[0]
  dataset = values.to_dataset(variant, source)
  return _reduce(dataset, source.element, zero, function, call.type_signature)


def sum_elements(argument: Value, call: tff.framework.Call) -> Value:
  """`sequence_sum`."""
  source = call.argument.type_signature
  dataset = values.to_dataset(argument, source)
  zero = values.zeros(source.element)
  return _reduce(dataset, source.element, zero, values.add, call.type_signature)
