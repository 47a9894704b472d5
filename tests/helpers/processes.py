"""Builds and runs processes for tests."""

import functools

import numpy as np
import tensorflow as tf

import fednest_tff
from fednest_tff import options as options_lib
from tests.helpers import quadratic, reference

# What `quadratic_process` is built with; T, N and l included.
SETTINGS = reference.Settings(
    alpha=0.1,
    beta=0.15,
    inner_rounds=2,
    inner_steps=3,
    outer_steps=2,
    neumann_terms=3,
    smoothness=4.0,
)


def build_flat(builder, problem, **options):
  """A stage's process from flat options, as `fednest_tff.build` takes them."""
  arguments = options_lib.arguments_of(builder, builder.__name__, options)
  return builder(problem, **arguments)


def options_of(method):
  """The flat names of a method's options."""
  return set(fednest_tff.get_method(method).options)


def build(problem, method, settings, **options):
  """A process with the numbers of the NumPy reference.

  Options that the method lacks are left out of `settings`, not of `options`.
  """
  numbers = dict(
      outer_learning_rate=settings.alpha,
      inner_learning_rate=settings.beta,
      inner_rounds=settings.inner_rounds,
      inner_local_steps=settings.inner_steps,
      outer_local_steps=settings.outer_steps,
      neumann_terms=settings.neumann_terms,
      smoothness=settings.smoothness,
      ihgp='truncated',
  )
  known = options_of(method)
  numbers = {name: value for name, value in numbers.items() if name in known}
  return fednest_tff.build(problem, method, **(numbers | options))


@functools.cache
def quadratic_process(
    method, settings=SETTINGS, dtype=tf.float64, ihgp='truncated'
):
  """The quadratic problem's process, one for all test files of a worker."""
  return build(quadratic.build_problem(dtype), method, settings, ihgp=ihgp)


@functools.cache
def sampling_process(method):
  """One that draws minibatches and N', so that all seeds matter; alpha decays.

  All of its numbers can be changed: l is not given.
  """
  return build(
      quadratic.build_problem(),
      method,
      SETTINGS,
      batch_size=1,
      neumann_terms=4,
      ihgp='stochastic',
      smoothness=None,
      inner_local_steps=2,
      outer_learning_rate=lambda epoch: 0.1 / tf.cast(epoch + 1, tf.float64),
  )


def outputs(process, datasets, epochs, state=None):
  """The outputs of `epochs` calls of `next`."""
  state = process.initialize() if state is None else state
  found = []
  for _ in range(epochs):
    found.append(process.next(state, datasets))
    state = found[-1].state
  return found


def start_with(process, **numbers):
  """The first state, with other hyper-parameters."""
  state = process.initialize()
  known = process.get_hparams(state)
  assert numbers.keys() <= known.keys()
  return process.set_hparams(state, known | numbers)


def run(process, datasets, epochs, state=None):
  """The state after `epochs`, and the last metrics."""
  return outputs(process, datasets, epochs, state)[-1]


def assert_equal(one, other):
  """Bit for bit, in all leaves of states or metrics."""
  tf.nest.map_structure(np.testing.assert_array_equal, one, other)
