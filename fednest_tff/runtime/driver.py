"""FedNest round by round, each communication round on a cohort of its own.

`process.next` runs a whole epoch as one computation on one cohort. Algorithms 2
to 4 draw a new S for every round instead, and a runtime on several machines
takes one round at a time. The driver goes through an epoch's rounds
(`process.rounds`) and does the server's part between them (`process.server`):

  inner, T times   [inner_gradient: q]  inner_update: y+     Algorithm 4
  outer            [ihgp_gradient: b, ihgp_product: H v, N' times: p]
                   [hypergradient: h]   outer_update: x+     Algorithms 3 and 2
  or               joint_update: (x+, y+)                    one-round methods

Given the same cohort in every round, it returns what `next` returns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff.algorithms import (
    fed_ihgp,
    fed_nest,
    fed_out,
    joint,
    lfed_out,
    rounds,
)
from fednest_tff.algorithms.federation import NestedState

Cohort = Sequence[tf.data.Dataset]
# (epoch, name of the round, its number in the epoch from 0) -> datasets.
Sampler = Callable[[int, str, int], Cohort]


def _count_examples(dataset: Any) -> int:
  """How many examples a client has."""
  if not isinstance(dataset, tf.data.Dataset):
    return len(dataset)
  count = dataset.cardinality().numpy()
  if count >= 0:
    return count
  return dataset.reduce(np.int64(0), lambda total, _: total + 1).numpy()


class _Epoch:
  """An epoch under way.

  Attributes:
    metrics: What was measured so far, by name.
    aggregators: The aggregators' states, by name.
  """

  def __init__(self, process, state: NestedState, cohort: Sampler):
    self._process = process
    self._cohort = cohort
    self._epoch = int(state.epoch)
    self._server = process.server
    self._rounds = process.rounds
    self._counts = {}
    self._num_rounds = 0
    self.metrics = {}
    self.aggregators = {
        name: state.aggregators[name] for name in state.aggregators
    }

  def has(self, name: str) -> bool:
    """Whether the epoch has rounds of that name."""
    return name in self._rounds

  def serve(self, name: str, *arguments) -> Any:
    """Does a part of the server's."""
    return self._server[name](*arguments)

  def run(self, name: str, message: Any, aggregator: str | None = None) -> Any:
    """Runs a communication round on its cohort; returns its value.

    Args:
      name: Of the round.
      message: What its clients are sent.
      aggregator: Name of the aggregator's state, if it is not the round's.

    Returns:
      What the round was for. Its metrics join the others.
    """
    aggregator = aggregator or name
    clients = list(self._cohort(self._epoch, name, self._num_rounds))
    if not self._counts:
      self._counts = dict(
          num_clients=np.int64(len(clients)),
          num_examples=np.int64(sum(map(_count_examples, clients))),
      )
    output = self._rounds[name](
        self.aggregators[aggregator], message, clients
    )
    self._num_rounds += 1
    self.aggregators[aggregator] = output.state
    self.metrics |= output.metrics
    return output.value

  def all_metrics(self) -> dict[str, Any]:
    return (
        self.metrics
        | self._counts
        | dict(communication_rounds=np.int64(self._num_rounds))
    )


def _inner_call(epoch: _Epoch, x, y, learning_rate, seed):
  """One call of FedInn or LFedInn: y+."""
  q = ()
  if epoch.has('inner_gradient'):
    q = epoch.run('inner_gradient', rounds.Point(x, y, seed))
  return epoch.run(
      'inner_update', rounds.Descent(x, y, q, learning_rate, seed)
  )


def _inverse_hessian_product(epoch: _Epoch, solver, x, y, smoothness, seed):
  """FedIHGP: p after 1 + N' rounds."""
  b = epoch.run('ihgp_gradient', rounds.Point(x, y, seed), 'ihgp')
  solution = epoch.serve('ihgp_start', b, smoothness, seed)
  n = 1
  while solution.products_left > 0:
    message = fed_ihgp.Product(
        x, y, solver.vector(solution), np.int32(n), seed
    )
    product = epoch.run('ihgp_product', message, 'ihgp')
    solution = epoch.serve('ihgp_advance', solution, product, smoothness)
    n += 1
  return solution.p


