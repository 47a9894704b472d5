"""Communication read off the compiled computation, against the algorithms."""

import collections
import functools
import re

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from tests.helpers import quadratic
from tests.helpers.processes import build_flat, options_of

# Bytes of what goes along with the vectors: weights, losses and norms
# (float64), a seed (2 x int64), an index (int32) and two counts (2 x int64).
SCALAR, SEED, INDEX, COUNTS = 8, 16, 4, 16
X, Y = 8 * quadratic.DX, 8 * quadratic.DY


def _vector(length):
  return lambda seed: tf.ones([length], tf.float64)


SPEC = collections.OrderedDict(a=tf.TensorSpec([3], tf.float64))


@functools.cache
def _minimax():
  def loss(x, y, batch):
    shift = tf.reduce_mean(batch['a'], axis=0)
    return (
        tf.reduce_sum(x * (y + shift))
        + tf.reduce_sum(x**2)
        - tf.reduce_sum(y**2)
    )

  return fednest_tff.minimax(loss, _vector(3), _vector(3), SPEC)


@functools.cache
def _compositional():
  return fednest_tff.compositional(
      lambda y, batch: tf.reduce_sum(y**2),
      lambda x, batch: x * tf.reduce_mean(batch['a'], axis=0),
      _vector(3),
      _vector(3),
      SPEC,
  )


@functools.cache
def _single_level():
  return fednest_tff.single_level(
      lambda x, batch: tf.reduce_mean((x - batch['a']) ** 2), _vector(3), SPEC
  )


def _build(problem, method, inner_rounds, neumann_terms, **options):
  numbers = dict(
      inner_rounds=inner_rounds,
      neumann_terms=neumann_terms,
      linear_learning_rate=0.1,
  )
  for name in numbers.keys() & options_of(method):
    options[name] = numbers[name]
  return fednest_tff.build(
      problem,
      method,
      outer_learning_rate=0.1,
      inner_learning_rate=0.1,
      **options,
  )


@functools.cache
def _small_problem(kind=fednest_tff.bilevel):
  """One that is quick to differentiate."""
  def loss(x, y, batch):
    return tf.reduce_mean(batch['a']) * tf.reduce_sum(x * y + y**2)

  return kind(loss, loss, _vector(3), _vector(3), SPEC)


@functools.cache
def _small(method, inner_rounds, neumann_terms, **options):
  kind = fednest_tff.personal if method == 'personal' else fednest_tff.bilevel
  problem = _small_problem(kind)
  return _build(problem, method, inner_rounds, neumann_terms, **options)


# Rounds of the pieces as the algorithms state them, line by line.
def _fed_inn():
  return 1 + 1  # q (line 6) and y+ (line 13)


def _fed_ihgp(neumann_terms):
  return 1 + (neumann_terms - 1)  # p_0 (line 6), then p_1 .. p_{N-1} at most


def _fed_out(neumann_terms):
  return _fed_ihgp(neumann_terms) + 1 + 1  # h (line 8) and x+ (line 14)


LFED_INN = LFED_OUT = JOINT = 1


# From T and N to the rounds of the algorithms, and the paper's budget.
FAMILY = {
    'fednest': (
        lambda t, n: t * _fed_inn() + _fed_out(n),
        lambda t, n: 2 * t + n + 3,
    ),
    'lfednest': (lambda t, n: t * LFED_INN + LFED_OUT, lambda t, n: t + 1),
    'fednest_sgd': (
        lambda t, n: t * LFED_INN + _fed_out(n), lambda t, n: t + n + 3
    ),
    'lfednest_svrg': (
        lambda t, n: t * _fed_inn() + LFED_OUT, lambda t, n: 2 * t + 1
    ),
    'lfednest_nonalt': (lambda t, n: JOINT, lambda t, n: 1),
    'fedavg_s': (lambda t, n: JOINT, lambda t, n: 1),
}


@pytest.mark.parametrize('method', FAMILY)
@pytest.mark.parametrize('t,n', [(1, 1), (2, 3)])
def test_rounds_are_those_of_the_algorithms(method, t, n):
  rounds = fednest_tff.communication_cost(_small(method, t, n)).rounds
  derived, budget = FAMILY[method]
  assert rounds == derived(t, n)
  has_ihgp = method in ('fednest', 'fednest_sgd')
  assert rounds == budget(t, n) - has_ihgp


@pytest.mark.parametrize('method', fednest_tff.METHODS)
def test_rounds_are_those_of_the_registry(method):
  """And so of the README's table: formulas such as '2T + N + 2'."""
  t, n = 2, 3
  formula = fednest_tff.get_method(method).rounds
  terms = re.fullmatch(r'(?:(\d*)T \+ )?(N \+ )?(\d+)', formula)
  expected = int(terms[3])
  if terms[1] is not None:
    expected += int(terms[1] or 1) * t
  if terms[2] is not None:
    expected += n
  cost = fednest_tff.communication_cost(_small(method, t, n))
  assert cost.rounds == expected


@pytest.mark.parametrize('ihgp', ['truncated', 'cg'])
def test_every_solver_takes_as_many_rounds(ihgp):
  process = _small('fednest', 2, 3, ihgp=ihgp)
  cost = fednest_tff.communication_cost(process)
  assert cost.rounds == 2 * 2 + 3 + 2
  assert cost[:3] == cost[3:]


