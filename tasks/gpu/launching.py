"""Starts the processes of checks, collects their answers, and ends those that hang.

Checks run in processes of their own, because one that hangs in the GPU's driver or in NCCL can only be killed. One
launch makes many checks. After a check that hangs, raises an error or loses a worker, a new launch makes the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.gpu.check import Answer, Check, Part, Status

START_SECONDS = 60.0
"""For processes to start, import everything and find their GPU."""
_GRACE_SECONDS = 3.0
"""For the other processes to answer once one of them cannot be used any more."""
_ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """The result of one check."""

    name: str
    part: Part
    status: Status
    figure: str
    seconds: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    details: str = ""


@dataclass(frozen=True)
class Machine:
    """The processes and devices that checks may use here."""

    cuda: bool
    """Whether they run on GPUs, or on the CPU."""
    cards: int
    """GPUs that torch sees."""

    def reason_to_skip(self, check: Check) -> str:
        """Return why a check says nothing here; empty if it does."""
        if check.cuda_only and not self.cuda:
            return f"needs a GPU: {check.cuda_only}"
        if self.cuda and check.part == "2" and self.cards < 2:
            return f"needs 2 GPUs; torch sees {self.cards}. Try it with --part 2 --device cpu"
        return ""

    def processes(self, check: Check) -> int:
        """Number of processes of a check."""
        if check.processes:
            return check.processes
        if check.part == "1":
            return 1
        return min(self.cards, 4) // 2 * 2 if self.cuda else 2


def outcomes(checks: Sequence[Check], machine: Machine, module: str, deadline: float) -> Generator[Outcome]:
    """Make checks and yield each result as soon as it is there; first those that say nothing on this machine.

    Args:
        checks: in order.
        machine: what they may use.
        module: where their processes find them, as `CHECKS`.
        deadline: `time.monotonic()` after which nothing runs any more. What is left then counts as FAIL.
    """
    for check in checks:
        if reason := machine.reason_to_skip(check):
            yield Outcome(check.name, check.part, "SKIP", reason)
    waiting = [check for check in checks if not machine.reason_to_skip(check)]
    while waiting:
        first = waiting[0]
        if time.monotonic() >= deadline:
            yield Outcome(first.name, first.part, "FAIL", "not run: the time of all checks is used up")
            del waiting[0]
            continue
        batch = [check for check in waiting if _alike(check, first, machine)]
        with Launch(batch, machine, module, deadline) as launch:
            for outcome in launch.outcomes():
                yield outcome
                waiting = [check for check in waiting if check.name != outcome.name]


def _alike(one: Check, other: Check, machine: Machine) -> bool:
    """Whether two checks can run in the same processes."""
    return (one.part, one.environment, one.one_card, machine.processes(one)) == (
        other.part, other.environment, other.one_card, machine.processes(other),
    )  # fmt: skip


class Launch:
    """The processes of some checks, from `with` to its end."""

    def __init__(self, checks: Sequence[Check], machine: Machine, module: str, deadline: float) -> None:
        self.checks = checks
        self.machine = machine
        self.module = module
        self.deadline = deadline
        self.count = machine.processes(checks[0])

    def __enter__(self) -> Launch:
        self._folder = tempfile.TemporaryDirectory(prefix="gpu_check_")
        self.folder = Path(self._folder.name)
        plan: dict[str, Any] = {"module": self.module, "checks": [check.name for check in self.checks]}
        plan |= {"cuda": self.machine.cuda, "parent": os.getpid()}
        (self.folder / "plan").write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable]
        if self.count > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(self.count)]
        command += ["-m", "tasks.gpu.worker", str(self.folder / "plan")]
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=_ROOT, env=self._environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *exception: object) -> None:
        pids = {line["pid"] for lines in self._lines() for line in lines if "pid" in line}
        for pid in pids - {self.process.pid}:  # torch starts them in sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._folder.cleanup()

    def _environment(self) -> dict[str, str]:
        variables = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
        variables.setdefault("OMP_NUM_THREADS", "1")
        if not self.machine.cuda:
            variables |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        elif self.checks[0].one_card:
            variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        return variables | dict(self.checks[0].environment)

    # ---- answers

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the result of one check after the other, up to the first one after which the processes are spent."""
        problem = self._wait(lambda lines: any("ready" in line for line in lines), START_SECONDS)
        if problem:
            details = self._output()
            for check in self.checks:
                figure = f"its processes did not start: {problem}"
                yield Outcome(check.name, check.part, "FAIL", figure, details=details)
                details = ""
            return
        for check in self.checks:
            started = time.monotonic()
            if started >= self.deadline:
                return
            problem = self._wait(lambda lines, name=check.name: _answer(lines, name) is not None, check.seconds)
            answers = [_answer(lines, check.name) for lines in self._lines()]
            answer = _together(answers, problem, self._output)
            if problem and self.process.poll() is not None and (end := self._good_end(check)):
                answer = Answer("PASS", f"a process ended by itself: {end}", spent=True)
            took = time.monotonic() - started
            status, figure = answer.status, answer.figure
            yield Outcome(check.name, check.part, status, figure, took, dict(answer.values), answer.details)
            if answer.spent:
                return

    def _wait(self, done: Any, seconds: float) -> str:
        """Wait until all processes have written what `done` looks for. Return what happened instead, if anything."""
        seconds = max(0.0, min(seconds, self.deadline - time.monotonic()))
        limit, spent_since = time.monotonic() + seconds, None
        while True:
            ended = self.process.poll()  # before their last lines are read
            lines = self._lines()
            if all(done(mine) or any("left" in line for line in mine) for mine in lines):
                return ""
            missing = [rank for rank, mine in enumerate(lines) if not done(mine)]
            who = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.count}"
            if ended is not None:
                return f"{who} ended with status {ended}"
            now = time.monotonic()
            if any(line.get("spent") for mine in lines for line in mine):
                spent_since = spent_since or now
            if now > limit or (spent_since is not None and now > spent_since + _GRACE_SECONDS):
                return f"HANGS: no answer from {who} within {seconds:.0f} s"
            time.sleep(0.02)

    def _lines(self) -> list[list[dict[str, Any]]]:
        """Return the lines that each process has written so far, by rank."""
        found = []
        for rank in range(self.count):
            path = self.folder / f"answers_{rank}"
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            found.append([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")])
        return found

    def _good_end(self, check: Check) -> str:
        """Return the line of the output with which a process was allowed to end; empty if there is none."""
        text = (self.folder / "output").read_text(encoding="utf-8", errors="replace")
        lines = (line for line in text.splitlines() if check.good_end and re.search(check.good_end, line))
        return next(lines, "")[:200]

    def _output(self) -> str:
        text = (self.folder / "output").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-20:])


def _answer(lines: Sequence[dict[str, Any]], name: str) -> Answer | None:
    for line in lines:
        if line.get("check") == name:
            return Answer(**{key: value for key, value in line.items() if key != "check"})
    return None


def _together(answers: Sequence[Answer | None], problem: str, output: Any) -> Answer:
    """One answer for all processes: the first that failed, or else worker 0's."""
    given = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    spent = bool(problem) or any(answer.spent for _, answer in given)
    errors = sorted((pair for pair in given if pair[1].status == "FAIL"), key=lambda pair: not pair[1].details)
    if errors:
        rank, answer = errors[0]
        who = f"worker {rank}: " if len(answers) > 1 else ""
        return Answer("FAIL", who + answer.figure, answer.values, answer.details, spent)
    if problem:
        return Answer("FAIL", problem, {}, output(), spent)
    skipped = [answer for _, answer in given if answer.status == "SKIP"]
    first = skipped[0] if skipped else given[0][1]
    return Answer(first.status, first.figure, first.values, "", spent)