def _outer_call(epoch: _Epoch, solver, optimizer, x, y, rates, seed):
  """One call of FedOut or LFedOut: (optimizer state, x+)."""
  learning_rate, smoothness = rates
  if epoch.has('hypergradient'):
    p = ()
    if epoch.has('ihgp_gradient'):
      p = _inverse_hessian_product(epoch, solver, x, y, smoothness, seed)
    h = epoch.run('hypergradient', fed_out.Hyperpoint(x, y, p, seed))
    message = rounds.Descent(x, y, h, learning_rate, seed)
  else:
    message = lfed_out.LocalDescent(x, y, learning_rate, smoothness, seed)
  change = epoch.run('outer_update', message)
  squared_change = epoch.metrics.pop('squared_change')
  return _outer_step(epoch, optimizer, x, change, squared_change)


def _outer_step(epoch: _Epoch, optimizer, x, change, squared_change):
  optimizer, x, drift, norm = epoch.serve(
      'outer_step', optimizer, x, change, squared_change
  )
  epoch.metrics |= dict(outer_drift=drift, outer_update_norm=norm)
  return optimizer, x


def _joint_call(epoch: _Epoch, optimizer, x, y, rates, seed):
  """LFedNest-NonAlt or FedAvg-S: (optimizer state, x+, y+)."""
  change = epoch.run('joint_update', joint.JointDescent(x, y, *rates, seed))
  inner_squared = epoch.metrics.pop('inner_squared_change')
  outer_squared = epoch.metrics.pop('outer_squared_change')
  y, drift, norm = epoch.serve('inner_step', y, change[1], inner_squared)
  optimizer, x = _outer_step(epoch, optimizer, x, change[0], outer_squared)
  if 'inner_loss' in epoch.metrics:  # There is an inner problem.
    epoch.metrics |= dict(client_drift=drift, inner_update_norm=norm)
  return optimizer, x, y


class Driver:
  """Runs a process round by round; see `build_driver`."""

  def __init__(self, process):
    self._process = process

  def initialize(self) -> NestedState:
    """The process's own initial state."""
    return self._process.initialize()

  def next(
      self, state: NestedState, cohort: Cohort | Sampler
  ) -> tff.learning.templates.LearningProcessOutput:
    """One epoch.

    Args:
      state: From `initialize`, or from `next` of this or of the process.
      cohort: Clients' datasets for all rounds, or a function `(epoch, name of
        the round, its number in the epoch) -> datasets` that is asked before
        every round. For runs that can be repeated, it should depend on nothing
        else.

    Returns:
      The new state and the metrics, as the process's `next` gives them, and
      `communication_rounds`, the number of rounds that were run. Losses, norms
      and drifts are those of the cohorts that they were measured on, the
      numbers of clients and examples those of the first round.
    """
    sampler = cohort if callable(cohort) else lambda *_: cohort
    epoch = _Epoch(self._process, state, sampler)
    beta, alpha, seeds, following = epoch.serve(
        'plan', state.seed, state.epoch
    )
    x, y, optimizer = state.outer, state.inner, state.optimizer
    if epoch.has('inner_update'):
      for seed in seeds[:-1]:
        y = _inner_call(epoch, x, y, beta, seed)
    if epoch.has('outer_update'):
      optimizer, x = _outer_call(
          epoch, self._process.solver, optimizer, x, y,
          (alpha, state.smoothness), seeds[-1],
      )
    if epoch.has('joint_update'):
      rates = beta, alpha, state.smoothness
      optimizer, x, y = _joint_call(epoch, optimizer, x, y, rates, seeds[-1])
    new_state = NestedState(
        outer=x,
        inner=y,
        epoch=following,
        seed=state.seed,
        smoothness=state.smoothness,
        aggregators=epoch.aggregators,
        optimizer=optimizer,
    )
    return tff.learning.templates.LearningProcessOutput(
        new_state, epoch.all_metrics()
    )


def build_driver(
    process: fed_nest.FedNestProcess | rounds.RoundsProcess,
) -> Driver:
  """A driver for a process from `build_fed_nest`, of any method and problem.

  It runs in TFF's current context, whichever that is. FedIHGP stops at N'; the
  rounds beyond it, which `next` runs with vectors of zeros, are not run. An
  aggregator with a state of its own, if one is given for gradients, does not
  see those zeros, and that is the only difference from `next`.

  Args:
    process: From `build_fed_nest`, or from `build_fed_inn`, `build_lfed_inn`,
      `build_fed_out` or `build_lfed_out`.

  Returns:
    A `Driver`, with `initialize` and `next`.
  """
  if 'plan' not in getattr(process, 'server', {}):
    raise ValueError(
        '`process` must come from build_fed_nest or from a builder of one of'
        f' its stages; got {process!r}.'
    )
  return Driver(process)
