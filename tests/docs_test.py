"""The table of docs/methods.md against the compiled computations."""

import pathlib
import re

import pytest
import tensorflow as tf

import fednest_tff

METHODS_PAGE = pathlib.Path(__file__).parent.parent / 'docs' / 'methods.md'
X, Y, T, N, S = 7000, 300, 2, 4, 3


def _rows():
  found = {}
  for line in METHODS_PAGE.read_text().splitlines():
    cells = [cell.strip() for cell in line.strip('|').split('|')]
    name = re.fullmatch(r'`(\w+)`', cells[0])
    if name and len(cells) == 6:
      found[name[1]] = cells[1:4]
  return found


ROWS = _rows()


def _value(formula):
  """The number that a formula such as '2X + (T + NS)Y' stands for."""
  text = formula.replace('−', '-')
  # Products of letters, numbers and brackets that stand side by side.
  text = re.sub(r'(?<=[\w)])(?=[A-Za-z(])', '*', text)
  text = text.replace(' *', ' ')
  return eval(text, dict(X=X, Y=Y, T=T, N=N, S=S))


def test_formulas_are_read():
  assert _value('2X + (T + 2 + (N − 1)S)Y') == 2 * X + (T + 2 + (N - 1) * S) * Y
  assert _value('2T + N + 2') == 2 * T + N + 2
  assert _value('2X + 3TY') == 2 * X + 3 * T * Y


def _problem():
  def loss(x, y, batch):
    return tf.reduce_mean(batch) * (tf.reduce_sum(x**2) + tf.reduce_sum(y**2))

  return fednest_tff.bilevel(
      loss, loss, lambda seed: tf.ones([X]), lambda seed: tf.ones([Y]),
      tf.TensorSpec([], tf.float32),
  )


PROBLEM = _problem()


def test_every_method_has_a_row():
  assert set(ROWS) == set(fednest_tff.METHODS) - {'personal'}


@pytest.mark.parametrize('method', ROWS)
def test_rounds_and_numbers(method):
  options = dict(
      inner_learning_rate=0.1, outer_learning_rate=0.1,
      linear_learning_rate=0.1, inner_rounds=T, neumann_terms=N,
  )
  if method == 'fedmbo':
    options['chains'] = S
  known = fednest_tff.get_method(method).options
  process = fednest_tff.build(
      PROBLEM, method, **{k: v for k, v in options.items() if k in known}
  )
  cost = fednest_tff.communication_cost(process)
  rounds, up, down = map(_value, ROWS[method])
  assert cost.rounds == rounds
  # Metrics, weights, step sizes and seeds are a few numbers per round.
  for measured, formula in ((cost.bytes_up, up), (cost.bytes_down, down)):
    assert 0 <= measured / 4 - formula <= 20 * rounds
