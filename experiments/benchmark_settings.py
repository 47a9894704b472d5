"""The rows of the benchmark's table, in groups."""

from typing import NamedTuple

from fednest_tff import registry

PIXELS, CLASSES = 784, 10
_DEEP = (512, 512, 200)
_TUNED = (200, 100)  # The classifier that loss tuning trains.
_OTHER_COHORTS = 12


class Setting(NamedTuple):
  """One row of the table.

  Attributes:
    name: Its name in the table.
    group: The part of the table that it belongs to.
    runtime: 'in_process', 'native' or 'floor'.
    clients: How many take part.
    hidden: Widths of the hidden layers.
    problem: 'hyper_representation', 'loss_tuning', or TFF's own federated
      averaging: 'fedavg_mlp' or 'fedavg_cnn'.
    method: A method of the registry.
    representation: Whether the problem declares its representation.
    inner_rounds: T.
    neumann_terms: N.
    client_sizes: Whether all clients have equally many examples ('equal'), or
      there are two sizes ('two'), or as many as clients ('all').
    equal_steps: Whether all clients take the same number of local steps. If
      not, they take as many as a number of local epochs has.
    unroll: That of the in-process runtime.
    other_cohorts: How many other cohort sizes are timed after the first call.
    is_traced: Whether the operations of an epoch are counted.
  """

  name: str
  group: str
  runtime: str
  clients: int = 10
  hidden: tuple[int, ...] = (200,)
  problem: str = 'hyper_representation'
  method: str = 'fednest'
  representation: bool = True
  inner_rounds: int = 1
  neumann_terms: int = 5
  client_sizes: str = 'equal'
  equal_steps: bool = False
  unroll: int | None = None
  other_cohorts: int = 0
  is_traced: bool = True

  @property
  def sizes(self) -> tuple[int, ...]:
    """Widths of all layers, inputs first."""
    return (PIXELS, *self.hidden, CLASSES)

  @property
  def work(self) -> 'Setting':
    """What is computed, however it is: equal settings may be compared."""
    return self._replace(
        name='', group='', runtime='', representation=True, unroll=None,
        other_cohorts=0, is_traced=True,
    )

  @property
  def is_default(self) -> bool:
    """Whether it is the usual way to run in process, timed as usual."""
    return (
        self.runtime == 'in_process'
        and self.representation
        and self.unroll is None
        and not self.other_cohorts
    )

  def other_sizes(self) -> list[int]:
    """The other cohort sizes, about that of the first call: 5 to 17 for 10."""
    first = max(1, self.clients - 5)
    sizes = range(first, first + self.other_cohorts + 1)
    return [size for size in sizes if size != self.clients]


def _methods() -> list[Setting]:
  """All other methods for bilevel problems, on the headline's network."""
  found = [Setting('floor, SimFBO', 'methods', 'floor', method='simfbo')]
  for name in registry.method_names():
    method = registry.get_method(name)
    if name == 'fednest' or 'bilevel' not in method.kinds:
      continue
    # Without Neumann terms, the rounds on y carry the hypergradient's chain.
    has_chain = (
        'inner_rounds' in method.options
        and 'neumann_terms' not in method.options
    )
    found.append(
        Setting(
            f'in process, {method.label}', 'methods', 'in_process', method=name,
            inner_rounds=5 if has_chain else 1,
        )
    )
  return found


def _cohorts() -> list[Setting]:
  """Cohorts of other sizes, and clients with unequal numbers of examples."""
  found = [
      Setting(
          'in process, other cohort sizes', 'cohorts', 'in_process',
          other_cohorts=_OTHER_COHORTS,
      )
  ]
  for name, sizes in [('2 sizes', 'two'), ('10 sizes', 'all')]:
    # Local epochs of unequal clients have unequal numbers of steps.
    found += [
        Setting(
            f'in process, {name}{steps}{kind}', 'cohorts', 'in_process',
            client_sizes=sizes, equal_steps=bool(steps), unroll=unroll,
        )
        for steps in ('', ', equal tau')
        for kind, unroll in [('', None), (', loop', 0)]
    ]
  return found


def _fed_avg() -> list[Setting]:
  """TFF's own federated averaging of Keras models."""
  return [
      Setting(
          f'{label}, FedAvg {model.upper()}, {clients} clients', 'fedavg',
          runtime, clients=clients, problem=f'fedavg_{model}',
          is_traced=clients == 10,  # A trace of 100 takes minutes.
      )
      for model in ('mlp', 'cnn')
      for clients in (10, 100)
      for label, runtime in [
          ('in process', 'in_process'), ('native', 'native')
      ]
  ]


SETTINGS = (
    Setting('floor', 'headline', 'floor'),
    Setting('in process', 'headline', 'in_process'),
    Setting(
        'in process, not declared', 'headline', 'in_process',
        representation=False,
    ),
    Setting('in process, loop', 'headline', 'in_process', unroll=0),
    Setting('in process, unrolled', 'headline', 'in_process', unroll=10),
    Setting('native', 'headline', 'native'),
    Setting('floor, deep', 'deep', 'floor', hidden=_DEEP),
    Setting('in process, deep', 'deep', 'in_process', hidden=_DEEP),
    Setting('native, deep', 'deep', 'native', hidden=_DEEP),
    Setting('floor, 100 clients', 'clients', 'floor', clients=100),
    Setting('in process, 100 clients', 'clients', 'in_process', clients=100),
    Setting('native, 100 clients', 'clients', 'native', clients=100),
    Setting('in process, N=20', 'first_calls', 'in_process', neumann_terms=20),
    Setting(
        'in process, T=20, N=60', 'first_calls', 'in_process', inner_rounds=20,
        neumann_terms=60,
        is_traced=False,  # It would take ten minutes.
    ),
    Setting(
        'in process, loss tuning', 'first_calls', 'in_process', hidden=_TUNED,
        problem='loss_tuning',
    ),
    Setting(
        'native, loss tuning', 'first_calls', 'native', hidden=_TUNED,
        problem='loss_tuning',
    ),
    *_methods(),
    *_cohorts(),
    *_fed_avg(),
)
GROUPS = tuple(dict.fromkeys(setting.group for setting in SETTINGS))
