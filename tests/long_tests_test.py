"""The list of long tests names tests that there are."""

import pathlib
import re

import pytest

from tests import long_tests

ROOT = pathlib.Path(__file__).parent


@pytest.mark.parametrize('path', long_tests.LONG_TESTS)
def test_every_name_is_a_test_of_its_file(path):
  defined = re.findall(
      r'^def (test_\w+)', (ROOT / path).read_text(), re.MULTILINE
  )
  names = long_tests.LONG_TESTS[path]
  assert names == (long_tests.ALL,) or {
      name.partition('[')[0] for name in names
  } <= set(defined)


def test_names_stand_for_their_parameters():
  path = 'runtime/vectorised_test.py'
  assert long_tests.is_long(path, 'test_numbers_of_methods[personal]')
  assert not long_tests.is_long(path, 'test_numbers_of_methods[simfbo]')
  binaries = 'experiments/binaries_test.py'
  assert long_tests.is_long(binaries, 'test_later_methods[minimax]')
  assert long_tests.is_long('notebook_test.py', 'test_whatever')
  assert not long_tests.is_long('options_test.py', 'test_whatever')
