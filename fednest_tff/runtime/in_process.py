"""Runs TFF computations in this process, each as one TensorFlow function.

TFF's own runtime sends a computation to a C++ worker, which cannot use a GPU,
and copies all values there and back. Here the whole computation, with all of
its clients and rounds, becomes one `tf.function` of the installed TensorFlow
(`compiler`). There is no other process and no port, nothing is serialised,
clients run at the same time, and any device can be used.

Compiling takes seconds. For a few epochs, and to find a mistake, the graphs of
a computation can be run one after the other instead.
"""

import asyncio
import collections
from collections.abc import Callable, Hashable, Sequence
import sys
import threading
from typing import TypeVar

from absl import logging
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime import devices as devices_lib
from fednest_tff.runtime.compiler import (
    call_dominant,
    call_options,
    datasets,
    graphs,
    lowering,
    placed,
    readings,
)
from fednest_tff.runtime.compiler import (
    cohort as cohort_lib,
)
from fednest_tff.runtime.compiler.cohort import Cohort
from fednest_tff.runtime.compiler.unrolled import Unrolled
from fednest_tff.structures import Value

# A cohort is unrolled if it has at most this many clients, and if its clients'
# graphs have at most this many nodes together. Measured on two cores: 10
# clients of the hyper-representation problem (42,000 nodes) take 0.09 s per
# epoch when unrolled and 0.14 s in a loop, but 11 s and 5 s to compile. With
# N = 20 or with loss tuning, beyond the bound, it is 30 s and 11 s to compile.
_MAX_UNROLLED_NODES = 42_000
# A cohort is vectorised if it has at most this many groups of clients whose
# tensors have the same shapes.
_MAX_GROUPS = 2
# How many functions are kept.
_MAX_FUNCTIONS = 64

_Key = TypeVar('_Key')
_Kept = TypeVar('_Kept')
# The tensors that were read, client by client.
_Rows = list[list[tf.Tensor]]
# A concrete TensorFlow function of tensors.
_Function = Callable[..., list[tf.Tensor]]


def _shorten(kept: collections.OrderedDict[_Key, _Kept], size: int) -> None:
  """Removes the oldest entries until there are at most `size`."""
  while len(kept) > size:
    kept.popitem(last=False)


class _Progress:
  """Shows on a terminal that something is being compiled, while it is."""

  def __init__(self, num_clients: int):
    clients = f' for {num_clients} clients' if num_clients else ''
    self._text = f'compiling{clients} ...'
    self._is_shown = sys.stderr.isatty()

  def __enter__(self) -> None:
    if self._is_shown:
      self._write(self._text)

  def __exit__(self, *error: object) -> None:
    if self._is_shown:
      self._write('')

  def _write(self, text: str) -> None:
    # In place of what is in the line, such as a progress bar, which is drawn
    # again later; then clears the rest of the line.
    print(f'\r{text}\x1b[K', end='', file=sys.stderr, flush=True)


