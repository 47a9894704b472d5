"""The campaign: kills, damaged files, bad inputs, signals, full disks.

Everything is drawn from a seed. A run that was disturbed must end like one that
was not, or be refused in one line; whatever else happens is a finding.
"""

import collections
import os
import pathlib
import random
import shutil
import signal
import threading
import time
import traceback

from tests.chaos import damage, references
from tests.chaos.references import FindingError
from tests.helpers import killable

_SECONDS_TO_END = 300
_EPOCHS = 8
_COMMON = [
    '--nocompiled', f'--epochs={_EPOCHS}', '--epochs_per_checkpoint=2',
    '--epochs_per_evaluation=3',
]
# Few images for each of them.
_IMAGES = ['--num_clients=40', '--clients_per_round=2']
_SMALL = ['--num_clients=3', '--dimension=2', '--clients_per_round=2']
# Small settings of the binaries.
BINARIES = {
    'minimax': _SMALL,
    'compositional': _SMALL,
    'single_level': _IMAGES,
    'hyper_representation': [*_IMAGES, '--hidden=4'],
    'loss_tuning': _IMAGES,
    'personalization': [*_IMAGES, '--hidden=4'],
    'hyper_cleaning': _IMAGES,
}
# Those that are traced in half the time are drawn twice as often.
_SHARES = dict.fromkeys(BINARIES, 1) | dict(
    minimax=2, compositional=2, single_level=2
)
_METHODS = (
    'fednest', 'lfednest', 'fednest_sgd', 'lfednest_svrg', 'lfednest_nonalt',
    'fedavg_s', 'simfbo', 'shrofbo', 'fedmsa', 'fedbioacc', 'penalty',
    'aggitd', 'fedmbo', 'personal',
    # Several runs in one directory.
    'lfednest_nonalt,fedavg_s',
)
_PLACES = (
    'flags', 'data', 'directory', 'tracing', 'recording', 'drawing', 'printing'
)
# Moments inside of writes: those that come once in a run, in the beginning and
# at the end, and those that come in its epochs.
_FIRST = ('.fednest_tff', 'config.json', 'layout')
_LAST = ('weights.npz', 'summary.json', 'plot.png')
_OFTEN = (
    'manifest.json', 'csv_half', 'csv_before', 'csv_after', 'checkpoint_half',
    'checkpoint_before', 'checkpoint_after', 'old_checkpoint',
)
# About the part of a run's time that it takes to start and be traced, that
# its other epochs take, and that a run takes which has ended already.
_START, _EPOCHS_PART, _AGAIN = 0.6, 0.15, 0.15
# How often each part is drawn. A kill is one run that is killed 4 to 11 times.
_WEIGHTS = dict(kill=5, damage=12, signal=1, full_disk=0.5, flags=0.4, api=0.4)


class Counts:
  """What the campaign has done and found; shared by its threads."""

  def __init__(self):
    self._lock = threading.Lock()
    self.done = collections.Counter()
    self.findings = []
    self._disturbed = set()

  def add(self, what, number=1):
    with self._lock:
      self.done[what] += number

  def disturb(self, binary, method):
    """Notes whose run is killed, damaged and so on."""
    with self._lock:
      self._disturbed.add((binary, method))

  def find(self, text):
    with self._lock:
      self.findings.append(text)

  def summary(self, seconds):
    """One line."""
    done = ', '.join(f'{n} {what}' for what, n in sorted(self.done.items()))
    with self._lock:
      binaries, methods = (
          len({pair[k] for pair in self._disturbed}) for k in range(2)
      )
      pairs = len(self._disturbed)
    return (
        f'chaos: {seconds:.0f} s: {done}; {binaries} binaries, {methods}'
        f' methods, {pairs} pairs; {len(self.findings)} findings'
    )


