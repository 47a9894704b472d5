"""Federated nested optimization on TensorFlow Federated.

Bilevel, minimax, compositional and single-level problems over clients whose
data never leaves them, by the FedNest family of algorithms (ICML 2022) and by
methods of your own.
"""

from fednest_tff import data, models, simulation
from fednest_tff.algorithms.agg_itd import build_agg_itd
from fednest_tff.algorithms.fed_bio_acc import Acceleration, build_fed_bio_acc
from fednest_tff.algorithms.fed_ihgp import FederatedInverseHessian
from fednest_tff.algorithms.fed_inn import build_fed_inn
from fednest_tff.algorithms.fed_mbo import build_fed_mbo
from fednest_tff.algorithms.fed_msa import build_fed_msa
from fednest_tff.algorithms.fed_nest import (
    build_fed_nest,
    build_fed_nest_sgd,
    build_lfed_nest,
    build_lfed_nest_svrg,
)
from fednest_tff.algorithms.fed_out import build_fed_out
from fednest_tff.algorithms.ihgp_process import build_fed_ihgp, move_ihgp
from fednest_tff.algorithms.lfed_inn import build_lfed_inn
from fednest_tff.algorithms.lfed_out import build_lfed_out
from fednest_tff.algorithms.one_round import (
    build_fed_avg_s,
    build_lfed_nest_nonalt,
)
from fednest_tff.algorithms.penalty import build_penalty
from fednest_tff.algorithms.personal import build_personal, build_personalize
from fednest_tff.algorithms.power_iteration import build_power_iteration
from fednest_tff.algorithms.server_move import ServerOptimizers
from fednest_tff.algorithms.server_steps import ServerSteps
from fednest_tff.algorithms.sim_fbo import build_shro_fbo, build_sim_fbo
from fednest_tff.federated.aggregation import Aggregation, GlobalGradients
from fednest_tff.federated.method import (
    HyperParameter,
    Method,
    Plan,
    Variables,
    learning_rates,
)
from fednest_tff.federated.process import (
    NestedProcess,
    NestedState,
    NestedWeights,
    build_process,
)
from fednest_tff.federated.rounds import Executor, PointMessage, Round
from fednest_tff.federated.server import ServerStep, build_check
from fednest_tff.federated.types import ProblemTypes
from fednest_tff.local.descent import LocalWork
from fednest_tff.local.inverse_hessian import InverseHessian
from fednest_tff.local.simultaneous import SimultaneousWork
from fednest_tff.problems import (
    Problem,
    bilevel,
    compositional,
    minimax,
    personal,
    projections,
    single_level,
    splits,
)
from fednest_tff.registry import (
    build,
    get_method,
    method_names,
    register,
)
from fednest_tff.runtime import use_runtime
from fednest_tff.runtime.communication import (
    CommunicationCost,
    communication_cost,
)
from fednest_tff.runtime.driver import Driver, build_driver

__version__ = '0.2.0'

METHODS = method_names()

__all__ = [
    'METHODS',
    'Acceleration',
    'Aggregation',
    'CommunicationCost',
    'Driver',
    'Executor',
    'FederatedInverseHessian',
    'GlobalGradients',
    'HyperParameter',
    'InverseHessian',
    'LocalWork',
    'Method',
    'NestedProcess',
    'NestedState',
    'NestedWeights',
    'Plan',
    'PointMessage',
    'Problem',
    'ProblemTypes',
    'Round',
    'ServerOptimizers',
    'ServerStep',
    'ServerSteps',
    'SimultaneousWork',
    'Variables',
    'bilevel',
    'build',
    'build_agg_itd',
    'build_check',
    'build_driver',
    'build_fed_avg_s',
    'build_fed_bio_acc',
    'build_fed_ihgp',
    'build_fed_inn',
    'build_fed_mbo',
    'build_fed_msa',
    'build_fed_nest',
    'build_fed_nest_sgd',
    'build_fed_out',
    'build_lfed_inn',
    'build_lfed_nest',
    'build_lfed_nest_nonalt',
    'build_lfed_nest_svrg',
    'build_lfed_out',
    'build_penalty',
    'build_personal',
    'build_personalize',
    'build_power_iteration',
    'build_process',
    'build_shro_fbo',
    'build_sim_fbo',
    'communication_cost',
    'compositional',
    'data',
    'get_method',
    'learning_rates',
    'method_names',
    'minimax',
    'models',
    'move_ihgp',
    'personal',
    'projections',
    'register',
    'simulation',
    'single_level',
    'splits',
    'use_runtime',
]
