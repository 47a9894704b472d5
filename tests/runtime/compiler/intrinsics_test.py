"""Every intrinsic that is known, against results computed by hand."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import call_dominant, intrinsics
from fednest_tff.runtime.compiler.broadcast import Broadcast
from fednest_tff.runtime.compiler.cohort import build_looped
from fednest_tff.runtime.compiler.unrolled import Unrolled
from tests.runtime.comparison import (
    RUNTIMES,
    assert_same,
    at_clients,
    at_server,
    run_in_process,
)

SERVER, CLIENTS = tff.SERVER, tff.CLIENTS
DEVICE = '/device:CPU:0'
PAIR = tff.to_type([('a', np.int32), ('b', [np.float32])])


def _pair(a, b):
  return collections.OrderedDict(a=np.int32(a), b=[np.float32(b)])


def _add_one():
  return tff.tensorflow.computation(lambda v: v + 1, np.int32)


@tff.federated_computation(at_clients(PAIR))
def sums(x):
  return tff.federated_sum(x), tff.federated_min(x), tff.federated_max(x)


@tff.federated_computation(at_clients(PAIR), at_clients(np.float32))
def means(x, weight):
  numbers = tff.federated_map(
      tff.tensorflow.computation(lambda p: p['b'][0], PAIR), x
  )
  return tff.federated_mean(numbers), tff.federated_mean(numbers, weight)


@tff.federated_computation(at_clients(np.int32))
def aggregate(x):
  """The clients' digits in order; minus that number is reported."""
  append = tff.tensorflow.computation(
      lambda a, v: 10 * a + v, [np.int32, np.int32]
  )
  merge = tff.tensorflow.computation(
      lambda a, b: 1000 * a + b, [np.int32, np.int32]
  )
  report = tff.tensorflow.computation(lambda a: -a, np.int32)
  return tff.federated_aggregate(x, np.int32(0), append, merge, report)


@tff.federated_computation(at_server(np.int32), at_clients(np.int32))
def placed(x, y):
  sent = tff.federated_broadcast(x)
  return (
      tff.federated_map(_add_one(), x),
      tff.federated_map(_add_one(), y),
      tff.federated_map(_add_one(), sent),
      tff.federated_value(5, SERVER),
      tff.federated_value(6, CLIENTS),
      tff.federated_zip((x, x)),
      tff.federated_zip((y, sent)),
  )


@tff.federated_computation(at_clients(np.int32))
def evaluated(x):
  seven = tff.tensorflow.computation(lambda: tf.constant(7))
  return (
      tff.federated_eval(seven, SERVER),
      tff.federated_zip((x, tff.federated_eval(seven, CLIENTS))),
  )


@tff.federated_computation(
    at_clients(tff.TensorType(np.int32, [2])),
    at_server(tff.TensorType(np.float32, [3])),
)
def select(keys, values):
  pick = tff.tensorflow.computation(
      lambda value, key: value[key],
      [tff.TensorType(np.float32, [3]), np.int32],
  )
  most = tff.federated_value(3, SERVER)
  slices = tff.federated_select(keys, most, values, pick)
  same = tff.federated_secure_select(keys, most, values, pick)
  add = tff.tensorflow.computation(
      lambda data: data.reduce(0.0, lambda total, v: total + v),
      tff.SequenceType(np.float32),
  )
  return tff.federated_map(add, slices), tff.federated_map(add, same)


@tff.federated_computation(
    at_clients(tff.to_type((np.int32, tff.TensorType(np.int32, [2]))))
)
def secure_sums(x):
  modular = tff.backends.mapreduce.federated_secure_modular_sum
  return (
      tff.federated_secure_sum(x, 7),
      tff.federated_secure_sum(x, (5, 7)),
      tff.federated_secure_sum_bitwidth(x, 3),
      tff.federated_secure_sum_bitwidth(x, (3, 62)),
      modular(x, 4),
      modular(x, (4, 7)),
  )


@tff.federated_computation(at_clients(np.int32))
def collect(x):
  """Each client's number, as often as it says."""
  rows = tff.TensorType(np.int32, [None])
  append = tff.tensorflow.computation(
      lambda a, v: tf.concat([a, tf.fill([v], v)], 0), [rows, np.int32]
  )
  merge = tff.tensorflow.computation(
      lambda a, b: tf.concat([a, b], 0), [rows, rows]
  )
  report = tff.tensorflow.computation(lambda a: a, rows)
  zero = tff.tensorflow.computation(lambda: tf.zeros([0], tf.int32))()
  return tff.federated_aggregate(x, zero, append, merge, report)


@tff.federated_computation(tff.SequenceType(np.int32))
def sequences(x):
  fold = tff.tensorflow.computation(
      lambda a, v: 10 * a + v, [np.int32, np.int32]
  )
  return (
      tff.sequence_sum(x),
      tff.sequence_sum(tff.sequence_map(_add_one(), x)),
      tff.sequence_reduce(x, 0, fold),
  )


