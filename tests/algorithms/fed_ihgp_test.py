"""FedIHGP inside FedOut: its sub-cohorts, and l.

Random draws are checked by enumeration: the result must be that of exactly one
of all possible draws. FedIHGP one round at a time is in `ihgp_process_test`.
"""

import collections
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.algorithms import fed_ihgp
from tests.helpers import processes, quadratic, small_problems

EXACT = dict(rtol=1e-10, atol=1e-10)
CLIENTS = quadratic.make_clients()
COHORT = quadratic.to_datasets(CLIENTS)
SMOOTHNESS = 3.0


# ---- Sub-cohorts: S_0 for b and S_1 for H v, with N = 2 ---------------------


def _subsets():
  every = range(len(CLIENTS))
  return [
      subset
      for size in range(1, len(CLIENTS) + 1)
      for subset in itertools.combinations(every, size)
  ]


@pytest.fixture(scope='module')
def sub_sampled():
  """FedOut whose rounds, apart from the last, are b, one H v and h."""
  return processes.build_flat(
      fednest_tff.build_fed_out,
      quadratic.build_problem(),
      outer_learning_rate=1.0,
      ihgp='truncated',
      neumann_terms=2,
      smoothness=SMOOTHNESS,
      participation=0.25,
  )


@functools.cache
def _mean(subset):
  return quadratic.ClosedForm([CLIENTS[i] for i in subset])


def _change(first, second, x, y):
  """x+ - x when S_0 and S_1 are those clients."""
  everyone = _mean(tuple(range(len(CLIENTS))))
  term = _mean(first).gradient_in_inner(x, y) / SMOOTHNESS
  p = term + (term - _mean(second).A @ term / SMOOTHNESS)
  return everyone.mixed_product(p) - everyone.direct_gradient(x, y)


def _drawn(state, output):
  """The one pair (S_0, S_1) that explains the step."""
  x, y = state.outer, state.inner
  matches = [
      pair
      for pair in itertools.product(_subsets(), repeat=2)
      if np.allclose(output.state.outer - x, _change(*pair, x, y), **EXACT)
  ]
  assert len(matches) == 1
  return matches[0]


def test_each_round_draws_its_own_sub_cohort(sub_sampled):
  state, pairs = sub_sampled.initialize(), []
  for _ in range(40):
    output = sub_sampled.next(state, COHORT)
    pairs.append(_drawn(state, output))
    state = output.state._replace(outer=state.outer)
  everyone = tuple(range(len(CLIENTS)))
  assert any(first != second for first, second in pairs)
  assert len(set(pairs)) > 4
  for client in everyone:
    assert any(client in first for first, _ in pairs)
    assert any(client not in first for first, _ in pairs)
    assert any(client not in second for _, second in pairs)
  # Of three clients, 27/64 of the draws have one, 9/64 two, 1/64 all and 27/64
  # none: that means everyone.
  sizes = collections.Counter(
      len(subset) for pair in pairs for subset in pair
  )
  draws = 2 * len(pairs)
  for size, share in ((1, 27 / 64), (2, 9 / 64), (3, 28 / 64)):
    deviation = np.sqrt(draws * share * (1 - share))
    assert abs(sizes[size] - draws * share) < 2.5 * deviation


def test_sub_cohorts_are_reproducible(sub_sampled):
  state = sub_sampled.initialize()
  np.testing.assert_array_equal(
      sub_sampled.next(state, COHORT).state.outer,
      sub_sampled.next(state, COHORT).state.outer,
  )


def test_single_client_is_never_left_out(sub_sampled):
  form = quadratic.ClosedForm(CLIENTS[2:])
  state = sub_sampled.initialize()
  for _ in range(6):  # It is drawn with probability 1/4.
    x, y = state.outer, state.inner
    term = form.gradient_in_inner(x, y) / SMOOTHNESS
    p = 2 * term - form.A @ term / SMOOTHNESS
    h = form.direct_gradient(x, y) - form.mixed_product(p)
    state = sub_sampled.next(state, COHORT[2:]).state
    np.testing.assert_allclose(state.outer, x - h, **EXACT)


# ---- l ----------------------------------------------------------------------


def _smoothness_at(epoch, rate, given=None, **numbers):
  """l at an epoch, with `numbers` in the state in place of the initial ones."""
  wanted = fednest_tff.FederatedInverseHessian(smoothness=given)
  solver = fed_ihgp.solver_for(quadratic.build_problem(), wanted)
  rates = fednest_tff.learning_rates(inner_learning_rate=rate)
  found = fed_ihgp.smoothness_hparams(
      solver, wanted, rates['inner_learning_rate']
  )
  state = {k: h.initial for k, h in (rates | found).items()} | numbers
  state = {k: tf.constant(v, tf.float64) for k, v in state.items()}
  return found['smoothness'].at(tf.constant(epoch), state).numpy()


def test_default_smoothness_is_one_over_the_inner_step_at_epoch_0():
  def halves(epoch):
    return 0.25 / (1.0 + tf.cast(epoch, tf.float64))

  for epoch in (0, 1, 5):
    assert _smoothness_at(epoch, 0.25) == 4.0
    assert _smoothness_at(epoch, halves) == 4.0
    # It follows when the step size in the state is changed.
    assert _smoothness_at(epoch, 0.25, inner_learning_rate=0.5) == 2.0
    assert _smoothness_at(epoch, halves, inner_learning_rate=2.0) == 2.0


def test_smoothness_in_the_state_stays_what_it_is():
  for epoch in (0, 3):
    assert _smoothness_at(epoch, 0.25, given=7.0) == 7.0
    assert _smoothness_at(epoch, 0.25, 7.0, inner_learning_rate=0.5) == 7.0
    assert _smoothness_at(epoch, 0.25, smoothness=5.0) == 5.0


def test_simple_problems_need_no_series():
  wanted = fednest_tff.FederatedInverseHessian(kind='truncated', terms=7)
  assert fed_ihgp.solver_for(small_problems.minimax(), wanted) is None
  assert fed_ihgp.solver_for(small_problems.single_level(), wanted) is None
  # The Hessian of a compositional problem is I: p = b without any product.
  solver = fed_ihgp.solver_for(small_problems.compositional(), wanted)
  assert solver.num_terms == 1
  state = solver.start(tf.constant([2.0, 3.0]), (), None)
  assert state.products_left == 0
  np.testing.assert_array_equal(state.p, [2.0, 3.0])
  # Any other takes the one that was asked for.
  solver = fed_ihgp.solver_for(small_problems.bilevel(), wanted)
  assert solver.num_terms == 7
