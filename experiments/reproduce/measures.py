"""What is measured for each claim of the paper, and how it is judged.

Each function takes the rows of a figure's runs, as `sets.runs_of` names them
(or returns such a function), and gives the numbers and a verdict.
"""

from collections.abc import Callable

import numpy as np

from experiments.reproduce.figures import Rows, Runs
from experiments.reproduce.verdicts import (
    FAILS,
    HOLDS,
    MUCH,
    Measured,
    Value,
    at_same_rounds,
    best,
    final,
    gain,
    is_as_good,
    is_larger,
    is_near,
    is_smaller,
    over_seeds,
    variation,
    worst,
)
from fednest_tff.simulation import Row

ACCURACY = 'test_accuracy'
BALANCED = 'balanced_accuracy'
# From the rows of a figure to the numbers and the verdict of a claim.
Measure = Callable[[Rows], tuple[Measured, str]]
_ROUNDING = 1e-24  # Squared distances below are as good as 0.


def both_do_well_iid(rows: Rows) -> tuple[Measured, str]:
  """FedNest and LFedNest on iid clients: at most two points apart."""
  nested, light = (
      final(rows[method, 'iid'], ACCURACY)
      for method in ('fednest', 'lfednest')
  )
  return {'FedNest': nested, 'LFedNest': light}, is_near(nested, light, 0.02)


def shards_as_iid(rows: Rows) -> tuple[Measured, str]:
  """FedNest on label shards: at most a point below iid clients."""
  iid, shards = (
      final(rows['fednest', part], ACCURACY) for part in ('iid', 'shards')
  )
  return {'iid': iid, 'shards': shards}, is_as_good(shards, iid)


def better_than_light(rows: Rows) -> tuple[Measured, str]:
  """FedNest against LFedNest on label shards."""
  nested, light = (
      final(rows[method, 'shards'], ACCURACY)
      for method in ('fednest', 'lfednest')
  )
  found = {
      'FedNest': nested,
      'LFedNest': light,
      'its best': best(rows['lfednest', 'shards'], ACCURACY),
  }
  return found, is_larger(nested, light, MUCH)


def _with_and_without_svrg(
    rows: Rows, partition: str, column: str
) -> list[Value]:
  keys = [(method, partition) for method in ('fednest', 'fednest_sgd')]
  return at_same_rounds(rows, keys, column)


def svrg(column: str) -> Measure:
  """FedNest against FedNest_SGD on label shards, at equal rounds."""

  def measure(rows: Rows) -> tuple[Measured, str]:
    with_it, without = _with_and_without_svrg(rows, 'shards', column)
    return {'SVRG': with_it, 'SGD': without}, is_larger(with_it, without)

  return measure


def svrg_gains(column: str) -> Measure:
  """What SVRG adds on label shards against what it adds on iid clients."""

  def measure(rows: Rows) -> tuple[Measured, str]:
    iid, shards = (
        gain(*_with_and_without_svrg(rows, partition, column))
        for partition in ('iid', 'shards')
    )
    found = {'gain on iid clients': iid, 'on label shards': shards}
    return found, is_larger(shards, iid)

  return measure


def larger_tau(rows: Rows) -> tuple[Measured, str]:
  """The larger tau of FedOut against tau = 1, at equal rounds."""
  found: dict[str, Value] = {}
  verdicts = []
  taus = sorted({tau for tau, _ in rows})
  for part in ('iid', 'shards'):
    keys = [(tau, part) for tau in taus]
    one, more = at_same_rounds(rows, keys, ACCURACY)
    found |= {f'{part}, tau = {taus[0]}': one, f'{part}, tau = {taus[1]}': more}
    verdicts.append(is_larger(more, one))
  return found, worst(*verdicts)


def near_centralised(rows: Rows) -> tuple[Measured, str]:
  """Tuned clients: at most two points below a centralised bilevel run."""
  nested = final(rows['fednest', 'iid'], BALANCED)
  central = final(rows['centralised'], BALANCED)
  found = {'FedNest, iid': nested, 'centralised': central}
  return found, is_as_good(nested, central, 0.02)


def better_than_untuned(untuned: str) -> Measure:
  """Tuned clients against the run called `untuned`."""

  def measure(rows: Rows) -> tuple[Measured, str]:
    tuned, other = (
        final(rows[key], BALANCED) for key in (('fednest', 'iid'), untuned)
    )
    found = {'FedNest, iid': tuned, untuned: other}
    return found, is_larger(tuned, other)

  return measure


_VARIABLES = ('x_distance', 'y_distance')


