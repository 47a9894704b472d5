"""Minibatches: each example once per local epoch, and all from the seed."""

import collections

from hypothesis import assume, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from fednest_tff.local import sampling

QUICK = settings(
    deadline=None, derandomize=True, database=None, max_examples=30
)

Pair = collections.namedtuple('Pair', ['first', 'second'])

COUNTS = st.integers(1, 12)
SIZES = st.one_of(st.none(), st.integers(1, 15))
STEPS = st.integers(1, 14)
SEEDS = st.tuples(st.integers(-(2**62), 2**62), st.integers(0, 2**31))


def _seed(*numbers):
  return tf.constant(numbers or (3, 4), tf.int64)


def _rows(n):
  """`n` examples whose every leaf tells the number of its row."""
  ids = np.arange(n)
  return {
      'image': np.tile(ids[:, None, None], [1, 2, 3]).astype(np.float32),
      'label': ids.astype(np.int64),
      'more': [Pair(ids[:, None] + 0.5, np.array([f'row {i}' for i in ids]))],
  }


def _examples(n):
  return tf.nest.map_structure(tf.constant, _rows(n))


def _ids(batch):
  """The rows in a batch, after a check that its leaves belong together."""
  rows = [int(i) for i in np.asarray(batch['label'])]
  expected = _rows(max(rows, default=0) + 1)
  for leaf, reference in zip(
      tf.nest.flatten(batch), tf.nest.flatten(expected), strict=True
  ):
    values = np.asarray(leaf)
    if values.dtype == object:
      values = values.astype(str)
    np.testing.assert_array_equal(values, reference[rows])
  return rows


def _stream(n, size, steps, seed):
  batches = sampling.Minibatches(
      _examples(n), size, tf.constant(steps), _seed(*seed)
  )
  return [_ids(batches[tf.constant(step)]) for step in range(steps)]


def _epochs(stream, per_epoch):
  return [
      stream[begin : begin + per_epoch]
      for begin in range(0, len(stream), per_epoch)
  ]


