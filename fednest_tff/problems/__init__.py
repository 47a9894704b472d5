"""Nested problems: losses, variables and the split of a client's examples."""

from fednest_tff.problems.kinds import (
    bilevel,
    compositional,
    minimax,
    personal,
    single_level,
)
from fednest_tff.problems.problem import Batch, Features, Problem

__all__ = [
    'Batch',
    'Features',
    'Problem',
    'bilevel',
    'compositional',
    'minimax',
    'personal',
    'single_level',
]
