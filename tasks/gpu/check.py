"""A check is a function that settles one suspicion about the GPU path; here are its limits and its result."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.gpu.bench import Bench, NotHere

Part = Literal["1", "2"]
"""1: one GPU. 2: two or more."""
Status = Literal["PASS", "FAIL", "SKIP"]


@dataclass(frozen=True)
class Finding:
    """The result of a check in one process."""

    ok: bool
    figure: str
    """The measured value and its limit, in a few words."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The same for programs."""
    spent: bool = False
    """Whether the processes cannot be used any more, because a worker was lost or out of step."""


@dataclass(frozen=True)
class Check:
    """A check and what it needs."""

    run: Callable[[Bench], Finding]
    """Its name is that of the check. In several processes it runs in all of them."""
    part: Part
    seconds: float
    """After so long without an answer it counts as hanging."""
    cuda_only: str = ""
    """Why it says nothing on a CPU; empty if it does."""
    processes: int = 0
    """Processes that it needs; 0 is one in part 1, and the number of GPUs in part 2 (2 on a CPU)."""
    one_card: bool = False
    """Whether all processes are to share the first GPU."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its processes."""
    good_end: str = ""
    """Pattern of the output with which a process may end instead of an answer; empty if none may."""

    @property
    def name(self) -> str:
        """Name in the report and for `--only`."""
        return self.run.__name__


def check(part: Part, **needs: Any) -> Callable[[Callable[[Bench], Finding]], Check]:
    """Make a function a check; `needs` are the further fields of `Check`."""
    return lambda function: Check(function, part, **needs)


@dataclass(frozen=True)
class Answer:
    """The answer of one process, or of all of them together."""

    status: Status
    figure: str
    values: Mapping[str, float] = field(default_factory=dict)
    details: str = ""
    """A traceback, or the last output of processes that hang or have ended."""
    spent: bool = False
    """Whether the processes are not to be used any more, as after an error."""


def answer_of(check: Check, bench: Bench) -> Answer:
    """Run a check in this process and free what it has prepared. An error is a FAIL, whatever its type."""
    try:
        finding = check.run(bench)
        if not finding.spent:
            bench.clean_up()
    except NotHere as reason:
        return Answer("SKIP", str(reason))
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        return Answer("FAIL", f"{type(error).__name__}: {first_line}", {}, traceback.format_exc(), spent=True)
    return Answer("PASS" if finding.ok else "FAIL", finding.figure, finding.values, spent=finding.spent)
