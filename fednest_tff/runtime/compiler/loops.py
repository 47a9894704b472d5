"""Finds calls that are repeated round after round, and runs them in one loop.

An epoch with 60 Neumann terms repeats the same few calls 60 times, and
TensorFlow takes as long to prepare a graph as it has nodes.

*Blocks* of steps (`steps.py`) that follow each other become a loop if they are
equal but for their `Ref`s, and if each `Ref` is to what was there before all
blocks, or to its own block, or to the one before it. Of the first kind, what
differs from block to block is *stacked*. What is taken from the block before is
*carried*, and the first block has it from elsewhere. Steps that do not fit are
left as they are.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import intrinsics, invariants, placed
from fednest_tff.runtime.compiler.steps import (
    Fixed,
    Names,
    Ref,
    Runner,
    Sent,
    Step,
)
from fednest_tff.structures import Value

# Fewer blocks than this are written out.
_MIN_BLOCKS = 4
# A block has at most this many steps.
_MAX_PERIOD = 64

# Inside of a loop, the names of what is carried and of what was stacked.
_CARRIED = '<carried>'
_STACKED = '<stacked>'


class Loop(NamedTuple):
  """Equal blocks of steps.

  Attributes:
    count: How many there are.
    steps: Those of one block. In their arguments, what differs between blocks
      is a `Ref` to an element of `_CARRIED` or `_STACKED`.
    carried: For each element of `_CARRIED`, what the first block has, and what
      of a block the next one has.
    stacked: For each element of `_STACKED`, what the blocks have.
    results: What is used of blocks after the loop: the number of the block,
      what it is in `steps`, and how those who use it refer to it.
  """

  count: int
  steps: list[Step]
  carried: list[tuple[Ref, Ref]]
  stacked: list[tuple[Ref, ...]]
  results: list[tuple[int, Ref, Ref]]

  def run(self, runner: Runner, names: Names) -> Names:
    """Runs the loop.

    Args:
      runner: Runs the steps.
      names: The values of what the steps refer to.

    Returns:
      The values of `results`.
    """
    first = [before for before, _ in self.carried]
    after = [own for _, own in self.carried]
    rows = [refs[0] for refs in self.stacked]
    stacks = [
        tf.stack(tensors)
        for tensors in zip(
            *(
                _flatten(runner, [refs[block] for refs in self.stacked], names)
                for block in range(self.count)
            ),
            strict=True,
        )
    ]
    # Results of the last block are carried, or written over and over again.
    # Those of other blocks are written one after the other.
    wanted = list(dict.fromkeys(own for _, own, _ in self.results))
    early = {own for block, own, _ in self.results if block < self.count - 1}
    listed = [own for own in wanted if own in early]
    last = [own for own in wanted if own not in early and own not in after]

    def run_block(i: tf.Tensor, *state: tf.Tensor) -> list[tf.Tensor]:
      own = dict(names)
      own[_CARRIED] = _unpack(runner, first, state)
      own[_STACKED] = _unpack(runner, rows, [stack[i] for stack in stacks])
      for step in self.steps:
        own[step.name] = runner.run(step, own)
      return _flatten(runner, [*after, *listed, *last], own)

    specs = _specs(runner, first)
    arrays = (
        _new_arrays(runner, listed, self.count), _new_arrays(runner, last, 1)
    )
    run_rest = invariants.separate(
        run_block, [tf.TensorSpec([], tf.int32), *specs]
    )

    def body(
        i: tf.Tensor,
        state: list[tf.Tensor],
        all_listed: list[tf.TensorArray],
        all_last: list[tf.TensorArray],
    ) -> tuple[Value, ...]:
      found = iter(run_rest(i, *state))
      state = [next(found) for _ in state]
      all_listed = [array.write(i, next(found)) for array in all_listed]
      all_last = [array.write(0, next(found)) for array in all_last]
      return i + 1, state, all_listed, all_last

    _, state, all_listed, all_last = tf.while_loop(
        lambda i, *_: i < self.count,
        body,
        (tf.constant(0), _flatten(runner, first, names), *arrays),
        shape_invariants=(
            tf.TensorShape([]),
            [spec.shape for spec in specs],
            *([tf.TensorShape(None)] * len(column) for column in arrays),
        ),
    )

    def read(
        refs: list[Ref], found: list[tf.TensorArray], index: int
    ) -> dict[Ref, Value]:
      tensors = [array.read(index) for array in found]
      return dict(zip(refs, _unpack(runner, refs, tensors), strict=True))

    final = dict(zip(after, _unpack(runner, after, state), strict=True))
    final |= read(last, all_last, 0)
    of_block = {
        block: read(listed, all_listed, block)
        for block, own, _ in self.results if own in early
    }
    return {
        (used.name, used.path): (of_block[block] if own in early else final)[own]
        for block, own, used in self.results
    }


def _specs(runner: Runner, refs: Iterable[Ref]) -> list[tf.TensorSpec]:
  """Lists the specs of `_flatten`."""
  return [
      spec
      for ref in refs
      for spec in placed.value_specs(runner.cohort, ref.leaf_type)
  ]


def _flatten(
    runner: Runner, refs: Iterable[Ref], names: Names
) -> list[tf.Tensor]:
  """Lists the tensors of the values of `refs`."""
  return [
      tensor
      for ref in refs
      for tensor in placed.flatten_result(
          runner.cohort, ref.leaf_type, runner.value(ref, names)
      )
  ]


def _unpack(
    runner: Runner, refs: Iterable[Ref], tensors: Iterable[tf.Tensor]
) -> tff.structure.Struct:
  """Makes the values again of which `_flatten` made tensors."""
  remaining = iter(tensors)
  return tff.structure.Struct.unnamed(*[
      placed.unpack_value(runner.cohort, ref.leaf_type, remaining)
      for ref in refs
  ])


def _new_arrays(
    runner: Runner, refs: Iterable[Ref], size: int
) -> list[tf.TensorArray]:
  return [
      tf.TensorArray(spec.dtype, size, element_shape=spec.shape)
      for spec in _specs(runner, refs)
  ]


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

  def replace(leaf: Ref | Sent | Fixed) -> Ref | Sent | Fixed:
    if isinstance(leaf, Sent):
      return Sent(replace(leaf.value))
    return next(remaining) if isinstance(leaf, Ref) else leaf

  return step._replace(argument=structures.map_leaves(replace, step.argument))


def _key(step: Step) -> Hashable:
  """Returns what a step is, but for what its `Ref`s refer to."""

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
  """Tells whether a value is a tensor of a known shape, at each client too."""
  leaf_type = ref.leaf_type
  if isinstance(leaf_type, tff.FederatedType):
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
  ) -> tuple[int, int, tuple[int, ...]] | None:
    """Says where a value comes from.

    Args:
      ref: The value.
      start: The first step of the first block.
      period: The number of steps of a block.
      block: The number of the block in which the value is used.

    Returns:
      How many blocks before this one it was computed, by which of the block's
      steps, and which part of the result it is; `None` if before all blocks.
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

    def origins(block: int) -> list[tuple[int, int, tuple[int, ...]] | None]:
      return [self._origin(ref, start, period, block) for ref in refs(block)]

    later = origins(1)
    # In the first block, what is carried comes from before all blocks.
    if origins(0) != [
        None if origin and origin[0] == 1 else origin for origin in later
    ] or any(origin and origin[0] > 1 for origin in later):
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
    for origin, row in zip(later, zip(*map(refs, range(count))), strict=True):
      ref = row[0]
      if origin and origin[0] == 1:
        _, offset, path = origin
        pair = ref, Ref(steps[offset].name, path, ref.leaf_type)
        number = carried.setdefault(pair, len(carried))
        ref = Ref(_CARRIED, (number,), ref.leaf_type)
      elif not origin and len(set(row)) > 1:
        number = stacked.setdefault(row, len(stacked))
        ref = Ref(_STACKED, (number,), ref.leaf_type)
      replaced.append(ref)
    results = self._results(start, period, count)
    moved = [*results, *carried, *stacked]
    if not all(_is_tensor(group[-1]) for group in moved):
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
    result: A struct of `Ref`, `Sent` and `Fixed` that is needed of them.

  Returns:
    The steps and loops, in order.
  """
  finder = _Finder(steps, result)
  loops: dict[int, Loop] = {}
  taken: set[int] = set()
  # Those first that save most; of the same steps, the shortest blocks do.
  runs = sorted(finder.runs(), key=lambda run: run[1] - run[2] + run[0])
  for period, begin, end in runs:
    # Blocks may begin with any of their steps.
    for start in range(begin, min(begin + period, end) + 1):
      limit = (end - start) // period
      inside = range(start, start + period * limit)
      if limit < _MIN_BLOCKS or not taken.isdisjoint(inside):
        continue
      loop = finder.loop(start, period, limit)
      if loop is not None:
        loops[start] = loop
        taken.update(inside[: period * loop.count])
        break
  found: list[Step | Loop] = []
  for k, step in enumerate(steps):
    if k in loops:
      found.append(loops[k])
    elif k not in taken:
      found.append(step)
  return found
