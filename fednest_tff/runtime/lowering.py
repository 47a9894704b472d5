"""Lowers a TFF computation into the TensorFlow function being traced.

The computation, in call-dominant form, is a list of calls of intrinsics and of
TensorFlow graphs. Evaluating it once under `tf.function` writes all of it, for
all clients, into one TensorFlow graph. Values at the server are plain TFF
values; values at the clients belong to a cohort (`cohort.py`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import graphs, values
from fednest_tff.runtime.cohort import (
    Everywhere,
    Mapped,
    Unrolled,
    is_shared,
    shared,
)

Struct = tff.structure.Struct


def _map_leaves(function: Callable, *arguments: Any) -> Any:
  """`function` of the leaves of structs of the same shape."""
  if isinstance(arguments[0], Struct):
    names = [name for name, _ in tff.structure.iter_elements(arguments[0])]
    return Struct(
        (name, _map_leaves(function, *(argument[k] for argument in arguments)))
        for k, name in enumerate(names)
    )
  return function(*arguments)


def _zeros(value_type: tff.Type) -> Any:
  specs = values.leaf_specs(value_type)
  return graphs.pack(
      value_type, [tf.zeros(spec.shape, spec.dtype) for spec in specs]
  )


def _add(pair: Struct) -> Any:
  return _map_leaves(tf.add, pair[0], pair[1])


def _first_or_least(value_type: tff.Type, largest: bool) -> Any:
  """The neutral element of a minimum (`largest`) or of a maximum."""

  def limit(spec):
    dtype = spec.dtype
    return tf.fill(spec.shape, dtype.max if largest else dtype.min)

  return graphs.pack(
      value_type, [limit(spec) for spec in values.leaf_specs(value_type)]
  )


class Lowering:
  """Evaluates building blocks for one cohort; create one per trace."""

  def __init__(
      self,
      cohort: Unrolled | Mapped,
      import_graph: Callable[[tff.framework.CompiledComputation], Callable],
      server_device: str,
  ):
    """Prepares the evaluation.

    Args:
      cohort: The clients.
      import_graph: From a compiled computation to a Python function.
      server_device: Where unplaced and server computations run.
    """
    self._cohort = cohort
    self._import_graph = import_graph
    self._server = server_device

  def evaluate(
      self, block: tff.framework.ComputationBuildingBlock, names: dict[str, Any]
  ) -> Any:
    """The value of `block`, a function if its type is one."""
    framework = tff.framework
    if isinstance(block, framework.Reference):
      return names[block.name]
    if isinstance(block, framework.Block):
      names = dict(names)
      for name, value in block.locals:
        names[name] = self.evaluate(value, names)
      return self.evaluate(block.result, names)
    if isinstance(block, framework.Lambda):
      return lambda argument=None: self.evaluate(
          block.result, names | {block.parameter_name: argument}
      )
    if isinstance(block, framework.Struct):
      return Struct(
          (name, self.evaluate(element, names))
          for name, element in tff.structure.iter_elements(block)
      )
    if isinstance(block, framework.Selection):
      source = self.evaluate(block.source, names)
      if block.name is not None:
        return getattr(source, block.name)
      return source[block.index]
    if isinstance(block, framework.Call):
      return self._call(block, names)
    if isinstance(block, framework.CompiledComputation):
      return self._import_graph(block)
    if isinstance(block, framework.Literal):
      return tf.constant(
          block.value, values.tensor_spec(block.type_signature).dtype
      )
    raise NotImplementedError(
        f'The in-process runtime cannot run a {type(block).__name__}.'
    )

  def _call(self, block: tff.framework.Call, names: dict[str, Any]) -> Any:
    argument = None
    if block.argument is not None:
      argument = self.evaluate(block.argument, names)
    if not isinstance(block.function, tff.framework.Intrinsic):
      with tf.device(self._server):
        return self.evaluate(block.function, names)(argument)
    return self._intrinsic(block, argument)

  def _intrinsic(self, block: tff.framework.Call, argument: Any) -> Any:
    """The value of a call of an intrinsic."""
    uri = block.function.uri
    handler = getattr(self, f'_{uri}', None)
    if handler is None:
      raise NotImplementedError(f'The in-process runtime cannot run {uri}.')
    if uri in ('federated_map', 'federated_map_all_equal'):
      return handler(argument, block)
    with tf.device(self._server):
      return handler(argument, block)

  # Placement.

  def _federated_value_at_server(self, argument, block):
    del block
    return argument

  def _federated_value_at_clients(self, argument, block):
    del block
    return Everywhere(argument)

  def _federated_broadcast(self, argument, block):
    del block
    return Everywhere(argument)

  def _federated_zip_at_server(self, argument, block):
    del block
    return argument

  def _federated_zip_at_clients(self, argument, block):
    del block
    return argument

  # Computation.

  def _federated_eval_at_server(self, argument, block):
    del block
    return argument()

  def _federated_eval_at_clients(self, argument, block):
    member = block.type_signature.member
    return self._cohort.map(
        lambda _: argument(), Everywhere(Struct([])), member
    )

  def _federated_apply(self, argument, block):
    del block
    function, value = argument
    return function(value)

  def _federated_map_all_equal(self, argument, block):
    function, value = argument
    if not is_shared(value):
      return self._federated_map(argument, block)
    with tf.device(self._server):
      return Everywhere(function(shared(value)))

  def _federated_map(self, argument, block):
    function, value = argument
    member = block.type_signature.member
    if isinstance(self._cohort, Mapped) and _is_structural(
        block.argument[0]
    ):
      return function(_spread(value))
    return self._cohort.map(function, value, member)

  # Aggregation.

  def _reduced(self, value, zero, accumulate, merge):
    return self._cohort.reduce(value, zero, accumulate, merge)

  def _federated_aggregate(self, argument, block):
    del block
    value, zero, accumulate, merge, report = argument
    return report(self._reduced(value, zero, accumulate, merge))

  def _federated_sum(self, argument, block):
    member = block.argument.type_signature.member
    return self._reduced(argument, _zeros(member), _add, _add)

  def _federated_min(self, argument, block):
    return self._extreme(argument, block, tf.minimum, True)

  def _federated_max(self, argument, block):
    return self._extreme(argument, block, tf.maximum, False)

  def _extreme(self, argument, block, function, largest):
    member = block.argument.type_signature.member

    def choose(pair):
      return _map_leaves(function, pair[0], pair[1])

    zero = _first_or_least(member, largest)
    return self._reduced(argument, zero, choose, choose)

  def _federated_mean(self, argument, block):
    member = block.argument.type_signature.member
    one = tff.TensorType(np.float32)
    return self._mean(
        Struct.unnamed(argument, Everywhere(tf.constant(1.0))), member, one
    )

  def _federated_weighted_mean(self, argument, block):
    types = block.argument.type_signature
    return self._mean(argument, types[0].member, types[1].member)

  def _mean(self, pair, value_type, weight_type):
    """sum_i w_i v_i / sum_i w_i, in the order of the clients."""

    def accumulate(step):
      total, (value, weight) = step
      weighted = _map_leaves(
          lambda v: v * tf.cast(weight, v.dtype), value
      )
      return Struct.unnamed(
          _add(Struct.unnamed(total[0], weighted)), total[1] + weight
      )

    def merge(totals):
      return Struct.unnamed(
          _add(Struct.unnamed(totals[0][0], totals[1][0])),
          totals[0][1] + totals[1][1],
      )

    zero = Struct.unnamed(_zeros(value_type), _zeros(weight_type))
    total, weight = self._reduced(pair, zero, accumulate, merge)
    return _map_leaves(lambda v: v / tf.cast(weight, v.dtype), total)

  def _federated_select(self, argument, block):
    """A dataset of slices per client, one for each of its keys."""
    keys, _, server_value, select = argument
    element = block.type_signature.member.element

    def one(key):
      picked = select(Struct.unnamed(server_value, key))
      return _to_container(element, picked)

    def slices(client_keys):
      dataset = tf.data.Dataset.from_tensor_slices(client_keys)
      return tf.data.experimental.to_variant(dataset.map(one))

    return self._cohort.map(slices, keys, block.type_signature.member)

  # Sequences.

  def _sequence_map(self, argument, block):
    function, variant = argument
    source = block.argument.type_signature[1]
    result = block.type_signature.element

    def step(*element):
      return _to_container(result, function(_from_dataset(source, element)))

    dataset = values.to_dataset(variant, source).map(step)
    return tf.data.experimental.to_variant(dataset)

  def _sequence_reduce(self, argument, block):
    variant, zero, function = argument
    source = block.argument.type_signature[0]

    def step(state, *element):
      value = _from_dataset(source, element)
      total = graphs.pack(block.type_signature, list(state))
      return tuple(
          graphs.flatten(function(Struct.unnamed(total, value)))
      )

    found = values.to_dataset(variant, source).reduce(
        tuple(graphs.flatten(zero)), step
    )
    return graphs.pack(block.type_signature, list(found))

  def _sequence_sum(self, argument, block):
    source = block.argument.type_signature

    def step(state, *element):
      value = graphs.flatten(_from_dataset(source, element))
      return tuple(s + v for s, v in zip(state, value, strict=True))

    found = values.to_dataset(argument, source).reduce(
        tuple(graphs.flatten(_zeros(source.element))), step
    )
    return graphs.pack(block.type_signature, list(found))


def _is_structural(block: tff.framework.ComputationBuildingBlock) -> bool:
  """Whether `block` only picks and packs, without computing."""
  if not isinstance(block, tff.framework.Lambda):
    return False
  found = []

  def visit(inner):
    if not isinstance(
        inner,
        (
            tff.framework.Reference,
            tff.framework.Selection,
            tff.framework.Struct,
        ),
    ):
      found.append(inner)
    return inner, False

  tff.framework.transform_postorder(block.result, visit)
  return not found


def _spread(value: Any) -> Any:
  """`value` with shared structs as structs of shared leaves."""
  if isinstance(value, Everywhere) and isinstance(value.value, Struct):
    return _spread(
        Struct(
            (name, Everywhere(element))
            for name, element in tff.structure.iter_elements(value.value)
        )
    )
  if isinstance(value, Struct):
    return Struct(
        (name, _spread(element))
        for name, element in tff.structure.iter_elements(value)
    )
  return value


def _to_container(value_type: tff.Type, value: Any) -> Any:
  """A TFF value as the Python containers that tf.data understands."""
  return tff.types.type_to_py_container(value, value_type)


def _from_dataset(sequence_type: tff.SequenceType, element: tuple) -> Any:
  """An element as tf.data hands it over, as a TFF value."""
  structure = element if len(element) > 1 else element[0]
  return graphs.pack(
      sequence_type.element, values.ordered_leaves(structure)
  )
