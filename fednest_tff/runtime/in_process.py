"""TFF computations compiled to one TensorFlow function, run in this process.

TFF's own runtime sends a computation to a C++ worker, which cannot use a GPU,
and moves every value there and back. Here the whole computation, all clients
and all rounds of it, becomes one `tf.function` of the installed TensorFlow: no
worker, no port, nothing serialised, clients side by side, on any device.
"""

import collections
from collections.abc import Callable, Sequence
import hashlib
import re
import sys
import threading
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime import devices as devices_lib
from fednest_tff.runtime import graphs, placed
from fednest_tff.runtime.cohort import Mapped, Unrolled
from fednest_tff.runtime.lowering import Lowering

# A cohort is written out client by client up to this many clients, and up to
# this many graph nodes in all its rounds. Measured on two cores: 10 clients of
# the hyper-representation problem (42,000 nodes) take 0.09 s an epoch written
# out and 0.14 s in a loop, but 11 s and not 5 s to compile; with N = 20 or with
# loss tuning, beyond the bound, more than 30 s and not 11 s.
_MAX_UNROLLED_CLIENTS = 10
_MAX_UNROLLED_NODES = 42_000
_MAX_FUNCTIONS = 64


class _Compiled(NamedTuple):
  """A computation in call-dominant form."""

  block: tff.framework.ComputationBuildingBlock
  type_signature: tff.FunctionType
  key: bytes
  num_nodes: int


def _desugar(computation: tff.Computation):
  """Call-dominant form, with the intrinsics that have no handler replaced."""
  block = computation.to_building_block()
  if not isinstance(block.type_signature, tff.FunctionType):
    raise ValueError(f'Expected a function; got {block.type_signature}.')
  return tff.framework.to_call_dominant(block)


def _fingerprint(block: tff.framework.ComputationBuildingBlock) -> bytes:
  """A hash that equal computations share, whenever they were traced."""
  digest = hashlib.sha256()

  def visit(inner):
    if isinstance(inner, tff.framework.CompiledComputation):
      digest.update(graphs.fingerprint(inner))
    elif isinstance(inner, tff.framework.Literal):
      digest.update(repr(inner.value).encode())
    return inner, False

  tff.framework.transform_postorder(block, visit)
  digest.update(_shape_of(block).encode())
  return digest.digest()


def _num_nodes(block: tff.framework.ComputationBuildingBlock) -> int:
  """How large the graphs of all calls are."""
  found = []

  def visit(inner):
    if isinstance(inner, tff.framework.CompiledComputation):
      found.append(graphs.num_nodes(inner))
    return inner, False

  tff.framework.transform_postorder(block, visit)
  return sum(found)


def _shape_of(block: tff.framework.ComputationBuildingBlock) -> str:
  """The block's text with its graphs' own names taken out."""

  def anonymous(inner):
    if isinstance(inner, tff.framework.CompiledComputation):
      return tff.framework.Reference('graph', inner.type_signature), True
    return inner, False

  plain, _ = tff.framework.transform_postorder(block, anonymous)
  # TFF makes names up, such as _abc1; in order of appearance they are the same.
  names = {}
  text = re.sub(
      r'\b_[a-z]{3}\d+\b',
      lambda match: names.setdefault(match[0], f'name_{len(names)}'),
      plain.compact_representation(),
  )
  return f'{text} : {block.type_signature}'


