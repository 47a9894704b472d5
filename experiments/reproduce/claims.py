"""The paper's claims, each with what was measured and a verdict."""

from collections.abc import Callable
from typing import NamedTuple

from experiments.reproduce import measures
from experiments.reproduce.figures import Rows
from experiments.reproduce.verdicts import Measured, Record, plain, shown


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
  measure: Callable[[Rows], tuple[Measured, str]]


CLAIMS = (
    Claim(
        '2a', 'On iid clients FedNest and LFedNest do equally well.',
        'FedNest 91.8%', measures.both_do_well_iid,
    ),
    Claim(
        '2a', 'On label shards FedNest is as good as on iid clients.',
        '91.4% and 91.8%', measures.shards_as_iid,
    ),
    Claim(
        '2a', 'On label shards FedNest is much better than LFedNest.',
        '91.4% and 87.8%', measures.better_than_light,
    ),
    Claim(
        '2b', 'On label shards SVRG in FedInn is better than SGD.',
        '91.4% and 88.8%', measures.svrg(measures.ACCURACY),
    ),
    Claim(
        '2b', 'SVRG gains more on label shards than on iid clients.',
        '', measures.svrg_gains(measures.ACCURACY),
    ),
    Claim(
        '2c', 'More local steps in FedOut save rounds.',
        'tau = 5: 93.4% iid, 93.2% shards', measures.larger_tau,
    ),
    Claim(
        '3a', 'Tuned by FedNest, clients come near a centralised bilevel run.',
        '90.1% and 92.4%', measures.near_centralised,
    ),
    Claim(
        '3a', 'Tuned by FedNest is better than a plain loss, centralised.',
        '90.1% and 87.4%', measures.better_than_untuned('untuned'),
    ),
    Claim(
        '3a', 'Tuned by FedNest is better than a plain loss, same clients.',
        '', measures.better_than_untuned('untuned clients'),
    ),
    Claim(
        '3b', 'On label shards SVRG is better than SGD in loss tuning.',
        '89.2% and 85.7%', measures.svrg(measures.BALANCED),
    ),
    Claim(
        '3b', 'In loss tuning, too, SVRG gains more on label shards than iid.',
        '', measures.svrg_gains(measures.BALANCED),
    ),
    Claim(
        '4', 'FedNest converges linearly, all clients taking part.',
        'linear', measures.linear(False),
    ),
    Claim(
        '4', 'FedNest converges linearly, some clients taking part.',
        'linear (in a notebook that drops b)', measures.linear(True),
    ),
    Claim(
        '4', 'LFedNest is better than FedAvg-S, all clients taking part.',
        'slightly better',
        measures.compare_saddle('lfednest', 'fedavg_s', False),
    ),
    Claim(
        '4', 'LFedNest is better than FedAvg-S, some taking part.',
        'slightly better',
        measures.compare_saddle('lfednest', 'fedavg_s', True),
    ),
    Claim(
        '4', 'FedNest is much better than LFedNest, all clients taking part.',
        'much better',
        measures.compare_saddle('fednest', 'lfednest', False, 10),
    ),
    Claim(
        '4', 'FedNest is much better than LFedNest, some taking part.',
        'much better',
        measures.compare_saddle('fednest', 'lfednest', True, 10),
    ),
    Claim(
        '5', 'Without alternation (NonAlt) the light methods are worse.',
        'NonAlt about 80%', measures.alternation,
    ),
    Claim(
        '5', 'With SVRG the light method is better.', '', measures.light_svrg,
    ),
) + tuple(
    Claim(figure, text, '', measure)
    for figure in ('6', '6_rounds')
    for text, measure in (
        (
            'With a very small outer step LFedNest converges, too.',
            measures.small_steps,
        ),
        (
            'With a large outer step FedNest is better at equal rounds.',
            measures.large_steps,
        ),
        (
            'SVRG and FedOut make training steadier (variation in its last'
            ' third, large step).',
            measures.steadier,
        ),
    )
)


def judge(rows: dict[str, Rows]) -> list[Record]:
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


def table_line(cells: list[str]) -> str:
  """A line of a Markdown table."""
  escaped = (cell.replace('|', r'\|') for cell in cells)
  return '| ' + ' | '.join(escaped) + ' |'


def to_markdown(found: list[Record], heading: str) -> str:
  """A table of claims, with what made which."""
  lines = [heading, '']
  made: dict[str, list[str]] = {}
  for claim in found:
    figures = made.setdefault(claim.get('made_by', 'not known'), [])
    if claim['figure'] not in figures:
      figures.append(claim['figure'])
  lines += [f'- {", ".join(made[text])}: {text}' for text in made]
  columns = ['figure', 'claim', 'measured', 'published', 'verdict']
  lines += ['', table_line(columns), table_line(['---'] * len(columns))]
  for claim in found:
    text = claim.get('measured_text') or '; '.join(
        f'{name} {value:.3g}' if isinstance(value, float) else f'{name} {value}'
        for name, value in claim['measured'].items()
    )
    lines.append(table_line([
        claim['figure'], claim['claim'], text, claim['published'],
        f'**{claim["verdict"]}**',
    ]))
  return '\n'.join(lines) + '\n'
