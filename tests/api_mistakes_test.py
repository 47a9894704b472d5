"""Mistakes in the use of the library: each error names the argument."""

import numpy as np
import pytest
import tensorflow as tf

import fednest_tff

RUNTIME = 'in_process'

SPEC = tf.TensorSpec([2], tf.float32)
VARIABLE = tf.Variable([1.0, 1.0])


def init(seed):
  del seed
  return tf.ones([2])


def outer_loss(x, y, batch):
  return tf.reduce_sum((x - y) ** 2) + tf.reduce_mean(batch)


def inner_loss(x, y, batch):
  rows = tf.reduce_sum((y - batch) ** 2, axis=1)
  return tf.reduce_mean(rows) + tf.reduce_sum(x * y)


def bilevel(**changed):
  arguments = dict(
      outer_loss=outer_loss, inner_loss=inner_loss, init_outer=init,
      init_inner=init, element_spec=SPEC,
  )
  return fednest_tff.bilevel(**(arguments | changed))


def build(problem, **changed):
  options = dict(
      outer_learning_rate=0.01, inner_learning_rate=0.01, smoothness=4.0,
      inner_local_steps=1, neumann_terms=1,
  )
  return fednest_tff.build(problem, 'fednest', **(options | changed))


@pytest.fixture(scope='module')
def process():
  return build(bilevel())


@pytest.fixture(scope='module')
def other():
  """A process whose x has another shape."""
  return build(
      fednest_tff.bilevel(
          lambda x, y, b: tf.reduce_sum(x) + tf.reduce_sum(y),
          lambda x, y, b: tf.reduce_sum(y**2) + tf.reduce_sum(x),
          lambda seed: tf.ones([3]),
          init,
          SPEC,
      )
  )


def dataset(dimension=2, dtype=np.float32):
  values = np.arange(4 * dimension).reshape(4, dimension).astype(dtype)
  return tf.data.Dataset.from_tensor_slices(values)


NO_FUNCTIONS = [3, None, 'f', lambda: 1.0, lambda a, b, c, d: 1.0]


@pytest.mark.parametrize('wrong', NO_FUNCTIONS, ids=range(len(NO_FUNCTIONS)))
@pytest.mark.parametrize(
    'name', ['outer_loss', 'inner_loss', 'init_outer', 'init_inner']
)
def test_no_function_or_one_of_other_arguments(name, wrong):
  with pytest.raises(ValueError, match=f'`{name}` must be a function'):
    bilevel(**{name: wrong})


@pytest.mark.parametrize('wrong', NO_FUNCTIONS, ids=range(len(NO_FUNCTIONS)))
def test_functions_of_other_problems(wrong):
  match = '`loss` must be a function'
  with pytest.raises(ValueError, match=match):
    fednest_tff.minimax(wrong, init, init, SPEC)
  with pytest.raises(ValueError, match=match):
    fednest_tff.single_level(wrong, init, SPEC)
  with pytest.raises(ValueError, match='`inner_map` must be a function'):
    fednest_tff.compositional(lambda y, b: 0.0, wrong, init, init, SPEC)
  with pytest.raises(ValueError, match='`outer_loss` must be a function'):
    fednest_tff.compositional(wrong, lambda x, b: x, init, init, SPEC)
  if wrong is not None:
    for name in ('representation', 'project_outer'):
      with pytest.raises(ValueError, match=f'`{name}` must be a function'):
        bilevel(**{name: wrong})


@pytest.mark.parametrize(
    'name, function',
    [
        ('outer_loss', lambda x, y, b: tf.reduce_sum(VARIABLE * x * y)),
        ('inner_loss', lambda x, y, b: tf.reduce_sum(VARIABLE * x * y)),
        ('init_outer', lambda seed: VARIABLE),
        ('init_inner', lambda seed: VARIABLE + 0.0),
    ],
)
def test_captured_variable(name, function):
  expected = f'`{name}` (uses the|holds a tf.constant, a) tf.Variable'
  with pytest.raises(ValueError, match=expected):
    bilevel(**{name: function})


@pytest.mark.parametrize(
    'schedule',
    [
        lambda epoch: tf.ones(2), lambda epoch: 'a', lambda epoch: None,
        lambda epoch: np.nan, lambda: 0.1,
    ],
    ids=['vector', 'string', 'none', 'nan', 'arguments'],
)
@pytest.mark.parametrize('name', ['outer_learning_rate', 'inner_learning_rate'])
def test_schedule_that_gives_no_number(process, name, schedule):
  del process
  with pytest.raises(ValueError, match=f'`{name}`'):
    build(bilevel(), **{name: schedule})


@pytest.mark.parametrize('name', ['inner_local_steps', 'client_weighting'])
def test_function_of_the_examples_without_arguments(name):
  with pytest.raises(ValueError, match=rf'`{name}` .* \(examples\)'):
    build(bilevel(), **{name: lambda: 1})


@pytest.mark.parametrize('size', [2**31, 2**63])
def test_count_that_is_too_large(size):
  with pytest.raises(ValueError, match='`batch_size` must be at most'):
    build(bilevel(), batch_size=size)


def test_seed_that_is_too_large():
  with pytest.raises(ValueError, match='`seed` must fit into 64 bits'):
    build(bilevel(), seed=2**63)


@pytest.mark.parametrize(
    'options', [dict(unroll='a'), dict(unroll=-1), dict(compiled='a')]
)
def test_runtime(options):
  name, = options
  with pytest.raises(ValueError, match=f'`{name}` must be'):
    fednest_tff.use_runtime(**options)


@pytest.mark.parametrize(
    'client',
    [
        dataset(3), dataset(dtype=np.float64), dataset().batch(2), 3, None,
        dataset().repeat(),
    ],
    ids=['shape', 'dtype', 'batched', 'number', 'none', 'endless'],
)
def test_client_of_another_type(process, client):
  state = process.initialize()
  with pytest.raises((TypeError, ValueError), match='`datasets` of client 1 '):
    process.next(state, [dataset(), client, dataset()])


def test_endless_dataset_that_is_limited(process):
  state = process.initialize()
  output = process.next(state, [dataset().repeat().take(3)])
  assert output.metrics['num_examples'] == 3


def test_state_and_weights_of_another_process(process, other):
  state, foreign = process.initialize(), other.initialize()
  with pytest.raises(TypeError, match='`state.*` does not fit'):
    process.next(foreign, [dataset()])
  with pytest.raises(TypeError, match='`weights.outer` does not fit'):
    process.set_model_weights(state, other.get_model_weights(foreign))
  with pytest.raises(TypeError, match='`outer` does not fit'):
    process.get_model_weights(foreign)


def test_no_clients_and_empty_ones(process):
  state = process.initialize()
  for clients in ([], [dataset().take(0)]):
    with pytest.raises(Exception, match='that there are clients with examples'):
      process.next(state, clients)


def test_data_whose_norm_overflows(process):
  """Every number is finite; a metric would not be."""
  large = dataset().map(lambda value: value * 0 + 1e38)
  with pytest.raises(Exception, match='The norm overflows: FedInn: q'):
    process.next(process.initialize(), [large])
