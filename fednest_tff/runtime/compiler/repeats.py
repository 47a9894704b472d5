"""Finds steps that are repeated round after round.

An epoch with 60 Neumann terms repeats the same few calls 60 times, and the more
nodes a graph has, the longer TensorFlow takes to prepare it.

*Blocks* of steps (`steps.py`) that follow each other become a loop (`loops.py`)
if they are equal but for their `Ref`s, and if each `Ref` is to what was there
before all blocks, or to its own block, or to the one before it. Steps that do
not fit are left as they are.
"""

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import intrinsics
from fednest_tff.runtime.compiler.loops import CARRIED, STACKED, Loop, Program
from fednest_tff.runtime.compiler.steps import Fixed, Ref, Sent, Step, to_steps
from fednest_tff.structures import Value

# Fewer blocks than this are written out: with 4, the first call of an epoch
# takes as long either way; with 5 it is a tenth faster in a loop, with 20 twice
# as fast.
_MIN_BLOCKS = 5
# A block has at most this many steps.
_MAX_PERIOD = 64

# How many blocks before this one a value was computed, by which of the block's
# steps, and which part of the result it is; `None` if before all blocks.
_Origin: TypeAlias = tuple[int, int, tuple[int, ...]] | None


def _refs(symbolic: Value) -> list[Ref]:
  """Lists the `Ref`s in a struct of `Ref`, `Sent` and `Fixed`."""
  found = [
      leaf.value if isinstance(leaf, Sent) else leaf
      for leaf in structures.leaves(symbolic)
  ]
  return [leaf for leaf in found if isinstance(leaf, Ref)]


def _replace(step: Step, refs: Iterable[Ref]) -> Step:
  """Replaces the `Ref`s in a step's argument."""
  remaining = iter(refs)

  def replace(leaf: Ref | Fixed) -> Ref | Fixed:
    return next(remaining) if isinstance(leaf, Ref) else leaf

  argument = structures.map_leaves(
      lambda leaf: Sent(replace(leaf.value))
      if isinstance(leaf, Sent) else replace(leaf),
      step.argument,
  )
  return step._replace(argument=argument)


def _key(step: Step) -> Hashable:
  """Returns a key that is equal for steps that differ by their `Ref`s only."""

  def leaf_key(leaf: Ref | Sent | Fixed) -> Hashable:
    if isinstance(leaf, Sent):
      return 'sent', leaf_key(leaf.value)
    return leaf.key if isinstance(leaf, Fixed) else leaf.leaf_type

  return (
      step.function,
      step.call.type_signature,
      structures.fold(step.argument, leaf_key, tuple),
  )


def _is_tensor(ref: Ref) -> bool:
  """Tells whether a value is a tensor of a known shape, or one per client."""
  leaf_type = ref.leaf_type
  if isinstance(leaf_type, tff.FederatedType):
    if structures.is_at_clients(leaf_type) and leaf_type.all_equal:
      return False  # It may be a `Broadcast` or not.
    leaf_type = leaf_type.member
  return isinstance(leaf_type, tff.TensorType) and tf.TensorShape(
      leaf_type.shape
  ).is_fully_defined()


def _is_stateless(step: Step) -> bool:
  """Tells whether a step has the same result whenever it runs."""
  functions = [
      leaf.block for leaf in structures.leaves(step.argument)
      if isinstance(leaf, Fixed)
  ]
  if not isinstance(step.call.function, tff.framework.Intrinsic):
    functions.append(step.call.function)
  return all(map(intrinsics.is_stateless, functions))


