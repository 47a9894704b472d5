"""Clients of a quadratic problem, and points, for tests of local work."""

import functools

import numpy as np
import tensorflow as tf

import fednest_tff
from fednest_tff.local import client as client_lib
from tests.helpers import quadratic

CLIENTS = quadratic.make_clients(seed=3)
FORM = quadratic.ClosedForm(CLIENTS)
PROBLEM = quadratic.build_problem()
_RNG = np.random.default_rng(4)
X, Y, V = (
    _RNG.normal(size=dim) for dim in (quadratic.DX, quadratic.DY, quadratic.DY)
)


def seed_pair(*numbers):
  return tf.constant(numbers or (7, 8), tf.int64)


def double(value):
  return tf.constant(value, tf.float64)


def uniform(examples):
  """The weighting of equal clients."""
  del examples
  return tf.constant(1.0)


def read_client(index=2, problem=PROBLEM):
  dataset = quadratic.to_datasets(CLIENTS)[index]
  return client_lib.from_dataset(problem, uniform, dataset)


def local_form(index=2):
  return quadratic.local_form(CLIENTS[index])


@functools.cache
def minimax_problem():
  """f of the quadratic problem, as a minimax problem."""
  return fednest_tff.minimax(
      quadratic.outer_loss,
      quadratic.init_outer,
      quadratic.init_inner,
      quadratic.element_spec(),
  )


def numpy_losses(client, x, y):
  """f_i and g_i, example by example."""
  outer, inner = [], []
  for j in range(len(client['A'])):
    e = {name: value[j] for name, value in client.items()}
    dy, dx = y - e['c'], x - e['e']
    outer.append(
        dy @ e['M'] @ dy / 2 + dx @ e['P'] @ dx / 2 + x @ e['Q'] @ y
    )
    inner.append(y @ e['A'] @ y / 2 - y @ (e['B'] @ x + e['b']))
  return np.mean(outer), np.mean(inner)


def two_and_rest(examples):
  """A split: two inner examples, the rest outer."""
  return (
      tf.nest.map_structure(lambda t: t[:2], examples),
      tf.nest.map_structure(lambda t: t[2:], examples),
  )


def assert_close(actual, expected, tolerance=1e-10):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
