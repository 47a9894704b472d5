"""The benchmark runs; what it measures depends on the machine."""

import csv
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from experiments import benchmark, benchmark_epochs, benchmark_table
from experiments.benchmark_settings import GROUPS, SETTINGS

TINY = ['--clients=2', '--examples=10', '--hidden=4', '--epochs=1']
# Rows of the headline, and one of each other kind.
HEADLINE = ['floor', 'in process, loop', 'native']
KINDS = [
    'floor, SimFBO', 'in process, Penalty', 'in process, other cohort sizes',
    'in process, 10 sizes, equal tau, loop',
    'in process, FedAvg CNN, 10 clients',
]
BY_NAME = {setting.name: setting for setting in SETTINGS}


def run(launcher, directory, *arguments):
  """The exit code, and what was printed."""
  log = directory / 'log.txt'
  log.unlink(missing_ok=True)
  return launcher.run(['benchmark', *arguments], log), log.read_text()


def read(directory):
  with open(directory / 'benchmark.csv', newline='') as file:
    return {row['setting']: row for row in csv.DictReader(file)}


def run_tiny(launcher, directory, names):
  """The rows of the table, and what was printed."""
  only = [f'--only={name}' for name in names]
  code, printed = run(
      launcher, directory, *TINY, *only, f'--output_dir={directory}'
  )
  assert code == 0, printed
  for k, name in enumerate(names):
    assert f'[{k + 1} of {len(names)}] {name} ...' in printed
  return read(directory), printed


@pytest.fixture(scope='module')
def made(launcher, tmp_path_factory):
  """A directory, the rows of its table, and what was printed."""
  directory = tmp_path_factory.mktemp('benchmark')
  return directory, *run_tiny(launcher, directory, [*HEADLINE, *KINDS])


def test_table_and_plot(made):
  directory, rows, printed = made
  assert list(rows) == [*HEADLINE, *KINDS]
  for name in HEADLINE:
    row = rows[name]
    assert 0 < float(row['seconds_per_epoch']) < float(row['first_seconds'])
    assert float(row['gib']) > 0.1
    assert row['clients'] == '2'
    rate = float(row['matmul_gflop_per_second'])
    share = float(row['gflop']) / float(row['seconds_per_epoch']) / rate
    assert float(row['matmul_share']) == pytest.approx(share)
    assert 0 < share < 1
    assert row['other_cohorts_seconds'] == ''
  assert 'GFLOP/s' in printed
  assert 'cores, 1 for each operation' in printed
  # It executes in its worker.
  assert rows['native']['kernels'] == ''
  # The library does more than the program by hand.
  assert 100 < int(rows['floor']['kernels'])
  assert int(rows['floor']['kernels']) < int(rows[HEADLINE[1]]['kernels'])
  assert (directory / 'benchmark.png').stat().st_size > 5_000
  assert len((directory / 'benchmark.md').read_text().splitlines()) == 2 + 8


def test_memory_of_other_processes_counts():
  """The worker of the native runtime is one."""
  size = 200_000_000
  code = f'x = bytearray({size}); print(flush=True); input()'
  before = psutil.Process().memory_info().rss
  with benchmark._PeakMemory() as memory, subprocess.Popen(
      [sys.executable, '-c', code],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE,
  ) as child:
    child.stdout.readline()
    deadline = time.monotonic() + 60
    while memory.peak < before / 2 + size and time.monotonic() < deadline:
      time.sleep(0.05)
    child.stdin.close()
  assert memory.peak > before / 2 + size


def row(name, seconds, **changes):
  setting = BY_NAME[name]
  found = benchmark_table.Row(
      name, setting.group, setting.clients, seconds, 9.5, 1.25, 12_000, 6.1,
      0.456, 100.0, None,
  )
  return found._replace(**changes)


def test_markdown_and_ratios():
  rows = benchmark_table.sort([
      row('native', 6.0, kernels=None, matmul_share=None),
      row('in process, loop', 4.0),
      row('in process', 3.0),
      row('floor', 2.0),
      # Nothing to compare them with.
      row('native, deep', 1.0),
      row('in process, N=20', 1.0, other_cohorts_seconds=2.5),
  ])
  text = benchmark_table.markdown(rows)
  assert text.splitlines()[2:] == [
      '| floor | 2.000 | 9.5 | 1.25 | 12,000 | 46% |  |  |  |',
      '| in process | 3.000 | 9.5 | 1.25 | 12,000 | 46% | 1.50 |  |  |',
      '| in process, loop | 4.000 | 9.5 | 1.25 | 12,000 | 46% | 2.00 |  |  |',
      '| native | 6.000 | 9.5 | 1.25 |  |  |  | 2.00 |  |',
      '| native, deep | 1.000 | 9.5 | 1.25 | 12,000 | 46% |  |  |  |',
      '| in process, N=20 | 1.000 | 9.5 | 1.25 | 12,000 | 46% |  |  | 2.5 |',
  ]
  # With other numbers of clients they did not compute the same.
  rows = [row('floor', 2.0), row('in process', 3.0, clients=2)]
  assert benchmark_table.ratios(rows[1], rows) == (None, None)


