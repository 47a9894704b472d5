"""Counts what clients compute: gradients and products with second derivatives.

They are counted while an epoch runs. For counting, a method is traced anew with
an operation beside every derivative of a loss, which writes a line to a file.
So the counts hold for any method that takes its derivatives from
`local.derivatives`, whatever its loops and its draws.
"""

from collections.abc import Callable, Sequence
import itertools
import os
import tempfile
from typing import NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.local import derivatives
from fednest_tff.runtime import in_process
from fednest_tff.simulation.training import Process

# Gradients that take as long as a product: one forward and one backward pass
# more.
PRODUCT_COST = 2


class ClientWork(NamedTuple):
  """What one client computes in one epoch, on average.

  Attributes:
    gradients: Gradients of a loss, of a minibatch or of all examples.
    products: Products of a vector with second derivatives of the inner loss.
      Those that come with one pass over the loss count once: grad^2_y g v and
      grad^2_xy g v, and grad_y g with them.
    gradient_examples: Examples in all those gradients.
    product_examples: Examples in all those products.
  """

  gradients: float
  products: float
  gradient_examples: float
  product_examples: float

  @property
  def example_gradients(self) -> float:
    """Gradients of a single example, a product being worth `PRODUCT_COST`."""
    return self.gradient_examples + PRODUCT_COST * self.product_examples


class _Counts(NamedTuple):
  """Of all clients of an epoch; see `ClientWork`."""

  clients: int
  gradients: int
  products: int
  gradient_examples: int
  product_examples: int


def _read(path: str, clients: int) -> _Counts:
  """Reads the lines of an epoch, and removes their file."""
  examples: dict[str, list[int]] = {'gradient': [], 'product': []}
  if os.path.exists(path):
    with open(path) as file:
      for line in file:
        kind, num_examples, _ = line.split()
        examples[kind].append(int(num_examples))
    os.remove(path)
  gradients, products = examples.values()
  return _Counts(
      clients, len(gradients), len(products), sum(gradients), sum(products)
  )


def _mean(counts: Sequence[_Counts]) -> ClientWork:
  """The mean over the clients of all epochs."""
  total = _Counts(*map(sum, zip(*counts, strict=True)))
  return ClientWork(*(number / total.clients for number in total[1:]))


def count_client_work(
    build: Callable[[], Process],
    cohort: Callable[[int], Sequence[tf.data.Dataset]],
    epochs: int = 1,
    epochs_if_random: int | None = None,
) -> ClientWork:
  """Counts what clients compute, by running some epochs.

  Args:
    build: Builds the process; it is called once, and traces it anew.
    cohort: From an epoch (1, 2, ...) to the datasets of its clients.
    epochs: How many epochs to run.
    epochs_if_random: How many epochs to run if clients compute more in one of
      these epochs than in another. Then the method draws how much it computes,
      or clients are unequal, and the mean of a few epochs may be far off.

  Returns:
    The mean over clients and epochs.
  """
  counts: list[_Counts] = []
  context = in_process.InProcessContext(
      in_process.InProcessRuntime(compiled=False)
  )
  with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, 'derivatives')

    places = itertools.count()

    def mark(kind: str, num_examples: tf.Tensor) -> tf.Operation:
      # TensorFlow would merge two equal operations of one step.
      return tf.print(
          kind, num_examples, next(places), output_stream=f'file://{path}'
      )

    with (
        derivatives.marked(mark),
        tff.framework.get_context_stack().install(context),
    ):
      process = build()
      state = process.initialize()
      while len(counts) < epochs:
        datasets = cohort(len(counts) + 1)
        if not datasets:
          raise ValueError(f'Epoch {len(counts) + 1} has no clients.')
        state = process.next(state, datasets).state
        counts.append(_read(path, len(datasets)))
        works = {_mean([count]) for count in counts}
        if epochs_if_random and len(works) > 1:
          epochs = max(epochs, epochs_if_random)
  return _mean(counts)
