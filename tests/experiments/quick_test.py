"""`--help` and wrong flags without TensorFlow."""

import json
import pathlib
import subprocess
import sys

from absl import flags as absl_flags
import pytest

from experiments import flags, quick
from tests.helpers import binaries

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_the_copy_is_current(launcher, tmp_path):
  """Made in another process: programs here have flags of the same names."""
  copy, log = tmp_path / 'flags.json', tmp_path / 'log.txt'
  launcher.call('experiments.flags:write', [str(copy)], log)
  assert launcher.wait() == 0, log.read_text()
  found = pathlib.Path(quick.COPY).read_text()
  assert found == copy.read_text(), 'run: make flags'


def test_every_binary_is_in_the_copy():
  copy = json.loads(pathlib.Path(quick.COPY).read_text())
  assert copy.keys() == {
      *binaries.EXPERIMENTS, 'benchmark', 'compare', 'reproduce'
  }


def test_the_originals_are_as_before():
  """Making the copy changes no flag of this process."""

  def describe():
    return {
        name: (flag.help, flag.default, flag.value, flag.using_default_value)
        for name, flag in (
            (name, absl_flags.FLAGS[name]) for name in absl_flags.FLAGS
        )
    }

  before = describe()
  flags.make()
  assert describe() == before


@pytest.mark.parametrize(
    ('arguments', 'part'),
    [
        (['--epochs=abc'], '--epochs=abc'),
        (['--epochs=0'], '--epochs=0'),
        (['--no_such_flag=1'], 'no_such_flag'),
        (['--ihgp=exact'], '--ihgp=exact'),
        (['--method=fednest,gradient'], '--method=gradient is none of fednest'),
        (['surplus'], 'surplus'),
        (['--flagfile=/no/such/file'], '/no/such/file'),
    ],
)
@pytest.mark.parametrize('name', ['minimax', 'compare'])
def test_wrong_flags(capsys, name, arguments, part):
  if name == 'compare' and 'method' in arguments[0]:
    arguments, part = ['--methods=', '--budget=0'], '--budget=0'
  with pytest.raises(SystemExit) as ended:
    quick.check(name, arguments)
  assert ended.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and part in line


@pytest.mark.parametrize(
    ('name', 'arguments', 'part'),
    [
        ('benchmark', ['--only=ceiling'], "none of 'floor', 'in process'"),
        ('benchmark', ['--only=floor', '--group=ceiling'], '--group=ceiling'),
        ('benchmark', ['--examples=9'], '--examples=9'),
        ('reproduce', ['--figure=5,7'], '--figure=7 is none of 2a, 2b'),
        ('reproduce', ['--preset=large'], '--preset=large'),
        ('reproduce', ['--seeds=0'], '--seeds=0'),
    ],
)
def test_wrong_flags_of_the_others(capsys, name, arguments, part):
  test_wrong_flags(capsys, name, arguments, part)


@pytest.mark.parametrize(
    ('name', 'arguments'),
    [
        ('benchmark', ['--only=floor', '--only=in process, loop',
                       '--group=deep', '--group=methods', '--hidden=8,4']),
        ('reproduce', ['--figure=2a,theory', '--preset=tuned', '--seeds=2']),
        ('reproduce', ['--figure=all']),
    ],
)
def test_right_flags_of_the_others(name, arguments):
  quick.check(name, arguments)


@pytest.mark.parametrize(
    'arguments',
    [
        [],
        ['--epochs=3', '--nocompiled', '--method=fednest,lfednest'],
        ['--verbosity=1', '--alsologtostderr'],  # Those of absl.
        ['--address=host:80', '--devices=GPU:0,GPU:1'],
        # Its flags are not known here.
        ['--method=docs.examples.soba:build_soba', '--no_such_flag=1'],
        ['--helpfull'],
    ],
)
def test_others_are_left_to_the_program(arguments):
  quick.check('minimax', arguments)


def test_a_flag_file(tmp_path, capsys):
  path = tmp_path / 'some.flags'
  path.write_text('--method=docs.examples.soba:build_soba\n--mine=1\n')
  quick.check('minimax', [f'--flagfile={path}'])
  path.write_text('--method=fednest\n--mine=1\n')
  with pytest.raises(SystemExit):
    quick.check('minimax', [f'--flagfile={path}'])
  assert "'mine'" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path):
  """Runs a program where TensorFlow cannot be imported."""
  (tmp_path / 'tensorflow.py').write_text('raise SystemExit(99)')
  (tmp_path / 'tensorflow_federated.py').write_text('raise SystemExit(99)')

  def run(name, *arguments):
    return subprocess.run(
        [sys.executable, '-m', f'experiments.{name}', *arguments],
        cwd=ROOT, env={'PYTHONPATH': str(tmp_path)}, capture_output=True,
        text=True, check=False,
    )

  return run


@pytest.mark.parametrize(
    ('name', 'parts'),
    [
        ('loss_tuning', [
            'VS-loss',
            'experiments.loss_tuning:',
            '--preset: Defaults that go together: tuned, paper.',
            'With --preset=paper: 0.02.',
        ]),
        ('benchmark', [
            'Seconds per epoch',
            'experiments.benchmark:',
            '--group: <headline|deep|',
            '--epochs: Timed epochs after the first. (default:',
        ]),
        ('reproduce', [
            "behind the paper's figures",
            'experiments.reproduce:',
            '--preset: <quick|paper|tuned>: How large.',
            '--seeds: How many seeds',
        ]),
    ],
)
def test_help_without_tensorflow(run, name, parts):
  shown = run(name, '--help')
  assert shown.returncode == 0
  text = ' '.join(shown.stdout.split())
  for part in parts:
    assert part in text


@pytest.mark.parametrize(
    ('name', 'wrong', 'part'),
    [
        ('loss_tuning', '--epochs=-1', '--epochs=-1'),
        # These are flags of other programs.
        ('benchmark', '--method=fednest', "'method'"),
        ('reproduce', '--runtime=native', "'runtime'"),
    ],
)
def test_wrong_flags_without_tensorflow(run, name, wrong, part):
  ended = run(name, wrong)
  assert ended.returncode == 2 and part in ended.stderr
  # Whatever is right goes on, and needs it.
  assert run(name, '--epochs=1').returncode == 99
