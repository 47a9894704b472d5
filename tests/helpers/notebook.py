"""Runs a notebook without Jupyter, and writes what its cells show.

  python -m tests.helpers.notebook docs/hyper_cleaning.ipynb

runs it and stores the outputs in it.
"""

import ast
import base64
import contextlib
import io
import json
import pathlib
import sys

from matplotlib.figure import Figure


def _run_cell(source, names):
  """Runs a cell; returns what it prints and its last expression, if any."""
  tree = ast.parse(source)
  last = None
  if tree.body and isinstance(tree.body[-1], ast.Expr):
    last = ast.Expression(tree.body.pop().value)
  shown = None
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec(compile(tree, 'notebook', 'exec'), names)
    if last is not None:
      shown = eval(compile(last, 'notebook', 'eval'), names)
  return printed.getvalue(), shown


def _outputs(printed, shown):
  found = []
  if printed:
    found.append(
        dict(output_type='stream', name='stdout', text=printed.splitlines(True))
    )
  if shown is not None:
    content = {'text/plain': [repr(shown)]}
    if isinstance(shown, Figure):
      file = io.BytesIO()
      shown.savefig(file, format='png', dpi=90)
      content['image/png'] = base64.b64encode(file.getvalue()).decode()
      content['text/plain'] = ['<Figure>']
    found.append(
        dict(output_type='display_data', data=content, metadata={})
    )
  return found


def run(notebook, names):
  """Runs all cells in `names`, and puts their outputs into the notebook."""
  count = 0
  for cell in notebook['cells']:
    if cell['cell_type'] == 'code':
      count += 1
      cell['outputs'] = _outputs(*_run_cell(''.join(cell['source']), names))
      cell['execution_count'] = count
  return notebook


if __name__ == '__main__':
  path = pathlib.Path(sys.argv[1])
  path.write_text(
      json.dumps(run(json.loads(path.read_text()), {}), indent=1) + '\n'
  )
