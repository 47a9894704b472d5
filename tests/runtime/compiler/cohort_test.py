"""Values at clients: written out, in loops and at once, on several devices."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime.compiler import cohort as cohort_lib
from fednest_tff.runtime.compiler.broadcast import Broadcast
from fednest_tff.runtime.compiler.unrolled import Unrolled

Struct = tff.structure.Struct
# Two names for one device: a loop has two parts, as on two devices.
DEVICES = {'one': ['/device:CPU:0'], 'two': ['/device:CPU:0', '/CPU:0']}
# The second leaf differs in shape between clients.
MEMBER = tff.to_type(
    [('x', np.float32), ('v', tff.TensorType(np.int32, [None]))]
)
VALUES = [(float(i), list(range(i, 2 * i % 7))) for i in range(5)]


def build_vectorised(size, devices):
  """Clients whose second leaf has equal shapes are a group."""
  shapes = [len(vector) for _, vector in VALUES[:size]]
  return cohort_lib.build_vectorised(shapes, devices)


KINDS = {
    'unrolled': Unrolled,
    'looped': cohort_lib.build_looped,
    'vectorised': build_vectorised,
}


@pytest.fixture(params=[
    (kind, devices) for kind in KINDS for devices in DEVICES
], ids='-'.join)
def build(request):
  kind, devices = request.param
  return lambda size: KINDS[kind](size, DEVICES[devices])


def _compiled(cohort, function):
  """Results of `function` of the value `VALUES` at the clients, flat."""

  specs = cohort.size_specs() + cohort.argument_specs(MEMBER)

  @tf.function(input_signature=specs, autograph=False)
  def flat(*tensors):
    remaining = iter(tensors)
    cohort.unpack_sizes(remaining)
    return function(cohort.unpack_argument(remaining, MEMBER))

  tensors = cohort.feed_tensors(VALUES[: cohort.size], MEMBER)
  return flat(*cohort.size_tensors(), *tensors)


@pytest.mark.parametrize('size', [1, 5])
def test_argument_and_result_are_opposites(build, size):
  cohort = build(size)
  tensors = _compiled(cohort, cohort.flatten_result)
  found = cohort.to_python(iter(tensors), MEMBER)
  assert [(float(f.x), f.v.tolist()) for f in found] == VALUES[:size]


@pytest.mark.parametrize('is_stateless', [False, True])
def test_map_sees_each_client_and_what_all_share(build, is_stateless):
  cohort = build(5)
  member = tff.to_type([('sum', np.float32)])

  def add(value):
    return Struct([('sum', value[0].x + value[1])])

  def function(value):
    pair = Struct.unnamed(value, Broadcast(tf.constant(10.0)))
    result = cohort.map(add, pair, member, is_stateless)
    return cohort.flatten_result(result)

  tensors = _compiled(cohort, function)
  found = cohort.to_python(iter(tensors), member)
  assert [float(f.sum) for f in found] == [10.0, 11.0, 12.0, 13.0, 14.0]


@pytest.mark.parametrize('size', [1, 5])
@pytest.mark.parametrize('kind', ['unrolled', 'looped'])
@pytest.mark.parametrize('devices', DEVICES)
def test_reduce_goes_through_the_clients_in_order(kind, devices, size):
  cohort = KINDS[kind](size, DEVICES[devices])

  def append(pair):
    return Struct([('text', pair[0].text + tf.as_string(pair[1].x, 0))])

  def join(pair):
    return Struct([('text', pair[0].text + pair[1].text)])

  def function(value):
    zero = Struct([('text', tf.constant(''))])
    return structures.leaves(cohort.reduce(value, zero, append, join))

  (found,) = _compiled(cohort, function)
  assert found.numpy().decode() == '01234'[:size]


def test_no_clients():
  cohort = Unrolled(0, DEVICES['one'])
  tensors = _compiled(cohort, cohort.flatten_result)
  assert cohort.to_python(iter(tensors), MEMBER) == []


def test_clients_are_divided_among_devices():
  devices = [f'/device:CPU:{k}' for k in range(3)]

  def devices_of(cohort):
    with tf.Graph().as_default():
      cohort.unpack_sizes(iter(cohort.size_tensors()))
      cohort.map(
          lambda v: seen.append(tf.identity(v).device) or v,
          Broadcast(tf.constant(1.0)),
          tff.TensorType(np.float32),
      )

  for kind, expected in (('unrolled', [0, 1, 2, 0]), ('looped', [0, 1, 2])):
    seen = []
    devices_of(KINDS[kind](4, devices))
    assert [int(name[-1]) for name in seen] == expected


def test_groups_of_clients_with_equal_shapes():
  one, two = DEVICES['one'], DEVICES['two']
  cohort = cohort_lib.build_vectorised(['a', 'b', 'a', 'a'], one)
  assert [part.clients for part in cohort._parts] == [[0, 2, 3], [1]]
  assert cohort.is_vectorised and cohort.size == 4
  # A function serves all cohorts with as many groups.
  assert cohort.key == cohort_lib.build_vectorised(['b', 'c'], one).key
  assert cohort.key != cohort_lib.build_vectorised(['b', 'b'], one).key
  divided = cohort_lib.build_vectorised(['a', 'b', 'a', 'a'], two)
  assert [part.clients for part in divided._parts] == [[0], [2, 3], [1]]
  assert not cohort_lib.build_looped(3, one).is_vectorised


def test_shapes_of_clients():
  parameter = tff.to_type([
      tff.FederatedType(np.int32, tff.SERVER),
      tff.FederatedType(MEMBER, tff.CLIENTS),
      tff.FederatedType(tff.SequenceType(np.int64), tff.CLIENTS),
  ])
  data = [tf.data.Dataset.range(n) for n in (2, 2, 3)]
  values = [(1.0, [1, 2]), (2.0, [3, 4]), (3.0, [5, 6])]
  found = cohort_lib.shapes_of_clients(parameter, [1, values, data], [], 3)
  assert found[0] == found[1] != found[2]
  values[1] = (2.0, [3])
  found = cohort_lib.shapes_of_clients(parameter, [1, values, data], [], 3)
  assert len(set(found)) == 3
  # What was read tells more than the number of elements.
  read = [[[tf.zeros([n, 4])] for n in (5, 6, 5)]]
  found = cohort_lib.shapes_of_clients(parameter, [1, values, data], read, 3)
  assert found[0] == found[2] != found[1]
