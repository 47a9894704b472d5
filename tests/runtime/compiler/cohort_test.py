"""Values at clients: written out and in loops, on one device and on two."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import cohort as cohort_lib
from fednest_tff.runtime.compiler.cohort import Broadcast, Looped, Unrolled

Struct = tff.structure.Struct
# Two names for one device: a loop has two parts, as on two devices.
DEVICES = {'one': ['/device:CPU:0'], 'two': ['/device:CPU:0', '/CPU:0']}
# The second leaf differs in shape between clients.
MEMBER = tff.to_type(
    [('x', np.float32), ('v', tff.TensorType(np.int32, [None]))]
)
VALUES = [(float(i), list(range(i))) for i in range(5)]


@pytest.fixture(params=[
    (kind, devices) for kind in (Unrolled, Looped) for devices in DEVICES
], ids=lambda param: f'{param[0].__name__}-{param[1]}')
def build(request):
  kind, devices = request.param
  return lambda size: kind(size, DEVICES[devices])


def _compiled(cohort, function):
  """Results of `function` of the value `VALUES` at the clients, flat."""

  @tf.function(input_signature=cohort.argument_specs(MEMBER), autograph=False)
  def flat(*tensors):
    return function(cohort.unpack_argument(iter(tensors), MEMBER))

  return flat(*cohort.feed_tensors(VALUES[: cohort.size], MEMBER))


@pytest.mark.parametrize('size', [0, 1, 5])
def test_argument_and_result_are_opposites(build, size):
  cohort = build(size)
  tensors = _compiled(cohort, cohort.flatten_result)
  found = cohort.to_python(iter(tensors), MEMBER)
  assert [(float(f.x), f.v.tolist()) for f in found] == VALUES[:size]


def test_map_sees_each_client_and_what_all_share(build):
  cohort = build(5)

  def add(value):
    return Struct([('sum', value[0].x + value[1])])

  def function(value):
    pair = Struct.unnamed(value, Broadcast(tf.constant(10.0)))
    result = cohort.map(add, pair, tff.to_type([('sum', np.float32)]))
    return cohort.flatten_result(result)

  found = _compiled(cohort, function)
  assert [float(f) for f in found] == [10.0, 11.0, 12.0, 13.0, 14.0]


@pytest.mark.parametrize('size', [0, 1, 5])
def test_reduce_goes_through_the_clients_in_order(build, size):
  cohort = build(size)

  def append(pair):
    return Struct([('text', pair[0].text + tf.as_string(pair[1].x, 0))])

  def join(pair):
    return Struct([('text', pair[0].text + pair[1].text)])

  def function(value):
    zero = Struct([('text', tf.constant(''))])
    return structures.leaves(cohort.reduce(value, zero, append, join))

  (found,) = _compiled(cohort, function)
  assert found.numpy().decode() == '01234'[:size]


def test_a_loop_does_not_grow_with_the_cohort():
  def num_nodes(size):
    cohort = Looped(size, DEVICES['one'])

    @tf.function(autograph=False, input_signature=cohort.argument_specs(
        tff.TensorType(np.float32)
    ))
    def flat(*tensors):
      value = cohort.unpack_argument(iter(tensors), tff.TensorType(np.float32))
      return cohort.reduce(
          value, tf.constant(0.0), lambda p: p[0] + p[1], lambda p: p[0] + p[1]
      )

    return len(flat.get_concrete_function().graph.get_operations())

  assert num_nodes(3) == num_nodes(300)


def test_clients_are_divided_among_devices():
  devices = [f'/device:CPU:{k}' for k in range(3)]

  def devices_of(cohort):
    with tf.Graph().as_default():
      cohort.map(
          lambda v: seen.append(tf.identity(v).device) or v,
          Broadcast(tf.constant(1.0)),
          tff.TensorType(np.float32),
      )

  for kind, expected in ((Unrolled, [0, 1, 2, 0]), (Looped, [0, 1, 2])):
    seen = []
    devices_of(kind(4, devices))
    assert [int(name[-1]) for name in seen] == expected


def test_broadcasts():
  shared = Struct([('a', Broadcast(1)), ('b', Struct([(None, Broadcast(2))]))])
  assert cohort_lib.is_broadcast(shared)
  assert cohort_lib.is_broadcast(Broadcast(Struct([('a', 1)])))
  assert not cohort_lib.is_broadcast(Struct.unnamed(Broadcast(1), [1, 2]))
  plain = Struct([('a', 1), ('b', Struct([(None, 2)]))])
  assert cohort_lib.broadcast_value(shared) == plain
  # A list stands for one value per client.
  mixed = Struct.unnamed([1, 2], Broadcast(plain))
  assert cohort_lib.split_broadcasts(mixed) == Struct.unnamed([1, 2], shared)
