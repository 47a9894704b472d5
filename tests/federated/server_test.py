"""The server's step on x, with and without an optimizer, against NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.federated.rounds import Averaged
from tests.helpers import processes, quadratic

STEP = 0.4  # alpha


@pytest.fixture(scope='module')
def run_single_level():
  """Runs a method with an optimizer; one step is the same in all methods.

  In float32: TFF's momentum is of that type alone.
  """
  y = np.zeros(quadratic.DY, np.float32)
  problem = fednest_tff.single_level(
      lambda x, batch: quadratic.outer_loss(x, y, batch),
      lambda seed: quadratic.init_outer(seed, tf.float32),
      quadratic.element_spec(tf.float32),
  )
  cohort = quadratic.to_datasets(quadratic.make_clients(dtype=np.float32))

  def run(optimizer, method='fednest'):
    process = fednest_tff.build(
        problem, method, outer_learning_rate=STEP, outer_optimizer=optimizer
    )
    start = process.initialize()
    outputs = processes.outputs(process, cohort, 3, start)
    return [start, *(output.state for output in outputs)]

  return run


@pytest.fixture(scope='module')
def without_optimizer(run_single_level):
  return run_single_level(None)


def _gradient(x):
  form = quadratic.ClosedForm(quadratic.make_clients())
  return form.direct_gradient(x, np.zeros(quadratic.DY))


def test_default_takes_the_mean(without_optimizer):
  x = without_optimizer[0].outer
  for state in without_optimizer[1:]:
    x = x - STEP * _gradient(x)
    np.testing.assert_allclose(state.outer, x, rtol=1e-5)
  assert without_optimizer[-1].method == ()


def test_sgd_with_step_one_is_the_default(run_single_level, without_optimizer):
  states = run_single_level(tff.learning.optimizers.build_sgdm(1.0))
  for state, expected in zip(states, without_optimizer, strict=True):
    np.testing.assert_array_equal(state.outer, expected.outer)


@pytest.mark.parametrize('method', ['fednest', 'lfednest', 'fedavg_s'])
def test_momentum_is_carried_from_epoch_to_epoch(run_single_level, method):
  optimizer = tff.learning.optimizers.build_sgdm(0.5, momentum=0.75)
  states = run_single_level(optimizer, method)
  x, velocity = states[0].outer, 0.0
  for state in states[1:]:
    # Minus the mean change is the optimizer's gradient.
    velocity = 0.75 * velocity + STEP * _gradient(x)
    x = x - 0.5 * velocity
    np.testing.assert_allclose(state.outer, x, rtol=1e-5)


def test_adam_keeps_its_state(run_single_level, without_optimizer):
  states = run_single_level(tff.learning.optimizers.build_adam(0.05))
  change = states[1].outer - without_optimizer[1].outer
  assert np.linalg.norm(change) > 1e-3
  # Its first step is its step size, whatever the size of the gradient.
  np.testing.assert_allclose(
      states[1].outer - states[0].outer,
      -0.05 * np.sign(_gradient(states[0].outer)),
      rtol=1e-3,
  )
  flat = [tf.nest.flatten(state.method) for state in states]
  for before, after in itertools.pairwise(flat):
    assert any(np.any(a != b) for a, b in zip(before, after, strict=True))
  assert [state.method['step'] for state in states] == [0, 1, 2, 3]


# ---- The step by itself -----------------------------------------------------


class _AtOnce:
  """An executor that runs the server's computations, and notes metrics."""

  def __init__(self):
    self.metrics = {}

  def server(self, computation, *arguments):
    return computation(*arguments)

  def measure(self, **metrics):
    self.metrics |= metrics


@pytest.fixture(scope='module')
def types():
  """Of a minimax problem with |x_k| <= 1 and y >= 0."""
  problem = fednest_tff.minimax(
      quadratic.outer_loss,
      lambda seed: tf.zeros([quadratic.DX], tf.float64),
      lambda seed: tf.zeros([quadratic.DY], tf.float64),
      quadratic.element_spec(),
      project_outer=fednest_tff.projections.box(-1.0, 1.0),
      project_inner=fednest_tff.projections.non_negative(),
  )
  return fednest_tff.ProblemTypes(problem)


@pytest.mark.parametrize(
    ['level', 'value', 'change', 'expected', 'drift_name'],
    [
        ('outer', [0.5, -0.5, 0], [0.75, 0.25, -3], [1, -0.25, -1],
         'outer_drift'),
        ('inner', [1, 2, 3, 4], [-0.5, -2.5, 1, -4], [0.5, 0, 4, 0],
         'client_drift'),
    ],
)  # fmt: skip
def test_a_step_with_a_projection(
    types, level, value, change, expected, drift_name
):
  value, change = np.array(value, float), np.array(change, float)
  do = _AtOnce()
  # mean |v_i - v|^2 of clients whose mean change is `change`.
  squared = change @ change + 0.25
  state, moved = fednest_tff.ServerStep(types, level, 'v+')(
      do, (), value, Averaged(change, dict(squared_change=squared))
  )
  assert state == ()
  np.testing.assert_array_equal(moved, expected)
  # The root mean square of |v_i - mean v_i|, and how far v really went.
  np.testing.assert_allclose(do.metrics.pop(drift_name), 0.5, rtol=1e-12)
  norm = np.linalg.norm(moved - value)
  assert do.metrics == {f'{level}_update_norm': pytest.approx(norm, rel=1e-12)}


def test_hyper_parameters_of_the_optimizer(types):
  optimizer = tff.learning.optimizers.build_adam(0.25)
  step = fednest_tff.ServerStep(types, 'outer', 'x+', optimizer)
  state = step.initial_state()
  hparams = step.get_hparams(state)
  assert hparams['outer_optimizer']['learning_rate'] == 0.25
  hparams['outer_optimizer']['learning_rate'] = 0.5
  changed = step.set_hparams(state, hparams)
  found = step.get_hparams(changed)['outer_optimizer']['learning_rate']
  assert found == 0.5
  assert step.set_hparams(state, {}) is state

  plain = fednest_tff.ServerStep(types, 'outer', 'x+')
  assert plain.initial_state() == ()
  assert plain.get_hparams(()) == {}
  assert plain.set_hparams((), dict(other=1.0)) == ()


def test_only_optimizers_of_tff(types):
  with pytest.raises(ValueError, match='`outer_optimizer` must be one of tff'):
    fednest_tff.ServerStep(types, 'outer', 'x+', 'adam')


@pytest.mark.parametrize(
    ['level', 'advice'],
    [
        ('inner', 'Try a smaller inner_learning_rate'),
        ('outer', 'Try a smaller outer_learning_rate, or a larger smoothness'),
    ],
)
def test_what_is_not_finite_is_named(types, level, advice):
  size = quadratic.DX if level == 'outer' else quadratic.DY
  changes = Averaged(np.full(size, np.nan), dict(squared_change=1.0))
  step = fednest_tff.ServerStep(types, level, 'The new v')
  with pytest.raises(
      Exception, match=f'The new v is not finite. {advice}'
  ):
    step(_AtOnce(), (), np.zeros(size), changes)


def test_check_returns_the_value_and_its_norm(types):
  check = fednest_tff.build_check(types.inner, 'q is not finite. Stop')
  value, norm = check(np.array([1.0, 2.0, 2.0, 4.0]))
  np.testing.assert_array_equal(value, [1.0, 2.0, 2.0, 4.0])
  assert norm == 5.0
  with pytest.raises(Exception, match='q is not finite. Stop'):
    check(np.array([1.0, np.inf, 2.0, 4.0]))
