"""Rewrites a computation as a list of steps: those calls that compute.

In call-dominant form most calls only rearrange values: they select, zip or
broadcast. Here these go into the arguments of *steps*, the calls that compute.
The argument of a step is a struct of

- `Ref`, a leaf of an earlier step's result or of what is given,
- `Sent`, a `Ref` or a `Fixed` that is broadcast to the clients,
- `Fixed`, a function or a constant.

So two steps can be compared (`loops.py`).
"""

from collections.abc import Callable, Container
from typing import NamedTuple, TypeAlias

import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import call_dominant, intrinsics
from fednest_tff.runtime.compiler.broadcast import Broadcast
from fednest_tff.runtime.compiler.cohort import Cohort
from fednest_tff.structures import Value

_BROADCASTS = frozenset(['federated_broadcast', 'federated_value_at_clients'])
_ZIPS = frozenset([
    'federated_value_at_server',
    'federated_zip_at_clients',
    'federated_zip_at_server',
])
_MAPS = frozenset([
    'federated_apply', 'federated_map', 'federated_map_all_equal'
])

_Path: TypeAlias = tuple[int, ...]
# Values: whole results by name, elements of results by name and path.
Names: TypeAlias = dict[str | tuple[str, _Path], Value]


class Ref(NamedTuple):
  """A leaf of a result.

  Attributes:
    name: The name of the result.
    path: Which element of it, which element of that, and so on.
    leaf_type: The type of the leaf, with its placement if it has one.
  """

  name: str
  path: _Path
  leaf_type: tff.Type


class Fixed(NamedTuple):
  """A function or a constant.

  Attributes:
    block: The building block.
    key: A hash.
  """

  block: tff.framework.ComputationBuildingBlock
  key: bytes


class Sent(NamedTuple):
  """A value that is broadcast to the clients."""

  value: Ref | Fixed


class Step(NamedTuple):
  """A call that computes.

  Attributes:
    name: The name of its result.
    call: The call.
    function: What is called: the name of an intrinsic or a graph's hash.
    argument: Its argument, a struct of `Ref`, `Sent` and `Fixed`; an empty one
      if there is none.
  """

  name: str
  call: tff.framework.Call
  function: str | bytes
  argument: Value


class Steps(NamedTuple):
  """A computation as a list of steps.

  Attributes:
    parameter: The name of its parameter; `None` if it has none.
    steps: Its steps, in order.
    result: Its result, a struct of `Ref`, `Sent` and `Fixed`.
  """

  parameter: str | None
  steps: list[Step]
  result: Value


class Runner(NamedTuple):
  """Runs steps.

  Attributes:
    cohort: The clients.
    call: Maps a call and its argument's value to its result.
    evaluate: Maps the block of a `Fixed` to its value.
  """

  cohort: Cohort
  call: Callable[[tff.framework.Call, Value], Value]
  evaluate: Callable[[tff.framework.ComputationBuildingBlock], Value]

  def value(self, symbolic: Value, names: Names) -> Value:
    """Computes what a struct of `Ref`, `Sent` and `Fixed` stands for."""

    def leaf_value(leaf: Ref | Sent | Fixed) -> Value:
      if isinstance(leaf, Sent):
        return Broadcast(leaf_value(leaf.value))
      if isinstance(leaf, Fixed):
        return self.evaluate(leaf.block)
      if (leaf.name, leaf.path) in names:
        return names[leaf.name, leaf.path]
      found = names[leaf.name]
      for index in leaf.path:
        found = _select(found, index)
      return found

    return structures.map_leaves(leaf_value, symbolic)

  def run(self, step: Step, names: Names) -> Value:
    """Runs a step; `names` has the values of what it refers to."""
    argument = None
    if step.call.argument is not None:
      argument = self.value(step.argument, names)
    return self.call(step.call, argument)


def _select(value: Value, index: int) -> Value:
  """Takes an element of a struct: at the server, or at each client."""
  if isinstance(value, Broadcast):
    return Broadcast(_select(value.value, index))
  if isinstance(value, tff.structure.Struct):
    return value[index]
  return [_select(of_client, index) for of_client in value]


