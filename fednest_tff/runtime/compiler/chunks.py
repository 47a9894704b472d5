"""Large cohorts, some clients at a time, so that memory stays bounded.

With thousands of clients not all of their results fit into memory: a model of
0.6 MB is 6 GB at 10,000 clients. So a large result at the clients is postponed:
nothing is computed until it is aggregated, and then a chunk of clients is
computed, added to the aggregate and forgotten. As many chunks as there are
cores are in memory at the same time.
"""

from collections.abc import Callable
import os
from typing import NamedTuple

import tensorflow as tf

# From the first client of a chunk and the one after its last to the tensors of
# these clients, stacked, one for each leaf of the result.
ComputeRows = Callable[[tf.Tensor, tf.Tensor], list[tf.Tensor]]
# From a client to its tensors.
ComputeRow = Callable[[tf.Tensor], list[tf.Tensor]]

# How many chunks are computed at the same time, each mostly by one core.
_AT_A_TIME = os.cpu_count() or 1
# A result is large if a client's is at least this many bytes.
_LARGE = 2**14


def is_large(specs: list[tf.TensorSpec]) -> bool:
  """Tells whether a client's tensors are large, and their shapes known.

  Args:
    specs: The specs of one client's tensors.

  Returns:
    Whether they are to be postponed. Tensors of unknown shape depend on the
    client's data and, like the data, are kept in memory.
  """
  if not all(spec.shape.is_fully_defined() for spec in specs):
    return False
  return sum(
      spec.shape.num_elements() * spec.dtype.size for spec in specs
  ) >= _LARGE


class Results:
  """The results of a map over one part's clients, computed where needed."""

  def __init__(self, compute_rows: ComputeRows, compute_row: ComputeRow):
    self._compute_rows = compute_rows
    self._compute_row = compute_row
    # The arguments and the results of the last computation.
    self._last: tuple[tuple[tf.Tensor, ...], list[tf.Tensor]] | None = None

  def _once(
      self,
      compute: Callable[..., list[tf.Tensor]],
      *asked: tf.Tensor,
  ) -> list[tf.Tensor]:
    """Computes all leaves when the first of them is asked for."""
    if self._last is None or [*map(id, self._last[0])] != [*map(id, asked)]:
      self._last = asked, compute(*asked)
    return self._last[1]

  def rows(self, begin: tf.Tensor, end: tf.Tensor) -> list[tf.Tensor]:
    """Computes the results of the clients from `begin` to before `end`."""
    return self._once(self._compute_rows, begin, end)

  def row(self, i: tf.Tensor) -> list[tf.Tensor]:
    """Computes the results of one client."""
    return self._once(self._compute_row, i)


class Postponed(NamedTuple):
  """One leaf of `Results`: the tensors of a part's clients."""

  results: Results
  leaf: int

  def rows(self, begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    return self.results.rows(begin, end)[self.leaf]

  def row(self, i: tf.Tensor) -> tf.Tensor:
    return self.results.row(i)[self.leaf]


def fold(
    size: tf.Tensor,
    chunk: int | tf.Tensor,
    step: Callable[
        [tf.Tensor, tf.Tensor, list[tf.Tensor]], list[tf.Tensor]
    ],
    start: list[tf.Tensor],
) -> list[tf.Tensor]:
  """Goes through all chunks of a part in their order.

  Args:
    size: The number of clients of the part.
    chunk: The number of clients of a chunk; the last one may have fewer.
    step: Maps the first client of a chunk, the one after its last, and tensors
      to tensors of the same types.
    start: The tensors for the first chunk.

  Returns:
    The tensors after the last chunk.
  """

  def body(
      begin: tf.Tensor, tensors: list[tf.Tensor]
  ) -> tuple[tf.Tensor, list[tf.Tensor]]:
    end = tf.minimum(begin + chunk, size)
    return end, step(begin, end, tensors)

  _, tensors = tf.while_loop(
      lambda begin, _: begin < size,
      body,
      (tf.constant(0), start),
      parallel_iterations=_AT_A_TIME,
  )
  return tensors


def concatenate(
    size: tf.Tensor,
    chunk: int,
    compute: ComputeRows,
    specs: list[tf.TensorSpec],
) -> list[tf.Tensor]:
  """Computes the tensors of all clients of a part by chunks.

  Args:
    size: The number of clients of the part.
    chunk: The number of clients of a chunk.
    compute: Computes the tensors of a chunk.
    specs: The specs of one client's tensors.

  Returns:
    The tensors of all clients, stacked.
  """
  count = (size + chunk - 1) // chunk
  arrays = [
      tf.TensorArray(
          spec.dtype,
          size=count,
          element_shape=[None, *spec.shape],
          infer_shape=False,
      )
      for spec in specs
  ]
  arrays = fold(
      size,
      chunk,
      lambda begin, end, arrays: [
          array.write(begin // chunk, rows)
          for array, rows in zip(arrays, compute(begin, end), strict=True)
      ],
      arrays,
  )
  return [
      tf.ensure_shape(array.concat(), [None, *spec.shape])
      for array, spec in zip(arrays, specs, strict=True)
  ]
