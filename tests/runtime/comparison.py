"""Runs computations in process and compares them with TFF's own runtime."""

import attrs
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import in_process

# One per kind of cohort, and one that does not compile.
RUNTIMES = {
    'vectorised': in_process.InProcessRuntime(),
    'unrolled': in_process.InProcessRuntime(unroll=100),
    'looped': in_process.InProcessRuntime(unroll=0),
    'step by step': in_process.InProcessRuntime(compiled=False),
}
# Those that compile import and simplify a graph once for all of them.
for _runtime in (RUNTIMES['unrolled'], RUNTIMES['looped']):
  _runtime._import_graph = RUNTIMES['vectorised']._import_graph


def run_in_process(runtime, function):
  """Calls `function` while `runtime` is TFF's."""
  context = in_process.InProcessContext(runtime)
  with tff.framework.get_context_stack().install(context):
    return function()


def at_clients(member, **options):
  return tff.FederatedType(member, tff.CLIENTS, **options)


def at_server(member):
  return tff.FederatedType(member, tff.SERVER)


@tff.tensorflow.computation(np.float32)
def _checked(x):
  return tf.debugging.check_numerics(x, 'not finite')


@tff.federated_computation(at_clients(np.float32))
def checked_sum(x):
  """A sum that fails if a client's number is not finite."""
  return tff.federated_sum(tff.federated_map(_checked, x))


def _leaves(value):
  """(description of the container or leaf type, leaf) in order."""
  if isinstance(value, tf.data.Dataset):
    yield 'dataset', str(value.element_spec)
    for element in value.as_numpy_iterator():
      yield from _leaves(element)
  elif isinstance(value, dict):
    yield type(value), list(value)
    for element in value.values():
      yield from _leaves(element)
  elif attrs.has(type(value)):
    yield type(value), None
    for field in attrs.fields(type(value)):
      yield from _leaves(getattr(value, field.name))
  elif isinstance(value, (list, tuple)):
    yield type(value), len(value)
    for element in value:
      yield from _leaves(element)
  else:
    kind = type(value), getattr(value, 'dtype', None)
    yield (*kind, getattr(value, 'shape', None)), value


def assert_same(found, expected, rtol=1e-5):
  """The same containers, types and numbers."""
  found, expected = list(_leaves(found)), list(_leaves(expected))
  assert [kind for kind, _ in found] == [kind for kind, _ in expected]
  for (_, a), (_, b) in zip(found, expected, strict=True):
    if isinstance(b, (np.ndarray, np.generic)) and b.dtype.kind == 'f':
      np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-8)
    else:
      np.testing.assert_array_equal(a, b)


def assert_like_native(function, rtol=1e-5):
  """All kinds of cohort return what TFF's own runtime returns."""
  expected = function()
  for runtime in RUNTIMES.values():
    assert_same(run_in_process(runtime, function), expected, rtol)