def test_rows_are_read_as_they_were_written(tmp_path):
  path = str(tmp_path / 'benchmark.csv')
  rows = [row('floor', 0.1), row('native', 0.3, kernels=None)]
  benchmark_table.write(rows, path)
  assert benchmark_table.read(path) == rows


def test_kinds_of_rows(made):
  rows = {name: made[1][name] for name in KINDS}
  for row in rows.values():
    assert 0 < float(row['seconds_per_epoch']) < float(row['first_seconds'])
    assert int(row['kernels']) > 100
  varied = rows['in process, other cohort sizes']
  # Twelve calls: nothing is compiled again.
  others = float(varied['other_cohorts_seconds'])
  assert 0 < others < float(varied['first_seconds']) / 2
  has_share = {name for name, row in rows.items() if row['matmul_share']}
  assert has_share == {'floor, SimFBO', 'in process, other cohort sizes'}


def test_later_run_replaces_rows_and_keeps_others(launcher, made, tmp_path):
  _, rows, _ = made
  directory = shutil.copytree(made[0], tmp_path / 'again')
  again, _ = run_tiny(launcher, directory, ['floor'])
  assert list(again) == list(rows)
  assert {name for name in rows if again[name] != rows[name]} == {'floor'}


def test_wrong_flags_are_named(launcher, tmp_path):
  directory = tmp_path / 'made'
  for flag, message in [
      ('--only=ceiling', "--only=ceiling is none of 'floor', 'in process'"),
      ('--group=ceiling', 'value should be one of <headline|deep|clients|'),
      ('--hidden=8,few', '--hidden=8,few must be positive integers'),
  ]:
    code, printed = run(
        launcher, tmp_path, flag, f'--output_dir={directory}'
    )
    assert code == 2
    assert printed.startswith('error: ') and message in printed
    assert len(printed.splitlines()) == 1
  assert not directory.exists()


def test_settings():
  assert len(BY_NAME) == len(SETTINGS)
  assert set(GROUPS) == {
      'headline', 'deep', 'clients', 'first_calls', 'methods', 'cohorts',
      'fedavg',
  }
  assert BY_NAME['in process, other cohort sizes'].other_sizes() == [
      5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17
  ]


@pytest.mark.parametrize(
    ['name', 'sizes'],
    [
        ('in process', [600] * 10),
        ('in process, 2 sizes', [400, 800] * 5),
        ('in process, 10 sizes', list(range(330, 871, 60))),
        ('in process, other cohort sizes', [600] * 17),
    ],
)
def test_sizes_of_clients(name, sizes):
  assert benchmark_epochs.client_sizes(BY_NAME[name], 600) == sizes


def test_flops_of_the_headline():
  """Counted by hand, for one network and 600 examples of each client."""
  images, hidden, classes = 10 * 300, 200, 10
  # One product of all inner examples, or of all outer ones, with a layer.
  body, head = 2 * images * 784 * hidden, 2 * images * hidden * classes
  # Features at both levels; again with their derivatives in the layer.
  expected = (2 + 2 * 2) * body
  # q; two gradients per example and local epoch; b; four Hessian products;
  # logits of both levels and slopes, with their derivatives in the features.
  expected += (2 + 5 * 4 + 2 + 4 * 3 + 3 * 2) * head
  found = benchmark_epochs.flops(BY_NAME['native'].work, 600)
  assert found == expected
  unrolled = BY_NAME['in process, unrolled'].work
  assert benchmark_epochs.flops(unrolled, 600) == found
  assert benchmark_epochs.flops(BY_NAME['native, loss tuning'], 600) is None


def test_table_of_other_columns_is_refused(tmp_path):
  path = tmp_path / 'benchmark.csv'
  assert benchmark_table.read(str(path)) == []
  path.write_text('setting,seconds\nfloor,1\n')
  with pytest.raises(ValueError, match='has other columns: move it'):
    benchmark_table.read(str(path))
