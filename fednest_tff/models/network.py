"""Models as functions of their weights."""

from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.models import stateless
from fednest_tff.vector_space import Structure

# A Keras model, a function that makes one from a seed, or TFF's functional one.
Model: TypeAlias = Any
_Arrays: TypeAlias = tuple[np.ndarray[Any, np.dtype[Any]], ...]

_RANDOM = tf.keras.layers.Dropout.__mro__[1]  # Keras's base of random layers.
_RATES = ('rate', 'dropout', 'recurrent_dropout')


@dataclasses.dataclass(frozen=True, repr=False)
class Network:
  """A model as a function: `network(weights, inputs) -> outputs`.

  Attributes:
    name: Of the model.
    init: `seed -> weights`, a tuple of arrays, as the model has them now. The
      seed matters only if the model is a function of it.
    apply: `(weights, inputs) -> outputs`, differentiable in both, in a graph
      or eagerly. (Models that TFF made of Keras ones run in graphs only.)
    penalty: `weights -> scalar`, the sum of the model's regularizers.
    assign: Writes weights into the Keras model.
    model: The model itself.
  """

  name: str
  init: Callable[[int], Structure]
  apply: Callable[[Structure, Structure], Structure]
  penalty: Callable[[Structure], tf.Tensor]
  assign: Callable[[Structure], None]
  model: Model

  def __call__(self, weights: Structure, inputs: Structure) -> Structure:
    """The outputs of the model with these weights."""
    return self.apply(weights, inputs)

  def __repr__(self) -> str:
    """Name, tensors and numbers of weights."""
    shapes = [weight.shape for weight in self.init(0)]
    total = sum(int(np.prod(shape)) for shape in shapes)
    return f'<Network {self.name}: {len(shapes)} tensors, {total:,} weights>'


def _refuse(model: tf.keras.Model, layer: tf.Module, why: str) -> None:
  raise ValueError(
      f'`{model.name}` has the layer `{layer.name}`'
      f' ({type(layer).__name__}): {why}'
  )


def _check_layers(model: tf.keras.Model) -> None:
  """Refuses, by name, layers that are no functions of weights and inputs."""
  for layer in model.submodules:
    if isinstance(layer, tf.keras.layers.BatchNormalization):
      # Not trainable, it has fixed means and variances.
      if layer.trainable:
        _refuse(
            model, layer, 'its statistics are no weights, and clients would'
            ' disagree about them. Use LayerNormalization or'
            ' GroupNormalization, or freeze it (`layer.trainable = False`).'
        )
    elif isinstance(layer, _RANDOM):
      rates = [getattr(layer, name) for name in _RATES if hasattr(layer, name)]
      if not rates or any(rates):
        _refuse(
            model, layer, 'it draws random numbers, and a variance-reduced'
            ' step compares two evaluations that must see the same ones. Leave'
            ' it out, or set its rate to 0.'
        )
    if getattr(layer, '_activity_regularizer', None) is not None:
      _refuse(
          model, layer, 'its `activity_regularizer` would be left out. Add'
          ' that term to a loss of your own.'
      )


def _in_graph(
    function: Callable[..., Structure]
) -> Callable[..., Structure]:
  """`function`, traced first if the caller runs eagerly.

  Eager operations read a variable's memory; only those in a graph ask the
  variable.
  """
  traced = tf.function(function, autograph=False, reduce_retracing=True)

  def call(*arguments: Structure) -> Structure:
    if not tf.executing_eagerly():
      return function(*arguments)
    return traced(*tf.nest.map_structure(tf.convert_to_tensor, arguments))

  return call


