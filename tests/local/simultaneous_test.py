"""Directions of x, y and v against their parts, and steps along them."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import convert_to_constants

from fednest_tff.local import client as client_lib
from fednest_tff.local import derivatives, descent, simultaneous
from fednest_tff.local.simultaneous import BatchPair, Point
from tests.helpers import mlp, one_client, quadratic
from tests.helpers.one_client import V, X, Y, assert_close, double, seed_pair


def mlp_client(declared):
  problem = mlp.build_problem('bilevel', declared)
  client = client_lib.from_dataset(
      problem, one_client.uniform, mlp.make_dataset()
  )
  point = Point(mlp.body(1), mlp.head(2), mlp.head(3))
  return problem, point, BatchPair(client.outer, client.inner)


def parts(problem, point, batch):
  """G_i from one derivative at a time."""
  x, y, v = point
  inner = problem.representation(x, batch.inner)
  outer = problem.representation(x, batch.outer)
  hessian_v = derivatives.inner_hessian_product(problem, x, y, v, inner)
  right = derivatives.outer_gradient_in_inner(problem, x, y, outer)
  return Point(
      derivatives.hypergradient(
          problem, x, y, v, batch.outer, batch.inner
      )[1],
      derivatives.inner_gradient(problem, x, y, inner)[1],
      tf.nest.map_structure(tf.subtract, hessian_v, right),
  )


@pytest.mark.parametrize('declared', [True, False])
def test_nested_direction_of_a_network(declared):
  problem, point, batch = mlp_client(declared)
  found = simultaneous.nested_direction(problem, point, batch)
  expected = parts(problem, point, batch)
  tf.nest.map_structure(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14),
      found,
      expected,
  )


def _count_ops(function, point):
  """How many ops of each type there are, functions inlined."""
  concrete = tf.function(function).get_concrete_function(*point)
  # Derivatives along a vector are functions that the graph calls.
  inlined = convert_to_constants.convert_variables_to_constants_v2(
      concrete, lower_control_flow=False
  )
  graph = inlined.graph.as_graph_def()
  return collections.Counter(node.op for node in graph.node)


def test_one_pass_over_each_loss_gives_all_parts():
  """Each evaluation of a loss has one softmax; apart, there are five."""
  problem, point, batch = mlp_client(declared=True)
  together = _count_ops(
      lambda *point: simultaneous.nested_direction(
          problem, Point(*point), batch
      ),
      point,
  )
  apart = _count_ops(
      lambda *point: parts(problem, Point(*point), batch), point
  )
  softmax = 'SparseSoftmaxCrossEntropyWithLogits'
  assert (together[softmax], apart[softmax]) == (2, 5)
  assert together['MatMul'] < apart['MatMul']


def quadratic_batch():
  client = one_client.read_client()
  return BatchPair(client.outer, client.inner), one_client.local_form()


def test_nested_direction_of_a_quadratic():
  batch, form = quadratic_batch()
  found = simultaneous.nested_direction(
      one_client.PROBLEM, Point(X, Y, V), batch
  )
  assert_close(
      found.outer, form.direct_gradient(X, Y) - form.mixed_product(V)
  )
  assert_close(found.inner, form.inner_gradient(X, Y))
  assert_close(found.linear, form.A @ V - form.gradient_in_inner(X, Y))


def test_nested_direction_of_minimax():
  """Descent in x, ascent in y, no v."""
  batch, form = quadratic_batch()
  found = simultaneous.nested_direction(
      one_client.minimax_problem(), Point(X, Y, ()), batch
  )
  assert_close(found.outer, form.direct_gradient(X, Y))
  assert_close(found.inner, -form.gradient_in_inner(X, Y))
  assert found.linear == ()


def test_penalty_direction():
  batch, form = quadratic_batch()
  lam = 3.0
  found = simultaneous.penalty_direction(
      one_client.PROBLEM, double(lam), Point(X, Y, V), batch
  )
  assert_close(
      found.outer, form.direct_gradient(X, Y) - lam * form.B.T @ (Y - V)
  )
  assert_close(
      found.inner,
      form.gradient_in_inner(X, Y) / lam + form.inner_gradient(X, Y),
  )
  assert_close(found.linear, form.inner_gradient(X, V))


def test_steps_have_their_own_minibatches_of_both_kinds():
  client = one_client.read_client()
  work = simultaneous.SimultaneousWork(local_epochs=2, batch_size=1)
  steps = simultaneous.LocalSteps(
      one_client.PROBLEM, work.per_client(), client, seed_pair()
  )
  count = int(client.num_examples)
  assert steps.tau == 2 * count
  pairs = [steps[tf.constant(k)] for k in range(2 * count)]
  for kind in ('outer', 'inner'):
    shown = np.concatenate([getattr(p, kind)['b'] for p in pairs[:count]])
    # Each example once per pass.
    np.testing.assert_array_equal(
        np.sort(shown, 0), np.sort(client.inner['b'].numpy(), 0)
    )
  assert any(
      np.any(p.outer['b'].numpy() != p.inner['b'].numpy()) for p in pairs
  )


def test_accumulate_without_steps():
  """A client with tau_i = 0 has nothing to add, and no weight."""
  client = one_client.read_client()
  work = descent.LocalWork(steps=lambda examples: tf.constant(0))
  total, weight = simultaneous.accumulate(
      one_client.PROBLEM,
      lambda at, batch: simultaneous.nested_direction(
          one_client.PROBLEM, at, batch
      ),
      Point(X, Y, V),
      simultaneous.LocalSteps(one_client.PROBLEM, work, client, seed_pair()),
      Point(double(0.1), double(0.1), double(0.1)),
      lambda k, tau: 1.0,
  )
  assert weight == 0
  assert all(np.all(part.numpy() == 0) for part in total)
  assert total.outer.shape == (quadratic.DX,)


class Boxed:
  """What the steps read of a problem whose x is in a box."""

  scalar_dtype = tf.float64
  has_inner = True
  project_outer = staticmethod(lambda x: tf.clip_by_value(x, -0.5, 0.5))
  project_inner = staticmethod(lambda y: y)

  def __init__(self):
    self.seen = []
    self.start = Point(double([0.0]), double([1.0]), ())
    self.rates = Point(double(0.4), double(1.0), ())
    self.steps = simultaneous.LocalSteps(
        self, descent.LocalWork(steps=3), one_client.read_client(), seed_pair()
    )

  def direction(self, at, batch):
    """Downwards along x, so that the third step would leave the box."""
    del batch
    self.seen.append(float(at.outer[0]))
    return Point(tf.ones_like(at.outer), tf.zeros_like(at.inner), at.linear)


def test_projections_follow_every_step():
  problem = Boxed()
  total, weight = simultaneous.accumulate(
      problem, problem.direction, problem.start, problem.steps, problem.rates,
      lambda k, tau: 1.0,
  )
  np.testing.assert_allclose(problem.seen, [0, -0.4, -0.5])
  np.testing.assert_allclose(total.outer, [3.0])
  assert weight == 3


def test_projections_follow_every_corrected_step():
  problem = Boxed()
  end = simultaneous.corrected_steps(
      problem, problem.direction, problem.start,
      problem.direction(problem.start, None), problem.steps, problem.rates,
  )
  np.testing.assert_allclose(end.outer, [-0.5])
  np.testing.assert_allclose(sorted(set(problem.seen)), [-0.5, -0.4, 0])


def test_projections_follow_every_step_along_a_momentum():
  problem = Boxed()
  end, momentum = simultaneous.momentum_steps(
      problem, problem.direction, problem.start,
      problem.direction(problem.start, None), problem.steps, problem.rates,
      double(0.5),
  )
  np.testing.assert_allclose(end.outer, [-0.5])
  np.testing.assert_allclose(momentum.outer, [1.0])
  np.testing.assert_allclose(sorted(set(problem.seen)), [-0.5, -0.4, 0])
