"""What all methods since FedNest have in common: aggregators, and resuming.

Everything is in float32, because TFF's differential privacy knows no other
type; what is expected comes from NumPy.
"""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff import simulation
from tests.helpers import (
    later_methods,
    personal,
    quadratic,
    reference,
    resuming,
)

METHODS = [m for m in fednest_tff.METHODS if m not in reference.METHODS]
CLIENTS = quadratic.make_clients(num_clients=5, dtype=np.float32)
DATASETS = quadratic.to_datasets(CLIENTS)
COHORT = DATASETS[:3]
# A client whose messages are far larger than those of the others.
BROKEN = quadratic.to_datasets(
    [quadratic.map_arrays(CLIENTS[0], lambda value: 1e4 * value)]
)
LARGEST = 100.0  # Between the others' messages and those of that client.
ETA = 0.05, 0.1, 0.15
STEPS = 3  # Corrected steps begin along the common direction; the third is far.
TERMS, L = 2, 4.0
# As far as a method has them. Minibatches are drawn.
OPTIONS = dict(
    outer_learning_rate=ETA[0],
    inner_learning_rate=ETA[1],
    linear_learning_rate=ETA[2],
    local_steps=STEPS,
    inner_local_steps=STEPS,
    outer_local_steps=STEPS,
    batch_size=1,
    inner_rounds=TERMS,
    inner_method='lfedinn',
    ihgp='stochastic',
    neumann_terms=TERMS,
    smoothness=L,
)


@functools.cache
def _problem(method):
  kind = personal if method == 'personal' else quadratic
  return kind.build_problem(tf.float32)


def _build(method, factory):
  """A process with `factory` for every message."""
  known = fednest_tff.get_method(method).options
  options = {name: v for name, v in OPTIONS.items() if name in known}
  if method == 'personal':
    # More steps on x would overflow; and N' would have to be drawn.
    options |= dict(outer_local_steps=1, ihgp='truncated')
  options |= {name: factory for name in known if name.endswith('aggregator')}
  return fednest_tff.build(_problem(method), method, **options)


def _start():
  return [
      init(0, tf.float32).numpy()
      for init in (quadratic.init_outer, quadratic.init_inner)
  ]


def _personal():
  x, start = _start()
  settings = reference.Settings(
      ETA[0], ETA[1], 0, STEPS, 1, TERMS, smoothness=L
  )
  seed = tf.constant([0, 0], tf.int64)
  x = personal.run(
      CLIENTS[:3], np.ones(3), x, start, settings,
      lambda client, epoch: personal.minibatches(
          client, 1, settings, personal.client_seed(client, seed, epoch)
      ),
      1,
  )
  return x, start


@functools.cache
def _expected(method):
  """x, y and the method's own variables after an epoch with plain means."""
  if method == 'personal':
    return _personal()
  clients = later_methods.Clients(
      _problem(method), COHORT,
      fednest_tff.SimultaneousWork(local_steps=STEPS, batch_size=1),
  )
  x, y = _start()
  if method in ('aggitd', 'fedmbo'):
    settings = later_methods.Settings(
        ETA[0], ETA[1], TERMS, L, lambda _: STEPS, 1, None, TERMS, chains=2
    )
    if method == 'fedmbo':
      return later_methods.fed_mbo(clients, x, y, settings, 0)
    return later_methods.agg_itd(clients, x, y, settings, 0, 'lfedinn')
  z = x, y, np.zeros_like(y)
  if method == 'fedmsa':
    return later_methods.fed_msa(clients, z, ETA, 1)
  if method == 'fedbioacc':
    # Its last variable tells that there is a momentum.
    return *later_methods.fed_bio_acc(clients, z, ETA, 1, 1, 1, 1), 1
  if method == 'penalty':
    return later_methods.sim_fbo(
        clients, (x, y, y), ETA, ETA, 1,
        direction=functools.partial(later_methods.penalty_direction, lam=10.0),
    )
  return later_methods.sim_fbo(
      clients, z, ETA, ETA, 1, normalize=method == 'shrofbo'
  )


def _variables(state):
  return tf.nest.flatten((state.outer, state.inner, state.method))


def _distance(found, expected):
  pairs = zip(found, expected, strict=True)
  return np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))


def _with_noise(state, deviation):
  """`state` with noise in all private sums."""
  def change(aggregator):
    private = aggregator['inner_agg']
    query = private.query_state
    sums = query.numerator_state._replace(stddev=np.float32(deviation))
    return collections.OrderedDict(
        aggregator,
        inner_agg=private._replace(
            query_state=query._replace(numerator_state=sums)
        ),
    )

  return state._replace(
      aggregators={k: change(v) for k, v in state.aggregators.items()}
  )


@functools.cache
def _private_and_robust(method):
  """Zeroing, then the clipped and noisy sum of differential privacy.

  Without noise and with a large clipping norm, that is the plain mean of the
  clients whose messages are not too large: the sum is divided by three.
  """
  private = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
      noise_multiplier=0.0, clients_per_round=3, clip=1e6
  )
  return _build(method, tff.aggregators.zeroing_factory(LARGEST, private))


@pytest.mark.parametrize('method', METHODS)
def test_private_and_robust(method):
  process = _private_and_robust(method)
  start = process.initialize()
  found = _variables(process.next(start, COHORT + BROKEN).state)
  expected = _expected(method)
  for part, value in zip(found, expected, strict=True):
    np.testing.assert_allclose(part, value, rtol=1e-4, atol=1e-5)
  noisy = process.next(_with_noise(start, 0.3), COHORT + BROKEN).state
  assert 1e-3 < _distance(_variables(noisy), expected) < 10


@pytest.mark.parametrize('method', ['simfbo', 'fedbioacc'])
def test_compressed(method):
  """Eight bits: near the plain mean, but not equal to it.

  A message is a point, or a pair of points; the other methods send no others.
  """
  factory = tff.aggregators.MeanFactory(
      tff.aggregators.EncodedSumFactory.quantize_above_threshold(
          quantization_bits=8, threshold=0
      )
  )
  process = _build(method, factory)
  start = process.initialize()
  found = _variables(process.next(start, COHORT).state)
  expected = _expected(method)
  error = _distance(found, expected) / _distance(_variables(start), expected)
  assert 1e-5 < error < 0.02


@pytest.mark.parametrize('method', METHODS)
def test_stopped_runs_go_on(method, tmp_path):
  """With other clients in every epoch."""
  process = _private_and_robust(method)
  trial = simulation.Trial(
      lambda _: process,
      lambda epoch: [DATASETS[(epoch + k) % 5] for k in range(4)],
      lambda weights: {'size': float(np.linalg.norm(weights.outer))},
      4,
  )
  resuming.assert_goes_on(trial, method, tmp_path)
