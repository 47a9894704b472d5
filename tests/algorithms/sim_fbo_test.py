"""SimFBO and ShroFBO: NumPy, closed forms, and the methods they reduce to."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from tests.helpers import later_methods, processes, quadratic
from tests.helpers.small_problems import SPEC

CLIENTS = quadratic.make_clients(examples=(2, 3, 5), seed=3)
DATASETS = quadratic.to_datasets(CLIENTS)
RATES = dict(
    outer_learning_rate=0.05, inner_learning_rate=0.1, linear_learning_rate=0.15
)
ETA = 0.05, 0.1, 0.15
START = quadratic.init_outer(0).numpy(), quadratic.init_inner(0).numpy()


def unequal(examples):
  """tau_i = n_i - 1: 1, 2 and 4 here."""
  return tf.shape(examples['A'])[0] - 1


@functools.cache
def build(method='simfbo', **options):
  """A process; tests that differ in step sizes alone share one."""
  return fednest_tff.build(
      quadratic.build_problem(), method, **(RATES | options)
  )


def with_numbers(process, state=None, **numbers):
  """A state with other step sizes."""
  state = process.initialize() if state is None else state
  hparams = process.get_hparams(state) | {
      name: np.float64(value) for name, value in numbers.items()
  }
  return process.set_hparams(state, hparams)


def start():
  return (*START, np.zeros(quadratic.DY))


def variables(state):
  return state.outer, state.inner, state.method.linear


def assert_close(state, expected, rtol=1e-10):
  for part, value in zip(variables(state), expected, strict=True):
    np.testing.assert_allclose(part, value, rtol=rtol, atol=1e-13)


@pytest.mark.parametrize('method', ['simfbo', 'shrofbo'])
def test_three_epochs_equal_numpy(method):
  """Minibatches, unequal tau_i, weights, coefficients, all server steps."""
  process = build(
      method,
      local_steps=unequal,
      batch_size=2,
      server_outer_learning_rate=0.02,
      server_inner_learning_rate=0.2,
      server_linear_learning_rate=0.3,
      radius=0.7,
      server_momentum=0.6,
      coefficients=lambda k, tau: 1 / (1.0 + tf.cast(k, tf.float64)),
      client_weighting='num_examples',
  )
  clients = later_methods.Clients(
      quadratic.build_problem(),
      DATASETS,
      fednest_tff.SimultaneousWork(local_steps=unequal, batch_size=2),
      lambda examples: tf.shape(examples['A'])[0],
  )
  for momentum in (0.6, 0.0):
    before = with_numbers(process, server_momentum=momentum)
    state, _ = processes.run(process, DATASETS, 3, before)
    expected = later_methods.sim_fbo(
        clients, start(), ETA, (0.02, 0.2, 0.3), 3,
        coefficient=lambda k, tau: 1 / (1 + k),
        normalize=method == 'shrofbo',
        radius=0.7,
        momentum=momentum,
    )
    assert_close(state, expected)
    assert np.linalg.norm(state.method.linear) == pytest.approx(0.7)


def test_server_momentum_steps_along_a_weighted_sum():
  """m <- beta m + G(z), z <- z - Gam m, in closed form, and m in the state."""
  process = build(local_steps=1, server_momentum=0.5)
  state, _ = processes.run(process, DATASETS, 4)
  z, m = joined_start(), np.zeros(11)
  for _ in range(4):
    m = 0.5 * m + LINEAR.K @ z - LINEAR.k
    z = z - diagonal(ETA) @ m
  np.testing.assert_allclose(joined(state), z, rtol=1e-10)
  kept = state.method.more
  np.testing.assert_allclose(
      np.concatenate([kept.inner, kept.linear, kept.outer]), m, rtol=1e-10
  )


class Linear:
  """K and k with G(z) = K z - k, z = (y, v, x), of a client or of their mean.

  From the closed forms: K = [[A, 0, -B], [-M, A, -Q'], [Q, B', P]].
  """

  def __init__(self, forms):
    def rows(f):
      zero = np.zeros((quadratic.DY, quadratic.DY))
      matrix = np.block([
          [f.A, zero, -f.B], [-f.M, f.A, -f.Q.T], [f.Q, f.B.T, f.P]
      ])
      return matrix, np.concatenate([f.b, -f.Mc, f.Pe])

    pairs = [rows(f) for f in forms]
    self.matrices = [p[0] for p in pairs]
    self.vectors = [p[1] for p in pairs]
    self.K, self.k = np.mean(self.matrices, 0), np.mean(self.vectors, 0)
    self.solution = np.linalg.solve(self.K, self.k)


def diagonal(rates):
  """The step sizes of (y, v, x) as a matrix, from those of (x, y, v)."""
  x, y, v = rates
  return np.diag([y] * quadratic.DY + [v] * quadratic.DY + [x] * quadratic.DX)


def joined(state):
  x, y, v = variables(state)
  return np.concatenate([y, v, x])


def joined_start():
  x, y, v = start()
  return np.concatenate([y, v, x])


LINEAR = Linear([quadratic.local_form(c) for c in CLIENTS])


def test_the_solution_of_the_linear_system_is_that_of_the_problem():
  x, y = quadratic.ClosedForm(CLIENTS).solution()
  np.testing.assert_allclose(LINEAR.solution[:quadratic.DY], y, rtol=1e-10)
  np.testing.assert_allclose(LINEAR.solution[-quadratic.DX:], x, rtol=1e-10)


def test_one_local_step_contracts_as_gradient_descent():
  """Closed form 1: z_t - z* = (I - Gam K)^t (z_0 - z*)."""
  state, _ = processes.run(build(local_steps=1), DATASETS, 5)
  power = np.linalg.matrix_power(np.eye(11) - diagonal(ETA) @ LINEAR.K, 5)
  expected = LINEAR.solution + power @ (joined_start() - LINEAR.solution)
  np.testing.assert_allclose(joined(state), expected, rtol=1e-10)


# Clients that do not move: only the server does.
STILL = dict(
    outer_learning_rate=0.0,
    inner_learning_rate=0.0,
    linear_learning_rate=0.0,
    server_outer_learning_rate=0.02,
    server_inner_learning_rate=0.04,
    server_linear_learning_rate=0.03,
)


def test_steps_of_size_zero_add_up():
  """Closed form 2: with D = 0, tau steps equal one with tau Gam."""
  process = build(local_steps=4)
  state, _ = processes.run(process, DATASETS, 3, with_numbers(process, **STILL))
  matrix = np.eye(11) - 4 * diagonal((0.02, 0.04, 0.03)) @ LINEAR.K
  expected = LINEAR.solution + np.linalg.matrix_power(matrix, 3) @ (
      joined_start() - LINEAR.solution
  )
  np.testing.assert_allclose(joined(state), expected, rtol=1e-10)


def moved_from(process, z, **numbers):
  """How far an epoch moves (y, v, x) = z."""
  state = with_numbers(process, **numbers)
  state = state._replace(
      inner=z[:quadratic.DY],
      outer=z[2 * quadratic.DY:],
      method=state.method._replace(linear=z[quadratic.DY:2 * quadratic.DY]),
  )
  return np.linalg.norm(joined(process.next(state, DATASETS).state) - z)


def test_drift_moves_the_fixed_point():
  """Closed form 3: the fixed point solves sum_i S_i (K_i z - k_i) = 0."""
  tau, D = 4, diagonal(ETA)
  sums = [
      sum(np.linalg.matrix_power(np.eye(11) - K @ D, j) for j in range(tau))
      for K in LINEAR.matrices
  ]
  fixed = np.linalg.solve(
      sum(S @ K for S, K in zip(sums, LINEAR.matrices, strict=True)),
      sum(S @ k for S, k in zip(sums, LINEAR.vectors, strict=True)),
  )
  process = build(local_steps=tau)
  assert moved_from(process, fixed) < 1e-12
  assert moved_from(process, LINEAR.solution) > 1e-2
  # To first order in D, (tau - 1) / 2 K^-1 mean_i K_i D (K_i z* - k_i).
  drift = [
      K @ D @ (K @ LINEAR.solution - k)
      for K, k in zip(LINEAR.matrices, LINEAR.vectors, strict=True)
  ]
  first_order = (tau - 1) / 2 * np.linalg.solve(LINEAR.K, np.mean(drift, 0))
  error = fixed - LINEAR.solution
  cosine = first_order @ error / np.linalg.norm(first_order)
  assert cosine / np.linalg.norm(error) > 0.9


@pytest.mark.parametrize('method', ['simfbo', 'shrofbo'])
def test_unequal_steps_bias_simfbo_and_not_shrofbo(method):
  """Closed form 4: SimFBO goes to the root of sum tau_i G_i, ShroFBO to z*."""
  process = build(method, local_steps=unequal)
  taus = np.array([1.0, 2.0, 4.0])
  biased = np.linalg.solve(
      np.tensordot(taus, LINEAR.matrices, 1),
      np.tensordot(taus, LINEAR.vectors, 1),
  )
  points = [biased, LINEAR.solution]
  if method == 'shrofbo':
    points.reverse()
  assert moved_from(process, points[0], **STILL) < 1e-12
  assert moved_from(process, points[1], **STILL) > 1e-3


def test_divided_steps():
  """With eta / tau_i at the clients, every client counts once."""
  process = build(local_steps=unequal, divide_by_local_steps=True)
  state, _ = processes.run(process, DATASETS, 2)
  clients = later_methods.Clients(
      quadratic.build_problem(),
      DATASETS,
      fednest_tff.SimultaneousWork(local_steps=unequal),
  )
  expected = later_methods.sim_fbo(
      clients, start(), ETA, ETA, 2, coefficient=lambda k, tau: 1 / tau
  )
  assert_close(state, expected)


# Reductions to known methods.


@functools.cache
def minimax_problem():
  """f = x'B y + |x|^2 / 2 - |y|^2 / 2 over unequal clients."""

  def loss(x, y, batch):
    coupling = tf.reduce_mean(tf.einsum('i,nij,j->n', x, batch['B'], y))
    linear = tf.reduce_mean(tf.linalg.matvec(batch['b'], y))
    return coupling + linear + tf.reduce_sum(x**2) / 2 - tf.reduce_sum(y**2)

  spec = dict(
      B=tf.TensorSpec([3, 4], tf.float64), b=tf.TensorSpec([4], tf.float64)
  )
  return fednest_tff.minimax(
      loss,
      lambda seed: quadratic.init_outer(seed),
      lambda seed: quadratic.init_inner(seed),
      spec,
  )


