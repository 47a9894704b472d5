"""Errors: arguments that builders refuse, and values that are not finite."""

import re

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from tests import quadratic

CLIENTS = quadratic.make_clients()
COHORT = quadratic.to_datasets(CLIENTS)
HUGE = 1e200
RATES = dict(inner_learning_rate=0.1, outer_learning_rate=0.1)


@pytest.fixture(scope='module')
def problem():
  return quadratic.build_problem()


@pytest.fixture(scope='module')
def single_level():
  return fednest_tff.single_level(
      lambda x, batch: quadratic.outer_loss(x, np.zeros(quadratic.DY), batch),
      quadratic.init_outer,
      quadratic.element_spec(),
  )


@pytest.fixture(scope='module')
def minimax():
  return fednest_tff.minimax(
      lambda x, y, batch: -quadratic.inner_loss(x, y, batch),
      quadratic.init_outer,
      quadratic.init_inner,
      quadratic.element_spec(),
  )


# ---- Arguments --------------------------------------------------------------


def _refuses(name, build, *arguments, **options):
  """One line that names the argument in backticks; returned."""
  with pytest.raises(ValueError) as caught:
    build(*arguments, **options)
  message = str(caught.value)
  assert f'`{name}`' in message
  assert '\n' not in message
  assert message.endswith('.')
  return message


@pytest.mark.parametrize(
    'bad',
    [
        dict(method='fedavg'),
        dict(method=None),
        dict(ihgp='neumann'),
        dict(neumann_terms=0),
        dict(neumann_terms=-1),
        dict(neumann_terms=2.5),
        dict(inner_rounds=0),
        dict(inner_rounds=1.5),
        dict(inner_local_steps=0),
        dict(inner_local_epochs=-1),
        dict(outer_local_steps=1.5),
        dict(outer_local_epochs=0),
        dict(batch_size=0),
        dict(gradient_batch_size=0),
        dict(gradient_batch_size=1.5),
        dict(client_weighting='examples'),
        dict(client_weighting=None),
    ],
    ids=str,
)
def test_bad_argument_is_named_with_its_value(problem, bad):
  ((name, value),) = bad.items()
  message = _refuses(
      name, fednest_tff.build_fed_nest, problem, **(RATES | bad)
  )
  assert repr(value) in message


@pytest.mark.parametrize('level', ['inner', 'outer'])
def test_steps_and_epochs_exclude_each_other(problem, level):
  both = {f'{level}_local_steps': 2, f'{level}_local_epochs': 3}
  for name in both:
    message = _refuses(
        name, fednest_tff.build_fed_nest, problem, **RATES, **both
    )
    assert '2 and 3' in message


@pytest.mark.parametrize(
    'rate', [0, -0.1, float('nan'), float('inf'), 'fast', True]
)
def test_bad_learning_rate_is_named(problem, single_level, rate):
  _refuses(
      'inner_learning_rate', fednest_tff.build_lfed_inn, problem,
      inner_learning_rate=rate,
  )  # fmt: skip
  _refuses(
      'outer_learning_rate', fednest_tff.build_lfed_out, single_level,
      outer_learning_rate=rate,
  )  # fmt: skip


def test_missing_learning_rate_is_named(problem, single_level):
  _refuses(
      'inner_learning_rate', fednest_tff.build_fed_nest, problem,
      outer_learning_rate=0.1,
  )  # fmt: skip
  _refuses(
      'inner_learning_rate', fednest_tff.build_fed_inn, problem,
      inner_learning_rate=None,
  )  # fmt: skip
  for build in (fednest_tff.build_fed_nest, fednest_tff.build_lfed_out):
    _refuses(
        'outer_learning_rate', build, single_level, outer_learning_rate=None
    )


@pytest.mark.parametrize('participation', [0, 1.5])
def test_participation_is_a_share(problem, participation):
  message = _refuses(
      'participation', fednest_tff.build_fed_out, problem, smoothness=1.0,
      outer_learning_rate=0.1, participation=participation,
  )  # fmt: skip
  assert '(0, 1]' in message


def test_smoothness_is_needed_for_the_series(problem):
  message = _refuses(
      'smoothness', fednest_tff.build_fed_out, problem,
      outer_learning_rate=0.1, ihgp='truncated',
  )  # fmt: skip
  assert 'build_power_iteration' in message
  assert 'truncated' in message


def test_smoothness_is_not_needed_by_conjugate_gradient(problem):
  fednest_tff.build_lfed_out(problem, outer_learning_rate=0.1, ihgp='cg')


@pytest.mark.parametrize('smoothness', [0, float('nan'), 'large'])
def test_bad_smoothness_is_named(problem, minimax, smoothness):
  _refuses(
      'smoothness', fednest_tff.build_fed_ihgp, problem, smoothness=smoothness
  )
  _refuses(
      'smoothness', fednest_tff.build_lfed_out, minimax,
      outer_learning_rate=0.1, smoothness=smoothness,
  )  # fmt: skip


