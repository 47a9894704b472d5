"""Federated nested optimization on TensorFlow Federated.

Bilevel, minimax, compositional and single-level problems over clients whose
data never leaves them, by the FedNest family of algorithms (ICML 2022).
"""

from fednest_tff.algorithms.communication import (
    CommunicationCost,
    communication_cost,
)
from fednest_tff.algorithms.fed_inn import build_fed_inn
from fednest_tff.algorithms.fed_nest import (
    METHODS,
    FedNestProcess,
    NestedWeights,
    build_fed_nest,
)
from fednest_tff.algorithms.fed_out import build_fed_out
from fednest_tff.algorithms.federation import NestedState
from fednest_tff.algorithms.ihgp_process import build_fed_ihgp
from fednest_tff.algorithms.lfed_inn import build_lfed_inn
from fednest_tff.algorithms.lfed_out import build_lfed_out
from fednest_tff.algorithms.power_iteration import build_power_iteration
from fednest_tff.problems import (
    Problem,
    bilevel,
    compositional,
    minimax,
    single_level,
)
from fednest_tff.runtime import use_runtime

__version__ = '0.1.0.dev0'

__all__ = [
    'METHODS',
    'CommunicationCost',
    'FedNestProcess',
    'NestedState',
    'NestedWeights',
    'Problem',
    'bilevel',
    'build_fed_ihgp',
    'build_fed_inn',
    'build_fed_nest',
    'build_fed_out',
    'build_lfed_inn',
    'build_lfed_out',
    'build_power_iteration',
    'communication_cost',
    'compositional',
    'minimax',
    'single_level',
    'use_runtime',
]
