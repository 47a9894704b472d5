"""A cohort whose number of clients is known only when the function is called.

The function is compiled once and then serves any number of clients. What the
clients of an even part (`parts.py`) compute is vectorised: one matrix product
for all clients in place of one for each. What cannot be vectorised, such as
reading a dataset, is a loop over the clients, and so is all of an uneven part.
If clients may run in any order, there is one loop for each core
(`side_by_side.py`).
A cohort that would take too much memory is computed by chunks (`chunks.py`).
"""

from collections.abc import Callable, Hashable, Sequence

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import (
    chunks,
    converters,
    graphs,
    side_by_side,
    values,
)
from fednest_tff.runtime.compiler import rows as rows_lib
from fednest_tff.runtime.compiler.broadcast import (
    Broadcast,
    Function,
    ReduceAtOnce,
    split_broadcasts,
)
from fednest_tff.runtime.compiler.parts import Part, Parts, is_flat
from fednest_tff.runtime.compiler.rows import Leaf, Rows
from fednest_tff.structures import Value


class Batched(Parts):
  """A cohort of any number of clients, at least one.

  Attributes:
    key: What the function depends on.
    is_vectorised: Whether some clients are computed at once.
  """

  def __init__(self, parts: Sequence[Part], chunk: int | None = None):
    """Creates the cohort.

    Args:
      parts: The parts, none of them empty.
      chunk: How many clients of a part are computed at once; `None` for all.
    """
    super().__init__(parts)
    self._chunk = chunk
    self.key = chunk, *((part.device, part.is_even) for part in parts)
    self.is_vectorised = any(part.is_even for part in parts)
    # Functions of all clients, by the function of one and by `_map_rows`.
    self._vectorised: dict[
        Function, dict[Hashable, Callable[..., list[tf.Tensor]]]
    ] = {}

  def _client_value(self, value: Value, part: int, i: tf.Tensor) -> Value:
    return structures.map_leaves(
        lambda v: v.value if isinstance(v, Broadcast) else v.row(part, i),
        value,
    )

  def map(
      self,
      function: Function,
      value: Value,
      result_member: tff.Type,
      is_stateless: bool = False,
  ) -> Value:
    """Applies `function`, which returns a `result_member`, to each value.

    Args:
      function: The function.
      value: A value at the clients.
      result_member: The type of the function's result.
      is_stateless: Whether the function only computes tensors from tensors.

    Returns:
      The results at the clients.
    """
    columns: list[list[Rows]] = [[] for _ in values.leaf_specs(result_member)]
    is_postponed = (
        self._chunk is not None
        and is_stateless
        and chunks.is_large(values.leaf_specs(result_member))
    )
    for k, part in enumerate(self._parts):
      with tf.device(part.device):
        if is_postponed:
          rows = self._postpone(function, value, k, len(columns))
        elif is_stateless and part.is_even:
          rows = self._map_at_once(function, value, result_member, k)
        else:
          rows = self._map_in_loop(function, value, result_member, k)
      for column, row in zip(columns, rows, strict=True):
        column.append(row)
    mapped = self._pack(result_member, columns)
    if is_stateless and isinstance(function, graphs.ImportedGraph):
      return self._with_broadcasts(function, value, mapped)
    return mapped

  def _with_broadcasts(
      self, function: graphs.ImportedGraph, value: Value, mapped: Value
  ) -> Value:
    """Replaces results that are the same at all clients by `Broadcast`s."""
    leaves = structures.leaves(split_broadcasts(value))
    depend = function.depend([isinstance(leaf, Leaf) for leaf in leaves])
    if all(depend):
      return mapped
    # Any client will do: results that depend on its values are not used.
    first = self._client_value(value, 0, tf.constant(0))
    same = structures.leaves(function(first))
    return structures.pack(
        mapped,
        [
            leaf if depends else Broadcast(tensor)
            for leaf, depends, tensor in zip(
                structures.leaves(mapped), depend, same, strict=True
            )
        ],
    )

  def _postpone(
      self, function: Function, value: Value, part: int, count: int
  ) -> list[Rows]:
    """Applies a function later, to the values of a chunk or of one client."""
    results = chunks.Results(
        lambda begin, end: self._map_rows(function, value, part, begin, end),
        lambda i: structures.leaves(
            function(self._client_value(value, part, i))
        ),
    )
    return [chunks.Postponed(results, leaf) for leaf in range(count)]

  def _stack_postponed(self, leaf: Leaf, part: int) -> tf.Tensor:
    """Computes a postponed leaf, for all clients of a part."""
    size, postponed = self._sizes[part], leaf.parts[part]
    row = postponed.row(tf.constant(0))
    chunk = self._chunk if self._parts[part].is_even else None
    (found,) = chunks.concatenate(
        size,
        chunk or 1,
        lambda begin, end: [
            postponed.rows(begin, end)
            if chunk else postponed.row(begin)[tf.newaxis]
        ],
        [tf.TensorSpec(leaf.shape, row.dtype)],
    )
    return found

  def _map_at_once(
      self, function: Function, value: Value, member: tff.Type, part: int
  ) -> list[tf.Tensor]:
    """Applies a function to all values of an even part at once."""
    size = self._sizes[part]
    if self._chunk is None:
      return self._map_rows(function, value, part)
    return chunks.concatenate(
        size,
        self._chunk,
        lambda begin, end: self._map_rows(function, value, part, begin, end),
        values.leaf_specs(member),
    )

  def _map_rows(
      self,
      function: Function,
      value: Value,
      part: int,
      begin: tf.Tensor | None = None,
      end: tf.Tensor | None = None,
  ) -> list[tf.Tensor]:
    """Applies a function to values of an even part at once.

    Args:
      function: The function.
      value: The value at the clients.
      part: The part.
      begin: The first of the clients; `None` for all of them.
      end: The client after the last one.

    Returns:
      The leaves of the results, stacked.
    """
    value = split_broadcasts(value)
    leaves = structures.leaves(value)
    stacked = [
        leaf.parts[part] if begin is None else leaf.rows(part, begin, end)
        for leaf in leaves
        if isinstance(leaf, Leaf)
    ]
    same = [leaf.value for leaf in leaves if isinstance(leaf, Broadcast)]
    if not stacked:  # All clients compute the same.
      result = function(structures.pack(value, same))
      size = self._sizes[part] if begin is None else end - begin
      return [
          rows_lib.repeat(tensor, size) for tensor in structures.leaves(result)
      ]
    is_same = structures.map_leaves(
        lambda leaf: isinstance(leaf, Broadcast), value
    )
    signature = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in stacked]
    signature += [tf.TensorSpec(t.shape, t.dtype) for t in same]
    key = tuple(structures.leaves(is_same)), tuple(signature)
    if isinstance(function, graphs.ImportedGraph):
      kept = function.vectorised
    else:
      kept = self._vectorised.setdefault(function, {})
    if key not in kept:
      kept[key] = _vectorise(function, is_same, signature)
    return kept[key](*stacked, *same)

  def _map_in_loop(
      self, function: Function, value: Value, member: tff.Type, part: int
  ) -> list[Rows]:
    """Applies a function to the values of a part, one by one."""
    specs = values.leaf_specs(member)
    arrays = side_by_side.map_clients(
        lambda i: structures.leaves(
            function(self._client_value(value, part, i))
        ),
        self._sizes[part],
        specs,
        is_repeatable=getattr(function, 'is_repeatable', False),
    )
    return [
        array if is_flat(spec, self._parts[part]) else array.stack()
        for array, spec in zip(arrays, specs, strict=True)
    ]

  def reduce(
      self,
      value: Value,
      zero: Value,
      accumulate: Function,
      merge: Function,
      at_once: ReduceAtOnce | None = None,
  ) -> Value:
    """Aggregates a value at the clients; see `Unrolled.reduce`.

    Args:
      value: The value.
      zero: The aggregate of no clients.
      accumulate: Maps (aggregate, client's value) to an aggregate.
      merge: Maps two aggregates to one.
      at_once: Maps the values of several clients, and their number, to their
        aggregate. A leaf is a tensor, stacked over the clients, or a
        `Broadcast`.

    Returns:
      The aggregate of all clients.
    """
    value = split_broadcasts(value)
    totals = []
    for k, part in enumerate(self._parts):
      with tf.device(part.device):
        if self._chunk is not None and part.is_even:
          totals.append(
              self._reduce_by_chunks(value, zero, accumulate, merge, at_once, k)
          )
          continue
        stacked = self._stack(value, k)
        if at_once is None or stacked is None:
          totals.append(
              self._reduce_in_loop(value, zero, accumulate, k, self._sizes[k])
          )
        else:
          totals.append(at_once(stacked, self._sizes[k]))
    result = totals[0]
    for total in totals[1:]:
      result = merge(tff.structure.Struct.unnamed(result, total))
    return result

  def _stack(self, value: Value, part: int) -> Value | None:
    """Stacks the values of a part; returns `None` if that is not possible."""
    if not all(
        isinstance(leaf, Broadcast) or tf.is_tensor(leaf.parts[part])
        for leaf in structures.leaves(value)
    ):
      return None
    return structures.map_leaves(
        lambda leaf: leaf if isinstance(leaf, Broadcast) else leaf.parts[part],
        value,
    )

  def _reduce_by_chunks(
      self,
      value: Value,
      zero: Value,
      accumulate: Function,
      merge: Function,
      at_once: ReduceAtOnce | None,
      part: int,
  ) -> Value:
    """Aggregates an even part; computes what was postponed."""

    def step(
        begin: tf.Tensor, end: tf.Tensor, total: list[tf.Tensor]
    ) -> list[tf.Tensor]:
      rows = structures.map_leaves(
          lambda leaf: leaf
          if isinstance(leaf, Broadcast) else leaf.rows(part, begin, end),
          value,
      )
      so_far = structures.pack(zero, total)
      if at_once is not None:
        added = at_once(rows, end - begin)
        result = merge(tff.structure.Struct.unnamed(so_far, added))
      else:
        # As if these rows were all that the part has.
        chunk = structures.map_leaves(
            lambda leaf: leaf
            if isinstance(leaf, Broadcast)
            else Leaf([leaf] * len(self._parts), leaf.shape[1:]),
            rows,
        )
        result = self._reduce_in_loop(
            chunk, so_far, accumulate, part, end - begin
        )
      return structures.leaves(result)

    size = self._sizes[part]
    total = chunks.fold(
        size, self._chunk or size, step, structures.leaves(zero)
    )
    return structures.pack(zero, total)

  def _reduce_in_loop(
      self,
      value: Value,
      zero: Value,
      accumulate: Function,
      part: int,
      size: tf.Tensor,
  ) -> Value:
    """Aggregates the values of the first `size` clients of a part."""

    def step(
        i: tf.Tensor, total: list[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
      pair = tff.structure.Struct.unnamed(
          structures.pack(zero, total), self._client_value(value, part, i)
      )
      return i + 1, structures.leaves(accumulate(pair))

    _, total = tf.while_loop(
        lambda i, _: i < size,
        step,
        (tf.constant(0), structures.leaves(zero)),
    )
    return structures.pack(zero, total)


def _vectorise(
    function: Function, is_same: Value, signature: Sequence[tf.TensorSpec]
) -> Callable[..., list[tf.Tensor]]:
  """Turns a function of one client into a TensorFlow function of all clients.

  Args:
    function: A function of one client's value.
    is_same: A struct like that value. A leaf says whether it is the same at all
      clients.
    signature: The tensors of the leaves that differ, stacked over the clients,
      and then those of the leaves that are the same.

  Returns:
    A function of such tensors that returns the results, stacked.
  """
  kinds = structures.leaves(is_same)
  num_stacked = kinds.count(False)

  @tf.function(input_signature=signature, autograph=False)
  def vectorised(*tensors: tf.Tensor) -> list[tf.Tensor]:
    def compute(rows: list[tf.Tensor]) -> list[tf.Tensor]:
      of_client, of_all = iter(rows), iter(tensors[num_stacked:])
      leaves = [next(of_all) if same else next(of_client) for same in kinds]
      write_nodes = getattr(function, 'write_nodes', function)
      return structures.leaves(write_nodes(structures.pack(is_same, leaves)))

    return converters.vectorized_map(compute, tensors[:num_stacked])

  return vectorised.get_concrete_function()
