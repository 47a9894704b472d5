"""A run: a process over epochs, recorded, checkpointed, and resumed.

TFF's training loop does the work. Cohorts are a function of the epoch alone and
all randomness is in the state, so a run that was killed and started again ends
with the numbers of one that was not.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import os
import signal
import sys
import threading
import time
import types
from typing import NamedTuple, TypeAlias

from absl import logging
import tensorflow as tf
import tensorflow_federated as tff
import tqdm

from fednest_tff.federated.process import NestedState
from fednest_tff.runtime.communication import communication_cost
from fednest_tff.runtime.driver import Driver
from fednest_tff.simulation import checkpoints, errors, records, tables
from fednest_tff.simulation import weights as weights_lib
from fednest_tff.simulation.manifest import Manifest, digest
from fednest_tff.simulation.tables import Row
from fednest_tff.structures import Value

# What is trained: a process, or a driver that runs one round by round.
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
    fingerprint: A hash of the data that were read, so that a run does not go
      on with others; empty if all data are made from the seed.
  """

  build: Callable[[str], Process]
  cohort: Callable[[int], Sequence[tf.data.Dataset]]
  evaluate: Callable[[Value], dict[str, float]]
  cohort_size: int
  fingerprint: str = ''


class _Signals:
  """Notes signals instead of stopping in the middle of an epoch.

  A second one stops at once. Signals that the process ignores, as SIGHUP under
  nohup, stay ignored.
  """

  def __init__(self) -> None:
    self.received: int | None = None
    self._previous: dict[int, _Handler] = {}

  def start(self) -> None:
    """Begins to note signals; until then, earlier handlers receive them."""
    if self._previous:
      return
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
          self._previous[number] = signal.signal(number, self._note)

  def __enter__(self) -> '_Signals':
    return self

  def _note(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    if self.received is not None:
      raise errors.InterruptedRunError(number)
    self.received = number

  def __exit__(
      self,
      kind: type[BaseException] | None,
      error: BaseException | None,
      traceback: types.TracebackType | None,
  ) -> None:
    del kind, traceback
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous.clear()
    # Whoever catches the error may start another run.
    is_stop = isinstance(error, errors.StoppedError)
    if isinstance(error, Exception) and not is_stop:
      if self.received is not None:
        raise errors.StoppedError(
            f'stopped in an epoch that ended the run ({error}); run the same'
            ' command again to go on',
            self.received,
        ) from error


def _warn_of_other_steps(directory: str, now: Value, before: Value) -> None:
  """Warns if a run began with other step sizes than it has now.

  Args:
    directory: Of the run.
    now: The initial state of the process that was built.
    before: The state that the run goes on from.
  """
  if not isinstance(now, NestedState) or not isinstance(before, NestedState):
    return
  changes = [
      f'`{name}` was {float(before.hparams[name]):g} and is {float(value):g}'
      for name, value in now.hparams.items()
      if float(value) != float(before.hparams[name])
  ]
  if changes:
    logging.warning(
        '%r holds a run that began with other step sizes (%s). It goes on with'
        ' those; choose another directory for the new ones.',
        directory,
        ', '.join(changes),
    )


class _Watched:
  """A process for TFF's loop that remembers its last state.

  It also turns an error of `next` about something that is not finite into a
  `NonFiniteError`.
  """

  def __init__(self, process: Process, signals: _Signals):
    self._process = process
    self._signals = signals
    self.state: Value = None
    self.epoch = 0
    self.begin = time.monotonic()
    self._has_warned = False

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
      if not any(map(_has_examples, cohort)):
        raise _without_examples(self.epoch, cohort) from error
      raise errors.NonFiniteError(f'epoch {self.epoch}: {reason}') from error
    if dict(output.metrics).get('num_examples') == 0:
      raise _without_examples(self.epoch, cohort)
    # From now on there is something to save.
    self.state = output.state
    self._signals.start()
    self._warn(output.metrics)
    seconds = time.monotonic() - self.begin
    return output.state, {**output.metrics, records.SECONDS: seconds}



  def _warn(self, metrics: Value) -> None:
    """Says once that conjugate gradient cannot go on: x would stay in place."""
    smallest = dict(metrics).get('ihgp_smallest_curvature', 0)
    if smallest < 0 and not self._has_warned:
      self._has_warned = True
      logging.warning(
          'Epoch %d: the inner loss has negative curvature (%.3g) along a'
          ' direction of FedIHGP, so it is not strongly convex there. Conjugate'
          ' gradient stops at it, and a Neumann series grows: add a ridge to'
          ' the inner loss; see docs/tuning.md.',
          self.epoch,
          smallest,
      )


def _has_examples(client: object) -> bool:
  if isinstance(client, tf.data.Dataset):
    return next(iter(client.take(1)), None) is not None
  return True


def _without_examples(
    epoch: int, cohort: Sequence[object]
) -> errors.RunError:
  return errors.RunError(
      f'epoch {epoch}: none of the {len(cohort)} clients of its cohort has an'
      ' example'
  )


def _not_finite(error: tf.errors.OpError) -> str | None:
  """The line of `error` that tells what is not finite."""
  for line in error.message.splitlines():
    if 'not finite' in line or 'Inf' in line or 'NaN' in line:
      return line.split(' : Tensor had')[0].strip()
  return None


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
  """Makes the asyncio event loop in which TFF's training loop will run."""
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


def _read_table(directory: str, manifest: Manifest) -> tables.Table:
  """The metrics so far; what is damaged comes from the last checkpoint."""
  table, damage = tables.read_table(directory, manifest)
  if not damage:
    return table
  backup = checkpoints.newest_table(directory)
  if backup is None:
    raise errors.RunError(
        f'{damage}, and there is no checkpoint to restore it from: choose'
        ' another `output_dir`, or `overwrite` to start anew'
    )
  if len(backup.rows) < len(table.rows):
    backup = table
  logging.warning(
      '%s; the rows up to epoch %d are restored, those after it are computed'
      ' again.',
      damage,
      len(backup.rows),
  )
  return backup


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

  A directory belongs to one problem with its options. If step sizes have
  changed since the run began, there is a warning, and the run goes on with its
  own. No other change is noticed; `RunDirectory` refuses other settings.

  Args:
    trial: The problem, its data and its evaluation.
    method: What `trial.build` is asked for.
    epochs: K.
    directory: Where `metrics.csv`, `weights.npz` (after the last epoch; see
      `load_weights`), `checkpoints/` and `tensorboard/` go. It is made.
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
    StoppedError: After SIGINT, SIGTERM or SIGHUP, at the end of the epoch. In
      the first epoch after the start there is nothing to save yet, and they do
      what they did before.
    RunError: If a file cannot be written, or is damaged beyond repair.
  """
  def is_evaluated(epoch: int) -> bool:
    return epoch % epochs_per_evaluation == 0 or epoch == epochs

  checkpoints.check_states(directory)
  with errors.file_errors(directory, 'read'):
    manifest = Manifest(directory)
  table = _read_table(directory, manifest)
  if len(table.rows) == epochs != table.last_evaluated:
    # The run was to go further when this epoch, now the last, was computed.
    del table.rows[-1]
  process = trial.build(method)
  with errors.file_errors(directory):
    recorder = records.Recorder(
        directory,
        {'method': method, 'seed': seed},
        # A driver has its process as an attribute.
        communication_cost(getattr(process, 'process', process)),
        trial.cohort_size,
        table.without_evaluation(is_evaluated),
        manifest,
    )
  manager = checkpoints.Checkpoints(
      directory,
      recorder.last_epoch,
      manifest,
      lambda: recorder.table,
      functools.partial(_warn_of_other_steps, directory),
  )
  signals = _Signals()
  watched = _Watched(process, signals)
  with (
      _event_loop() as loop,
      signals,
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
      watched.epoch, watched.begin = epoch, time.monotonic()
      clients = trial.cohort(epoch)
      if not clients:
        raise _without_examples(epoch, clients)
      return clients

    def evaluate(state: Value, epoch: int) -> dict[str, float]:
      if not is_evaluated(epoch):
        return {}
      recorder.table.last_evaluated = epoch
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
    content = weights_lib.save_weights(
        os.path.join(directory, weights_lib.WEIGHTS),
        process.get_model_weights(state),
    )
    manifest.weights = epochs, digest(content)
    with errors.file_errors(directory):
      manifest.write()
    # Also after the last epoch, so that a signal keeps the next run from
    # starting.
    stop_if_asked(epochs)
  return tables.read_rows(recorder.path)
