"""The leaderboard of a comparison as files: tables for people, CSV, a plot."""

from collections.abc import Mapping, Sequence
import os

import matplotlib
import matplotlib.axes
import matplotlib.ticker

from fednest_tff.simulation import plots, tables
from fednest_tff.simulation.client_work import PRODUCT_COST
from fednest_tff.simulation.leaderboard import (
    COSTS,
    Outcome,
    Standing,
    standings,
)
from fednest_tff.simulation.plots import Curve
from fednest_tff.simulation.search import Range, Space, Tried
from fednest_tff.simulation.tables import Row

# Ticks of an axis for shares that come near 1.
_SHARES = (0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = ['| ' + ' | '.join(row) + ' |' for row in (header, *rows)]
  lines.insert(1, '| ' + ' | '.join('---' for _ in header) + ' |')
  return '\n'.join(lines)


def _number(value: float) -> str:
  return f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'


def _space(space: Space) -> str:
  return ', '.join(
      f'{name} {value.low:.3g} to {value.high:.3g}'
      if isinstance(value, Range) else f'{name} = {value:.3g}'
      for name, value in space.items()
  )


def _setting(chosen: Tried | None) -> str:
  if chosen is None:
    return '-'
  return ', '.join(f'{k} {value:.3g}' for k, value in chosen.hparams.items())


def to_markdown(
    outcomes: Mapping[str, Outcome],
    lines: Sequence[Standing],
    curve: Curve,
    title: str,
    about: str,
) -> str:
  """The leaderboard for people.

  Args:
    outcomes: By the names of the methods.
    lines: From `standings`.
    curve: The metric.
    title: Of the page.
    about: How the numbers were made.

  Returns:
    A page in Markdown.
  """
  order = list(dict.fromkeys(line.method for line in lines))
  labels = {name: outcomes[name].facts.label for name in order}
  parts = [f'# {title}', about]

  def section(axis: str, heading: str, unit: str) -> None:
    of_axis = [line for line in lines if line.axis == axis]
    if not of_axis:
      return
    marks = list(dict.fromkeys(line.at for line in of_axis))
    by_method = {
        name: [line.mean.to_text() for line in of_axis if line.method == name]
        for name in order
    }
    parts.append(f'## {curve.label} at equal {heading}')
    parts.append(_table(
        ['method', *(f'{_number(mark)} {unit}' for mark in marks)],
        [[labels[name], *by_method[name]] for name in order],
    ))

  section('rounds', 'communication rounds', 'rounds')
  section('megabytes', 'communication', 'MB')
  section('client gradients', 'computation of a client', 'gradients')
  to_target = [line for line in lines if line.axis.endswith(' to target')]
  if to_target:
    parts.append(f'## Costs until {curve.label} is {to_target[0].at:g}')
    parts.append(_table(
        ['method', *(cost.name for cost in COSTS)],
        [
            [labels[name], *(
                line.mean.to_text() for line in to_target
                if line.method == name
            )]
            for name in order
        ],
    ))
  parts.append('## What an epoch costs')
  rows = []
  for name in order:
    facts = outcomes[name].facts
    first = next((r[0] for r in outcomes[name].runs if r), None)
    megabytes = '-' if first is None else _number(
        COSTS[1].of(first) / first['epoch']
    )
    rows.append([
        labels[name],
        str(facts.rounds_per_epoch),
        megabytes,
        _number(facts.work.gradients),
        _number(facts.work.products),
        _number(facts.work.example_gradients),
    ])
  parts.append(_table(
      ['method', 'rounds', 'MB, all clients', 'gradients', 'products',
       'gradients of an example'],
      rows,
  ))
  parts.append(
      'Gradients and products (with second derivatives) are those of one'
      ' client, counted while an epoch runs. In the last column each counts as'
      f' often as it has examples, and a product {PRODUCT_COST} times.'
  )
  parts.append('## Settings')
  parts.append(_table(
      ['method', 'chosen', 'tried', 'stopped', 'diverged', 'searched'],
      [
          [
              labels[name],
              _setting(outcomes[name].chosen),
              str(len(outcomes[name].tried)),
              str(sum(t.outcome == 'stopped' for t in outcomes[name].tried)),
              str(sum(t.outcome == 'diverged' for t in outcomes[name].tried)),
              _space(outcomes[name].facts.space),
          ]
          for name in order
      ],
  ))
  failures = [
      f'- {labels[name]}, seed {seed}: {reason}'
      for name in order
      for seed, reason in outcomes[name].failures.items()
  ]
  if failures:
    parts.append('## Final runs that diverged')
    parts.append('\n'.join(failures))
  return '\n\n'.join(part for part in parts if part) + '\n'


def standing_rows(lines: Sequence[Standing]) -> list[Row]:
  """The rows of `leaderboard.csv`."""
  return [
      {
          'method': line.method,
          'axis': line.axis,
          'at': line.at,
          'mean': '' if line.mean.mean is None else line.mean.mean,
          'standard_error': '' if line.mean.error is None else line.mean.error,
          'num_values': line.mean.num_values,
          'num_seeds': line.mean.num_seeds,
      }
      for line in lines
  ]


def trial_rows(outcomes: Mapping[str, Outcome]) -> list[Row]:
  """The rows of `trials.csv`: every setting that was tried."""
  return [
      {
          'method': name,
          'trial': tried.number,
          'outcome': tried.outcome,
          'value': '' if tried.value is None else tried.value,
          'rounds': tried.rounds,
          'is_chosen': int(tried == outcome.chosen),
          **tried.hparams,
          'reason': tried.reason,
      }
      for name, outcome in outcomes.items()
      for tried in outcome.tried
  ]


def _spread_shares(
    axes: matplotlib.axes.Axes,
    shown: Mapping[str, Sequence[Sequence[Row]]],
    curve: Curve,
) -> None:
  """Gives 0.98 and 0.99 as much room as 0.8 and 0.9, for shares such as these.

  Args:
    axes: Where the curves are.
    shown: The rows of each method's runs.
    curve: The metric. If all of its values are between 0 and 1 and the last
      ones come near 1, the scale is logit.
  """
  runs = [rows for runs in shown.values() for rows in runs]
  values = [row[curve.column] for rows in runs for row in rows]
  best = max(rows[-1][curve.column] for rows in runs)
  if curve.logarithmic or min(values) <= 0 or not 0.8 < best < 1:
    return
  axes.set_yscale('logit')
  axes.set_yticks(_SHARES, labels=[f'{share:g}' for share in _SHARES])
  axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
  axes.set_ylim(max(0.1, min(values)), 1 - (1 - max(values)) / 1.5)
  axes.set_ylabel(f'{curve.label} (logit scale)')


def _short(number: float, _: float | None = None) -> str:
  """A label of an axis: 0.5, 20, 2k, 1M."""
  if number < 1:
    return f'{number:g}'
  return matplotlib.ticker.EngFormatter(sep='')(number)


def _spread_costs(axes: matplotlib.axes.Axes) -> None:
  """A logarithmic axis of costs, with labels that have room."""
  axes.set_xscale('log')
  # 2 and 5 help where there are few powers of ten, and elsewhere are too many.
  left, right = axes.get_xlim()
  subs = (1, 2, 5) if right < 100 * left else (1,)
  axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=subs))
  axes.xaxis.set_major_formatter(_short)
  axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def draw(
    outcomes: Mapping[str, Outcome],
    order: Sequence[str],
    curve: Curve,
    path: str,
    title: str,
) -> None:
  """Draws the metric against each cost.

  Args:
    outcomes: By the names of the methods.
    order: Of the methods.
    curve: The metric.
    path: Of the .png.
    title: Above the panels.
  """
  matplotlib.use('Agg')
  import matplotlib.pyplot as plt  # after the backend is chosen

  shown: dict[str, list[list[Row]]] = {}
  for name in order:
    runs = [
        [
            {**row, **{cost.name: cost.of(row) for cost in COSTS}}
            for row in rows if curve.column in row
        ]
        for rows in outcomes[name].runs
    ]
    runs = [rows for rows in runs if rows]
    if runs:
      shown[outcomes[name].facts.label] = runs
  if not shown:
    return
  figure, panels = plt.subplots(
      1, len(COSTS), figsize=(12, 4.2), sharey=True, layout='constrained'
  )
  for axes, cost in zip(panels, COSTS, strict=True):
    plots.draw_curves(axes, shown, curve, cost.name)
    axes.set_xlabel(cost.label)
    if cost is not COSTS[0]:
      _spread_costs(axes)
  panels[0].set_ylabel(curve.label)
  _spread_shares(panels[0], shown, curve)
  figure.suptitle(title, fontsize=11)
  handles, names = panels[0].get_legend_handles_labels()
  has_bands = any(len(runs) > 1 for runs in shown.values())
  figure.legend(
      handles, names, loc='outside lower center', ncols=min(len(names), 5),
      frameon=False, handlelength=3.5, title_fontsize='small',
      title='bands: one standard deviation over seeds' if has_bands else None,
  )
  temporary = f'{path}.tmp.png'
  figure.savefig(temporary, dpi=120)
  os.replace(temporary, path)
  plt.close(figure)


