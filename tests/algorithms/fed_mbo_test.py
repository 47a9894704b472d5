"""FedMBO and FedIHGP's independent chains."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from fednest_tff.local import inverse_hessian, sampling
from fednest_tff.local.sampling import Purpose
from tests.helpers import later_methods, quadratic, reference

CLIENTS = quadratic.make_clients(examples=(2, 3, 5), seed=3)
DATASETS = quadratic.to_datasets(CLIENTS)
FORM = quadratic.ClosedForm(CLIENTS)
T, N, S, L = 2, 4, 3, 4.0


SAMPLES = dict(batch_size=1, gradient_batch_size=1)


def count(examples):
  return tf.shape(examples['A'])[0]


@functools.cache
def build():
  """tau_i and the weights are the clients' numbers of examples."""
  return fednest_tff.build(
      quadratic.build_problem(split=0.5), 'fedmbo', inner_rounds=T,
      inner_learning_rate=0.15, outer_learning_rate=0.1, neumann_terms=N,
      smoothness=L, chains=S, outer_local_steps=count,
      client_weighting='num_examples', **SAMPLES,
  )


def stops(epoch):
  """N' of every chain of an epoch."""
  seed = sampling.fold_in(tf.constant([0, 0], tf.int64), epoch)
  seed = sampling.fold_in(sampling.fold_in(seed, T), Purpose.NEUMANN_STOP)
  return [
      later_methods.stop(inverse_hessian.chain_seed(seed, k), N)
      for k in range(S)
  ]


def test_epochs_equal_numpy():
  """Minibatches, unequal tau_i and weights; a few N' of each chain."""
  process = build()
  clients = later_methods.Clients(
      quadratic.build_problem(split=0.5), DATASETS, weighting=count
  )
  settings = later_methods.Settings(
      alpha=0.1, beta=0.15, inner_rounds=T, smoothness=L, tau=count,
      neumann_terms=N, chains=S, **SAMPLES,
  )
  state = process.initialize()
  x, y = state.outer, state.inner
  for epoch in range(3):
    state = process.next(state, DATASETS).state
    x, y = later_methods.fed_mbo(clients, x, y, settings, epoch)
    np.testing.assert_allclose(state.outer, x, rtol=1e-10)
    np.testing.assert_allclose(state.inner, y, rtol=1e-10)
  # Chains differ in N', and so do epochs.
  found = [stops(epoch) for epoch in range(3)]
  assert len(set(map(tuple, found))) > 1
  assert any(len(set(numbers)) > 1 for numbers in found)


def test_rounds_and_bytes():
  cost = fednest_tff.communication_cost(build())
  assert cost.rounds == T + N + 2
  one = fednest_tff.communication_cost(
      fednest_tff.build(
          quadratic.build_problem(), 'fedmbo', inner_rounds=T,
          inner_learning_rate=0.15, outer_learning_rate=0.1, neumann_terms=N,
          smoothness=L, chains=1,
      )
  )
  # The N rounds of FedIHGP carry S vectors of y's size in place of one.
  assert cost.bytes_up - one.bytes_up == N * (S - 1) * quadratic.DY * 8
  # A round is spared only if all chains have stopped.
  spared = sum((n / N) ** S for n in range(1, N))
  assert cost.expected_rounds == pytest.approx(cost.rounds - spared)


def test_one_chain_takes_the_rounds_of_fed_ihgp():
  """T FedInn calls of two rounds, N of FedIHGP at most, and FedOut's two."""
  one = fednest_tff.build(
      quadratic.build_problem(), 'fednest', inner_learning_rate=0.15,
      outer_learning_rate=0.1, neumann_terms=N, smoothness=L, chains=1,
  )
  assert fednest_tff.communication_cost(one).rounds == 2 + N + 2


def _chain_process(chains, **options):
  return fednest_tff.build_fed_ihgp(
      quadratic.build_problem(),
      solver=fednest_tff.FederatedInverseHessian(
          terms=N, smoothness=L, chains=chains, **options
      ),
  )


def _samples(process, count):
  """p of `count` independent runs at the initial point."""
  found = []
  start = process.initialize()
  for k in range(count):
    state = start._replace(seed=np.int64([k, 7]))
    for _ in range(N):
      state = process.next(state, DATASETS).state
    found.append(state.method.solver.p)
  return np.array(found)


@pytest.mark.usefixtures('compiled')
def test_variance_falls_with_the_number_of_chains():
  """Against the exact variance of one chain, over the N equal chances."""
  b = FORM.gradient_in_inner(
      quadratic.init_outer(0).numpy(), quadratic.init_inner(0).numpy()
  )
  step = np.eye(quadratic.DY) - FORM.A / L
  values = np.array(
      [N / L * np.linalg.matrix_power(step, n) @ b for n in range(N)]
  )
  exact = values.var(0).sum()
  mean = reference.neumann(FORM.A, b, L, N)
  np.testing.assert_allclose(values.mean(0), mean, rtol=1e-10)
  count = 150
  found = _samples(_chain_process(4), count)
  variance = found.var(0, ddof=1).sum()
  # The variance of a sample variance is about 2 / count of its square.
  assert variance == pytest.approx(exact / 4, rel=4 * np.sqrt(2 / count))
  error = np.linalg.norm(found.mean(0) - mean)
  assert error < 4 * np.sqrt(exact / 4 / count)


def test_every_chain_has_its_own_cohorts():
  """With sub-cohorts, the server divides by the chains' shares.

  N = 1: p = (1/l) mean over S_0 of grad_y f_i, for each chain a mean over a
  subset of the clients; p is the mean of two such means.
  """
  process = fednest_tff.build_fed_ihgp(
      quadratic.build_problem(),
      solver=fednest_tff.FederatedInverseHessian(
          terms=1, smoothness=L, chains=2, participation=0.5
      ),
  )
  start = process.initialize()
  x, y = start.outer, start.inner
  gradients = [c.gradient_in_inner(x, y) for c in FORM.locals]
  means = {}
  for mask in range(1, 8):
    chosen = [g for k, g in enumerate(gradients) if mask >> k & 1]
    means[mask] = np.mean(chosen, 0) / L
  seen, apart = set(), 0
  for k in range(12):
    state = process.next(start._replace(seed=np.int64([k, 7])), DATASETS).state
    p = state.method.solver.p
    fits = [
        (one, other)
        for one in means
        for other in means
        if one <= other
        and np.allclose((means[one] + means[other]) / 2, p, rtol=1e-9)
    ]
    assert fits, k
    seen |= set(fits)
    # Two subsets may have the mean of one: only where no subset alone fits do
    # the chains certainly differ.
    apart += all(one != other for one, other in fits)
  assert apart > 0 and len(seen) > 3


def test_chains_must_be_a_count():
  with pytest.raises(ValueError, match='`chains` must be a positive integer'):
    _chain_process(0)
