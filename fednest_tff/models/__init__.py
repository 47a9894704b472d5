"""Problems from models: Keras, or `tff.learning.models.FunctionalModel`.

`backbone_and_head` and `single_level` make a problem from models and a loss.
`network` makes a model a function of its weights, for losses of your own.
"""

from fednest_tff.models.network import Network, network
from fednest_tff.models.problem import (
    ModelProblem,
    backbone_and_head,
    single_level,
)

__all__ = [
    'ModelProblem',
    'Network',
    'backbone_and_head',
    'network',
    'single_level',
]
