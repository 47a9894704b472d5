"""Loops over clients, one loop for each core.

Clients that train on datasets cannot be vectorised. TensorFlow would run them
one after the other: an operation that reduces a dataset has one thread, which
all iterations of a loop share. So the clients are divided among several loops,
each with its own copy of the operation.
"""

from collections.abc import Callable, Sequence
import os

import tensorflow as tf

from fednest_tff.runtime.compiler import rows as rows_lib

# Every loop is written into the graph, and holds a client's data in memory.
_MAX_LOOPS = 16


def _num_loops() -> int:
  threads = tf.config.threading.get_inter_op_parallelism_threads()
  if threads < 0:  # TensorFlow runs operations one after the other.
    return 1
  return min(threads or len(os.sched_getaffinity(0)), _MAX_LOOPS)


def _fill(
    compute: Callable[[tf.Tensor], list[tf.Tensor]],
    begin: tf.Tensor,
    end: tf.Tensor,
    arrays: list[tf.TensorArray],
) -> list[tf.TensorArray]:
  """Writes results for `begin`, ..., `end - 1`, from the arrays' beginning."""

  def step(
      i: tf.Tensor, arrays: list[tf.TensorArray]
  ) -> tuple[tf.Tensor, list[tf.TensorArray]]:
    return i + 1, [
        array.write(i - begin, result)
        for array, result in zip(arrays, compute(i), strict=True)
    ]

  _, arrays = tf.while_loop(
      lambda i, _: i < end,
      step,
      (begin, arrays),
      # Not more clients in memory than there are loops.
      parallel_iterations=1,
  )
  return arrays


def map_clients(
    compute: Callable[[tf.Tensor], list[tf.Tensor]],
    size: tf.Tensor,
    specs: Sequence[tf.TensorSpec],
    is_repeatable: bool,
) -> list[tf.TensorArray]:
  """Computes something for each client.

  Args:
    compute: Maps the number of a client to its results.
    size: The number of clients.
    specs: The specs of a client's results.
    is_repeatable: Whether clients may be computed in any order, and side by
      side. The results are the same, if so.

  Returns:
    An array of the results of all clients for each of `specs`.
  """

  def new_arrays(size: tf.Tensor) -> list[tf.TensorArray]:
    return [rows_lib.new_array(spec, size) for spec in specs]

  count = _num_loops() if is_repeatable else 1
  if count == 1:
    return _fill(compute, tf.constant(0), size, new_arrays(size))
  joined = new_arrays(size)
  for k in range(count):
    begin, end = size * k // count, size * (k + 1) // count
    some = _fill(compute, begin, end, new_arrays(end - begin))
    joined = _append(joined, some, begin, end)
  return joined


def _append(
    arrays: list[tf.TensorArray],
    more: list[tf.TensorArray],
    begin: tf.Tensor,
    end: tf.Tensor,
) -> list[tf.TensorArray]:
  """Writes `more` to `begin`, ..., `end - 1` of the arrays."""

  def step(
      i: tf.Tensor, arrays: list[tf.TensorArray]
  ) -> tuple[tf.Tensor, list[tf.TensorArray]]:
    return i + 1, [
        array.write(i, other.read(i - begin))
        for array, other in zip(arrays, more, strict=True)
    ]

  _, arrays = tf.while_loop(lambda i, _: i < end, step, (begin, arrays))
  return arrays
