"""The comparison as a program: its flags, its tables, its refusals."""

import csv

import pytest

from tests.helpers.binaries import command

pytestmark = pytest.mark.usefixtures('default_context')

TINY = [
    '--problem=quadratic', '--num_clients=3', '--local_steps=2', '--nocompiled',
    '--rounds=7', '--tuning_rounds=7', '--budget=1', '--seeds=1',
    '--rounds_per_evaluation=2',
]


def test_a_comparison(tmp_path, capfd):
  where = tmp_path / 'compared'
  flags = [*TINY, f'--output_dir={where}']
  assert command('compare', *flags, '--methods=simfbo,fednest') == 0
  printed = capfd.readouterr()
  assert printed.out.startswith('# quadratic: 3 clients\n')
  assert 'Every method had 1 trial (one if' in printed.out
  assert 'ran for 7 rounds on 1 seed.' in printed.out
  assert printed.out.endswith(f'tables and plot: {where}\n')
  assert [line.split(':')[0] for line in printed.err.splitlines()] == [
      '[1/4] SimFBO, trial 1', '[2/4] SimFBO, seed 0',
      '[3/4] FedNest, trial 1', '[4/4] FedNest, seed 0',
  ]
  with open(where / 'leaderboard.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert {row['method'] for row in rows} == {'simfbo', 'fednest'}
  assert (where / 'leaderboard.png').stat().st_size > 1000
  # In the same directory: the rounds grow, but not the trials.
  more = [*flags, '--methods=simfbo,fednest']
  assert command('compare', *more, '--rounds=8') == 0
  assert 'ran for 8 rounds' in capfd.readouterr().out
  before = (where / 'leaderboard.csv').read_bytes()
  assert command('compare', *more, '--budget=2') == 2
  assert '`budget` was 1 and is 2' in capfd.readouterr().err.replace(
      '--budget', '`budget`'
  )
  assert (where / 'leaderboard.csv').read_bytes() == before


@pytest.mark.parametrize('arguments, parts', [
    (['--methods='], ['--methods is empty: choose from fednest']),
    (['--methods=simfbo,simfbo'], ['--methods names a method twice']),
    (['--methods=simfboo'], ['--methods=simfboo is none of fednest']),
    (['--methods=no.such:thing'], ["--methods 'no.such:thing'"]),
    (['--problem=cubic'], ['--problem=cubic is none of']),
    (['--partition=shards'], ['--partition has no effect in --problem=quad']),
    (['--ridge=0.1'], ['--ridge has no effect in --problem=quadratic']),
    (['--hidden=foo'], ['--hidden has no effect in --problem=quadratic']),
    (['--num_clients=1000000000000'], ['--num_clients=', 'must be at most']),
    (['--clients_per_round=4'], ['--clients_per_round=4', '3']),
    (['--epochs=3'], ['--epochs has no effect in compare']),
    (['--budget=0'], ['--budget', '0']),
    (['--seeds=0'], ['--seeds', '0']),
    (
        ['--rounds=6', '--methods=fednest'],
        ['--rounds must be at least 7, the rounds of one epoch of FedNest'],
    ),
    (['more'], ["unexpected argument 'more'"]),
    (['--problem=hyper_cleaning', '--wrong_labels=1'], ['--wrong_labels=1.0']),
])
def test_bad_flags_are_one_line(tmp_path, capfd, arguments, parts):
  where = tmp_path / 'none'
  code = command('compare', *TINY, f'--output_dir={where}', *arguments)
  printed = capfd.readouterr()
  assert code == 2, printed
  assert printed.err.startswith('error: ') and printed.err.count('\n') == 1
  for part in parts:
    assert part in printed.err
  assert printed.out == '' and not where.exists()


def test_titles_tell_what_was_chosen(tmp_path, capfd):
  code = command(
      'compare', *TINY, '--problem=saddle', '--methods=simfbo', '--ridge=20',
      '--decay', f'--output_dir={tmp_path}/none',
  )
  printed = capfd.readouterr()
  assert code == 0, printed.err
  assert printed.out.startswith(
      '# saddle: 3 clients, ridge 20, steps fall to 0 in the second half\n'
  )
  code = command(
      'compare', *TINY, '--problem=saddle', '--methods=simfbo', '--ridge=20',
      '--decay', '--rounds=8', f'--output_dir={tmp_path}/none',
  )
  assert code == 2
  assert '--rounds was 7 and is 8' in capfd.readouterr().err
