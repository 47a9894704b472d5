"""Methods by name: the registry, its front door, and the README's table."""

import inspect
import pathlib
import re
import sys
import types

import pytest

import fednest_tff
from fednest_tff import registry
from tests.helpers import quadratic, small_problems

README = pathlib.Path(__file__).parent.parent / 'README.md'
FAMILY = (
    'fednest', 'lfednest', 'fednest_sgd', 'lfednest_svrg', 'lfednest_nonalt',
    'fedavg_s',
)  # fmt: skip


def build_mine(
    problem, *, inner_learning_rate: float, strength: float = 2.0, seed: int = 0
):
  """Mine: it returns its arguments.

  Args:
    problem: Any.
    inner_learning_rate: beta.
    strength: How strong it is.
    seed: Of nothing.
  """
  arguments = problem, inner_learning_rate, strength, seed
  return types.SimpleNamespace(next=None, arguments=arguments)


# ---- What is in it ----------------------------------------------------------


def test_the_family_comes_first():
  assert fednest_tff.METHODS[: len(FAMILY)] == FAMILY
  assert registry.method_names() == fednest_tff.METHODS


@pytest.mark.parametrize('name', fednest_tff.METHODS)
def test_every_method_is_complete(name):
  method = fednest_tff.get_method(name)
  assert method.name == name
  # Users find the builder by its name.
  assert getattr(fednest_tff, method.builder.__name__) is method.builder
  assert method.label and method.rounds
  assert method.summary.endswith('.') and '\n' not in method.summary
  assert {'inner_learning_rate', 'outer_learning_rate', 'seed'} <= set(
      method.options
  )


def test_labels_differ():
  labels = [registry.get_method(name).label for name in fednest_tff.METHODS]
  assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    'name', [name for name in fednest_tff.__all__ if name.startswith('build_')]
)
def test_no_builder_has_more_than_twelve_parameters(name):
  builder = getattr(fednest_tff, name)
  assert len(inspect.signature(builder).parameters) <= 12


def test_readme_has_the_table():
  (table,) = re.findall(
      r'<!-- methods: .*?-->\n(.*?)\n<!-- /methods -->',
      README.read_text(),
      re.DOTALL,
  )
  assert table == registry.to_markdown()


def test_table():
  registry.register('mine', build_mine, 'Mine', 'T + 7')
  head, rule, *rows = registry.to_markdown().splitlines()
  assert head == '| method | description | builder | rounds per epoch |'
  assert rule == '| --- | --- | --- | --- |'
  assert len(rows) == len(fednest_tff.METHODS) + 1
  expected = (
      '| `mine` | Mine: it returns its arguments. | `build_mine` | T + 7 |'
  )
  assert rows[-1] == expected


KINDS = ('bilevel', 'minimax', 'compositional', 'single_level', 'personal')


@pytest.mark.parametrize('kind', KINDS)
def test_methods_refuse_problems_of_other_kinds(kind):
  problem = getattr(small_problems, kind)()
  names = [
      name for name in fednest_tff.METHODS
      if kind not in fednest_tff.get_method(name).kinds
  ]
  assert names and len(names) < len(fednest_tff.METHODS)
  for name in names:
    steps = {
        rate: 0.1
        for rate in fednest_tff.get_method(name).options
        if rate.endswith('learning_rate')
    }
    with pytest.raises(ValueError, match=f'`problem` is {kind}'):
      fednest_tff.build(problem, name, **steps)


# ---- A method of your own ---------------------------------------------------


def test_register():
  assert fednest_tff.register('mine', build_mine) is None
  method = fednest_tff.get_method('mine')
  assert method.builder is build_mine
  assert method.label == 'mine'
  assert method.summary == 'Mine: it returns its arguments.'
  assert fednest_tff.method_names() == (*fednest_tff.METHODS, 'mine')
  (strength,) = method.options['strength']
  assert (strength.default, strength.flag_type) == (2.0, float)
  assert strength.help == 'How strong it is.'
  # Once more is no harm, and may give it a label.
  fednest_tff.register('mine', build_mine, label='Mine')
  assert fednest_tff.get_method('mine').label == 'Mine'


def test_build_is_the_front_door():
  fednest_tff.register('mine', build_mine)
  built = fednest_tff.build('a problem', 'mine', inner_learning_rate=0.1)
  assert built.arguments == ('a problem', 0.1, 2.0, 0)
  with pytest.raises(ValueError, match='`inner_rounds` is no option of mine'):
    fednest_tff.build(0, 'mine', inner_learning_rate=0.1, inner_rounds=1)
  with pytest.raises(
      ValueError, match='`inner_learning_rate` is missing: mine needs it'
  ):
    fednest_tff.build(0, 'mine')


@pytest.mark.parametrize(
    ['method', 'option'],
    [
        ('lfednest', 'participation'),
        ('lfednest_nonalt', 'gradient_batch_size'),
        ('fedavg_s', 'inner_rounds'),
        ('fednest', 'strength'),
    ],
)
def test_wrong_options_name_option_and_method(method, option):
  with pytest.raises(
      ValueError, match=f'^`{option}` is no option of {method}, which has: '
  ):
    fednest_tff.build(quadratic.build_problem(), method, **{option: 1})


