"""Curves of several methods."""

import os

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest

from fednest_tff import simulation
from fednest_tff.simulation import plots


def rows_of(values, scale=1):
  return [
      {
          'epoch': k,
          'communication_rounds': 4 * k,
          'bytes_up': 1_000_000 * k * scale,
          'bytes_down': 500_000 * k * scale,
          'accuracy': value,
      }
      for k, value in enumerate(values, start=1)
  ]


CURVE = simulation.Curve('accuracy', 'test accuracy')


def test_series():
  runs = [rows_of([0.1, 0.2, 0.3]), rows_of([0.5, 0.4])]
  del runs[0][0]['accuracy']
  at, values = plots.series(runs, 'epoch', 'accuracy')
  # Only what both have, and what is finite.
  runs[1].append(dict(rows_of([0, 0, float('inf')])[2]))
  at, values = plots.series(runs, 'epoch', 'accuracy')
  assert at.tolist() == [2] and values.tolist() == [[0.2], [0.4]]
  runs = [rows_of([0.1, 0.2]), rows_of([0.3, 0.4])]
  at, values = plots.series(runs, 'bytes', 'accuracy')
  assert at.tolist() == [1.5, 3.0]
  assert values.tolist() == [[0.1, 0.2], [0.3, 0.4]]
  at, _ = plots.series(runs, 'communication_rounds', 'accuracy')
  assert at.tolist() == [4, 8]


def test_curves_show_mean_and_band():
  figure, axes = plt.subplots()
  runs = {
      'two': [rows_of([0.1, 0.2]), rows_of([0.3, 0.8])],
      'one': [rows_of([0.5, 0.6])],
  }
  plots.draw_curves(axes, runs, CURVE, 'epoch')
  two, one = axes.get_lines()
  np.testing.assert_allclose(two.get_ydata(), [0.2, 0.5])
  np.testing.assert_allclose(one.get_ydata(), [0.5, 0.6])
  # Readable without colour.
  assert two.get_linestyle() != one.get_linestyle()
  assert two.get_marker() != one.get_marker()
  band, = axes.collections
  corners = band.get_paths()[0].vertices
  for x, low, high in ((1, 0.1, 0.3), (2, 0.2, 0.8)):
    found = corners[corners[:, 0] == x, 1]
    np.testing.assert_allclose((found.min(), found.max()), (low, high))
  plt.close(figure)


def rows_at(values, rounds, size):
  """Rows of a method with so many rounds and bytes per epoch."""
  return [
      row | {
          'communication_rounds': rounds * k, 'bytes_up': size * k,
          'bytes_down': size * k,
      }
      for k, row in enumerate(rows_of(values), start=1)
  ]


def axes_of(*costs):
  runs = {
      f'method {k}': [rows_at([0.1, 0.2], *cost)]
      for k, cost in enumerate(costs)
  }
  figure = simulation.make_figure(runs, CURVE)
  return [axes.get_xlabel().split(',')[0] for axes in figure.axes]


def test_panels_that_would_look_the_same_are_drawn_once():
  assert axes_of((4, 100)) == ['communication rounds']
  assert axes_of((4, 100), (4, 100)) == ['communication rounds']
  assert axes_of((4, 100), (4, 300)) == ['communication rounds', 'megabytes']
  assert axes_of((4, 100), (8, 200)) == ['epochs', 'communication rounds']
  # The bytes of an epoch are the same, rounds are not.
  assert axes_of((4, 100), (8, 100)) == ['epochs', 'communication rounds']
  assert axes_of((4, 100), (8, 300)) == [
      'epochs', 'communication rounds', 'megabytes'
  ]


def test_draw(tmp_path):
  runs = {
      'fednest': [rows_at([0.1, 0.7], 9, 10**6)],
      'lfednest': [rows_at([0.2, 0.6], 2, 10**5)],
      'my own': [rows_at([0.2, 0.3], 2, 10**5)],
  }
  path = simulation.draw(runs, CURVE, str(tmp_path / 'plot'), 'Title')
  assert path == str(tmp_path / 'plot.png')
  assert sorted(os.listdir(tmp_path)) == ['plot.pdf', 'plot.png']
  figure = simulation.make_figure(runs, CURVE, 'Title')
  assert [a.get_xlabel() for a in figure.axes] == [
      'epochs', 'communication rounds', 'megabytes, up and down'
  ]
  assert figure.axes[0].get_ylabel() == 'test accuracy'
  legend, = figure.legends
  # The registry's labels.
  assert [t.get_text() for t in legend.get_texts()] == [
      'FedNest', 'LFedNest', 'my own'
  ]
  # The legend is outside of all panels.
  box = legend.get_window_extent()
  assert not any(box.overlaps(a.get_window_extent()) for a in figure.axes)
  image = matplotlib.image.imread(path)
  assert image.shape[1] > 1000
  # Not blank: the curves' colours are there.
  for colour in ('#0b3c6f', '#c8511b'):
    rgb = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    assert (np.abs(image[..., :3] - rgb).max(axis=-1) < 0.02).sum() > 100
  # The same rows give the same bytes.
  first = [(tmp_path / f'plot.{x}').read_bytes() for x in ('png', 'pdf')]
  simulation.draw(runs, CURVE, str(tmp_path / 'plot'), 'Title')
  assert first == [
      (tmp_path / f'plot.{x}').read_bytes() for x in ('png', 'pdf')
  ]


@pytest.mark.filterwarnings('error')
def test_draw_without_a_value(tmp_path):
  """Runs that ended before their first evaluation, or diverged."""
  rows = rows_of([0.1, 0.2])
  for row in rows:
    del row['accuracy']
  runs = {'a': [rows], 'b': [rows_of([0.3, 0.4])]}
  assert os.path.exists(simulation.draw(runs, CURVE, str(tmp_path / 'plot')))
  logarithmic = CURVE._replace(logarithmic=True)
  for values in ([float('inf')] * 2, [0.0, 0.0], [1e300, 1e-300], [1e-3, 0.0]):
    figure, panels = plt.subplots(1, 2)
    for axes, curve in zip(panels, (CURVE, logarithmic), strict=True):
      runs = {'a': [rows_of(values), rows_of(values[::-1])]}
      plots.draw_curves(axes, runs, curve, 'epoch')
    figure.canvas.draw()
    plt.close(figure)
  assert os.path.exists(
      simulation.draw({'a': [rows]}, logarithmic, str(tmp_path / 'log'))
  )


@pytest.mark.parametrize(
    ('runs', 'message'),
    [({'a': rows_of([0.1])}, "'a', .* the rows of one"), ({'a': []}, 'none')],
)
def test_runs_that_are_no_lists_of_runs(runs, message):
  with pytest.raises(ValueError, match=f'`runs` .*{message}'):
    simulation.make_figure(runs, CURVE)