class InProcessRuntime:
  """Compiles and runs computations, and keeps the compiled functions.

  A function is compiled once for each computation and cohort size. Equal
  computations share it, also if they were traced at different times.
  """

  def __init__(
      self,
      devices: Sequence[str] | None = None,
      unroll: int | None = None,
      compiled: bool = True,
  ):
    """Chooses the devices.

    Args:
      devices: Names such as 'GPU:0'. The clients of a cohort are divided among
        these devices. `None` means every GPU, or the CPU if there is none.
      unroll: The largest cohort that is compiled client by client; `None` to
        decide by the size of the computation.
      compiled: Whether a computation becomes one function. If not, its graphs
        run one after the other, client by client, without compiling them
        together.
    """
    self._devices = devices_lib.choose(devices)
    self._unroll = unroll
    self._compiled = compiled
    # Graphs that are compiled are simplified before.
    self._import_graph = graphs.Importer(is_simplified=compiled)
    self._reader = readings.Reader()
    # What `_stack` made last, with what it was made of.
    self._last_stack: (
        tuple[Hashable, list[tf.Tensor], list[tf.Tensor]] | None
    ) = None
    self._lock = threading.RLock()
    # From the fingerprint of a computation and its kind of cohort.
    self._functions: collections.OrderedDict[
        tuple[bytes, type, Hashable], _Function
    ] = collections.OrderedDict()
    # Fingerprints of computations in which clients whose datasets have the same
    # number of elements do not have tensors of the same shapes.
    self._uneven: set[bytes] = set()

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
      _shorten(self._functions, keep)
      self._import_graph.clear()
      self._reader.clear()
      self._last_stack = None

  def run(self, computation: tff.Computation, argument: Value) -> Value:
    """Runs a computation.

    Args:
      computation: The computation; it is compiled if it is new.
      argument: Its argument, or all of them in a struct; `None` for none.

    Returns:
      The result, in the Python types that TFF's own runtime would return.
    """
    with self._lock:
      rewritten = call_dominant.to_call_dominant(computation)
    argument = datasets.separate(argument, computation.type_signature.parameter)
    with call_options.without_temporary_variables():
      result = self._run_with_fallback(rewritten, argument)
    return tff.types.type_to_py_container(
        result, computation.type_signature.result
    )

  def _run_with_fallback(
      self, computation: call_dominant.CallDominant, argument: Value
  ) -> Value:
    """Runs a computation, client by client if all at once is impossible."""
    read = self._read(computation, argument) if self._compiled else []
    cohort = self._choose_cohort(computation, argument, read)
    try:
      return self._run(computation, cohort, argument, read)
    except tf.errors.OpError as error:
      if not cohort.is_vectorised:
        raise
      # Shown with --verbosity=1. Most often, tensors differ in their shapes.
      logging.vlog(1, 'Clients cannot be computed at once: %s', error.message)
      self._uneven.add(computation.fingerprint)
      try:
        cohort = self._choose_cohort(computation, argument, read)
        return self._run(computation, cohort, argument, read)
      except tf.errors.OpError:
        # Different shapes were not the cause.
        self._uneven.discard(computation.fingerprint)
        raise

  def _read(
      self, computation: call_dominant.CallDominant, argument: Value
  ) -> list[_Rows]:
    """Runs the readings; returns the results of each, client by client."""
    if not computation.readings.calls:
      return []
    parameter = computation.type_signature.parameter
    size = placed.cohort_size(parameter, argument) or 0
    leaves = structures.typed_leaves(argument, parameter)
    try:
      return [
          self._reader.read(
              reading, leaves[reading.leaf][0], leaves[reading.leaf][1].member
          )
          for reading in computation.readings.calls
      ]
    except (TypeError, ValueError):
      # Says which client's dataset does not fit, if one does not.
      placed.feed_tensors(Unrolled(size, self._devices), parameter, argument)
      raise

  def _run(
      self,
      computation: call_dominant.CallDominant,
      cohort: Cohort,
      argument: Value,
      read: list[_Rows],
  ) -> Value:
    signature = computation.type_signature
    if self._compiled and signature.parameter is not None:
      readings_ = computation.readings
      tensors = placed.feed_tensors(
          cohort, signature.parameter, argument, readings_.unused
      )
      for reading, rows in zip(readings_.calls, read, strict=True):
        tensors += self._stack(cohort, rows, reading.member)
      results = self._compile(computation, cohort)(*tensors)
    else:
      tensors = placed.feed_tensors(cohort, signature.parameter, argument)
      import_graph = self._import_graph
      if self._compiled:
        # The initial state of a process, for example. It is needed once, and is
        # another computation for each seed: nothing of it is kept.
        import_graph = graphs.Importer(is_simplified=False)
      with self._lock:
        results = lowering.evaluate_computation(
            computation, cohort, self._devices[0], import_graph, tensors
        )
    return placed.to_python(cohort, signature.result, results)

  def _stack(
      self, cohort: Cohort, rows: _Rows, member: tff.Type
  ) -> list[tf.Tensor]:
    """Gives tensors that were read the form of the cohort.

    What was made for the last call is used again if the clients are the same:
    the data of a cohort may be hundreds of megabytes.
    """
    tensors = [tensor for row in rows for tensor in row]
    key = type(cohort), cohort.key, tuple(map(id, tensors))
    last = self._last_stack  # Another thread may replace it.
    if last is None or last[0] != key:
      last = key, tensors, cohort.stack_tensors(rows, member)
      self._last_stack = last
    return last[2]

  def _choose_cohort(
      self,
      computation: call_dominant.CallDominant,
      argument: Value,
      read: list[_Rows],
  ) -> Cohort:
    parameter = computation.type_signature.parameter
    size = placed.cohort_size(parameter, argument) or 0
    if not self._compiled or size <= (self._unroll or 0):
      return Unrolled(size, self._devices)
    chunk = cohort_lib.choose_chunk(parameter, read, size)
    if self._unroll is not None:
      return cohort_lib.build_looped(size, self._devices, chunk)
    if computation.fingerprint not in self._uneven:
      shapes = cohort_lib.shapes_of_clients(parameter, argument, read, size)
      if len(set(shapes)) <= _MAX_GROUPS:
        return cohort_lib.build_vectorised(shapes, self._devices, chunk)
    if size * computation.num_nodes <= _MAX_UNROLLED_NODES:
      return Unrolled(size, self._devices)
    return cohort_lib.build_looped(size, self._devices, chunk)

  def _compile(
      self, computation: call_dominant.CallDominant, cohort: Cohort
  ) -> _Function:
    key = computation.fingerprint, type(cohort), cohort.key
    with self._lock:
      if key not in self._functions:
        with _Progress(cohort.size):
          self._functions[key] = lowering.build_function(
              computation, cohort, self._devices[0], self._import_graph
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
  """An asynchronous TFF context that runs computations in this process.

  A computation is compiled and run in another thread, so that the event loop
  goes on meanwhile.
  """

  def __init__(self, runtime: InProcessRuntime):
    self.runtime = runtime

  async def invoke(self, comp: tff.Computation, arg: Value) -> Value:
    if hasattr(arg, '__await__'):
      arg = await arg
    return await asyncio.to_thread(self.runtime.run, comp, arg)
