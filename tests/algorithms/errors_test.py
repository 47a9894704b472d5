"""Values that are not finite stop `next` with an error that names them.

Each process has good and bad epochs: schedules make the outer step of epoch 1
and the inner step of epoch 2 far too large. l is in the state.
"""

import re

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from tests.helpers import processes, quadratic

CLIENTS = quadratic.make_clients()
COHORT = quadratic.to_datasets(CLIENTS)
HUGE = 1e200
BAD_OUTER, BAD_INNER = np.int32(1), np.int32(2)


def _jumps(bad_epoch):
  huge, good = tf.constant([HUGE, 0.1], tf.float64).numpy()
  return lambda epoch: tf.where(tf.equal(epoch, bad_epoch), huge, good)


def _copy(state):
  return tf.nest.map_structure(np.copy, state)


class Trial:
  """A process that fails with bad states and works with good ones after."""

  def __init__(self, process):
    self.process = process
    self.start = process.initialize()
    self.expected = process.next(self.start, COHORT).state

  def fails(self, *words, cohort=COHORT, smoothness=None, **changes):
    """Runs `next` with `changes` to the state: the error has all `words`."""
    if smoothness is not None:
      hparams = self.start.hparams | dict(smoothness=np.float64(smoothness))
      changes['hparams'] = hparams
    bad = self.start._replace(**changes)
    before = _copy(bad)
    with pytest.raises(Exception, match='is not finite') as caught:
      self.process.next(bad, cohort)
    # The native runtime has the message somewhere in a long one of its own.
    message = re.search(r'[^:\n]*(: )?[^:]*not finite[^:]*', str(caught.value))
    for word in words:
      assert word in message[0], (word, message[0])
    # Neither the state nor the process is harmed.
    processes.assert_equal(bad, before)
    again = self.process.next(self.start, COHORT).state
    np.testing.assert_array_equal(again.outer, self.expected.outer)
    np.testing.assert_array_equal(again.inner, self.expected.inner)


@pytest.fixture(scope='module')
def problem():
  return quadratic.build_problem()


@pytest.fixture(scope='module')
def fed_inn(problem):
  return Trial(
      fednest_tff.build_fed_inn(
          problem,
          inner=fednest_tff.LocalWork(_jumps(BAD_INNER), steps=3),
      )
  )


@pytest.fixture(scope='module')
def fed_out(problem):
  return Trial(
      fednest_tff.build_fed_out(
          problem,
          outer=fednest_tff.LocalWork(_jumps(BAD_OUTER), steps=3),
          solver=fednest_tff.FederatedInverseHessian('truncated', 2, 3.0),
      )
  )


@pytest.fixture(scope='module')
def lfednest(problem):
  return Trial(
      fednest_tff.build(
          problem, 'lfednest', inner_learning_rate=_jumps(BAD_INNER),
          outer_learning_rate=0.1, inner_local_steps=3, neumann_terms=2,
      )  # fmt: skip
  )


@pytest.fixture(scope='module')
def joint(problem):
  return Trial(
      fednest_tff.build(
          problem, 'fedavg_s', inner_learning_rate=_jumps(BAD_INNER),
          outer_learning_rate=_jumps(BAD_OUTER), neumann_terms=1,
      )  # fmt: skip
  )


def _scaled(name, factor):
  """The cohort with one letter of its data far too large."""
  clients = [client.copy() for client in CLIENTS]
  with np.errstate(over='ignore'):
    for client in clients:
      client[name] = client[name] * factor
  return quadratic.to_datasets(clients)


def test_inner_step_far_too_large(fed_inn):
  fed_inn.fails(
      'FedInn: y+', 'Try a smaller inner_learning_rate', epoch=BAD_INNER
  )


def test_inner_gradient_that_is_not_finite(fed_inn):
  fed_inn.fails(
      'FedInn: q, the mean inner gradient', 'smaller inner_learning_rate',
      inner=np.full(quadratic.DY, 1e308),
  )  # fmt: skip


def test_smoothness_far_too_small(fed_out):
  # Each term is H / l times as long as the last.
  fed_out.fails(
      'FedIHGP: p, the inverse-Hessian-gradient product', 'larger smoothness',
      'build_power_iteration', 'neumann_terms', smoothness=1 / HUGE,
  )  # fmt: skip


def test_hypergradient_that_is_not_finite(fed_out):
  fed_out.fails(
      'FedOut: h, the hypergradient', 'outer_learning_rate',
      'inner_learning_rate', 'larger smoothness', smoothness=1e-120,
      cohort=_scaled('B', HUGE),
  )  # fmt: skip


def test_outer_step_far_too_large(fed_out):
  fed_out.fails(
      'x+, the new outer variable', 'Try a smaller outer_learning_rate',
      epoch=BAD_OUTER,
  )  # fmt: skip


def test_light_inner_step_far_too_large(lfednest):
  lfednest.fails(
      'LFedInn: y+', 'Try a smaller inner_learning_rate', epoch=BAD_INNER
  )


def test_light_outer_step_far_too_large(lfednest):
  # The local series diverges: l is far too small.
  lfednest.fails(
      'x+', 'Try a smaller outer_learning_rate', 'larger smoothness',
      smoothness=1 / HUGE,
  )  # fmt: skip


def test_joint_outer_step_far_too_large(joint):
  joint.fails(
      'x+', 'Try a smaller outer_learning_rate', epoch=BAD_OUTER,
      cohort=_scaled('P', HUGE),
  )  # fmt: skip


def test_joint_inner_step_far_too_large(joint):
  joint.fails(
      'y+', 'Try a smaller inner_learning_rate', epoch=BAD_INNER,
      cohort=_scaled('b', HUGE),
  )  # fmt: skip
