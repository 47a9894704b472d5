"""The benchmark runs; what it measures depends on the machine."""

import csv

TINY = [
    '--clients=2', '--examples=10', '--hidden=4', '--epochs=1',
    '--only=floor', '--only=in process, loop', '--only=native',
]


def run(launcher, directory, *arguments):
  """The exit code, and what was printed."""
  log = directory / 'log.txt'
  return launcher.run(['benchmark', *arguments], log), log.read_text()


def test_table_and_plot(launcher, tmp_path):
  code, printed = run(launcher, tmp_path, *TINY, f'--output_dir={tmp_path}')
  assert code == 0, printed
  with open(tmp_path / 'benchmark.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  names = ['floor', 'in process, loop', 'native']
  assert [row['setting'] for row in rows] == names
  for row in rows:
    assert 0 < float(row['seconds_per_epoch']) < float(row['first_seconds'])
    assert float(row['gib']) > 0.1
    assert row['setting'] in printed
  # The worker of the native runtime has memory of its own.
  assert float(rows[2]['gib']) > float(rows[1]['gib'])
  assert (tmp_path / 'benchmark.png').stat().st_size > 5_000


def test_unknown_setting_is_named(launcher, tmp_path):
  code, printed = run(
      launcher, tmp_path, '--only=ceiling', f'--output_dir={tmp_path / "made"}'
  )
  assert code == 1
  assert "--only=ceiling is none of 'floor', 'in process'" in printed
  assert not (tmp_path / 'made').exists()
