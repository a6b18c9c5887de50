"""A run that is interrupted by faults and restarted until it is done, and what must hold after each fault."""

from __future__ import annotations

import functools
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsgdac_accel.checkpoint import CheckpointError, load_worker
from dsgdac_accel.checkpoint.manifest import MANIFEST, complete_checkpoints, read_manifest
from tests.soak.launches import AFTER, Launch
from tests.soak.runs import KEEP, SAVE_EVERY, Setup, differences, left_by, prepare
from tests.soak.sabotage import Fault

TIMEOUT = 12.0
TIMEOUT_OF_SILENCE = 6.0
GRACE = 30.0
"""Seconds beyond the timeout within which all other workers must have ended."""

CONNECTING = 60.0
"""Further seconds if a worker may be lost while connecting: gloo waits 30 s per connection, whatever the timeout."""

UNDISTURBED = 240.0  # seconds that a launch may take before anything has happened to it
BETWEEN = "between two launches"
AHEAD = "in the way of the next save"

STEP = "between steps"
SAVING = (
    "copying the state to save", "writing its file", "before its file is renamed", "having written its file",
    "finishing a checkpoint",
)  # fmt: skip
OF_THE_FIRST = ("writing the manifest", "deleting an old checkpoint", "writing the summary")
"""Moments that only worker 0 has."""

SIGNALS = ("SIGTERM", "SIGUSR1")

HARMLESS = ("pause", "truncated file", "damaged manifest")
"""After these a run continues, or resumes from an older checkpoint."""

CALLS = {
    STEP: 2 * SAVE_EVERY, "in the exchange": 2 * SAVE_EVERY, "averaging gradients": 2 * SAVE_EVERY,
    "before its file is renamed": 4, "in calibration": 20, "in evaluation": 2, "in decoding": 3,
    "copying the state to save": 2, "writing its file": 2, "having written its file": 2, "writing the manifest": 2,
    "finishing a checkpoint": 2, "averaging the workers": 2,
}  # fmt: skip
"""The last call of each moment at which a fault is tried; 1 for others."""


def moments(setup: Setup) -> dict[str, tuple[str, ...]]:
    """The moments at which each kind of fault is tried in such a run."""
    images = setup.task == "cifar"
    exchange = "in the exchange" if setup.gossips else "averaging gradients"
    evaluation = ("in calibration", "in evaluation") if images else ("in evaluation", "in decoding")
    if setup.gossips:
        evaluation = ("averaging the workers", *evaluation)
    found = {
        "kill": (
            "starting up", "loading a checkpoint", STEP, exchange, *SAVING, *OF_THE_FIRST, *evaluation, AFTER, AFTER,
        ),
        "kill_all": (STEP, "writing its file", "writing the manifest", AFTER),
        "stop": (STEP, exchange, "writing its file", evaluation[-1]),
        "pause": (STEP, exchange, evaluation[-1], AFTER),
        "raise": (STEP, exchange, evaluation[-1]),
        "disk_full": ("copying the state to save",),
        "altered file": (BETWEEN,),
        "truncated file": (BETWEEN,),
        "damaged manifest": (BETWEEN,),
        "folder not writable": (AHEAD,),
        "SIGTERM": (STEP, exchange, "writing its file", evaluation[-1], AFTER),
        "SIGUSR1": (STEP, AFTER),
    }  # fmt: skip
    return found


