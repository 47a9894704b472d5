"""Arguments and results as flat lists of tensors."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import placed
from fednest_tff.runtime.compiler.broadcast import Broadcast
from fednest_tff.runtime.compiler.cohort import build_looped
from fednest_tff.runtime.compiler.unrolled import Unrolled
from tests.runtime.comparison import at_clients, at_server

KINDS = [Unrolled, build_looped]
# One of each kind of placement, and a placed value inside a struct.
PARAMETER = tff.to_type([
    ('server', at_server([('w', np.float32), ('n', np.int32)])),
    ('nested', [at_clients(np.int32), at_clients(np.str_, all_equal=True)]),
    ('data', at_clients(tff.SequenceType(np.int64))),
    ('unplaced', [('z', np.bool_)]),
])


def _argument(size):
  return dict(
      unplaced=[True],
      server=dict(n=3, w=0.5),
      nested=[list(range(size)), 'text'],
      data=[tf.data.Dataset.range(i) for i in range(size)],
  )


def _cohort(kind, size):
  return kind(size, ['/device:CPU:0'])


def test_cohort_size():
  assert placed.cohort_size(PARAMETER, _argument(3)) == 3
  assert placed.cohort_size(PARAMETER, _argument(0)) == 0
  assert placed.cohort_size(PARAMETER['server'], dict(n=3, w=0.5)) is None
  assert placed.cohort_size(None, None) is None
  with pytest.raises(ValueError, match=r'differ in their number: \[2, 3\]'):
    placed.cohort_size(
        PARAMETER, _argument(3) | dict(nested=[[1, 2], 'text'])
    )
  with pytest.raises(TypeError, match='a list with a value per client'):
    placed.cohort_size(PARAMETER, _argument(2) | dict(data=5))


@pytest.mark.parametrize('kind', KINDS)
def test_specs_are_those_of_the_tensors(kind):
  cohort = _cohort(kind, 3)
  specs = placed.argument_specs(cohort, PARAMETER)
  tensors = placed.feed_tensors(cohort, PARAMETER, _argument(3))
  assert [t.dtype for t in tensors] == [spec.dtype for spec in specs]
  # Per client: integers and datasets, stacked in a loop. A loop also takes the
  # number of clients.
  per_client = [3, 3] if kind is Unrolled else [1, 1, 1]
  assert len(specs) == 2 + sum(per_client) + 1 + 1
  assert placed.argument_specs(cohort, None) == []
  assert placed.feed_tensors(cohort, None, None) == []


@pytest.mark.parametrize('kind', KINDS)
def test_there_and_back(kind):
  cohort = _cohort(kind, 3)
  seen = {}

  @tf.function(
      input_signature=placed.argument_specs(cohort, PARAMETER), autograph=False
  )
  def identity(*tensors):
    argument = placed.unpack_argument(cohort, PARAMETER, iter(tensors))
    seen['argument'] = argument
    return placed.flatten_result(cohort, PARAMETER, argument)

  found = placed.to_python(
      cohort,
      PARAMETER,
      identity(*placed.feed_tensors(cohort, PARAMETER, _argument(3))),
  )
  assert isinstance(seen['argument'].nested[1], Broadcast)
  assert (found.server.w, found.server.n) == (0.5, 3)
  assert list(found.nested) == [[0, 1, 2], b'text']
  data = [list(d.as_numpy_iterator()) for d in found.data]
  assert data == [[], [0], [0, 1]]
  assert found.unplaced.z
  names = [name for name, _ in tff.structure.iter_elements(found)]
  assert names == ['server', 'nested', 'data', 'unplaced']


@pytest.mark.parametrize('kind', KINDS)
def test_what_is_not_used_is_left_out(kind):
  cohort = _cohort(kind, 2)
  everything = placed.feed_tensors(cohort, PARAMETER, _argument(2))
  unused = {1, 3}  # The integers and the datasets.
  specs = placed.argument_specs(cohort, PARAMETER, unused)
  tensors = placed.feed_tensors(cohort, PARAMETER, _argument(2), unused)
  assert [t.dtype for t in tensors] == [spec.dtype for spec in specs]
  assert tf.variant in [t.dtype for t in everything]
  assert tf.variant not in [t.dtype for t in tensors]
  argument = placed.unpack_argument(cohort, PARAMETER, iter(tensors), unused)
  assert argument.nested[0] is None and argument.data is None
  assert argument.server.n.numpy() == 3


@pytest.mark.parametrize(['value_type', 'value', 'message'], [
    (at_server(np.int32), [1, 2], 'got shape'),
    (at_server(tff.SequenceType(np.int32)), tf.data.Dataset.range(2),
     'Expected a dataset of int32'),
    (at_clients([np.int32, np.int32]), [(1, 2), (1,)], 'Expected 2 elements'),
])
def test_values_of_another_type(value_type, value, message):
  with pytest.raises(TypeError, match=message):
    placed.feed_tensors(_cohort(Unrolled, 2), value_type, value)


def test_functions_are_refused():
  function = tff.FunctionType(np.int32, np.int32)
  with pytest.raises(NotImplementedError, match='Cannot take'):
    placed.argument_specs(_cohort(Unrolled, 2), function)
