"""Checks of a problem's parts when it is built, each naming its argument."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from fednest_tff import vector_space
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


def _describe(spec: Structure) -> str:
  return str(
      tf.nest.map_structure(lambda s: f'{s.dtype.name}{list(s.shape)}', spec)
  )


def _tensors(name: str, value: object) -> Structure:
  """What the argument `name` returned, as tensors."""
  try:
    return vector_space.tensors(value)
  except (TypeError, ValueError) as error:
    raise ValueError(
        f'`{name}` must return tensors; got {value!r}.'
    ) from error


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
  value = _tensors(name, init(0))
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
  other = vector_space.specs(_tensors(name, init(1)))
  if not _same_structure(spec, other) or (
      tf.nest.flatten(spec) != tf.nest.flatten(other)
  ):
    raise ValueError(
        f'`{name}` must return the same structure for every seed; got'
        f' {_describe(spec)} and {_describe(other)}.'
    )
  return spec


def check_projection(
    level: str, project: Callable[[Structure], Structure], value: Structure
) -> None:
  """Refuses a projection that does not fit the variable, or its start."""
  name = f'project_{level}'
  if not callable(project):
    raise ValueError(f'`{name}` must be a function; got {project!r}.')
  projected = _tensors(name, project(value))
  if not _same_structure(projected, value) or (
      tf.nest.flatten(vector_space.specs(projected))
      != tf.nest.flatten(vector_space.specs(value))
  ):
    raise ValueError(
        f'`{name}` must return the structure that it was given,'
        f' {_describe(vector_space.specs(value))}; got'
        f' {_describe(vector_space.specs(projected))}.'
    )
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
    name: str, loss: Callable[..., tf.Tensor], *arguments: Structure
) -> None:
  """Refuses a loss that is no finite float scalar at the initial point."""
  value = _tensors(name, loss(*arguments))
  if not tf.is_tensor(value):
    raise ValueError(
        f'`{name}` must return a float scalar, the mean over the batch; got'
        f' {_describe(vector_space.specs(value))}.'
    )
  if value.shape.rank != 0 or not value.dtype.is_floating:
    raise ValueError(
        f'`{name}` must return a float scalar, the mean over the batch; got'
        f' {value.dtype.name}{list(value.shape)}.'
    )
  if not np.isfinite(value.numpy()):
    raise ValueError(
        f'`{name}` is {value.numpy()} at the initial point, on a batch of'
        ' uniform floats and zero integers; it must be finite.'
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
  value = _tensors('inner_map', inner_map(x, batch))
  spec = vector_space.specs(value)
  if not _same_structure(spec, inner_spec) or (
      tf.nest.flatten(spec) != tf.nest.flatten(inner_spec)
  ):
    raise ValueError(
        '`inner_map` must return the structure of `init_inner`,'
        f' {_describe(inner_spec)}; got {_describe(spec)}.'
    )
  for leaf in tf.nest.flatten(value):
    if not np.all(np.isfinite(leaf.numpy())):
      raise ValueError('`inner_map` is not finite at the initial point.')


def check_split(
    split: Callable[[Structure], tuple[Structure, Structure]], batch: Structure
) -> None:
  """Refuses a split whose parts are not examples like those it got."""
  parts = split(batch)
  if not isinstance(parts, tuple) or len(parts) != 2:
    raise ValueError(
        '`split` must return a pair, the inner and the outer examples; got'
        f' {type(parts).__name__}.'
    )
  for part in parts:
    part = _tensors('split', part)
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
          f' {_describe(vector_space.specs(batch))}, with one leading axis;'
          f' got {_describe(vector_space.specs(part))}.'
      )


def check_representation(
    representation: Callable[[Structure, Structure], Structure],
    x: Structure,
    batch: Structure,
) -> Structure:
  """The features of `batch`, if they keep its leading axis."""
  features = _tensors('representation', representation(x, batch))
  for leaf in tf.nest.flatten(features):
    if leaf.shape.rank == 0 or leaf.shape[0] != _PROBE_SIZE:
      raise ValueError(
          '`representation` must keep the leading axis of the batch, one row'
          f' per example; got shape {list(leaf.shape)} for {_PROBE_SIZE}'
          ' examples.'
      )
  return features
