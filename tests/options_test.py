"""Flat options of a builder: names, defaults, help, and what is refused."""

from collections.abc import Callable
import dataclasses
from typing import Literal

import numpy as np
import pytest

from fednest_tff import options
from fednest_tff.options import REQUIRED, option


@dataclasses.dataclass(frozen=True)
class Work:
  """Local work.

  Attributes:
    rate: The step size, with an explanation
      of two lines.
    steps: How many; see `rate`.
    size: Of minibatches.
  """

  rate: float | Callable[[int], float] | None = option('{}_rate')
  steps: int = option('{}_local_steps', 3)
  size: int | None = option('batch_size')


@dataclasses.dataclass(frozen=True)
class MoreWork(Work):
  """Work with a kind.

  Attributes:
    kind: Which one.
  """

  kind: Literal['plain', 'fancy'] = option('kind', 'plain')


WORK, MORE_WORK = Work(), MoreWork()


def build_example(
    problem,
    *,
    terms: int,
    inner: Work = WORK,
    outer: MoreWork | None = MORE_WORK,
    factory: Callable[[], None] | None = None,
    careful: bool = False,
    weighting: str | Callable[[], None] = 'uniform',
    note='',
):
  """Returns its arguments.

  Args:
    problem: Not an option.
    terms: N.
    inner: The group of y.
    careful: Whether to look twice,
      or once.

  Returns:
    Them.
  """
  return locals()


OPTIONS = options.options_of(build_example)


def test_names_in_the_order_of_the_parameters():
  assert list(OPTIONS) == [
      'terms',
      'inner_rate',
      'inner_local_steps',
      'batch_size',
      'outer_rate',
      'outer_local_steps',
      'kind',
      'factory',
      'careful',
      'weighting',
      'note',
  ]


def test_an_option_of_two_groups_has_two_places():
  places = [(o.parameter, o.field) for o in OPTIONS['batch_size']]
  assert places == [('inner', 'size'), ('outer', 'size')]
  (terms,) = OPTIONS['terms']
  assert (terms.parameter, terms.field) == ('terms', None)


@pytest.mark.parametrize(
    ['name', 'default', 'flag_type', 'choices', 'text'],
    [
        ('terms', REQUIRED, int, (), 'N.'),
        (
            'inner_rate',
            None,
            float,
            (),
            'The step size, with an explanation of two lines.',
        ),
        # Names of fields in backticks become those of options.
        ('outer_local_steps', 3, int, (), 'How many; see `outer_rate`.'),
        ('batch_size', None, int, (), 'Of minibatches.'),
        ('kind', 'plain', str, ('plain', 'fancy'), 'Which one.'),
        ('factory', None, None, (), ''),
        ('careful', False, bool, (), 'Whether to look twice, or once.'),
        ('weighting', 'uniform', str, (), ''),
        ('note', '', str, (), ''),
    ],
)
def test_what_is_known_of_an_option(name, default, flag_type, choices, text):
  found = OPTIONS[name][0]
  assert found.name == name
  assert found.default is default
  assert found.flag_type is flag_type
  assert found.choices == choices
  assert found.help == text


def test_names_of_a_group():
  names = {'inner_rate', 'inner_local_steps', 'batch_size'}
  assert options.names_of(Work, 'inner') == names
  assert options.names_of(MoreWork, 'inner') == names | {'kind'}


def test_arguments_are_put_together():
  given = dict(
      terms=5, inner_rate=0.1, outer_local_steps=2, batch_size=8, careful=True
  )
  arguments = options.arguments_of(build_example, 'example', given)
  assert arguments == dict(
      terms=5,
      inner=Work(rate=0.1, size=8),
      outer=MoreWork(steps=2, size=8),
      careful=True,
  )
  # What was not given keeps the builder's own default.
  found = build_example('a problem', **arguments)
  assert (found['problem'], found['weighting']) == ('a problem', 'uniform')


def test_wrong_options_name_the_option_and_the_method():
  with pytest.raises(ValueError) as caught:
    options.arguments_of(build_example, 'mine', dict(terms=1, inner_step=2))
  # All that there are, in alphabetic order.
  assert str(caught.value) == (
      '`inner_step` is no option of mine, which has:'
      f' {", ".join(sorted(OPTIONS))}.'
  )
  with pytest.raises(ValueError, match='`terms` is missing: mine needs it'):
    options.arguments_of(build_example, 'mine', dict(inner_rate=0.1))


@pytest.mark.parametrize(
    'builder', [lambda problem, *more: None, lambda problem, **more: None]
)
def test_a_builder_must_name_its_options(builder):
  with pytest.raises(ValueError, match=r'must name its options; .*more`'):
    options.options_of(builder)


@pytest.mark.parametrize('bad', [0, -1, 1.0, True, None, '2'])
def test_counts_are_positive_integers(bad):
  with pytest.raises(ValueError) as caught:
    options.check_count('inner_rounds', bad)
  message = f'`inner_rounds` must be a positive integer; got {bad!r}.'
  assert str(caught.value) == message
  assert options.check_count('inner_rounds', 1) is None


@pytest.mark.parametrize('bad', [True, None, 'fast'])
def test_step_sizes_are_numbers(bad):
  with pytest.raises(ValueError) as caught:
    options.check_positive('rate', bad, 'or a function')
  message = f'`rate` must be a positive number or a function; got {bad!r}.'
  assert str(caught.value) == message
  with pytest.raises(ValueError, match='`l` must be a positive number; got'):
    options.check_positive('l', bad)


@pytest.mark.parametrize(
    'bad', [0, -0.1, float('inf'), float('nan'), 10**400], ids=range(5)
)
def test_step_sizes_are_positive_and_finite(bad):
  with pytest.raises(ValueError) as caught:
    options.check_positive('rate', bad)
  message = f'`rate` must be positive and finite; got {bad}.'
  assert str(caught.value) == message
  found = [options.check_positive('rate', good) for good in (1, 1e-9)]
  assert found == [1.0, 1e-9] and type(found[0]) is float


def test_integers_of_numpy_are_integers():
  options.check_count('count', np.int64(3))
  for wrong in (np.int64(0), np.float64(3.0), np.bool_(True), True):
    with pytest.raises(ValueError, match='`count` must be a positive integer'):
      options.check_count('count', wrong)
