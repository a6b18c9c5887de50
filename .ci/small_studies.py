"""Run studies small and report each, all in one process: their packages are imported once.

python .ci/small_studies.py configs/sweeps/digits_*.yaml
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from dsgdac_accel.cli import main

LOG = Path("runs/smoke.txt")


def succeeds(study: str) -> bool:
    """Return whether the study runs and is reported. What that prints goes to a file."""
    with LOG.open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        return main(["sweep", study, "--smoke", "--jobs", "2"]) == 0 == main(["report", study, "--smoke"])


if __name__ == "__main__":
    for study in sys.argv[1:]:
        begin, done = time.monotonic(), False
        try:
            done = succeeds(study)
        finally:
            if not done:
                print(LOG.read_text())
        if not done:
            sys.exit(f"{study} failed")
        print(f"{study}: {time.monotonic() - begin:.0f} s", flush=True)
