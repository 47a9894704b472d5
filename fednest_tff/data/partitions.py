"""Who gets which examples."""

import math

import numpy as np

from fednest_tff.data.images import DataError, Integers

PARTITIONS = ('iid', 'shards', 'dirichlet', 'writers')

# One for the inner level and one for the outer.
_MIN_EXAMPLES = 2

_SHARDS_PER_CLIENT = 2
_SMALLEST_ALPHA = 1e-6

# Keep the streams of one seed apart.
_PARTITION_SALT = 1
_LONG_TAIL_SALT = 2


def partition(
    name: str,
    labels: Integers,
    num_clients: int | None,
    *,
    seed: int,
    num_classes: int,
    writers: Integers | None = None,
    dirichlet_alpha: float = 0.5,
) -> list[Integers]:
  """Divides examples among clients.

  Args:
    name: How:
      'iid': at random, sizes differing by at most one.
      'shards': as for FedAvg (McMahan et al., 2017). Sorted by label and cut
        into twice as many shards as there are clients, whose sizes differ by at
        most one; every client gets two at random.
      'dirichlet': each class is divided in proportions drawn from a Dirichlet
        distribution (Hsu et al., 2019). Clients that end up with fewer than two
        examples then get random ones of whoever has most at that moment.
      'writers': a client for each writer. Of more writers than clients, random
        ones are kept and the examples of the others are left out, as are those
        of writers with a single example.
    labels: Of the examples, [n].
    num_clients: How many; `None` for all writers, if `name` is 'writers'.
    seed: Of all that is random here.
    num_classes: Labels lie in [0, num_classes).
    writers: Of the examples, [n]; for 'writers'.
    dirichlet_alpha: The concentration, for 'dirichlet': the smaller, the more
      the clients differ.

  Returns:
    For each client the positions of its examples, in random order, so that any
    section has the client's mix of labels. Every example has one client at
    most, and but for 'writers' exactly one. Each client has two at least.
  """
  rng = _random(seed, _PARTITION_SALT)
  if name == 'writers':
    parts = _by_writer(writers, num_clients, rng)
  elif name in PARTITIONS:
    num_clients = _check_num_clients(len(labels), num_clients)
    if name == 'iid':
      parts = np.array_split(rng.permutation(len(labels)), num_clients)
    elif name == 'shards':
      parts = _shards(labels, num_clients, rng)
    else:
      parts = _dirichlet(labels, num_clients, num_classes, dirichlet_alpha, rng)
  else:
    raise DataError(
        f'`partition`={name} is not known; choose from {", ".join(PARTITIONS)}.'
    )
  return [rng.permutation(part) for part in parts]


def long_tail(
    labels: Integers, num_classes: int, *, seed: int, factor: float = 0.01
) -> Integers:
  """Makes classes the rarer, the higher their label.

  Class c keeps the share factor^(c / (num_classes - 1)) of its own examples,
  rounded down, but at least one. Of MNIST's 60,000 images 15,202 are left with
  a factor of 0.01: 5,923 of class 0, which is all of them, and 59 of class 9.

  Args:
    labels: Of the examples, [n].
    num_classes: Labels lie in [0, num_classes).
    seed: Of the choice within each class.
    factor: The share of the last class, in (0, 1].

  Returns:
    Positions of the examples that are kept, in increasing order.
  """
  if not 0 < factor <= 1:
    raise DataError(
        f'`imbalance`={factor} must lie above 0 and not above 1: it is the'
        ' share of the last class that is kept.'
    )
  rng = _random(seed, _LONG_TAIL_SALT)
  kept = []
  for label in range(num_classes):
    members = rng.permutation(np.flatnonzero(labels == label))
    share = factor ** (label / max(num_classes - 1, 1))
    # Without the tolerance, 0.7 of 90 is 62.
    kept.append(members[: max(int(share * len(members) + 1e-9), 1)])
  return np.sort(np.concatenate(kept))


