"""Checks of a problem's parts when it is built, each naming its argument."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from fednest_tff import options, vector_space
from fednest_tff.problems import tracing
from fednest_tff.vector_space import Structure

_PROBE_SIZE = 2
# How far a feasible point may be from its projection, relative to its norm.
_FEASIBLE = 1e-5


def _same_structure(a: Structure, b: Structure) -> bool:
  try:
    tf.nest.assert_same_structure(a, b)
  except (TypeError, ValueError):
    return False
  return True


def describe(spec: Structure) -> str:
  """Types and shapes of a structure of specs, in one line."""
  return str(
      tf.nest.map_structure(lambda s: f'{s.dtype.name}{list(s.shape)}', spec)
  )


def _call(
    name: str, function: Callable[..., object], **arguments: object
) -> object:
  """What the argument `name` returns for these arguments.

  A variable that it uses would be lost: clients have no access to it.

  Args:
    name: Of the argument.
    function: What was given for it.
    **arguments: Its positional arguments, by what they are.

  Returns:
    What it returns.
  """
  options.check_function(name, function, *arguments)
  with tf.GradientTape() as tape:
    try:
      value = function(*arguments.values())
    except Exception as error:
      reason = ' '.join(str(error).split())
      raise ValueError(
          f'`{name}` fails when it is tried: {type(error).__name__}: {reason}'
      ) from error
    leaves = tf.nest.flatten(value)
    used = [leaf for leaf in leaves if isinstance(leaf, tf.Variable)]
  for variable in (*used, *tape.watched_variables()):
    raise ValueError(
        f'`{name}` uses the tf.Variable {variable.name!r}, which would not'
        ' change and whose value clients cannot read: make it a part of x or'
        ' y, or a NumPy array.'
    )
  return value


def _tensors(
    name: str, function: Callable[..., object], **arguments: object
) -> Structure:
  """What the argument `name` returns, as tensors."""
  value = _call(name, function, **arguments)
  try:
    return vector_space.tensors(value)
  except Exception as error:  # TensorFlow raises many kinds here.
    raise ValueError(
        f'`{name}` must return tensors; got {value!r}.'
    ) from error


def _traced(
    name: str,
    function: Callable[..., Structure],
    check: Callable[[Structure], None] | None = None,
    **arguments: Structure,
) -> Structure:
  """What the argument `name` returns, in a graph, as NumPy arrays."""
  options.check_function(name, function, *arguments)
  return tracing.run(name, function, *arguments.values(), check=check)


def check_element_spec(element_spec: Structure) -> Structure:
  """`element_spec` itself, if it describes one example."""
  leaves = tf.nest.flatten(element_spec)
  if not leaves:
    raise ValueError('`element_spec` is empty: an example has at least a leaf.')
  for leaf in leaves:
    if not isinstance(leaf, tf.TensorSpec):
      raise ValueError(
          f'`element_spec` must be a structure of tf.TensorSpec; got {leaf!r}.'
      )
    if not leaf.shape.is_fully_defined():
      raise ValueError(
          '`element_spec` describes one example, unbatched and of a known'
          f' shape; got {leaf}.'
      )
  return element_spec


def check_variable(name: str, init: Callable[[int], Structure]) -> Structure:
  """The specs of the variable that `init` makes."""
  value = _tensors(name, init, seed=0)
  leaves = tf.nest.flatten(value)
  if not leaves:
    raise ValueError(f'`{name}` returned an empty structure.')
  for leaf in leaves:
    if not leaf.dtype.is_floating:
      raise ValueError(
          f'`{name}` must return float tensors; got one of {leaf.dtype.name}.'
      )
    if not np.all(np.isfinite(leaf.numpy())):
      raise ValueError(f'`{name}` returned a value that is not finite.')
  spec = vector_space.specs(value)
  other = vector_space.specs(_tensors(name, init, seed=1))
  if not _same_structure(spec, other) or (
      tf.nest.flatten(spec) != tf.nest.flatten(other)
  ):
    raise ValueError(
        f'`{name}` must return the same structure for every seed; got'
        f' {describe(spec)} and {describe(other)}.'
    )
  return spec


def check_projection(
    level: str, project: Callable[[Structure], Structure], value: Structure
) -> None:
  """Refuses a projection that does not fit the variable, or its start."""
  if project is vector_space.identity:
    return
  name = f'project_{level}'
  variable = {'outer': 'x', 'inner': 'y'}[level]

  def check(projected: Structure) -> None:
    if not _same_structure(projected, value) or (
        tf.nest.flatten(vector_space.specs(projected))
        != tf.nest.flatten(vector_space.specs(value))
    ):
      raise ValueError(
          f'`{name}` must return the structure that it was given,'
          f' {describe(vector_space.specs(value))}; got'
          f' {describe(vector_space.specs(projected))}.'
      )

  projected = _traced(name, project, check, **{variable: value})
  moved = vector_space.norm(vector_space.subtract(projected, value)).numpy()
  scale = 1 + vector_space.norm(value).numpy()
  if not moved <= _FEASIBLE * scale:
    raise ValueError(
        f'`init_{level}` must start in the set of `{name}`; the projection'
        f' moves it by {moved:.3g}.'
    )


def probe_batch(element_spec: Structure) -> Structure:
  """A small batch to try functions on: uniform floats, zeros otherwise."""

  def probe(index: int, spec: tf.TensorSpec) -> tf.Tensor:
    shape = [_PROBE_SIZE, *spec.shape]
    if spec.dtype.is_floating:
      return tf.random.stateless_uniform(shape, [0, index], dtype=spec.dtype)
    return tf.zeros(shape, spec.dtype)

  leaves = tf.nest.flatten(element_spec)
  return tf.nest.pack_sequence_as(
      element_spec, [probe(i, spec) for i, spec in enumerate(leaves)]
  )


def check_loss(
    name: str, loss: Callable[..., tf.Tensor], **arguments: Structure
) -> None:
  """Refuses a loss that is no finite float scalar at the initial point."""

  def check(value: Structure) -> None:
    if tf.is_tensor(value) and value.shape.rank == 0 and (
        value.dtype.is_floating
    ):
      return
    raise ValueError(
        f'`{name}` must return a float scalar, the mean over the batch; got'
        f' {describe(vector_space.specs(value))}.'
    )

  value = _traced(name, loss, check, **arguments)
  if not np.isfinite(value):
    raise ValueError(
        f'`{name}` is {value} at the initial point, on a batch of uniform'
        ' floats and zero integers; it must be finite.'
    )


def check_inner_map(
    inner_map: Callable[[Structure, Structure], Structure],
    init_outer: Callable[[int], Structure],
    init_inner: Callable[[int], Structure],
    element_spec: Structure,
) -> None:
  """Refuses an r whose value does not live where y does."""
  inner_spec = check_variable('init_inner', init_inner)
  check_variable('init_outer', init_outer)
  x = vector_space.tensors(init_outer(0))
  batch = probe_batch(check_element_spec(element_spec))

  def check(value: Structure) -> None:
    spec = vector_space.specs(value)
    if not _same_structure(spec, inner_spec) or (
        tf.nest.flatten(spec) != tf.nest.flatten(inner_spec)
    ):
      raise ValueError(
          '`inner_map` must return the structure of `init_inner`,'
          f' {describe(inner_spec)}; got {describe(spec)}.'
      )

  value = _traced('inner_map', inner_map, check, x=x, batch=batch)
  for leaf in tf.nest.flatten(value):
    if not np.all(np.isfinite(leaf)):
      raise ValueError('`inner_map` is not finite at the initial point.')


def check_split(
    split: Callable[[Structure], tuple[Structure, Structure]], batch: Structure
) -> None:
  """Refuses a split whose parts are not examples like those it got."""
  parts = _call('split', split, examples=batch)
  if not isinstance(parts, tuple) or len(parts) != 2:
    raise ValueError(
        '`split` must return a pair, the inner and the outer examples; got'
        f' {type(parts).__name__}.'
    )
  for part in parts:
    part = _tensors('split', lambda part: part, part=part)
    leaves = tf.nest.flatten(part)
    if (
        not _same_structure(part, batch)
        or any(leaf.shape.rank == 0 for leaf in leaves)
        or len({leaf.shape[0] for leaf in leaves}) > 1
        or any(
            a.dtype != b.dtype or a.shape[1:] != b.shape[1:]
            for a, b in zip(leaves, tf.nest.flatten(batch), strict=True)
        )
    ):
      raise ValueError(
          '`split` must return examples of the structure it was given,'
          f' {describe(vector_space.specs(batch))}, with one leading axis;'
          f' got {describe(vector_space.specs(part))}.'
      )


def check_representation(
    representation: Callable[[Structure, Structure], Structure],
    x: Structure,
    batch: Structure,
) -> Structure:
  """The features of `batch`, if they keep its leading axis."""
  features = vector_space.tensors(
      _traced('representation', representation, x=x, batch=batch)
  )
  for leaf in tf.nest.flatten(features):
    if leaf.shape.rank == 0 or leaf.shape[0] != _PROBE_SIZE:
      raise ValueError(
          '`representation` must keep the leading axis of the batch, one row'
          f' per example; got shape {list(leaf.shape)} for {_PROBE_SIZE}'
          ' examples.'
      )
  return features
