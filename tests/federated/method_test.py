"""Methods: hyper-parameters, and a small method in both executors."""

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.federated import method as method_lib
from tests.helpers import quadratic, small_problems
from tests.helpers.processes import assert_equal

CLIENTS = quadratic.make_clients()
FORM = quadratic.ClosedForm(CLIENTS)
DATASETS = quadratic.to_datasets(CLIENTS)


# ---- Hyper-parameters -------------------------------------------------------


def test_numbers_are_hyper_parameters():
  found = fednest_tff.learning_rates(alpha=0.5, beta=2)
  assert found == dict(
      alpha=fednest_tff.HyperParameter(0.5),
      beta=fednest_tff.HyperParameter(2.0),
  )
  assert isinstance(found['beta'].initial, float)


def test_a_schedule_has_a_factor():
  (found,) = fednest_tff.learning_rates(alpha=lambda epoch: epoch + 3).values()
  assert found.initial == 1.0
  numbers = dict(alpha=tf.constant(0.5, tf.float64), beta=None)
  at = found.at(tf.constant(2), numbers)
  assert (at.dtype, at.numpy()) == (tf.float64, 2.5)


@pytest.mark.parametrize(
    ['bad', 'message'],
    [
        (None, '`alpha` is missing: a step size, such as 0.1.'),
        ('fast', "`alpha` must be a positive number or a function of the epoch;"
                 " got 'fast'."),
        (0.0, '`alpha` must be positive and finite; got 0.0.'),
        (True, '`alpha` must be a positive number or a function of the epoch;'
               ' got True.'),
        (lambda epoch: 10**400, '`alpha` as a function of the epoch must return'
                                ' a finite number, not below 0; got'
                                f' {10**400}.'),
        (lambda epoch: '0.1', '`alpha` as a function of the epoch must return a'
                              " finite number, not below 0; got '0.1'."),
        (lambda epoch: -0.1, '`alpha` as a function of the epoch must return a'
                             ' finite number, not below 0; got -0.1.'),
    ],
    ids=range(7),
)  # fmt: skip
def test_bad_step_sizes_are_named(bad, message):
  with pytest.raises(ValueError) as caught:
    fednest_tff.learning_rates(beta=0.1, alpha=bad)
  assert str(caught.value) == message


def test_a_schedule_must_work_in_a_graph():
  with pytest.raises(ValueError, match='`alpha` fails .* `tf.where` stands'):
    fednest_tff.learning_rates(alpha=lambda epoch: 0.1 if epoch < 5 else 0.01)


@pytest.mark.parametrize('number', [np.float32(0.5), np.float64(0.5)])
def test_a_step_size_may_be_a_number_of_numpy(number):
  found = fednest_tff.learning_rates(alpha=number)
  assert found['alpha'].initial == 0.5


def test_a_step_size_may_be_allowed_to_be_zero():
  found = fednest_tff.learning_rates(allow_zero=True, alpha=0, beta=0.1)
  assert [hparam.initial for hparam in found.values()] == [0.0, 0.1]
  with pytest.raises(ValueError, match='`alpha` must be positive'):
    fednest_tff.learning_rates(allow_zero=True, alpha=-1.0)


def test_problems_without_an_inner_variable():
  for build in small_problems.WITH_INNER:
    assert method_lib.check_has_inner(build()) is None
  with pytest.raises(ValueError, match='`problem` is single-level'):
    method_lib.check_has_inner(small_problems.single_level())


# ---- What a method need not write -------------------------------------------


def test_defaults():
  types = fednest_tff.ProblemTypes(quadratic.build_problem())
  method = fednest_tff.Method(types, [], {})
  assert (method.rounds, method.hparams, method.num_seeds) == ((), {}, 1)
  assert method.initial_state(None, None, {}, None) == ()
  assert method.get_hparams(()) == {}
  assert method.set_hparams('state', {}) == 'state'
  with pytest.raises(NotImplementedError):
    method.epoch(None, None, None)


# ---- A method of its own ----------------------------------------------------


class Own(NamedTuple):
  """Its state: a velocity, and how much of it stays."""

  velocity: Any
  friction: Any


