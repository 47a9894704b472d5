"""Arguments that builders refuse: the message names them."""

import pytest
import tensorflow as tf

import fednest_tff
from tests.helpers import processes, quadratic, small_problems

RATES = dict(inner_learning_rate=0.1, outer_learning_rate=0.1)


@pytest.fixture(scope='module')
def problem():
  return small_problems.bilevel()


@pytest.fixture(scope='module')
def single_level():
  return small_problems.single_level()


@pytest.fixture(scope='module')
def minimax():
  return small_problems.minimax()


def _refuses(name, builder, problem, **options):
  """One line that names the option in backticks; returned."""
  with pytest.raises(ValueError) as caught:
    if builder is fednest_tff.build:
      builder(problem, **options)
    else:
      processes.build_flat(builder, problem, **options)
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
        dict(neumann_terms=True),
        dict(inner_rounds=0),
        dict(inner_rounds=1.5),
        dict(inner_local_steps=0),
        dict(inner_local_steps=True),
        dict(inner_local_epochs=-1),
        dict(outer_local_steps=1.5),
        dict(outer_local_epochs=0),
        dict(outer_local_epochs=True),
        dict(batch_size=0),
        dict(batch_size=True),
        dict(gradient_batch_size=0),
        dict(gradient_batch_size=1.5),
        dict(gradient_batch_size=True),
        dict(client_weighting='examples'),
        dict(client_weighting=None),
    ],
    ids=str,
)
def test_bad_argument_is_named_with_its_value(problem, bad):
  ((name, value),) = bad.items()
  message = _refuses(name, fednest_tff.build, problem, **(RATES | bad))
  assert repr(value) in message


@pytest.mark.parametrize('method', ['lfednest', 'lfednest_nonalt'])
def test_number_of_inner_rounds_is_no_boolean(problem, method):
  message = _refuses(
      'inner_rounds', fednest_tff.build, problem, method=method,
      inner_rounds=True, **RATES,
  )  # fmt: skip
  assert 'positive integer; got True' in message


@pytest.mark.parametrize(
    'method, name, value',
    [
        # Light methods have no global gradients and no sub-cohorts.
        ('lfednest', 'gradient_batch_size', 1),
        ('lfednest', 'participation', 0.5),
        ('lfednest_svrg', 'participation', 0.5),
        # One-round methods send both variables through one aggregator.
        ('lfednest_nonalt', 'inner_aggregator', None),
        ('fedavg_s', 'gradient_aggregator', None),
        ('fedavg_s', 'inner_rounds', 2),
        # Misspelt, or a builder's group.
        ('fednest', 'learning_rate', 0.1),
        ('fednest', 'inner', fednest_tff.LocalWork(0.1)),
    ],
)
def test_option_that_a_method_lacks(problem, method, name, value):
  options = RATES | {name: value}
  message = _refuses(
      name, fednest_tff.build, problem, method=method, **options
  )
  assert f'`{name}` is no option of {method}, which has: ' in message
  # What it has is listed.
  assert 'inner_learning_rate' in message


@pytest.mark.parametrize('level', ['inner', 'outer'])
def test_steps_and_epochs_exclude_each_other(problem, level):
  both = {f'{level}_local_steps': 2, f'{level}_local_epochs': 3}
  for name in both:
    message = _refuses(name, fednest_tff.build, problem, **RATES, **both)
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
      'inner_learning_rate', fednest_tff.build, problem,
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
      'outer_optimizer', fednest_tff.build, single_level, method=method,
      outer_learning_rate=0.1, outer_optimizer=optimizer,
  )  # fmt: skip
  assert 'tff.learning.optimizers' in message


@pytest.mark.parametrize('seed', [0.5, None, True])
def test_seed_is_an_integer(single_level, seed):
  _refuses(
      'seed', fednest_tff.build_lfed_out, single_level,
      outer_learning_rate=0.1, seed=seed,
  )  # fmt: skip


def test_group_is_checked_like_its_flat_options(problem):
  rate = fednest_tff.LocalWork(learning_rate=0.1)
  for group, name in (
      (dict(inner=fednest_tff.LocalWork(0.1, steps=0)), 'inner_local_steps'),
      (dict(outer=fednest_tff.LocalWork(0.1, epochs=0)), 'outer_local_epochs'),
      (dict(inner=fednest_tff.LocalWork()), 'inner_learning_rate'),
      (
          dict(solver=fednest_tff.FederatedInverseHessian(terms=0)),
          'neumann_terms',
      ),
  ):
    groups = dict(inner=rate, outer=rate) | group
    with pytest.raises(ValueError, match=f'`{name}`'):
      fednest_tff.build_fed_nest(problem, **groups)


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
