"""What is known of a method before it has run, kept in a file.

Counting what clients compute takes some epochs: it is done once for each method
of a comparison.
"""

from collections.abc import Callable
import os
from typing import Any, cast

from fednest_tff.simulation import errors, files, search
from fednest_tff.simulation.client_work import ClientWork
from fednest_tff.simulation.contest import Entry
from fednest_tff.simulation.leaderboard import Facts
from fednest_tff.simulation.tuned_runs import TunedRuns, set_hparams, tunable

_SUFFIX = '.json'


def _identity(entry: Entry) -> list[object]:
  """What decides the facts of an entry, as JSON has it."""
  own = [] if entry.steps is None else [entry.steps.as_lists()]
  return [entry.method, {**entry.fixed}, *own]


def _find(
    entry: Entry, runs: TunedRuns, steps: search.StepRanges
) -> dict[str, object]:
  state = runs.process.initialize()
  set_hparams(runs.process, state, entry.fixed)  # Refuses unknown ones.
  known = tunable(runs.process).get_hparams(state)
  space = {**search.space_of(known, entry.steps or steps), **entry.fixed}
  return {
      'entry': _identity(entry),
      'rounds_per_epoch': runs.rounds_per_epoch,
      'space': {
          name: list(value) if isinstance(value, search.Range) else value
          for name, value in space.items()
      },
      'work': runs.client_work._asdict(),
  }


def known(folder: str) -> set[str]:
  """The methods whose facts are in a folder, by the names of their files."""
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return {
      name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)
  }


def find_or_read(
    path: str,
    entry: Entry,
    make_runs: Callable[[], TunedRuns],
    steps: search.StepRanges,
) -> Facts:
  """The facts of a method, from its file or else found and written there.

  Args:
    path: Of the JSON file.
    entry: The method.
    make_runs: Builds the method; called only if there is no file.
    steps: The step sizes to search for the problem.

  Returns:
    The facts.

  Raises:
    RunError: If the file is damaged or of another method, or cannot be read or
      written.
  """
  if not os.path.exists(path):
    found = _find(entry, make_runs(), steps)
    with errors.file_errors(path):
      os.makedirs(os.path.dirname(path), exist_ok=True)
      files.write_json(path, found)
  try:
    with errors.file_errors(path, 'read'):
      content = cast(Any, files.read_json(path))
    method, fixed, *own = content['entry']
    facts = Facts(
        entry.label,
        int(content['rounds_per_epoch']),
        ClientWork(**content['work']),
        {
            name: search.Range(*value) if isinstance(value, list) else value
            for name, value in content['space'].items()
        },
    )
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise errors.RunError(
        f'{path!r} is damaged: delete it, and it is made again'
    ) from error
  if (method, fixed) != (entry.method, entry.fixed):
    raise errors.RunError(
        f'{path!r} is of the method {method!r} with {fixed or "nothing"} fixed,'
        f' not of {entry.method!r} with {entry.fixed or "nothing"}: choose'
        ' another name'
    )
  if content['entry'] != _identity(entry):
    raise errors.RunError(
        f'{path!r} is of {method!r} with the step ranges'
        f' {own[0] if own else "of the contest"}, which are others now: choose'
        ' another name'
    )
  return facts
