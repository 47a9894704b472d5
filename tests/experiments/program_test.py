"""Methods, options and flags of the binaries: all from the registry."""

import ast
import collections
import pathlib
import re
import sys

from absl import flags
import pytest

from experiments import (
    hyper_representation,
    nested,
    program,
    runs,
    runtimes,
    settings,
    single_level,
)
import fednest_tff
from fednest_tff import registry, runtime, simulation
from tests.helpers.binaries import EXPERIMENTS, command

pytestmark = pytest.mark.usefixtures('default_context')

OWN = '''
import fednest_tff

def build_own(problem: fednest_tff.Problem, *, own_number: float = 2.5,
              neumann_terms: int = 9, ridge: float = 7.0, seed: int = 0):
  """A method of somebody else.

  Args:
    problem: A problem.
    own_number: A number like `neumann_terms` that nothing else has.
    neumann_terms: As elsewhere, with another default.
    ridge: An option with the name of a flag of some experiments.
    seed: A seed.
  """
  raise ValueError(f'own {own_number} {neumann_terms} {ridge} {seed}')
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
  """The name of a method in a file of its own; afterwards it is forgotten."""
  (tmp_path / 'somebody.py').write_text(OWN)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setattr(settings, 'METHOD_FLAGS', set(settings.METHOD_FLAGS))
  before = set(flags.FLAGS)
  yield 'somebody:build_own'
  for name in set(flags.FLAGS) - before:
    delattr(flags.FLAGS, name)
  sys.modules.pop('somebody', None)


def read_help(capfd, name, *arguments):
  """What `--help` prints, by flag, on one line each."""
  capfd.readouterr()
  # Help is no error, but absl ends with 1 after it.
  assert command(name, *arguments, '--help') == 1
  text = re.sub(r'\s+', ' ', capfd.readouterr().out)
  parts = re.split(r' --(?:\[no\])?(\w+): ', text)
  return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_help_has_every_option_of_every_method(name, capfd):
  experiment = EXPERIMENTS[name]
  shown = read_help(capfd, name)
  options = {}
  defaults = collections.defaultdict(set)
  for method in experiment.methods():
    assert re.search(rf'\b{method}\b', shown['method'])
    if method not in experiment.baselines:
      # Of methods that share an option, the first one describes it.
      options = settings.method_options(method) | options
      for option in settings.method_options(method).values():
        defaults[option.name].add(option.default)
  assert len(options) > 10
  own = [experiment.defaults, *experiment.variants.values()]
  own += experiment.presets.values()
  for option in options.values():
    if option.name in experiment.without:
      assert option.name not in shown
      continue
    words = option.help.replace('`', '').split()[:3]
    assert len(words) == 3
    assert ' '.join(words) in shown[option.name].replace('`', '')
    # An experiment may have a default of its own; else it is the method's.
    if option.default is not None and not any(option.name in d for d in own):
      default = str(option.default)
      if option.flag_type is bool:
        default = default.lower()
      # Where methods have different defaults, each has its own.
      is_shown = f"(default: '{default}')" in shown[option.name]
      assert is_shown == (len(defaults[option.name]) == 1)
  # Those of other experiments are not.
  assert ('hidden' in shown) == ('hidden' in experiment.flags())


def test_help_tells_defaults_by_problem(capfd):
  shown = read_help(capfd, 'minimax')
  assert "(default: 'saddle')" in shown['problem']
  assert 'One of saddle, robust_regression.' in shown['problem']
  assert (
      'Default: 100 with --problem=saddle, 10 with'
      ' --problem=robust_regression.'
  ) in shown['num_clients']
  assert '(default:' not in shown['num_clients']
  assert 'Only with --problem=saddle.' in shown['dimension']
  assert "(default: '10')" in shown['dimension']
  assert "(default: '0.1')" in shown['inner_learning_rate']
  # Once more: nothing of the first time is left.
  assert read_help(capfd, 'minimax') == shown
  other = read_help(capfd, 'hyper_representation')
  assert '--problem' not in other['num_clients'] and 'problem' not in other
  assert "(default: '0.1')" in other['inner_learning_rate']
  assert 'With --preset=paper: 0.01.' in other['inner_learning_rate']
  assert 'tuned, paper' in other['preset']
  assert 'in place of --inner_local_steps.' in other['inner_local_epochs']


def test_help_of_a_method_from_elsewhere(capfd, own):
  shown = read_help(capfd, 'hyper_representation', f'--method={own},fednest')
  assert own in shown['method']
  assert 'A number like --neumann_terms that' in shown['own_number']
  assert "(default: '2.5')" in shown['own_number']
  # Two methods, two defaults: neither is that of the flag.
  assert '(default:' not in shown['neumann_terms']


def test_method_from_elsewhere_gets_its_options(own, tmp_path, capfd):
  for given, expected in (
      # The flag of the experiment is what its option is about.
      (['--ridge=0.5'], 'own 2.5 9 0.5 0'),
      (['--own_number=3', '--seed=4', '--ridge=1'], 'own 3.0 9 1.0 4'),
      (['--method=somebody:build_own,fednest', '--ridge=1'], 'own 2.5 9 1.0 0'),
      (['--neumann_terms=2', '--ridge=1'], 'own 2.5 2 1.0 0'),
  ):
    code = command(
        'hyper_representation', f'--method={own}', *given,
        f'--output_dir={tmp_path / "run"}',
    )
    assert code == 2
    assert capfd.readouterr().err == f'error: {expected}\n'
  # Options of other methods are refused.
  arguments = [f'--method={own}', '--ihgp=cg', f'--output_dir={tmp_path}']
  assert command('hyper_representation', *arguments) == 2
  assert f'--ihgp has no effect in hyper_representation --method={own}' in (
      capfd.readouterr().err
  )


@pytest.mark.parametrize(
    'name, message',
    [
        ('nobody:build', 'cannot be imported'),
        ('somebody:build_other', "has no 'build_other'"),
    ],
)
def test_method_that_is_not_there(own, tmp_path, capfd, name, message):
  del own
  arguments = [f'--method={name}', f'--output_dir={tmp_path / "run"}']
  assert command('minimax', *arguments) == 2
  error = capfd.readouterr().err
  assert error.count('\n') == 1 and message in error and name in error
  assert not (tmp_path / 'run').exists()


def test_defaults_of_methods_that_differ_stay_the_methods_own(
    own, monkeypatch
):
  resolve = hyper_representation.EXPERIMENT.resolve
  registry.get_method(own)
  assert resolve(dict(method=['fednest'])).neumann_terms == 1
  paper = resolve(dict(method=['fednest'], preset='paper'))
  assert paper.neumann_terms == 5 and paper.inner_learning_rate == 0.01
  assert paper.preset == 'paper' and paper.smoothness is None
  with pytest.raises(settings.SettingsError, match='none of tuned, paper'):
    resolve(dict(preset='best'))
  # Presets leave the defaults of a method from elsewhere alone.
  assert resolve(dict(method=[own])).neumann_terms == 9
  both = resolve(dict(method=[own, 'fednest']))
  assert both.neumann_terms == 1 and both.inner_learning_rate is not None
  monkeypatch.setattr(
      fednest_tff, 'build', lambda problem, method, **options: options
  )
  for method, expected in ((own, 9), ('fednest', 1)):
    options = nested.build(None, method, both, 0)
    assert options['neumann_terms'] == expected
  given = resolve(dict(method=[own, 'fednest'], neumann_terms=3))
  for method in (own, 'fednest'):
    assert nested.build(None, method, given, 0)['neumann_terms'] == 3
  # A flag of the experiment stays one if a method has an option of its name.
  assert resolve(dict(method=['fednest'])).ridge == 0.0005


def test_labels_come_from_the_registry(own):
  experiment = single_level.EXPERIMENT
  assert experiment.labels(['fedavg', 'lfednest', 'fednest']) == {
      'fedavg': 'FedAvg', 'lfednest': 'LFedNest', 'fednest': 'FedNest'
  }
  assert experiment.labels([own]) == {own: 'own'}
  registry.register('other', registry.get_method(own).builder, 'own')
  # Two of one name would be one in a plot.
  assert experiment.labels([own, 'other', 'fednest']) == {
      own: own, 'other': 'other', 'fednest': 'FedNest'
  }


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_every_registered_method_can_be_asked_for(name):
  experiment = EXPERIMENTS[name]
  assert experiment.methods()[: len(fednest_tff.METHODS)] == list(
      fednest_tff.METHODS
  )
  resolved = experiment.resolve(dict(method=experiment.methods()))
  assert resolved.method == experiment.methods()
  assert experiment.labels(resolved.method).keys() == set(resolved.method)


def test_baseline_has_the_options_that_it_uses():
  resolve = single_level.EXPERIMENT.resolve
  found = vars(resolve(dict(method=['fedavg'])))
  assert found['outer_local_steps'] == 5
  assert found['outer_learning_rate'] == 0.3
  assert found['batch_size'] is None
  assert 'client_weighting' not in found
  assert vars(resolve(dict(method=['fednest'])))['client_weighting']


def test_lost_cluster_is_one_line_and_an_exit_code(monkeypatch, capsys):
  def lose(*_):
    raise runtime.WorkerError('The Ray cluster at host:1 is gone:\nrefused.')

  monkeypatch.setattr(runs, 'run_in', lose)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  assert program.main(single_level.EXPERIMENT, ['x']) == 4
  assert capsys.readouterr().err == (
      'error: The Ray cluster at host:1 is gone: refused.\n'
  )


def test_baseline_runs_on_ray_as_it_is():
  """A driver needs the rounds, which TFF's own processes do not tell."""
  built = object()
  experiment = single_level.EXPERIMENT._replace(
      make_trial=lambda resolved, seed: simulation.Trial(
          lambda method: built, None, None, 2
      )
  )
  chosen = dict(method=['fedavg'], runtime='ray')
  trial = runs.make_trial(experiment, experiment.resolve(chosen), 0)
  assert trial.build('fedavg') is built


def test_no_runtime_is_chosen_before_the_flags_are_read():
  with pytest.raises(RuntimeError, match='use_runtime'):
    runtimes.NoRuntime().invoke(None, None)


def test_nothing_but_the_registry_lists_methods():
  """A flag has a default; the paper's figures are in `reproduce`."""
  methods = [registry.get_method(name) for name in fednest_tff.METHODS]
  for path in pathlib.Path(program.__file__).parent.glob('*.py'):
    tree = ast.parse(path.read_text())
    defaults = {
        id(keyword.value) for keyword in ast.walk(tree)
        if isinstance(keyword, ast.keyword) and keyword.arg == 'method'
    }
    texts = [
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not {method.label for method in methods} & set(texts), path
    for node in ast.walk(tree):
      if isinstance(node, ast.List | ast.Tuple | ast.Set):
        elements = node.elts
      elif isinstance(node, ast.Dict):
        elements = node.keys
      else:
        continue
      names = {getattr(element, 'value', None) for element in elements}
      if len(names & set(fednest_tff.METHODS)) > 1:
        assert id(node) in defaults, (path, ast.unparse(node))
