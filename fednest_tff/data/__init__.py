"""Images with labels, divided among clients."""

from fednest_tff.data.federated import (
    ArrayClientData,
    FederatedImages,
    federate,
)
from fednest_tff.data.images import DataError, LabelledImages, fingerprint
from fednest_tff.data.partitions import PARTITIONS, long_tail, partition
from fednest_tff.data.sources import DATASETS, load

__all__ = [
    'DATASETS',
    'PARTITIONS',
    'ArrayClientData',
    'DataError',
    'FederatedImages',
    'LabelledImages',
    'federate',
    'fingerprint',
    'load',
    'long_tail',
    'partition',
]