class InProcessRuntime:
  """Compiles computations and keeps the compiled functions.

  A function is built once per computation and cohort size; computations that
  were traced apart but are equal share it.
  """

  def __init__(
      self,
      devices: Sequence[str] | None = None,
      unroll: int | None = None,
  ):
    """Chooses the devices.

    Args:
      devices: Names such as 'GPU:0', over which the clients of a cohort are
        spread; `None` for every GPU, or else the CPU.
      unroll: The largest cohort that is written out client by client; `None`
        to decide by the size of the computation.
    """
    self._devices = devices_lib.choose(devices)
    self._unroll = unroll
    self._lock = threading.RLock()
    self._computations = collections.OrderedDict()
    self._functions = collections.OrderedDict()
    self._graphs = {}

  @property
  def devices(self) -> list[str]:
    return list(self._devices)

  @property
  def num_functions(self) -> int:
    """How many functions have been compiled and are kept."""
    return len(self._functions)

  def forget(self, keep: int = 0) -> None:
    """Frees what was compiled, but for the last `keep` functions.

    A function may hold hundreds of megabytes. One that is needed again is
    compiled again.
    """
    with self._lock:
      for kept in (self._computations, self._functions):
        while len(kept) > keep:
          kept.popitem(last=False)

  def run(self, computation: tff.Computation, argument: Any) -> Any:
    """The result of `computation`, in the Python types that TFF gives."""
    compiled = self._compile(computation)
    signature = compiled.type_signature
    arguments = placed.arguments(signature.parameter, argument)
    size = placed.cohort_size(arguments)
    cohort = self._cohort(size or 0, compiled.num_nodes)
    feeds = []
    for value_type, value in arguments:
      feeds += placed.feed(cohort, value_type, value)
    function = self._function(compiled, cohort)
    found = list(function(*feeds))
    result = placed.result(cohort, signature.result, found)
    return tff.types.type_to_py_container(
        result, computation.type_signature.result
    )

  def _cohort(self, size: int, num_nodes: int) -> Unrolled | Mapped:
    if self._unroll is not None:
      unrolled = size <= self._unroll
    else:
      unrolled = (
          size <= _MAX_UNROLLED_CLIENTS
          and size * num_nodes <= _MAX_UNROLLED_NODES
      )
    kind = Unrolled if unrolled else Mapped
    return kind(size, self._devices)

  def _compile(self, computation: tff.Computation) -> _Compiled:
    with self._lock:
      found = self._computations.get(id(computation))
      if found is not None and found[0] is computation:
        return found[1]
      block = _desugar(computation)
      compiled = _Compiled(
          block, block.type_signature, _fingerprint(block), _num_nodes(block)
      )
      # The computation is kept, so that its id stays its own.
      self._computations[id(computation)] = (computation, compiled)
      while len(self._computations) > _MAX_FUNCTIONS:
        self._computations.popitem(last=False)
      return compiled

  def _function(self, compiled: _Compiled, cohort: Unrolled | Mapped):
    key = compiled.key, type(cohort), cohort.size
    with self._lock:
      function = self._functions.get(key)
      if function is None:
        with _Progress(cohort.size):
          function = self._trace(compiled, cohort)
        self._functions[key] = function
        while len(self._functions) > _MAX_FUNCTIONS:
          self._functions.popitem(last=False)
    return function

  def _import(self, compiled: tff.framework.CompiledComputation) -> Callable:
    key = graphs.fingerprint(compiled)
    if key not in self._graphs:
      self._graphs[key] = graphs.import_graph(compiled)
    return self._graphs[key]

  def _trace(self, compiled: _Compiled, cohort: Unrolled | Mapped):
    """The computation as a concrete TensorFlow function of flat tensors."""
    parameter = compiled.type_signature.parameter
    parts = placed.parts(parameter)
    specs = []
    for value_type in parts:
      specs += placed.specs(cohort, value_type)
    self._graphs = {}

    @tf.function(input_signature=specs, autograph=False)
    def lowered(*leaves):
      leaves = list(leaves)
      taken = [placed.take(cohort, value_type, leaves) for value_type in parts]
      lowering = Lowering(cohort, self._import, self._devices[0])
      function = lowering.evaluate(compiled.block, {})
      if parameter is None:
        value = function() if callable(function) else function
      elif isinstance(parameter, tff.StructType):
        names = [n for n, _ in tff.structure.iter_elements(parameter)]
        value = function(
            tff.structure.Struct(zip(names, taken, strict=True))
        )
      else:
        value = function(taken[0])
      return placed.give(cohort, compiled.type_signature.result, value)

    concrete = lowered.get_concrete_function()
    self._graphs = {}
    return concrete


class _Progress:
  """Says on a terminal that something is being compiled, while it is."""

  def __init__(self, size: int):
    self._text = f'compiling for {size} clients ...'
    self._shown = False

  def __enter__(self):
    if sys.stderr.isatty():
      print(self._text, end='', file=sys.stderr, flush=True)
      self._shown = True

  def __exit__(self, *error):
    if self._shown:
      blank = ' ' * len(self._text)
      print(f'\r{blank}\r', end='', file=sys.stderr, flush=True)


class InProcessContext(tff.framework.SyncContext):
  """A synchronous context on an `InProcessRuntime`."""

  def __init__(self, runtime: InProcessRuntime):
    self.runtime = runtime

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    return self.runtime.run(comp, arg)


class AsyncInProcessContext(tff.framework.AsyncContext):
  """An asynchronous context on an `InProcessRuntime`."""

  def __init__(self, runtime: InProcessRuntime):
    self.runtime = runtime

  async def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    if hasattr(arg, '__await__'):
      arg = await arg
    return self.runtime.run(comp, arg)
