"""Builders of nested problems from plain functions.

Four builders cover the problem classes of the paper (section 2.1 and 3.1-3.3),
and a fifth gives each client an inner problem to itself:

- `bilevel`: f(x, y) and g(x, y);
- `minimax`: f(x, y) and g = -f, whose hypergradient is the direct one;
- `compositional`: f(y) and g = 1/2 ||y - r(x)||^2, whose Hessian is I;
- `single_level`: f(x) and no inner problem;
- `personal`: f(x, y) and g(x, y) with y_i*(x) = argmin_y g_i(x, y), so that
  min_x mean_i f_i(x, y_i*(x)).
"""

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.problems import splits, validation
from fednest_tff.problems.problem import (
    Initializer,
    LossOfBatch,
    LossWithoutInner,
    Map,
    Problem,
    build,
)
from fednest_tff.problems.projections import Projection
from fednest_tff.vector_space import Structure

# The parameters of a loss.
_ALL = ('x', 'y', 'batch')


def bilevel(
    outer_loss: LossOfBatch,
    inner_loss: LossOfBatch,
    init_outer: Initializer,
    init_inner: Initializer,
    element_spec: Structure,
    *,
    split: splits.SplitArgument = 0.5,
    representation: Map | None = None,
    project_outer: Projection | None = None,
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
      examples. A fraction is drawn with a fixed seed, whatever the `seed` of
      the process is, so that seeds are compared on the same validation
      examples; `fednest_tff.splits.by_fraction(0.5, seed=1)` draws others.
    representation: Optional `(x, batch) -> features`. If given, both losses
      take its result in place of the batch. Features keep the leading axis,
      example by example, and carry all that the losses need (labels, too).
    project_outer: The projection on the feasible set of x, a function of x such
      as those of `fednest_tff.projections`; `None` for the whole space. There
      is none for y: the hypergradient formula needs an unconstrained y*(x).

  Returns:
    A `Problem`.

  Raises:
    ValueError: If an argument does not fit; it names the argument.
  """
  return build(
      'bilevel', outer_loss, inner_loss, init_outer, init_inner, element_spec,
      split, representation=representation, project_outer=project_outer,
      is_implicit=True,
      losses=dict(
          outer_loss=(outer_loss, _ALL), inner_loss=(inner_loss, _ALL)
      ),
  )


def minimax(
    loss: LossOfBatch,
    init_outer: Initializer,
    init_inner: Initializer,
    element_spec: Structure,
    *,
    split: splits.SplitArgument = 'same',
    representation: Map | None = None,
    project_outer: Projection | None = None,
    project_inner: Projection | None = None,
) -> Problem:
  """min_x max_y mean_i f_i(x, y): bilevel with g = -f.

  Args:
    loss: f, `(x, y, batch) -> scalar`, strongly concave in y.
    init_outer: `seed -> x`.
    init_inner: `seed -> y`.
    element_spec: Structure of `tf.TensorSpec`s of one example.
    split: As in `bilevel`; both levels see all examples by default.
    representation: As in `bilevel`.
    project_outer: As in `bilevel`.
    project_inner: Likewise, the projection on the feasible set of y.

  Returns:
    A `Problem`.
  """
  return build(
      'minimax', loss, lambda x, y, batch: -loss(x, y, batch), init_outer,
      init_inner, element_spec, split, representation=representation,
      project_outer=project_outer, project_inner=project_inner,
      losses=dict(loss=(loss, _ALL)),
  )


def compositional(
    outer_loss: LossWithoutInner,
    inner_map: Map,
    init_outer: Initializer,
    init_inner: Initializer,
    element_spec: Structure,
    *,
    split: splits.SplitArgument = 'same',
    project_outer: Projection | None = None,
) -> Problem:
  """min_x mean_i f_i(mean_j r_j(x)): bilevel with g_i = 1/2 ||y - r_i(x)||^2.

  Args:
    outer_loss: f, `(y, batch) -> scalar`, a mean over the batch.
    inner_map: r, `(x, batch) -> y`, a mean over the batch, of y's structure.
    init_outer: `seed -> x`.
    init_inner: `seed -> y`.
    element_spec: Structure of `tf.TensorSpec`s of one example.
    split: As in `bilevel`; both levels see all examples by default.
    project_outer: As in `bilevel`.

  Returns:
    A `Problem`.
  """

  def loss(x: Structure, y: Structure, batch: Structure) -> tf.Tensor:
    del x  # f depends on x through y alone.
    return outer_loss(y, batch)

  def inner_loss(x: Structure, y: Structure, batch: Structure) -> tf.Tensor:
    residual = vector_space.subtract(y, inner_map(x, batch))
    return vector_space.squared_norm(residual) / 2

  validation.check_inner_map(inner_map, init_outer, init_inner, element_spec)
  return build(
      'compositional', loss, inner_loss, init_outer, init_inner, element_spec,
      split, project_outer=project_outer, is_implicit=True,
      hessian_is_identity=True,
      losses=dict(outer_loss=(outer_loss, ('y', 'batch'))),
  )


def single_level(
    loss: LossWithoutInner,
    init_outer: Initializer,
    element_spec: Structure,
    *,
    project_outer: Projection | None = None,
) -> Problem:
  """min_x mean_i f_i(x): no inner problem, FedOut alone.

  Args:
    loss: f, `(x, batch) -> scalar`, a mean over the batch.
    init_outer: `seed -> x`.
    element_spec: Structure of `tf.TensorSpec`s of one example.
    project_outer: As in `bilevel`.

  Returns:
    A `Problem`.
  """

  def outer_loss(x: Structure, y: Structure, batch: Structure) -> tf.Tensor:
    del y  # There is none.
    return loss(x, batch)

  return build(
      'single_level', outer_loss, lambda x, y, batch: tf.zeros([]), init_outer,
      lambda seed: (), element_spec, 'same', project_outer=project_outer,
      has_inner=False, losses=dict(loss=(loss, ('x', 'batch'))),
  )


def personal(
    outer_loss: LossOfBatch,
    inner_loss: LossOfBatch,
    init_outer: Initializer,
    init_inner: Initializer,
    element_spec: Structure,
    *,
    split: splits.SplitArgument = 0.5,
    representation: Map | None = None,
    project_outer: Projection | None = None,
) -> Problem:
  """min_x mean_i f_i(x, y_i*(x)), y_i*(x) = argmin_y g_i(x, y).

  Each client solves its own inner problem, on its inner examples alone:
  personal heads over a shared backbone, adaptation to a task in meta-learning,
  hyper-parameters that are good for all clients' own models.

  Args:
    outer_loss: f, as in `bilevel`.
    inner_loss: g, as in `bilevel`.
    init_outer: `seed -> x`.
    init_inner: `seed -> y`, where all clients start their inner steps.
    element_spec: Structure of `tf.TensorSpec`s of one example.
    split: As in `bilevel`.
    representation: As in `bilevel`.
    project_outer: As in `bilevel`.

  Returns:
    A `Problem`, for `build_personal`.
  """
  return build(
      'personal', outer_loss, inner_loss, init_outer, init_inner, element_spec,
      split, representation=representation, project_outer=project_outer,
      is_implicit=True, inner_is_personal=True,
      losses=dict(
          outer_loss=(outer_loss, _ALL), inner_loss=(inner_loss, _ALL)
      ),
  )
