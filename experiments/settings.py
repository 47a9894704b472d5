"""The flags of all experiments.

They are defined once, without defaults: an experiment names those it has, with
its defaults, and refuses the others. The flags of the methods are their options
in the registry. `resolve` gives the values, so that an experiment can also be
run from Python without flags.
"""

import math
import types
from typing import Any, TypeAlias

from absl import flags

from fednest_tff import data, registry
from fednest_tff.options import Option
from fednest_tff.runtime import RUNTIMES

FLAGS = flags.FLAGS

# Values by the names of flags; each flag has a type of its own.
Flags: TypeAlias = dict[str, Any]

# Flags that every experiment has, and their defaults.
COMMON: Flags = dict(
    method=['fednest'],
    epochs=100,
    seed=0,
    seeds=1,
    epochs_per_evaluation=1,
    epochs_per_checkpoint=10,
    runtime='in_process',
    devices=None,
    unroll=None,
    compiled=True,
    address=None,
    num_workers=None,
    cpus_per_worker=None,
    gpus_per_worker=None,
    num_shares=None,
    call_timeout=None,
)
# Flags that say where a run goes, not what it is.
PLACES = ('output_dir', 'overwrite')
# Flags that say where a run runs and where its data are. They may change when
# it goes on: its data are known by their hash.
MACHINES = (
    'runtime', 'devices', 'unroll', 'compiled', 'address', 'num_workers',
    'cpus_per_worker', 'gpus_per_worker', 'call_timeout', 'data_dir',
)
# The largest values of flags; others would take all memory, or for ever.
_LARGEST = dict(
    seeds=10_000,
    num_clients=100_000,
    dimension=2_000,
    inner_rounds=1_000,
    neumann_terms=1_000,
)
_LARGEST_INTEGER = 2**31 - 1
_LARGEST_PROBLEM = 10**7  # Clients times dimension.
# Of each pair, both say how long a client works, and the first one counts.
_EXCLUSIVE = (
    ('inner_local_steps', 'inner_local_epochs'),
    ('local_epochs', 'local_steps'),
)


class SettingsError(ValueError):
  """A flag that does not fit; the message is one line."""


Settings = types.SimpleNamespace


def _integer(name: str, text: str, lower_bound: int = 1) -> None:
  flags.DEFINE_integer(name, None, text, lower_bound=lower_bound)


def _positive(name: str, text: str) -> None:
  flags.DEFINE_float(name, None, text, lower_bound=0.0)


flags.DEFINE_list('method', None, 'Methods, separated by commas.')
_integer('epochs', 'How many epochs, K. An epoch has one or more rounds.')
_integer('seed', 'The first seed.', 0)
_integer('seeds', 'How many seeds, one after another.')
_integer('epochs_per_evaluation', 'Epochs from one evaluation to the next.')
_integer('epochs_per_checkpoint', 'Epochs from one checkpoint to the next.')
flags.DEFINE_enum('runtime', None, RUNTIMES, 'Where computations run.')
flags.DEFINE_list('devices', None, 'Devices of the in_process runtime.')
_integer('unroll', 'Largest cohort that is compiled client by client.', 0)
flags.DEFINE_boolean(
    'compiled', None, 'Compile an epoch: it starts later and runs faster.'
)
flags.DEFINE_string('preset', None, 'Defaults that go together.')
flags.DEFINE_string(
    'address',
    None,
    'Ray cluster: auto, host:port or ray://host:port; starts one if not given.',
)
_integer('num_workers', 'Workers of the runtime ray, 2 if not given.')
_positive('cpus_per_worker', 'CPUs of each worker, 1 if not given.')
_positive('gpus_per_worker', 'GPUs of each worker, none if not given.')
_integer(
    'num_shares',
    'Shares of the clients of a round, one per worker if not given; the numbers'
    ' of a run depend on it, but not on the workers.',
)
_positive(
    'call_timeout', 'Seconds for a call of native or ray; an hour if not given.'
)
flags.DEFINE_string('output_dir', None, 'Where everything is written.')
flags.DEFINE_boolean('overwrite', False, 'Remove an earlier run; start anew.')

flags.DEFINE_enum('dataset', None, data.DATASETS, 'Images and labels.')
flags.DEFINE_string(
    'data_dir', None, 'Where the data set is; see docs/experiments.md.'
)
flags.DEFINE_boolean('emnist_only_digits', None, 'EMNIST without letters.')
flags.DEFINE_boolean(
    'standardize', None, 'Give pixels mean 0 and variance 1.'
)
flags.DEFINE_enum(
    'partition',
    None,
    data.PARTITIONS,
    'How examples are divided among clients: at random, by labels (shards:'
    ' about two labels per client), or by who wrote them.',
)
flags.DEFINE_float(
    'dirichlet_alpha',
    None,
    'Evenness of the Dirichlet partition; small is uneven.',
)
flags.DEFINE_float(
    'imbalance', None, 'Share that the rarest class keeps; none if not given.'
)
flags.DEFINE_float(
    'inner_fraction',
    None,
    "Share of a client's examples that the inner loss uses; the outer loss uses"
    ' the others.',
)
_integer('num_clients', 'How many clients there are, m.')
_integer('clients_per_round', 'How many clients take part in an epoch.')


# The flags that are options of methods and nothing else.
METHOD_FLAGS: set[str] = set()


