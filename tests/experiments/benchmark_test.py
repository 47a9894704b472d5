"""The benchmark runs; what it measures depends on the machine."""

import csv
import pathlib
import subprocess
import sys

# Its flags have the names of other binaries' flags, so it runs on its own.
COMMAND = [sys.executable, '-m', 'experiments.benchmark']
TINY = [
    '--clients=2', '--examples=10', '--hidden=4', '--epochs=1',
    '--only=floor', '--only=in process, loop', '--only=native',
]


def run(*arguments):
  return subprocess.run(
      [*COMMAND, *arguments],
      capture_output=True,
      text=True,
      check=False,
      timeout=280,
      cwd=pathlib.Path(__file__).parents[2],
  )


def test_table_and_plot(tmp_path):
  done = run(*TINY, f'--output_dir={tmp_path}')
  assert done.returncode == 0, done.stderr
  with open(tmp_path / 'benchmark.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  names = ['floor', 'in process, loop', 'native']
  assert [row['setting'] for row in rows] == names
  for row in rows:
    assert 0 < float(row['seconds_per_epoch']) < float(row['first_seconds'])
    assert float(row['gib']) > 0.1
    assert row['setting'] in done.stdout
  # The worker of the native runtime has memory of its own.
  assert float(rows[2]['gib']) > float(rows[1]['gib'])
  assert (tmp_path / 'benchmark.png').stat().st_size > 5_000


def test_unknown_setting_is_named(tmp_path):
  done = run('--only=ceiling', f'--output_dir={tmp_path / "made"}')
  assert done.returncode == 1
  assert "--only=ceiling is none of 'floor', 'in process'" in done.stderr
  assert not (tmp_path / 'made').exists()
