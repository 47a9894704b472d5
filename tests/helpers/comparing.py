"""A small comparison that can be killed."""

import os
import signal

from experiments import contest_presets, contests
import fednest_tff
from fednest_tff import simulation

PLAN = simulation.Plan(
    rounds=2, tuning_rounds=2, budget=2, seeds=2, rounds_per_evaluation=1
)


def contest_and_entries(methods=('simfbo', 'simfbo_v0')):
  """Small quadratics, and methods."""
  preset = contest_presets.PRESETS['quadratic']
  settings = contests.resolve(preset, dict(num_clients=3, local_steps=2))
  return (
      contests.contest(preset, settings),
      contests.choose(contests.entries(preset), list(methods)),
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
