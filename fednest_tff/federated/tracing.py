"""Computations that are traced once for a problem.

Tracing is most of the time that it takes to build a process: 0.3 s for a
product of second derivatives. Processes on the same problem share most of their
computations (FedNest and FedNest_SGD differ only in the inner steps), and step
sizes are no part of them. So a computation is kept with its problem and used
again wherever the same function, with the same values in its closure, is to be
traced for the same types.
"""

from collections.abc import Callable, Hashable
import dataclasses
import types as python_types
from typing import Any

import tensorflow_federated as tff

from fednest_tff.local import derivatives
from fednest_tff.problems import Problem

# How many computations a problem keeps.
_MAX_KEPT = 128
# How deep functions may refer to functions.
_MAX_DEPTH = 20


class _UnknownValueError(Exception):
  """A value that cannot be compared with another one."""


def _describe(value: object, problem: Problem, depth: int = 0) -> Hashable:
  """A key that is the same for values that are traced alike."""
  if value is problem:
    return Problem
  if depth > _MAX_DEPTH:
    raise _UnknownValueError
  if isinstance(value, python_types.FunctionType):
    try:
      around = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError as error:  # A name that has no value yet.
      raise _UnknownValueError from error
    defaults = value.__defaults__, tuple((value.__kwdefaults__ or {}).items())
    return (
        value.__code__,
        value.__module__,
        id(value.__globals__),
        _describe((*around, *defaults), problem, depth + 1),
    )
  if isinstance(value, tuple):
    return type(value), *(_describe(v, problem, depth + 1) for v in value)
  if dataclasses.is_dataclass(value):
    fields = tuple(getattr(value, f.name) for f in dataclasses.fields(value))
    return type(value), _describe(fields, problem, depth + 1)
  try:
    hash(value)
  except TypeError as error:
    raise _UnknownValueError from error
  return type(value), value


def computation(
    problem: Problem, *parameter_types: Any
) -> Callable[[Callable[..., Any]], tff.Computation]:
  """Like `tff.tensorflow.computation`, but equal functions are traced once.

  Args:
    problem: The problem that keeps the computation.
    *parameter_types: The types of the function's parameters.

  Returns:
    A decorator. If the same function, with equal values in its closure, was
    decorated before, the computation from then is the result.
  """

  def decorate(function: Callable[..., Any]) -> tff.Computation:
    if derivatives.is_marked():  # Traced to count derivatives; not kept.
      return tff.tensorflow.computation(function, *parameter_types)
    kept = problem.computations
    try:
      key = (
          tuple(map(tff.to_type, parameter_types)),
          _describe(function, problem),
      )
    except _UnknownValueError:
      return tff.tensorflow.computation(function, *parameter_types)
    if key not in kept:
      kept[key] = tff.tensorflow.computation(function, *parameter_types)
      while len(kept) > _MAX_KEPT:
        del kept[next(iter(kept))]
    return kept[key]

  return decorate
