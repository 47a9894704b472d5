"""Runs of iterative processes that survive being killed, and their curves."""

from fednest_tff.simulation.errors import (
    NonFiniteError,
    RunError,
    StoppedError,
    file_errors,
)
from fednest_tff.simulation.plots import Curve, draw
from fednest_tff.simulation.records import (
    Row,
    check_finite,
    is_complete,
    read_rows,
    summarize,
    write_rows,
)
from fednest_tff.simulation.run_directory import RunDirectory, write_json
from fednest_tff.simulation.training import Process, Trial, train

__all__ = [
    'Curve',
    'NonFiniteError',
    'Process',
    'Row',
    'RunDirectory',
    'RunError',
    'StoppedError',
    'Trial',
    'check_finite',
    'draw',
    'file_errors',
    'is_complete',
    'read_rows',
    'summarize',
    'train',
    'write_json',
    'write_rows',
]
