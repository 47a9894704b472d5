"""Runs iterative processes, so that a killed run can go on, and draws plots."""

from fednest_tff.simulation.client_work import ClientWork, count_client_work
from fednest_tff.simulation.cohorts import sample_cohorts
from fednest_tff.simulation.comparison import compare
from fednest_tff.simulation.contest import Contest, Entry, Plan
from fednest_tff.simulation.errors import (
    InterruptedRunError,
    NonFiniteError,
    RunError,
    StoppedError,
    file_errors,
)
from fednest_tff.simulation.files import read as read_file
from fednest_tff.simulation.files import read_json, write_json
from fednest_tff.simulation.leaderboard import Outcome
from fednest_tff.simulation.plots import Curve, draw, make_figure
from fednest_tff.simulation.records import check_finite, summarize
from fednest_tff.simulation.run_directory import RunDirectory
from fednest_tff.simulation.run_files import is_ours
from fednest_tff.simulation.search import Range, StepRanges, Tried
from fednest_tff.simulation.tables import (
    Row,
    is_complete,
    read_rows,
    write_rows,
)
from fednest_tff.simulation.training import Process, Trial, train
from fednest_tff.simulation.weights import (
    has_weights,
    load_weights,
    save_weights,
)

__all__ = [
    'ClientWork',
    'Contest',
    'Curve',
    'Entry',
    'InterruptedRunError',
    'NonFiniteError',
    'Outcome',
    'Plan',
    'Process',
    'Range',
    'Row',
    'RunDirectory',
    'RunError',
    'StepRanges',
    'StoppedError',
    'Trial',
    'Tried',
    'check_finite',
    'compare',
    'count_client_work',
    'draw',
    'file_errors',
    'has_weights',
    'is_complete',
    'is_ours',
    'read_file',
    'read_json',
    'load_weights',
    'make_figure',
    'read_rows',
    'sample_cohorts',
    'save_weights',
    'summarize',
    'train',
    'write_json',
    'write_rows',
]