class Chain:
    """A run in `folder` that is interrupted again and again.

    Args:
        setup: of the run.
        folder: an empty folder for the run and all launches.
        work: where the configurations are.
        dice: draws the faults.
        tried: how often each kind was tried at each moment; the rarest comes next.
        record: is given what became of each fault.
    """

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        work: Path,
        dice: random.Random,
        tried: Counter[tuple[str, str]],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        self.setup, self.folder, self.work = setup, folder, work
        self.dice, self.tried, self.record = dice, tried, record
        self.output = folder / "run"
        self.checkpoints = self.output / "checkpoints"
        self.launches = 0
        self.unexpected = False

    # ---- what to try next

    def draw(self) -> list[Fault]:
        """The faults of the next launch: harmless ones first, the last one ends it."""
        complete = self.complete()
        pairs = [(kind, moment) for kind, all_ in moments(self.setup).items() for moment in all_]
        if len(complete) < 2:
            pairs = [pair for pair in pairs if pair[1] != BETWEEN]
        if not complete:
            pairs = [pair for pair in pairs if pair[1] != "loading a checkpoint"]
        if max(complete, default=0) < reference(self.setup, self.work)["step"] * 2 // 3:
            pairs = [pair for pair in pairs if pair[1] != "writing the summary"]  # or the run is over at once
        rarest = min(self.tried[pair] / pairs.count(pair) for pair in pairs)
        kind, moment = self.dice.choice([pair for pair in pairs if self.tried[pair] / pairs.count(pair) == rarest])
        faults = [self._fault(kind, moment)]
        if kind in HARMLESS:
            faults.append(replace(self._fault("kill", STEP), number=1))
        return faults

    def _fault(self, kind: str, moment: str) -> Fault:
        dice = self.dice
        victim = 0 if moment in OF_THE_FIRST else dice.randrange(self.setup.workers)
        seconds = dice.uniform(0.2, 4.0) if moment == AFTER else 0.0
        if kind == "pause":
            seconds = dice.uniform(0.5, 3.0)
        return Fault(kind, victim, moment, dice.randint(1, CALLS.get(moment, 1)), seconds)

    # ---- one launch

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return [step for step, _ in complete_checkpoints(self.checkpoints, "step-*")]

    def launch(self, faults: Sequence[Fault]) -> bool:
        """Start the run again with these faults, and record what became of each. Returns whether the run is done."""
        self.launches += 1
        before = self.complete()
        ahead = self.checkpoints / f"step-{(before[-1] if before else 0) + SAVE_EVERY:08d}"
        ending = faults[-1] if faults else None
        silent = ending is not None and ending.kind == "stop"
        timeout = TIMEOUT_OF_SILENCE if silent else TIMEOUT
        with self._prepared(faults, ahead) as damaged:
            kept = [step for step in before if step != damaged]
            launch = Launch(
                f"{self.setup.task}.py", self.setup.arguments(self.output, timeout), self.setup.workers,
                self.folder / f"launch-{self.launches}", self.work, faults,
                delays=f"{self.folder.name} {self.launches}",
            )  # fmt: skip
            problems, fault_at = self._watch(launch, ending, timeout, kept)
            hung = launch.close()
            if silent and fault_at is not None:
                hung = [rank for rank in hung if rank != ending.victim]
            children = launch.children_gone(15.0)
        if hung:
            problems.append(f"workers {hung} had to be killed")
        if children is None:
            problems.append("left processes behind")
        problems += self._audit(kept)
        codes = launch.exit_codes()
        done = all(code == 0 for code in codes) and (self.output / "summary.json").exists()
        happened = fault_at is not None and not (done and ending.kind not in SIGNALS)
        if happened:
            problems += check_ending(ending, launch, codes, self.complete())
        elif not done and not problems:
            problems.append(f"ended by itself: {codes}: {launch.text(0)[-600:]}")
        seen = [fault for fault in faults[:-1] if fault.number in launch.happened or fault.moment == BETWEEN]
        for fault in [*seen, *([ending] if happened or problems else [])]:
            self.tried[fault.kind, fault.moment] += 1
            self.record(
                {
                    "kind": fault.kind, "moment": fault.moment, "victim": fault.victim, "task": self.setup.task,
                    "algorithm": self.setup.algorithm, "workers": self.setup.workers, "chain": self.folder.name,
                    "launch": self.launches, "before": before, "after": self.complete(), "codes": codes,
                    "seconds": seconds_until_all_ended(launch, fault, fault_at) if fault is ending else None,
                    "said": error_line(launch, fault), "problems": problems if fault is ending else [],
                }
            )  # fmt: skip
        if problems and ending is None:
            raise AssertionError(f"{self.folder.name}, without a fault: {problems}")
        self.unexpected = self.unexpected or bool(problems)
        if not problems:
            shutil.rmtree(launch.folder)
        return done

    def _watch(
        self, launch: Launch, ending: Fault | None, timeout: float, kept: list[int]
    ) -> tuple[list[str], float | None]:
        """Wait until all workers but a stopped one have ended. Returns the problems, and when the fault happened."""
        problems: list[str] = []
        newest = max(kept, default=0)
        looked = 0.0
        while True:
            launch.tick()
            now = time.monotonic()
            waited, fault_at, deadline = launch.running(), None, launch.started + UNDISTURBED
            if ending is not None:
                fault_at = launch.started if ending.moment in (BETWEEN, AHEAD) else launch.happened.get(ending.number)
                if ending.kind == "stop" and fault_at is not None:
                    waited = [rank for rank in waited if rank != ending.victim]
                if ending.number in launch.happened and ending.kind not in SIGNALS:
                    deadline = launch.happened[ending.number] + timeout + GRACE
                    deadline += CONNECTING if ending.moment in (AFTER, "starting up") else 0
            if not waited or now > deadline:
                return problems, fault_at
            if now > looked + 0.1:
                looked = now
                found = max(self.complete(), default=0)
                if found < newest:
                    problems.append(f"the newest complete checkpoint went from step {newest} to {found}")
                newest = max(newest, found)

    def _audit(self, kept: list[int]) -> list[str]:
        """Problems of the checkpoints on disk, given the steps `kept` that were complete before."""
        found = complete_checkpoints(self.checkpoints, "step-*")
        steps = [step for step, _ in found]
        problems = []
        if max(steps, default=0) < max(kept, default=0) or len(steps) < min(len(kept), KEEP):
            problems.append(f"complete checkpoints were lost: {kept} before, {steps} after")
        if found:
            try:
                for rank in range(self.setup.workers):
                    load_worker(found[-1][1], rank)
            except CheckpointError as error:
                problems.append(f"the newest complete checkpoint cannot be read: {error}")
        return problems

    # ---- faults between two launches

    @contextmanager
    def _prepared(self, faults: Sequence[Fault], ahead: Path) -> Iterator[int | None]:
        """Inside, faults that come before a launch have happened. Yields the step of a damaged checkpoint."""
        moment, fault = (faults[0].moment, faults[0]) if faults else ("", None)
        if fault is not None and moment == BETWEEN:
            step, folder = complete_checkpoints(self.checkpoints, "step-*")[-1]
            name = MANIFEST if fault.kind == "damaged manifest" else read_manifest(folder).files[fault.victim].name
            content = (folder / name).read_bytes()
            damage(folder / name, fault.kind, self.dice)
            yield step
            if fault.kind == "altered file":  # the run refuses to start, and its user decides
                if self.dice.random() < 0.5:
                    (folder / name).write_bytes(content)
                else:
                    shutil.rmtree(folder)
        elif moment == AHEAD:
            shutil.rmtree(ahead, ignore_errors=True)
            ahead.parent.mkdir(parents=True, exist_ok=True)
            ahead.write_text("a file where a folder should go", encoding="utf-8")
            yield None
            ahead.unlink()
        else:
            yield None


