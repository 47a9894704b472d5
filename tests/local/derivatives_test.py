"""Derivatives against Hessians that are written out, and closed forms."""

import collections
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff.local import derivatives
from tests.helpers import quadratic
from tests.helpers.one_client import (
    CLIENTS,
    FORM,
    PROBLEM,
    V,
    X,
    Y,
    assert_close,
    local_form,
    minimax_problem,
    numpy_losses,
    read_client,
)

Head = collections.namedtuple('Head', ['kernel', 'bias'])

_INPUT, _HIDDEN, _CLASSES = 3, 4, 3
# More entries in x than in y: a swap of the two cannot go unnoticed.
_X_SHAPES = collections.OrderedDict(w=(_INPUT, _HIDDEN), b=(_HIDDEN,), s=())
_Y_SHAPES = Head((_HIDDEN, _CLASSES), (_CLASSES,))


class Mlp:
  """An MLP with a softmax, at a random point, and its Hessian in full."""

  def __init__(self):
    rng = np.random.default_rng(0)
    self.inputs = tf.constant(rng.normal(size=(7, _INPUT)))
    self.labels = tf.constant(rng.integers(_CLASSES, size=7))
    self.x = collections.OrderedDict(
        (name, tf.constant(rng.normal(size=shape)))
        for name, shape in _X_SHAPES.items()
    )
    self.y, self.v = (
        Head(*(tf.constant(rng.normal(size=shape)) for shape in _Y_SHAPES))
        for _ in range(2)
    )
    self.u = tf.nest.map_structure(
        lambda t: tf.constant(rng.normal(size=t.shape)), self.x
    )

  def loss(self, x, y):
    hidden = tf.tanh(self.inputs @ x['w'] + x['b'])
    logits = tf.exp(x['s']) * hidden @ y.kernel + y.bias
    value = tf.nn.sparse_softmax_cross_entropy_with_logits(self.labels, logits)
    ridge = tf.reduce_sum(y.kernel**2) * tf.reduce_mean(x['b'] ** 2)
    return tf.reduce_mean(value) + 0.05 * ridge

  def in_y(self, y):
    return self.loss(self.x, y)

  def in_x(self, x):
    return self.loss(x, self.y)


def _flat(a):
  return np.concatenate([np.ravel(leaf) for leaf in tf.nest.flatten(a)])


def _unflatten(vector, like):
  leaves = tf.nest.flatten(like)
  parts = tf.split(vector, [leaf.shape.num_elements() for leaf in leaves])
  return tf.nest.pack_sequence_as(
      like,
      [tf.reshape(p, t.shape) for p, t in zip(parts, leaves, strict=True)],
  )


def _hessian(function, at):
  """The whole Hessian, by a Jacobian of a gradient of a flat vector."""
  flat = tf.constant(_flat(at))
  with tf.GradientTape(persistent=True) as outer:
    outer.watch(flat)
    with tf.GradientTape() as inner:
      inner.watch(flat)
      value = function(_unflatten(flat, at))
    gradient = inner.gradient(value, flat)
  jacobian = outer.jacobian(gradient, flat, experimental_use_pfor=False)
  return gradient.numpy(), jacobian.numpy()


@pytest.fixture(scope='module', name='mlp')
def _mlp():
  return Mlp()


@pytest.fixture(scope='module', name='whole')
def _whole(mlp):
  """The gradient and the Hessian in (x, y), and the dimension of x."""
  gradient, hessian = _hessian(
      lambda point: mlp.loss(*point), (mlp.x, mlp.y)
  )
  np.testing.assert_allclose(hessian, hessian.T, atol=1e-12)
  return gradient, hessian, len(_flat(mlp.x))


def _close(actual, expected, like, tolerance=1e-10):
  tf.nest.assert_same_structure(actual, like)
  leaves = zip(tf.nest.flatten(actual), tf.nest.flatten(like), strict=True)
  for a, b in leaves:
    assert isinstance(a, tf.Tensor)  # No `tf.IndexedSlices`.
    assert a.shape == b.shape
    assert a.dtype == b.dtype
  np.testing.assert_allclose(_flat(actual), expected, rtol=0, atol=tolerance)


