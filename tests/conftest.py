"""Tests share one native TFF runtime per process and leave no worker behind."""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import psutil
import pytest


def _workers():
  return [
      child
      for child in psutil.Process().children(recursive=True)
      if child.name().startswith('worker_binary')
  ]


@pytest.fixture(scope='session', autouse=True)
def native_runtime():
  """Ends the worker that TFF's default context starts; TFF itself does not."""
  yield
  for worker in _workers():
    worker.kill()
    worker.wait(timeout=10)
  assert not psutil.Process().children(recursive=True), 'left behind'
