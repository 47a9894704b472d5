"""The asynchronous context, alone and under TFF's training program."""

import asyncio
import functools
import logging
import threading

import numpy as np
import tensorflow_federated as tff

import fednest_tff
from fednest_tff.runtime import in_process
from tests.helpers import quadratic
from tests.runtime.comparison import at_clients, run_in_process


@tff.federated_computation(at_clients(np.float32))
def means(x):
  return tff.federated_mean(x), tff.federated_mean(x, x)


LOOPED = in_process.InProcessRuntime(unroll=0)


def _run(coroutine):
  """Runs a program as TFF's programs are run."""
  context = tff.program.NativeFederatedContext(
      in_process.AsyncInProcessContext(LOOPED)
  )
  with tff.framework.get_context_stack().install(context):
    return asyncio.run(coroutine)


def test_results():
  async def run():
    return await tff.program.materialize_value(means([1.0, 4.0]))

  assert _run(run()) == (2.5, np.float32(17 / 5))


class _WaitingRuntime(in_process.InProcessRuntime):
  """Runs nothing before the event."""

  def __init__(self):
    super().__init__()
    self.event = threading.Event()

  def run(self, computation, argument):
    assert self.event.wait(timeout=20), 'the event loop stands still'
    return super().run(computation, argument)


def test_the_event_loop_goes_on_meanwhile():
  runtime = _WaitingRuntime()
  context = in_process.AsyncInProcessContext(runtime)

  async def set_event():
    runtime.event.set()

  async def run():
    return await asyncio.gather(
        context.invoke(means, [1.0, 4.0]), set_event()
    )

  assert asyncio.run(run()) == [(2.5, np.float32(17 / 5)), None]


CLIENT_DATA = quadratic.to_datasets(quadratic.make_clients(3))
DATA_TYPE = at_clients(
    tff.SequenceType(tff.types.tensorflow_to_type(quadratic.element_spec()))
)


@functools.cache
def _fednest():
  return fednest_tff.build(
      quadratic.build_problem(),
      outer_learning_rate=0.05,
      inner_learning_rate=0.2,
      inner_local_steps=1,
      neumann_terms=1,
      batch_size=2,
  )


class _Clients(tff.program.FederatedDataSourceIterator):
  """The same clients every time; TFF copies and stores its iterators."""

  federated_type = DATA_TYPE

  @classmethod
  def from_bytes(cls, buffer):
    return cls()

  def to_bytes(self):
    return b''

  def select(self, k=None):
    return CLIENT_DATA[:k]


class _Source(tff.program.FederatedDataSource):
  federated_type = DATA_TYPE
  capabilities = ()

  def iterator(self):
    return _Clients()


async def _train(directory, rounds, released):
  await tff.learning.programs.train_model(
      train_process=_fednest(),
      train_data_source=_Source(),
      train_per_round_clients=2,
      train_total_rounds=rounds,
      program_state_manager=tff.program.FileProgramStateManager(directory),
      model_output_manager=tff.program.MemoryReleaseManager(),
      train_metrics_manager=released,
      evaluation_manager=None,
      evaluation_periodicity=1,
  )


def test_training_program(tmp_path, caplog, capfd):
  """TFF's `train_model` with a FedNest process, stopped and taken up again."""
  released = tff.program.MemoryReleaseManager()
  with caplog.at_level(logging.WARNING):
    for rounds in (1, 3, 3):  # To the first round, on to the third, nothing.
      _run(_train(tmp_path, rounds, released))
  assert sorted(released.values()) == [1, 2, 3]

  def train():
    process = _fednest()
    state = process.initialize()
    for round_number in (1, 2, 3):
      output = process.next(state, CLIENT_DATA[:2])
      state = output.state
      yield released.values()[round_number], output.metrics

  for found, expected in run_in_process(LOOPED, lambda: list(train())):
    assert found['outer_loss'] == expected['outer_loss']
    assert found['model_metrics'] == {
        'loss': expected['outer_loss'],
        'num_examples': expected['num_examples'],
    }
  asyncio_errors = [r for r in caplog.records if r.name == 'asyncio']
  assert not asyncio_errors
  assert 'never awaited' not in capfd.readouterr().err
