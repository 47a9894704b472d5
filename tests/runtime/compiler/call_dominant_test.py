"""Computations as lists of calls, and when two of them count as equal."""

import gc

import numpy as np
import pytest
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import call_dominant
from fednest_tff.runtime.compiler.call_dominant import to_call_dominant
from tests.runtime.comparison import at_clients


def _build(constant=1, factor=2, name='x'):
  scale = tff.tensorflow.computation(lambda v: factor * v, np.int32)

  @tff.federated_computation([(name, at_clients(np.int32))])
  def computation(argument):
    value = tff.federated_value(constant, tff.SERVER)
    scaled = tff.federated_map(scale, argument[0])
    return tff.federated_sum(scaled), tff.federated_broadcast(value)

  return computation


def test_equal_computations_have_the_same_fingerprint():
  first, again = to_call_dominant(_build()), to_call_dominant(_build())
  assert first.fingerprint == again.fingerprint
  assert first.num_nodes == again.num_nodes > 0


@pytest.mark.parametrize(
    'change', [dict(constant=3), dict(factor=3), dict(name='y')]
)
def test_others_do_not(change):
  first, other = to_call_dominant(_build()), to_call_dominant(_build(**change))
  assert first.fingerprint != other.fingerprint


def test_no_call_is_inside_another():
  computation = _build()
  found = to_call_dominant(computation)
  parameter = computation.type_signature.parameter
  assert found.type_signature.parameter == parameter
  for _, value in found.block.result.locals:
    assert not isinstance(value.argument, tff.framework.Call)


def test_a_computation_is_rewritten_once_while_it_is_there():
  computation = _build()
  first = to_call_dominant(computation)
  assert to_call_dominant(computation) is first
  key = id(computation)
  assert call_dominant._KNOWN[key] is first
  del computation
  gc.collect()
  assert key not in call_dominant._KNOWN
