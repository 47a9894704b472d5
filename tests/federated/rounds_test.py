"""Rounds by themselves, and an epoch of several in one computation."""

import collections
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.federated import rounds
from fednest_tff.federated.types import at_clients, at_server
from tests.federated.aggregation_test import CountingFactory
from tests.helpers import quadratic

EXAMPLES = (1, 2, 3)
CLIENTS = quadratic.make_clients(examples=EXAMPLES)
DATASETS = quadratic.to_datasets(CLIENTS)
FORM = quadratic.ClosedForm(CLIENTS, EXAMPLES)
# Bytes of x, y and a seed.
X, Y, SEED = 8 * quadratic.DX, 8 * quadratic.DY, 16
RNG = np.random.default_rng(0)
POINT = rounds.PointMessage(
    RNG.normal(size=quadratic.DX), RNG.normal(size=quadratic.DY),
    np.array([3, 4]),
)  # fmt: skip


class LongMessage(NamedTuple):
  """A point and something that may be empty."""

  outer: Any
  inner: Any
  extra: Any


@pytest.fixture(scope='module')
def types():
  return fednest_tff.ProblemTypes(
      quadratic.build_problem(), client_weighting='num_examples'
  )


@pytest.fixture(scope='module')
def client_work(types):
  """A_i y and the number of examples, from the features."""

  @tff.tensorflow.computation(
      rounds.PointMessage(types.outer, types.inner, types.seed),
      types.features,
      types.client,
  )
  def client_work(message, features, client):
    matrix = tf.reduce_mean(features.inner['A'], axis=0)
    return tf.linalg.matvec(matrix, message.inner), collections.OrderedDict(
        count=tf.cast(client.num_examples, tf.float64)
    )

  return client_work


@pytest.fixture(scope='module')
def without_features(types):
  """x + P_i x, with a weight of its own and without metrics."""

  @tff.tensorflow.computation(
      LongMessage(types.outer, types.inner, ()), types.client
  )
  def client_work(message, client):
    matrix = tf.reduce_mean(client.outer['P'], axis=0)
    value = message.outer + tf.linalg.matvec(matrix, message.outer)
    weight = tf.cast(client.num_examples, tf.float64) ** 2
    return value, collections.OrderedDict(), weight

  return client_work


# ---- One round --------------------------------------------------------------


def test_what_a_round_knows(types, client_work, without_features):
  first = rounds.Round('first', types, client_work)
  assert first.takes_features
  assert first.aggregation.name == 'first'
  point = rounds.PointMessage(types.outer, types.inner, types.seed)
  first.message_type.check_equivalent_to(tff.to_type(point))
  second = rounds.Round(
      'second', types, without_features, aggregation=first.aggregation
  )
  assert not second.takes_features
  assert second.aggregation is first.aggregation


def test_a_round_is_a_weighted_mean(types, client_work):
  computation = rounds.build_round(
      types, rounds.Round('first', types, client_work)
  )
  output = computation((), POINT, DATASETS)
  np.testing.assert_allclose(output.value, FORM.A @ POINT.inner, rtol=1e-12)
  mean_count = np.average(EXAMPLES, weights=EXAMPLES)
  np.testing.assert_allclose(output.metrics['count'], mean_count, rtol=1e-12)
  assert output.state == ()
  assert not output.measurements
  cost = fednest_tff.communication_cost(computation)
  # The point down; the value, one metric and the weight up.
  assert cost[:3] == (1, Y + 8 + 8, X + Y + SEED)


def test_clients_may_choose_their_weight(types, without_features):
  computation = rounds.build_round(
      types, rounds.Round('second', types, without_features)
  )
  message = LongMessage(POINT.outer, POINT.inner, ())
  output = computation((), message, DATASETS)
  matrix = np.average(
      [form.P for form in FORM.locals], axis=0, weights=np.square(EXAMPLES)
  )
  expected = POINT.outer + matrix @ POINT.outer
  np.testing.assert_allclose(output.value, expected, rtol=1e-12)
  assert not output.metrics


def test_a_factory_has_its_state_and_its_measurements(types, client_work):
  round_ = rounds.Round(
      'first', types, client_work, 'some_aggregator', CountingFactory()
  )
  computation = rounds.build_round(types, round_)
  output = computation(np.int32(4), POINT, DATASETS)
  assert output.state == 5
  assert output.measurements == {'some_aggregator': 5}
  np.testing.assert_allclose(output.value, FORM.A @ POINT.inner, rtol=1e-12)


