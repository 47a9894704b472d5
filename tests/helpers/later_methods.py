"""The methods since FedNest in NumPy, for the quadratic problem of the tests.

Written from the formulas of the papers: z = (x, y, v), and the client's
direction G_i(z). The library gives only the minibatches, which NumPy cannot
draw; every step below is computed here. `Clients` has the clients' data, their
weights and their draws.
"""

import numpy as np
import tensorflow as tf

from fednest_tff.local import client as client_lib
from fednest_tff.local import sampling, simultaneous
from fednest_tff.local.sampling import Purpose
from tests.helpers import quadratic


def numpy_form(batch):
  return quadratic.local_form(
      {name: np.asarray(value) for name, value in batch.items()}
  )


class Clients:
  """Clients with their weights, and what they draw in each epoch."""

  def __init__(self, problem, datasets, work, weighting=None, seed=0):
    weighting = weighting or (lambda examples: tf.constant(1.0))
    self._problem, self._seed = problem, seed
    self._work = work.per_client()
    self.clients = [
        client_lib.from_dataset(problem, weighting, d) for d in datasets
    ]
    weights = np.array([float(c.weight) for c in self.clients])
    self.weights = weights / weights.sum()
    self.forms = [
        (numpy_form(c.outer), numpy_form(c.inner)) for c in self.clients
    ]

  def mean(self, values):
    """Weighted, of arrays or of tuples of arrays."""
    if isinstance(values[0], tuple):
      return tuple(map(self.mean, map(list, zip(*values, strict=True))))
    return sum(w * v for w, v in zip(self.weights, values, strict=True))

  def call_seed(self, epoch, call=0):
    seed = sampling.fold_in(tf.constant([self._seed, 0], tf.int64), epoch)
    return sampling.fold_in(seed, call)

  def steps(self, epoch, purpose=Purpose.CLIENT_STEPS):
    """For each client the (outer, inner) forms of its minibatches."""
    found = []
    for client in self.clients:
      steps = simultaneous.LocalSteps(
          self._problem, self._work, client,
          client_lib.seed_of(client, self.call_seed(epoch), purpose),
      )
      found.append([
          tuple(map(numpy_form, steps[tf.constant(k)]))
          for k in range(int(steps.tau))
      ])
    return found


def direction(forms, z):
  """G_i(x, y, v)."""
  outer, inner = forms
  x, y, v = z
  return (
      outer.direct_gradient(x, y) - inner.mixed_product(v),
      inner.inner_gradient(x, y),
      inner.A @ v - outer.gradient_in_inner(x, y),
  )


def outer_gradient_of_inner_loss(inner, y):
  """grad_x g_i = -B'y."""
  return -inner.B.T @ y


def penalty_direction(forms, z, lam):
  outer, inner = forms
  x, y, w = z
  return (
      outer.direct_gradient(x, y)
      + lam * (
          outer_gradient_of_inner_loss(inner, y)
          - outer_gradient_of_inner_loss(inner, w)
      ),
      (outer.gradient_in_inner(x, y) + lam * inner.inner_gradient(x, y)) / lam,
      inner.inner_gradient(x, w),
  )


def combine(z, factor, rates, d):
  return tuple(
      part + factor * rate * change
      for part, rate, change in zip(z, rates, d, strict=True)
  )


def sim_fbo(
    clients, z, eta, gamma, epochs, coefficient=lambda k, tau: 1.0,
    normalize=False, radius=np.inf, direction=direction,
):
  for epoch in range(epochs):
    sums, weights = [], []
    for steps in clients.steps(epoch):
      z_i, h_i, weight = z, tuple(np.zeros_like(part) for part in z), 0.0
      for k, forms in enumerate(steps):
        a = coefficient(k, len(steps))
        d = direction(forms, z_i)
        h_i = combine(h_i, a, (1, 1, 1), d)
        z_i = combine(z_i, -a, eta, d)
        weight += a
      sums.append(h_i)
      weights.append(weight)
    if normalize:
      sums = [
          tuple(part / a for part in h)
          for h, a in zip(sums, weights, strict=True)
      ]
      h = tuple(clients.mean(weights) * part for part in clients.mean(sums))
    else:
      h = clients.mean(sums)
    x, y, v = combine(z, -1, gamma, h)
    norm = np.linalg.norm(v)
    z = x, y, v * min(1.0, radius / norm)
  return z


def fed_msa(clients, z, eta, epochs):
  for epoch in range(epochs):
    mean = clients.mean([direction(forms, z) for forms in clients.forms])
    ends = []
    for steps in clients.steps(epoch, Purpose.OUTER_STEPS):
      z_i = z
      for forms in steps:
        corrected = tuple(
            here - there + q
            for here, there, q in zip(
                direction(forms, z_i), direction(forms, z), mean, strict=True
            )
        )
        z_i = combine(z_i, -1, eta, corrected)
      ends.append(z_i)
    z = clients.mean(ends)
  return z


def fed_bio_acc(clients, z, eta, epochs, delta, u0, c):
  m = None
  for epoch in range(epochs):
    alpha = delta / (u0 + epoch) ** (1 / 3)
    decay = 1 - c * alpha**2
    ends = []
    for steps in clients.steps(epoch):
      z_i = z
      m_i = direction(steps[0], z) if m is None else m
      for forms in steps:
        following = combine(z_i, -alpha, eta, m_i)
        m_i = tuple(
            new + decay * (old_m - old)
            for new, old_m, old in zip(
                direction(forms, following), m_i, direction(forms, z_i),
                strict=True,
            )
        )
        z_i = following
      ends.append((*z_i, *m_i))
    mean = clients.mean(ends)
    z, m = mean[:3], mean[3:]
  return (*z, *m)
