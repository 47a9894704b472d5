"""What tests of the runtime share."""

import pytest

from tests.runtime.comparison import RUNTIMES


@pytest.fixture(params=list(RUNTIMES))
def runtime(request):
  """Each way to run in process: unrolled, as a loop, and step by step."""
  return RUNTIMES[request.param]