def test_gradients_match_the_flat_gradient(mlp, whole):
  gradient, _, dim = whole
  _close(derivatives.gradient(mlp.in_x, mlp.x), gradient[:dim], mlp.x)
  value, gradient_y = derivatives.value_and_gradient(mlp.in_y, mlp.y)
  _close(gradient_y, gradient[dim:], mlp.y)
  assert value.numpy() == mlp.loss(mlp.x, mlp.y).numpy()


def test_hessian_vector_product_matches_the_hessian(mlp, whole):
  _, hessian, dim = whole
  product = derivatives.hessian_vector_product(mlp.in_y, mlp.y, mlp.v)
  _close(product, hessian[dim:, dim:] @ _flat(mlp.v), mlp.y)
  product = derivatives.hessian_vector_product(mlp.in_x, mlp.x, mlp.u)
  _close(product, hessian[:dim, :dim] @ _flat(mlp.u), mlp.x)


def test_mixed_product_matches_the_hessian(mlp, whole):
  _, hessian, dim = whole
  product = derivatives.mixed_product(mlp.loss, mlp.x, mlp.y, mlp.v)
  _close(product, hessian[:dim, dim:] @ _flat(mlp.v), mlp.x)


def test_mixed_product_is_the_derivative_of_an_inner_product(mlp):
  """d/dx <d/dy g(x, y), p> for a p that does not depend on x."""
  with tf.GradientTape() as outer:
    outer.watch(tf.nest.flatten(mlp.x))
    with tf.GradientTape() as inner:
      inner.watch(tf.nest.flatten(mlp.y))
      value = mlp.loss(mlp.x, mlp.y)
    gradient = inner.gradient(value, mlp.y)
    product = sum(
        tf.reduce_sum(g * p) for g, p in zip(gradient, mlp.v, strict=True)
    )
  expected = outer.gradient(product, mlp.x)
  actual = derivatives.mixed_product(mlp.loss, mlp.x, mlp.y, mlp.v)
  _close(actual, _flat(expected), mlp.x)


def _central(function, at, along, step):
  def shifted(sign):
    return tf.nest.map_structure(
        lambda t, d: t + sign * step * d, at, along
    )

  return (_flat(function(shifted(1.0))) - _flat(function(shifted(-1.0)))) / (
      2 * step
  )


def test_central_differences(mlp):
  gradient = derivatives.gradient
  slope = _central(lambda y: [mlp.in_y(y)], mlp.y, mlp.v, 1e-5)
  along = np.dot(_flat(gradient(mlp.in_y, mlp.y)), _flat(mlp.v))
  np.testing.assert_allclose(along, slope[0], rtol=1e-8)
  _close(
      derivatives.hessian_vector_product(mlp.in_y, mlp.y, mlp.v),
      _central(lambda y: gradient(mlp.in_y, y), mlp.y, mlp.v, 1e-5),
      mlp.y,
      1e-8,
  )
  _close(
      derivatives.mixed_product(mlp.loss, mlp.x, mlp.y, mlp.v),
      _central(
          lambda y: gradient(lambda x: mlp.loss(x, y), mlp.x),
          mlp.y, mlp.v, 1e-5,
      ),  # fmt: skip
      mlp.x,
      1e-8,
  )


def test_inside_a_tf_function(mlp, whole):
  gradient, hessian, dim = whole

  @tf.function
  def traced(x, y, v):
    return (
        derivatives.gradient(lambda at: mlp.loss(at, y), x),
        derivatives.hessian_vector_product(lambda at: mlp.loss(x, at), y, v),
        derivatives.mixed_product(mlp.loss, x, y, v),
    )

  direct, product, mixed = traced(mlp.x, mlp.y, mlp.v)
  _close(direct, gradient[:dim], mlp.x)
  _close(product, hessian[dim:, dim:] @ _flat(mlp.v), mlp.y)
  _close(mixed, hessian[:dim, dim:] @ _flat(mlp.v), mlp.x)