def damage(file: Path, kind: str, dice: random.Random) -> None:
    """Cut a file, change one bit of it, or write something else into it."""
    content = bytearray(file.read_bytes())
    if kind == "truncated file":
        del content[dice.randrange(len(content)) :]
    elif kind == "altered file":
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    else:
        content = bytearray(b"{" + content[: dice.randrange(len(content))])
    file.write_bytes(content)


# ---- how a launch has to end


def seconds_until_all_ended(launch: Launch, fault: Fault, fault_at: float | None) -> float | None:
    """Seconds from the fault to the end of the last other worker."""
    others = [at for rank, at in launch.ended.items() if rank != fault.victim or fault.kind in ("kill_all", *SIGNALS)]
    return None if fault_at is None or not others else round(max(others) - fault_at, 2)


def error_line(launch: Launch, fault: Fault) -> str:
    """The error of the first worker other than the faulty one."""
    for rank in sorted(range(launch.workers), key=lambda rank: (rank == fault.victim, rank)):
        for line in reversed(launch.text(rank).splitlines()):
            if line.startswith(("error: ", "stopped by")):
                return line[:400]
    return ""


def check_ending(fault: Fault, launch: Launch, codes: Sequence[int | None], complete: Sequence[int]) -> list[str]:
    """Problems of exit codes and messages."""
    if fault.kind == "kill_all":
        return [] if set(codes) == {-9} else [f"exit codes {codes} of workers that were all killed"]
    own = {"kill": -9, "stop": -9, "raise": 1}.get(fault.kind)  # the faulty worker's; None if all end alike
    if fault.kind in SIGNALS:
        if set(codes) == {0}:  # it came after the last step
            return []
        if set(codes) == {75}:
            stopped = re.search(r"at step (\d+) of", error_line(launch, fault))
            fine = stopped is not None and list(complete[-1:]) == [int(stopped[1])]
            return [] if fine else [f"no checkpoint of the step where it stopped: {complete}: {launch.text(0)[-300:]}"]
        own = -getattr(signal, fault.kind)  # it came before signals were noted: the worker is lost
    problems = []
    for rank, code in enumerate(codes):
        if rank == fault.victim and own is not None:
            if code != own:
                problems.append(f"the faulty worker {rank} ended with {code}")
            continue
        if code is None or code <= 0:
            problems.append(f"worker {rank} ended with {code}: {launch.text(rank)[-300:]}")
        said = [line for line in launch.text(rank).splitlines() if line.startswith("error: ")]
        if len(said) != 1:
            problems.append(f"worker {rank} wrote {len(said)} error lines: {launch.text(rank)[-600:]}")
        elif not names(fault, said[0]):
            problems.append(f"worker {rank} does not name it: {said[0]}")
    return problems


