"""Targets of a benchmark, and whether it meets them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FORM = re.compile(
    r"(?:(?P<what>cpu|memory)\s+)?(?P<variant>\S+)\s*<=\s*"
    r"(?P<limit>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:\s+of\s+(?P<reference>\S+))?"
)


@dataclass(frozen=True)
class Target:
    """`variant` takes at most `limit` times the step time (or processor time) of `reference`.

    >>> Target.parse("gossip <= 0.53 of ddp")
    Target(what='time', variant='gossip', limit=0.53, reference='ddp')
    >>> Target.parse("memory gossip <= 1")
    Target(what='memory', variant='gossip', limit=1.0, reference=None)
    """

    what: str
    """time, cpu (processor time of all workers) or memory (parameter copies)."""
    variant: str
    limit: float
    """Largest ratio to the reference, or number of parameter copies."""
    reference: str | None
    """Variant to compare with; None for memory."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read a target. Raises ValueError for text of another form."""
        found = _FORM.fullmatch(text.strip())
        if found is None or (found["reference"] is None) != (found["what"] == "memory"):
            raise ValueError(
                f"targets must be of the form 'VARIANT <= RATIO of VARIANT', the same after 'cpu', or "
                f"'memory VARIANT <= COPIES'; got {text!r}."
            )
        return cls(found["what"] or "time", found["variant"], float(found["limit"]), found["reference"])

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants in the target."""
        return (self.variant,) if self.reference is None else (self.variant, self.reference)

    def judge(self, table: Mapping[str, Mapping[str, Any]]) -> Verdict:
        """Compare with the table that `measurement.summarize` returned."""
        if any(name not in table for name in self.variants):
            return Verdict(self, None)
        if self.what == "memory":
            return Verdict(self, float(table[self.variant]["extra_copies"]))
        ratios = table[self.variant][{"time": "ratios", "cpu": "cpu_ratios"}[self.what]]
        return Verdict(self, float(ratios[self.reference]["median"]))


@dataclass(frozen=True)
class Verdict:
    """Result of a target; `measured` is None if a variant was left out."""

    target: Target
    measured: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if a variant was left out."""
        return None if self.measured is None else round(self.measured, 3) <= self.target.limit

    def line(self) -> str:
        """Line for the report."""
        target = self.target
        what = {
            "time": "",
            "cpu": "processor time of ",
            "memory": "extra parameter copies of ",
        }[target.what]
        of = "" if target.reference is None else f" of {target.reference}"
        words = {True: "met", False: "MISSED", None: "unknown, since a variant was left out"}[self.met]
        measured = "" if self.measured is None else f", measured {self.measured:.3f}"
        return f"target: {what}{target.variant} at most {target.limit:g}{of}{measured}: {words}"