@pytest.mark.parametrize('traced', [False, True])
def test_inside_a_while_loop(mlp, whole, traced):
  """A power of the Hessian, and a mixed product with the outcome."""
  _, hessian, dim = whole

  def powers(x, y, v):
    def step(n, v, total):
      product = derivatives.hessian_vector_product(
          lambda at: mlp.loss(x, at), y, v
      )
      mixed = derivatives.mixed_product(mlp.loss, x, y, v)
      total = tf.nest.map_structure(tf.add, total, mixed)
      return n + 1, product, total

    zero = tf.nest.map_structure(tf.zeros_like, x)
    return tf.while_loop(
        lambda n, *_: n < 3, step, (tf.constant(0), v, zero)
    )[1:]

  function = tf.function(powers) if traced else powers
  power, total = function(mlp.x, mlp.y, mlp.v)
  block, v = hessian[dim:, dim:], _flat(mlp.v)
  _close(power, block @ (block @ (block @ v)), mlp.y)
  series = v + block @ v + block @ (block @ v)
  _close(total, hessian[:dim, dim:] @ series, mlp.x)


def test_inside_a_plain_graph(mlp, whole):
  """What TFF traces into."""
  _, hessian, dim = whole
  x, y, v = (
      tf.nest.map_structure(lambda t: t.numpy(), a)
      for a in (mlp.x, mlp.y, mlp.v)
  )
  inputs, labels = mlp.inputs.numpy(), mlp.labels.numpy()
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    other = Mlp.__new__(Mlp)
    other.inputs, other.labels = tf.constant(inputs), tf.constant(labels)
    x, y, v = tf.nest.map_structure(tf.constant, (x, y, v))
    product, mixed = session.run((
        derivatives.hessian_vector_product(lambda at: other.loss(x, at), y, v),
        derivatives.mixed_product(other.loss, x, y, v),
    ))
  v = _flat(mlp.v)
  np.testing.assert_allclose(
      _flat(product), hessian[dim:, dim:] @ v, atol=1e-10
  )
  np.testing.assert_allclose(_flat(mixed), hessian[:dim, dim:] @ v, atol=1e-10)


def _embedding_loss(table, weights):
  # Row 2 twice, row 0 never.
  rows = tf.gather(table['rows'], [2, 1, 2, 4])
  return tf.reduce_mean(tf.tanh(rows @ weights) ** 2) + tf.reduce_sum(
      rows[0] ** 3
  )


@pytest.mark.parametrize('traced', [False, True])
def test_sparse_gradients_of_a_gather(traced):
  rng = np.random.default_rng(1)
  table, along = (
      {'rows': tf.constant(rng.normal(size=(5, 3)))} for _ in range(2)
  )
  weights, p = (tf.constant(rng.normal(size=(3, 2))) for _ in range(2))

  def products(table, weights):
    def in_table(at):
      return _embedding_loss(at, weights)

    return (
        derivatives.gradient(in_table, table),
        derivatives.hessian_vector_product(in_table, table, along),
        derivatives.mixed_product(_embedding_loss, table, weights, p),
        derivatives.mixed_product(
            lambda x, y: _embedding_loss(y, x), weights, table, along
        ),
    )

  function = tf.function(products) if traced else products
  gradient, product, mixed, transposed = function(table, weights)
  expected_gradient, hessian = _hessian(
      lambda point: _embedding_loss(*point), (table, weights)
  )
  _close(gradient, expected_gradient[:15], table)
  assert not np.any(gradient['rows'].numpy()[[0, 3]])
  _close(product, hessian[:15, :15] @ _flat(along), table)
  _close(mixed, hessian[:15, 15:] @ _flat(p), table)
  _close(transposed, hessian[15:, :15] @ _flat(along), weights)