CLIENTS_PAIRS = [_pair(4, 0.5), _pair(-2, 2.0), _pair(7, -1.0)]
# Name: a call, and its result.
CASES = {
    'sums': (
        lambda: sums(CLIENTS_PAIRS),
        (_pair(9, 1.5), _pair(-2, -1.0), _pair(7, 2.0)),
    ),
    'sums of no client': (
        lambda: sums([]),
        (
            _pair(0, 0),
            _pair(np.iinfo(np.int32).max, np.finfo(np.float32).max),
            _pair(np.iinfo(np.int32).min, np.finfo(np.float32).min),
        ),
    ),
    'means': (
        lambda: means(CLIENTS_PAIRS, [1.0, 2.0, 1.0]),
        (np.float32(0.5), np.float32(0.875)),
    ),
    'aggregate': (lambda: aggregate([1, 2, 3]), np.int32(-123)),
    'placed': (
        lambda: placed(3, [1, 2]),
        (4, [2, 3], [4, 4], 5, 6, (3, 3), [(1, 3), (2, 3)]),
    ),
    'evaluated': (lambda: evaluated([1, 2]), (7, [(1, 7), (2, 7)])),
    'select': (
        lambda: select([[0, 1], [2, 2]], [1.0, 10.0, 100.0]),
        ([np.float32(11.0), np.float32(200.0)],) * 2,
    ),
    'secure sums': (
        lambda: secure_sums([(1, [2, 3]), (5, [7, 0])]),
        (
            (6, np.int32([9, 3])),
            (6, np.int32([9, 3])),
            (6, np.int32([9, 3])),
            (6, np.int32([9, 3])),
            (2, np.int32([1, 3])),
            (2, np.int32([2, 3])),
        ),
    ),
    'secure sums of no client': (
        lambda: secure_sums([]), ((0, np.zeros([2], np.int32)),) * 6
    ),
    'growing accumulator': (
        lambda: collect([3, 1, 2]), np.int32([3, 3, 3, 1, 2, 2])
    ),
    'sequences': (lambda: sequences([1, 2, 3]), (6, 9, 123)),
}


def _as_numpy(value):
  """Python's integers as TFF returns them."""
  return tf.nest.map_structure(
      lambda leaf: np.int32(leaf) if isinstance(leaf, int) else leaf, value
  )


@pytest.mark.parametrize('runtime', RUNTIMES)
@pytest.mark.parametrize('name', CASES)
def test_results(name, runtime):
  call, expected = CASES[name]
  assert_same(run_in_process(RUNTIMES[runtime], call), _as_numpy(expected))


def test_every_intrinsic_is_among_them():
  computations = [
      sums, means, aggregate, placed, evaluated, select, secure_sums, sequences
  ]  # fmt: skip
  found = {
      block.uri
      for computation in computations
      for block in structures.inner_blocks(
          call_dominant.to_call_dominant(computation).block
      )
      if isinstance(block, tff.framework.Intrinsic)
  }
  handlers = intrinsics.Intrinsics(Unrolled(1, [DEVICE]), DEVICE)._handlers
  # `tff.federated_map` does not lead to this one; it has a test below.
  assert found == set(handlers) - {'federated_map_all_equal'}


@pytest.mark.parametrize('runtime', RUNTIMES)
@pytest.mark.parametrize(
    ['bound', 'values', 'message'],
    [
        (lambda x: tff.federated_secure_sum(x, 5), [5, 6, 0], 'larger than'),
        (
            lambda x: tff.federated_secure_sum_bitwidth(x, 3),
            [7, 0, 8],
            'larger than',
        ),
        (
            lambda x: tff.federated_secure_sum_bitwidth(x, 63),
            [0, 0, 0],
            'greater than maximum bitwidth 62',
        ),
    ],
)
def test_secure_sums_check_ranges(bound, values, message, runtime):
  computation = tff.federated_computation(bound, at_clients(np.int64))
  with pytest.raises(tf.errors.InvalidArgumentError, match=message):
    run_in_process(RUNTIMES[runtime], lambda: computation(values))
  if 'larger' in message:
    valid = [value if value < 6 else 1 for value in values]
    found = run_in_process(RUNTIMES[runtime], lambda: computation(valid))
    assert found == sum(valid)


# ---- Without a runtime ------------------------------------------------------


def _call(uri, argument_type, result_type):
  """A call of an intrinsic on a value that is called x."""
  argument = tff.framework.Reference('x', tff.to_type(argument_type))
  signature = tff.FunctionType(argument.type_signature, result_type)
  return tff.framework.Call(tff.framework.Intrinsic(uri, signature), argument)


def test_unknown_intrinsic_is_named():
  call = _call('federated_median', at_clients(np.int32), at_server(np.int32))
  handler = intrinsics.Intrinsics(Unrolled(2, [DEVICE]), DEVICE)
  with pytest.raises(NotImplementedError, match='run federated_median'):
    handler.run(call, [1, 2])


def test_what_all_clients_share_is_computed_once():
  """In a map, by the number of calls of the function."""
  member = tff.TensorType(np.float32)
  same = at_clients(member, all_equal=True)
  function = tff.FunctionType(member, member)
  calls = []

  def double(value):
    calls.append(value)
    return 2 * value

  call = _call('federated_map_all_equal', [function, same], same)
  for kind in (Unrolled, build_looped):
    calls.clear()
    handler = intrinsics.Intrinsics(kind(5, [DEVICE]), DEVICE)
    argument = tff.structure.Struct.unnamed(
        double, Broadcast(tf.constant(3.0))
    )
    result = handler.run(call, argument)
    assert isinstance(result, Broadcast)
    assert result.value.numpy() == 6.0
    assert len(calls) == 1


def test_a_rearrangement_needs_no_loop():
  """For a cohort in a loop, elements are swapped for all clients at once."""

  @tff.federated_computation(at_clients(np.int32), at_clients(np.float32))
  def swap(x, y):
    swapped = tff.federated_computation(
        lambda p: (p[1], p[0]), tff.to_type([np.int32, np.float32])
    )
    return tff.federated_map(swapped, tff.federated_zip((x, y)))

  runtime = RUNTIMES['looped']
  found = run_in_process(runtime, lambda: swap([1, 2], [3.0, 4.0]))
  assert found == [(3.0, 1), (4.0, 2)]
  function = list(runtime._functions.values())[-1]
  kinds = {op.type for op in function.graph.get_operations()}
  assert not kinds & {'While', 'StatelessWhile'}
