"""Runs TFF computations in this process, each as one TensorFlow function.

TFF's own runtime sends a computation to a C++ worker, which cannot use a GPU,
and copies all values there and back. Here the whole computation, with all of
its clients and rounds, becomes one `tf.function` of the installed TensorFlow
(`compiler`). There is no other process and no port, nothing is serialised,
clients run at the same time, and any device can be used.
"""

import collections
from collections.abc import Callable, Sequence
import sys
import threading
from typing import TypeVar

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import devices as devices_lib
from fednest_tff.runtime.compiler import call_dominant, lowering, placed
from fednest_tff.runtime.compiler.cohort import Cohort, Looped, Unrolled
from fednest_tff.structures import Value

# A cohort is unrolled if it has at most this many clients, and if its clients'
# graphs have at most this many nodes together. Measured on two cores: 10
# clients of the hyper-representation problem (42,000 nodes) take 0.09 s per
# epoch when unrolled and 0.14 s in a loop, but 11 s and 5 s to compile. With
# N = 20 or with loss tuning, beyond the bound, it is 30 s and 11 s to compile.
_MAX_UNROLLED_CLIENTS = 10
_MAX_UNROLLED_NODES = 42_000
# How many functions, and how many computations, are kept.
_MAX_FUNCTIONS = 64

_Key = TypeVar('_Key')
_Kept = TypeVar('_Kept')
# A concrete TensorFlow function of tensors.
_Function = Callable[..., list[tf.Tensor]]


def _shorten(kept: collections.OrderedDict[_Key, _Kept], size: int) -> None:
  """Removes the oldest entries until there are at most `size`."""
  while len(kept) > size:
    kept.popitem(last=False)


class _Progress:
  """Shows on a terminal that something is being compiled, while it is."""

  def __init__(self, num_clients: int):
    self._text = f'compiling for {num_clients} clients ...'
    self._is_shown = sys.stderr.isatty()

  def __enter__(self) -> None:
    if self._is_shown:
      print(self._text, end='', file=sys.stderr, flush=True)

  def __exit__(self, *error: object) -> None:
    if self._is_shown:
      blank = ' ' * len(self._text)
      print(f'\r{blank}\r', end='', file=sys.stderr, flush=True)


class InProcessRuntime:
  """Compiles and runs computations, and keeps the compiled functions.

  A function is compiled once for each computation and cohort size. Equal
  computations share it, also if they were traced at different times.
  """

  def __init__(
      self,
      devices: Sequence[str] | None = None,
      unroll: int | None = None,
  ):
    """Chooses the devices.

    Args:
      devices: Names such as 'GPU:0'. The clients of a cohort are divided among
        these devices. `None` means every GPU, or the CPU if there is none.
      unroll: The largest cohort that is compiled client by client; `None` to
        decide by the size of the computation.
    """
    self._devices = devices_lib.choose(devices)
    self._unroll = unroll
    self._lock = threading.RLock()
    # From the id of a computation to itself and its call-dominant form.
    self._computations: collections.OrderedDict[
        int, tuple[tff.Computation, call_dominant.CallDominant]
    ] = collections.OrderedDict()
    # From the fingerprint of a computation and its kind and size of cohort.
    self._functions: collections.OrderedDict[
        tuple[bytes, type, int], _Function
    ] = collections.OrderedDict()

  @property
  def devices(self) -> list[str]:
    """The devices, as `tf.device` takes them."""
    return list(self._devices)

  @property
  def num_functions(self) -> int:
    """The number of compiled functions that are kept."""
    return len(self._functions)

  def forget(self, keep: int = 0) -> None:
    """Frees the memory of compiled functions.

    A function may take hundreds of megabytes. If it is needed again, it is
    compiled again.

    Args:
      keep: How many of the last functions are kept.
    """
    with self._lock:
      _shorten(self._computations, keep)
      _shorten(self._functions, keep)

  def run(self, computation: tff.Computation, argument: Value) -> Value:
    """Runs a computation.

    Args:
      computation: The computation; it is compiled if it is new.
      argument: Its argument, or all of them in a struct; `None` for none.

    Returns:
      The result, in the Python types that TFF's own runtime would return.
    """
    rewritten = self._rewrite(computation)
    parameter = rewritten.type_signature.parameter
    size = placed.cohort_size(parameter, argument) or 0
    cohort = self._choose_cohort(size, rewritten.num_nodes)
    tensors = placed.feed_tensors(cohort, parameter, argument)
    function = self._compile(rewritten, cohort)
    result = placed.to_python(
        cohort, rewritten.type_signature.result, function(*tensors)
    )
    return tff.types.type_to_py_container(
        result, computation.type_signature.result
    )

  def _choose_cohort(self, size: int, num_nodes: int) -> Cohort:
    if self._unroll is not None:
      is_unrolled = size <= self._unroll
    else:
      is_unrolled = (
          size <= _MAX_UNROLLED_CLIENTS
          and size * num_nodes <= _MAX_UNROLLED_NODES
      )
    if is_unrolled:
      return Unrolled(size, self._devices)
    return Looped(size, self._devices)

  def _rewrite(
      self, computation: tff.Computation
  ) -> call_dominant.CallDominant:
    with self._lock:
      found = self._computations.get(id(computation))
      if found is not None and found[0] is computation:
        return found[1]
      rewritten = call_dominant.to_call_dominant(computation)
      # The computation is kept so that no other object gets its id.
      self._computations[id(computation)] = (computation, rewritten)
      _shorten(self._computations, _MAX_FUNCTIONS)
      return rewritten

  def _compile(
      self, computation: call_dominant.CallDominant, cohort: Cohort
  ) -> _Function:
    key = computation.fingerprint, type(cohort), cohort.size
    with self._lock:
      if key not in self._functions:
        with _Progress(cohort.size):
          self._functions[key] = lowering.build_function(
              computation, cohort, self._devices[0]
          )
        _shorten(self._functions, _MAX_FUNCTIONS)
      return self._functions[key]


class InProcessContext(tff.framework.SyncContext):
  """A synchronous TFF context that runs computations in this process."""

  def __init__(self, runtime: InProcessRuntime):
    self.runtime = runtime

  def invoke(self, comp: tff.Computation, arg: Value) -> Value:
    return self.runtime.run(comp, arg)


class AsyncInProcessContext(tff.framework.AsyncContext):
  """An asynchronous TFF context that runs computations in this process."""

  def __init__(self, runtime: InProcessRuntime):
    self.runtime = runtime

  async def invoke(self, comp: tff.Computation, arg: Value) -> Value:
    if hasattr(arg, '__await__'):
      arg = await arg
    return self.runtime.run(comp, arg)