def write(
    outcomes: Mapping[str, Outcome],
    directory: str,
    curve: Curve,
    larger_is_better: bool,
    rounds: int,
    target: float | None,
    title: str,
    about: str,
    with_plot: bool = True,
) -> str:
  """Writes `leaderboard.csv`, `.md` and `.png`, and `trials.csv`.

  Args:
    outcomes: By the names of the methods.
    directory: Where they go.
    curve: The metric.
    larger_is_better: Whether the metric is to be large.
    rounds: Of the final runs.
    target: As in `Contest`.
    title: Of page and plot.
    about: How the numbers were made.
    with_plot: Whether to draw the plot.

  Returns:
    The page.
  """
  lines = standings(outcomes, curve, larger_is_better, rounds, target)
  order = list(dict.fromkeys(line.method for line in lines))
  page = to_markdown(outcomes, lines, curve, title, about)
  tables.write_rows(
      os.path.join(directory, 'leaderboard.csv'), standing_rows(lines)
  )
  tables.write_rows(
      os.path.join(directory, 'trials.csv'), trial_rows(outcomes)
  )
  temporary = os.path.join(directory, 'leaderboard.md.tmp')
  with open(temporary, 'w', encoding='utf-8') as file:
    file.write(page)
  os.replace(temporary, os.path.join(directory, 'leaderboard.md'))
  if with_plot:
    image = os.path.join(directory, 'leaderboard.png')
    draw(outcomes, order, curve, image, title)
  return page
