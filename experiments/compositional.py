r"""Compositional problems: f(mean_i r_i(x)).

  python -m experiments.compositional --problem=portfolio --method=fednest \
      --output_dir=outputs/portfolio

`--problem=portfolio` is a mean-variance portfolio over clients with different
markets, whose solution is known in closed form; `--problem=sine` is MAML over
clients with a sine curve each.
"""

from experiments import (
    closed_form,
    nested,
    program,
    sine_meta_learning,
)
from experiments.experiment import Experiment
from experiments.hyper_representation import widths
from experiments.settings import Flags, Settings
from fednest_tff import simulation

_DEFAULTS = dict(problem='portfolio')
_VARIANTS: dict[str, Flags] = dict(
    portfolio=dict(
        num_clients=10,
        clients_per_round=None,
        dimension=5,
        spread=1.0,
        risk_aversion=1.0,
        inner_local_steps=1,
        inner_learning_rate=1.0,
        linear_learning_rate=1.0,
        outer_learning_rate=0.2,
    ),
    sine=dict(
        num_clients=40,
        hidden=['16', '16'],
        adaptation_rate=0.02,
        inner_local_steps=1,
        inner_learning_rate=1.0,
        linear_learning_rate=1.0,
        outer_learning_rate=0.1,
    ),
)
_NUM_QUERY = 20
_NUM_HELD_OUT = 200
# Held-out tasks are nobody's: no trial has this seed.
_HELD_OUT_SEED = 2**31


def _portfolio(settings: Settings, seed: int) -> simulation.Trial:
  case = closed_form.portfolio(
      settings.num_clients,
      settings.dimension,
      risk_aversion=settings.risk_aversion,
      spread=settings.spread,
      seed=seed,
  )
  return nested.closed_form_trial(case, settings, seed)


def _sine(settings: Settings, seed: int) -> simulation.Trial:
  hidden, rate = widths(settings.hidden), settings.adaptation_rate
  count = settings.num_clients
  tasks = sine_meta_learning.sample_tasks(
      count, num_query=_NUM_QUERY, seed=seed
  )
  held_out = sine_meta_learning.sample_tasks(
      _NUM_HELD_OUT, num_query=_NUM_QUERY, seed=_HELD_OUT_SEED
  )
  problem = sine_meta_learning.sine_meta_learning(count, hidden, rate)
  datasets = sine_meta_learning.to_datasets(tasks)

  def loss(weights, some):
    return float(
        sine_meta_learning.adapted_loss(weights.outer, some, hidden, rate)
    )

  return simulation.Trial(
      lambda method: nested.build(problem, method, settings, seed),
      lambda epoch: datasets,
      lambda weights: {
          'adapted_loss': loss(weights, tasks),
          'held_out_loss': loss(weights, held_out),
      },
      count,
  )


def make_trial(settings: Settings, seed: int) -> simulation.Trial:
  """Clients, problem and evaluation of one seed."""
  if settings.problem == 'portfolio':
    return _portfolio(settings, seed)
  return _sine(settings, seed)


def _curve(settings: Settings) -> simulation.Curve:
  if settings.problem == 'portfolio':
    return simulation.Curve('x_distance', '|x - x*|', logarithmic=True)
  return simulation.Curve('held_out_loss', 'loss on new tasks after adaptation')


EXPERIMENT = Experiment(
    'compositional',
    'Compositional',
    _DEFAULTS,
    make_trial,
    _curve,
    _VARIANTS,
    without=nested.IHGP_OPTIONS,
)

if __name__ == '__main__':
  program.run(EXPERIMENT)
