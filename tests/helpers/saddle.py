"""A quadratic saddle-point problem over different clients, in closed form.

Client i has f_i = -[1/2 y'D y - b'y + y'A x] + lambda/2 x'E x, where A, b and
the diagonal D and E are means over its examples. In section 4.3 of the paper D
and E are I. Everything but `problem` is NumPy and knows nothing of the library.
"""

import collections
import itertools

import numpy as np
import tensorflow as tf

import fednest_tff
from tests.helpers import quadratic

DIM = 3
LAMBDA = 2.0


class Saddle:
  """The problem and its solution without constraints, (x, y).

  `spread` is how far the entries of D and E may exceed 1.
  """

  def __init__(self, num_clients=3, seed=0, centred=False, spread=0.0):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(num_clients, 2, DIM, DIM))
    b = rng.normal(size=(num_clients, 2, DIM))
    if centred:
      b -= b.mean(axis=(0, 1))
    d, e = 1 + spread * rng.uniform(size=(2, num_clients, 2, DIM))
    self.datasets = [
        tf.data.Dataset.from_tensor_slices(
            collections.OrderedDict(A=a[i], b=b[i], d=d[i], e=e[i])
        )
        for i in range(num_clients)
    ]
    form = quadratic.MeanForm([
        quadratic.LocalForm(
            dict(
                A=np.diag(d[i].mean(0)),
                B=-a[i].mean(0),
                b=b[i].mean(0),
                P=LAMBDA * np.diag(e[i].mean(0)),
                Pe=np.zeros(DIM),
                Q=-a[i].mean(0).T,
            )
        )
        for i in range(num_clients)
    ])
    self.form = form
    # grad_y: D y = b - A x; grad_x: lambda E x = A'y.
    self.mean_a, self.mean_b = -form.B, form.b
    scaled = np.linalg.solve(form.A, self.mean_a)  # D^-1 A
    self.x = np.linalg.solve(
        form.P + self.mean_a.T @ scaled, scaled.T @ self.mean_b
    )
    self.y = np.linalg.solve(form.A, self.mean_b - self.mean_a @ self.x)

  def problem(self, init_inner=1.0, **projections):
    """The problem; x starts at ones and y at `init_inner` times ones."""

    def loss(x, y, batch):
      linear = tf.linalg.matvec(batch['A'], x) - batch['b']
      coupling = tf.reduce_mean(tf.linalg.matvec(linear, y))
      d, e = (tf.reduce_mean(batch[name], axis=0) for name in 'de')
      concave = tf.reduce_sum(d * y**2) / 2 + coupling
      return -concave + LAMBDA / 2 * tf.reduce_sum(e * x**2)

    spec = collections.OrderedDict(
        A=tf.TensorSpec([DIM, DIM], tf.float64),
        b=tf.TensorSpec([DIM], tf.float64),
        d=tf.TensorSpec([DIM], tf.float64),
        e=tf.TensorSpec([DIM], tf.float64),
    )
    return fednest_tff.minimax(
        loss,
        lambda seed: tf.ones([DIM], tf.float64),
        lambda seed: tf.fill([DIM], tf.constant(init_inner, tf.float64)),
        spec,
        **projections,
    )

  def constrained_solution(self):
    """(x, y) for x >= 0 and y on the simplex, by trying all active sets.

    With R and S the positive entries of x and y, a solution has
      (lambda E x)_R = (A'y)_R,  (D y)_S = (b - A x)_S - theta,  sum y = 1,
    0 elsewhere, x_R and y_S positive, and neither variable gains by growing
    elsewhere: (A'y)_j <= 0 outside R, and (b - A x)_j <= theta outside S. One
    pair of sets fits, since f is strongly convex in x and concave in y.
    """
    a, b = self.mean_a, self.mean_b
    solutions = []
    masks = list(itertools.product([False, True], repeat=DIM))
    for r, s in itertools.product(map(np.array, masks), repeat=2):
      if not s.any():
        continue
      # The unknowns: x, y and theta, with 0 for those that are not free.
      matrix = np.zeros((2 * DIM + 1, 2 * DIM + 1))
      matrix[:DIM, :DIM] = np.where(r[:, None], self.form.P, np.eye(DIM))
      matrix[:DIM, DIM:-1] = np.where(r[:, None], -a.T, 0)
      matrix[DIM:-1, DIM:-1] = np.where(s[:, None], self.form.A, np.eye(DIM))
      matrix[DIM:-1, :DIM] = np.where(s[:, None], a, 0)
      matrix[DIM:-1, -1] = s
      matrix[-1, DIM:-1] = 1
      right = np.concatenate([np.zeros(DIM), np.where(s, b, 0), [1]])
      x, y, theta = np.split(np.linalg.solve(matrix, right), [DIM, 2 * DIM])
      if (
          np.all(x[r] > 0)
          and np.all(y[s] > 0)
          and np.all((a.T @ y)[~r] <= 0)
          and np.all((b - a @ x)[~s] <= theta)
      ):
        solutions.append((x, y))
    (solution,) = solutions
    return solution
