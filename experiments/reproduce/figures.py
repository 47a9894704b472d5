"""The figures, in the paper's layout.

Each function takes the rows of a figure's runs, as `sets.runs_of` names them,
and a path.
"""

from collections.abc import Callable, Sequence
import os
from typing import TYPE_CHECKING, TypeAlias

import matplotlib
import numpy as np

from experiments.reproduce import sets
from fednest_tff import registry, simulation
from fednest_tff.simulation import plots

if TYPE_CHECKING:  # Otherwise imported after the backend is chosen.
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# One list of rows per seed.
Runs: TypeAlias = list[list[simulation.Row]]
# The runs for a key of `sets.runs_of`.
Rows: TypeAlias = dict[sets.Key, Runs]

NAMES = {name: registry.get_method(name).label
         for name in registry.method_names()}
_PARTITIONS = {'iid': 'iid', 'shards': 'non-iid'}
_ROUNDS = 'communication_rounds'
_LABELS = {'epoch': 'epochs', _ROUNDS: 'communication rounds'}


def _new(
    rows: int = 1, columns: int = 1, sharex: bool = False, sharey: bool = False
) -> tuple['Figure', np.ndarray]:
  matplotlib.use('Agg')
  import matplotlib.pyplot as plt  # after the backend is chosen

  size = (4.6 * columns, 3.2 * rows + 0.7)
  return plt.subplots(
      rows, columns, figsize=size, layout='constrained', squeeze=False,
      sharex=sharex, sharey=sharey,
  )


def _save(figure: 'Figure', path: str) -> str:
  import matplotlib.pyplot as plt

  temporary = f'{path}.tmp.png'
  # At most a thousand pixels wide.
  dpi = min(130, 1000 / figure.get_size_inches()[0])
  figure.savefig(temporary, dpi=dpi, pil_kwargs=dict(optimize=True))
  os.replace(temporary, f'{path}.png')
  plt.close(figure)
  return f'{path}.png'


def _panel(
    axes: 'Axes',
    rows: Rows,
    names: dict[sets.Key, str],
    curve: simulation.Curve,
    x: str,
    length: str = 'epoch',
) -> None:
  """Draws the runs that have rows; says in the legend which diverged.

  Args:
    axes: Where.
    rows: The runs of a figure.
    names: Which of them, with their names in the legend.
    curve: What is drawn.
    x: The column that it is drawn against.
    length: The column whose last value is the same for all that did not
      diverge.
  """
  ends = {
      key: [run[-1][length] if run else 0 for run in rows[key]]
      for key in names if key in rows
  }
  longest = max((max(e) for e in ends.values() if e), default=0)
  found = {}
  for key, lengths in ends.items():
    # Without one of its seeds a mean would jump, so it ends with the first.
    suffix = ' (diverges)' if lengths and min(lengths) < longest else ''
    found[names[key] + suffix] = [run for run in rows[key] if run]
  plots.draw_curves(
      axes, {name: runs for name, runs in found.items() if runs}, curve, x
  )
  axes.set_xlabel(_LABELS[x])
  axes.set_ylabel(curve.label)


def _legend(figure: 'Figure', axes: np.ndarray, columns: int) -> None:
  """Below the panels, where no curve is."""
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(
      handles, labels, loc='outside lower center', ncols=columns,
      frameon=False, handlelength=3.5,
  )


_ACCURACY = simulation.Curve('test_accuracy', 'test accuracy')
_BALANCED = simulation.Curve(
    'balanced_accuracy', 'class-balanced test accuracy'
)


def _by_partition(methods: Sequence[str]) -> dict[sets.Key, str]:
  return {
      (method, partition): f'{NAMES[method]}, {text}'
      for method in methods for partition, text in _PARTITIONS.items()
  }


def _one_panel(
    names: dict[sets.Key, str], curve: simulation.Curve, x: str
) -> Callable[[Rows, str], str]:
  """A function that draws a figure of one panel."""

  def draw(rows: Rows, path: str) -> str:
    figure, axes = _new()
    _panel(axes[0, 0], rows, names, curve, x)
    _legend(figure, axes, 2)
    return _save(figure, path)

  return draw


def figure_2c(rows: Rows, path: str) -> str:
  """Local steps in FedOut against rounds."""
  figure, axes = _new()
  names = {
      (tau, partition): rf'$\tau$ = {tau}, {_PARTITIONS[partition]}'
      for tau, partition in rows
  }
  _panel(axes[0, 0], rows, names, _ACCURACY, _ROUNDS)
  _legend(figure, axes, 2)
  return _save(figure, path)