def names(fault: Fault, message: str) -> bool:
    """Whether an error names the worker or the cause."""
    if fault.kind == "folder not writable":
        return "could not be saved to" in message
    if fault.kind == "disk_full" and ("could not be saved to" in message or "File too large" in message):
        return f"Worker {fault.victim}:" in message or "could not be saved to" not in message
    if fault.kind == "altered file":
        return "was altered since it was written" in message and f"{fault.victim:05d}" in message
    if re.search(r"^error: (worker \d+: )?(wait timeout|Gloo connectFullMesh)", message):
        return True  # torch's own error: the workers were not connected yet
    who = rf"workers? (\d+, )*{fault.victim}(, \d+)*(, which do(es)? not answer,)?"
    return bool(re.search(rf"{who} (did not answer|was lost|were lost)", message))


# ---- chains


@functools.cache
def reference(setup: Setup, work: Path) -> dict[str, Any]:
    """The results of an undisturbed run, which is made once."""
    output = work / "references" / setup.name
    if not (output / "summary.json").exists():
        prepare(work)
        shutil.rmtree(output, ignore_errors=True)
        folder = work / f"undisturbed-{setup.name}"
        shutil.rmtree(folder, ignore_errors=True)
        launch = Launch(f"{setup.task}.py", setup.arguments(output, 60.0), setup.workers, folder, work)
        while launch.running() and time.monotonic() < launch.started + UNDISTURBED:
            launch.tick()
        launch.close()
        if any(launch.exit_codes()):
            raise AssertionError(f"undisturbed {setup.name}: {launch.exit_codes()}\n{launch.text(0)[-3000:]}")
        shutil.rmtree(folder)
    return left_by(output)


def run_chain(chain: Chain, plan: Callable[[], Sequence[Fault]]) -> dict[str, Any]:
    """Start the run with the faults of `plan` until it is done, and compare it with an undisturbed one.

    A launch without faults runs to the end.
    """
    wanted = reference(chain.setup, chain.work)
    done = False
    while not done:
        done = chain.launch(plan())
    found = differences(left_by(chain.output), wanted)
    if not found and not chain.unexpected:
        shutil.rmtree(chain.folder)
    return {
        "chain": chain.folder.name, "setup": chain.setup.name, "task": chain.setup.task,
        "algorithm": chain.setup.algorithm, "workers": chain.setup.workers, "launches": chain.launches,
        "step": wanted["step"], "bitwise": not found, "differences": found[:10],
    }  # fmt: skip