def define_method_flags() -> None:
  """Defines a flag for every option of a registered method that has none."""
  for name in registry.method_names():
    for option in method_options(name).values():
      if option.name in FLAGS:
        continue
      text = option.help or f'An option of {name}.'
      if option.choices:
        flags.DEFINE_enum(option.name, None, option.choices, text)
      elif option.flag_type is not None:
        _DEFINE[option.flag_type](option.name, None, text)
      METHOD_FLAGS.add(option.name)


_DEFINE = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def method_options(method: str) -> dict[str, Option]:
  """The options of a method that are flags, by name."""
  found = registry.get_method(method).options
  return {
      name: places[0]
      for name, places in found.items()
      if places[0].flag_type is not None and name not in COMMON
  }


define_method_flags()

flags.DEFINE_enum(
    'backbone', None, ('mlp', 'cnn'), 'The network whose weights are x.'
)
flags.DEFINE_list('hidden', None, 'Widths of hidden layers.')
_positive('ridge', 'Weight of the squared norm in the loss.')
flags.DEFINE_boolean(
    'tune_class_weights', None, 'Let x weigh the classes, too.'
)
flags.DEFINE_boolean('no_tuning', None, 'Keep x as it is: the plain loss.')
flags.DEFINE_boolean('centralised', None, 'One client that has all data.')
flags.DEFINE_float(
    'wrong_labels', None, 'Share of the training labels that are wrong.'
)
_integer(
    'wrong_labels_seed',
    'Seed of the wrong labels; that of the run if it is not given.',
    0,
)
flags.DEFINE_string('problem', None, 'One of the problems of an experiment.')
_integer('dimension', 'Dimension of x and y.')
_positive('spread', 's, how far apart the clients are.')
_positive('coupling', 'Weight of the term that couples x and y.')
_positive('rho', 'Price of weighing clients unevenly.')
_positive('risk_aversion', 'Weight of the variance.')
_positive('adaptation_rate', 'Step size of the adaptation to a task.')
_integer(
    'personalization_steps',
    'Steps that fit the head to a client when it is judged; as many as'
    ' --inner_local_steps if it is not given.',
)


def names(defaults: Flags) -> list[str]:
  """The flags of an experiment that has these defaults."""
  return [*COMMON, *defaults, *PLACES]


def resolve(name: str, defaults: Flags, given: Flags) -> Settings:
  """The settings of an experiment.

  Args:
    name: Of the experiment, for messages.
    defaults: Its flags besides `COMMON`, with defaults; may change those, too.
    given: What the user chose.

  Returns:
    All settings.

  Raises:
    SettingsError: If one was chosen that the experiment does not have, or if
      two do not go together.
  """
  unknown = sorted(given.keys() - set(names(defaults)))
  if unknown:
    raise SettingsError(
        f'--{unknown[0]} has no effect in {name}: leave it out'
    )
  settings = Settings(**(COMMON | defaults | given))
  sizes = vars(settings)
  if sizes.get('clients_per_round') and sizes.get('num_clients'):
    if settings.clients_per_round > settings.num_clients:
      raise SettingsError(
          f'--clients_per_round={settings.clients_per_round} is more than'
          f' --num_clients={settings.num_clients}'
      )
  for flag, value in sizes.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise SettingsError(f'--{flag}={value} must be finite')
    largest = _LARGEST.get(flag, _LARGEST_INTEGER)
    if isinstance(value, int) and value > largest:
      raise SettingsError(f'--{flag}={value} must be at most {largest}')
  fraction = sizes.get('inner_fraction')
  if fraction is not None and not 0 < fraction < 1:
    raise SettingsError(f'--inner_fraction={fraction} must be between 0 and 1')
  if settings.seed + settings.seeds > _LARGEST_INTEGER:
    raise SettingsError(
        f'--seed={settings.seed} and --seeds={settings.seeds} go beyond'
        f' {_LARGEST_INTEGER}'
    )
  if sizes.get('num_clients') and sizes.get('dimension'):
    if settings.num_clients * settings.dimension > _LARGEST_PROBLEM:
      raise SettingsError(
          f'--num_clients={settings.num_clients} times'
          f' --dimension={settings.dimension} must be at most'
          f' {_LARGEST_PROBLEM}'
      )
  _check_exclusive(sizes, given)
  return settings


def _check_exclusive(settings: Flags, given: Flags) -> None:
  """Refuses a flag that has no effect beside another."""
  for first, second in _EXCLUSIVE:
    if given.get(second) is None or settings.get(first) is None:
      continue
    if given.get(first) is not None:
      raise SettingsError(
          f'--{first} and --{second} do not go together: leave out one'
      )
    raise SettingsError(
        f'--{second} has no effect beside --{first}={settings[first]}, which is'
        f' the default here: choose --{first} instead'
    )


def _check_text(flag: str, value: object) -> None:
  """Refuses text that no file name or message can hold."""
  for text in value if isinstance(value, list) else [value]:
    if isinstance(text, str):
      try:
        text.encode()
      except UnicodeEncodeError:
        raise SettingsError(f'--{flag}={text!r} is not UTF-8') from None


def given_by_flags() -> Flags:
  """The values on the command line, or in a flag file."""
  # `present` counts the command line; a test sets flags in Python.
  found = {
      flag.name: flag.value
      for flag in FLAGS.flags_by_module_dict()[__name__]
      if flag.present or not flag.using_default_value
  }
  for name, value in found.items():
    _check_text(name, value)
  return found
