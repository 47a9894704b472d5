"""Finds and chooses the devices that computations run on."""

from collections.abc import Sequence

import tensorflow as tf


def _short_name(name: str) -> str:
  """Shortens '/device:GPU:0', '/physical_device:gpu:0' or 'gpu' to 'GPU:0'."""
  kind, _, index = name.rpartition('device:')[2].strip('/').partition(':')
  return f'{kind.upper()}:{index or 0}'


def visible_devices() -> list[str]:
  """Lists the names of all CPUs and GPUs, such as 'CPU:0'."""
  return [
      _short_name(device.name)
      for device in tf.config.list_logical_devices()
      if device.device_type in ('CPU', 'GPU')
  ]


def grow_memory() -> None:
  """Lets GPUs take memory when they need it, instead of all at the start.

  GPUs that are in use already stay as they are.
  """
  for gpu in tf.config.list_physical_devices('GPU'):
    try:
      tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:  # It is in use.
      pass


def choose(devices: Sequence[str] | None) -> list[str]:
  """Checks a list of devices, or makes one.

  Args:
    devices: Names such as 'GPU:0'; `None` for every GPU, or for the CPU if
      there is none.

  Returns:
    Names as `tf.device` takes them, such as '/device:GPU:0'.

  Raises:
    ValueError: If a device does not exist; the message names those that do.
  """
  grow_memory()
  found = visible_devices()
  if devices is None:
    gpus = [name for name in found if name.startswith('GPU')]
    devices = gpus or ['CPU:0']
  if isinstance(devices, str) or not devices:
    raise ValueError(
        f'`devices` must be a list of names such as {found}; got {devices!r}.'
    )
  chosen = [_short_name(name) for name in devices]
  for name in chosen:
    if name not in found:
      raise ValueError(
          f'`devices` has {name}, which does not exist here; there are {found}.'
      )
  return [f'/device:{name}' for name in chosen]
