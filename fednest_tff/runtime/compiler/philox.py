"""Random draws of all clients at once, with the numbers of TensorFlow's own.

TensorFlow's operations take one seed, so that clients with different seeds draw
one after the other, in a loop of many small operations. Here the generator
behind them is written in integer arithmetic: Philox 4x32-10 (Parallel Random
Numbers: As Easy as 1, 2, 3. J. Salmon, M. Moraes, R. Dror, D. Shaw. SC 2011),
which TensorFlow takes for all stateless draws on CPUs and GPUs.

A block of four words comes from a counter of four words and a key of two. Words
are 32 bits, kept in int64. Those with even numbers are one tensor, those with
odd numbers another: [..., 2] each. The functions are traced once: a call of
them adds one node to a graph.
"""

import functools

import tensorflow as tf

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# The key with which TensorFlow scrambles a seed.
_SEED_KEY = (0x3EC8F720, 0x02461E29)


def _constant(*words: int) -> tf.Tensor:
  return tf.constant(words, tf.int64)


def _low(numbers: tf.Tensor) -> tf.Tensor:
  return tf.bitwise.bitwise_and(numbers, tf.constant(_WORD, tf.int64))


def _high(numbers: tf.Tensor) -> tf.Tensor:
  # The shift keeps the sign, which the mask drops.
  return _low(tf.bitwise.right_shift(numbers, tf.constant(32, tf.int64)))


def _join(low: tf.Tensor, high: tf.Tensor) -> tf.Tensor:
  """Numbers of 64 bits from their halves."""
  shifted = tf.bitwise.left_shift(high, tf.constant(32, tf.int64))
  return tf.bitwise.bitwise_or(low, shifted)


def _philox(
    even: tf.Tensor, odd: tf.Tensor, key: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Blocks from counters and keys."""
  for k in range(_ROUNDS):
    if k:
      key = _low(key + _constant(*_KEY_STEPS))
    products = even * _constant(*_MULTIPLIERS)
    products = tf.gather(products, [1, 0], axis=-1)
    mixed = tf.bitwise.bitwise_xor(_high(products), odd)
    even, odd = tf.bitwise.bitwise_xor(mixed, key), _low(products)
  return even, odd


def keys_and_counters(seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """`StatelessRandomGetKeyCounter` of several seeds.

  Args:
    seeds: Integers of shape [n, 2].

  Returns:
    Keys and counters, uint64 of shapes [n, 1] and [n, 2].
  """
  return _keys_and_counters(tf.cast(seeds, tf.int64))


@tf.function(
    input_signature=[tf.TensorSpec([None, 2], tf.int64)], autograph=False
)
def _keys_and_counters(seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  even, odd = _philox(_low(seeds), _high(seeds), _constant(*_SEED_KEY))
  mixed = _join(even, odd)
  counters = tf.stack([tf.zeros_like(mixed[:, 1]), mixed[:, 1]], axis=1)
  return tf.bitcast(mixed[:, :1], tf.uint64), tf.bitcast(counters, tf.uint64)


def _to_float(words: tf.Tensor) -> tf.Tensor:
  """Numbers in [0, 1) from words: their lower 23 bits are the mantissa."""
  mantissa = tf.bitwise.bitwise_and(words, tf.constant(0x7FFFFF, tf.int64))
  one = tf.constant(0x3F800000, tf.int64)  # The exponent of 1.
  bits = tf.cast(tf.bitwise.bitwise_or(mantissa, one), tf.int32)
  return tf.bitcast(bits, tf.float32) - 1.0


@functools.cache
def _build_draw(dtype: tf.DType) -> tf.types.experimental.GenericFunction:
  """`draw` for one type."""
  per_block = 4 if dtype == tf.float32 else 2

  @tf.function(
      input_signature=[
          tf.TensorSpec([None], tf.int32),
          tf.TensorSpec([None, 1], tf.uint64),
          tf.TensorSpec([None, 2], tf.uint64),
      ],
      autograph=False,
  )
  def draw_all(
      shape: tf.Tensor, keys: tf.Tensor, counters: tf.Tensor
  ) -> tf.Tensor:
    clients = tf.shape(keys)[:1]
    size = tf.reduce_prod(shape)
    count = (size + per_block - 1) // per_block
    # The first half of a counter is the number of the block.
    blocks = tf.range(tf.cast(count, tf.int64))[:, tf.newaxis]
    of_each = tf.concat([clients, [count, 1]], axis=0)
    blocks = tf.broadcast_to(blocks, of_each)
    rest = tf.bitcast(counters, tf.int64)[:, tf.newaxis, 1:]
    rest = tf.broadcast_to(rest, of_each)
    keys = tf.bitcast(keys, tf.int64)
    even, odd = _philox(
        tf.concat([blocks, _low(rest)], axis=-1),
        tf.concat([tf.zeros_like(blocks), _high(rest)], axis=-1),
        tf.concat([_low(keys), _high(keys)], axis=1)[:, tf.newaxis],
    )
    if dtype == tf.float32:
      drawn = _to_float(tf.stack([even, odd], axis=-1))
    else:
      drawn = _join(even, odd)
    drawn = tf.reshape(drawn, tf.concat([clients, [per_block * count]], axis=0))
    return tf.reshape(
        drawn[:, :size], tf.concat([clients, shape], axis=0)
    )

  return draw_all


def draw(
    shape: tf.Tensor, keys: tf.Tensor, counters: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
  """`StatelessRandomUniformV2` or `...FullIntV2` of several keys.

  Args:
    shape: Of one client's draw.
    keys: As `keys_and_counters` returns them.
    counters: Likewise; their first halves must be 0.
    dtype: float32, for numbers from 0 to 1, or int64, for all integers.

  Returns:
    A tensor of shape [n, *shape].
  """
  drawn = _build_draw(dtype)(tf.cast(shape, tf.int32), keys, counters)
  known = tf.get_static_value(shape)
  rank = shape.shape[0]
  if known is not None:
    drawn.set_shape([None, *known])
  elif rank is not None:
    drawn.set_shape([None] * (1 + rank))
  return drawn
