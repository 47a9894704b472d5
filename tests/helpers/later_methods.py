"""The methods since FedNest in NumPy, for the quadratic problem of the tests.

Written from the formulas of the papers: z = (x, y, v), and the client's
direction G_i(z). The library gives only the minibatches, which NumPy cannot
draw; every step below is computed here. `Clients` has the clients' data, their
weights and their draws.
"""

from collections.abc import Callable
import dataclasses

import numpy as np
import tensorflow as tf

from fednest_tff.local import client as client_lib
from fednest_tff.local import inverse_hessian, sampling, simultaneous
from fednest_tff.local.sampling import Purpose
from tests.helpers import quadratic


def numpy_form(batch):
  return quadratic.local_form(
      {name: np.asarray(value) for name, value in batch.items()}
  )


class Clients:
  """Clients with their weights, and what they draw in each epoch."""

  def __init__(self, problem, datasets, work=None, weighting=None, seed=0):
    weighting = weighting or (lambda examples: tf.constant(1.0))
    self._problem, self._seed = problem, seed
    self._work = work and work.per_client()
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

  def samples(self, seed, purpose, level, size):
    """Each client's sample of its inner or outer examples, as a form."""
    return [
        numpy_form(
            client_lib.sample(c, getattr(c, level), size, seed, purpose)
        )
        for c in self.clients
    ]

  def minibatches(self, seed, purpose, level, size, tau):
    """Each client's minibatches of tau(examples) steps, as forms."""
    found = []
    for client in self.clients:
      examples = getattr(client, level)
      count = int(tau(examples))
      batches = sampling.Minibatches(
          examples, size, tf.constant(count),
          client_lib.seed_of(client, seed, purpose),
      )
      found.append(
          [numpy_form(batches[tf.constant(k)]) for k in range(count)]
      )
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
    normalize=False, radius=np.inf, direction=direction, momentum=0.0,
):
  m = tuple(np.zeros_like(part) for part in z)
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
    m = combine(h, momentum, (1, 1, 1), m)
    x, y, v = combine(z, -1, gamma, m)
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


def corrected(clients, gradient, start, mean, batches, rate):
  """The mean end of steps along G_i(v; z) - G_i(start; z) + mean."""
  ends = []
  for steps in batches:
    v = start
    for form in steps:
      v = v - rate * (gradient(form, v) - gradient(form, start) + mean)
    ends.append(v)
  return clients.mean(ends)


def inner_gradients(clients, seed, size, x, y):
  """mean_i grad_y g_i(x, y; zeta_i)."""
  forms = clients.samples(seed, Purpose.INNER_GRADIENT, 'inner', size)
  return clients.mean([form.inner_gradient(x, y) for form in forms])


def fed_out(clients, seed, s, x, y, p):
  """Algorithm 2 after line 3."""
  outer = clients.samples(
      seed, Purpose.OUTER_GRADIENT, 'outer', s.gradient_batch_size
  )
  inner = clients.samples(
      seed, Purpose.MIXED_PRODUCT, 'inner', s.gradient_batch_size
  )
  h = clients.mean([
      f.direct_gradient(x, y) - g.mixed_product(p)
      for f, g in zip(outer, inner, strict=True)
  ])
  batches = clients.minibatches(
      seed, Purpose.OUTER_STEPS, 'outer', s.batch_size, s.tau
  )
  return corrected(
      clients, lambda form, at: form.direct_gradient(at, y), x, h, batches,
      s.alpha,
  )


def stop(seed, terms):
  """N' of FedIHGP, or Q of AggITD."""
  return int(tf.random.stateless_uniform([], seed, 0, terms, tf.int32))


@dataclasses.dataclass(frozen=True)
class Settings:
  """Numbers of AggITD and FedMBO; tau is a function of a client's examples."""

  alpha: float
  beta: float
  inner_rounds: int  # T
  smoothness: float  # l
  tau: Callable
  batch_size: int | None = None
  gradient_batch_size: int | None = None
  neumann_terms: int = 1  # N
  chains: int = 1  # S


def agg_itd(clients, x, y, s, epoch, inner_method):
  """One epoch: (x, y) -> (x+, y+)."""
  T, size = s.inner_rounds, s.gradient_batch_size
  last = clients.call_seed(epoch, T)
  Q = stop(sampling.fold_in(last, Purpose.NEUMANN_STOP), T)
  r = np.zeros_like(y)
  for t in range(T):
    seed = clients.call_seed(epoch, t)
    if t == Q:
      forms = clients.samples(seed, Purpose.CHAIN_GRADIENT, 'outer', size)
      r = clients.mean([form.gradient_in_inner(x, y) for form in forms])
    elif t > Q:
      forms = clients.samples(seed, Purpose.CHAIN_PRODUCT, 'inner', size)
      r = r - clients.mean([form.A @ r for form in forms]) / s.smoothness
    batches = clients.minibatches(
        seed, Purpose.INNER_STEPS, 'inner', s.batch_size, s.tau
    )
    if inner_method == 'fedinn':
      q = inner_gradients(clients, seed, size, x, y)
      y = corrected(
          clients, lambda form, at: form.inner_gradient(x, at), y, q, batches,
          s.beta,
      )
    else:
      ends = []
      for steps in batches:
        y_i = y
        for form in steps:
          y_i = y_i - s.beta * form.inner_gradient(x, y_i)
        ends.append(y_i)
      y = clients.mean(ends)
  return fed_out(clients, last, s, x, y, T / s.smoothness * r), y


def fed_mbo(clients, x, y, s, epoch):
  """One epoch: (x, y) -> (x+, y+)."""
  size = s.gradient_batch_size
  for t in range(s.inner_rounds):
    seed = clients.call_seed(epoch, t)
    y = y - s.beta * inner_gradients(clients, seed, size, x, y)
  last = clients.call_seed(epoch, s.inner_rounds)
  stops = sampling.fold_in(last, Purpose.NEUMANN_STOP)
  chains = []
  for k in range(s.chains):
    seed = inverse_hessian.chain_seed(last, k)
    forms = clients.samples(seed, sampling.neumann_sample(0), 'outer', size)
    b = clients.mean([form.gradient_in_inner(x, y) for form in forms])
    p = s.neumann_terms / s.smoothness * b
    products = stop(inverse_hessian.chain_seed(stops, k), s.neumann_terms)
    for n in range(1, products + 1):
      forms = clients.samples(seed, sampling.neumann_sample(n), 'inner', size)
      p = p - clients.mean([form.A @ p for form in forms]) / s.smoothness
    chains.append(p)
  return fed_out(clients, last, s, x, y, np.mean(chains, 0)), y
