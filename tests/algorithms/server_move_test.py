"""The server's step on all variables, by hand."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.algorithms import server_move
from fednest_tff.algorithms.server_move import ServerMove, ServerOptimizers
from fednest_tff.local.simultaneous import Point
from fednest_tff.problems import projections
from tests.helpers import small_problems

MOMENTUM = tff.learning.optimizers.build_sgdm(0.1, momentum=0.5)
START = Point(
    tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0]), tf.constant([5.0, 6.0])
)
DIRECTION = Point(
    tf.constant([1.0, -1.0]), tf.constant([2.0, -2.0]), tf.constant([4.0, -4.0])
)
RATES = Point(tf.constant(0.5), tf.constant(0.25), tf.constant(0.125))


def test_plain_steps_have_a_rate_each():
  move = ServerMove(small_problems.bilevel(), ServerOptimizers())
  states, after = move(move.initial_state(), START, DIRECTION, RATES)
  assert states == Point((), (), ())
  np.testing.assert_array_equal(after.outer, [0.5, 2.5])
  np.testing.assert_array_equal(after.inner, [2.5, 4.5])
  np.testing.assert_array_equal(after.linear, [4.5, 6.5])


def test_an_optimizer_has_its_own_rate_and_state():
  """The first step is 0.1 d, the second 0.1 (0.5 d + d)."""
  move = ServerMove(
      small_problems.bilevel(), ServerOptimizers(inner_optimizer=MOMENTUM)
  )
  states, after = move(move.initial_state(), START, DIRECTION, RATES)
  np.testing.assert_allclose(after.inner, [2.8, 4.2], rtol=1e-6)
  np.testing.assert_array_equal(after.outer, [0.5, 2.5])
  states, after = move(states, after, DIRECTION, RATES)
  np.testing.assert_allclose(after.inner, [2.5, 4.5], rtol=1e-6)
  hparams = move.get_hparams(states)
  assert list(hparams) == ['inner_optimizer']
  hparams['inner_optimizer']['learning_rate'] = 0.0
  _, still = move(move.set_hparams(states, hparams), after, DIRECTION, RATES)
  np.testing.assert_array_equal(still.inner, after.inner)


def test_projections_follow_the_step():
  problem = small_problems.minimax(
      project_outer=projections.box(0.0, 2.25),
      project_inner=projections.box(0.0, 4.0),
  )
  move = ServerMove(problem, ServerOptimizers())
  start, direction, rates = (
      point._replace(linear=()) for point in (START, DIRECTION, RATES)
  )
  _, after = move(move.initial_state(), start, direction, rates)
  np.testing.assert_array_equal(after.outer, [0.5, 2.25])
  np.testing.assert_array_equal(after.inner, [2.5, 4.0])


def test_norms_of_the_updates():
  after = START._replace(outer=START.outer + [3.0, 4.0], linear=())
  norms = server_move.update_norms(START._replace(linear=()), after)
  assert list(norms) == ['outer_update_norm', 'inner_update_norm']
  assert norms['outer_update_norm'] == 5 and norms['inner_update_norm'] == 0


def test_something_else_is_no_optimizer():
  with pytest.raises(ValueError, match='`linear_optimizer` must be one of'):
    ServerMove(small_problems.bilevel(), ServerOptimizers(linear_optimizer=3))
