"""Curves of several methods, for a paper: readable without colour."""

from collections.abc import Mapping, Sequence
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from fednest_tff import registry
from fednest_tff.simulation.tables import Row

if TYPE_CHECKING:  # Importing it takes as long as all of this package.
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# Line, marker and colour differ together. The colours keep their order of
# brightness when printed in grey.
_STYLES = (
    ('-', 'o', '#0b3c6f'),
    ('--', 's', '#c8511b'),
    ('-.', '^', '#3a8f5c'),
    (':', 'D', '#7d4fa3'),
    ((0, (5, 1, 1, 1, 1, 1)), 'v', '#c79a00'),
    ((0, (1, 1)), 'X', '#5f6b73'),
    ((0, (8, 2)), 'P', '#000000'),
    ((0, (3, 1, 1, 1)), '*', '#a11d33'),
)
_AXES = (
    ('epoch', 'epochs'),
    ('communication_rounds', 'communication rounds'),
    ('bytes', 'megabytes, up and down'),
)
_MEGA = 1e6


class Curve(NamedTuple):
  """What a plot shows.

  Attributes:
    column: The column of the metrics file.
    label: The label of the vertical axis.
    logarithmic: Whether the vertical axis is logarithmic.
  """

  column: str
  label: str
  logarithmic: bool = False


def _abscissa(row: Row, x: str) -> float:
  if x == 'bytes':
    return (row['bytes_up'] + row['bytes_down']) / _MEGA
  return row[x]


def series(
    runs: Sequence[list[Row]], x: str, y: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
  """Abscissae, and a row of ordinates per run, of the epochs they all have.

  Epochs with an ordinate that is not finite are left out.
  """
  tables = [
      {row['epoch']: row for row in rows if y in row} for rows in runs
  ]
  shared = sorted(set.intersection(*(set(table) for table in tables)))

  at = np.array([_abscissa(tables[0][epoch], x) for epoch in shared], float)
  found = np.array(
      [[table[epoch][y] for epoch in shared] for table in tables], float
  )
  finite = np.isfinite(found).all(axis=0)
  return at[finite], found[:, finite]


def draw_curves(
    axes: 'Axes',
    runs: Mapping[str, Sequence[list[Row]]],
    curve: Curve,
    x: str,
) -> None:
  """Draws mean and band (one standard deviation) of each method's runs."""
  for k, (name, rows) in enumerate(runs.items()):
    line, marker, colour = _STYLES[k % len(_STYLES)]
    at, values = series(rows, x, curve.column)
    with np.errstate(over='ignore', invalid='ignore'):
      mean, deviation = values.mean(axis=0), values.std(axis=0)
    # matplotlib stumbles over lines and bands that it cannot show.
    shown = np.isfinite(deviation)
    if curve.logarithmic:
      shown &= mean > 0
    at, mean, deviation = at[shown], mean[shown], deviation[shown]
    axes.plot(
        at,
        mean,
        linestyle=line,
        color=colour,
        linewidth=1.5,
        marker=marker,
        markersize=5,
        # Each method's markers at places of its own.
        markevery=(0.02 + 0.1 * k / max(1, len(runs)), 0.12),
        markerfacecolor='white',
        label=name,
    )
    if len(rows) > 1 and shown.any():
      axes.fill_between(
          at, mean - deviation, mean + deviation, color=colour, alpha=0.15, lw=0
      )
  if curve.logarithmic:
    axes.set_yscale('log')
  axes.grid(color='0.9', linewidth=0.6)
  axes.spines[['top', 'right']].set_visible(False)


def _label(name: str) -> str:
  """The registry's label of a method; other names are labels themselves."""
  if name in registry.method_names():
    return registry.get_method(name).label
  return name


def _axes_that_differ(
    runs: Mapping[str, Sequence[list[Row]]]
) -> list[tuple[str, str]]:
  """Those horizontal axes on which the methods' curves look different.

  If every method has the same number of rounds per epoch, say, one of the two
  axes tells all. Rounds are preferred.
  """

  lasts = [rows[0][-1] for rows in runs.values()]

  def shape(x: str) -> tuple[float, ...]:
    """How far along x a round of each method goes, relative to the others."""
    worth = [
        _abscissa(row, x) / max(row['communication_rounds'], 1)
        for row in lasts
    ]
    return tuple(round(w / (max(worth) or 1.0), 4) for w in worth)

  kept = {'communication_rounds': shape('communication_rounds')}
  for x in ('epoch', 'bytes'):
    if shape(x) not in kept.values():
      kept[x] = shape(x)
  return [axis for axis in _AXES if axis[0] in kept]


def make_figure(
    runs: Mapping[str, Sequence[list[Row]]], curve: Curve, title: str = ''
) -> 'Figure':
  """Draws a quantity against epochs, rounds and bytes.

  Where two of these would look the same, one is drawn: a single method, for
  example, against rounds only.

  Args:
    runs: For each method the rows of its runs, one list per seed. Names of the
      registry are drawn as its labels, 'FedNest' for 'fednest'.
    curve: What to show.
    title: Above the panels.

  Returns:
    A matplotlib figure; a notebook shows it.
  """
  from matplotlib.figure import Figure  # No pyplot: the backend stays.

  for name, rows in runs.items():
    if not rows or isinstance(rows[0], Mapping):
      raise ValueError(
          f'`runs` needs a list of runs for {name!r}, such as [train(...)]; got'
          f' {"the rows of one" if rows else "none"}.'
      )
  runs = {_label(name): rows for name, rows in runs.items()}
  shown = _axes_that_differ(runs)
  figure = Figure(
      figsize=((0, 5.5, 8, 11)[len(shown)], 3.6), layout='constrained'
  )
  panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
  for axes, (x, label) in zip(panels, shown, strict=True):
    draw_curves(axes, runs, curve, x)
    axes.set_xlabel(label)
  panels[0].set_ylabel(curve.label)
  if title:
    figure.suptitle(title, fontsize=11)
  handles, names = panels[0].get_legend_handles_labels()
  figure.legend(
      handles,
      names,
      loc='outside lower center',
      ncols=min(len(names), 6),
      frameon=False,
      handlelength=3.5,
  )
  figure.draw_without_rendering()  # Places everything, once for both files.
  figure.set_layout_engine('none')
  return figure


def draw(
    runs: Mapping[str, Sequence[list[Row]]],
    curve: Curve,
    path: str,
    title: str = '',
) -> str:
  """Writes `make_figure` to files.

  Args:
    runs: As in `make_figure`.
    curve: What to show.
    path: Without extension; a .png and a .pdf are written.
    title: Above the panels.

  Returns:
    The path of the .png.
  """
  figure = make_figure(runs, curve, title)
  for extension in ('.pdf', '.png'):
    temporary = f'{path}.tmp{extension}'
    # No date in the file, so that the same run gives the same bytes.
    metadata = {'CreationDate': None} if extension == '.pdf' else None
    figure.savefig(temporary, dpi=150, metadata=metadata)
    os.replace(temporary, path + extension)
  return f'{path}.png'
