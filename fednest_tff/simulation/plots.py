"""Curves of several methods, for a paper: readable without colour."""

from collections.abc import Mapping, Sequence
import os
from typing import TYPE_CHECKING, NamedTuple

import matplotlib
import numpy as np
import numpy.typing as npt

from fednest_tff.simulation.records import Row

if TYPE_CHECKING:  # Otherwise imported after the backend is chosen.
  from matplotlib.axes import Axes

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
    column: Of the metrics file.
    label: Of the vertical axis.
    logarithmic: Whether that axis is.
  """

  column: str
  label: str
  logarithmic: bool = False


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

  def abscissa(row: Row) -> float:
    if x == 'bytes':
      return (row['bytes_up'] + row['bytes_down']) / _MEGA
    return row[x]

  at = np.array([abscissa(tables[0][epoch]) for epoch in shared], float)
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


def draw(
    runs: Mapping[str, Sequence[list[Row]]],
    curve: Curve,
    path: str,
    title: str = '',
) -> str:
  """Draws a quantity against epochs, rounds and bytes.

  Args:
    runs: For each method the rows of its runs, one list per seed.
    curve: What to show.
    path: Without extension; a .png and a .pdf are written.
    title: Above the panels.

  Returns:
    The path of the .png.
  """
  matplotlib.use('Agg')
  import matplotlib.pyplot as plt  # after the backend is chosen

  figure, panels = plt.subplots(
      1, len(_AXES), figsize=(11, 3.6), sharey=True, layout='constrained'
  )
  for axes, (x, label) in zip(panels, _AXES, strict=True):
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
  for extension in ('.pdf', '.png'):
    temporary = f'{path}.tmp{extension}'
    # No date in the file, so that the same run gives the same bytes.
    metadata = {'CreationDate': None} if extension == '.pdf' else None
    figure.savefig(temporary, dpi=150, metadata=metadata)
    os.replace(temporary, path + extension)
  plt.close(figure)
  return f'{path}.png'
