"""Which clients take part in an epoch."""

from collections.abc import Callable, Sequence

import tensorflow as tf
import tensorflow_federated as tff


def sample_cohorts(
    datasets: Sequence[tf.data.Dataset], size: int, seed: int = 0
) -> Callable[[int], list[tf.data.Dataset]]:
  """From an epoch to the datasets of its clients, drawn without replacement.

  Args:
    datasets: Of all clients.
    size: How many take part in an epoch.
    seed: Of the draws. An epoch has the same clients whenever it is asked for.

  Returns:
    What `Trial.cohort` takes.

  Raises:
    ValueError: If there are fewer clients than `size`.
  """
  if not 1 <= size <= len(datasets):
    raise ValueError(
        f'`size` must be from 1 to the number of clients, {len(datasets)}; got'
        f' {size}.'
    )
  if size == len(datasets):
    return lambda epoch: list(datasets)
  draw = tff.simulation.build_uniform_sampling_fn(
      range(len(datasets)), replace=False, random_seed=seed
  )
  return lambda epoch: [datasets[int(i)] for i in draw(epoch, size)]
