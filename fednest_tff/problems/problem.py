"""What a nested problem is: two losses, two variables, and a client's examples.

A problem is a pair of losses over two variables, min_x mean_i f_i(x, y*(x))
with y*(x) = argmin_y mean_i g_i(x, y), where client i enters only through its
examples: f_i and g_i are the same functions of different batches. The builders
of `kinds.py` make problems.

Variables are nested structures of float tensors. A loss takes them and a dense
batch, `element_spec` with a leading axis, and returns the mean over the batch.
"""

from collections.abc import Callable, Hashable
import dataclasses
from typing import NewType

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.problems import splits, validation
from fednest_tff.problems.projections import Projection
from fednest_tff.problems.validation import describe
from fednest_tff.vector_space import Structure

# Dense examples: the structure of `element_spec` with a leading axis. It is a
# type of its own, so that a type checker refuses a batch in place of features.
Batch = NewType('Batch', object)
# The representation of a batch at some x; what the losses take.
Features = NewType('Features', object)

Loss = Callable[[Structure, Structure, Features], tf.Tensor]
Representation = Callable[[Structure, Batch], Features]
Initializer = Callable[[int], Structure]
# The functions that users write. They know the structure of their examples, so
# that a batch may have any type there.
LossOfBatch = Callable[[Structure, Structure, Structure], tf.Tensor]
LossWithoutInner = Callable[[Structure, Structure], tf.Tensor]
Map = Callable[[Structure, Structure], Structure]


@dataclasses.dataclass(frozen=True, repr=False)
class Problem:
  """A nested problem; made by the builders of `kinds.py`, not by hand.

  Attributes:
    kind: 'bilevel', 'minimax', 'compositional', 'single_level' or 'personal';
      for messages.
    outer_loss: f_i(x, y; features), where features are those of a batch.
    inner_loss: g_i(x, y; features).
    init_outer: x at the start, from a seed.
    init_inner: y at the start, from a seed.
    element_spec: The structure of `tf.TensorSpec`s of one example.
    split: From a client's examples to its inner and its outer examples.
    representation: From x and a batch to the features that the losses take;
      the batch itself unless the problem declares one. It is all that the
      losses need of the batch, so it is evaluated once while x is fixed.
    project_outer: The projection on the feasible set of x.
    project_inner: The projection on the feasible set of y.
    outer_spec: The `tf.TensorSpec`s of x.
    inner_spec: The `tf.TensorSpec`s of y; empty for a single-level problem.
    has_inner: Whether there is a variable y.
    is_implicit: Whether the hypergradient has an indirect part, and so needs
      FedIHGP.
    hessian_is_identity: Whether the inner Hessian is I, so that H^-1 is known.
    inner_is_personal: Whether each client has its own inner solution y_i*(x);
      y is then where clients start from.
    computations: Computations that were traced for the problem; they are used
      again by the next process that needs them.
  """

  kind: str
  outer_loss: Loss
  inner_loss: Loss
  init_outer: Initializer
  init_inner: Initializer
  element_spec: Structure
  split: splits.Split
  representation: Representation
  project_outer: Projection
  project_inner: Projection
  outer_spec: Structure
  inner_spec: Structure
  has_inner: bool
  is_implicit: bool
  hessian_is_identity: bool
  inner_is_personal: bool = False
  computations: dict[Hashable, object] = dataclasses.field(
      default_factory=dict, init=False, repr=False, compare=False
  )

  def __repr__(self) -> str:
    """Its kind, and the tensors of x, y and an example."""
    parts = {'x': self.outer_spec, 'y': self.inner_spec}
    parts['example'] = self.element_spec
    texts = [
        f'{name}={describe(spec)}' for name, spec in parts.items()
        if name != 'y' or self.has_inner
    ]
    return f'<Problem, {self.kind}: {", ".join(texts)}>'

  @property
  def has_representation(self) -> bool:
    """Whether the losses take anything else than the batch itself."""
    return self.representation is not _identity

  @property
  def scalar_dtype(self) -> tf.DType:
    """The type of step sizes, weights and losses."""
    return vector_space.scalar_dtype((self.outer_spec, self.inner_spec))


def _identity(x: Structure, batch: Batch) -> Features:
  del x  # The batch is its own representation.
  return Features(batch)


def _or_identity(project: Projection | None) -> Projection:
  return vector_space.identity if project is None else project


def build(
    kind: str,
    outer_loss: Loss,
    inner_loss: Loss,
    init_outer: Initializer,
    init_inner: Initializer,
    element_spec: Structure,
    split: splits.SplitArgument,
    *,
    representation: Representation | None = None,
    project_outer: Projection | None = None,
    project_inner: Projection | None = None,
    has_inner: bool = True,
    is_implicit: bool = False,
    hessian_is_identity: bool = False,
    inner_is_personal: bool = False,
    losses: dict[str, tuple[Callable[..., tf.Tensor], tuple[str, ...]]],
) -> Problem:
  """Makes a problem and checks it at its initial point.

  Args:
    kind: As in `Problem`, and so are the other arguments without a description.
    outer_loss: f.
    inner_loss: g.
    init_outer: x at the start.
    init_inner: y at the start.
    element_spec: One example.
    split: Inner and outer examples.
    representation: `None` for the batch itself.
    project_outer: `None` for the whole space.
    project_inner: `None` for the whole space.
    has_inner: Whether there is a variable y.
    is_implicit: Whether the hypergradient has an indirect part.
    hessian_is_identity: Whether the inner Hessian is I.
    inner_is_personal: Whether each client has its own inner solution.
    losses: The functions to check, by the names of the arguments that they
      are, and the names of their parameters: x, y and the batch, or some.

  Returns:
    The problem.
  """
  element_spec = validation.check_element_spec(element_spec)
  problem = Problem(
      kind=kind,
      outer_loss=outer_loss,
      inner_loss=inner_loss,
      init_outer=init_outer,
      init_inner=init_inner,
      element_spec=element_spec,
      split=splits.to_split(split),
      representation=_identity if representation is None else representation,
      project_outer=_or_identity(project_outer),
      project_inner=_or_identity(project_inner),
      outer_spec=validation.check_variable('init_outer', init_outer),
      inner_spec=(
          validation.check_variable('init_inner', init_inner)
          if has_inner else ()
      ),
      has_inner=has_inner,
      is_implicit=is_implicit,
      hessian_is_identity=hessian_is_identity,
      inner_is_personal=inner_is_personal,
  )
  batch = validation.probe_batch(element_spec)
  validation.check_split(problem.split, batch)
  x, y = vector_space.tensors((init_outer(0), init_inner(0)))
  validation.check_projection('outer', problem.project_outer, x)
  validation.check_projection('inner', problem.project_inner, y)
  features: Structure = batch
  if problem.has_representation:
    features = validation.check_representation(
        problem.representation, x, batch
    )
  known = dict(x=x, y=y, batch=features)
  for name, (loss, parameters) in losses.items():
    validation.check_loss(name, loss, **{k: known[k] for k in parameters})
  return problem
