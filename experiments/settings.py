"""The flags of all experiments.

They are defined once, without defaults: an experiment names those it has, with
its own defaults, and refuses the others. `resolve` gives the values, so that an
experiment can also be run from Python without flags.
"""

import math
import types
from typing import Any

from absl import flags

from fednest_tff import data
from fednest_tff.runtime import RUNTIMES

FLAGS = flags.FLAGS

# Flags that every experiment has, and their defaults.
COMMON = dict(
    method=['fednest'],
    epochs=100,
    seed=0,
    seeds=1,
    epochs_per_evaluation=1,
    epochs_per_checkpoint=10,
    runtime='in_process',
    devices=None,
    unroll=None,
    workers=None,
)
# Flags that say where a run goes, not what it is.
PLACES = ('output_dir', 'overwrite')


class SettingsError(ValueError):
  """A flag that does not fit; the message is one line."""


Settings = types.SimpleNamespace


def _integer(name, text, lower_bound=1):
  flags.DEFINE_integer(name, None, text, lower_bound=lower_bound)


def _positive(name, text):
  flags.DEFINE_float(name, None, text, lower_bound=0.0)


flags.DEFINE_list('method', None, 'Methods, separated by commas.')
_integer('epochs', 'Epochs, K.')
_integer('seed', 'The first seed.', 0)
_integer('seeds', 'How many seeds, one after another.')
_integer('epochs_per_evaluation', 'Epochs from one evaluation to the next.')
_integer('epochs_per_checkpoint', 'Epochs from one checkpoint to the next.')
flags.DEFINE_enum('runtime', None, RUNTIMES, 'Where computations run.')
flags.DEFINE_list('devices', None, 'Devices of the in_process runtime.')
_integer('unroll', 'Largest cohort that in_process unrolls.', 0)
flags.DEFINE_list('workers', None, 'host:port of workers, for that runtime.')
flags.DEFINE_string('output_dir', None, 'Where everything is written.')
flags.DEFINE_boolean('overwrite', False, 'Remove an earlier run; start anew.')

flags.DEFINE_enum('dataset', None, data.DATASETS, 'Images and labels.')
flags.DEFINE_string('data_dir', None, 'Where the data set is; see the README.')
flags.DEFINE_boolean('emnist_only_digits', None, 'EMNIST without letters.')
flags.DEFINE_boolean(
    'standardize', None, 'Give pixels mean 0 and variance 1.'
)
flags.DEFINE_enum('partition', None, data.PARTITIONS, 'Who has which data.')
flags.DEFINE_float(
    'dirichlet_alpha', None, 'Of the Dirichlet partition; small is uneven.'
)
flags.DEFINE_float(
    'imbalance', None, 'Share that the rarest class keeps; none if not given.'
)
flags.DEFINE_float(
    'inner_fraction',
    None,
    'Part of the examples of a client behind the inner loss.',
)
_integer('num_clients', 'How many clients there are, m.')
_integer('clients_per_round', 'How many take part in an epoch.')

_integer('inner_rounds', 'T, calls of FedInn per epoch.')
_integer('inner_local_epochs', 'Passes over the data in local inner steps.')
_integer('inner_local_steps', 'Local inner steps, tau, instead of passes.')
_integer('outer_local_steps', 'Local outer steps, tau.')
_integer('neumann_terms', 'N, of FedIHGP.')
flags.DEFINE_enum(
    'ihgp', None, ('stochastic', 'truncated', 'cg'), 'Solver in FedIHGP.'
)
_positive('smoothness', 'l, a bound of the inner Hessian; default 1 / beta.')
_positive('inner_learning_rate', 'beta.')
_positive('outer_learning_rate', 'alpha.')
_integer('batch_size', 'Of the minibatches in local steps; default: all.')

flags.DEFINE_enum('backbone', None, ('mlp', 'cnn'), 'What x parametrises.')
flags.DEFINE_list('hidden', None, 'Widths of hidden layers.')
_positive('ridge', 'Weight of the squared norm.')
flags.DEFINE_boolean(
    'tune_class_weights', None, 'Let x weigh the classes, too.'
)
flags.DEFINE_boolean('no_tuning', None, 'Keep x as it is: the plain loss.')
flags.DEFINE_boolean('centralised', None, 'One client that has all data.')
flags.DEFINE_enum(
    'problem',
    None,
    ('saddle', 'robust_regression', 'portfolio', 'sine'),
    'Which of the problems of this experiment.',
)
_integer('dimension', 'Of x and y.')
_positive('spread', 's, how far apart the clients are.')
_positive('coupling', 'Weight of the term that couples x and y.')
_positive('rho', 'Price of weighing clients unevenly.')
_positive('risk_aversion', 'Weight of the variance.')
_positive('adaptation_rate', 'Step size of the adaptation to a task.')


def names(defaults: dict[str, Any]) -> list[str]:
  """The flags of an experiment that has these defaults."""
  return [*COMMON, *defaults, *PLACES]


def resolve(
    name: str, defaults: dict[str, Any], given: dict[str, Any]
) -> Settings:
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
  for flag in ('inner_learning_rate', 'outer_learning_rate'):
    if sizes.get(flag) == 0:
      raise SettingsError(f'--{flag} must be positive')
  return settings


def given_by_flags() -> dict[str, Any]:
  """What stands on the command line (or in a flag file)."""
  # `present` counts the command line; a test sets flags in Python.
  return {
      flag.name: flag.value
      for flag in FLAGS.flags_by_module_dict()[__name__]
      if flag.present or not flag.using_default_value
  }