def minimax_clients():
  rng = np.random.default_rng(0)
  sizes = 2, 3
  return [
      dict(B=rng.normal(size=(n, 3, 4)), b=rng.normal(size=(n, 4)))
      for n in sizes
  ]


@pytest.mark.parametrize('method', ['simfbo', 'shrofbo'])
def test_minimax_is_local_descent_ascent_with_two_sided_steps(method):
  """Local SGDA; normalised it is Fed-Norm-SGDA."""
  clients = minimax_clients()
  process = fednest_tff.build(
      minimax_problem(), method, outer_learning_rate=0.1,
      inner_learning_rate=0.2, server_outer_learning_rate=0.3,
      server_inner_learning_rate=0.1,
      local_steps=lambda examples: tf.shape(examples['B'])[0],
  )
  state, _ = processes.run(process, quadratic.to_datasets(clients), 2)
  x, y = START
  for _ in range(2):
    sums = []
    for client in clients:
      B, b, tau = client['B'].mean(0), client['b'].mean(0), len(client['B'])
      x_i, y_i, h_x, h_y = x, y, 0, 0
      for _ in range(tau):
        d_x, d_y = B @ y_i + x_i, B.T @ x_i + b - 2 * y_i
        h_x, h_y = h_x + d_x, h_y + d_y
        x_i, y_i = x_i - 0.1 * d_x, y_i + 0.2 * d_y
      sums.append((h_x, h_y, tau))
    if method == 'shrofbo':
      rho = np.mean([tau for *_, tau in sums])
      sums = [(rho * h / tau, rho * g / tau, tau) for h, g, tau in sums]
    x = x - 0.3 * np.mean([h for h, _, _ in sums], 0)
    y = y + 0.1 * np.mean([g for _, g, _ in sums], 0)
  np.testing.assert_allclose(state.outer, x, rtol=1e-10)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)
  assert state.method.linear == ()