def _decay(rows: list[Row], column: str) -> tuple[float, float, float]:
  """First and last squared distance, and R^2 of a line through its logarithm.

  The line is fitted down to where rounding begins.
  """
  squares = np.array([row[column] ** 2 for row in rows])
  used = squares > max(_ROUNDING, squares.min())
  k = np.flatnonzero(used)
  if len(k) < 3:
    return float(squares[0]), float(squares[-1]), 0.0
  logarithms = np.log10(squares[k])
  line = np.polyval(np.polyfit(k, logarithms, 1), k)
  spread = np.sum((logarithms - logarithms.mean()) ** 2)
  fit = 1 - np.sum((logarithms - line) ** 2) / max(spread, 1e-300)
  return float(squares[0]), float(squares[-1]), float(fit)


def linear(partial: bool) -> Measure:
  """Of x and of y, and of all seeds, the worst counts."""

  def measure(rows: Rows) -> tuple[Measured, str]:
    found: dict[str, float] = {}
    verdicts = []
    for spread in (1.0, 10.0):
      decays = [
          _decay(run, column)
          for run in rows['fednest', spread, partial] if run
          for column in _VARIABLES
      ]
      shrunk = [end / max(first, 1e-30) for first, end, _ in decays]
      fits = [fit for _, _, fit in decays]
      found |= {
          f's = {spread:g}: last/first': max(shrunk),
          f's = {spread:g}: R^2 of log': min(fits),
      }
      is_linear = max(shrunk) < 1e-12 and min(fits) > 0.98
      verdicts.append(HOLDS if is_linear else FAILS)
    return found, worst(*verdicts)

  return measure


def _squared_distance(runs: Runs) -> Value:
  """|x - x*|^2 + |y - y*|^2 at the end."""
  ends = [run[-1] for run in runs if run]
  return over_seeds([sum(end[c] ** 2 for c in _VARIABLES) for end in ends])


def compare_saddle(
    better: str, worse: str, partial: bool, factor: float = 2.0
) -> Measure:
  """Whether the one ends nearer to the saddle point, by `factor`."""

  def measure(rows: Rows) -> tuple[Measured, str]:
    found: dict[str, Value] = {}
    verdicts = []
    for spread in (1.0, 10.0):
      values = {
          f's = {spread:g}: {method}': _squared_distance(
              rows[method, spread, partial]
          )
          for method in (better, worse)
      }
      found |= values
      one, other = (max(v.mean, _ROUNDING) for v in values.values())
      verdicts.append(is_smaller(one, other, factor))
    return found, worst(*verdicts)

  return measure


def alternation(rows: Rows) -> tuple[Measured, str]:
  """LFedNest and LFedNest_SVRG against LFedNest-NonAlt."""
  values = {
      method: final(rows[method], ACCURACY)
      for method in ('lfednest_nonalt', 'lfednest', 'lfednest_svrg')
  }
  verdict = worst(
      is_larger(values['lfednest'], values['lfednest_nonalt']),
      is_larger(values['lfednest_svrg'], values['lfednest_nonalt']),
  )
  highest = {
      f'best of {method}': best(rows[method], ACCURACY) for method in values
  }
  return values | highest, verdict


def light_svrg(rows: Rows) -> tuple[Measured, str]:
  """LFedNest_SVRG against LFedNest."""
  svrg, sgd = (
      final(rows[method], ACCURACY) for method in ('lfednest_svrg', 'lfednest')
  )
  return {'with SVRG': svrg, 'without': sgd}, is_larger(svrg, sgd)


def small_steps(rows: Rows) -> tuple[Measured, str]:
  """Whether LFedNest keeps what it reached, and keeps up with FedNest."""
  step = min(step for step, _ in rows)
  light, nested = (
      final(rows[step, method], ACCURACY) for method in ('lfednest', 'fednest')
  )
  highest = best(rows[step, 'lfednest'], ACCURACY)
  found = {'LFedNest': light, 'its best': highest, 'FedNest': nested}
  # It has not turned back, and it has got somewhere.
  return found, worst(
      is_near(light, highest), is_as_good(light, nested, 0.02)
  )


def large_steps(rows: Rows) -> tuple[Measured, str]:
  """FedNest against LFedNest at equal rounds."""
  step = max(step for step, _ in rows)
  keys = [(step, 'fednest'), (step, 'lfednest')]
  nested, light = at_same_rounds(rows, keys, ACCURACY)
  return {'FedNest': nested, 'LFedNest': light}, is_larger(nested, light)


def steadier(rows: Rows) -> tuple[Measured, str]:
  """Accuracy varies less with SVRG (twice) and with FedOut."""
  step = max(step for step, _ in rows)
  found = {
      method: variation(rows[step, method], ACCURACY)
      for method in ('fednest', 'fednest_sgd', 'lfednest_svrg', 'lfednest')
  }
  means = {method: value.mean for method, value in found.items()}
  return found, worst(
      is_smaller(means['fednest'], means['fednest_sgd'], 1.25),
      is_smaller(means['fednest'], means['lfednest_svrg'], 1.25),
      is_smaller(means['fednest_sgd'], means['lfednest'], 1.25),
  )