class _Finder:
  """Finds loops among steps."""

  def __init__(self, steps: Sequence[Step], result: Value):
    self._steps = steps
    self._refs = [_refs(step.argument) for step in steps]
    self._result_refs = _refs(result)
    self._positions = {step.name: k for k, step in enumerate(steps)}
    numbers: dict[Hashable, int] = {}
    self._keys = [
        numbers.setdefault(_key(step), len(numbers)) for step in steps
    ]

  def runs(self) -> Iterator[tuple[int, int, int]]:
    """Yields period, begin and end of steps that repeat with a period."""
    keys = self._keys
    for period in range(1, min(_MAX_PERIOD, len(keys) // _MIN_BLOCKS) + 1):
      begin = 0
      for k in range(period, len(keys) + 1):
        if k == len(keys) or keys[k] != keys[k - period]:
          if k - begin >= _MIN_BLOCKS * period:
            yield period, begin, k
          begin = k - period + 1

  def _origin(
      self, ref: Ref, start: int, period: int, block: int
  ) -> _Origin:
    """Says where a value comes from.

    Args:
      ref: The value.
      start: The first step of the first block.
      period: The number of steps of a block.
      block: The number of the block in which the value is used.
    """
    position = self._positions.get(ref.name, -1)
    if position < start:
      return None
    of_block, offset = divmod(position - start, period)
    return block - of_block, offset, ref.path

  def loop(self, start: int, period: int, limit: int) -> Loop | None:
    """Makes a loop, if that is possible.

    Args:
      start: The first step.
      period: The number of steps of a block.
      limit: How many blocks there may be.

    Returns:
      The loop, of as many blocks as possible, or `None`.
    """

    def refs(block: int) -> list[Ref]:
      begin = start + block * period
      return [ref for own in self._refs[begin : begin + period] for ref in own]

    def origins(block: int) -> list[_Origin]:
      return [self._origin(ref, start, period, block) for ref in refs(block)]

    later = origins(1)
    # In the first block, what is carried comes from before all blocks.
    if origins(0) != [
        None if origin and origin[0] == 1 else origin for origin in later
    ]:
      return None
    count = 2
    while count < limit and origins(count) == later:
      count += 1
    steps = self._steps[start : start + period]
    if count < _MIN_BLOCKS or not all(map(_is_stateless, steps)):
      return None
    carried: dict[tuple[Ref, Ref], int] = {}
    stacked: dict[tuple[Ref, ...], int] = {}
    replaced = []
    rows = zip(*map(refs, range(count)), strict=True)
    for origin, row in zip(later, rows, strict=True):
      ref = row[0]
      if origin and origin[0] == 1:
        _, offset, path = origin
        pair = ref, Ref(steps[offset].name, path, ref.leaf_type)
        number = carried.setdefault(pair, len(carried))
        ref = Ref(CARRIED, (number,), ref.leaf_type)
      elif not origin and len(set(row)) > 1:
        number = stacked.setdefault(row, len(stacked))
        ref = Ref(STACKED, (number,), ref.leaf_type)
      replaced.append(ref)
    results = self._results(start, period, count)
    moved = [own for _, own, _ in results]
    moved += [own for _, own in carried] + [row[0] for row in stacked]
    if not all(map(_is_tensor, moved)):
      return None
    remaining = iter(replaced)
    return Loop(
        count,
        [_replace(step, remaining) for step in steps],
        list(carried),
        list(stacked),
        results,
    )

  def _results(
      self, start: int, period: int, count: int
  ) -> list[tuple[int, Ref, Ref]]:
    """Lists what steps after a loop, and the result, use of it."""
    end = start + period * count
    later = [ref for own in self._refs[end:] for ref in own]
    found = []
    for ref in dict.fromkeys(later + self._result_refs):
      position = self._positions.get(ref.name, -1)
      if start <= position < end:
        block, offset = divmod(position - start, period)
        own = ref._replace(name=self._steps[start + offset].name)
        found.append((block, own, ref))
    return found


def find_loops(steps: Sequence[Step], result: Value) -> list[Step | Loop]:
  """Finds loops among steps.

  Args:
    steps: The steps.
    result: The computation's result, a struct of `Ref`, `Sent` and `Fixed`.

  Returns:
    The steps and loops, in order.
  """
  finder = _Finder(steps, result)
  loops: dict[int, Loop] = {}
  taken: set[int] = set()
  # Runs that save most come first; of the same steps, the shortest blocks.
  runs = sorted(finder.runs(), key=lambda run: run[1] - run[2] + run[0])
  for period, begin, end in runs:
    # Any step may be the first of a block; the last start skips one block.
    for start in range(begin, begin + period + 1):
      limit = (end - start) // period
      inside = range(start, start + period * limit)
      if limit < _MIN_BLOCKS or not taken.isdisjoint(inside):
        continue
      loop = finder.loop(start, period, limit)
      if loop is not None:
        loops[start] = loop
        taken.update(inside[: period * loop.num_blocks])
        break
  return [
      loops.get(k, step) for k, step in enumerate(steps)
      if k in loops or k not in taken
  ]


def to_program(
    block: tff.framework.ComputationBuildingBlock, given: Container[str]
) -> Program | None:
  """Rewrites a computation that has loops.

  Args:
    block: The computation in call-dominant form.
    given: Names of results that need not be computed.

  Returns:
    The computation, or `None` if there is no loop in it.
  """
  found = to_steps(block, given)
  if found is None:
    return None
  parts = find_loops(found.steps, found.result)
  if not any(isinstance(part, Loop) for part in parts):
    return None
  return Program(found.parameter, parts, found.result)