def _refs(
    name: str,
    value_type: tff.Type,
    path: _Path = (),
    placement: tff.FederatedType | None = None,
) -> Value:
  """Makes a struct of the `Ref`s of a result."""
  if isinstance(value_type, tff.FederatedType):
    return _refs(name, value_type.member, path, value_type)
  if isinstance(value_type, tff.StructType):
    pairs = tff.structure.iter_elements(value_type)
    return tff.structure.Struct(
        (key, _refs(name, element, (*path, k), placement))
        for k, (key, element) in enumerate(pairs)
    )
  if placement is not None:
    value_type = tff.FederatedType(
        value_type, placement.placement, placement.all_equal
    )
  return Ref(name, path, value_type)


class _UnknownError(Exception):
  """A building block is of a kind that is not expected."""


def _is_closed(block: tff.framework.ComputationBuildingBlock) -> bool:
  """Tells whether a block refers to nothing but what is inside of it."""
  used, bound = set(), set()
  for inner in structures.inner_blocks(block):
    if isinstance(inner, tff.framework.Reference):
      used.add(inner.name)
    elif isinstance(inner, tff.framework.Lambda):
      bound.add(inner.parameter_name)
    elif isinstance(inner, tff.framework.Block):
      bound.update(name for name, _ in inner.locals)
  return used <= bound


def _resolve(
    block: tff.framework.ComputationBuildingBlock, names: dict[str, Value]
) -> Value:
  """Makes a struct of `Ref`, `Sent` and `Fixed` of a rearranging block."""
  framework = tff.framework
  if isinstance(block, framework.Reference) and block.name in names:
    return names[block.name]
  if isinstance(block, framework.Selection):
    source = _resolve(block.source, names)
    if block.name is not None:
      return getattr(source, block.name)
    return source[block.index]
  if isinstance(block, framework.Struct):
    return tff.structure.Struct(
        (name, _resolve(element, names))
        for name, element in tff.structure.iter_elements(block)
    )
  if isinstance(
      block,
      (framework.CompiledComputation, framework.Lambda, framework.Literal),
  ):
    if _is_closed(block):
      return Fixed(block, call_dominant.fingerprint(block))
  raise _UnknownError


def _rearrange(
    call: tff.framework.Call, names: dict[str, Value]
) -> Value | None:
  """Resolves a call that only rearranges; returns `None` for all others."""
  if not isinstance(call.function, tff.framework.Intrinsic):
    return None
  uri = call.function.uri
  if uri in _BROADCASTS:
    return structures.map_leaves(Sent, _resolve(call.argument, names))
  if uri in _ZIPS:
    return _resolve(call.argument, names)
  if uri in _MAPS and intrinsics.is_structural(call.argument[0]):
    function, value = call.argument
    return _resolve(
        function.result, {function.parameter_name: _resolve(value, names)}
    )
  return None


def to_steps(
    block: tff.framework.ComputationBuildingBlock, given: Container[str]
) -> Steps | None:
  """Rewrites a computation.

  Args:
    block: The computation in call-dominant form.
    given: Names of results that need not be computed.

  Returns:
    Its steps, or `None` if something in it is not as it is expected to be.
  """
  if not isinstance(block, tff.framework.Lambda) or not isinstance(
      block.result, tff.framework.Block
  ):
    return None
  names: dict[str, Value] = {}
  if block.parameter_name is not None:
    names[block.parameter_name] = _refs(
        block.parameter_name, block.parameter_type
    )
  steps = []
  try:
    for name, call in block.result.locals:
      if name in names or not isinstance(call, tff.framework.Call):
        return None
      if name in given:
        names[name] = _refs(name, call.type_signature)
        continue
      rearranged = _rearrange(call, names)
      if rearranged is not None:
        names[name] = rearranged
        continue
      argument = tff.structure.Struct([])
      if call.argument is not None:
        argument = _resolve(call.argument, names)
      function = call.function
      if not isinstance(
          function,
          (tff.framework.Intrinsic, tff.framework.CompiledComputation),
      ):
        return None
      steps.append(
          Step(
              name,
              call,
              function.uri
              if isinstance(function, tff.framework.Intrinsic)
              else call_dominant.fingerprint(function),
              argument,
          )
      )
      names[name] = _refs(name, call.type_signature)
    result = _resolve(block.result.result, names)
  except _UnknownError:
    return None
  return Steps(block.parameter_name, steps, result)