def _keras(model: tf.keras.Model, init: Callable[[int], Structure]) -> Network:
  """A built Keras model as a function."""
  _check_layers(model)
  variables = model.trainable_variables
  fixed = [v for v in model.variables if all(v is not t for t in variables)]
  # Constants; as arrays, they can go into any graph.
  constants = [variable.numpy() for variable in fixed]

  def given(weights: Structure) -> Any:
    flat = [*tf.nest.flatten(weights), *map(tf.convert_to_tensor, constants)]
    return stateless.given_weights(model, [*variables, *fixed], flat)

  def apply(weights: Structure, inputs: Structure) -> Structure:
    with given(weights):
      return model(inputs, training=True)

  def penalty(weights: Structure) -> tf.Tensor:
    dtype = tf.nest.flatten(weights)[0].dtype
    with given(weights):
      losses = [tf.cast(loss, dtype) for loss in model.losses]
    return tf.add_n([tf.zeros([], dtype), *losses])

  def assign(weights: Structure) -> None:
    leaves = tf.nest.flatten(weights)
    for variable, weight in zip(variables, leaves, strict=True):
      variable.assign(weight)

  return Network(
      model.name, init, _in_graph(apply), _in_graph(penalty), assign, model
  )


def _functional(model: tff.learning.models.FunctionalModel) -> Network:
  """TFF's functional model; it has functions, weights and no variables."""
  trainable, fixed = model.initial_weights
  structure = tf.nest.map_structure(np.asarray, trainable)
  leaves = tuple(tf.nest.flatten(structure))

  def apply(weights: Structure, inputs: Structure) -> Structure:
    packed = tf.nest.pack_sequence_as(structure, tf.nest.flatten(weights))
    return model.predict_on_batch((packed, fixed), inputs, training=True)

  def assign(weights: Structure) -> None:
    del weights
    raise ValueError(
        'A FunctionalModel keeps no weights: use'
        ' tff.learning.models.keras_model_from_functional_weights.'
    )

  return Network(
      'functional_model',
      lambda seed: leaves,
      apply,
      lambda weights: tf.zeros([], tf.nest.flatten(weights)[0].dtype),
      assign,
      model,
  )


def _arrays(variables: Sequence[tf.Variable]) -> _Arrays:
  return tuple(variable.numpy() for variable in variables)


def _checked(model: Model) -> tf.keras.Model:
  if not isinstance(model, tf.keras.Model):
    raise ValueError(
        '`model` must be a tf.keras.Model, a function `seed -> tf.keras.Model`'
        f' or a tff.learning.models.FunctionalModel; got {model!r}.'
    )
  if not model.built:
    raise ValueError(
        f'`{model.name}` has no weights yet: give its first layer an'
        ' `input_shape`, or call `model.build(...)`.'
    )
  if not model.trainable_variables:
    raise ValueError(f'`{model.name}` has no trainable weights.')
  return model


def network(model: Model) -> Network:
  """A model as a function of its trainable weights.

  Weights are a tuple in the order of `model.trainable_variables`. Weights that
  are not trainable stay as they are now. Layers whose output is not a function
  of weights and inputs (dropout, batch normalization that is trained) are
  refused by name.

  Args:
    model: A built `tf.keras.Model`, whose present weights are where a problem
      starts; or a function of a seed that makes one, such as `lambda seed:
      tf.keras.Sequential([tf.keras.layers.Dense(10, input_shape=[64],
      kernel_initializer=tf.keras.initializers.GlorotUniform(seed))])`; or a
      `tff.learning.models.FunctionalModel`.

  Returns:
    A `Network`.

  Raises:
    ValueError: If the model does not fit; it names the layer.
  """
  if isinstance(model, tff.learning.models.FunctionalModel):
    return _functional(model)
  if isinstance(model, tf.keras.Model) or not callable(model):
    weights = _arrays(_checked(model).trainable_variables)
    return _keras(model, lambda seed: weights)

  def weights_from(seed: int) -> _Arrays:
    # TFF asks for them inside a graph; another thread is outside of it.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      made = thread.submit(model, seed).result()
      variables = _checked(made).trainable_variables
      return thread.submit(_arrays, variables).result()

  return _keras(_checked(model(0)), weights_from)
