"""`python -m tests.chaos`: the campaign for some minutes, and what it found.

  python -m tests.chaos --minutes=60 --seed=0 --jobs=2

The last line has the counts; the exit code is 1 if there are findings.
"""

import argparse
import pathlib
import resource
import sys
import tempfile
import threading
import time

from tests.chaos import campaign, references


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--minutes', type=float, default=60)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--jobs', type=int, default=2)
  parser.add_argument(
      '--quick', action='store_true', help='Only the binary that starts first.'
  )
  chosen = parser.parse_args()
  counts, begin = campaign.Counts(), time.monotonic()
  shared = references.References()
  end = begin + 60 * chosen.minutes

  def work(k):
    worker = campaign.Worker(
        pathlib.Path(root) / str(k),
        1000 * chosen.seed + k,
        counts,
        chosen.quick,
        shared=shared,
    )
    while time.monotonic() < end:
      worker.step()
    worker.close()

  with tempfile.TemporaryDirectory(prefix='chaos-') as root:
    threads = [
        threading.Thread(target=work, args=(k,)) for k in range(chosen.jobs)
    ]
    for thread in threads:
      thread.start()
    shown = 0
    while any(thread.is_alive() for thread in threads):
      threads[0].join(timeout=30)
      threads[-1].join(timeout=1)
      for finding in counts.findings[shown:]:
        print(finding, flush=True)
        shown += 1
      print(counts.summary(time.monotonic() - begin), flush=True)
  # Others may have kept the cores busy.
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  print(f'{used.ru_utime + used.ru_stime:.0f} s of processor time')
  print(counts.summary(time.monotonic() - begin))
  return 1 if counts.findings else 0


if __name__ == '__main__':
  sys.exit(main())
