"""Minimax and compositional problems against NumPy and closed forms."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff
from tests.helpers import quadratic, reference
from tests.helpers.processes import build, run, start_with
from tests.helpers.saddle import DIM, Saddle

SADDLE_SETTINGS = reference.Settings(
    alpha=0.1, beta=0.2, inner_rounds=2, inner_steps=3, outer_steps=2,
    neumann_terms=1, smoothness=1.0, implicit=False,
)


@functools.cache
def _saddle_problem():
  return Saddle().problem()


@functools.cache
def _saddle_process(method):
  return build(_saddle_problem(), method, SADDLE_SETTINGS)


@pytest.mark.parametrize('method', reference.METHODS)
def test_minimax_epochs_equal_numpy(method):
  case = Saddle()
  state, _ = run(_saddle_process(method), case.datasets, 2)
  x, y = reference.run(
      method, case.form, np.ones(DIM), np.ones(DIM), SADDLE_SETTINGS, 2
  )
  np.testing.assert_allclose(state.outer, x, rtol=1e-10)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)


def test_fednest_finds_the_saddle_point_and_fedavg_s_does_not():
  case = Saddle()
  assert np.linalg.norm(case.x) > 0.05
  found = {}
  for method, epochs in (('fednest', 10), ('fedavg_s', 40)):
    process = _saddle_process(method)
    # Steps with which few epochs do.
    start = start_with(
        process, outer_learning_rate=0.3, inner_learning_rate=0.4
    )
    found[method], metrics = run(process, case.datasets, epochs, start)
    # They stand still, wherever they are.
    assert metrics['outer_update_norm'] < 1e-6, method
  np.testing.assert_allclose(found['fednest'].outer, case.x, atol=1e-6)
  np.testing.assert_allclose(found['fednest'].inner, case.y, atol=1e-6)
  assert np.linalg.norm(found['fedavg_s'].outer - case.x) > 1e-2


def test_centred_saddle_problem_has_its_solution_at_zero():
  case = Saddle(centred=True)
  np.testing.assert_allclose(case.x, 0, atol=1e-12)
  np.testing.assert_allclose(case.y, 0, atol=1e-12)


class Composition:
  """min_x mean_i f_i(mean_j r_j(x)), r = R x + s, f = 1/2 (y-c)'M(y-c)."""

  def __init__(self, num_clients=3, dim_y=4, seed=0):
    rng = np.random.default_rng(seed)
    self.dim_y = dim_y
    shape = (num_clients, 2)
    data = collections.OrderedDict(
        R=np.eye(dim_y, DIM) + 0.3 * rng.normal(size=(*shape, dim_y, DIM)),
        s=rng.normal(size=(*shape, dim_y)),
        m=1 + rng.uniform(size=(*shape, dim_y)),  # M is diagonal.
        c=rng.normal(size=(*shape, dim_y)),
    )
    self.datasets = [
        tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict((k, v[i]) for k, v in data.items())
        )
        for i in range(num_clients)
    ]
    means = {k: v.mean(axis=1) for k, v in data.items()}
    means['mc'] = (data['m'] * data['c']).mean(axis=1)
    zeros = dict(
        P=np.zeros((DIM, DIM)), Pe=np.zeros(DIM), Q=np.zeros((DIM, dim_y))
    )
    form = quadratic.MeanForm([
        quadratic.LocalForm(
            dict(
                A=np.eye(dim_y),
                B=means['R'][i],
                b=means['s'][i],
                M=np.diag(means['m'][i]),
                Mc=means['mc'][i],
                **zeros,
            )
        )
        for i in range(num_clients)
    ])
    self.form = form
    # R'(M (R x + s) - M c) = 0 with the means over all clients.
    self.x = np.linalg.solve(
        form.B.T @ form.M @ form.B, form.B.T @ (form.Mc - form.M @ form.b)
    )

  def problem(self):
    spec = collections.OrderedDict(
        R=tf.TensorSpec([self.dim_y, DIM], tf.float64),
        s=tf.TensorSpec([self.dim_y], tf.float64),
        m=tf.TensorSpec([self.dim_y], tf.float64),
        c=tf.TensorSpec([self.dim_y], tf.float64),
    )
    return fednest_tff.compositional(
        lambda y, batch: tf.reduce_mean(
            tf.reduce_sum(batch['m'] * (y - batch['c']) ** 2, axis=1)
        ) / 2,
        lambda x, batch: tf.reduce_mean(
            tf.linalg.matvec(batch['R'], x) + batch['s'], axis=0
        ),
        lambda seed: tf.ones([DIM], tf.float64),
        lambda seed: tf.zeros([self.dim_y], tf.float64),
        spec,
    )


@functools.cache
def _composition_problem():
  return Composition().problem()


# The Hessian is the identity: one term with l = 1 is exact, whatever is asked.
COMPOSITION_SETTINGS = reference.Settings(
    alpha=0.1, beta=0.5, inner_rounds=1, inner_steps=3, outer_steps=2,
    neumann_terms=7, smoothness=1.0,
)


@functools.cache
def _composition_process(method):
  return build(
      _composition_problem(),
      method,
      COMPOSITION_SETTINGS,
      ihgp='stochastic',
  )


@pytest.mark.parametrize('method', reference.METHODS)
def test_compositional_epochs_equal_numpy(method):
  case = Composition()
  state, _ = run(_composition_process(method), case.datasets, 2)
  x, y = reference.run(
      method,
      case.form,
      np.ones(DIM),
      np.zeros(case.dim_y),
      COMPOSITION_SETTINGS,
      2,
  )
  np.testing.assert_allclose(state.outer, x, rtol=1e-10)
  np.testing.assert_allclose(state.inner, y, rtol=1e-10)


def test_fednest_solves_the_compositional_problem():
  case = Composition()
  process = _composition_process('fednest')
  start = start_with(process, outer_learning_rate=0.4)
  state, _ = run(process, case.datasets, 20, start)
  np.testing.assert_allclose(state.outer, case.x, atol=1e-5)
