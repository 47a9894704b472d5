"""Derivatives of a client's losses f_i and g_i.

The first functions are general: the gradient of a scalar function, and products
of its second derivatives with a vector. Products are taken forward-over-back: a
`tf.autodiff.ForwardAccumulator` along the vector around the `tf.GradientTape`
that takes the gradient. No Hessian or Jacobian is formed; a product costs a
small multiple of a gradient.

The others are the paper's: G_i, F_i, the right-hand side grad_y f_i, products
with the inner Hessian, and the hypergradient h_i. Those that differentiate in y
alone take features (`Problem.representation` at a fixed x); those that
differentiate in x take batches, because features move with x.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import traceback
from typing import ParamSpec, TypeVar

import tensorflow as tf

from fednest_tff import vector_space
from fednest_tff.local import forward
from fednest_tff.problems import Batch, Features, Problem
from fednest_tff.vector_space import Structure


def _gradient(
    function: Callable[[Structure], tf.Tensor], at: Structure
) -> tuple[tf.Tensor, Structure]:
  with tf.GradientTape(watch_accessed_variables=False) as tape:
    tape.watch(tf.nest.flatten(at))
    value = tf.convert_to_tensor(function(at))
  gradient = tape.gradient(
      value, at, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )
  # The gradient of a gather is sparse; here all gradients become dense.
  return value, vector_space.tensors(gradient)


def _copy(a: Structure) -> Structure:
  # A tape must not watch a tensor that the function holds by other means, such
  # as the anchor of an SVRG direction; so it watches a copy.
  return tf.nest.map_structure(tf.identity, a)


def value_and_gradient(
    function: Callable[[Structure], tf.Tensor], at: Structure
) -> tuple[tf.Tensor, Structure]:
  """The scalar `function(at)` and its gradient, zero where unconnected."""
  return _gradient(function, _copy(at))


def gradient(
    function: Callable[[Structure], tf.Tensor], at: Structure
) -> Structure:
  """The gradient of the scalar `function` at `at`."""
  return value_and_gradient(function, at)[1]


def _is_about_control_flow(error: Exception) -> bool:
  """Whether TensorFlow raises this error inside tf.cond, tf.while_loop etc."""
  if isinstance(error, TypeError):
    return "<dtype: 'variant'> is not compatible" in str(error)
  where = traceback.extract_tb(error.__traceback__)[-1].filename
  return 'tensorflow' in where


@contextlib.contextmanager
def _along(
    primals: Structure, tangents: Structure
) -> Iterator[tf.autodiff.ForwardAccumulator]:
  """An accumulator that refuses control flow with an error that names it."""
  try:
    with forward.accumulator(primals, tangents) as accumulator:
      yield accumulator
  except (AssertionError, SystemError, TypeError) as error:
    if not _is_about_control_flow(error):
      raise
    raise ValueError(
        'The inner loss has a tf.cond, tf.while_loop or tf.map_fn, which'
        ' TensorFlow cannot differentiate twice: use tf.where or'
        " tf.vectorized_map, or method='penalty', which takes first derivatives"
        ' only.'
    ) from error


def hessian_vector_product(
    function: Callable[[Structure], tf.Tensor],
    at: Structure,
    vector: Structure,
) -> Structure:
  """The Hessian of the scalar `function` at `at`, times `vector`."""
  at = _copy(at)
  with _along(at, vector) as accumulator:
    _, gradient_at = _gradient(function, at)
  return _tangent(accumulator, gradient_at)


def mixed_product(
    function: Callable[[Structure, Structure], tf.Tensor],
    x: Structure,
    y: Structure,
    vector: Structure,
) -> Structure:
  """d/dx <d/dy function(x, y), vector>, of x's shape.

  This is the paper's grad^2_xy g(x, y) p: the change of the gradient in x when
  y moves along `vector`.
  """
  x, y = _copy(x), _copy(y)
  with _along(y, vector) as accumulator:
    _, gradient_x = _gradient(lambda at: function(at, y), x)
  return _tangent(accumulator, gradient_x)


def _tangent(
    accumulator: tf.autodiff.ForwardAccumulator, a: Structure
) -> Structure:
  tangent = tf.nest.map_structure(
      lambda t: accumulator.jvp(
          t, unconnected_gradients=tf.UnconnectedGradients.ZERO
      ),
      a,
  )
  return vector_space.tensors(tangent)


# From 'gradient' or 'product' and a number of examples to an operation.
Mark = Callable[[str, tf.Tensor], tf.Operation]

_mark: Mark | None = None
_P = ParamSpec('_P')
_Result = TypeVar('_Result')


@contextlib.contextmanager
def marked(mark: Mark) -> Iterator[None]:
  """Within it, every derivative of a loss that is traced runs an operation.

  This is for counting: whenever one of the functions below is evaluated, so is
  the operation that `mark` has made for it.

  Args:
    mark: Makes the operation, from 'gradient' (one pass back over a loss) or
      'product' (a derivative of such a pass along a vector, which also gives
      the gradient) and from how many examples the loss is a mean of.

  Yields:
    Nothing.
  """
  global _mark
  before, _mark = _mark, mark
  try:
    yield
  finally:
    _mark = before


def is_marked() -> bool:
  """Whether `marked` is active."""
  return _mark is not None


def _counted(
    kind: str,
) -> Callable[[Callable[_P, _Result]], Callable[_P, _Result]]:
  """Has calls of a function counted; its last argument has the examples."""

  def decorate(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    @functools.wraps(function)
    def counted(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
      result = function(*args, **kwargs)
      if _mark is None:
        return result
      count = tf.shape(tf.nest.flatten(args[-1])[0])[0]
      with tf.control_dependencies([_mark(kind, count)]):
        return tf.nest.map_structure(tf.identity, result)

    return counted

  return decorate


@_counted('gradient')
def inner_gradient(
    problem: Problem, x: Structure, y: Structure, features: Features
) -> tuple[tf.Tensor, Structure]:
  """g_i(x, y) and G_i = grad_y g_i(x, y)."""
  return value_and_gradient(
      lambda at: problem.inner_loss(x, at, features), y
  )


@_counted('product')
def inner_hessian_product(
    problem: Problem,
    x: Structure,
    y: Structure,
    vector: Structure,
    features: Features,
) -> Structure:
  """grad^2_y g_i(x, y) times `vector`."""
  return hessian_vector_product(
      lambda at: problem.inner_loss(x, at, features), y, vector
  )


@_counted('gradient')
def outer_gradient_in_inner(
    problem: Problem, x: Structure, y: Structure, features: Features
) -> Structure:
  """grad_y f_i(x, y): the right-hand side of H p = grad_y f."""
  return gradient(lambda at: problem.outer_loss(x, at, features), y)


def outer_loss(
    problem: Problem, x: Structure, y: Structure, batch: Batch
) -> tf.Tensor:
  """f_i(x, y)."""
  return problem.outer_loss(x, y, problem.representation(x, batch))


def _inner_loss(
    problem: Problem, x: Structure, y: Structure, batch: Batch
) -> tf.Tensor:
  return problem.inner_loss(x, y, problem.representation(x, batch))


@_counted('gradient')
def direct_gradient(
    problem: Problem, x: Structure, y: Structure, batch: Batch
) -> tuple[tf.Tensor, Structure]:
  """f_i(x, y) and F_i = grad_x f_i(x, y)."""
  return value_and_gradient(lambda at: outer_loss(problem, at, y, batch), x)


@_counted('gradient')
def outer_gradients(
    problem: Problem, x: Structure, y: Structure, batch: Batch
) -> tuple[Structure, Structure]:
  """(grad_x f_i, grad_y f_i) at (x, y), in one pass."""
  return gradient(lambda at: outer_loss(problem, at[0], at[1], batch), (x, y))


@_counted('gradient')
def inner_gradients(
    problem: Problem, x: Structure, y: Structure, batch: Batch
) -> tuple[Structure, Structure]:
  """(grad_x g_i, grad_y g_i) at (x, y), in one pass."""
  return gradient(lambda at: _inner_loss(problem, at[0], at[1], batch), (x, y))


@_counted('product')
def inner_gradient_and_products(
    problem: Problem, x: Structure, y: Structure, v: Structure, batch: Batch
) -> tuple[Structure, Structure, Structure]:
  """(grad_y g_i, grad^2_y g_i v, grad^2_xy g_i v) at (x, y), in one pass.

  Both products are the change of g_i's gradient in (x, y) when y moves along v:
  one gradient in both variables, and one derivative of it along v.
  """
  at = _copy((x, y))
  with _along(at[1], v) as accumulator:
    _, gradients = _gradient(
        lambda at: _inner_loss(problem, at[0], at[1], batch), at
    )
  mixed, hessian = _tangent(accumulator, gradients)
  return gradients[1], hessian, mixed


@_counted('product')
def _inner_mixed_product(
    problem: Problem, x: Structure, y: Structure, p: Structure, batch: Batch
) -> Structure:
  return mixed_product(
      lambda x, y: _inner_loss(problem, x, y, batch), x, y, p
  )


def hypergradient(
    problem: Problem,
    x: Structure,
    y: Structure,
    p: Structure,
    outer_batch: Batch,
    inner_batch: Batch,
) -> tuple[tf.Tensor, Structure]:
  """f_i and h_i = F_i(x) - grad^2_xy g_i(x, y) p (Algorithm 2, line 5).

  Args:
    problem: The problem.
    x: The outer variable.
    y: The inner variable.
    p: The inverse-Hessian-gradient product; not used unless the problem is
      implicit (line 6: h_i = F_i(x)).
    outer_batch: xi_i.
    inner_batch: zeta_i.

  Returns:
    The outer loss and the client's hypergradient.
  """
  value, direct = direct_gradient(problem, x, y, outer_batch)
  if not problem.is_implicit:
    return value, direct
  indirect = _inner_mixed_product(problem, x, y, p, inner_batch)
  return value, vector_space.subtract(direct, indirect)
