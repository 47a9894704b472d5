"""Runs binaries in the process of the tests."""

import sys

from absl import app
from absl.testing import flagsaver
import pytest

from experiments import (
    compare,
    compositional,
    hyper_cleaning,
    hyper_representation,
    loss_tuning,
    minimax,
    personalization,
    program,
    single_level,
)

# absl does so once, in the first run, and `flagsaver` undoes it.
app.define_help_flags()

EXPERIMENTS = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        compositional, hyper_cleaning, hyper_representation, loss_tuning,
        minimax, personalization, single_level,
    )
}


def command(name, *arguments):
  """Runs a binary; returns its exit code."""
  before = sys.argv
  sys.argv = [f'{name}.py', *map(str, arguments)]
  try:
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
      if name == 'compare':
        compare.run()
      else:
        program.run(EXPERIMENTS[name])
  finally:
    sys.argv = before
  return ended.value.code or 0
