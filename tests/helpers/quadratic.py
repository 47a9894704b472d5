"""A quadratic bilevel problem over different clients, solved in closed form.

With every letter a mean over a client's examples, client i has

  g_i(x, y) = 1/2 y'A y - y'(B x + b)
  f_i(x, y) = 1/2 (y - c)'M (y - c) + 1/2 (x - e)'P (x - e) + x'Q y,

so that y*(x) = A^-1 (B x + b) and the hypergradient is affine in x. Everything
in `ClosedForm` is NumPy and knows nothing of the library.
"""

import collections
import functools
import itertools

import numpy as np
import tensorflow as tf

import fednest_tff

DX, DY = 3, 4

SHAPES = collections.OrderedDict(
    A=(DY, DY), B=(DY, DX), b=(DY,), M=(DY, DY), c=(DY,), P=(DX, DX), e=(DX,),
    Q=(DX, DY),
)


def _spd(rng, dim, low, high):
  """A symmetric matrix with eigenvalues from `low` to `high`."""
  basis, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
  return (basis * np.linspace(low, high, dim)) @ basis.T


def make_clients(
    num_clients=3, examples=(1, 2, 3), heterogeneity=1.0, seed=0,
    dtype=np.float64,
):
  """A list of dicts of arrays, one leading axis of examples per client."""
  rng = np.random.default_rng(seed)
  mean = dict(
      B=rng.normal(size=(DY, DX)), b=rng.normal(size=DY),
      c=rng.normal(size=DY), e=rng.normal(size=DX),
      Q=0.1 * rng.normal(size=(DX, DY)),
  )
  shared_a, shared_m = _spd(rng, DY, 0.5, 2.0), _spd(rng, DY, 0.5, 1.5)
  shared_p = _spd(rng, DX, 0.5, 1.0)

  def example():
    def vary(name):
      noise = rng.normal(size=SHAPES[name])
      scale = 0.1 if name == 'Q' else 0.5
      return mean[name] + heterogeneity * scale * noise

    a = shared_a + heterogeneity * _spd(rng, DY, 0.0, 1.0)
    m = shared_m + heterogeneity * _spd(rng, DY, 0.0, 0.5)
    p = shared_p + heterogeneity * _spd(rng, DX, 0.0, 0.5)
    return dict(
        A=a, B=vary('B'), b=vary('b'), M=m, c=vary('c'), P=p, e=vary('e'),
        Q=vary('Q'),
    )

  clients = []
  for i in range(num_clients):
    rows = [example() for _ in range(examples[i % len(examples)])]
    clients.append(
        collections.OrderedDict(
            (name, np.stack([row[name] for row in rows]).astype(dtype))
            for name in SHAPES
        )
    )
  return clients


def map_arrays(client, function):
  """A client's data with `function` of each array."""
  return collections.OrderedDict(
      (name, function(value)) for name, value in client.items()
  )


def to_datasets(clients):
  return [tf.data.Dataset.from_tensor_slices(client) for client in clients]


def element_spec(dtype=tf.float64):
  return collections.OrderedDict(
      (name, tf.TensorSpec(shape, dtype)) for name, shape in SHAPES.items()
  )


# The means come first, so that derivatives have few operations: tests trace
# them thousands of times.
def _mean(values):
  return tf.reduce_mean(values, axis=0)


def _form(u, matrix, v):
  return tf.reduce_sum(u * tf.linalg.matvec(matrix, v))


def inner_loss(x, y, batch):
  A, B, b = (_mean(batch[name]) for name in 'ABb')
  linear = tf.linalg.matvec(B, x) + b
  return _form(y, A, y) / 2 - tf.reduce_sum(y * linear)


def _distance(matrix, v, center):
  """The mean over examples of 1/2 (v - center)'(matrix)(v - center)."""
  pull = tf.linalg.matvec(matrix, center)
  return (
      _form(v, _mean(matrix), v) / 2
      - tf.reduce_sum(v * _mean(pull))
      + _mean(tf.reduce_sum(center * pull, axis=1)) / 2
  )


def outer_loss(x, y, batch):
  return (
      _distance(batch['M'], y, batch['c'])
      + _distance(batch['P'], x, batch['e'])
      + _form(x, _mean(batch['Q']), y)
  )


def init_outer(seed, dtype=tf.float64):
  return tf.random.stateless_normal([DX], [seed, 1], dtype=dtype)


def init_inner(seed, dtype=tf.float64):
  return tf.random.stateless_normal([DY], [seed, 2], dtype=dtype)


def new_problem(dtype=tf.float64, split='same'):
  """The problem; both levels see all examples unless `split` says otherwise."""
  return fednest_tff.bilevel(
      outer_loss,
      inner_loss,
      lambda seed: init_outer(seed, dtype),
      lambda seed: init_inner(seed, dtype),
      element_spec(dtype),
      split=split,
  )


# One for all test files of a worker: what was traced for it is used again.
build_problem = functools.cache(new_problem)


class LocalForm:
  """The gradients of one client, or of a mean of clients, in NumPy."""

  def __init__(self, letters):
    self.__dict__.update(letters)

  def inner_gradient(self, x, y):
    return self.A @ y - self.B @ x - self.b

  def direct_gradient(self, x, y):
    return self.P @ x - self.Pe + self.Q @ y

  def gradient_in_inner(self, x, y):
    return self.M @ y - self.Mc + self.Q.T @ x

  def mixed_product(self, p):
    """d/dx <grad_y g, p>."""
    return -self.B.T @ p

  def inner_solution(self, x):
    return np.linalg.solve(self.A, self.B @ x + self.b)

  def hypergradient(self, x, y):
    p = np.linalg.solve(self.A, self.gradient_in_inner(x, y))
    return self.direct_gradient(x, y) - self.mixed_product(p)


def local_form(client):
  """The mean over one client's examples."""
  letters = {name: client[name].mean(axis=0) for name in SHAPES}
  # Products of means are not means of products.
  letters['Mc'] = np.einsum('nij,nj->ni', client['M'], client['c']).mean(0)
  letters['Pe'] = np.einsum('nij,nj->ni', client['P'], client['e']).mean(0)
  return LocalForm(letters)


class MeanForm(LocalForm):
  """The weighted mean of clients' forms; `locals` has the clients' own."""

  def __init__(self, forms, weights=None):
    self.locals = forms
    self.weights = np.ones(len(forms)) if weights is None else weights
    self.weights = np.asarray(self.weights) / np.sum(self.weights)
    super().__init__({
        name: self.mean([getattr(form, name) for form in forms])
        for name in vars(forms[0])
    })

  def mean(self, values):
    return sum(
        w * value for w, value in zip(self.weights, values, strict=True)
    )


class ClosedForm(MeanForm):
  """The mean over clients' data, and the solution of the nested problem."""

  def __init__(self, clients, weights=None):
    super().__init__([local_form(client) for client in clients], weights)

  def solution(self):
    """(x*, y*(x*)): the hypergradient at y*(x) is affine in x."""
    def total(x):
      return self.hypergradient(x, self.inner_solution(x))

    offset = total(np.zeros(DX))
    matrix = np.stack([total(unit) - offset for unit in np.eye(DX)], axis=1)
    x = np.linalg.solve(matrix, -offset)
    return x, self.inner_solution(x)


def one_example_each(clients):
  """All ways to take one example of each client, as means over clients."""
  choices = itertools.product(*(range(len(c['b'])) for c in clients))
  return {
      choice: ClosedForm([
          map_arrays(client, lambda value, k=k: value[k : k + 1])
          for client, k in zip(clients, choice, strict=True)
      ])
      for choice in choices
  }
