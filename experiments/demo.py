r"""Every method on two problems whose solution is known.

  python -m experiments.demo --epochs=40

Prints how far each method ends from the solution of a bilevel and of a minimax
problem over different clients, and what an epoch costs each client to send and
to receive. On the bilevel problem FedNest goes to the solution and the methods
that save rounds stop at a biased point. In the minimax problem, the paper's,
all clients have the same Hessian, so that the alternating ones have no bias.
"""

from collections.abc import Iterable
import sys

from absl import app, flags, logging
import numpy as np
import tqdm

from experiments import closed_form
import fednest_tff

_EPOCHS = flags.DEFINE_integer('epochs', 40, 'FedNest epochs.', lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the problems and the methods.')

_BILEVEL = dict(
    outer_learning_rate=0.5,
    inner_learning_rate=0.2,
    inner_rounds=2,
    inner_local_steps=5,
    neumann_terms=6,
    ihgp='cg',
)
_MINIMAX = dict(
    outer_learning_rate=0.05,
    inner_learning_rate=0.1,
    inner_rounds=1,
    inner_local_steps=5,
    outer_local_steps=2,
)


def _run(case: closed_form.Case, method: str, options: dict) -> list[str]:
  """Runs one method; a row of the table."""
  process = fednest_tff.build_fed_nest(
      case.problem, method, seed=_SEED.value, **options
  )
  cost = fednest_tff.communication_cost(process)
  state = process.initialize()
  for _ in range(_EPOCHS.value):
    state = process.next(state, case.datasets).state
  weights = process.get_model_weights(state)
  return [
      method,
      f'{np.linalg.norm(weights.outer - case.outer):.1e}',
      f'{np.linalg.norm(weights.inner - case.inner):.1e}',
      f'{cost.rounds}',
      f'{cost.bytes_up:,}',
      f'{cost.bytes_down:,}',
  ]


def _print_table(title: str, rows: Iterable[list[str]]) -> None:
  """Prints `rows` under a title, in columns."""
  header = [
      'method', '|x - x*|', '|y - y*|', 'rounds', 'bytes up', 'bytes down'
  ]
  table = [header, *rows]
  widths = [max(len(row[k]) for row in table) for k in range(len(header))]
  print(f'\n{title}')
  for row in table:
    cells = [row[0].ljust(widths[0])]
    cells += [
        cell.rjust(width)
        for cell, width in zip(row[1:], widths[1:], strict=True)
    ]
    print('  '.join(cells))


def main(argv: list[str]) -> None:
  """Runs all methods on both problems."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected argument {argv[1]!r}')
  logging.set_verbosity(logging.WARNING)
  cases = {
      'Bilevel': (closed_form.quadratic_bilevel(seed=_SEED.value), _BILEVEL),
      'Minimax': (closed_form.saddle(seed=_SEED.value), _MINIMAX),
  }
  rows = {title: [] for title in cases}
  # Few and short epochs: what counts is the time to compile.
  fednest_tff.use_runtime('in_process', unroll=0)
  with tqdm.tqdm(
      total=len(cases) * len(fednest_tff.METHODS),
      disable=not sys.stderr.isatty(),
      leave=False,
  ) as progress:
    for title, (case, options) in cases.items():
      for method in fednest_tff.METHODS:
        progress.set_description(f'{title} {method}')
        rows[title].append(_run(case, method, options))
        progress.update()
  for title, (case, _) in cases.items():
    _print_table(
        f'{title} problem, {len(case.datasets)} different clients: distance to'
        f' the solution after {_EPOCHS.value} epochs; communication per client'
        ' and epoch',
        rows[title],
    )


if __name__ == '__main__':
  app.run(main)
