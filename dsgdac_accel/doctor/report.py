"""Findings, one line each, and the report they make."""

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
    """One thing that was looked at.

    >>> Finding("warning", "threads", "8 threads on 2 cores", "Set OMP_NUM_THREADS=1").line()
    'warning  threads        8 threads on 2 cores. Set OMP_NUM_THREADS=1.'
    """

    level: Level
    """ok; warning: slower or other than it could be; error: the run would fail or be wrong."""
    subject: str
    """What was looked at, in a word or two."""
    message: str
    """What was found, with its value."""
    advice: str = ""
    """The way out."""
    workers: tuple[int, ...] = ()
    """The processes that it is about, where not all of them."""

    def line(self) -> str:
        """The finding in one line."""
        text = f"{self.message}. {self.advice}." if self.advice else self.message
        return f"{self.level:<7}  {self.subject:<13}  {' '.join(text.split())}"


@dataclass
class Report:
    """What an examination found; the same on all workers unless one of them was lost."""

    findings: list[Finding] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """What was measured, in plain numbers: `parameter_bytes`, `exchange_seconds`, `spectral_gap`, `links`, ..."""

    def add(self, findings: Iterable[Finding]) -> None:
        """Append findings."""
        self.findings += findings

    @property
    def level(self) -> Level:
        """The worst of all findings."""
        return max((finding.level for finding in self.findings), key=_LEVELS.index, default="ok")

    @property
    def exit_status(self) -> int:
        """0 where all is well or there are warnings only, 1 where there are errors."""
        return int(self.level == "error")

    def of_level(self, level: Level) -> list[Finding]:
        """The findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    def lines(self) -> list[str]:
        """All findings, and a last line that counts them."""
        counts = [(len(self.of_level(level)), level) for level in ("error", "warning")]
        said = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for count, level in counts if count)
        return [*(finding.line() for finding in self.findings), f"doctor: {said or 'all is well'}"]

    def as_dict(self) -> dict[str, Any]:
        """The report in plain values."""
        return {"level": self.level, "findings": [asdict(finding) for finding in self.findings], **self.values}

    def write_json(self, file: Path) -> None:
        """Write the report as JSON, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            unfinished.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)


def named_workers(workers: Iterable[int]) -> str:
    """Numbers of workers in words.

    >>> named_workers([3]), named_workers([0, 2]), named_workers(range(12))
    ('worker 3', 'workers 0, 2', 'workers 0, 1, 2, 3, 4, 5, 6, 7, .. (12 in all)')
    """
    listed = list(workers)
    shown = ", ".join(map(str, listed[:8])) + (f", .. ({len(listed)} in all)" if len(listed) > 8 else "")
    return f"worker{'s' if len(listed) != 1 else ''} {shown}"


def size_text(count: float) -> str:
    """Bytes in words.

    >>> size_text(4e7), size_text(512), size_text(3 * 2**30)
    ('38.1 MiB', '512 bytes', '3 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def time_text(seconds: float) -> str:
    """Seconds in words.

    >>> time_text(0.0123), time_text(2.5), time_text(4e-5)
    ('12.3 ms', '2.5 s', '0.04 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