@pytest.mark.parametrize('traced', [False, True])
def test_what_a_function_does_not_depend_on_has_zero_derivatives(traced):
  x = {'used': tf.ones([2, 3], tf.float64), 'unused': tf.ones([4])}
  y = (tf.ones([5], tf.float64), tf.ones([]))

  def products():
    return (
        derivatives.gradient(lambda at: tf.constant(1.0), x),
        derivatives.gradient(lambda at: 1.0, x),
        derivatives.gradient(lambda at: tf.reduce_sum(at['used'] ** 2), x),
        # Linear: a gradient that does not depend on the point.
        derivatives.hessian_vector_product(
            lambda at: tf.reduce_sum(3 * at['used']), x, x
        ),
        derivatives.hessian_vector_product(
            lambda at: tf.reduce_sum(at['used'] ** 2), x, x
        ),
        # Separable, and independent of either variable.
        derivatives.mixed_product(
            lambda x, y: tf.reduce_sum(x['used'] ** 2) * 2
            + tf.reduce_sum(y[0] ** 2),
            x, y, y,
        ),  # fmt: skip
        derivatives.mixed_product(
            lambda x, y: tf.reduce_sum(y[0] ** 2), x, y, y
        ),
        derivatives.mixed_product(
            lambda x, y: tf.reduce_sum(x['used'] ** 2), x, y, y
        ),
    )

  results = (tf.function(products) if traced else products)()
  zero = np.zeros(10)
  # The leaves are in the order of their names: 'unused' has the first four.
  twice = np.concatenate([np.zeros(4), np.full(6, 2.0)])
  for result, expected in zip(
      results, (zero, zero, twice, zero, twice, zero, zero, zero), strict=True
  ):
    _close(result, expected, x)


@pytest.mark.parametrize('traced', [False, True])
def test_derivatives_are_with_respect_to_the_argument_only(traced):
  """The function may hold the very tensor at which it is differentiated."""
  a = tf.constant([1.0, 2.0, 3.0], tf.float64)
  u = tf.constant([1.0, -1.0, 0.5], tf.float64)

  def products():
    return (
        derivatives.gradient(lambda v: tf.reduce_sum(v * a), a),
        derivatives.value_and_gradient(
            lambda v: tf.reduce_sum((v['k'] - a) ** 2 + v['k']), {'k': a}
        )[1]['k'],
        derivatives.hessian_vector_product(
            lambda v: tf.reduce_sum(a * v**2), a, u
        ),
        # The same tensor as x and as y.
        derivatives.mixed_product(
            lambda x, y: tf.reduce_sum(x**2 * y), a, a, u
        ),
        derivatives.mixed_product(
            lambda x, y: tf.reduce_sum(a * x * y**3), a, a, u
        ),
        # Also a vector that is the point itself.
        derivatives.hessian_vector_product(
            lambda v: tf.reduce_sum(a * v**3), a, a
        ),
    )

  results = (tf.function(products) if traced else products)()
  expected = (
      a, tf.ones([3]), 2 * a * u, 2 * a * u, 3 * a**3 * u, 6 * a**3
  )  # fmt: skip
  for actual, value in zip(results, expected, strict=True):
    np.testing.assert_allclose(actual, value, rtol=1e-14)


def test_variables_in_the_closure_are_constants():
  variable = tf.Variable([1.0, 2.0])
  gradient = derivatives.gradient(
      lambda v: tf.reduce_sum(v * variable), tf.ones([2])
  )
  np.testing.assert_allclose(gradient, [1.0, 2.0])


_LARGE = 20_000


def _chain(v):
  """A loss whose Hessian has no zero row, of 3.2 GB in this dimension."""
  return tf.reduce_sum(tf.sin(v * tf.roll(v, 1, 0))) + tf.reduce_sum(v) ** 2 / 2


def _coupled(x, y):
  return tf.reduce_sum(x**2) * tf.reduce_sum(tf.sin(y)) + tf.reduce_sum(x * y)


def test_large_products_evaluate_the_loss_once_and_are_right():
  rng = np.random.default_rng(2)
  at, v, y = (tf.constant(rng.normal(size=_LARGE)) for _ in range(3))
  chain, coupled = mock.Mock(wraps=_chain), mock.Mock(wraps=_coupled)
  product = derivatives.hessian_vector_product(chain, at, v)
  mixed = derivatives.mixed_product(coupled, at, y, v)
  assert chain.call_count == coupled.call_count == 1

  a, b, step = at.numpy(), v.numpy(), 1e-6
  gradient = derivatives.gradient
  difference = gradient(_chain, a + step * b) - gradient(_chain, a - step * b)
  np.testing.assert_allclose(product, difference / (2 * step), atol=1e-4)
  expected = 2 * a * np.dot(np.cos(y.numpy()), b) + b
  np.testing.assert_allclose(mixed, expected, rtol=1e-9, atol=1e-9)


