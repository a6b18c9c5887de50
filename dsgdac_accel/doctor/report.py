"""Findings of the doctor, one line each, and the report that collects them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsgdac_accel.checkpoint.serialization import write_whole

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    >>> Finding("warning", "steps", "worker 1 has more batches", "Distribute the data evenly").line()
    'warning  steps           worker 1 has more batches. Distribute the data evenly.'
    """

    level: Level
    """ok; warning: the run is slower than it could be or loses something; error: the run would fail or be wrong."""
    name: str
    """The thing checked, in a word or two."""
    text: str
    """The result, with its values."""
    advice: str = ""
    """The way out."""

    def sentence(self) -> str:
        """Join text and advice on one line."""
        return " ".join((f"{self.text}. {self.advice}." if self.advice else self.text).split())

    def line(self) -> str:
        """Format the finding as one line of a report."""
        return f"{self.level:<7}  {self.name:<14}  {self.sentence()}"


@dataclass
class Report:
    """All findings of an examination. It is the same on all workers unless one of them was lost."""

    findings: list[Finding] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Measured numbers: `parameter_bytes`, `exchange_seconds` and `links`."""

    @property
    def exit_status(self) -> int:
        """1 if there are errors, otherwise 0."""
        return int(any(finding.level == "error" for finding in self.findings))

    def lines(self) -> list[str]:
        """Format all findings, followed by a line that counts errors and warnings."""
        levels = [finding.level for finding in self.findings]
        counts = [f"{level}s: {levels.count(level)}" for level in ("error", "warning") if level in levels]
        return [*(finding.line() for finding in self.findings), f"doctor: {', '.join(counts) or 'no problems found'}"]

    def write_json(self, file: Path) -> None:
        """Write findings and values as JSON. The file is complete, or keeps its former content."""
        content = {"findings": [asdict(finding) for finding in self.findings], **self.values}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, [(json.dumps(content, indent=2) + "\n").encode()])


def named_workers(workers: Iterable[int]) -> str:
    """Name workers by their ranks.

    >>> named_workers([3]), named_workers([0, 2]), named_workers(range(12))
    ('worker 3', 'workers 0, 2', 'workers 0, 1, 2, 3, 4, 5, 6, 7, .. (12 in all)')
    """
    listed = list(workers)
    shown = ", ".join(map(str, listed[:8])) + (f", .. ({len(listed)} in all)" if len(listed) > 8 else "")
    return f"worker{'s' if len(listed) != 1 else ''} {shown}"
