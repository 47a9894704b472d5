"""A small comparison that can be killed."""

import functools
import os
import signal

from experiments import contest_presets, contests
import fednest_tff
from fednest_tff import simulation
from fednest_tff.local import derivatives

PRESET = contest_presets.PRESETS['quadratic']
PLAN = simulation.Plan(
    rounds=2, tuning_rounds=2, budget=2, seeds=2, rounds_per_evaluation=1
)


@functools.cache
def _make_trial(seed, is_tuning):
  """A trial on small quadratics; it builds each method once for all tests."""
  settings = contests.resolve(PRESET, dict(num_clients=3, local_steps=2))
  trial = contests.contest(PRESET, settings).make_trial(seed, is_tuning)
  build_once = functools.cache(trial.build)

  def build(method):
    # Counted derivatives belong to a process of their own.
    return (trial.build if derivatives.is_marked() else build_once)(method)

  return trial._replace(build=build)


def contest_and_entries(methods=('simfbo', 'simfbo_v0')):
  """Small quadratics, and methods."""
  contest = contests.contest(PRESET, contests.resolve(PRESET, {}))
  return (
      contest._replace(make_trial=_make_trial),
      contests.choose(contests.entries(PRESET), list(methods)),
  )


def compare(directory, methods=('simfbo', 'simfbo_v0'), epochs=None, plan=PLAN):
  """Compares on the quadratics; dies by SIGKILL after so many epochs."""
  contest, entries = contest_and_entries(methods)
  lived = 0

  def make_trial(seed, is_tuning):
    trial = contest.make_trial(seed, is_tuning)

    def cohort(epoch):
      nonlocal lived
      if lived == epochs:
        os.kill(os.getpid(), signal.SIGKILL)
      lived += 1
      return trial.cohort(epoch)

    return trial._replace(cohort=cohort)

  # Counting what clients compute takes four epochs per method as well.
  return simulation.compare(
      contest._replace(make_trial=make_trial),
      entries,
      plan,
      str(directory),
  )


def compare_and_die(directory, epochs, changes=None):
  """For a process of its own, which lives for so many epochs.

  `changes` are to the plan.
  """
  fednest_tff.use_runtime('in_process', compiled=False)
  compare(directory, ['simfbo'], epochs, PLAN._replace(**(changes or {})))
