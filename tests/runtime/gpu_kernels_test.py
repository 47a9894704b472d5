"""Which operations of epochs have no kernel for GPUs, by TensorFlow's registry.

The epochs of all methods are compiled, not run, on a small problem and in every
kind of cohort. Datasets are read before, on the host, and are not part of them.
"""

import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.runtime.compiler import (
    call_dominant,
    cohort,
    graphs,
    lowering,
    unrolled,
)
from tests.helpers import gpu_kernels, processes, small_problems

DEVICE = '/device:CPU:0'
# Operations that may run on the host, and why.
ON_HOST = {
    'Const string': 'the session token of a graph from TFF, which nothing uses',
    'Split int32': 'of shapes, which are in the host memory anyway',
}
OPTIONS = dict(
    inner_learning_rate=0.1,
    outer_learning_rate=0.1,
    linear_learning_rate=0.1,
    batch_size=2,
    local_steps=2,
    inner_rounds=1,
    neumann_terms=2,
    smoothness=4.0,
)
# The others compile N' again inside of their local steps, which takes long.
STOCHASTIC = {'fednest', 'fedmbo'}


def loss(x, y, batch):
  """Cross-entropy of a dense layer behind rectified features."""
  logits = tf.nn.relu(batch['a'] * x) @ y
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch['b'], logits)
  return tf.reduce_mean(losses) + tf.reduce_sum(y**2)


def build(method, loss=loss):
  builder = 'personal' if method == 'personal' else 'bilevel'
  problem = getattr(small_problems, builder)(
      outer_loss=loss,
      inner_loss=loss,
      init_inner=lambda seed: tf.ones([2, 3]),
  )
  options = OPTIONS | {
      'ihgp': 'stochastic' if method in STOCHASTIC else 'truncated'
  }
  known = processes.options_of(method)
  return fednest_tff.build(
      problem,
      method,
      **{name: value for name, value in options.items() if name in known},
  )


# Rounds that methods and cohorts have in common are vectorised once.
IMPORTER = graphs.Importer()


@pytest.fixture(scope='module')
def cohorts():
  """Two clients in every kind of cohort."""
  return {
      'vectorised': cohort.build_vectorised(['equal', 'equal'], [DEVICE]),
      'looped': cohort.build_looped(2, [DEVICE]),
      'unrolled': unrolled.Unrolled(2, [DEVICE]),
  }


def search(process, cohort):
  computation = call_dominant.to_call_dominant(process.next)
  return gpu_kernels.search(
      lowering.build_function(computation, cohort, DEVICE, IMPORTER)
  )


@pytest.mark.parametrize('method', fednest_tff.METHODS)
def test_epochs_run_on_a_gpu(method, cohorts):
  process = build(method)
  for kind, clients in cohorts.items():
    found = search(process, clients)
    print(
        f'{method}, {kind}: {found.once} transfers,'
        f' {found.in_loops} more in one iteration of each loop'
    )
    assert set(found.host_only) <= set(ON_HOST), kind
    assert found.num_nodes > 300, kind
    # Between the host and the GPU, in an epoch.
    assert (found.once, found.in_loops) == (0, 0), kind
    if kind != 'vectorised':
      assert set(found.host_only) == {'Const string'}, kind


def test_loss_with_a_string_is_noticed(cohorts):
  def with_text(x, y, batch):
    length = tf.strings.length(tf.strings.as_string(batch['b']))
    return loss(x, y, batch) + tf.cast(tf.reduce_sum(length), tf.float32)

  found = search(build('penalty', with_text), cohorts['unrolled'])
  assert set(found.host_only) - set(ON_HOST) == {
      'AsString int64', 'StringLength'
  }
  assert found.once + found.in_loops > 0


@tf.function(autograph=False, input_signature=[tf.TensorSpec([None])])
def mixed(x):
  def step(k, total):
    # The total goes to the host and comes back; k is there anyway.
    text = tf.strings.join([tf.strings.as_string(t) for t in (total, k)])
    return k + 1, total + tf.strings.to_number(text)

  _, total = tf.while_loop(
      lambda k, _: k < 3, step, (tf.constant(0), tf.reduce_sum(x))
  )
  # Keys have kernels for GPUs, and lists of them do not: the empty list and the
  # keys go to the host, and the filled list comes back.
  keys = tf.TensorArray(tf.uint64, 1).write(0, tf.cast(x, tf.uint64)).stack()
  # A dataset takes x, and its function is on the host, like what it returns.
  rows = tf.data.Dataset.from_tensors(x).map(tf.strings.as_string)
  return total, keys, rows.get_single_element()


def test_kinds_of_operations():
  found = gpu_kernels.search(mixed.get_concrete_function())
  assert found.host_only == {
      'AsString float32': 1, 'AsString int32': 1, 'StringJoin': 1,
      'StringToNumber float32': 1, 'TensorListSetItem uint64': 1,
      'TensorListStack uint64': 1, 'TensorDataset float32': 1,
      'MapDataset string': 1, 'DatasetToSingleElement string': 1,
  }
  assert (found.once, found.in_loops) == (4, 2)
