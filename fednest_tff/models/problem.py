"""Problems whose variables are the weights of models."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import problems
from fednest_tff.federated.process import NestedWeights
from fednest_tff.models.network import Model, Network, network
from fednest_tff.problems import Problem, splits
from fednest_tff.vector_space import Structure

# What Keras takes: a name, a `tf.keras.losses.Loss` or `(labels, outputs) ->`.
Loss: TypeAlias = Any
_OfBatch: TypeAlias = Callable[[Structure, Structure], tf.Tensor]


@dataclasses.dataclass(frozen=True, repr=False)
class ModelProblem:
  """A problem, and the models that its variables are the weights of.

  Attributes:
    problem: For `fednest_tff.build`.
    outer: The model of x.
    inner: The model of y; `None` if there is one level.
    predict: `(weights, inputs) -> outputs`, where `weights` are what
      `process.get_model_weights` returns.
  """

  problem: Problem
  outer: Network
  inner: Network | None
  predict: Callable[[NestedWeights, Structure], Structure]
  _loss: Callable[[Structure, Structure], tf.Tensor]

  def __repr__(self) -> str:
    """The problem and its models."""
    models = [self.outer] if self.inner is None else [self.outer, self.inner]
    return f'<ModelProblem, {self.problem.kind}: {", ".join(map(str, models))}>'

  def assign(self, weights: NestedWeights) -> None:
    """Writes weights, as `get_model_weights` returns them, into the models."""
    self.outer.assign(weights.outer)
    if self.inner is not None:
      self.inner.assign(weights.inner)

  def functional_model(
      self, metrics: Callable[[], Any] | None = None
  ) -> tff.learning.models.FunctionalModel:
    """The model as a whole, for `tff.learning.algorithms`.

    It goes into `build_fed_eval`, and into `build_weighted_fed_avg` and others
    to train both parts at one level. Regularizers are not part of its loss.

    Args:
      metrics: Makes metrics, as `tff.learning.metrics.create_functional_
        metric_fns` takes them: `lambda: OrderedDict(accuracy=tf.keras.metrics.
        SparseCategoricalAccuracy())`.

    Returns:
      A functional model whose trainable weights are those of x, then of y.
    """
    initial = self.to_model_weights(
        NestedWeights(
            self.problem.init_outer(0), self.problem.init_inner(0)
        )
    )

    @tf.function
    def predict(weights: Any, inputs: Structure, training: bool) -> Structure:
      del training  # All layers are the same in both.
      return self.predict(self.to_nested_weights(weights), inputs)

    def loss(
        output: Structure, label: Structure, sample_weight: Any = None
    ) -> tf.Tensor:
      del sample_weight
      return self._loss(label, output)

    batched = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
        self.problem.element_spec,
    )
    options = {}
    if metrics is not None:
      options['metrics_fns'] = (
          tff.learning.metrics.create_functional_metric_fns(metrics)
      )
    return tff.learning.models.FunctionalModel(
        initial_weights=tuple(initial),
        predict_on_batch_fn=predict,
        loss_fn=loss,
        input_spec=_parts(batched),
        **options,
    )

  def to_model_weights(
      self, weights: NestedWeights
  ) -> tff.learning.models.ModelWeights:
    """Weights of x and y as `functional_model` has them."""
    leaves = [
        np.asarray(w) for w in tf.nest.flatten((weights.outer, weights.inner))
    ]
    return tff.learning.models.ModelWeights(tuple(leaves), ())

  def to_nested_weights(self, weights: Any) -> NestedWeights:
    """Weights of `functional_model` (from FedAvg, say) as x and y.

    Args:
      weights: A `tff.learning.models.ModelWeights`, or such a pair.

    Returns:
      What `process.set_model_weights` takes.
    """
    trainable, _ = weights
    spec = (self.problem.outer_spec, self.problem.inner_spec)
    outer, inner = tf.nest.pack_sequence_as(spec, tf.nest.flatten(trainable))
    return NestedWeights(outer, inner)


def _parts(example: Structure) -> tuple[Structure, Structure]:
  """Inputs and labels of an example, a batch or their specs."""
  if isinstance(example, Mapping):
    return example['x'], example['y']
  inputs, labels = example
  return inputs, labels


def _check_element_spec(element_spec: Structure) -> None:
  if isinstance(element_spec, Mapping):
    fits = set(element_spec) == {'x', 'y'}
  else:
    fits = isinstance(element_spec, (tuple, list)) and len(element_spec) == 2
  if not fits:
    raise ValueError(
        '`element_spec` must be (inputs, label), or a mapping with the keys x'
        f' and y; got {element_spec}.'
    )


def _mean_loss(loss: Loss) -> _OfBatch:
  """`(labels, outputs) -> scalar`, a mean over the batch."""
  try:
    found = tf.keras.losses.get(loss)
  except ValueError:
    found = None
  if getattr(found, 'reduction', None) == 'sum':
    raise ValueError(
        "`loss` has reduction='sum': a loss must be the mean over its batch."
        ' Leave `reduction` as it is.'
    )
  if not callable(found):
    raise ValueError(
        '`loss` must be a Keras loss, its name or a function `(labels, outputs)'
        f' -> loss`; got {loss!r}.'
    )
  return lambda labels, outputs: tf.reduce_mean(found(labels, outputs))


def _check_ridge(ridge: float) -> None:
  if not 0 <= ridge < float('inf'):
    raise ValueError(f'`ridge` must be finite and not negative; got {ridge}.')


def _squares(ridge: float, weights: Structure) -> tf.Tensor:
  leaves = tf.nest.flatten(weights)
  return ridge * tf.add_n([tf.reduce_sum(leaf**2) for leaf in leaves])


def backbone_and_head(
    backbone: Model,
    head: Model,
    loss: Loss,
    element_spec: Structure,
    *,
    ridge: float = 0.005,
    split: splits.SplitArgument = 0.5,
    personal: bool = False,
) -> ModelProblem:
  """A problem: x is a backbone, judged on validation data, and y its head.

  g is the loss on a client's inner (training) examples plus `ridge` times the
  squared norm of the head's weights; f is the loss on its outer (validation)
  examples. Regularizers of the head belong to g, those of the backbone to f.

  Args:
    backbone: A model from inputs to features; see `network` for what fits.
    head: A model from features to outputs. g should be strongly convex in its
      weights, so a linear layer with a ridge is best.
    loss: A Keras loss, its name, or a function `(labels, outputs) -> loss`,
      per example or their mean.
    element_spec: One example, `(inputs, label)` or `{'x': ..., 'y': ...}`.
    ridge: Weight of the head's squared norm in g.
    split: As in `fednest_tff.bilevel`.
    personal: Whether each client has its own head, as in
      `fednest_tff.personal`.

  Returns:
    A `ModelProblem`.
  """
  _check_element_spec(element_spec)
  _check_ridge(ridge)
  outer, inner, mean_loss = network(backbone), network(head), _mean_loss(loss)

  def represent(x: Structure, batch: Structure) -> Structure:
    inputs, labels = _parts(batch)
    return outer(x, inputs), labels

  def loss_of(y: Structure, features: Structure) -> tf.Tensor:
    represented, labels = features
    return mean_loss(labels, inner(y, represented))

  def outer_loss(x: Structure, y: Structure, features: Structure) -> tf.Tensor:
    return loss_of(y, features) + outer.penalty(x)

  def inner_loss(x: Structure, y: Structure, features: Structure) -> tf.Tensor:
    del x
    return loss_of(y, features) + inner.penalty(y) + _squares(ridge, y)

  build = problems.personal if personal else problems.bilevel
  return ModelProblem(
      build(
          outer_loss, inner_loss, outer.init, inner.init, element_spec,
          split=split, representation=represent,
      ),
      outer,
      inner,
      lambda weights, inputs: inner(
          weights.inner, outer(weights.outer, inputs)
      ),
      mean_loss,
  )


def single_level(
    model: Model, loss: Loss, element_spec: Structure
) -> ModelProblem:
  """min_x mean_i f_i(x), x the weights of one model: FedOut alone.

  Args:
    model: From inputs to outputs; see `network` for what fits.
    loss: As in `backbone_and_head`. The model's regularizers are added to it.
    element_spec: As in `backbone_and_head`.

  Returns:
    A `ModelProblem`.
  """
  _check_element_spec(element_spec)
  outer, mean_loss = network(model), _mean_loss(loss)

  def loss_of(x: Structure, batch: Structure) -> tf.Tensor:
    inputs, labels = _parts(batch)
    return mean_loss(labels, outer(x, inputs)) + outer.penalty(x)

  return ModelProblem(
      problems.single_level(loss_of, outer.init, element_spec),
      outer,
      None,
      lambda weights, inputs: outer(weights.outer, inputs),
      mean_loss,
  )
