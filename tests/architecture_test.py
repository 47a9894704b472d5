"""Imports point backwards only, along the order of the design."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
# A module may import those of its own entry and of the entries before it.
ORDER = [
    'fednest_tff.options',
    'fednest_tff.structures',
    'fednest_tff.vector_space',
    'fednest_tff.problems',
    'fednest_tff.local',
    'fednest_tff.federated',
    'fednest_tff.models',
    'fednest_tff.algorithms',
    'fednest_tff.registry',
    'fednest_tff.runtime.compiler',
    'fednest_tff.runtime',
    # It needs none of the above. Only simulations and experiments may use it.
    'fednest_tff.data',
    'fednest_tff.simulation',
    # The package itself: its __init__ has what users import.
    'fednest_tff',
    # A program.
    'fednest_tff.runtime.check',
    'experiments',
    'tests',
]


def rank(module):
  """Position in the order, by the longest name that fits; or `None`."""
  found = None
  length = -1
  for k, name in enumerate(ORDER):
    if module == name or module.startswith(f'{name}.'):
      if len(name) > length:
        found, length = k, len(name)
  return found


def imported(tree):
  """The modules that a file imports, wherever in it."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, 'relative import'
      for alias in node.names:
        yield node.lineno, f'{node.module}.{alias.name}'


def violations(module, source):
  own = rank(module)
  return [
      f'{module}:{line} imports {name}'
      for line, name in imported(ast.parse(source))
      if rank(name) is not None and rank(name) > own
  ]


def modules():
  for package in ('fednest_tff', 'experiments'):
    for path in sorted((ROOT / package).rglob('*.py')):
      parts = list(path.relative_to(ROOT).with_suffix('').parts)
      if parts[-1] == '__init__':
        parts.pop()
      yield '.'.join(parts), path.read_text()


def test_imports_point_backwards():
  found = list(modules())
  assert len(found) > 40
  assert [v for module, text in found for v in violations(module, text)] == []


def test_every_package_has_its_place():
  for module, _ in modules():
    if module.startswith('fednest_tff.'):
      assert rank(module) != rank('fednest_tff'), module


def test_the_order_is_that_of_the_design():
  design = (ROOT / 'docs' / 'design.md').read_text()
  (line,) = re.findall(r'^ +(problems -> .*)$', design, re.MULTILINE)
  drawn = line.split(' -> ')
  places = [
      rank(name if name in ORDER else f'fednest_tff.{name}') for name in drawn
  ]
  assert len(drawn) == 8
  assert places == sorted(set(places))


def test_a_wrong_import_is_noticed():
  local = 'fednest_tff.local.client'
  assert violations(local, 'from fednest_tff import algorithms')
  assert violations(local, 'def f():\n  import fednest_tff.data.idx')
  assert violations(local, 'import fednest_tff')
  assert violations('fednest_tff.runtime.native', 'from experiments import x')
  assert violations('experiments.program', 'from tests.helpers import mlp')
  assert violations('fednest_tff.runtime.compiler.values', 'import fednest_tff')
  assert violations(
      'fednest_tff.runtime.compiler.values',
      'from fednest_tff.runtime import devices',
  )
  driver = 'fednest_tff.runtime.driver'
  assert violations(driver, 'from fednest_tff import data')
  assert violations(
      'fednest_tff.algorithms.fed_inn', 'from fednest_tff import registry'
  )
  assert not violations(local, 'from fednest_tff.problems import problem')
  assert not violations(local, 'from fednest_tff import vector_space')
