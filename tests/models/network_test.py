"""Models as functions: the same numbers as the model, at any weights."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import models

layers = tf.keras.layers
INPUTS = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


class Subclassed(tf.keras.Model):
  """Layers in a list, one of them used twice."""

  def __init__(self):
    super().__init__()
    l2 = tf.keras.regularizers.L2(0.1)
    self.parts = [
        layers.Dense(5, 'tanh', kernel_regularizer=l2),
        layers.Dense(5, kernel_regularizer=l2),
    ]

  def call(self, inputs):
    first, second = self.parts
    return second(second(first(inputs)))


def _subclassed():
  model = Subclassed()
  model(INPUTS)
  return model


def _with_constants():
  model = tf.keras.Sequential([
      layers.InputLayer([4]),
      layers.Dense(4, trainable=False),
      layers.BatchNormalization(trainable=False),
      layers.LayerNormalization(),
      layers.Dropout(0.0),
      layers.Dense(2),
  ])
  model.layers[1].moving_mean.assign([1.0, 2.0, 3.0, 4.0])
  return model


def _embedding():
  return tf.keras.Sequential(
      [layers.InputLayer([4]), layers.Embedding(7, 3), layers.Dense(2)]
  )


@pytest.mark.parametrize(
    ('make', 'inputs'),
    [
        (_subclassed, INPUTS),
        (_with_constants, INPUTS),
        (_embedding, np.array([[0, 1, 2, 6]], np.float32)),
    ],
    ids=['subclassed', 'constants', 'embedding'],
)
def test_outputs_and_penalty_at_other_weights(make, inputs):
  model = make()
  network = models.network(model)
  before = [variable.numpy() for variable in model.variables]
  other = [2 * weight + 0.1 for weight in network.init(0)]
  actual = network(other, inputs).numpy()
  penalty = network.penalty(other).numpy()
  # Calling it has changed nothing.
  for variable, value in zip(model.variables, before, strict=True):
    np.testing.assert_array_equal(variable.numpy(), value)
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    in_graph = session.run(network(list(map(tf.constant, other)), inputs))
  network.assign(other)
  # Products may be summed in another order, and an output of terms that nearly
  # cancel is only as exact as the largest one.
  expected = model(inputs).numpy()
  for found in (actual, in_graph):
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=1e-6 * np.abs(expected).max()
    )
  np.testing.assert_allclose(penalty, sum(map(float, model.losses)), rtol=1e-6)
  assert (penalty > 0) == isinstance(model, Subclassed)


def test_gradients_reach_every_weight():
  network = models.network(_subclassed())
  weights = tuple(map(tf.constant, network.init(0)))
  with tf.GradientTape() as tape:
    tape.watch(weights)
    value = tf.reduce_sum(network(weights, INPUTS) ** 2)
  gradients = tape.gradient(value, weights)
  assert all(np.abs(gradient).max() > 0 for gradient in gradients)


def test_keras_models_that_tff_builds_in_graphs_do_no_harm():
  """Keras turns classes into those of TensorFlow 1 meanwhile."""
  model = _with_constants()
  network = models.network(model)
  expected = network(network.init(0), INPUTS)
  with tf.Graph().as_default():
    tf.keras.Sequential([layers.Dense(2, input_shape=[4])])
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    weights = list(map(tf.constant, network.init(0)))
    actual = session.run(network(weights, INPUTS))
  np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_function_of_the_seed():
  network = models.network(
      lambda seed: tf.keras.Sequential([
          layers.Dense(
              2, input_shape=[4],
              kernel_initializer=tf.keras.initializers.GlorotUniform(seed),
          )
      ])
  )
  with tf.Graph().as_default():  # Where TFF asks for them.
    again = network.init(1)
  np.testing.assert_array_equal(network.init(1)[0], again[0])
  assert np.abs(network.init(0)[0] - again[0]).max() > 0.1


def test_a_functional_model():
  keras = tf.keras.Sequential([layers.Dense(2, input_shape=[4])])
  functional = tff.learning.models.functional_model_from_keras(
      keras, tf.keras.losses.MeanSquaredError(),
      (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 2])),
  )
  network = models.network(functional)
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    weights = [tf.constant(3 * w + 1) for w in network.init(0)]
    actual = session.run(network(weights, INPUTS))
  kernel, bias = network.init(0)
  expected = INPUTS @ (3 * kernel + 1) + 3 * bias + 1
  # As above: an output of terms that nearly cancel is as exact as the largest.
  np.testing.assert_allclose(
      actual, expected, rtol=0, atol=1e-6 * np.abs(expected).max()
  )
  with pytest.raises(ValueError, match='keeps no weights'):
    network.assign(network.init(0))


@pytest.mark.parametrize(
    ('layer', 'message'),
    [
        (lambda: layers.Dropout(0.5), r'\(Dropout\): it draws random numbers'),
        (lambda: layers.GaussianNoise(0.1), 'random numbers'),
        (lambda: layers.RandomFlip(), 'random numbers'),
        (lambda: layers.BatchNormalization(), 'LayerNormalization'),
        (
            lambda: layers.Dense(2, activity_regularizer='l2'),
            'activity_regularizer',
        ),
        (
            lambda: tf.keras.Sequential([layers.Dropout(0.1, name='deep')]),
            '`deep`',
        ),
    ],
    ids=['dropout', 'noise', 'flip', 'batch norm', 'activity', 'nested'],
)
def test_layers_that_do_not_fit_are_named(layer, message):
  model = tf.keras.Sequential(
      [layers.InputLayer([4, 4, 1]), layer(), layers.Dense(2)]
  )
  with pytest.raises(ValueError, match=message):
    models.network(model)


@pytest.mark.parametrize(
    ('model', 'message'),
    [
        (3, 'must be a tf.keras.Model'),
        (lambda seed: 'model', 'must be a tf.keras.Model'),
        (tf.keras.Sequential([layers.Dense(2)]), 'no weights yet'),
        (
            tf.keras.Sequential([layers.InputLayer([4]), layers.ReLU()]),
            'no trainable weights',
        ),
    ],
    ids=['number', 'function', 'not built', 'no weights'],
)
def test_other_things_are_refused(model, message):
  with pytest.raises(ValueError, match=message):
    models.network(model)


def test_repr():
  model = tf.keras.Sequential([layers.Dense(2, input_shape=[4])], name='head')
  network = models.network(model)
  assert repr(network) == '<Network head: 2 tensors, 10 weights>'
