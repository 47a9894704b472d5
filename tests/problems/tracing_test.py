"""The commonest mistakes in losses, each with a line that names the cure."""

import numpy as np
import pytest
import tensorflow as tf

from fednest_tff.local import derivatives
from tests.helpers.small_problems import bilevel, compositional, minimax, ones

CONSTANT = tf.constant([1.0, 2.0])
VARIABLE = tf.Variable([1.0, 2.0])
DENSE = tf.keras.layers.Dense(1)
DENSE.build([None, 2])


@pytest.mark.parametrize(
    ('bad', 'cure'),
    [
        (lambda x, y, batch: tf.reduce_sum(y * CONSTANT), 'NumPy arrays'),
        (lambda x, y, batch: tf.reduce_sum(CONSTANT * y), 'NumPy arrays'),
        (lambda x, y, batch: CONSTANT[0], 'NumPy arrays'),
        (lambda x, y, batch: tf.reduce_sum(y * VARIABLE), 'NumPy arrays'),
        (
            tf.function(lambda x, y, batch: tf.reduce_sum(y * CONSTANT)),
            'NumPy arrays',
        ),
        (
            lambda x, y, batch: tf.reduce_mean(DENSE(batch['a'])),
            'models.network',
        ),
        (
            lambda x, y, batch: tf.reduce_mean(
                tf.keras.layers.Dense(1)(batch['a'])
            ),
            'models.network',
        ),
        (lambda x, y, batch: np.sum(y), 'function of tf'),
        (lambda x, y, batch: tf.reduce_sum(y.numpy()), 'functions of tf'),
        (lambda x, y, batch: tf.random.normal([]), 'stateless'),
        (
            lambda x, y, batch: tf.reduce_sum(
                tf.keras.layers.Dropout(0.5)(y, training=True)
            ),
            'stateless',
        ),
    ],
)
@pytest.mark.parametrize('name', ['outer_loss', 'inner_loss'])
def test_losses(name, bad, cure):
  with pytest.raises(ValueError, match=cure) as caught:
    bilevel(**{name: bad})
  message = str(caught.value)
  assert f'`{name}`' in message and '\n' not in message


@pytest.mark.parametrize(
    'name',
    [
        'init_outer', 'init_inner', 'inner_loss', 'outer_loss', 'project_outer',
        'representation',
    ],
)
@pytest.mark.parametrize(
    'bad', [lambda *all: tf.Tensor, lambda *all: None, lambda *all: 'a']
)
def test_no_tensors(name, bad):
  with pytest.raises(ValueError, match=f'`{name}`') as caught:
    bilevel(**{name: bad})
  assert '\n' not in str(caught.value)


def test_other_functions():
  with pytest.raises(ValueError, match='`inner_map` .* NumPy arrays'):
    compositional(inner_map=lambda x, batch: x * CONSTANT)
  with pytest.raises(ValueError, match='`representation` .* NumPy arrays'):
    bilevel(representation=lambda x, batch: {'a': batch['a'] * VARIABLE})
  with pytest.raises(ValueError, match='`project_inner` .* NumPy arrays'):
    minimax(project_inner=lambda y: tf.minimum(y, CONSTANT))


def test_errors_of_other_kinds_stay():
  with pytest.raises(ValueError, match='outer_loss.*KeyError.*no such key'):
    bilevel(outer_loss=lambda x, y, batch: batch['no such key'])


def test_arrays_stateless_draws_and_initial_tensors_are_fine():
  array = np.float32([1, 2])
  draw = tf.random.stateless_normal

  problem = bilevel(
      outer_loss=lambda x, y, batch: tf.reduce_sum(
          y * array + draw([2], [0, 0])
      ),
      init_inner=lambda seed: CONSTANT,
      init_outer=ones,
  )
  np.testing.assert_array_equal(problem.init_inner(0), [1, 2])


def _loop(y):
  return tf.while_loop(
      lambda k, z: k < 3, lambda k, z: (k + 1, z * y), [0, y]
  )[1]


@pytest.mark.parametrize(
    'function',
    [
        lambda y: tf.cond(y[0] > 0, lambda: y**2, lambda: y**4),
        lambda y: tf.map_fn(lambda a: a**3, y),
    ],
    ids=['cond', 'map_fn'],
)
def test_control_flow_that_has_no_second_derivative(function):
  with tf.Graph().as_default():
    y = tf.constant([1.0, 2.0])

    def loss(y):
      return tf.reduce_sum(function(y))

    with pytest.raises(ValueError, match=r"tf.vectorized_map, or method='pen"):
      derivatives.hessian_vector_product(loss, y, y)
    with pytest.raises(ValueError, match='tf.while_loop'):
      derivatives.mixed_product(lambda x, y: loss(x * y), y, y, y)
    # The cures work.
    derivatives.gradient(loss, y)
    derivatives.hessian_vector_product(
        lambda y: tf.reduce_sum(tf.vectorized_map(lambda a: a**3, y)), y, y
    )


def test_a_loop_is_refused_or_its_second_derivative_is_right():
  """TensorFlow can take it or not, depending on what it has traced before."""
  with tf.Graph().as_default() as graph:
    y = tf.constant([1.0, 2.0])
    try:
      product = derivatives.hessian_vector_product(
          lambda y: tf.reduce_sum(_loop(y)), y, y
      )
    except ValueError as error:
      assert "tf.vectorized_map, or method='pen" in str(error)
      return
    with tf.compat.v1.Session(graph=graph) as session:
      found = session.run(product)
  np.testing.assert_allclose(found, [12.0, 96.0])  # Of y^4: 12 y^2 times y.


def test_type_errors_of_users_stay():
  def wrong(y):
    raise TypeError('mine')

  with pytest.raises(TypeError, match='mine'):
    derivatives.hessian_vector_product(wrong, CONSTANT, CONSTANT)
