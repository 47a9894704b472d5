"""The FedNest family in NumPy, for problems given by `quadratic.LocalForm`.

Written from the paper's algorithms without a look at the library: full batches,
the same number of local steps at every client, a truncated Neumann series. In
constrained problems every local step ends with a projection.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

# The methods that `epoch` knows.
METHODS = (
    'fednest',
    'lfednest',
    'fednest_sgd',
    'lfednest_svrg',
    'lfednest_nonalt',
    'fedavg_s',
)


def _unconstrained(v):
  return v


@dataclasses.dataclass(frozen=True)
class Settings:
  alpha: float
  beta: float
  inner_rounds: int  # T
  inner_steps: int
  outer_steps: int
  neumann_terms: int  # N
  smoothness: float  # l
  implicit: bool = True  # Whether the hypergradient has an indirect part.
  project_outer: Callable = _unconstrained
  project_inner: Callable = _unconstrained


def neumann(matrix, b, smoothness, terms):
  """(1/l) sum_{n<N} (I - H/l)^n b."""
  term = b / smoothness
  total = term.copy()
  for _ in range(terms - 1):
    term = term - matrix @ term / smoothness
    total = total + term
  return total


def fed_inn(clients, x, y, s):
  q = clients.mean([c.inner_gradient(x, y) for c in clients.locals])
  ends = []
  for c in clients.locals:
    y_i = y.copy()
    for _ in range(s.inner_steps):
      direction = c.inner_gradient(x, y_i) - c.inner_gradient(x, y) + q
      y_i = s.project_inner(y_i - s.beta * direction)
    ends.append(y_i)
  return clients.mean(ends)


def local_inner(c, x, y, s):
  for _ in range(s.inner_steps):
    y = s.project_inner(y - s.beta * c.inner_gradient(x, y))
  return y


def lfed_inn(clients, x, y, s):
  return clients.mean([local_inner(c, x, y, s) for c in clients.locals])


def hypergradient(form, x, y, s):
  if not s.implicit:
    return form.direct_gradient(x, y)
  p = neumann(
      form.A, form.gradient_in_inner(x, y), s.smoothness, s.neumann_terms
  )
  return form.direct_gradient(x, y) - form.mixed_product(p)


def fed_out(clients, x, y, s):
  # The mean over clients is itself a form: p is made of the mean Hessian.
  h = hypergradient(clients, x, y, s)
  ends = []
  for c in clients.locals:
    x_i = x.copy()
    for _ in range(s.outer_steps):
      direction = c.direct_gradient(x_i, y) - c.direct_gradient(x, y) + h
      x_i = s.project_outer(x_i - s.alpha * direction)
    ends.append(x_i)
  return clients.mean(ends)


def local_outer(c, x, y, s):
  for _ in range(s.outer_steps):
    x = s.project_outer(x - s.alpha * hypergradient(c, x, y, s))
  return x


def lfed_out(clients, x, y, s):
  return clients.mean([local_outer(c, x, y, s) for c in clients.locals])


def non_alternating(clients, x, y, s):
  pairs = []
  for c in clients.locals:
    y_i = y
    for _ in range(s.inner_rounds):
      y_i = local_inner(c, x, y_i, s)
    pairs.append((local_outer(c, x, y_i, s), y_i))
  return clients.mean([p[0] for p in pairs]), clients.mean(
      [p[1] for p in pairs]
  )


def simultaneous(clients, x, y, s):
  pairs = []
  for c in clients.locals:
    x_i, y_i = x, y
    for _ in range(s.inner_steps):
      x_i, y_i = (
          s.project_outer(x_i - s.alpha * hypergradient(c, x_i, y_i, s)),
          s.project_inner(y_i - s.beta * c.inner_gradient(x_i, y_i)),
      )
    pairs.append((x_i, y_i))
  return clients.mean([p[0] for p in pairs]), clients.mean(
      [p[1] for p in pairs]
  )


def epoch(method, clients, x, y, s):
  """One epoch of `method`: (x, y) -> (x+, y+)."""
  if method == 'lfednest_nonalt':
    return non_alternating(clients, x, y, s)
  if method == 'fedavg_s':
    return simultaneous(clients, x, y, s)
  inner = fed_inn if method in ('fednest', 'lfednest_svrg') else lfed_inn
  outer = fed_out if method in ('fednest', 'fednest_sgd') else lfed_out
  for _ in range(s.inner_rounds):
    y = inner(clients, x, y, s)
  return outer(clients, x, y, s), y


def run(method, clients, x, y, s, epochs):
  x, y = np.asarray(x), np.asarray(y)
  for _ in range(epochs):
    x, y = epoch(method, clients, x, y, s)
  return x, y