@functools.cache
def _compositional():
  return fednest_tff.compositional(
      lambda y, batch: tf.reduce_mean((y - batch['b']) ** 2),
      lambda x, batch: tf.reduce_mean(tf.linalg.matvec(batch['B'], x), 0),
      lambda seed: quadratic.init_outer(seed),
      lambda seed: quadratic.init_inner(seed),
      dict(
          B=tf.TensorSpec([4, 3], tf.float64), b=tf.TensorSpec([4], tf.float64)
      ),
  )


def test_compositional_step_of_one_makes_v_exact():
  """H = I: after a step of 1, v = mean_i grad f_i(y)."""
  rng = np.random.default_rng(0)
  clients = [
      dict(B=rng.normal(size=(n, 4, 3)), b=rng.normal(size=(n, 4)))
      for n in (2, 3)
  ]
  process = fednest_tff.build(
      _compositional(), 'simfbo', outer_learning_rate=0.1,
      inner_learning_rate=0.2, linear_learning_rate=1.0,
  )
  state, _ = processes.run(process, quadratic.to_datasets(clients), 1)
  _, y = START
  b = np.mean([client['b'].mean(0) for client in clients], 0)
  # f is a mean over the entries of y, too.
  np.testing.assert_allclose(state.method.linear, (y - b) / 2, rtol=1e-10)


