"""The one place where figures leave training: consensus metrics beside whatever the user logs.

Three quantities that are easily confused, so named apart: "gossip/radius" is the distance of the WORKERS from their
average; "train/loss" of a task is the workers' own, local loss; "test/..." is the DEPLOYED model, the average.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dsgdac_accel.core.step import GossipStep

PREFIX = "gossip/"

Sink = Callable[[dict[str, Any], int | None], None]
"""Takes the values of one step and the step."""


def consensus_metrics(steps: Iterable[GossipStep]) -> dict[str, float]:
    """Latest figures under one prefix: "gossip/gamma", "gossip/radius", ...; further optimizers under "gossip/1/", ...

    No communication, so any worker may call it at any time.
    """
    return {
        f"{PREFIX}{f'{number}/' if number else ''}{name}": value
        for number, step in enumerate(steps)
        for name, value in step.metrics().items()
    }


class JsonlSink:
    """Appends a JSON object per line, flushed at once: a killed run keeps its log. NaN and inf become null."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, values: dict[str, Any], step: int | None) -> None:
        self._file.write(json.dumps({"step": step, **{key: _plain(value) for key, value in values.items()}}) + "\n")

    def close(self) -> None:
        """Close the file; later calls fail."""
        self._file.close()


class ConsensusLogger:
    """Merges the consensus metrics into logged values and hands them to every sink.

    Args:
        metrics: gives the latest consensus metrics, for example `lambda: consensus_metrics(steps)`; None for a baseline
            without gossip.
        sinks: called as `sink(values, step)`: a tracker's `log`, a `JsonlSink`, or `records.append`-like functions.
            On workers other than the main one pass none.

    >>> records = []
    >>> log = ConsensusLogger(lambda: {"gossip/gamma": 0.5}, [lambda values, step: records.append((step, values))])
    >>> log.log({"train/loss": 2.0}, step=7)
    {'train/loss': 2.0, 'gossip/gamma': 0.5}
    >>> records
    [(7, {'train/loss': 2.0, 'gossip/gamma': 0.5})]
    """

    def __init__(self, metrics: Callable[[], Mapping[str, float]] | None = None, sinks: Iterable[Sink] = ()) -> None:
        self.metrics = metrics or dict
        self.sinks = list(sinks)

    def add_sink(self, sink: Sink) -> None:
        """Send later records to `sink` as well."""
        self.sinks.append(sink)

    def log(self, values: Mapping[str, Any], step: int | None) -> dict[str, Any]:
        """Write `values` and the consensus metrics of `step` (a given value wins over a metric of the same name)."""
        merged = {**values, **{name: value for name, value in self.metrics().items() if name not in values}}
        for sink in self.sinks:
            sink(merged, step)
        return merged


def _plain(value: Any) -> Any:
    """As JSON: tensors and NumPy scalars as numbers, what is not finite as null."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