def test_expected_rounds_are_the_mean_over_the_stop():
  t, n = 2, 3
  process = _build(quadratic.build_problem(), 'fednest', t, n)
  cost = fednest_tff.communication_cost(process)
  # With N' = stop, FedIHGP takes 1 + stop rounds.
  rounds = [t * 2 + (1 + stop) + 2 for stop in range(n)]
  assert cost.expected_rounds == np.mean(rounds)
  up = [stop * (Y + SCALAR) for stop in range(n)]
  down = [stop * (Y + INDEX) for stop in range(n)]
  assert cost.bytes_up - cost.expected_bytes_up == max(up) - np.mean(up)
  assert cost.bytes_down - cost.expected_bytes_down == max(down) - np.mean(down)


@pytest.mark.parametrize('t', [1, 3])
def test_special_problems(t):
  cost = fednest_tff.communication_cost
  assert cost(_build(_minimax(), 'fednest', t, 5)).rounds == 2 * t + 2
  assert cost(_build(_compositional(), 'fednest', t, 5)).rounds == 2 * t + 3
  assert cost(_build(_single_level(), 'fednest', t, 5)).rounds == 2


def test_bytes_of_an_epoch():
  t, n = 2, 3
  process = _build(
      quadratic.build_problem(), 'fednest', t, n, ihgp='truncated'
  )
  cost = fednest_tff.communication_cost(process)
  # Up: each value with its metrics, if any, and its weight.
  gradient = Y + SCALAR + SCALAR
  update = Y + SCALAR + SCALAR
  ihgp = n * (Y + SCALAR)
  hypergradient, outer_update = X + 2 * SCALAR, X + 2 * SCALAR
  assert cost.bytes_up == (
      t * (gradient + update) + ihgp + hypergradient + outer_update + COUNTS
  )
  # Down: x and beta once; y and a seed, and q for each FedInn; the new y and a
  # seed; the vectors to multiply; p; h and alpha.
  assert cost.bytes_down == (
      X
      + SCALAR
      + t * (Y + SEED + Y)
      + (Y + SEED)
      + (n - 1) * (Y + INDEX)
      + Y
      + (X + SCALAR)
  )


def test_single_processes_and_rounds():
  problem = _small_problem()
  cost = fednest_tff.communication_cost
  inner = dict(inner_learning_rate=0.1)
  outer = dict(outer_learning_rate=0.1, smoothness=4.0, neumann_terms=3)
  processes = {
      2: build_flat(fednest_tff.build_fed_inn, problem, **inner),
      1: build_flat(fednest_tff.build_lfed_inn, problem, **inner),
      5: build_flat(fednest_tff.build_fed_out, problem, **outer),
  }
  for rounds, process in processes.items():
    assert cost(process).rounds == rounds
    for computation in process.rounds.values():
      assert cost(computation).rounds == 1
  lfed_out = build_flat(fednest_tff.build_lfed_out, problem, **outer)
  assert cost(lfed_out).rounds == 1
  ihgp = build_flat(
      fednest_tff.build_fed_ihgp, problem, smoothness=4.0, neumann_terms=3
  )
  assert cost(ihgp).rounds == 1
  assert cost(fednest_tff.build_power_iteration(problem)).rounds == 1
  # E[1 + N'] = 1 + (N - 1) / 2 rounds of FedIHGP, and two more.
  assert cost(processes[5]).expected_rounds == 4


def test_other_processes_can_be_priced():
  model = tff.learning.models.functional_model_from_keras(
      lambda: tf.keras.Sequential([
          tf.keras.layers.InputLayer([4]), tf.keras.layers.Dense(2)
      ]),
      tf.keras.losses.MeanSquaredError(),
      (
          tf.TensorSpec([None, 4], tf.float32),
          tf.TensorSpec([None, 2], tf.float32),
      ),
  )
  process = tff.learning.algorithms.build_weighted_fed_avg(
      model,
      client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
      server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
  )
  cost = fednest_tff.communication_cost(process)
  assert cost.rounds == 1
  model_bytes = 4 * (4 * 2 + 2)
  assert cost.bytes_down == model_bytes
  assert cost.bytes_up >= model_bytes


def test_more_aggregation_is_priced():
  plain = _build(quadratic.build_problem(tf.float32), 'lfednest', 1, 2)
  robust = _build(
      quadratic.build_problem(tf.float32),
      'lfednest',
      1,
      2,
      outer_aggregator=tff.learning.robust_aggregator(),
  )
  cost = fednest_tff.communication_cost
  assert cost(robust).rounds == cost(plain).rounds
  assert cost(robust).bytes_up > cost(plain).bytes_up


def test_unknown_sizes_are_refused():
  accumulate = tff.tensorflow.computation(
      lambda a, v: a + tf.reduce_sum(v),
      [np.float32, tff.TensorType(np.float32, [None])],
  )
  merge = tff.tensorflow.computation(
      lambda a, b: a + b, [np.float32, np.float32]
  )
  report = tff.tensorflow.computation(lambda a: a, np.float32)

  @tff.federated_computation(
      tff.FederatedType(tff.TensorType(np.float32, [None]), tff.CLIENTS)
  )
  def computation(values):
    return tff.federated_aggregate(
        values, np.float32(0), accumulate, merge, report
    )

  with pytest.raises(ValueError, match='known shapes'):
    fednest_tff.communication_cost(computation)


def test_bounds_of_a_secure_sum_are_not_sent():
  @tff.federated_computation(
      tff.FederatedType((np.int32, [3]), tff.CLIENTS)
  )
  def secure(value):
    return tff.federated_secure_sum(value, 7)

  assert fednest_tff.communication_cost(secure).bytes_up == 12
