"""Calls a Keras model with given weights in place of its variables.

A Keras model holds variables, and the algorithms differentiate functions of
weights. While `given_weights` is active, whoever reads one of the variables
gets the weight in its place: layers, also shared ones and those of subclassed
models, and the model's regularizers. The model itself is not changed or copied.
It must be called in a graph: eager operations read the variables' memory.
"""

from collections.abc import Iterator, Sequence
import contextlib

from keras.src.engine import base_layer, base_layer_v1, training, training_v1
from keras.src.utils import version_utils
import tensorflow as tf

_READS = ('_read_variable_op', 'sparse_read', 'gather_nd')


def _substitute(variable: tf.Variable, weight: tf.Tensor) -> None:
  """Has every way to read the variable give the weight."""
  # TensorFlow has no public hook; all its reads go through these three. What
  # would pass them by and take the handle fails.
  variable._handle = weight
  variable._read_variable_op = lambda no_copy=False: weight
  variable.sparse_read = lambda indices, name=None: tf.gather(weight, indices)
  variable.gather_nd = lambda indices, name=None: tf.gather_nd(weight, indices)


def make_callable(model: tf.keras.Model) -> None:
  """Undoes what happens to a model when another is built in a graph.

  TFF builds Keras models inside graphs (`from_keras_model`, for one). Keras
  then turns the classes of their layers into those of TensorFlow 1, and a model
  that was built eagerly from the same classes can no longer be called.

  Args:
    model: A model that was built eagerly.
  """
  for kind in {type(layer) for layer in (model, *model.submodules)}:
    if issubclass(kind, training.Model):
      version_utils.swap_class(kind, training.Model, training_v1.Model, True)
    if issubclass(kind, base_layer.Layer):
      version_utils.swap_class(
          kind, base_layer.Layer, base_layer_v1.Layer, True
      )


@contextlib.contextmanager
def given_weights(
    model: tf.keras.Model,
    variables: Sequence[tf.Variable],
    weights: Sequence[tf.Tensor],
) -> Iterator[None]:
  """Within it, `variables` have the values `weights`; not for threads.

  Args:
    model: A Keras model.
    variables: Those of its variables that are given.
    weights: A tensor for each.

  Yields:
    Nothing.
  """
  make_callable(model)
  # With mixed precision, a variable is wrapped into one that casts.
  inner = [getattr(variable, '_variable', variable) for variable in variables]
  handles = [variable.handle for variable in inner]
  try:
    for variable, weight in zip(inner, weights, strict=True):
      _substitute(variable, weight)
    yield
  finally:
    for variable, handle in zip(inner, handles, strict=True):
      variable._handle = handle
      for name in _READS:
        vars(variable).pop(name, None)
