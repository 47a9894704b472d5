"""What clients' datasets depend on: nothing, or a state that they may share.

A dataset that is shuffled, for example, has a state: it decides in which order
the elements come next time. Clients may share it, if their datasets are shards
of one that was shuffled. Then the order that a client sees depends on which
client comes first. Since clients run side by side, each of them gets a copy of
such a dataset, as in TFF's own runtime.
"""

from collections.abc import Iterator, Sequence

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import graph_rewriting
from fednest_tff.structures import Value

# Datasets that have the same elements each time, if those they are made of do.
_CONSTANT_DATASETS = frozenset([
    '_BatchDataset', '_ConcatenateDataset', '_MapDataset', '_OptionsDataset',
    '_ParallelBatchDataset', '_ParallelMapDataset', '_PrefetchDataset',
    '_RangeDataset', '_RepeatDataset', '_ShardDataset', '_SkipDataset',
    '_TakeDataset', '_TensorDataset', '_TensorSliceDataset', '_ZipDataset',
])


def _steps(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
  """Iterates over a dataset and all datasets that it is made of."""
  yield dataset
  for source in dataset._inputs():
    yield from _steps(source)


def _has_state(dataset: tf.data.Dataset) -> bool:
  """Tells whether a step, taken alone, may give other elements next time."""
  if graph_rewriting.is_random_dataset(type(dataset).__name__):
    return True
  if not hasattr(dataset, '_map_func'):
    return False
  graph = dataset._map_func.function.graph
  return any(
      tensor.dtype in (tf.resource, tf.variant) for tensor, _ in graph.captures
  ) or any(
      op.op_def.is_stateful or op.type in graph_rewriting.READING_FILES
      for op in graph.get_operations() if op.type != 'Placeholder'
  )


def is_constant(dataset: tf.data.Dataset) -> bool:
  """Tells whether a dataset has the same elements each time it is read."""
  return all(
      type(step).__name__ in _CONSTANT_DATASETS and not _has_state(step)
      for step in _steps(dataset)
  )


def _share_state(clients: Sequence[Value]) -> bool:
  """Tells whether datasets of two clients have a common state."""
  known: set[int] = set()
  for value in clients:
    own = {
        id(step)
        for leaf in tf.nest.flatten(value) if isinstance(leaf, tf.data.Dataset)
        for step in _steps(leaf) if _has_state(step)
    }
    if own & known:
      return True
    known |= own
  return False


def _forget_states(graph_def: tf.compat.v1.GraphDef) -> None:
  """Has the shuffles of a dataset's graph begin anew, from their seeds.

  TensorFlow writes down where the state of a shuffle is to be found, and makes
  a new one if it is not there.
  """
  nodes = {node.name: node for node in graph_def.node}
  for node in graph_def.node:
    if graph_rewriting.is_random_dataset(node.op):
      for source in node.input:
        value = nodes[graph_rewriting.node_name(source)].attr['value'].tensor
        for handle in value.resource_handle_val:
          handle.name += ' of a copy'


def _copy(leaf: Value) -> Value:
  """Copies a dataset, as it was when it was made."""
  if not isinstance(leaf, tf.data.Dataset):
    return leaf
  try:
    text = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(leaf)
    )
  except tf.errors.OpError:  # From a Python generator, for example.
    return leaf
  graph_def = tf.compat.v1.GraphDef.FromString(text.numpy())
  _forget_states(graph_def)
  return tf.data.experimental.from_variant(
      tf.raw_ops.DatasetFromGraph(graph_def=graph_def.SerializeToString()),
      leaf.element_spec,
  )


def separate(argument: Value, parameter: tff.Type | None) -> Value:
  """Gives clients that share a state copies of their datasets.

  Args:
    argument: The argument of a computation.
    parameter: Its type.

  Returns:
    `argument`, or one with other datasets.
  """
  if parameter is None:
    return argument

  def has_datasets(value_type: tff.Type) -> bool:
    return structures.is_at_clients(value_type) and any(
        isinstance(leaf, tff.SequenceType)
        for leaf in structures.leaves(value_type.member)
    )

  found = structures.typed_leaves(argument, parameter)
  shared = [
      has_datasets(value_type)
      and not value_type.all_equal
      and _share_state(value)
      for value, value_type in found
  ]
  if not any(shared):
    return argument
  return structures.pack(
      parameter,
      [
          tf.nest.map_structure(_copy, value) if is_shared else value
          for (value, _), is_shared in zip(found, shared, strict=True)
      ],
  )
