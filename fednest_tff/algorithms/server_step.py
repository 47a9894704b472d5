"""The server's step on the outer variable, with or without an optimizer."""

import tensorflow_federated as tff

from fednest_tff import vector_space
from fednest_tff.algorithms import rounds
from fednest_tff.algorithms.federation import Federation

_ADVICE = 'Try a smaller outer_learning_rate, or a larger smoothness l'


class ServerStep:
  """x+ from x and the clients' mean change.

  By default x+ = x + mean change, the mean of the clients' x_i as in the paper
  (Algorithm 2, line 14). An optimizer takes minus the mean change as its
  gradient.

  Attributes:
    initialize: `( -> optimizer state@SERVER)`.
    step: `(<optimizer state, x, mean change, mean squared change> -> <optimizer
      state, x+, drift, norm of the update>)`, unplaced.
  """

  def __init__(
      self,
      federated: Federation,
      optimizer: tff.learning.optimizers.Optimizer | None = None,
  ):
    """Traces the step.

    Args:
      federated: The problem and its types.
      optimizer: The server's optimizer, or `None` to take the mean as it is.
    """
    if optimizer is not None and not isinstance(
        optimizer, tff.learning.optimizers.Optimizer
    ):
      raise ValueError(
          '`outer_optimizer` must be one of tff.learning.optimizers; got'
          f' {optimizer!r}.'
      )
    outer = federated.outer_type

    @tff.tensorflow.computation
    def initial_state():
      if optimizer is None:
        return ()
      return optimizer.initialize(federated.problem.outer_spec)

    state_type = initial_state.type_signature.result

    @tff.tensorflow.computation(
        state_type, outer, outer, federated.scalar_type
    )
    def step(state, x, mean_change, mean_squared_change):
      mean_change = vector_space.check_finite(
          mean_change,
          'FedOut: x+, the new outer variable (Algorithm 2, line 14), is not'
          f' finite. {_ADVICE}',
      )
      if optimizer is None:
        x_next = vector_space.add(x, mean_change)
      else:
        state, x_next = optimizer.next(
            state, x, vector_space.scale(-1.0, mean_change)
        )
      return (
          state,
          x_next,
          rounds.drift(mean_squared_change, mean_change),
          vector_space.norm(vector_space.subtract(x_next, x)),
      )

    self.step = step
    self.initialize = tff.federated_computation(
        lambda: tff.federated_eval(initial_state, tff.SERVER)
    )

  def __call__(self, state, x, mean_change, mean_squared_change):
    """(optimizer state, x+, metrics), inside a federated computation."""
    stepped = tff.federated_map(
        self.step, (state, x, mean_change, mean_squared_change)
    )
    metrics = dict(outer_drift=stepped[2], outer_update_norm=stepped[3])
    return stepped[0], stepped[1], metrics
