"""What the runs of an experiment come to: a summary and a table."""

from collections.abc import Callable, Mapping, Sequence
import math
import statistics

import numpy as np

from fednest_tff import simulation

_STATISTICS: dict[str, Callable[[list[float]], float]] = {
    '': statistics.fmean, '_std': statistics.pstdev
}


def _over_seeds(
    function: Callable[[list[float]], float],
    parts: list[dict[str, dict[str, float]]],
    name: str,
    key: str,
) -> float | None:
  """A statistic over the seeds; `None` if one of them is not finite."""
  values = [part[name][key] for part in parts]
  return function(values) if all(map(math.isfinite, values)) else None


def _warning(name: str) -> dict[str, object]:
  if name.startswith('test_') or 'accuracy' in name:
    return {'best_chosen_on': 'test data'}
  return {}


def summary(
    results: Mapping[str, Sequence[list[simulation.Row]]],
) -> dict[str, object]:
  """Mean and standard deviation over the seeds of last and best values.

  The best epoch is chosen on the very numbers that it is the best of. Where
  these are of test data, the summary says so: report the last value.
  """
  found: dict[str, dict[str, dict[str, object]]] = {}
  for method, runs in results.items():
    parts = [simulation.summarize(rows) for rows in runs]
    found[method] = {
        name: _warning(name) | {
            f'{key}{suffix}': _over_seeds(function, parts, name, key)
            for key in parts[0][name]
            for suffix, function in _STATISTICS.items()
        }
        for name in parts[0]
        if all(name in part for part in parts)
    }
  return {'num_seeds': len(next(iter(results.values()))), 'methods': found}


def table(
    results: Mapping[str, Sequence[list[simulation.Row]]],
    curve: simulation.Curve,
) -> str:
  """Methods in rows: the curve's last value, what it cost."""
  header = [
      'method', curve.label, 'rounds', 'MB up', 'MB down', 's/epoch', 's total'
  ]
  rows_shown = [header]
  for method, runs in results.items():
    lasts = [
        next(
            (r[curve.column] for r in reversed(rows) if curve.column in r),
            float('nan'),
        )
        for rows in runs
    ]
    shown = f'{statistics.fmean(lasts):.4g}'
    if len(lasts) > 1:
      # Unlike that of `statistics`, it takes the nan of a run that diverged
      # before its first evaluation.
      shown += f' ± {np.std(lasts):.2g}'
    rows = runs[0]
    seconds = [row['seconds'] for rows in runs for row in rows]
    rows_shown.append([
        method,
        shown,
        f'{rows[-1]["communication_rounds"]:,}',
        f'{rows[-1]["bytes_up"] / 1e6:,.1f}',
        f'{rows[-1]["bytes_down"] / 1e6:,.1f}',
        f'{statistics.median(seconds):.3f}',
        f'{sum(seconds) / len(runs):.0f}',
    ])
  widths = [max(len(row[k]) for row in rows_shown) for k in range(len(header))]
  return '\n'.join(
      '  '.join(
          [row[0].ljust(widths[0])]
          + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
      )
      for row in rows_shown
  )