def test_nothing_larger_than_a_gradient_is_formed():
  spec = tf.TensorSpec([_LARGE], tf.float64)

  @tf.function(input_signature=[spec] * 3)
  def products(x, y, v):
    return (
        derivatives.hessian_vector_product(_chain, x, v),
        derivatives.mixed_product(_coupled, x, y, v),
    )

  graph = products.get_concrete_function().graph
  sizes = [
      tensor.shape.num_elements()
      for operation in graph.get_operations()
      for tensor in operation.outputs
      if tensor.dtype == tf.float64
  ]
  assert None not in sizes
  assert max(sizes) == _LARGE
  # A small multiple of a gradient, not a loop over coordinates.
  assert len(sizes) < 500
  assert not any('While' in op.type for op in graph.get_operations())


# Derivatives of a client's losses, against closed forms.


@pytest.mark.parametrize('index', range(3))
def test_levels_have_the_gradients_of_the_closed_form(index):
  client, form = read_client(index), local_form(index)
  outer, inner = numpy_losses(CLIENTS[index], X, Y)
  value, gradient = derivatives.inner_gradient(PROBLEM, X, Y, client.inner)
  assert_close(value, inner)
  assert_close(gradient, form.inner_gradient(X, Y))
  product = derivatives.inner_hessian_product(PROBLEM, X, Y, V, client.inner)
  assert_close(product, form.A @ V)
  value, gradient = derivatives.direct_gradient(PROBLEM, X, Y, client.outer)
  assert_close(value, outer)
  assert_close(derivatives.outer_loss(PROBLEM, X, Y, client.outer), outer)
  assert_close(gradient, form.direct_gradient(X, Y))
  assert_close(
      derivatives.outer_gradient_in_inner(PROBLEM, X, Y, client.outer),
      form.gradient_in_inner(X, Y),
  )


def test_hypergradients_with_the_exact_product_average_to_the_closed_form():
  p = np.linalg.solve(FORM.A, FORM.gradient_in_inner(X, Y))
  results = []
  for index in range(3):
    client = read_client(index)
    results.append(
        derivatives.hypergradient(
            PROBLEM, X, Y, tf.constant(p), client.outer, client.inner
        )
    )
  assert_close(FORM.mean([h for _, h in results]), FORM.hypergradient(X, Y))
  losses = [numpy_losses(client, X, Y)[0] for client in CLIENTS]
  assert_close(FORM.mean([value for value, _ in results]), np.mean(losses))


def test_the_hypergradient_is_the_derivative_of_the_nested_loss():
  """At y*(x), by central differences of f(x, y*(x)) in NumPy."""
  def nested(x):
    y = FORM.inner_solution(x)
    return np.mean([numpy_losses(client, x, y)[0] for client in CLIENTS])

  step = 1e-5
  expected = [
      (nested(X + step * unit) - nested(X - step * unit)) / (2 * step)
      for unit in np.eye(quadratic.DX)
  ]
  y = FORM.inner_solution(X)
  p = tf.constant(np.linalg.solve(FORM.A, FORM.gradient_in_inner(X, y)))
  clients = map(read_client, range(3))
  actual = np.mean(
      [
          derivatives.hypergradient(PROBLEM, X, y, p, c.outer, c.inner)[1]
          for c in clients
      ],
      axis=0,
  )
  assert_close(actual, expected, 1e-8)


def test_hypergradient_takes_each_part_from_its_own_batch():
  """f from the outer examples, the mixed product from the inner ones."""
  p = np.linalg.solve(FORM.A, FORM.gradient_in_inner(X, Y))
  outer_batch, inner_batch = read_client(1).outer, read_client(2).inner
  value, h = derivatives.hypergradient(
      PROBLEM, X, Y, tf.constant(p), outer_batch, inner_batch
  )
  expected = local_form(1).direct_gradient(X, Y) - local_form(2).mixed_product(
      p
  )
  assert_close(h, expected)
  assert_close(value, numpy_losses(CLIENTS[1], X, Y)[0])


def test_hypergradient_of_minimax_is_the_direct_one():
  client = read_client()
  _, h = derivatives.hypergradient(
      minimax_problem(), X, Y, None, client.outer, client.inner
  )
  assert_close(h, local_form().direct_gradient(X, Y))
