"""Nested problems: losses, variables and the split of a client's examples."""

from fednest_tff.problems.problem import (
    Problem,
    bilevel,
    compositional,
    minimax,
    single_level,
)

__all__ = ['Problem', 'bilevel', 'compositional', 'minimax', 'single_level']
