"""Programs that run the library; `python -m experiments.NAME --help`."""

import os
import sys

from experiments import quick

# TensorFlow logs harmless errors at start when there is no GPU.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

# What Python puts there while it looks for the module that `-m` names. Whoever
# imports this package keeps their own signals and errors.
if sys.argv[:1] == ['-m']:
  from experiments import launch

  launch.prepare()

quick.answer()
