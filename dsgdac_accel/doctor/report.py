"""Findings of the doctor, one line each, and the report that collects them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]
_LEVELS: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    >>> Finding("warning", "threads", "8 threads on 2 cores", "Set OMP_NUM_THREADS=1").line()
    'warning  threads        8 threads on 2 cores. Set OMP_NUM_THREADS=1.'
    """

    level: Level
    """ok; warning: the run is slower than it could be or loses something; error: the run would fail or be wrong."""
    subject: str
    """The thing checked, in a word or two."""
    message: str
    """The result, with its values."""
    advice: str = ""
    """The way out."""
    workers: tuple[int, ...] = ()
    """Ranks of the processes concerned, if not all are."""

    def line(self) -> str:
        """Format the finding as one line."""
        return f"{self.level:<7}  {self.subject:<13}  {self.sentence()}"

    def sentence(self) -> str:
        """Join message and advice."""
        return " ".join((f"{self.message}. {self.advice}." if self.advice else self.message).split())


@dataclass
class Report:
    """All findings of an examination. It is the same on all workers unless one of them was lost."""

    findings: list[Finding] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Measured numbers, such as `parameter_bytes`, `exchange_seconds`, `spectral_gap` and `links`."""

    def add(self, findings: Iterable[Finding]) -> None:
        """Append findings."""
        self.findings += findings

    @property
    def level(self) -> Level:
        """The most severe level of all findings."""
        return max((finding.level for finding in self.findings), key=_LEVELS.index, default="ok")

    @property
    def exit_status(self) -> int:
        """1 if there are errors, otherwise 0."""
        return int(self.level == "error")

    def of_level(self, level: Level) -> list[Finding]:
        """Return the findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    def lines(self) -> list[str]:
        """Format all findings, followed by a line that counts errors and warnings."""
        counts = [(len(self.of_level(level)), level) for level in ("error", "warning")]
        summary = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for count, level in counts if count)
        return [*(finding.line() for finding in self.findings), f"doctor: {summary or 'no problems found'}"]

    def write_json(self, file: Path) -> None:
        """Write findings and values as JSON. The file is complete, or keeps its former content."""
        content = {"level": self.level, "findings": [asdict(finding) for finding in self.findings], **self.values}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def named_workers(workers: Iterable[int]) -> str:
    """Name workers by their ranks.

    >>> named_workers([3]), named_workers([0, 2]), named_workers(range(12))
    ('worker 3', 'workers 0, 2', 'workers 0, 1, 2, 3, 4, 5, 6, 7, .. (12 in all)')
    """
    listed = list(workers)
    shown = ", ".join(map(str, listed[:8])) + (f", .. ({len(listed)} in all)" if len(listed) > 8 else "")
    return f"worker{'s' if len(listed) != 1 else ''} {shown}"


def size_text(count: float) -> str:
    """Format a number of bytes.

    >>> size_text(4e7), size_text(512), size_text(3 * 2**30)
    ('38.1 MiB', '512 bytes', '3 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def time_text(seconds: float) -> str:
    """Format a duration.

    >>> time_text(0.0123), time_text(2.5), time_text(4e-5)
    ('12.3 ms', '2.5 s', '0.04 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