def _random(seed: int, salt: int) -> np.random.Generator:
  if seed < 0:
    raise DataError(f'`seed`={seed} must not be negative.')
  return np.random.default_rng([seed, salt])


def _check_num_clients(num_examples: int, num_clients: int | None) -> int:
  """`num_clients`, if each of them can have examples enough."""
  if num_clients is None or num_clients < 1:
    raise DataError(f'`num_clients`={num_clients} must be at least 1.')
  if num_examples < _MIN_EXAMPLES * num_clients:
    raise DataError(
        f'`num_clients`={num_clients} is too many for {num_examples} training'
        f' examples, since each needs {_MIN_EXAMPLES}; use at most'
        f' {num_examples // _MIN_EXAMPLES}.'
    )
  return num_clients


def _shards(
    labels: Integers, num_clients: int, rng: np.random.Generator
) -> list[Integers]:
  order = np.argsort(labels, kind='stable')
  shards = np.array_split(order, _SHARDS_PER_CLIENT * num_clients)
  deal = rng.permutation(len(shards)).reshape(num_clients, _SHARDS_PER_CLIENT)
  return [np.concatenate([shards[k] for k in hand]) for hand in deal]


def _dirichlet(
    labels: Integers,
    num_clients: int,
    num_classes: int,
    alpha: float,
    rng: np.random.Generator,
) -> list[Integers]:
  if not (math.isfinite(alpha) and alpha > 0):
    raise DataError(f'`dirichlet_alpha`={alpha} must be positive and finite.')
  if alpha < _SMALLEST_ALPHA:
    # To draw from it takes the longer, the smaller it is.
    raise DataError(
        f'`dirichlet_alpha`={alpha} must be at least {_SMALLEST_ALPHA}; there'
        ' each class already has a single client.'
    )
  # Beyond this, shares are equal to all digits, and the sum might overflow.
  alpha = min(alpha, 1e12)
  parts: list[list[int]] = [[] for _ in range(num_clients)]
  for label in range(num_classes):
    members = rng.permutation(np.flatnonzero(labels == label))
    shares = rng.dirichlet(np.full(num_clients, alpha))
    ends = np.cumsum(shares)[:-1] * len(members)
    cuts = np.clip(np.rint(ends).astype(int), 0, len(members))
    for part, section in zip(parts, np.split(members, cuts), strict=True):
      part.extend(section)
  # The end of a list would be its last class.
  parts = [list(rng.permutation(np.array(part, int))) for part in parts]
  for part in parts:
    while len(part) < _MIN_EXAMPLES:
      part.append(max(parts, key=len).pop())
  return [np.array(part) for part in parts]


def _by_writer(
    writers: Integers | None,
    num_clients: int | None,
    rng: np.random.Generator,
) -> list[Integers]:
  if writers is None:
    raise DataError(
        '`partition`=writers needs data that says who wrote what, which is'
        ' `dataset`=emnist; choose it or another `partition`.'
    )
  numbers, counts = np.unique(writers, return_counts=True)
  numbers = numbers[counts >= _MIN_EXAMPLES]
  if num_clients is None:
    num_clients = len(numbers)
  if num_clients < 1:
    raise DataError(f'`num_clients`={num_clients} must be at least 1.')
  if num_clients > len(numbers):
    raise DataError(
        f'`num_clients`={num_clients} is more than the {len(numbers)} writers'
        f' with {_MIN_EXAMPLES} or more training examples; use at most'
        f' {len(numbers)}, or another `partition`.'
    )
  chosen = np.sort(rng.choice(numbers, num_clients, replace=False))
  # One sort instead of a search for each of thousands of writers.
  order = np.argsort(writers, kind='stable')
  starts = np.searchsorted(writers[order], chosen, 'left')
  stops = np.searchsorted(writers[order], chosen, 'right')
  return [order[i:j] for i, j in zip(starts, stops, strict=True)]