def test_a_misspelt_option_is_guessed():
  with pytest.raises(ValueError, match='Did you mean `inner_learning_rate`[?]'):
    fednest_tff.build(quadratic.build_problem(), inner_learning_rat=1)


def test_what_cannot_be_registered():
  with pytest.raises(ValueError, match="`name` 'fednest' is registered"):
    fednest_tff.register('fednest', build_mine)
  with pytest.raises(ValueError, match='`builder` must be a function; got 3'):
    fednest_tff.register('three', 3)
  with pytest.raises(ValueError, match='`<lambda>` must name its options'):
    fednest_tff.register('all', lambda problem, **options: None)
  with pytest.raises(ValueError, match='`<lambda>` must have a parameter `see'):
    fednest_tff.register('seedless', lambda problem: None)
  for name in ('', 'a,b', '../a', '.a', 5.5 + 1j):
    with pytest.raises(ValueError, match='`name` must have letters, digits'):
      fednest_tff.register(name, build_mine)
  for kinds in ('bilevel', ['bilevel', 'trilevel']):
    with pytest.raises(ValueError, match='`kinds` must be some of bilevel, '):
      fednest_tff.register('mine', build_mine, kinds=kinds)
  assert registry.method_names() == fednest_tff.METHODS


@pytest.mark.parametrize('built', [None, 'a process', dict])
def test_a_builder_must_return_a_process(built):
  def build_nothing(problem, *, seed: int = 0):
    return built

  fednest_tff.register('nothing', build_nothing)
  with pytest.raises(ValueError, match='`build_nothing` must return a process'):
    fednest_tff.build(quadratic.build_problem(), 'nothing')


def test_options_without_annotations_have_the_types_of_their_defaults():
  def build_plain(problem, mood=0.5, count=3, name='a', other=None, seed=0):
    return problem, mood, count, name, other, seed

  fednest_tff.register('plain', build_plain)
  found = fednest_tff.get_method('plain').options
  assert {name: places[0].flag_type for name, places in found.items()} == {
      'mood': float, 'count': int, 'name': str, 'other': None, 'seed': int
  }


@pytest.mark.parametrize(
    'name', ['fedavg', '', None, ':build', 'module:', '.module:build', 'a:b:c']
)
def test_unknown_method(name):
  with pytest.raises(ValueError) as caught:
    fednest_tff.build(quadratic.build_problem(), name)
  assert str(caught.value) == (
      f'`method` must be one of {", ".join(fednest_tff.METHODS)}, or'
      f" 'package.module:builder'; got {name!r}."
  )


# ---- By 'package.module:builder' --------------------------------------------

MODULE = '''
import types

import fednest_tff


def build_own(problem, *, inner_learning_rate: float, seed: int = 0):
  """Own: nothing much."""
  return types.SimpleNamespace(next=None, arguments=(problem, seed))
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
  """A folder of modules that can be imported."""
  folder = tmp_path / 'some_package'
  folder.mkdir()
  (folder / '__init__.py').touch()
  (folder / 'own.py').write_text(MODULE)
  (folder / 'labelled.py').write_text(
      MODULE + "\n\nfednest_tff.register('own', build_own, label='The Own')\n"
  )
  (folder / 'broken.py').write_text('import no_such_module\n')
  (folder / 'raising.py').write_text('1 / 0\n')
  (folder / 'leaving.py').write_text('raise SystemExit(5)\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  yield folder
  for name in [n for n in sys.modules if n.split('.')[0] == folder.name]:
    del sys.modules[name]


@pytest.mark.usefixtures('package')
def test_a_method_by_its_module():
  name = 'some_package.own:build_own'
  built = fednest_tff.build('a problem', name, inner_learning_rate=0.1)
  assert built.arguments == ('a problem', 0)
  method = fednest_tff.get_method(name)
  assert (method.name, method.label) == (name, 'own')
  assert registry.method_names() == (*fednest_tff.METHODS, name)
  assert fednest_tff.get_method(name) is method
  with pytest.raises(ValueError, match=f'`mood` is no option of {name}'):
    fednest_tff.build(0, name, inner_learning_rate=0.1, mood=1)


@pytest.mark.usefixtures('package')
def test_a_module_may_register_its_method_itself():
  name = 'some_package.labelled:build_own'
  method = fednest_tff.get_method(name)
  assert method.label == 'The Own'
  assert fednest_tff.get_method('own').builder is method.builder
  assert registry.method_names() == (*fednest_tff.METHODS, 'own', name)


@pytest.mark.usefixtures('package')
@pytest.mark.parametrize(
    ['name', 'message'],
    [
        ('some_package.none:build', "cannot be imported: .* 'some_package.no"),
        ('some_package.broken:build', "cannot be imported: .* 'no_such_mo"),
        ('some_package.raising:build', 'fails when it is imported: ZeroDiv'),
        ('some_package.leaving:build', 'fails when it is imported: SystemE'),
        ('some_package.own:missing', "some_package.own has no 'missing'"),
    ],
)
def test_what_cannot_be_imported(name, message):
  with pytest.raises(ValueError, match=f'^`method` {name!r}.*{message}'):
    fednest_tff.get_method(name)
  assert registry.method_names() == fednest_tff.METHODS
