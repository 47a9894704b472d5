r"""Runs what is behind the paper's figures, draws them, and judges its claims.

  python -m experiments.reproduce --figure=all --preset=quick
  python -m experiments.reproduce --figure=2a,4 --preset=paper \
      --data_dir=DIR --output_dir=outputs/paper

Runs are shared between figures and resumed. Writes the figures, `claims.json`
and `claims.md`. `theory` measures what the theorems say, `code` what changes
where the authors' code differs from the paper (`differences.md`).
"""

import json
import os
import platform
import sys

from absl import flags, logging
import tensorflow_federated as tff
import tqdm

from experiments import program, runs, runtimes
from experiments import settings as settings_lib
from experiments.reproduce import (
    claims,
    differences,
    figures,
    sets,
    theory,
)
from fednest_tff import simulation

FIGURES = (*sets.FIGURES, 'theory', 'code')
FLAGS = flags.FLAGS
_SPREAD = 'Means ± standard deviations over seeds.'
_SHARED = ('data_dir', 'output_dir', 'seeds', 'epochs')


def define_flags(values: flags.FlagValues = FLAGS) -> None:
  """Defines the flags; four are those of the experiments."""
  flags.DEFINE_list(
      'figure', ['all'], f'Some of {", ".join(FIGURES)}, or all.', values
  )
  # Not the flag of the single experiments.
  flags.DEFINE_enum(
      'preset', 'quick', sets.PRESETS, 'How large.', values,
      allow_override=True,
  )
  for name in _SHARED:
    if values is FLAGS:
      FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
    else:
      values[name] = FLAGS[name]


def _chosen() -> list[str]:
  known = sets.TUNED_FIGURES if FLAGS.preset == 'tuned' else FIGURES
  if FLAGS.figure == ['all']:
    return list(known)
  for name in FLAGS.figure:
    if name not in known:
      raise settings_lib.SettingsError(
          f'--figure={name} is none of {", ".join(known)}, all, with'
          f' --preset={FLAGS.preset}'
      )
  return FLAGS.figure


def _preset() -> sets.Preset:
  needs_data = FLAGS.preset != 'quick' and any(
      name[0] in '2356c' for name in _chosen()
  )
  if needs_data and FLAGS.data_dir is None:
    raise settings_lib.SettingsError(
        f'--preset={FLAGS.preset} needs --data_dir with the four MNIST files'
    )
  preset = sets.make_preset(FLAGS.preset, FLAGS.data_dir, FLAGS.seeds)
  if FLAGS.epochs is not None:
    epochs = dict(epochs=FLAGS.epochs)
    preset = preset._replace(
        hyper=preset.hyper | epochs,
        tuning=preset.tuning | epochs,
        saddle=preset.saddle | epochs,
        step_epochs=FLAGS.epochs,
    )
  return preset


def _run(run: sets.Run, preset: sets.Preset, folder: str) -> figures.Runs:
  """The rows of a run, one list per seed; shorter where it diverged."""
  given = run.given | dict(seeds=preset.seeds, epochs_per_checkpoint=50)
  path = os.path.join(folder, 'runs', run.name)
  settings = run.experiment.resolve(given)
  results, failures = runs.run_in(
      run.experiment, settings, path, quiet=True
  )
  for (_, seed), reason in failures.items():
    logging.warning('%s, seed %d: %s', run.name, seed, reason)
  return results[settings.method[0]]


def _made_by(preset: sets.Preset) -> str:
  """The command, the commit, the versions and the machine."""
  about = runs.about()
  versions = ', '.join(f'{k} {v}' for k, v in about['versions'].items())
  command = f'--figure={",".join(FLAGS.figure)} --preset={preset.name}'
  if FLAGS.epochs is not None:
    command += f' --epochs={FLAGS.epochs}'
  return (
      f'`python -m experiments.reproduce {command}`, {preset.seeds} seed(s);'
      f' commit {about["commit"]}; {versions}; {os.cpu_count()} cores,'
      f' {platform.machine()}'
  )


def _write_claims(found: list[dict], preset: sets.Preset, folder: str) -> None:
  """Writes the claims; those of figures not run now are kept."""
  path = os.path.join(folder, 'claims.json')
  before = []
  if os.path.exists(path):
    with open(path) as file:
      before = json.load(file)
  now = {claim['figure'] for claim in found}
  made_by = _made_by(preset)
  merged = [c for c in before if c['figure'] not in now] + [
      claim | dict(made_by=made_by) for claim in found
  ]
  merged.sort(key=lambda claim: FIGURES.index(claim['figure']))
  simulation.write_json(path, merged)
  text = claims.to_markdown(merged, f'# Claims\n\n{_SPREAD}')
  with open(os.path.join(folder, 'claims.md'), 'w') as file:
    file.write(text)


def _write_differences(
    rows: figures.Rows, preset: sets.Preset, folder: str
) -> str:
  runtimes.use_runtime(settings_lib.Settings(**settings_lib.COMMON))
  found = differences.run(rows)
  path = os.path.join(folder, 'differences.md')
  with open(path, 'w') as file:
    heading = f'# Differences\n\n{_SPREAD}\n\n- {_made_by(preset)}'
    file.write(differences.to_markdown(found, heading))
  return path


def reproduce(chosen: list[str], preset: sets.Preset, folder: str) -> None:
  """Runs, draws and judges some figures."""
  with simulation.file_errors(folder):
    os.makedirs(folder, exist_ok=True)
  plans = {
      name: sets.runs_of(name, preset) for name in chosen if name != 'theory'
  }
  results, rows = {}, {}
  unique = {run.name: run for plan in plans.values() for run in plan.values()}
  with tqdm.tqdm(
      total=len(unique), unit='run', disable=not sys.stderr.isatty()
  ) as progress:
    for name, run in unique.items():
      progress.set_description(name)
      results[name] = _run(run, preset, folder)
      progress.update()
  for name, plan in plans.items():
    rows[name] = {key: results[run.name] for key, run in plan.items()}
    if name in figures.DRAW:
      draw = figures.DRAW[name]
      print(draw(rows[name], os.path.join(folder, f'fig{name}')))
  found = claims.judge(rows)
  if 'theory' in chosen:
    runtimes.use_runtime(settings_lib.Settings(**settings_lib.COMMON))
    measured = theory.run(preset.name, preset.seeds)
    print(theory.draw(measured, os.path.join(folder, 'theory')))
    found += theory.claims(measured)
  if 'code' in chosen:
    print(_write_differences(rows['code'], preset, folder))
  _write_claims(found, preset, folder)
  for claim in found:
    print(f'{claim["verdict"]:13} {claim["figure"]:6} {claim["claim"]}')
  print(os.path.join(folder, 'claims.md'))


def main(argv: list[str]) -> int:
  """Runs the command; returns the exit code."""
  logging.set_verbosity(logging.WARNING)
  try:
    if len(argv) > 1:
      raise settings_lib.SettingsError(f'unexpected argument {argv[1]!r}')
    folder = FLAGS.output_dir or f'outputs/reproduce-{FLAGS.preset}'
    reproduce(_chosen(), _preset(), folder)
  except (Exception, KeyboardInterrupt) as error:
    return program.end_with(error)
  return 0


if __name__ == '__main__':
  tff.framework.set_default_context(runtimes.NoRuntime())
  define_flags()
  program.start(main)
