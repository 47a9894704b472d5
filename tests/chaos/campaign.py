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

from tests.chaos import damage
from tests.helpers.killable import without_seconds

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
_METHODS = (
    'fednest', 'lfednest', 'fednest_sgd', 'lfednest_svrg', 'lfednest_nonalt',
    'fedavg_s', 'simfbo', 'shrofbo', 'fedmsa', 'fedbioacc', 'penalty',
    'aggitd', 'fedmbo', 'personal',
)
_PLACES = (
    'flags', 'data', 'directory', 'tracing', 'recording', 'drawing', 'printing'
)
_MOMENTS = (
    '.fednest_tff', 'config.json', 'layout', 'manifest.json', 'summary.json',
    'plot.png', 'csv_half', 'csv_before', 'csv_after', 'checkpoint_half',
    'checkpoint_before', 'checkpoint_after', 'old_checkpoint',
)


class FindingError(Exception):
  """Something that must not happen."""


class Counts:
  """What the campaign has done and found; shared by its threads."""

  def __init__(self):
    self._lock = threading.Lock()
    self.done = collections.Counter()
    self.findings = []

  def add(self, what, number=1):
    with self._lock:
      self.done[what] += number

  def find(self, text):
    with self._lock:
      self.findings.append(text)

  def summary(self, seconds):
    """One line."""
    done = ', '.join(f'{n} {what}' for what, n in sorted(self.done.items()))
    return f'chaos: {seconds:.0f} s: {done}; {len(self.findings)} findings'


class Worker:
  """One thread's part of the campaign, with a launcher and draws of its own.

  The launcher is left open.
  """

  def __init__(self, root, seed, counts, launcher, quick=False):
    self._quick = quick
    self._root = pathlib.Path(root)
    self._seed = seed
    self._rng = random.Random(seed)
    self._counts = counts
    self._launcher = launcher
    self._references = {}
    self._number = 0
    self._log = None

  def _folder(self, name):
    self._number += 1
    folder = self._root / f'{name}_{self._number}'
    folder.mkdir(parents=True)
    self._log = folder / 'log.txt'
    return folder

  def _end(self, child):
    """Waits for a child; one that does not end is a finding."""
    hung = threading.Event()

    def kill():
      hung.set()
      os.kill(child, signal.SIGKILL)

    timer = threading.Timer(_SECONDS_TO_END, kill)
    timer.start()
    code = self._launcher.wait()
    timer.cancel()
    if hung.is_set():
      raise FindingError('hangs')
    return code

  def _start(self, command, **options):
    self._log.unlink(missing_ok=True)
    return self._launcher.start(command, self._log, **options)

  def _run(self, command, **options):
    return self._end(self._start(command, **options))

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
    if without_seconds(directory / 'metrics.csv') != reference:
      raise FindingError('another result, in silence')
    left = [
        str(path) for path in directory.rglob('*')
        if path.name.endswith('.tmp') or '.tmp.' in path.name
        or path.name.startswith('.earlier')
    ]
    if left:
      raise FindingError(f'leftovers: {left}')

  def _command(self, binary, method, directory):
    return [
        binary, *BINARIES[binary], *_COMMON, f'--method={method}',
        f'--output_dir={directory}',
    ]

  def _reference(self, binary, method):
    """The metrics of an undisturbed run; `None` if it is refused."""
    key = binary, method
    if key not in self._references:
      folder = self._folder('reference')
      code = self._run(self._command(*key, folder / 'run'))
      if code == 0:
        found = folder / 'run', without_seconds(folder / 'run' / 'metrics.csv')
      else:
        self._check_refused(code)
        self._counts.add('bad inputs')
        found = None
      self._references[key] = found
    return self._references[key]

  def _draw_reference(self):
    while True:
      binary, method = 'minimax', 'fedavg_s'
      if not self._quick:
        binary = self._rng.choice(list(BINARIES))
        method = self._rng.choice(_METHODS)
      found = self._reference(binary, method)
      if found is not None:
        return binary, method, *found

  def kill(self):
    """Kills a run some times; then it must end as if nothing had happened."""
    binary, method, _, reference = self._draw_reference()
    directory = self._folder('kill') / 'run'
    command = self._command(binary, method, directory)
    for _ in range(self._rng.randint(1, 4)):
      if self._rng.random() < 0.5:
        moment = self._rng.choice(_MOMENTS), self._rng.randint(1, 3)
        code = self._run(command, die_at=moment)
      else:
        child = self._start(command)
        time.sleep(self._rng.uniform(0, 3))
        try:
          os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
          pass
        code = self._end(child)
      if code == 0:
        break
      if code != -signal.SIGKILL:
        raise FindingError(f'code {code}: {self._printed()[-600:]}')
      self._counts.add('kills')
    code = self._run(command)
    if code != 0:
      raise FindingError(f'code {code}: {self._printed()[-600:]}')
    self._check_equal(directory, reference)

  def damage(self):
    """Damages a file; the run ends as it should, or is refused."""
    binary, method, finished, reference = self._draw_reference()
    directory = self._folder('damage') / 'run'
    command = self._command(binary, method, directory)
    if self._rng.random() < 0.5:
      shutil.copytree(finished, directory)
    else:
      moment = 'csv_after', self._rng.randint(2, _EPOCHS)
      if self._run(command, die_at=moment) != -signal.SIGKILL:
        raise FindingError('was not killed')
    path = self._rng.choice(damage.files_of(directory))
    kind = self._rng.choice(damage.KINDS)
    self._counts.add('damaged files')
    try:
      damage.damage(path, kind, self._rng)
      code = self._run(command)
      if code == 0:
        self._check_equal(directory, reference)
      else:
        self._check_refused(code)
        # Starting anew helps, unless the directory no longer looks like ours.
        code = self._run([*command, '--overwrite'])
        if code == 0:
          self._check_equal(directory, reference)
        else:
          self._check_refused(code)
    except FindingError as error:
      name = path.relative_to(directory)
      raise FindingError(f'{kind} {name}: {error}') from error

  def signal(self):
    """Sends a signal in some phase; one line, and the run goes on later."""
    binary, method, _, reference = self._draw_reference()
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
    binary, method, _, reference = self._draw_reference()
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

  def flags(self, count=40):
    """Bad flags."""
    self._counts.add('bad inputs', self._call('fuzz_flags', count))

  def api(self, count=20):
    """Bad arguments of functions."""
    self._counts.add('bad inputs', self._call('fuzz_api', count))

  def step(self):
    """One part of the campaign, drawn at random."""
    part, = self._rng.choices(
        [
            self.kill, self.damage, self.signal, self.full_disk, self.flags,
            self.api,
        ],
        weights=[8, 8, 2, 1, 1, 1],
    )
    try:
      part()
    except FindingError as error:
      self._counts.find(f'{part.__name__} (seed {self._seed}): {error}')
    for folder in self._root.glob('[dfks]*'):
      shutil.rmtree(folder)
