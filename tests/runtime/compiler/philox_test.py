"""Draws at once against TensorFlow's own operations, bit by bit."""

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff.runtime.compiler import philox

SEEDS = tf.constant(
    [[0, 0], [1, -5], [2**62 + 7, -(2**63)], [123456789012, 42]], tf.int64
)


@pytest.mark.parametrize('dtype', [tf.int32, tf.int64])
def test_keys_and_counters(dtype):
  seeds = tf.cast(SEEDS, dtype)
  keys, counters = philox.keys_and_counters(seeds)
  for seed, key, counter in zip(seeds, keys, counters, strict=True):
    expected = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    np.testing.assert_array_equal(key, expected.key)
    np.testing.assert_array_equal(counter, expected.counter)


@pytest.mark.parametrize(
    'operation, dtype',
    [
        (tf.raw_ops.StatelessRandomUniformV2, tf.float32),
        (tf.raw_ops.StatelessRandomUniformFullIntV2, tf.int64),
    ],
)
@pytest.mark.parametrize('shape', [[], [1], [5], [3, 7], [0, 4], [1000, 5]])
def test_draws(operation, dtype, shape):
  shape = tf.constant(shape, tf.int32)
  keys, counters = philox.keys_and_counters(SEEDS)
  drawn = philox.draw(shape, keys, counters, dtype)
  assert drawn.dtype == dtype
  for found, key, counter in zip(drawn, keys, counters, strict=True):
    expected = operation(
        shape=shape, key=key, counter=counter, alg=1, dtype=dtype
    )
    assert found.shape == expected.shape
    assert found.numpy().tobytes() == expected.numpy().tobytes()
