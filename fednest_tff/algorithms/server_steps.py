"""The server's numbers in SimFBO: gamma, r and beta.

All of them are hyper-parameters of the process, so that other values compile
nothing anew.
"""

import dataclasses

import tensorflow as tf

from fednest_tff import options
from fednest_tff.algorithms import simultaneous
from fednest_tff.algorithms.server_move import ServerOptimizers
from fednest_tff.federated import method
from fednest_tff.local.descent import Schedule
from fednest_tff.local.simultaneous import Point
from fednest_tff.options import option
from fednest_tff.problems import Problem


@dataclasses.dataclass(frozen=True)
class ServerSteps(ServerOptimizers):
  """The server's steps on all variables.

  Attributes:
    outer_learning_rate: gamma_x, the server's step size of x: a number, or a
      function of the epoch. Default: the local one, so that the new x is the
      mean of the clients'.
    inner_learning_rate: gamma_y, the server's step size of y, likewise.
    linear_learning_rate: gamma_v, the server's step size of v, likewise.
    radius: r, of the ball around 0 that v is projected on; no projection if it
      is not given.
    momentum: beta, from 0 to 1 (excluded), for all variables; no momentum is
      kept if it is not given.
  """

  outer_learning_rate: float | Schedule | None = option(
      'server_outer_learning_rate'
  )
  inner_learning_rate: float | Schedule | None = option(
      'server_inner_learning_rate'
  )
  linear_learning_rate: float | Schedule | None = option(
      'server_linear_learning_rate'
  )
  radius: float | None = option('radius')
  momentum: float | None = option('server_momentum')


def _rates(
    problem: Problem,
    steps: ServerSteps,
    local_rates: dict[str, method.HyperParameter],
) -> dict[str, method.HyperParameter]:
  """gamma; 0 in the state stands for the local step."""
  found: dict[str, method.HyperParameter] = {}
  for variable in simultaneous.variables_of(problem):
    if variable is None:
      continue
    name = f'{variable}_learning_rate'
    given = getattr(steps, name)
    if given is not None:
      if getattr(steps, f'{variable}_optimizer') is not None:
        raise ValueError(
            f'Give `server_{name}` or `{variable}_optimizer`, not both.'
        )
      found |= method.learning_rates(**{f'server_{name}': given})
      continue

    def at(
        epoch: tf.Tensor, numbers: method.Numbers, name: str = name
    ) -> tf.Tensor:
      local_rate = numbers[name]
      schedule = local_rates[name].at
      if schedule is not None:
        local_rate = schedule(epoch, numbers)
      own = numbers[f'server_{name}']
      return tf.where(own > 0, own, local_rate)

    found[f'server_{name}'] = method.HyperParameter(0.0, at)
  return found


def _radius(
    problem: Problem, steps: ServerSteps
) -> dict[str, method.HyperParameter]:
  """r, infinite if it is not given; empty if there is no v."""
  if not problem.is_implicit:
    return {}
  if steps.radius is not None:
    options.check_positive('radius', steps.radius)
  return dict(radius=method.HyperParameter(float(steps.radius or 'inf')))


def _momentum(steps: ServerSteps) -> dict[str, method.HyperParameter]:
  """beta; empty if there is none."""
  if steps.momentum is None:
    return {}
  for variable in Point._fields:
    if getattr(steps, f'{variable}_optimizer') is not None:
      raise ValueError(
          f'Give `server_momentum` or `{variable}_optimizer`, not both.'
      )
  if steps.momentum != 0:
    options.check_positive('server_momentum', steps.momentum)
  if not steps.momentum < 1:
    raise ValueError(
        f'`server_momentum` must be less than 1; got {steps.momentum}.'
    )
  return dict(server_momentum=method.HyperParameter(float(steps.momentum)))


def hparams(
    problem: Problem,
    steps: ServerSteps,
    local_rates: dict[str, method.HyperParameter],
) -> dict[str, method.HyperParameter]:
  """The server's numbers as hyper-parameters, by their names.

  Args:
    problem: Any problem; those without y or v have fewer numbers.
    steps: The server's steps.
    local_rates: The clients' step sizes by their names, which stand for those
      of the server that are not given.
  """
  return (
      _rates(problem, steps, local_rates)
      | _radius(problem, steps)
      | _momentum(steps)
  )
