"""The quadratic problem with an inner solution per client, in NumPy.

`ClosedForm` has the minimiser of mean_i f_i(x, y_i*(x)); `run` is the method
`personal`, written from its formulas, with the minibatches that it is told.
"""

from collections.abc import Callable
import dataclasses
import functools

import numpy as np
import tensorflow as tf

import fednest_tff
from fednest_tff.local import client as client_lib
from fednest_tff.local import sampling
from fednest_tff.local.sampling import Purpose
from tests.helpers import quadratic, reference
from tests.helpers.one_client import numpy_losses, uniform


@functools.cache
def build_problem(dtype=tf.float64, split='same', **options):
  return fednest_tff.personal(
      quadratic.outer_loss,
      quadratic.inner_loss,
      lambda seed: quadratic.init_outer(seed, dtype),
      lambda seed: quadratic.init_inner(seed, dtype),
      quadratic.element_spec(dtype),
      split=split,
      **options,
  )


class ClosedForm(quadratic.MeanForm):
  """The solution of the personal problem over clients' data."""

  def __init__(self, clients, weights=None):
    super().__init__([quadratic.local_form(c) for c in clients], weights)
    self._clients = clients

  def inner_solutions(self, x):
    return [form.inner_solution(x) for form in self.locals]

  def total_gradient(self, x):
    """The gradient of `objective`, by implicit differentiation."""
    return self.mean(
        [form.hypergradient(x, form.inner_solution(x)) for form in self.locals]
    )

  def objective(self, x):
    """mean_i f_i(x, y_i*(x)), from the losses alone."""
    values = zip(self._clients, self.inner_solutions(x), strict=True)
    return self.mean([numpy_losses(c, x, y)[0] for c, y in values])

  def solution(self):
    """x*: the gradient is affine in x."""
    offset = self.total_gradient(np.zeros(quadratic.DX))
    units = np.eye(quadratic.DX)
    columns = [self.total_gradient(unit) - offset for unit in units]
    return np.linalg.solve(np.stack(columns, axis=1), -offset)


@dataclasses.dataclass(frozen=True)
class Draws:
  """A client's minibatches in one epoch, as forms, by numbers of steps.

  Attributes:
    inner: (nu, k) -> g of inner step k within outer step nu.
    outer: nu -> f of outer step nu.
    hessian: (nu, n) -> g of the n-th product of outer step nu; n = 0 is the
      mixed product.
  """

  inner: Callable
  outer: Callable
  hessian: Callable


def full_batches(client):
  form = quadratic.local_form(client)
  return Draws(lambda nu, k: form, lambda nu: form, lambda nu, n: form)


def minibatches(client, batch_size, s, seed):
  """The library's draws from a client's seed; both levels see all examples."""
  count = len(client['b'])

  def stream(num_steps, seed):
    rows = sampling.Minibatches(
        tf.range(count), batch_size, tf.constant(num_steps), seed
    )
    return [
        quadratic.local_form(
            quadratic.map_arrays(
                client, lambda value, k=k: value[rows[tf.constant(k)].numpy()]
            )
        )
        for k in range(num_steps)
    ]

  inner = sampling.fold_in(seed, Purpose.PERSONAL_INNER)
  outer = sampling.fold_in(seed, Purpose.PERSONAL_OUTER)
  terms = s.neumann_terms
  products = stream(
      s.outer_steps * terms,
      sampling.fold_in(outer, Purpose.LOCAL_INNER_BATCHES),
  )
  of_outer = stream(
      s.outer_steps, sampling.fold_in(outer, Purpose.LOCAL_OUTER_BATCHES)
  )
  of_inner = [
      stream(s.inner_steps, sampling.fold_in(inner, nu))
      for nu in range(s.outer_steps)
  ]
  return Draws(
      lambda nu, k: of_inner[nu][k],
      lambda nu: of_outer[nu],
      lambda nu, n: products[nu * terms + n],
  )


def steps(draws, x, start, s):
  """One client's x_i: every step of x has an inner solve and a series."""
  for nu in range(s.outer_steps):
    y = start
    for k in range(s.inner_steps):
      y = y - s.beta * draws.inner(nu, k).inner_gradient(x, y)
    f = draws.outer(nu)
    term = f.gradient_in_inner(x, y) / s.smoothness
    p = term
    for n in range(1, s.neumann_terms):
      term = term - draws.hessian(nu, n).A @ term / s.smoothness
      p = p + term
    h = f.direct_gradient(x, y) - draws.hessian(nu, 0).mixed_product(p)
    x = s.project_outer(x - s.alpha * h)
  return x


def client_seed(client, seed, epoch):
  """What a client's draws of an epoch are made of, from the state's seed."""
  (dataset,) = quadratic.to_datasets([client])
  problem = build_problem(client['b'].dtype)
  read = client_lib.from_dataset(problem, uniform, dataset)
  call = sampling.fold_in(sampling.fold_in(seed, epoch), 0)
  return client_lib.seed_of(read, call, Purpose.CLIENT_STEPS)


def run(clients, weights, x, start, s: reference.Settings, draws, epochs):
  """x after `epochs`; `draws(client, epoch)` has the minibatches."""
  weights = np.asarray(weights) / np.sum(weights)
  for epoch in range(epochs):
    ends = [steps(draws(c, epoch), x, start, s) for c in clients]
    x = sum(w * end for w, end in zip(weights, ends, strict=True))
  return x
