"""Programs that run the library; `python -m experiments.NAME --help`."""

import os

# TensorFlow logs harmless errors at start when there is no GPU.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
