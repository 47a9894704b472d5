"""The server's numbers in SimFBO as hyper-parameters of the state."""

import pytest
import tensorflow as tf

from fednest_tff.algorithms import server_steps
from fednest_tff.algorithms.server_steps import ServerSteps
from fednest_tff.federated import method
from tests.helpers import small_problems

LOCAL = dict(
    outer_learning_rate=0.1, inner_learning_rate=0.2, linear_learning_rate=0.3
)


def make(problem, steps, **changes):
  local_rates = method.learning_rates(allow_zero=True, **(LOCAL | changes))
  return local_rates, server_steps.hparams(problem, steps, local_rates)


def value(name, local_rates, found, epoch=0, **changes):
  """What the method uses in an epoch, with some numbers changed."""
  every = local_rates | found
  numbers = {key: tf.constant(h.initial) for key, h in every.items()}
  numbers |= {key: tf.constant(number) for key, number in changes.items()}
  at = found[name].at
  return numbers[name] if at is None else at(tf.constant(epoch), numbers)


@pytest.mark.parametrize(
    'kind, variables',
    [
        ('bilevel', ['outer', 'inner', 'linear']),
        ('compositional', ['outer', 'inner', 'linear']),
        ('minimax', ['outer', 'inner']),
        ('single_level', ['outer']),
    ],
)
def test_every_variable_has_a_step_size(kind, variables):
  problem = getattr(small_problems, kind)()
  _, found = make(problem, ServerSteps(momentum=0.5))
  expected = {f'server_{variable}_learning_rate' for variable in variables}
  expected |= {'server_momentum'}
  if 'linear' in variables:
    expected |= {'radius'}
  assert found.keys() == expected


def test_the_local_step_stands_for_one_that_is_not_given():
  problem = small_problems.bilevel()
  made = make(problem, ServerSteps(inner_learning_rate=0.7))
  assert value('server_outer_learning_rate', *made) == 0.1
  assert value('server_linear_learning_rate', *made) == 0.3
  assert value('server_inner_learning_rate', *made) == 0.7
  # A number set in the state later counts, be it the server's or the local one.
  name = 'server_outer_learning_rate'
  assert value(name, *made, outer_learning_rate=0.4) == 0.4
  assert value(name, *made, **{name: 0.5}) == 0.5


def test_it_follows_the_local_schedule():
  problem = small_problems.bilevel()
  made = make(
      problem,
      ServerSteps(),
      outer_learning_rate=lambda epoch: 0.5 / (1 + tf.cast(epoch, tf.float32)),
  )
  name = 'server_outer_learning_rate'
  assert value(name, *made, epoch=0) == 0.5
  assert value(name, *made, epoch=4) == tf.constant(0.1)
  # The number in the state is a factor of the schedule.
  tripled = value(name, *made, epoch=4, outer_learning_rate=3.0)
  assert tripled == 3 * tf.constant(0.1)


def test_radius_and_momentum():
  problem = small_problems.bilevel()
  _, found = make(problem, ServerSteps())
  assert found['radius'].initial == float('inf')
  assert 'server_momentum' not in found
  _, found = make(problem, ServerSteps(radius=2, momentum=0))
  assert found['radius'].initial == 2
  assert found['server_momentum'].initial == 0
