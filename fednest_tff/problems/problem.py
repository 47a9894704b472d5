"""Nested problems as plain functions.

A problem is a pair of losses over two variables, min_x mean_i f_i(x, y*(x))
with y*(x) = argmin_y mean_i g_i(x, y), where client i enters only through its
examples: f_i and g_i are the same functions of different batches. Four builders
cover the problem classes of the paper (section 2.1 and 3.1-3.3):

- `bilevel`: f(x, y) and g(x, y);
- `minimax`: f(x, y) and g = -f, whose hypergradient is the direct one;
- `compositional`: f(y) and g = 1/2 ||y - r(x)||^2, whose Hessian is I;
- `single_level`: f(x) and no inner problem.

Variables are nested structures of float tensors. A loss takes them and a dense
batch, `element_spec` with a leading axis, and returns the mean over the batch.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.problems import splits, validation
from fednest_tff.vector_space import Structure

Loss = Callable[[Structure, Structure, Structure], tf.Tensor]
Initializer = Callable[[int], Structure]


@dataclasses.dataclass(frozen=True)
class Problem:
  """A nested problem; made by the builders of this module, not by hand.

  Attributes:
    kind: 'bilevel', 'minimax', 'compositional' or 'single_level'.
    outer_loss: f_i(x, y; features), where features are those of a batch.
    inner_loss: g_i(x, y; features).
    init_outer: x at the start, from a seed.
    init_inner: y at the start, from a seed.
    element_spec: The structure of `tf.TensorSpec`s of one example.
    split: From a client's examples to its inner and its outer examples.
    representation: From x and a batch to the features that the losses take;
      the batch itself unless the problem declares one. It is all that the
      losses need of the batch, so it is evaluated once while x is fixed.
    outer_spec: The `tf.TensorSpec`s of x.
    inner_spec: The `tf.TensorSpec`s of y; empty for a single-level problem.
  """

  kind: str
  outer_loss: Loss
  inner_loss: Loss
  init_outer: Initializer
  init_inner: Initializer
  element_spec: Structure
  split: splits.Split
  representation: Callable[[Structure, Structure], Structure]
  outer_spec: Structure
  inner_spec: Structure

  @property
  def has_inner(self) -> bool:
    """Whether there is a variable y at all."""
    return self.kind != 'single_level'

  @property
  def is_implicit(self) -> bool:
    """Whether the hypergradient has an indirect part, and so needs FedIHGP."""
    return self.kind in ('bilevel', 'compositional')

  @property
  def has_representation(self) -> bool:
    """Whether the losses take anything else than the batch itself."""
    return self.representation is not _identity

  @property
  def scalar_dtype(self) -> tf.DType:
    """The type of step sizes, weights and losses."""
    return vector_space.scalar_dtype((self.outer_spec, self.inner_spec))


def _identity(x: Structure, batch: Structure) -> Structure:
  del x  # The batch is its own representation.
  return batch


def _build(
    kind: str,
    outer_loss: Loss,
    inner_loss: Loss,
    init_outer: Initializer,
    init_inner: Initializer,
    element_spec: Structure,
    split: Any,
    representation: Callable[[Structure, Structure], Structure] | None,
    outer_loss_name: str = 'outer_loss',
) -> Problem:
  """Makes a problem and checks it at its initial point."""
  element_spec = validation.check_element_spec(element_spec)
  problem = Problem(
      kind=kind,
      outer_loss=outer_loss,
      inner_loss=inner_loss,
      init_outer=init_outer,
      init_inner=init_inner,
      element_spec=element_spec,
      split=splits.to_split(split),
      representation=representation or _identity,
      outer_spec=validation.check_variable('init_outer', init_outer),
      inner_spec=(
          () if kind == 'single_level'
          else validation.check_variable('init_inner', init_inner)
      ),
  )
  batch = validation.probe_batch(element_spec)
  validation.check_split(problem.split, batch)
  x, y = vector_space.tensors((init_outer(0), init_inner(0)))
  features = validation.check_representation(problem.representation, x, batch)
  validation.check_loss(outer_loss_name, outer_loss, x, y, features)
  # What g is made of has been checked before: f itself, or the inner map.
  if kind == 'bilevel':
    validation.check_loss('inner_loss', inner_loss, x, y, features)
  return problem


def bilevel(
    outer_loss: Loss,
    inner_loss: Loss,
    init_outer: Initializer,
    init_inner: Initializer,
    element_spec: Structure,
    *,
    split: Any = 0.5,
    representation: Callable[[Structure, Structure], Structure] | None = None,
) -> Problem:
  """min_x mean_i f_i(x, y*(x)), y*(x) = argmin_y mean_i g_i(x, y).

  Args:
    outer_loss: f, `(x, y, batch) -> scalar`, a mean over the batch. Constants
      that it holds must be NumPy arrays, not tensors made outside of it: TFF
      traces it into graphs of its own.
    inner_loss: g, `(x, y, batch) -> scalar`, strongly convex in y. TensorFlow
      cannot take its second derivatives forward-over-back through
      `tf.while_loop`, `tf.cond` or `tf.map_fn`.
    init_outer: `seed -> x`, a nested structure of float tensors; the seed is a
      Python integer.
    init_inner: `seed -> y`, likewise.
    element_spec: Structure of `tf.TensorSpec`s of one example.
    split: How a client's examples become its inner (training) and its outer
      (validation) examples: the fraction that is inner, 'same' to use all of
      them for both, or a function `examples -> (inner, outer)` of dense
      examples.
    representation: Optional `(x, batch) -> features`. If given, both losses
      take its result in place of the batch. Features keep the leading axis,
      example by example, and carry all that the losses need (labels, too).

  Returns:
    A `Problem`.

  Raises:
    ValueError: If an argument does not fit; it names the argument.
  """
  return _build(
      'bilevel', outer_loss, inner_loss, init_outer, init_inner, element_spec,
      split, representation,
  )


def minimax(
    loss: Loss,
    init_outer: Initializer,
    init_inner: Initializer,
    element_spec: Structure,
    *,
    split: Any = 'same',
    representation: Callable[[Structure, Structure], Structure] | None = None,
) -> Problem:
  """min_x max_y mean_i f_i(x, y): bilevel with g = -f.

  Args:
    loss: f, `(x, y, batch) -> scalar`, strongly concave in y.
    init_outer: `seed -> x`.
    init_inner: `seed -> y`.
    element_spec: Structure of `tf.TensorSpec`s of one example.
    split: As in `bilevel`; both levels see all examples by default.
    representation: As in `bilevel`.

  Returns:
    A `Problem`.
  """
  return _build(
      'minimax', loss, lambda x, y, batch: -loss(x, y, batch), init_outer,
      init_inner, element_spec, split, representation, outer_loss_name='loss',
  )


def compositional(
    outer_loss: Callable[[Structure, Structure], tf.Tensor],
    inner_map: Callable[[Structure, Structure], Structure],
    init_outer: Initializer,
    init_inner: Initializer,
    element_spec: Structure,
    *,
    split: Any = 'same',
) -> Problem:
  """min_x mean_i f_i(mean_j r_j(x)): bilevel with g_i = 1/2 ||y - r_i(x)||^2.

  Args:
    outer_loss: f, `(y, batch) -> scalar`, a mean over the batch.
    inner_map: r, `(x, batch) -> y`, a mean over the batch, of y's structure.
    init_outer: `seed -> x`.
    init_inner: `seed -> y`.
    element_spec: Structure of `tf.TensorSpec`s of one example.
    split: As in `bilevel`; both levels see all examples by default.

  Returns:
    A `Problem`.
  """

  def inner_loss(x, y, batch):
    residual = vector_space.subtract(y, inner_map(x, batch))
    return vector_space.squared_norm(residual) / 2

  validation.check_inner_map(inner_map, init_outer, init_inner, element_spec)
  return _build(
      'compositional', lambda x, y, batch: outer_loss(y, batch), inner_loss,
      init_outer, init_inner, element_spec, split, None,
  )


def single_level(
    loss: Callable[[Structure, Structure], tf.Tensor],
    init_outer: Initializer,
    element_spec: Structure,
) -> Problem:
  """min_x mean_i f_i(x): no inner problem, FedOut alone.

  Args:
    loss: f, `(x, batch) -> scalar`, a mean over the batch.
    init_outer: `seed -> x`.
    element_spec: Structure of `tf.TensorSpec`s of one example.

  Returns:
    A `Problem`.
  """
  return _build(
      'single_level', lambda x, y, batch: loss(x, batch),
      lambda x, y, batch: tf.zeros([]), init_outer, lambda seed: (),
      element_spec, 'same', None, outer_loss_name='loss',
  )
