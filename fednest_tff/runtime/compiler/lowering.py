"""Evaluates a TFF computation, or traces it into one TensorFlow function.

A computation in call-dominant form is a list of calls of intrinsics and of
TensorFlow graphs. Evaluating it once under `tf.function` writes all of it, for
all clients, into one TensorFlow graph. Evaluating it outside runs the calls one
after the other.
"""

from collections.abc import Callable, Iterable

import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.runtime.compiler import placed, repeats, values
from fednest_tff.runtime.compiler.broadcast import Function
from fednest_tff.runtime.compiler.call_dominant import CallDominant
from fednest_tff.runtime.compiler.cohort import Cohort
from fednest_tff.runtime.compiler.intrinsics import Intrinsics
from fednest_tff.runtime.compiler.loops import Program
from fednest_tff.runtime.compiler.steps import Runner
from fednest_tff.structures import Value

ImportGraph = Callable[[tff.framework.CompiledComputation], Function]


class Lowering:
  """Evaluates TFF's building blocks; create one for each evaluation."""

  def __init__(
      self,
      cohort: Cohort,
      import_graph: ImportGraph,
      server_device: str,
      given: dict[str, Value] | None = None,
  ):
    """Prepares the evaluation.

    Args:
      cohort: The clients.
      import_graph: Converts a compiled computation to a Python function.
      server_device: The device for all that does not run at clients.
      given: Values of names that need not be evaluated.
    """
    self._given = given or {}
    self._cohort = cohort
    self._intrinsics = Intrinsics(cohort, server_device)
    self._import_graph = import_graph
    self._server_device = server_device

  def evaluate(
      self,
      block: tff.framework.ComputationBuildingBlock,
      names: dict[str, Value],
  ) -> Value:
    """Evaluates a building block.

    Args:
      block: The block.
      names: The values of the names that `block` refers to.

    Returns:
      The block's value: a Python function if its type is a function.

    Raises:
      NotImplementedError: If the block is of a kind that cannot be evaluated.
    """
    framework = tff.framework
    if isinstance(block, framework.Reference):
      if block.name in self._given:
        return self._given[block.name]
      return names[block.name]
    if isinstance(block, framework.Block):
      names = dict(names)
      for name, value in block.locals:
        if name not in self._given:
          names[name] = self.evaluate(value, names)
      return self.evaluate(block.result, names)
    if isinstance(block, framework.Lambda):
      return lambda argument=None: self.evaluate(
          block.result, names | {block.parameter_name: argument}
      )
    if isinstance(block, framework.Struct):
      return tff.structure.Struct(
          (name, self.evaluate(element, names))
          for name, element in tff.structure.iter_elements(block)
      )
    if isinstance(block, framework.Selection):
      source = self.evaluate(block.source, names)
      if block.name is not None:
        return getattr(source, block.name)
      return source[block.index]
    if isinstance(block, framework.Call):
      return self._call(block, names)
    if isinstance(block, framework.CompiledComputation):
      return self._import_graph(block)
    if isinstance(block, framework.Literal):
      return tf.constant(
          block.value, values.tensor_spec(block.type_signature).dtype
      )
    raise NotImplementedError(
        f'The in-process runtime cannot run a {type(block).__name__}.'
    )

  def _call(self, call: tff.framework.Call, names: dict[str, Value]) -> Value:
    argument = None
    if call.argument is not None:
      argument = self.evaluate(call.argument, names)
    return self._call_with(call, argument, names)

  def _call_with(
      self, call: tff.framework.Call, argument: Value, names: dict[str, Value]
  ) -> Value:
    """Runs a call whose argument has been evaluated."""
    if isinstance(call.function, tff.framework.Intrinsic):
      return self._intrinsics.run(call, argument)
    with tf.device(self._server_device):
      return self.evaluate(call.function, names)(argument)

  def run_program(self, program: Program, argument: Value) -> Value:
    """Evaluates a computation with loops.

    Args:
      program: The computation.
      argument: Its argument; `None` for none.

    Returns:
      Its result.
    """
    runner = Runner(
        self._cohort,
        lambda call, value: self._call_with(call, value, {}),
        lambda block: self.evaluate(block, {}),
    )
    with tf.device(self._server_device):
      return program.run(runner, self._given, argument)


def evaluate_computation(
    computation: CallDominant,
    cohort: Cohort,
    server_device: str,
    import_graph: ImportGraph,
    tensors: Iterable[tf.Tensor],
    has_readings: bool = False,
) -> list[tf.Tensor]:
  """Evaluates a computation: at once, or while a function is being traced.

  Args:
    computation: The computation.
    cohort: The clients.
    server_device: The device for all that does not run at clients.
    import_graph: Converts a compiled computation to a Python function.
    tensors: The argument, from `placed.feed_tensors`, without what only
      readings need, and then the results of the readings.
    has_readings: Whether `tensors` has results of readings. If not, it has the
      whole argument and nothing else.

  Returns:
    The tensors of the result, for `placed.to_python`.
  """
  signature = computation.type_signature
  remaining = iter(tensors)
  argument = None
  if signature.parameter is not None:
    unused = computation.readings.unused if has_readings else frozenset()
    argument = placed.unpack_argument(
        cohort, signature.parameter, remaining, unused
    )
  given = {}
  if has_readings:
    for reading in computation.readings.calls:
      given[reading.name] = cohort.unpack_argument(remaining, reading.member)
  lowering = Lowering(cohort, import_graph, server_device, given)
  program = None
  if has_readings:  # The computation is being compiled.
    program = repeats.to_program(computation.block, given)
  if program is not None:
    value = lowering.run_program(program, argument)
  else:
    value = lowering.evaluate(computation.block, {})
    if callable(value):
      value = value(argument)
  return placed.flatten_result(cohort, signature.result, value)


def build_function(
    computation: CallDominant,
    cohort: Cohort,
    server_device: str,
    import_graph: ImportGraph,
) -> Callable[..., list[tf.Tensor]]:
  """Builds the TensorFlow function of a computation for one cohort.

  Args:
    computation: The computation.
    cohort: The clients.
    server_device: The device for all that does not run at clients.
    import_graph: Converts a compiled computation to a Python function. Those
      that it has converted before need not be vectorised again.

  Returns:
    A concrete function. It takes the tensors of `placed.feed_tensors` and of
    the readings, and returns those that `placed.to_python` takes.
  """
  readings = computation.readings
  specs = placed.argument_specs(
      cohort, computation.type_signature.parameter, readings.unused
  )
  for reading in readings.calls:
    specs += cohort.argument_specs(reading.member)

  @tf.function(input_signature=specs, autograph=False)
  def lowered(*tensors: tf.Tensor) -> list[tf.Tensor]:
    return evaluate_computation(
        computation, cohort, server_device, import_graph, tensors,
        has_readings=True,
    )

  return lowered.get_concrete_function()