class Worker:
  """One thread's part of the campaign, with draws of its own.

  A launcher that is given is not closed. References may be shared by workers.
  """

  def __init__(
      self, root, seed, counts, quick=False, launcher=None, shared=None
  ):
    self._quick = quick
    self._root = pathlib.Path(root)
    self._seed = seed
    self._rng = random.Random(seed)
    self._counts = counts
    self._has_own_launcher = launcher is None
    self._launcher = launcher or killable.Launcher()
    self._references = shared or references.References()
    self._number = 0
    self._log = None

  def close(self):
    if self._has_own_launcher:
      self._launcher.close()

  def _folder(self, name):
    self._number += 1
    folder = self._root / f'{name}_{self._number}'
    folder.mkdir(parents=True)
    self._log = folder / 'log.txt'
    return folder

  def _end(self, child, kill_after=None):
    """Waits for a child; one that does not end is a finding."""
    timed_out = threading.Event()

    def kill():
      timed_out.set()
      try:
        os.kill(child, signal.SIGKILL)
      except ProcessLookupError:
        pass

    timer = threading.Timer(
        _SECONDS_TO_END if kill_after is None else kill_after, kill
    )
    timer.start()
    code = self._launcher.wait()
    timer.cancel()
    if timed_out.is_set() and kill_after is None:
      raise FindingError('hangs')
    return code

  def _run(self, command, kill_after=None, **options):
    self._log.unlink(missing_ok=True)
    child = self._launcher.start(command, self._log, **options)
    return self._end(child, kill_after)

  def _printed(self):
    text = self._log.read_text(errors='replace')
    if 'Traceback' in text:
      raise FindingError(f'traceback: {text[-600:]}')
    return text

  def _check_refused(self, code):
    """One line that says why; warnings of damage may precede it."""
    lines = [
        line for line in self._printed().splitlines()
        if not line.startswith('W')
    ]
    if code != 2 or len(lines) != 1 or not lines[0].startswith('error: '):
      raise FindingError(f'code {code}: {self._printed()[-600:]}')

  def _check_equal(self, directory, reference):
    self._printed()
    reference.check(directory)

  def _command(self, binary, method, directory):
    return [
        binary, *BINARIES[binary], *_COMMON, f'--method={method}',
        f'--output_dir={directory}',
    ]

  def _make_reference(self, binary, method):
    """An undisturbed run; `None` if it is refused."""
    folder = self._folder('reference')
    directory, copies = folder / 'run', folder / 'copies'
    begin = time.monotonic()
    code = self._run(
        self._command(binary, method, directory),
        copies=(str(directory), str(copies)),
    )
    if code == 0:
      seconds = time.monotonic() - begin
      return references.read(directory, copies, seconds)
    self._check_refused(code)
    self._counts.add('bad inputs')
    return None

  def _draw_reference(self):
    """A binary, a method and their undisturbed run."""
    while True:
      key = 'minimax', 'fedavg_s'
      if not self._quick:
        binary, = self._rng.choices(list(_SHARES), list(_SHARES.values()))
        key = binary, self._rng.choice(_METHODS)
      found = self._references.get(key, self._make_reference)
      if found is not None:
        self._counts.disturb(*key)
        return *key, found

  def _kills(self, seconds):
    """How a run that takes `seconds` is killed, from its start to its end.

    Most of the time is tracing. So that epochs and the end are killed as often,
    each has its share; what costs little, such as the end, is killed more.

    Args:
      seconds: That the undisturbed run took.

    Yields:
      The phase, flags, and options of `_run`.
    """
    rng = self._rng
    for _ in range(rng.randint(1, 3)):
      yield 'at the start', [], rng.choice([
          dict(die_at=(rng.choice(_FIRST), 1)),
          dict(kill_after=seconds * rng.uniform(0, _START)),
      ])
    for _ in range(rng.randint(1, 3)):
      call = rng.randint(1, 3)
      later = seconds * rng.uniform(0.001, _EPOCHS_PART)
      yield 'in epochs', [], rng.choice([
          dict(die_at=(rng.choice(_OFTEN), call)),
          dict(die_at=('csv_after', call, later)),
      ])
    yield 'at the end', [], dict(die_at=(rng.choice(_LAST), 1))
    for _ in range(rng.randint(1, 4)):
      # Also while it starts anew: then the earlier run comes back.
      moment = rng.choice([
          *((name, 1) for name in _FIRST), ('.earlier', rng.randint(1, 9))
      ])
      yield rng.choice([
          ('at the end', [], dict(die_at=(rng.choice(_LAST[1:]), 1))),
          ('at the end', [], dict(kill_after=seconds * rng.uniform(0, _AGAIN))),
          ('anew', ['--overwrite'], dict(die_at=moment)),
      ])

  def kill(self):
    """Kills a run some times; then it must end as if nothing had happened."""
    binary, method, reference = self._draw_reference()
    directory = self._folder('kill') / 'run'
    command = self._command(binary, method, directory)
    history = [f'{binary} {method}']
    try:
      for phase, anew, options in self._kills(reference.seconds):
        history.append(f'{phase} {options}')
        code = self._run([*command, *anew], **options)
        if code in (-signal.SIGKILL, -signal.SIGALRM):
          self._counts.add('kills')
          self._counts.add(f'kills {phase}')
        elif code == 0:
          self._check_equal(directory, reference)
        else:
          raise FindingError(f'code {code}: {self._printed()[-600:]}')
      code = self._run(command)
      if code != 0:
        raise FindingError(f'code {code}: {self._printed()[-600:]}')
      self._check_equal(directory, reference)
    except FindingError as error:
      raise FindingError(f'{"; ".join(history)}: {error}') from error

  def damage(self):
    """Damages files; the run ends as it should, or is refused."""
    binary, method, reference = self._draw_reference()
    directory = self._folder('damage') / 'run'
    command = self._command(binary, method, directory)
    source = reference.directory
    if self._rng.random() < 0.5:
      # As if it had been killed.
      source = self._rng.choice(sorted(reference.copies.iterdir()))
    shutil.copytree(source, directory)
    done = []
    for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
      path = self._rng.choice(damage.files_of(directory))
      kind = self._rng.choice(damage.KINDS)
      damage.damage(path, kind, self._rng)
      done.append(f'{kind} {path.relative_to(directory)}')
      self._counts.add('damaged files')
    try:
      code = self._run(command)
      if code != 0:
        self._check_refused(code)
        # Starting anew helps, unless the directory no longer looks like ours.
        code = self._run([*command, '--overwrite'])
      if code == 0:
        self._check_equal(directory, reference)
      else:
        self._check_refused(code)
    except FindingError as error:
      where = f'{binary} {method} {source.name}: {", ".join(done)}'
      raise FindingError(f'{where}: {error}') from error

  def signal(self):
    """Sends a signal in some phase; one line, and the run goes on later."""
    binary, method, reference = self._draw_reference()
    directory = self._folder('signal') / 'run'
    command = self._command(binary, method, directory)
    number = self._rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    place = self._rng.choice(_PLACES)
    call = self._rng.randint(1, 5) if place == 'recording' else 1
    code = self._run(
        command, at=(place, call, number, str(directory.parent / 'marker'))
    )
    if code != 128 + number or self._printed().count('\n') != 1:
      raise FindingError(f'{place}: code {code}: {self._printed()[-600:]}')
    self._counts.add('signals')
    if self._run(command) != 0:
      raise FindingError(f'{place}: {self._printed()[-600:]}')
    self._check_equal(directory, reference)

  def full_disk(self):
    """Lets no file grow beyond some size; later there is space."""
    binary, method, reference = self._draw_reference()
    directory = self._folder('full') / 'run'
    command = self._command(binary, method, directory)
    limit = int(2 ** self._rng.uniform(0, 16))
    code = self._run(command, largest_file=limit)
    if code != 0:
      # The log has its limit, too: the line may be cut.
      if code != 2:
        raise FindingError(f'{limit} bytes: code {code}: {self._printed()}')
      if self._run(command) != 0:
        raise FindingError(f'{limit} bytes, then: {self._printed()[-600:]}')
    self._counts.add('full disks')
    self._check_equal(directory, reference)

  def _call(self, name, count):
    self._folder(name)
    seed = self._rng.randrange(2**31)
    child = self._launcher.call(
        f'tests.chaos.inputs:{name}', [seed, count], self._log
    )
    code = self._end(child)
    text = self._log.read_text(errors='replace')
    if code != 0:
      raise FindingError(f'{name}({seed}, {count}): {text[-1500:]}')
    return int(text.splitlines()[-1])

  def flags(self, count=60):
    """Bad flags."""
    self._counts.add('bad inputs', self._call('fuzz_flags', count))

  def api(self, count=40):
    """Bad arguments of functions."""
    self._counts.add('bad inputs', self._call('fuzz_api', count))

  def step(self):
    """One part of the campaign, drawn at random."""
    name, = self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    try:
      getattr(self, name)()
    except FindingError as error:
      self._counts.find(f'{name} (seed {self._seed}): {error}')
    except Exception:  # A mistake of the campaign is one, too.
      self._counts.find(f'{name} (seed {self._seed}): {traceback.format_exc()}')
    for folder in self._root.glob('[dfks]*'):
      shutil.rmtree(folder)