@QUICK
@given(COUNTS, SIZES, STEPS, SEEDS)
def test_each_epoch_shows_each_example_once(n, size, steps, seed):
  stream = _stream(n, size, steps, seed)
  assert len(stream) == steps
  width = n if size is None else size
  per_epoch = -(-n // width)
  short = n - (per_epoch - 1) * width
  for epoch in _epochs(stream, per_epoch):
    shown = [i for batch in epoch for i in batch]
    assert len(set(shown)) == len(shown)
    sizes = [len(batch) for batch in epoch]
    assert sizes == ([width] * (per_epoch - 1) + [short])[: len(epoch)]
    if len(epoch) == per_epoch:
      assert sorted(shown) == list(range(n))


@QUICK
@given(st.integers(0, 12), SIZES)
def test_steps_per_epoch(n, size):
  steps = sampling.steps_per_epoch(tf.constant(n), size)
  assert steps.dtype == tf.int32
  expected = 1 if size is None else int(np.ceil(n / size))
  assert steps.numpy() == expected


@pytest.mark.parametrize(
    ('n', 'size', 'expected'),
    [(5, 2, [2, 2, 1, 2]), (6, 3, [3] * 4), (3, 8, [3] * 4), (1, 1, [1] * 4)],
)
def test_batch_sizes(n, size, expected):
  assert [len(batch) for batch in _stream(n, size, 4, (0, 1))] == expected


@QUICK
@given(COUNTS, STEPS, SEEDS)
def test_without_a_batch_size_each_step_has_all_in_order(n, steps, seed):
  assert _stream(n, None, steps, seed) == [list(range(n))] * steps


@settings(QUICK, max_examples=10)
@given(st.integers(8, 12), st.integers(1, 15), SEEDS)
def test_the_seed_alone_decides(n, size, seed):
  stream = _stream(n, size, 6, seed)
  assert _stream(n, size, 6, seed) == stream
  for other in ((seed[0], seed[1] + 1), (seed[0] + 1, seed[1])):
    assert _stream(n, size, 6, other) != stream


@pytest.mark.parametrize('size', [1, 7, 30, 64])
def test_epochs_differ_from_each_other_and_from_the_given_order(size):
  per_epoch = -(-30 // size)
  epochs = _epochs(_stream(30, size, 3 * per_epoch, (5, 6)), per_epoch)
  orders = [tuple(i for batch in epoch for i in batch) for epoch in epochs]
  assert len({*orders, tuple(range(30))}) == 4


def test_permutations_are_uniform_and_independent():
  orders = sampling.permutation((2400, 4), _seed()).numpy()
  np.testing.assert_array_equal(
      np.sort(orders, axis=1), np.tile(np.arange(4), [2400, 1])
  )
  counts = collections.Counter(map(tuple, orders))
  assert len(counts) == 24
  statistic = sum((count - 100) ** 2 / 100 for count in counts.values())
  assert statistic < 60  # 23 degrees of freedom: beyond 60 once in 30,000.
  follows = collections.Counter(zip(orders[:-1, 0], orders[1:, 0], strict=True))
  statistic = sum((count - 150) ** 2 / 150 for count in follows.values())
  assert len(follows) == 16
  assert statistic < 45  # 15 degrees of freedom.


def test_permutation_does_not_depend_on_the_type_of_its_shape():
  expected = sampling.permutation((3, 5), _seed()).numpy()
  actual = sampling.permutation((tf.constant(3), 5), _seed()).numpy()
  np.testing.assert_array_equal(actual, expected)


@QUICK
@given(COUNTS, SIZES, SEEDS)
def test_sample_is_without_replacement(n, size, seed):
  def draw():
    return _ids(sampling.sample(_examples(n), size, _seed(*seed)))

  rows = draw()
  assert len(rows) == len(set(rows)) == min(n, size or n)
  assert set(rows) <= set(range(n))
  assert draw() == rows
  if size is None:
    assert rows == list(range(n))


def test_sample_takes_each_example_equally_often():
  @tf.function
  def draw(seed):
    return sampling.sample(_examples(5), 2, seed)['label']

  counts = np.zeros(5)
  for seed in range(500):
    counts[draw(_seed(seed, 0)).numpy()] += 1
  assert counts.sum() == 1000
  assert np.all(abs(counts - 200) < 50)  # Standard deviation: 11.


def test_num_examples():
  for n in (0, 1, 7):
    count = sampling.num_examples(_examples(n))
    assert count.dtype == tf.int32
    assert count.numpy() == n


@QUICK
@given(SEEDS, st.integers(-(2**62), 2**62), st.integers(1, 2**31))
def test_fold_in(seed, data, distance):
  folded = sampling.fold_in(_seed(*seed), data)
  assert folded.dtype == tf.int64
  assert folded.shape == [2]

  def same(other):
    return np.array_equal(folded, other)

  assert same(sampling.fold_in(_seed(*seed), tf.constant(data, tf.int64)))
  assert not same(_seed(*seed))
  assert not same(sampling.fold_in(_seed(*seed), data + distance))
  assert not same(sampling.fold_in(_seed(seed[0], seed[1] + 1), data))


def test_fold_in_uses_all_bits():
  folded = {
      tuple(sampling.fold_in(_seed(), data).numpy())
      for data in (0, 1, 2**32, -(2**32), 2**62)
  }
  assert len(folded) == 5


def test_fold_in_takes_what_callers_have():
  folded = sampling.fold_in(_seed(), 7).numpy()
  for data in (tf.constant(7), tf.constant(7, tf.int64), np.int32(7)):
    np.testing.assert_array_equal(sampling.fold_in(_seed(), data), folded)


@QUICK
@given(COUNTS, st.data())
def test_fingerprint_is_of_the_data_alone(n, data):
  rows = _rows(n)
  original = sampling.fingerprint(tf.nest.map_structure(tf.constant, rows))
  assert original.dtype == tf.int64
  assert original.shape == []
  tf.random.set_seed(data.draw(st.integers(0, 100)))
  again = sampling.fingerprint(_examples(n))
  assert again.numpy() == original.numpy()

  changed = tf.nest.map_structure(np.copy, rows)
  leaves = tf.nest.flatten(changed)
  leaf = leaves[data.draw(st.integers(0, len(leaves) - 1))]
  index = data.draw(st.integers(0, leaf.size - 1))
  leaf.flat[index] = 'other' if leaf.dtype.kind == 'U' else leaf.flat[index] + 1
  other = sampling.fingerprint(tf.nest.map_structure(tf.constant, changed))
  assert other.numpy() != original.numpy()


@QUICK
@given(st.integers(2, 12), st.data())
def test_fingerprint_depends_on_the_order(n, data):
  order = data.draw(st.permutations(range(n)))
  assume(order != list(range(n)))
  examples = _examples(n)
  shuffled = tf.nest.map_structure(lambda t: tf.gather(t, order), examples)
  a, b = tf.zeros([n]), tf.ones([n])
  for first, second in ((examples, shuffled), ((a, b), (b, a))):
    fingerprint = sampling.fingerprint(first).numpy()
    assert sampling.fingerprint(second).numpy() != fingerprint


def test_fingerprints_spread():
  values = {
      int(sampling.fingerprint({'a': tf.constant([float(i)])}))
      for i in range(200)
  }
  assert len(values) == 200
  assert min(values) < -(2**61) < 2**61 < max(values)


@pytest.mark.parametrize('dtype', [tf.bool, tf.uint8, tf.float16, tf.bfloat16])
def test_fingerprint_of_other_types(dtype):
  values = {
      int(sampling.fingerprint(tf.cast(row, dtype)))
      for row in ([0, 0], [0, 1], [1, 0], [1, 1])
  }
  assert len(values) == 4


_UNKNOWN = tf.nest.map_structure(
    lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), _examples(1)
)


@pytest.mark.parametrize('size', [None, 1, 4, 9])
def test_unknown_leading_axis_inside_a_tf_function(size):
  @tf.function(input_signature=[_UNKNOWN, tf.TensorSpec([2], tf.int64)])
  def traced(examples, seed):
    steps = 2 * sampling.steps_per_epoch(sampling.num_examples(examples), size)
    batches = sampling.Minibatches(examples, size, steps, seed)
    labels = tf.TensorArray(
        tf.int64, steps, infer_shape=False, element_shape=[None]
    )
    _, labels = tf.while_loop(
        lambda step, _: step < steps,
        lambda step, array: (
            step + 1, array.write(step, batches[step]['label'])
        ),
        (tf.constant(0), labels),
    )  # fmt: skip
    return (
        labels.concat(),
        sampling.sample(examples, size, seed),
        sampling.fingerprint(examples),
    )

  for n in (1, 5, 8):
    labels, sample, fingerprint = traced(_examples(n), _seed())
    per_epoch = 1 if size is None else -(-n // size)
    expected = _stream(n, size, 2 * per_epoch, (3, 4))
    assert labels.numpy().tolist() == sum(expected, [])
    eager = sampling.sample(_examples(n), size, _seed())
    assert _ids(sample) == _ids(eager)
    assert fingerprint.numpy() == sampling.fingerprint(_examples(n)).numpy()
  assert traced.experimental_get_tracing_count() == 1


@pytest.mark.parametrize('size', [None, 2, 9])
def test_inside_a_plain_graph(size):
  """TFF traces into one, where `tensor == number` compares identities."""
  n, steps = 5, 6
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    examples = tf.nest.map_structure(
        lambda array: tf.compat.v1.placeholder_with_default(
            array, [None, *array.shape[1:]]
        ),
        _rows(n),
    )
    seed = tf.constant([3, 4], tf.int64)
    batches = sampling.Minibatches(examples, size, tf.constant(steps), seed)
    graph = session.run({
        'stream': [batches[tf.constant(step)] for step in range(steps)],
        'sample': sampling.sample(examples, size, seed),
        'count': sampling.num_examples(examples),
        'fold': sampling.fold_in(seed, tf.constant(9)),
        'fingerprint': sampling.fingerprint(examples),
    })
  for batch in (*graph['stream'], graph['sample']):
    text = batch['more'][0]
    batch['more'] = [text._replace(second=text.second.astype(str))]
  assert [_ids(batch) for batch in graph['stream']] == _stream(
      n, size, steps, (3, 4)
  )
  assert _ids(graph['sample']) == _ids(
      sampling.sample(_examples(n), size, _seed())
  )
  assert graph['count'] == n
  np.testing.assert_array_equal(graph['fold'], sampling.fold_in(_seed(), 9))
  assert graph['fingerprint'] == sampling.fingerprint(_examples(n)).numpy()


def test_no_steps_are_no_batches():
  """A client that takes no step may still ask for its minibatches."""
  batches = sampling.Minibatches(_examples(3), 2, tf.constant(0), _seed())
  ran = tf.while_loop(
      lambda step: step < 0,
      lambda step: [step + tf.shape(batches[step]['label'])[0]],
      [tf.constant(0)],
  )
  assert ran[0].numpy() == 0


def test_purposes_of_one_seed_differ():
  """Draws that share a call's seed must not share a purpose."""
  purpose = sampling.Purpose
  fed_inn = [purpose.INNER_GRADIENT, purpose.INNER_STEPS]
  rounds = [
      draw(n)
      for draw in (sampling.neumann_cohort, sampling.neumann_sample)
      for n in range(50)
  ]
  fed_out = [
      purpose.OUTER_GRADIENT,
      purpose.MIXED_PRODUCT,
      purpose.OUTER_STEPS,
      purpose.NEUMANN_STOP,
      *rounds,
  ]
  local = [
      purpose.LOCAL_OUTER_BATCHES,
      purpose.LOCAL_INNER_BATCHES,
      purpose.LOCAL_STOP,
  ]
  simultaneous = [purpose.SIMULTANEOUS_INNER, purpose.SIMULTANEOUS_OUTER]
  for purposes in (fed_inn, fed_out, local, simultaneous):
    assert len({int(number) for number in purposes}) == len(purposes)


def test_purposes_of_a_neumann_round_known_only_later():
  for draw in (sampling.neumann_cohort, sampling.neumann_sample):
    for n in (0, 3):
      assert int(draw(tf.constant(n))) == int(draw(n))