@pytest.mark.parametrize('optimizer', ['adam', tf.keras.optimizers.SGD])
@pytest.mark.parametrize('method', ['lfednest', 'fedavg_s'])
def test_optimizer_of_another_library(single_level, optimizer, method):
  message = _refuses(
      'outer_optimizer', fednest_tff.build_fed_nest, single_level, method,
      outer_learning_rate=0.1, outer_optimizer=optimizer,
  )  # fmt: skip
  assert 'tff.learning.optimizers' in message


@pytest.mark.parametrize('seed', [0.5, None, True])
def test_seed_is_an_integer(single_level, seed):
  _refuses(
      'seed', fednest_tff.build_lfed_out, single_level,
      outer_learning_rate=0.1, seed=seed,
  )  # fmt: skip


def test_problem_of_the_wrong_kind(single_level, minimax):
  for other in (single_level, minimax):
    message = _refuses(
        'problem', fednest_tff.build_fed_ihgp, other, smoothness=1.0
    )
    assert other.kind in message
  for build in (fednest_tff.build_fed_inn, fednest_tff.build_lfed_inn):
    message = _refuses(
        'problem', build, single_level, inner_learning_rate=0.1
    )
    assert 'single-level' in message
  _refuses('problem', fednest_tff.build_power_iteration, single_level)


@pytest.mark.parametrize(
    'build, options',
    [
        (fednest_tff.build_fed_nest, RATES),
        (fednest_tff.build_fed_inn, dict(inner_learning_rate=0.1)),
        (fednest_tff.build_lfed_inn, dict(inner_learning_rate=0.1)),
        (fednest_tff.build_fed_out, dict(outer_learning_rate=0.1)),
        (fednest_tff.build_lfed_out, dict(outer_learning_rate=0.1)),
        (fednest_tff.build_fed_ihgp, dict(smoothness=1.0)),
        (fednest_tff.build_power_iteration, {}),
    ],
)
def test_something_that_is_no_problem(build, options):
  _refuses('problem', build, quadratic.outer_loss, **options)


# ---- Values that are not finite ---------------------------------------------
#
# Each process has good and bad epochs: schedules make the outer step of epoch 1
# and the inner step of epoch 2 far too large, and l is part of the state.

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

  def fails(self, *words, cohort=COHORT, **changes):
    """Runs `next` with `changes` to the state: the error has all `words`."""
    bad = self.start._replace(**changes)
    before = _copy(bad)
    with pytest.raises(Exception, match='is not finite') as caught:
      self.process.next(bad, cohort)
    # The native runtime has the message somewhere in a long one of its own.
    message = re.search(r'[^:\n]*(: )?[^:]*not finite[^:]*', str(caught.value))
    for word in words:
      assert word in message[0], (word, message[0])
    # Neither the state nor the process is harmed.
    tf.nest.map_structure(np.testing.assert_array_equal, bad, before)
    again = self.process.next(self.start, COHORT).state
    np.testing.assert_array_equal(again.outer, self.expected.outer)
    np.testing.assert_array_equal(again.inner, self.expected.inner)


@pytest.fixture(scope='module')
def fed_inn(problem):
  return Trial(
      fednest_tff.build_fed_inn(
          problem, inner_learning_rate=_jumps(BAD_INNER), inner_local_steps=3
      )
  )


@pytest.fixture(scope='module')
def fed_out(problem):
  return Trial(
      fednest_tff.build_fed_out(
          problem, outer_learning_rate=_jumps(BAD_OUTER),
          outer_local_steps=3, ihgp='truncated', neumann_terms=2,
          smoothness=3.0,
      )  # fmt: skip
  )


@pytest.fixture(scope='module')
def lfednest(problem):
  return Trial(
      fednest_tff.build_fed_nest(
          problem, 'lfednest', inner_learning_rate=_jumps(BAD_INNER),
          outer_learning_rate=0.1, inner_local_steps=3, neumann_terms=2,
      )  # fmt: skip
  )


@pytest.fixture(scope='module')
def joint(problem):
  return Trial(
      fednest_tff.build_fed_nest(
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


def test_first_term_that_is_not_finite(problem):
  process = fednest_tff.build_fed_ihgp(
      problem, smoothness=1e-200, neumann_terms=1
  )
  state = process.initialize()
  with pytest.raises(Exception, match='FedIHGP: p, .* larger smoothness'):
    process.next(state, _scaled('M', HUGE))
  assert np.all(np.isfinite(process.next(state, COHORT).state.solver.p))


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


def test_power_iteration_that_is_not_finite(problem):
  process = fednest_tff.build_power_iteration(problem)
  state = process.initialize()
  with pytest.raises(Exception, match='H v is not finite. Try another point'):
    process.next(state, _scaled('A', 1e308))
  assert process.next(state, COHORT).state.smoothness > 0
