"""Problems from models against the same problems written by hand."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import fednest_tff
from fednest_tff import models
from fednest_tff.local import derivatives

RUNTIME = 'in_process'
SPEC = (tf.TensorSpec([4], tf.float32), tf.TensorSpec([], tf.int32))
RIDGE, L2 = 0.03, 0.02
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _keras():
  l2 = tf.keras.regularizers.L2(L2)
  backbone = tf.keras.Sequential([
      tf.keras.layers.Dense(5, 'tanh', input_shape=[4], kernel_regularizer=l2)
  ])
  head = tf.keras.Sequential([
      tf.keras.layers.Dense(3, input_shape=[5], bias_regularizer=l2)
  ])
  return backbone, head


BACKBONE, HEAD = _keras()
X, Y = ([v.numpy() for v in m.trainable_variables] for m in (BACKBONE, HEAD))


@pytest.fixture(scope='module')
def made():
  return models.backbone_and_head(BACKBONE, HEAD, LOSS, SPEC, ridge=RIDGE)


def _by_hand():
  def loss(x, y, batch):
    features = tf.tanh(batch[0] @ x[0] + x[1])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            batch[1], features @ y[0] + y[1]
        )
    )

  return fednest_tff.bilevel(
      lambda x, y, batch: loss(x, y, batch) + L2 * tf.reduce_sum(x[0] ** 2),
      lambda x, y, batch: loss(x, y, batch)
      + L2 * tf.reduce_sum(y[1] ** 2)
      + RIDGE * (tf.reduce_sum(y[0] ** 2) + tf.reduce_sum(y[1] ** 2)),
      lambda seed: tuple(X),
      lambda seed: tuple(Y),
      SPEC,
  )


def _clients():
  rng = np.random.default_rng(1)
  return [
      (
          rng.normal(k, 1, size=(12, 4)).astype(np.float32),
          rng.integers(3, size=12).astype(np.int32),
      )
      for k in range(3)
  ]


def _derivatives(problem):
  """All that the algorithms take of a problem, at a point and for a vector."""
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    # Not the model's own weights.
    x = tuple(tf.constant(2 * w + 0.1) for w in X)
    y = tuple(tf.constant(3 * w - 0.1) for w in Y)
    p = tuple(tf.constant(w**2 + 0.5) for w in Y)
    batch = tuple(map(tf.constant, _clients()[0]))
    features = problem.representation(x, batch)
    found = (
        derivatives.inner_gradient(problem, x, y, features),
        derivatives.inner_hessian_product(problem, x, y, p, features),
        derivatives.direct_gradient(problem, x, y, batch),
        derivatives.hypergradient(problem, x, y, p, batch, batch),
        derivatives.inner_gradient_and_products(problem, x, y, p, batch),
    )
    return session.run(tf.nest.flatten(found))


def test_derivatives(made):
  pairs = zip(
      _derivatives(made.problem), _derivatives(_by_hand()), strict=True
  )
  for actual, expected in pairs:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_derivatives_with_functional_models():
  """Made by TFF of Keras models, without regularizers."""
  backbone, head = (
      tff.learning.models.functional_model_from_keras(
          model, LOSS,
          (tf.TensorSpec([None, size]), tf.TensorSpec([None], tf.int32)),
      )
      for model, size in ((BACKBONE, 4), (HEAD, 5))
  )
  functional = models.backbone_and_head(backbone, head, LOSS, SPEC, ridge=0.5)
  bare = [
      tf.keras.Sequential([
          tf.keras.layers.Dense(5, 'tanh', input_shape=[4], weights=X)
      ]),
      tf.keras.Sequential([
          tf.keras.layers.Dense(3, input_shape=[5], weights=Y)
      ]),
  ]
  keras = models.backbone_and_head(*bare, LOSS, SPEC, ridge=0.5)
  pairs = zip(
      _derivatives(functional.problem), _derivatives(keras.problem),
      strict=True,
  )
  for actual, expected in pairs:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope='module')
def trained(made):
  """Weights after an epoch, of the models and by hand, and the datasets."""
  datasets = [
      tf.data.Dataset.from_tensor_slices(client) for client in _clients()
  ]
  found = []
  for problem in (made.problem, _by_hand()):
    process = fednest_tff.build(
        problem, inner_learning_rate=0.2, outer_learning_rate=0.3,
        inner_local_steps=2, neumann_terms=2, batch_size=4,
        outer_local_steps=2,
    )
    state = process.next(process.initialize(), datasets).state
    found.append(process.get_model_weights(state))
  return *found, datasets


def test_an_epoch(trained):
  actual, expected, _ = trained
  for k, start in enumerate((X, Y)):
    for a, b, c in zip(actual[k], expected[k], start, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
      assert np.abs(a - c).max() > 1e-3


def test_weights_go_back_into_the_models_and_into_tff(made, trained):
  weights, _, datasets = trained
  inputs, labels = map(np.concatenate, zip(*_clients(), strict=True))
  logits = made.predict(weights, inputs)
  made.assign(weights)
  expected = HEAD(BACKBONE(inputs))
  # Sums of float32 in another order: relative to the largest.
  np.testing.assert_allclose(
      logits, expected, rtol=0, atol=1e-6 * np.max(np.abs(expected))
  )
  functional = made.functional_model(
      lambda: collections.OrderedDict(
          accuracy=tf.keras.metrics.SparseCategoricalAccuracy()
      )
  )
  evaluation = tff.learning.algorithms.build_fed_eval(functional)
  state = evaluation.set_model_weights(
      evaluation.initialize(), made.to_model_weights(weights)
  )
  metrics = evaluation.next(state, [d.batch(5) for d in datasets]).metrics
  found = metrics['client_work']['eval']['current_round_metrics']['accuracy']
  expected = np.mean(np.argmax(logits, axis=1) == labels)
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  # And back.
  back = made.to_nested_weights(evaluation.get_model_weights(state))
  for a, b in zip(
      tf.nest.flatten(back), tf.nest.flatten(weights), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_model_weights_are_those_of_x_and_then_of_y(made):
  weights = fednest_tff.NestedWeights(X, Y)
  trainable, others = made.to_model_weights(weights)
  assert others == ()
  for found, expected in zip(trainable, (*X, *Y), strict=True):
    np.testing.assert_array_equal(found, expected)
  back = made.to_nested_weights((trainable, others))
  for part, expected in zip(back, (X, Y), strict=True):
    for a, b in zip(part, expected, strict=True):
      np.testing.assert_array_equal(a, b)


def test_single_level_and_mappings():
  spec = collections.OrderedDict(x=SPEC[0], y=SPEC[1])
  backbone, _ = _keras()
  made = models.single_level(backbone, 'sparse_categorical_crossentropy', spec)
  assert repr(made).startswith('<ModelProblem, single_level: <Network')
  inputs, labels = _clients()[0]
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    x = tuple(map(tf.constant, made.problem.init_outer(0)))
    actual = session.run(
        made.problem.outer_loss(x, (), dict(x=inputs, y=labels))
    )
  outputs = backbone(inputs)
  loss = tf.keras.losses.sparse_categorical_crossentropy(labels, outputs)
  expected = np.mean(loss) + float(backbone.losses[0])
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(loss=tf.keras.losses.MeanSquaredError(reduction='sum')), "'sum'"),
        (dict(loss=3), '`loss` must be a Keras loss'),
        (dict(element_spec=SPEC[0]), '`element_spec` must be'),
        (dict(element_spec={'a': SPEC[0]}), '`element_spec` must be'),
        (dict(ridge=-1.0), '`ridge`'),
    ],
)
def test_bad_arguments(changes, message):
  arguments = dict(
      backbone=BACKBONE, head=HEAD, loss=LOSS, element_spec=SPEC
  )
  with pytest.raises(ValueError, match=message):
    models.backbone_and_head(**(arguments | changes))
