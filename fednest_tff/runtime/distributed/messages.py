"""Converts arguments and results to what is sent, and back.

What is sent has lists and NumPy arrays only, whatever containers the user has.
A sequence is replaced by what a function makes of it.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from fednest_tff import structures
from fednest_tff.runtime import shares
from fednest_tff.runtime.distributed import client_data
from fednest_tff.structures import Value

# From a sequence and its type to what is sent in its place.
Store: TypeAlias = Callable[[Value, tff.SequenceType], Value]
# From what was sent and the type of the sequence to the sequence.
Load: TypeAlias = Callable[[Value, tff.SequenceType], Value]
# From the name of a client to its value.
Open: TypeAlias = Callable[[client_data.ClientId], Value]


def _to_array(value: Value, value_type: tff.TensorType) -> client_data.Array:
  if isinstance(value, tf.Tensor):
    value = value.numpy()
  if value_type.dtype is np.str_:
    return np.asarray(value, object)
  return np.asarray(value, value_type.dtype)


def encode_client(
    value: Value, value_type: tff.Type, store: Store
) -> Value:
  """Converts the value of one client.

  Args:
    value: The value, or the client's name.
    value_type: Its type, without the placement.
    store: See above.

  Returns:
    What is sent.
  """
  is_tensor = isinstance(value_type, tff.TensorType)
  if client_data.is_client_id(value) and not is_tensor:
    return client_data.Named(value)
  return encode(value, value_type, store)


def encode(value: Value, value_type: tff.Type, store: Store) -> Value:
  """Converts a value of any type.

  Args:
    value: The value.
    value_type: Its type. A list has one value per client, if it is placed at
      the clients.
    store: See above.

  Returns:
    What is sent.
  """
  if isinstance(value_type, tff.FederatedType):
    if shares.is_per_client(value_type):
      return [encode_client(one, value_type.member, store) for one in value]
    return encode(value, value_type.member, store)
  if isinstance(value_type, tff.StructType):
    return [
        encode(element, element_type, store)
        for element, element_type in zip(
            structures.elements(value, value_type), value_type, strict=True
        )
    ]
  if isinstance(value_type, tff.SequenceType):
    return store(value, value_type)
  if isinstance(value_type, tff.TensorType):
    return _to_array(value, value_type)
  raise NotImplementedError(f'Cannot send a value of type {value_type}.')


def decode(
    message: Value, value_type: tff.Type, load: Load, open_: Open | None = None
) -> Value:
  """Converts what was sent to a value that the runtime takes.

  Args:
    message: From `encode`.
    value_type: The type of the value.
    load: See above.
    open_: See above; `None` if no client is given by its name.

  Returns:
    The value, with `tff.structure.Struct`s in place of other containers.
  """
  if open_ is not None and isinstance(message, client_data.Named):
    return open_(message.client_id)
  if isinstance(value_type, tff.FederatedType):
    if shares.is_per_client(value_type):
      member = value_type.member
      return [decode(one, member, load, open_) for one in message]
    return decode(message, value_type.member, load, open_)
  if isinstance(value_type, tff.StructType):
    names = [name for name, _ in tff.structure.iter_elements(value_type)]
    return tff.structure.Struct([
        (name, decode(element, element_type, load, open_))
        for name, element, element_type in zip(
            names, message, value_type, strict=True
        )
    ])
  if isinstance(value_type, tff.SequenceType):
    return load(message, value_type)
  # A NumPy scalar where the shape is empty, as the runtime itself returns.
  return message[()] if message.shape == () else message


def num_bytes(message: Value) -> int:
  """The size of all arrays in what is sent."""
  if isinstance(message, np.ndarray):
    return message.nbytes
  if isinstance(message, client_data.Elements):
    return message.num_bytes
  if isinstance(message, list):
    return sum(map(num_bytes, message))
  return 0