@functools.cache
def _single_level():
  return fednest_tff.single_level(
      lambda x, batch: tf.reduce_mean(
          (tf.linalg.matvec(batch['a'], x) - tf.cast(batch['b'], tf.float32))
          ** 2
      ),
      lambda seed: tf.ones([2]),
      SPEC,
  )


SINGLE = [
    dict(a=np.float32([[1, 2], [0.5, 1]]), b=np.int64([0, 1])),
    dict(a=np.float32([[1, -1]]), b=np.int64([2])),
]


@pytest.mark.parametrize('method', ['simfbo', 'shrofbo'])
def test_single_level_is_fed_avg_or_fed_nova(method):
  """FedAvg with a server step; normalised it is FedNova."""
  process = fednest_tff.build(
      _single_level(), method, outer_learning_rate=0.05,
      server_outer_learning_rate=0.1,
      local_steps=lambda examples: tf.shape(examples['a'])[0],
  )
  state, metrics = processes.run(process, quadratic.to_datasets(SINGLE), 1)
  sums = []
  for client in SINGLE:
    x_i, h = np.ones(2), np.zeros(2)
    for _ in range(len(client['a'])):
      d = 2 * client['a'].T @ (client['a'] @ x_i - client['b'])
      d /= len(client['a'])
      h, x_i = h + d, x_i - 0.05 * d
    sums.append(h / len(client['a']) if method == 'shrofbo' else h)
  rho = 1.5 if method == 'shrofbo' else 1.0  # tau_i are 2 and 1.
  expected = 1 - 0.1 * rho * np.mean(sums, 0)
  np.testing.assert_allclose(state.outer, expected, rtol=1e-5)
  assert 'inner_loss' not in metrics and state.inner == ()


def test_default_server_steps_give_the_mean_of_the_clients():
  """On one level, FedAvg itself, by TFF's own weighted mean of ends."""
  process = fednest_tff.build(
      _single_level(), 'simfbo', outer_learning_rate=0.05, local_steps=3,
      client_weighting='num_examples',
  )
  state, _ = processes.run(process, quadratic.to_datasets(SINGLE), 1)
  ends = []
  for client in SINGLE:
    x_i = np.ones(2)
    for _ in range(3):
      d = 2 * client['a'].T @ (client['a'] @ x_i - client['b'])
      x_i = x_i - 0.05 * d / len(client['a'])
    ends.append(x_i)
  expected = (2 * ends[0] + ends[1]) / 3
  np.testing.assert_allclose(state.outer, expected, rtol=1e-5)


