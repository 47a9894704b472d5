"""Checks the links between the pages, in `make lint`: files and headings exist.

  python docs/links.py
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
_LINK = r'!?\[[^\]]*\]\(([^)\s]+)\)'


def pages(root: pathlib.Path) -> list[pathlib.Path]:
  """The Markdown files of the project."""
  return [*sorted(root.glob('*.md')), *sorted((root / 'docs').rglob('*.md'))]


def _anchors(path: pathlib.Path) -> set[str]:
  headings = re.findall(r'^#+ (.*)$', path.read_text(), re.MULTILINE)
  return {
      re.sub(r'[^\w\- ]', '', heading.lower()).strip().replace(' ', '-')
      for heading in headings
  }


def broken(path: pathlib.Path) -> list[str]:
  """The links of a page that lead nowhere; those to the web are not tried."""
  text = re.sub(r'```.*?```', '', path.read_text(), flags=re.DOTALL)
  found = []
  for target in re.findall(_LINK, text):
    if re.match(r'https?://|mailto:', target):
      continue
    name, _, anchor = target.partition('#')
    there = (path.parent / name) if name else path
    if not there.exists() or (
        anchor and there.suffix == '.md' and anchor not in _anchors(there)
    ):
      found.append(target)
  return found


def main(root: pathlib.Path = ROOT) -> int:
  """Prints broken links; returns the exit code."""
  count = 0
  for path in pages(root):
    for target in broken(path):
      print(f'{path.relative_to(root)}: no {target}', file=sys.stderr)
      count += 1
  return 1 if count else 0


if __name__ == '__main__':
  sys.exit(main())
