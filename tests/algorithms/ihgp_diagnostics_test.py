"""What FedIHGP measures of H and of its own error, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff

Y, E = np.float32([1.0, 3.0]), np.float32([-2.0, 1.0])
B = Y - E  # grad_y f at the start, and up to 1e-6 after the inner step.
L = 5.0


def _measure(hessian, **options):
  """The metrics of an epoch with g = y'Ay/2 - x'y and f = |y - e|^2 / 2."""
  hessian = np.float32(hessian)
  problem = fednest_tff.bilevel(
      lambda x, y, batch: tf.reduce_sum((y - E) ** 2) / 2,
      lambda x, y, batch: tf.reduce_sum(y * tf.linalg.matvec(hessian, y)) / 2
      - tf.reduce_sum(x * y),
      lambda seed: tf.zeros([2]),
      lambda seed: tf.constant(Y),
      tf.TensorSpec([], tf.float32),
  )
  process = fednest_tff.build(
      problem, 'fednest_sgd', inner_learning_rate=1e-6,
      outer_learning_rate=0.1, **options,
  )
  clients = [tf.data.Dataset.from_tensor_slices(np.zeros(2, np.float32))]
  return process.next(process.initialize(), clients).metrics


def _quotient(hessian, v):
  return v @ hessian @ v / (v @ v)


def test_truncated():
  hessian = np.array([[1.0, 0.5], [0.5, 4.0]])
  metrics = _measure(
      hessian, ihgp='truncated', neumann_terms=3, smoothness=L
  )
  # Two products: of b and of (I - A/l) b.
  factor = np.eye(2) - hessian / L
  seen = [_quotient(hessian, B), _quotient(hessian, factor @ B)]
  sum_of_two = (B + factor @ B) / L
  left = np.linalg.norm(B - hessian @ sum_of_two) / np.linalg.norm(B)
  np.testing.assert_allclose(metrics['ihgp_residual'], left, rtol=1e-4)
  np.testing.assert_allclose(
      metrics['ihgp_largest_curvature'], max(seen), rtol=1e-4
  )
  np.testing.assert_allclose(
      metrics['ihgp_smallest_curvature'], min(seen), rtol=1e-4
  )
  assert metrics['smoothness'] == L


def test_stochastic():
  hessian = np.diag([1.0, 4.0])
  metrics = _measure(
      hessian, ihgp='stochastic', neumann_terms=4, smoothness=L
  )
  factor = np.eye(2) - hessian / L
  powers = [
      np.linalg.norm(np.linalg.matrix_power(factor, n) @ B)
      / np.linalg.norm(B)
      for n in range(4)
  ]
  # N' is one of 0, ..., 3.
  assert np.abs(np.array(powers) - metrics['ihgp_residual']).min() < 1e-4


def test_conjugate_gradient():
  metrics = _measure(np.diag([1.0, 4.0]), ihgp='cg', neumann_terms=2)
  step = (B @ B) / (B @ np.diag([1.0, 4.0]) @ B)
  left = np.linalg.norm(B - step * np.diag([1.0, 4.0]) @ B) / np.linalg.norm(B)
  np.testing.assert_allclose(metrics['ihgp_residual'], left, rtol=1e-4)
  assert metrics['ihgp_smallest_curvature'] > 0
  assert 'smoothness' not in metrics


def test_negative_curvature_is_seen():
  metrics = _measure(np.diag([-3.0, 1.0]), ihgp='cg', neumann_terms=2)
  np.testing.assert_allclose(
      metrics['ihgp_smallest_curvature'],
      _quotient(np.diag([-3.0, 1.0]), B),
      rtol=1e-4,
  )
  assert metrics['ihgp_smallest_curvature'] < 0
  # p stays 0, and so nothing is solved.
  np.testing.assert_allclose(metrics['ihgp_residual'], 1, rtol=1e-6)


@pytest.mark.parametrize('kind', ['truncated', 'stochastic'])
def test_one_term_measures_nothing(kind):
  metrics = _measure(np.eye(2), ihgp=kind, neumann_terms=1, smoothness=L)
  assert not [name for name in metrics if name.startswith('ihgp')]