def last(runs: Runs, column: str) -> list[float]:
  """The last value of a column, seed by seed, of those that have one."""
  values = [[row[column] for row in rows if column in row] for rows in runs]
  return [found[-1] for found in values if found]


def figure_3a(rows: Rows, path: str) -> str:
  """Loss tuning against epochs; lines of runs that do less."""
  figure, axes = _new()
  names = _by_partition(('fednest', 'lfednest'))
  _panel(axes[0, 0], rows, names, _BALANCED, 'epoch')
  lines = (
      ('centralised', 'centralised bilevel', (0, (8, 2)), '#6b4423'),
      ('untuned', 'centralised, untuned', (0, (2, 2)), 'black'),
      ('untuned clients', 'iid clients, untuned', (0, (1, 3)), 'grey'),
  )
  for key, label, style, colour in lines:
    values = last(rows.get(key, []), 'balanced_accuracy')
    if values:
      axes[0, 0].axhline(
          sum(values) / len(values), linestyle=style, color=colour, label=label
      )
  _legend(figure, axes, 2)
  return _save(figure, path)


def squared(rows: Rows) -> Rows:
  """Rows with the squares of distances, as the paper shows them."""
  return {
      key: [
          [
              row | {
                  'x_squared': row['x_distance'] ** 2,
                  'y_squared': row['y_distance'] ** 2,
              }
              for row in run
          ]
          for run in runs
      ]
      for key, runs in rows.items()
  }


def figure_4(rows: Rows, path: str) -> str:
  """Distances to the saddle point; all clients above, a sample below."""
  figure, axes = _new(2, 2, sharex=True)
  rows = squared(rows)
  panels = (
      simulation.Curve('y_squared', r'$\|y - y^*\|^2$', logarithmic=True),
      simulation.Curve('x_squared', r'$\|x - x^*\|^2$', logarithmic=True),
  )
  for i, partial in enumerate((False, True)):
    names = {
        (method, spread, partial): f'{NAMES[method]}, s = {spread:g}'
        for method in sets.SADDLE_METHODS for spread in sets.SPREADS
    }
    for j, curve in enumerate(panels):
      _panel(axes[i, j], rows, names, curve, 'epoch')
      kind = 'some clients per epoch' if partial else 'all clients'
      axes[i, j].set_title(kind, fontsize=10)
  _legend(figure, axes, 3)
  return _save(figure, path)


def figure_5(rows: Rows, path: str) -> str:
  """Light methods on label shards against epochs and rounds."""
  figure, axes = _new(1, 2, sharey=True)
  names = {method: NAMES[method] for method in sets.LIGHT_METHODS}
  for j, x in enumerate(('epoch', _ROUNDS)):
    _panel(axes[0, j], rows, names, _ACCURACY, x)
  _legend(figure, axes, 3)
  return _save(figure, path)


def _outer_steps(length: str) -> Callable[[Rows, str], str]:
  """Outer step sizes on label shards against rounds, a panel each."""

  def draw(rows: Rows, path: str) -> str:
    steps = sorted({step for step, _ in rows}, reverse=True)
    figure, axes = _new(2, 2, sharey=True)
    for place, step in zip(axes.flat, steps, strict=True):
      names = {(step, method): NAMES[method] for method in sets.STEP_METHODS}
      _panel(place, rows, names, _ACCURACY, _ROUNDS, length)
      place.set_title(rf'$\alpha$ = {step:g}', fontsize=10)
    _legend(figure, axes, 4)
    return _save(figure, path)

  return draw


DRAW: dict[str, Callable[[Rows, str], str]] = {
    '2a': _one_panel(
        _by_partition(('fednest', 'lfednest')), _ACCURACY, 'epoch'
    ),
    '2b': _one_panel(
        _by_partition(('fednest', 'fednest_sgd')), _ACCURACY, _ROUNDS
    ),
    '2c': figure_2c,
    '3a': figure_3a,
    '3b': _one_panel(
        _by_partition(('fednest', 'fednest_sgd')), _BALANCED, _ROUNDS
    ),
    '4': figure_4,
    '5': figure_5,
    '6': _outer_steps('epoch'),
    '6_rounds': _outer_steps(_ROUNDS),
}