# ---- An epoch ---------------------------------------------------------------


def _trace(types, epoch, aggregators=None):
  """`epoch(do, x, y, seed)` as a computation, and its executor."""
  executors = []

  @tff.federated_computation(
      at_server(types.outer), at_server(types.inner), at_server(types.seed),
      at_clients(types.dataset),
  )
  def computation(x, y, seed, datasets):
    states = {
        name: tff.federated_value(state, tff.SERVER)
        for name, state in (aggregators or {}).items()
    }
    do = rounds.InOneComputation(types, states, datasets)
    executors.append(do)
    result = epoch(do, x, y, seed)
    return result, do.aggregators, do.metrics

  return computation, executors[-1]


def test_what_was_sent_is_not_sent_again(types, client_work):
  round_ = rounds.Round(
      'twice', types, client_work, 'some_aggregator', CountingFactory()
  )

  def epoch(do, x, y, seed):
    first = do.round(round_, rounds.PointMessage(x, y, seed))
    do.measure(**first.metrics)
    again = rounds.PointMessage(x, first.value, seed)
    return do.round(round_, again, chance=0.25).value

  computation, do = _trace(types, epoch, dict(twice=7))
  assert [sent.round for sent in do.sent_rounds] == [round_] * 2
  assert [sent.chance for sent in do.sent_rounds] == [1.0, 0.25]
  sent = [[str(t) for t in found.sent] for found in do.sent_rounds]
  names = [str(t) for t in (types.outer, types.inner, types.seed)]
  assert sent == [names, names[1:2]]
  cost = fednest_tff.communication_cost(computation)
  assert (cost.rounds, cost.bytes_down) == (2, X + Y + SEED + Y)

  value, aggregators, metrics = computation(*POINT, DATASETS)
  expected = FORM.A @ (FORM.A @ POINT.inner)
  np.testing.assert_allclose(value, expected, rtol=1e-12)
  # Its state goes from one round to the next, and the last one measured.
  assert aggregators == dict(twice=9)
  assert metrics['some_aggregator'] == 9
  np.testing.assert_allclose(
      metrics['count'], np.average(EXAMPLES, weights=EXAMPLES), rtol=1e-12
  )


def test_nothing_is_sent_for_an_empty_field(types, without_features):
  round_ = rounds.Round('second', types, without_features)
  _, do = _trace(
      types,
      lambda do, x, y, seed: do.round(round_, LongMessage(x, y, ())).value,
      dict(second=()),
  )
  (only,) = do.sent_rounds
  assert len(only.sent) == 2


def test_features_are_computed_once_for_each_x(
    types, client_work, without_features, monkeypatch
):
  points = []
  original = types.features_at_clients

  def noting(x, clients):
    points.append(x)
    return original(x, clients)

  monkeypatch.setattr(types, 'features_at_clients', noting)
  first = rounds.Round('first', types, client_work)
  second = rounds.Round('second', types, without_features)

  def epoch(do, x, y, seed):
    y = do.round(first, rounds.PointMessage(x, y, seed)).value
    y = do.round(first, rounds.PointMessage(x, y, seed)).value
    assert len(points) == 1
    x = do.round(second, LongMessage(x, y, ())).value
    assert len(points) == 1
    return do.round(first, rounds.PointMessage(x, y, seed)).value

  _trace(types, epoch, dict(first=(), second=()))
  assert len(points) == 2


def test_computations_at_the_server(types):
  add = tff.tensorflow.computation(
      lambda a, b: a[0] + tf.reduce_sum(b), [types.outer, types.inner]
  )
  double = tff.tensorflow.computation(lambda a: 2 * a, types.inner)

  def epoch(do, x, y, seed):
    del seed
    doubled = do.server(double, y)
    assert not do.is_zero(doubled)  # While it is traced, nothing is known.
    do.measure(sum=do.server(add, x, doubled))
    do.measure(doubled=doubled)
    return x

  computation, do = _trace(types, epoch)
  assert not do.sent_rounds
  _, _, metrics = computation(*POINT, DATASETS)
  assert list(metrics) == ['sum', 'doubled']
  np.testing.assert_allclose(metrics['doubled'], 2 * POINT.inner)
  expected = POINT.outer[0] + 2 * POINT.inner.sum()
  np.testing.assert_allclose(metrics['sum'], expected, rtol=1e-12)