def test_server_optimizers_take_the_mean_direction_as_gradient():
  momentum = tff.learning.optimizers.build_sgdm(0.1, momentum=0.5)
  plain = tff.learning.optimizers.build_sgdm(0.1)
  # TFF's optimizers are for float32.
  process = fednest_tff.build(
      quadratic.build_problem(tf.float32),
      'simfbo',
      **RATES,
      outer_optimizer=momentum,
      inner_optimizer=plain,
      linear_optimizer=plain,
  )
  datasets = quadratic.to_datasets(
      quadratic.make_clients(examples=(2, 3, 5), seed=3, dtype=np.float32)
  )
  state, _ = processes.run(process, datasets, 2)
  first = process.initialize()
  z = np.concatenate([first.inner, first.method.linear, first.outer])
  velocity = np.zeros(quadratic.DX)
  for _ in range(2):
    h = LINEAR.K @ z - LINEAR.k
    velocity = 0.5 * velocity + h[-quadratic.DX:]
    z = z - 0.1 * np.concatenate([h[:-quadratic.DX], velocity])
  np.testing.assert_allclose(joined(state), z, rtol=1e-4, atol=1e-6)
  hparams = process.get_hparams(state)
  assert hparams['outer_optimizer']['learning_rate'] == np.float32(0.1)
  hparams['outer_optimizer']['learning_rate'] = np.float32(0.0)
  still = process.next(process.set_hparams(state, hparams), datasets).state
  np.testing.assert_array_equal(still.outer, state.outer)


def test_cohorts_average_to_the_full_step():
  """Closed form 9: over all cohorts of two, the mean step is the full one."""
  process = build(local_steps=1)
  start = process.initialize()
  pairs = itertools.combinations(DATASETS, 2)
  ends = [joined(process.next(start, list(pair)).state) for pair in pairs]
  full = joined(process.next(start, DATASETS).state)
  np.testing.assert_allclose(np.mean(ends, 0), full, rtol=1e-12)
  assert np.ptp(ends, axis=0).max() > 1e-3


def test_a_factory_averages_as_the_plain_mean_does():
  options = dict(
      local_steps=unequal, batch_size=2, client_weighting='num_examples'
  )
  plain, _ = processes.run(build(**options), DATASETS, 1)
  factory, _ = processes.run(
      build(**options, aggregator=tff.aggregators.MeanFactory()), DATASETS, 1
  )
  assert_close(factory, variables(plain), rtol=1e-12)


def test_clipping_bounds_what_is_sent():
  """One factory clips x, y and v together."""
  process = build(
      local_steps=1,
      aggregator=tff.aggregators.clipping_factory(
          0.5, tff.aggregators.MeanFactory()
      ),
  )
  before = with_numbers(
      process, server_outer_learning_rate=1.0, server_inner_learning_rate=1.0,
      server_linear_learning_rate=1.0,
  )
  state = process.next(before, DATASETS[:1]).state
  moved = np.linalg.norm(joined(state) - joined_start())
  assert moved == pytest.approx(0.5, rel=1e-5)


def test_a_step_size_that_is_no_number_is_noticed():
  process = build()
  state = with_numbers(process, outer_learning_rate=np.nan)
  with pytest.raises(Exception, match="SimFBO: the server's new point is not"):
    process.next(state, DATASETS)


def test_a_step_size_of_zero_freezes_v():
  """The ablation without the indirect gradient: x follows grad_x f alone."""
  process = build(local_steps=1)
  before = with_numbers(process, linear_learning_rate=0.0)
  state, _ = processes.run(process, DATASETS, 3, before)
  np.testing.assert_array_equal(state.method.linear, np.zeros(quadratic.DY))


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(outer_learning_rate=-1.0), '`outer_learning_rate` must be'),
        (dict(linear_learning_rate=None), '`linear_learning_rate` is missing'),
        (dict(radius=0.0), '`radius` must be positive'),
        (dict(server_momentum=1.0), '`server_momentum` must be less than 1'),
        (dict(server_momentum=-0.1), '`server_momentum` must be positive'),
        (
            dict(
                server_momentum=0.5,
                inner_optimizer=tff.learning.optimizers.build_sgdm(0.1),
            ),
            'Give `server_momentum` or `inner_optimizer`',
        ),
        (dict(local_steps=0), '`local_steps` must be a positive integer'),
        (dict(local_steps=1, local_epochs=1), 'Give `local_steps` or'),
        (dict(outer_optimizer=3), '`outer_optimizer` must be one of'),
        (
            dict(
                outer_optimizer=tff.learning.optimizers.build_sgdm(0.1),
                server_outer_learning_rate=0.1,
            ),
            'Give `server_outer_learning_rate` or `outer_optimizer`',
        ),
        (dict(inner_rounds=2), '`inner_rounds` is no option of simfbo'),
    ],
)
def test_wrong_options_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    fednest_tff.build(
        quadratic.build_problem(), 'simfbo', **(RATES | options)
    )
