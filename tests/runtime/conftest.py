"""What tests of the runtime share."""

import pytest

from fednest_tff.runtime.compiler import chunks, cohort
from tests.runtime.comparison import RUNTIMES


@pytest.fixture(params=list(RUNTIMES))
def runtime(request):
  """Each way to run in process: unrolled, as a loop, and step by step."""
  return RUNTIMES[request.param]


@pytest.fixture
def small_chunks(monkeypatch):
  """Two clients at a time, all results postponed where that is possible."""
  monkeypatch.setattr(cohort, 'choose_chunk', lambda *_: 2)
  monkeypatch.setattr(chunks, '_LARGE', 0)