class HeavyBall(fednest_tff.Method):
  """v <- (1 - friction) v - rate q, y <- y + v, q the mean inner gradient."""

  def __init__(self, types):
    gradient = fednest_tff.build_check(types.inner, 'q is not finite')

    @tff.tensorflow.computation(
        fednest_tff.PointMessage(types.outer, types.inner, types.seed),
        types.client,
    )
    def client_gradient(message, client):
      x, y, _ = message
      with tf.GradientTape() as tape:
        tape.watch(y)
        loss = types.problem.inner_loss(x, y, client.inner)
      return tape.gradient(loss, y), collections.OrderedDict(inner_loss=loss)

    own = Own(types.inner, types.scalar)

    @tff.tensorflow.computation(types.inner, own, types.inner, types.scalar)
    def step(y, own, q, rate):
      velocity = (1 - own.friction) * own.velocity - rate * q
      return y + velocity, Own(velocity, own.friction)

    self._check, self._step = gradient, step
    self._round = fednest_tff.Round('gradient', types, client_gradient)

    def decayed(epoch, numbers):
      return numbers['rate'] / (1 + tf.cast(epoch, tf.float64))

    hparams = dict(rate=fednest_tff.HyperParameter(0.2, decayed))
    super().__init__(types, [self._round], hparams, num_seeds=3)

  def initial_state(self, x, y, numbers, seed):
    # All that it may depend on is there.
    assert x.shape == [quadratic.DX] and seed.shape == [2]
    return Own(tf.zeros_like(y), numbers['rate'] / 2)

  def get_hparams(self, method_state):
    return collections.OrderedDict(friction=method_state.friction)

  def set_hparams(self, method_state, hparams):
    return method_state._replace(friction=hparams['friction'])

  def epoch(self, do, variables, plan):
    x, y, own = variables
    assert list(plan.numbers) == ['rate'] and len(plan.seeds) == 3
    mean = do.round(
        self._round, fednest_tff.PointMessage(x, y, plan.seeds[2])
    )
    q, norm = do.server(self._check, mean.value)
    do.measure(**mean.metrics, norm=norm)
    y, own = do.server(self._step, y, own, q, plan.numbers['rate'])
    return fednest_tff.Variables(x, y, own)


@pytest.fixture(scope='module')
def process():
  types = fednest_tff.ProblemTypes(quadratic.build_problem())
  return fednest_tff.build_process(HeavyBall(types), seed=5)


def _run(executor, state, epochs):
  outputs = []
  for _ in range(epochs):
    outputs.append(executor.next(state, DATASETS))
    state = outputs[-1].state
  return outputs


def test_its_epochs_equal_numpy_in_both_executors(process):
  start = process.initialize()
  np.testing.assert_array_equal(start.outer, quadratic.init_outer(5))
  assert start.method.friction == 0.1
  x, y, velocity = start.outer, start.inner, np.zeros(quadratic.DY)
  outputs = _run(process, start, 3)
  for epoch, output in enumerate(outputs):
    q = FORM.inner_gradient(x, y)
    loss = np.mean([
        y @ form.A @ y / 2 - y @ (form.B @ x + form.b) for form in FORM.locals
    ])
    velocity = 0.9 * velocity - 0.2 / (1 + epoch) * q
    y = y + velocity
    np.testing.assert_allclose(output.state.inner, y, rtol=1e-12)
    np.testing.assert_allclose(
        output.state.method.velocity, velocity, rtol=1e-11
    )
    np.testing.assert_array_equal(output.state.outer, start.outer)
    assert output.state.epoch == epoch + 1
    metrics = dict(
        inner_loss=loss, norm=np.linalg.norm(q), num_clients=3, num_examples=6
    )
    assert list(output.metrics) == [*metrics, 'client_work']
    for name, value in metrics.items():
      np.testing.assert_allclose(output.metrics[name], value, rtol=1e-12)

  driver = fednest_tff.build_driver(process)
  for found, expected in zip(_run(driver, start, 3), outputs, strict=True):
    assert_equal(found.state, expected.state)
    counted = ('communication_rounds', 'bytes_up', 'bytes_down')
    metrics = {k: v for k, v in found.metrics.items() if k not in counted}
    assert_equal(metrics, dict(expected.metrics))


def test_its_hyper_parameters_are_read_from_the_state(process):
  start = process.initialize()
  assert process.get_hparams(start) == dict(rate=0.2, friction=0.1)
  state = process.set_hparams(start, dict(rate=0.3, friction=0.6))
  assert process.get_hparams(state) == dict(rate=0.3, friction=0.6)
  x, y, velocity = start.outer, start.inner, np.zeros(quadratic.DY)
  for epoch, output in enumerate(_run(process, state, 2)):
    velocity = 0.4 * velocity - 0.3 / (1 + epoch) * FORM.inner_gradient(x, y)
    y = y + velocity
    np.testing.assert_allclose(output.state.inner, y, rtol=1e-12)


def test_plan_gives_numbers_and_seeds(process):
  numbers, seeds, following = process.plan(
      np.array([5, 0]), np.int32(3), dict(rate=2.0)
  )
  assert dict(numbers) == dict(rate=0.5)
  assert following == 4
  assert len({tuple(seed) for seed in seeds}) == 3
  # Those of another epoch are others.
  _, later, _ = process.plan(np.array([5, 0]), np.int32(4), dict(rate=2.0))
  assert not {tuple(seed) for seed in seeds} & {tuple(seed) for seed in later}
