"""A run: a process over epochs, recorded, checkpointed, and resumed.

TFF's training loop does the work. Cohorts are a function of the epoch alone and
all randomness is in the state, so a run that was killed and started again ends
with the numbers of one that was not.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
import contextlib
import signal
import sys
import threading
import types
from typing import NamedTuple, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff
import tqdm

from fednest_tff.runtime.communication import communication_cost
from fednest_tff.runtime.driver import Driver
from fednest_tff.simulation import checkpoints, errors, records
from fednest_tff.simulation.records import Row
from fednest_tff.structures import Value

# What is trained: a process, or what drives one round by round.
Process: TypeAlias = tff.learning.templates.LearningProcess | Driver
# What `signal.signal` returns: a function, a number, or nothing.
_Handler: TypeAlias = (
    Callable[[int, types.FrameType | None], object] | int | None
)


class Trial(NamedTuple):
  """What one seed of an experiment is made of.

  Attributes:
    build: From a method's name to its process.
    cohort: From an epoch (1, 2, ...) to the datasets of its clients; the same
      whenever it is asked.
    evaluate: From what a process has learnt (`get_model_weights`) to numbers.
    cohort_size: How many clients take part in an epoch.
  """

  build: Callable[[str], Process]
  cohort: Callable[[int], Sequence[tf.data.Dataset]]
  evaluate: Callable[[Value], dict[str, float]]
  cohort_size: int


class _Watched:
  """A process for TFF's loop that remembers its last state.

  It also turns an error of `next` about something that is not finite into a
  `NonFiniteError`.
  """

  def __init__(self, process: Process):
    self._process = process
    self.state: Value = None
    self.epoch = 0

  def initialize(self) -> Value:
    return self._process.initialize()

  def next(
      self, state: Value, cohort: Sequence[tf.data.Dataset]
  ) -> tuple[Value, Value]:
    try:
      output = self._process.next(state, cohort)
    except tf.errors.InvalidArgumentError as error:
      reason = _not_finite(error)
      if reason is None:
        raise
      raise errors.NonFiniteError(f'epoch {self.epoch}: {reason}') from error
    self.state = output.state
    return output.state, output.metrics


def _not_finite(error: tf.errors.OpError) -> str | None:
  """The line of `error` that tells what is not finite."""
  for line in error.message.splitlines():
    if 'not finite' in line or 'Inf' in line or 'NaN' in line:
      return line.split(' : Tensor had')[0].strip()
  return None


class _Signals:
  """Notes SIGINT and SIGTERM instead of stopping in the middle of an epoch.

  A second one stops at once.
  """

  def __init__(self) -> None:
    self.received: int | None = None
    self._previous: dict[int, _Handler] = {}

  def __enter__(self) -> '_Signals':
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGINT, signal.SIGTERM):
        self._previous[number] = signal.signal(number, self._note)
    return self

  def _note(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    if self.received is not None:
      raise KeyboardInterrupt
    self.received = number

  def __exit__(self, *error: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
  """The loop that TFF's training loop will ask for."""
  before: asyncio.AbstractEventLoop | None
  try:
    before = asyncio.get_event_loop_policy().get_event_loop()
  except RuntimeError:
    before = None
  loop = asyncio.new_event_loop()
  asyncio.set_event_loop(loop)
  try:
    yield loop
  finally:
    loop.close()
    asyncio.set_event_loop(before)


def train(
    trial: Trial,
    method: str,
    epochs: int,
    directory: str,
    *,
    seed: int = 0,
    epochs_per_evaluation: int = 1,
    epochs_per_checkpoint: int = 10,
    title: str = '',
) -> list[Row]:
  """Runs one method to its last epoch, from where it stopped if it did.

  Args:
    trial: The problem, its data and its evaluation.
    method: What `trial.build` is asked for.
    epochs: K.
    directory: Where `metrics.csv`, `checkpoints/` and `tensorboard/` go.
    seed: The seed of the trial, for the records.
    epochs_per_evaluation: How often the evaluation runs. It also does at the
      end.
    epochs_per_checkpoint: How often the state is saved. It is also saved at the
      end, and when a signal asks the run to stop.
    title: What the progress bar says.

  Returns:
    The rows of `metrics.csv`.

  Raises:
    NonFiniteError: If something is not finite, after recording it.
    StoppedError: After SIGINT or SIGTERM, at the end of the epoch.
    RunError: If a file cannot be written.
  """
  with errors.file_errors(directory):
    checkpoints.check_states(directory)
  process = trial.build(method)
  watched = _Watched(process)
  with errors.file_errors(directory):
    recorder = records.Recorder(
        directory,
        {'method': method, 'seed': seed},
        # What drives a process round by round has the process itself.
        communication_cost(getattr(process, 'process', process)),
        trial.cohort_size,
    )
  manager = checkpoints.Checkpoints(directory, recorder.last_epoch)
  with (
      _event_loop() as loop,
      _Signals() as signals,
      tqdm.tqdm(
          total=epochs,
          desc=title or method,
          unit='epoch',
          disable=not sys.stderr.isatty(),
          leave=False,
      ) as progress,
  ):

    def stop_if_asked(epoch: int) -> None:
      if signals.received is None:
        return
      if watched.state is not None:
        loop.run_until_complete(manager.save(watched.state, epoch))
      raise errors.StoppedError(
          f'stopped after epoch {epoch} of {epochs}; run the same command again'
          ' to go on',
          signals.received,
      )

    def cohort(epoch: int) -> Sequence[tf.data.Dataset]:
      progress.update(epoch - 1 - progress.n)
      stop_if_asked(epoch - 1)
      watched.epoch = epoch
      return trial.cohort(epoch)

    def evaluate(state: Value, epoch: int) -> dict[str, float]:
      if epoch % epochs_per_evaluation and epoch != epochs:
        return {}
      return trial.evaluate(process.get_model_weights(state))

    state = tff.simulation.run_training_process(
        watched,
        cohort,
        epochs,
        evaluation_fn=evaluate,
        evaluation_selection_fn=lambda epoch: epoch,
        program_state_manager=manager,
        rounds_per_saving_program_state=epochs_per_checkpoint,
        metrics_managers=[recorder],
    )
    loop.run_until_complete(manager.save(state, epochs))
    # Or else a signal in the last epoch would not keep the next run from
    # starting.
    stop_if_asked(epochs)
  return records.read_rows(recorder.path)
