"""Runs steps that are repeated round after round in one loop.

The steps of a round are a *block*. What a block takes from the one before is
*carried*; the first block has it from elsewhere. What was there before all
blocks, but differs from block to block, such as a seed, is *stacked*.
`repeats.py` finds the loops of a computation.
"""

from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import invariants, placed
from fednest_tff.runtime.compiler.steps import Names, Ref, Runner, Step
from fednest_tff.structures import Value

# The names of carried values and of stacked values inside of a loop.
CARRIED = '<carried>'
STACKED = '<stacked>'


class Loop(NamedTuple):
  """A loop over equal blocks of steps.

  Attributes:
    num_blocks: How many there are.
    steps: Those of one block. In their arguments, what differs between blocks
      is a `Ref` to an element of `CARRIED` or `STACKED`.
    carried: For each element of `CARRIED`, the value that the first block
      takes, and the value of a block that the next block takes.
    stacked: For each element of `STACKED`, its values, one per block.
    results: The values that are used after the loop: the number of the block,
      the `Ref` to the value in `steps`, and the `Ref` by which it is used.
  """

  num_blocks: int
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
                for block in range(self.num_blocks)
            ),
            strict=True,
        )
    ]
    # A value that only the last block must give is carried, or every block
    # overwrites it. Values of earlier blocks are written one after the other.
    wanted = list(dict.fromkeys(own for _, own, _ in self.results))
    early = {
        own for block, own, _ in self.results if block + 1 < self.num_blocks
    }
    listed = [own for own in wanted if own in early]
    last = [own for own in wanted if own not in early and own not in after]

    def run_block(i: tf.Tensor, *state: tf.Tensor) -> list[tf.Tensor]:
      own = dict(names)
      own[CARRIED] = _unpack(runner, first, state)
      own[STACKED] = _unpack(runner, rows, [stack[i] for stack in stacks])
      for step in self.steps:
        own[step.name] = runner.run(step, own)
      return _flatten(runner, [*after, *listed, *last], own)

    specs = _specs(runner, first)
    arrays = (
        _new_arrays(runner, listed, self.num_blocks),
        _new_arrays(runner, last, 1),
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
      state = [tf.ensure_shape(next(found), spec.shape) for spec in specs]
      all_listed = [array.write(i, next(found)) for array in all_listed]
      all_last = [array.write(0, next(found)) for array in all_last]
      return i + 1, state, all_listed, all_last

    _, state, all_listed, all_last = tf.while_loop(
        lambda i, *_: i < self.num_blocks,
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
    blocks = {block for block, own, _ in self.results if own in early}
    of_block = {block: read(listed, all_listed, block) for block in blocks}
    return {
        (used.name, used.path):
            of_block[block][own] if own in early else final[own]
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
  """The inverse of `_flatten`: makes values of its tensors."""
  remaining = iter(tensors)
  return tff.structure.Struct.unnamed(*[
      placed.unpack_value(runner.cohort, ref.leaf_type, remaining)
      for ref in refs
  ])


def _new_arrays(
    runner: Runner, refs: Iterable[Ref], size: int
) -> list[tf.TensorArray]:
  """Creates arrays of the tensors of `_flatten`."""
  return [
      tf.TensorArray(spec.dtype, size, element_shape=spec.shape)
      for spec in _specs(runner, refs)
  ]


class Program(NamedTuple):
  """A computation with loops.

  Attributes:
    parameter: The name of its parameter; `None` if it has none.
    parts: Its steps and loops, in order.
    result: Its result, a struct of `Ref`, `Sent` and `Fixed`.
  """

  parameter: str | None
  parts: list[Step | Loop]
  result: Value

  def run(
      self, runner: Runner, given: dict[str, Value], argument: Value
  ) -> Value:
    """Runs the computation.

    Args:
      runner: Runs the steps.
      given: Values of names that need not be computed.
      argument: The argument; `None` for none.

    Returns:
      The result.
    """
    names: Names = {name: value for name, value in given.items()}
    if self.parameter is not None:
      names[self.parameter] = argument
    for part in self.parts:
      if isinstance(part, Loop):
        names |= part.run(runner, names)
      else:
        names[part.name] = runner.run(part, names)
    return runner.value(self.result, names)
