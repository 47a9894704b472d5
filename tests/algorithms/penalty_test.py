"""The penalty method: NumPy, its biased solution, and no second derivative."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from tests.algorithms import sim_fbo_test as sim
from tests.helpers import later_methods, processes, quadratic, small_problems


def test_three_epochs_equal_numpy():
  """Minibatches, unequal tau_i, weights, a growing lambda."""
  process = fednest_tff.build(
      quadratic.build_problem(), 'penalty', **sim.RATES,
      local_steps=sim.unequal, batch_size=2, client_weighting='num_examples',
      penalty=lambda epoch: 2.0 + tf.cast(epoch, tf.float64),
  )
  state, _ = processes.run(process, sim.DATASETS, 3)
  clients = later_methods.Clients(
      quadratic.build_problem(),
      sim.DATASETS,
      fednest_tff.SimultaneousWork(local_steps=sim.unequal, batch_size=2),
      lambda examples: tf.shape(examples['A'])[0],
  )
  z = *sim.START, sim.START[1]  # w starts where y does.
  for epoch in range(3):
    at_epoch = functools.partial(
        later_methods.penalty_direction, lam=2.0 + epoch
    )
    one = _AtEpoch(clients, epoch)
    z = later_methods.sim_fbo(
        one, z, sim.ETA, sim.ETA, 1, direction=at_epoch
    )
  sim.assert_close(state, z)


class _AtEpoch:
  """Clients whose first epoch is another."""

  def __init__(self, clients, epoch):
    self.mean = clients.mean
    self.steps = lambda _: clients.steps(epoch)


def penalised_solution(lam):
  """(x, y, w) where all three directions of the mean problem are 0."""
  form = quadratic.ClosedForm(sim.CLIENTS)

  def directions(z):
    x, y, w = np.split(z, [quadratic.DX, quadratic.DX + quadratic.DY])
    return np.concatenate(
        later_methods.penalty_direction((form, form), (x, y, w), lam)
    )

  offset = directions(np.zeros(11))
  matrix = np.stack([directions(e) - offset for e in np.eye(11)], axis=1)
  return np.linalg.solve(matrix, -offset)


def closed_form_x(lam):
  """Closed form 7, with the coupling Q and the matrix P of this problem.

  y solves (M + lam A) y = Mc - Q'x + lam (B x + b), w = A^-1 (B x + b), and
  x solves P x - Pe + Q y - lam B'(y - w) = 0.
  """
  f = quadratic.ClosedForm(sim.CLIENTS)
  inverse = np.linalg.inv(f.M + lam * f.A)

  def total(x):
    y = inverse @ (f.Mc - f.Q.T @ x + lam * (f.B @ x + f.b))
    w = f.inner_solution(x)
    return f.P @ x - f.Pe + f.Q @ y - lam * f.B.T @ (y - w)

  offset = total(np.zeros(quadratic.DX))
  matrix = np.stack(
      [total(e) - offset for e in np.eye(quadratic.DX)], axis=1
  )
  return np.linalg.solve(matrix, -offset)


def test_doubling_lambda_halves_the_error():
  """Closed form 7."""
  x, _ = quadratic.ClosedForm(sim.CLIENTS).solution()
  errors = [closed_form_x(lam) - x for lam in (200.0, 400.0)]
  np.testing.assert_allclose(errors[0], 2 * errors[1], rtol=0.05)


def test_fixed_point_is_the_penalised_solution():
  process = fednest_tff.build(
      quadratic.build_problem(), 'penalty', **sim.RATES, penalty=5.0
  )
  z = penalised_solution(5.0)
  np.testing.assert_allclose(z[:quadratic.DX], closed_form_x(5.0), rtol=1e-10)
  x, y, w = np.split(z, [quadratic.DX, quadratic.DX + quadratic.DY])
  state = process.initialize()
  state = state._replace(
      outer=x, inner=y, method=state.method._replace(linear=w)
  )
  after = process.next(state, sim.DATASETS).state
  np.testing.assert_allclose(after.outer, x, atol=1e-12)
  np.testing.assert_allclose(after.inner, y, atol=1e-12)
  np.testing.assert_allclose(after.method.linear, w, atol=1e-12)
  # Another lambda has another solution; it is a number in the state.
  state = sim.with_numbers(process, state, penalty=6.0)
  moved = process.next(state, sim.DATASETS).state
  assert np.linalg.norm(moved.outer - x) > 1e-4


@tf.custom_gradient
def marked_square(y):
  """y^2, whose derivatives leave their names in the graph."""

  @tf.custom_gradient
  def double(y):
    return tf.multiply(2.0, y, 'first_derivative'), lambda upstream: (
        tf.multiply(2.0, upstream, 'second_derivative')
    )

  return y**2, lambda upstream: upstream * double(y)


def _names_in_graph(computation):
  """The names of all nodes of a TensorFlow computation, functions included."""
  proto = tff.framework.serialize_computation(computation)
  graph = tf.compat.v1.GraphDef()
  assert proto.tensorflow.graph_def.Unpack(graph)
  nodes = list(graph.node)
  for function in graph.library.function:
    nodes += function.node_def
  return ' '.join(node.name for node in nodes)


@pytest.mark.parametrize('method', ['penalty', 'simfbo'])
def test_no_second_derivative_is_traced(method):
  def inner_loss(x, y, batch):
    return tf.reduce_mean(
        tf.linalg.matvec(batch['a'], marked_square(y) - 2 * x * y)
    )

  problem = small_problems.bilevel(inner_loss=inner_loss)
  process = fednest_tff.build(problem, method, **sim.RATES)
  names = _names_in_graph(process.method.rounds[0].client_work)
  assert 'first_derivative' in names
  assert ('second_derivative' in names) == (method == 'simfbo')


@pytest.mark.parametrize('kind', ['minimax', 'single_level'])
def test_problems_without_an_inverse_hessian_are_refused(kind):
  problem = getattr(small_problems, kind)()
  with pytest.raises(ValueError, match=f'`problem` is {kind}: the penalty'):
    fednest_tff.build(problem, 'penalty', **sim.RATES)


@pytest.mark.parametrize('bad', [0.0, -1.0, True, 'ten'])
def test_wrong_penalties_are_named(bad):
  with pytest.raises(ValueError, match='`penalty` must be'):
    fednest_tff.build(
        quadratic.build_problem(), 'penalty', **sim.RATES, penalty=bad
    )
