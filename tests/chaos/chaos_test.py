"""A small part of the campaign; all of it is `make chaos`."""

import pytest

from tests.chaos import campaign, inputs

pytestmark = pytest.mark.usefixtures('default_context')
RUNTIME = 'in_process'
# Findings of earlier campaigns, and what is most often damaged.
DAMAGES = 5


def test_bad_flags():
  assert inputs.fuzz_flags(seed=0, count=60) >= 60


def test_bad_arguments():
  assert inputs.fuzz_api(seed=0, count=40) >= 40


def test_damaged_files_signals_and_kills(launcher, tmp_path):
  counts = campaign.Counts()
  worker = campaign.Worker(tmp_path, 7, counts, True, launcher)
  for _ in range(DAMAGES):
    worker.damage()
  worker.kill()
  worker.signal()
  worker.full_disk()
  assert counts.done['damaged files'] >= DAMAGES
  assert counts.done['signals'] == counts.done['full disks'] == 1
  assert not counts.findings


def test_campaign_sees_a_difference(launcher, tmp_path):
  """Or else it would find nothing, whatever happens."""
  counts = campaign.Counts()
  worker = campaign.Worker(tmp_path, 8, counts, True, launcher)
  key = 'minimax', 'fedavg_s'
  reference = worker._make_reference(*key)
  wrong = reference.results | {'metrics.csv': []}
  worker._references.made[key] = reference._replace(results=wrong)
  with pytest.raises(campaign.FindingError, match='another result'):
    worker.full_disk()
