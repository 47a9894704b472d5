"""The paper's claims, each with what was measured and a verdict."""

from collections.abc import Callable
import statistics
from typing import Any, NamedTuple

import numpy as np

from experiments.reproduce.figures import Rows, last
from experiments.reproduce.verdicts import (
    FAILS,
    HOLDS,
    at_same_rounds,
    best,
    final,
    is_larger,
    is_near,
    is_smaller,
    plain,
    shown,
    worst,
)

_ACCURACY = 'test_accuracy'
_BALANCED = 'balanced_accuracy'
_ROUNDING = 1e-24  # Squared distances below are as good as 0.


class Claim(NamedTuple):
  """A claim of the paper.

  Attributes:
    figure: Where it is shown.
    sentence: What it says, in our words.
    published: The numbers in the paper's figures, where there are any.
    measure: From the figure's rows to numbers and a verdict.
  """

  figure: str
  sentence: str
  published: str
  measure: Callable[[Rows], tuple[dict[str, Any], str]]


def _both_do_well_iid(rows):
  nested, light = (
      final(rows[method, 'iid'], _ACCURACY)
      for method in ('fednest', 'lfednest')
  )
  return {'FedNest': nested, 'LFedNest': light}, is_near(nested, light, 0.02)


def _shards_as_iid(rows):
  iid, shards = (
      final(rows['fednest', part], _ACCURACY) for part in ('iid', 'shards')
  )
  return {'iid': iid, 'shards': shards}, is_near(iid, shards)


def _better_than_light(rows):
  nested, light = (
      final(rows[method, 'shards'], _ACCURACY)
      for method in ('fednest', 'lfednest')
  )
  found = {
      'FedNest': nested,
      'LFedNest': light,
      'its best': best(rows['lfednest', 'shards'], _ACCURACY),
  }
  return found, is_larger(nested, light)


def _svrg(column):
  def measure(rows):
    keys = [(method, 'shards') for method in ('fednest', 'fednest_sgd')]
    svrg, sgd = at_same_rounds(rows, keys, column)
    return {'SVRG': svrg, 'SGD': sgd}, is_larger(svrg, sgd)

  return measure


def _larger_tau(rows):
  found, verdicts = {}, []
  taus = sorted({tau for tau, _ in rows})
  for part in ('iid', 'shards'):
    keys = [(tau, part) for tau in taus]
    one, more = at_same_rounds(rows, keys, _ACCURACY)
    found |= {f'{part}, tau = {taus[0]}': one, f'{part}, tau = {taus[1]}': more}
    verdicts.append(is_larger(more, one))
  return found, worst(*verdicts)


def _near_centralised(rows):
  nested = final(rows['fednest', 'iid'], _BALANCED)
  central = final(rows['centralised'], _BALANCED)
  return {'FedNest, iid': nested, 'centralised': central}, is_near(
      nested, central, 0.02
  )


def _better_than_untuned(untuned):
  def measure(rows):
    tuned, other = (
        final(rows[key], _BALANCED) for key in (('fednest', 'iid'), untuned)
    )
    found = {'FedNest, iid': tuned, untuned: other}
    return found, is_larger(tuned, other)

  return measure


def _decay(runs: list, column: str) -> tuple[float, float, float]:
  """First and last squared distance, and R^2 of a line through its logarithm.

  The line is fitted down to where rounding begins.
  """
  rows = runs[0]
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


def _linear(partial):
  def measure(rows):
    found, verdicts = {}, []
    for spread in (1.0, 10.0):
      first, end, fit = _decay(
          rows['fednest', spread, partial], 'x_distance'
      )
      found |= {
          f's = {spread:g}: first': first,
          f's = {spread:g}: last': end,
          f's = {spread:g}: R^2 of log': fit,
      }
      shrunk = end < 1e-12 * max(first, 1e-30)
      verdicts.append(HOLDS if shrunk and fit > 0.98 else FAILS)
    return found, worst(*verdicts)

  return measure


def _compare_saddle(better, worse, partial):
  def measure(rows):
    found, verdicts = {}, []
    for spread in (1.0, 10.0):
      values = [
          statistics.fmean(
              x**2 for x in last(rows[method, spread, partial], 'x_distance')
          )
          for method in (better, worse)
      ]
      found |= {
          f's = {spread:g}: {method}': value
          for method, value in zip((better, worse), values, strict=True)
      }
      verdicts.append(is_smaller(*(max(v, _ROUNDING) for v in values)))
    return found, worst(*verdicts)

  return measure


