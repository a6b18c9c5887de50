"""A process of a launch: makes one check after the other and writes each answer to its file.

    python -m tasks.gpu.worker PLAN

`tasks.gpu.launching` starts it and writes the plan. The process ends after the first check that raises an error or
leaves a process group out of step: GPU and group may be unusable then.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from tasks.gpu.bench import Bench
from tasks.gpu.check import Check, answer_of


class Answers:
    """The file with the lines of this process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"answers_{os.environ.get('RANK', '0')}"

    def write(self, **line: Any) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def leave(self) -> NoReturn:
        """End this process on behalf of a check, without a word to the other ones."""
        self.write(left=True)
        os._exit(0)


def _end_with(parent: int) -> None:
    """End this process when `tasks/gpu_check.py` is gone, whatever the main thread does."""

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(parent, 0)
                time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Make the checks of the plan."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _end_with(plan["parent"])
    answers = Answers(Path(sys.argv[1]).parent)
    answers.write(pid=os.getpid())
    checks: dict[str, Check] = {check.name: check for check in importlib.import_module(plan["module"]).CHECKS}
    if not plan["cuda"]:
        torch.set_num_threads(1)
    bench = Bench(plan["cuda"], answers.leave)
    answers.write(ready=True)
    for name in plan["checks"]:
        answer = answer_of(checks[name], bench)
        answers.write(check=name, **asdict(answer))
        if answer.spent:
            break
    sys.stdout.flush()
    os._exit(0)  # the teardown of a process group that lost a worker can hang or abort


if __name__ == "__main__":
    main()
