"""Which aggregators are refused because they do not average."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.federated import averaging
from tests.helpers.small_problems import bilevel

SUM = tff.aggregators.SumFactory()


@pytest.mark.parametrize(
    ('factory', 'name'),
    [
        (SUM, 'SumFactory'),
        (tff.aggregators.SecureSumFactory(1.0), 'SecureSumFactory'),
        (
            tff.aggregators.EncodedSumFactory.quantize_above_threshold(8),
            'EncodedSumFactory',
        ),
        (tff.aggregators.clipping_factory(1.0, SUM), 'SumFactory'),
        (tff.aggregators.zeroing_factory(1.0, SUM), 'SumFactory'),
        (tff.aggregators.concat_factory(SUM), 'SumFactory'),
        (tff.aggregators.as_weighted_aggregator(SUM), 'SumFactory'),
        (
            tff.aggregators.add_measurements(
                SUM, server_measurement_fn=lambda value: {}
            ),
            'SumFactory',
        ),
        (
            tff.aggregators.clipping_factory(
                1.0, tff.aggregators.concat_factory(SUM)
            ),
            'SumFactory',
        ),
    ],
)
def test_sums_are_found(factory, name):
  assert averaging.find_sum(factory) == name


@pytest.mark.parametrize(
    'factory',
    [
        tff.aggregators.MeanFactory(),
        tff.aggregators.UnweightedMeanFactory(),
        tff.aggregators.UnweightedMeanFactory(
            tff.aggregators.SecureSumFactory(1.0)
        ),
        tff.aggregators.clipping_factory(1.0, tff.aggregators.MeanFactory()),
        tff.learning.robust_aggregator(),
        tff.learning.dp_aggregator(0.1, 5),
        tff.learning.compression_aggregator(),
        tff.learning.secure_aggregator(),
        tff.learning.ddp_secure_aggregator(0.1, 5),
    ],
)
def test_means_are_not(factory):
  assert averaging.find_sum(factory) is None


def test_they_are_refused_by_name():
  problem = bilevel()
  for name in ('inner_aggregator', 'outer_aggregator', 'gradient_aggregator'):
    with pytest.raises(ValueError, match=f'`{name}` ends in SumFactory'):
      fednest_tff.build(
          problem, inner_learning_rate=0.1, outer_learning_rate=0.1,
          **{name: tff.aggregators.zeroing_factory(1.0, SUM)},
      )
  with pytest.raises(ValueError, match='`inner_aggregator` .* average'):
    fednest_tff.build(
        problem, inner_learning_rate=0.1, outer_learning_rate=0.1,
        inner_aggregator=tff.aggregators.UnweightedReservoirSamplingFactory(3),
    )


def test_types_with_names_and_sizes():
  value = tff.to_type([('a', (np.float32, [2]))])
  averaging.check_type('outer_aggregator', value, value)
  with pytest.raises(ValueError, match='`outer_aggregator` makes'):
    averaging.check_type(
        'outer_aggregator', value, tff.TensorType(tf.float32.as_numpy_dtype)
    )