def _alternation(rows):
  values = {
      method: final(rows[method], _ACCURACY)
      for method in ('lfednest_nonalt', 'lfednest', 'lfednest_svrg')
  }
  verdict = worst(
      is_larger(values['lfednest'], values['lfednest_nonalt']),
      is_larger(values['lfednest_svrg'], values['lfednest_nonalt']),
  )
  highest = {
      f'best of {method}': best(rows[method], _ACCURACY) for method in values
  }
  return values | highest, verdict


def _small_steps(rows):
  step = min(step for step, _ in rows)
  runs = rows[step, 'lfednest']
  value = final(runs, _ACCURACY)
  highest = best(runs, _ACCURACY)
  return {'last': value, 'best': highest}, is_near(value, highest)


def _large_steps(rows):
  step = max(step for step, _ in rows)
  keys = [(step, 'fednest'), (step, 'lfednest')]
  nested, light = at_same_rounds(rows, keys, _ACCURACY)
  return {'FedNest': nested, 'LFedNest': light}, is_larger(nested, light)


CLAIMS = (
    Claim(
        '2a', 'On iid clients FedNest and LFedNest do equally well.',
        'FedNest 91.8%', _both_do_well_iid,
    ),
    Claim(
        '2a', 'On label shards FedNest is as good as on iid clients.',
        '91.4% and 91.8%', _shards_as_iid,
    ),
    Claim(
        '2a', 'On label shards FedNest is much better than LFedNest.',
        '91.4% and 87.8%', _better_than_light,
    ),
    Claim(
        '2b', 'On label shards SVRG in FedInn is better than SGD.',
        '91.4% and 88.8%', _svrg(_ACCURACY),
    ),
    Claim(
        '2c', 'More local steps in FedOut save rounds.',
        'tau = 5: 93.4% iid, 93.2% shards', _larger_tau,
    ),
    Claim(
        '3a', 'Tuned by FedNest, clients come near a centralised bilevel run.',
        '90.1% and 92.4%', _near_centralised,
    ),
    Claim(
        '3a', 'Tuned by FedNest is better than a plain loss, centralised.',
        '90.1% and 87.4%', _better_than_untuned('untuned'),
    ),
    Claim(
        '3a', 'Tuned by FedNest is better than a plain loss, same clients.',
        '', _better_than_untuned('untuned clients'),
    ),
    Claim(
        '3b', 'On label shards SVRG is better than SGD in loss tuning.',
        '89.2% and 85.7%', _svrg(_BALANCED),
    ),
    Claim(
        '4', 'FedNest converges linearly, all clients taking part.',
        'linear', _linear(False),
    ),
    Claim(
        '4', 'FedNest converges linearly, some clients taking part.',
        'linear (in a notebook that drops b)', _linear(True),
    ),
    Claim(
        '4', 'LFedNest is better than FedAvg-S, all clients taking part.',
        'slightly better', _compare_saddle('lfednest', 'fedavg_s', False),
    ),
    Claim(
        '4', 'FedNest is much better than LFedNest, all clients taking part.',
        'much better', _compare_saddle('fednest', 'lfednest', False),
    ),
    Claim(
        '4', 'FedNest is much better than LFedNest, some taking part.',
        'much better', _compare_saddle('fednest', 'lfednest', True),
    ),
    Claim(
        '5', 'Without alternation (NonAlt) the light methods are worse.',
        'NonAlt about 80%', _alternation,
    ),
    Claim(
        '6', 'With a very small outer step LFedNest converges, too.',
        '', _small_steps,
    ),
    Claim(
        '6', 'With a large outer step FedNest is better at equal rounds.',
        '', _large_steps,
    ),
)


def judge(rows: dict[str, Rows]) -> list[dict[str, Any]]:
  """All claims of the figures in `rows`."""
  found = []
  for claim in CLAIMS:
    if claim.figure in rows:
      measured, verdict = claim.measure(rows[claim.figure])
      found.append({
          'figure': claim.figure,
          'claim': claim.sentence,
          'measured': {name: plain(v) for name, v in measured.items()},
          'measured_text': '; '.join(
              f'{name} {shown(v)}' for name, v in measured.items()
          ),
          'published': claim.published,
          'verdict': verdict,
      })
  return found


def to_markdown(found: list[dict[str, Any]], heading: str) -> str:
  """A table of claims."""
  lines = [
      heading,
      '',
      '| figure | claim | measured | published | verdict |',
      '| --- | --- | --- | --- | --- |',
  ]
  for claim in found:
    text = claim.get('measured_text') or '; '.join(
        f'{name} {value:.3g}' if isinstance(value, float) else f'{name} {value}'
        for name, value in claim['measured'].items()
    )
    lines.append(
        f'| {claim["figure"]} | {claim["claim"]} | {text} |'
        f' {claim["published"]} | **{claim["verdict"]}** |'
    )
  return '\n'.join(lines) + '\n'
