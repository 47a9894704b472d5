"""Invariants of the partitions, and the long tail's counts."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from fednest_tff.data import DataError, long_tail, partition

settings = hypothesis.settings(
    deadline=None, derandomize=True, database=None, max_examples=100
)
NUM_CLASSES = 5
SEEDS = st.integers(0, 2**32)
ALPHAS = st.sampled_from([1e-6, 0.01, 0.5, 10.0, 1e308])


@st.composite
def labels_and_clients(draw):
  """Labels, some classes perhaps empty, and a feasible number of clients."""
  size = draw(st.integers(2, 120))
  weights = draw(
      st.lists(st.integers(0, 4), min_size=NUM_CLASSES, max_size=NUM_CLASSES)
  )
  weights = np.array(weights, float) + (sum(weights) == 0)
  rng = np.random.default_rng(draw(SEEDS))
  labels = rng.choice(NUM_CLASSES, size, p=weights / weights.sum())
  return labels.astype(np.int32), draw(st.integers(1, size // 2))


def assert_each_once(parts, size):
  np.testing.assert_array_equal(np.sort(np.concatenate(parts)), range(size))


def divide(name, labels, num_clients, seed=0, **options):
  return partition(
      name, labels, num_clients, seed=seed, num_classes=NUM_CLASSES, **options
  )


@settings
@hypothesis.given(labels_and_clients(), SEEDS, ALPHAS)
def test_every_example_has_one_client_and_every_client_two(
    data, seed, dirichlet_alpha
):
  labels, num_clients = data
  for name in ('iid', 'shards', 'dirichlet'):
    parts = divide(
        name, labels, num_clients, seed, dirichlet_alpha=dirichlet_alpha
    )
    assert len(parts) == num_clients
    assert min(map(len, parts)) >= 2
    assert_each_once(parts, len(labels))


@settings
@hypothesis.given(labels_and_clients(), SEEDS)
def test_iid_sizes_differ_by_one(data, seed):
  labels, num_clients = data
  sizes = [len(part) for part in divide('iid', labels, num_clients, seed)]
  assert max(sizes) - min(sizes) <= 1


@settings
@hypothesis.given(labels_and_clients(), SEEDS)
def test_shard_clients_have_two_sections_of_the_sorted_examples(data, seed):
  labels, num_clients = data
  rank = np.empty(len(labels), int)
  rank[np.argsort(labels, kind='stable')] = range(len(labels))
  smallest, rest = divmod(len(labels), 2 * num_clients)
  largest = smallest + (rest > 0)
  for part in divide('shards', labels, num_clients, seed):
    ranks = np.sort(rank[part])
    breaks = np.flatnonzero(np.diff(ranks) > 1) + 1
    # Two shards may happen to be neighbours.
    assert len(breaks) <= 1
    assert 2 * smallest <= len(part) <= 2 * largest
    for section in np.split(ranks, breaks):
      many = 2 if not len(breaks) else 1
      assert many * smallest <= len(section) <= many * largest


def test_shards_have_at_most_two_labels_if_classes_divide():
  labels = np.random.default_rng(0).permutation(np.repeat(range(5), 40))
  parts = divide('shards', labels, 50)
  counts = [len(np.unique(labels[part])) for part in parts]
  assert max(counts) == 2
  assert all(len(part) == 4 for part in parts)
  # A pair of random shards has one label with a probability of 19 in 99.
  assert 1 <= counts.count(1) <= 25


def test_shards_are_dealt_at_random():
  labels = np.repeat(range(5), 40)
  pairs = [
      tuple(np.unique(labels[part])) for part in divide('shards', labels, 50)
  ]
  assert len(set(pairs)) > 8


def test_dirichlet_shares_have_the_right_variance():
  # A share of 10 with concentration a has mean 1/10 and variance
  # (1/10)(9/10) / (10a + 1).
  labels = np.repeat(range(NUM_CLASSES), 4000)
  for alpha in (0.2, 2.0):
    shares = []
    for seed in range(40):
      parts = divide('dirichlet', labels, 10, seed, dirichlet_alpha=alpha)
      counts = [np.bincount(labels[p], minlength=NUM_CLASSES) for p in parts]
      shares.append(np.array(counts) / 4000)
    variance = np.mean((np.array(shares) - 0.1) ** 2)
    assert variance == pytest.approx(0.09 / (10 * alpha + 1), rel=0.12)


def test_dirichlet_with_a_huge_concentration_is_even():
  labels = np.repeat(range(NUM_CLASSES), 40)
  parts = divide('dirichlet', labels, 8, dirichlet_alpha=1e308)
  for part in parts:
    np.testing.assert_array_equal(np.bincount(labels[part]), 5)


def test_dirichlet_classes_are_drawn_independently():
  labels = np.repeat(range(2), 5000)
  shares = []
  for seed in range(200):
    part = partition('dirichlet', labels, 2, seed=seed, num_classes=2)[0]
    shares.append(np.bincount(labels[part], minlength=2) / 5000)
  assert abs(np.corrcoef(np.transpose(shares))[0, 1]) < 0.25


@st.composite
def writers_of(draw):
  sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=20))
  hypothesis.assume(max(sizes) >= 2)
  writers = np.repeat(3 * np.arange(len(sizes)), sizes)
  return np.random.default_rng(draw(SEEDS)).permutation(writers)


@settings
@hypothesis.given(writers_of(), SEEDS, st.data())
def test_writers_stay_whole(writers, seed, data):
  numbers, counts = np.unique(writers, return_counts=True)
  usable = set(numbers[counts >= 2])
  num_clients = data.draw(st.none() | st.integers(1, len(usable)))
  parts = divide(
      'writers', np.zeros_like(writers), num_clients, seed, writers=writers
  )
  chosen = [writers[part[0]] for part in parts]
  assert len(set(chosen)) == len(parts) == (num_clients or len(usable))
  assert set(chosen) <= usable
  for number, part in zip(chosen, parts, strict=True):
    np.testing.assert_array_equal(
        np.sort(part), np.flatnonzero(writers == number)
    )


def test_writers_are_chosen_by_seed():
  writers = np.repeat(range(50), 2)

  def choose(seed):
    parts = divide('writers', writers, 5, seed, writers=writers)
    return {int(writers[part[0]]) for part in parts}

  assert len({frozenset(choose(seed)) for seed in range(10)}) > 7


@pytest.mark.parametrize('name', ['iid', 'shards', 'dirichlet', 'writers'])
def test_same_seed_same_bytes_and_other_seed_others(name):
  labels = np.repeat(range(5), 40)
  writers = np.tile(range(10), 20)

  def draw(seed):
    parts = divide(name, labels, 8, seed, writers=writers)
    return b'|'.join(part.tobytes() for part in parts)

  assert draw(3) == draw(3)
  assert draw(3) != draw(4)


@pytest.mark.parametrize('name', ['iid', 'shards', 'dirichlet', 'writers'])
def test_first_half_of_a_client_has_the_mix_of_the_whole(name):
  labels = np.repeat(range(5), 2000)
  parts = divide(name, labels, 4, writers=np.tile(range(4), 2500))
  for part in parts:
    counts = np.bincount(labels[part], minlength=5)
    half = np.bincount(labels[part[: len(part) // 2]], minlength=5)
    # Six standard deviations of a draw without replacement.
    np.testing.assert_array_less(
        abs(half - counts / 2), 3 * np.sqrt(counts) + 1.5
    )


BAD_CALLS = {
    'unknown': (dict(name='typo'), r'`partition`=typo .* iid, shards'),
    'too many': (dict(num_clients=6), r'`num_clients`=6 .* 10 .* at most 5'),
    'too many shards': (dict(name='shards', num_clients=6), r'at most 5'),
    'none': (dict(num_clients=0), r'`num_clients`=0 '),
    'unsaid': (dict(num_clients=None), r'`num_clients`=None '),
    'seed': (dict(seed=-1), r'`seed`=-1 '),
    'no writers': (dict(name='writers'), r'`partition`=writers .*emnist'),
    'few writers': (
        dict(name='writers', num_clients=4, writers=np.arange(10) // 3),
        r'`num_clients`=4 .* 3 writers',
    ),
    'no client': (
        dict(name='writers', num_clients=0, writers=np.arange(10) // 3),
        r'`num_clients`=0 ',
    ),
    'lone writers': (
        dict(name='writers', num_clients=None, writers=np.arange(10)),
        r'`num_clients`',
    ),
} | {
    f'alpha {alpha}': (
        dict(name='dirichlet', dirichlet_alpha=alpha),
        r'`dirichlet_alpha`',
    )
    for alpha in (0.0, -1.0, 1e-300, 9e-7, np.inf, np.nan)
}


@pytest.mark.parametrize('case', BAD_CALLS)
def test_bad_calls(case):
  options, pattern = BAD_CALLS[case]
  options = dict(name='iid', num_clients=2, seed=0) | options
  with pytest.raises(DataError, match=pattern) as raised:
    partition(labels=np.arange(10) % 5, num_classes=5, **options)
  assert '\n' not in str(raised.value)


def test_long_tail_on_the_counts_of_mnist():
  counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
  labels = np.random.default_rng(0).permutation(np.repeat(range(10), counts))
  kept = long_tail(labels, 10, seed=0)
  expected = [5923, 4041, 2141, 1320, 754, 419, 274, 174, 97, 59]
  np.testing.assert_array_equal(np.bincount(labels[kept]), expected)
  assert len(kept) == 15_202
  assert np.all(np.diff(kept) > 0)


@pytest.mark.parametrize(
    ('factor', 'expected'),
    [(1.0, [100] * 3), (0.01, [100, 10, 1]), (1e-6, [100, 1, 1])],
)
def test_long_tail_factor(factor, expected):
  labels = np.tile(range(3), 100)
  kept = long_tail(labels, 3, seed=1, factor=factor)
  np.testing.assert_array_equal(np.bincount(labels[kept]), expected)


def test_long_tail_of_a_share_that_is_not_exact_in_binary():
  labels = np.tile(range(2), 90)
  kept = long_tail(labels, 2, seed=0, factor=0.7)
  np.testing.assert_array_equal(np.bincount(labels[kept]), [90, 63])


def test_long_tail_draws_by_seed():
  labels = np.tile(range(3), 100)
  draws = [long_tail(labels, 3, seed=seed) for seed in (0, 0, 1)]
  np.testing.assert_array_equal(draws[0], draws[1])
  assert set(draws[0]) != set(draws[2])


@pytest.mark.parametrize('factor', [0.0, -0.1, 1.5, np.nan])
def test_long_tail_bad_factor(factor):
  with pytest.raises(DataError, match='`imbalance`'):
    long_tail(np.zeros(4, int), 1, seed=0, factor=factor)
