"""Consensus metrics and `ConsensusLogger`, which adds them to whatever the user logs.

Three quantities are easily confused, so their names keep them apart: "gossip/radius" is the distance of the WORKERS
from their average, "train/loss" of a task is the workers' own local loss, and "test/..." is measured on the DEPLOYED
model, the average.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dsgdac_accel.core.host_copy import HostCopy
from dsgdac_accel.core.step import GossipStep

PREFIX = "gossip/"

Sink = Callable[[dict[str, Any], int | None], None]
"""Called as `sink(values, step)`."""


def consensus_metrics(steps: Iterable[GossipStep]) -> dict[str, float]:
    """Return the latest metrics of every optimizer, without communication.

    The first optimizer's are named "gossip/gamma", "gossip/radius", and so on; the second one's "gossip/1/gamma", ...
    """
    newest_first = [step.metrics() for step in reversed(list(steps))]  # whoever waits for the last waits for all
    return {
        f"{PREFIX}{f'{number}/' if number else ''}{name}": value
        for number, figures in enumerate(reversed(newest_first))
        for name, value in figures.items()
    }


class JsonlSink:
    """Sink that appends one JSON object per line and flushes it, so that a killed run keeps its log.

    NaN and infinity become null.

    Args:
        path: the file. Missing folders are created.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, values: dict[str, Any], step: int | None) -> None:
        self._file.write(json.dumps({"step": step, **{key: _plain(value) for key, value in values.items()}}) + "\n")

    def close(self) -> None:
        """Close the file. Later calls fail."""
        self._file.close()


class ConsensusLogger:
    """Adds the consensus metrics to logged values and passes the result to every sink.

    Args:
        metrics: returns the latest consensus metrics, for example `lambda: consensus_metrics(steps)`. None for a
            baseline without gossip.
        sinks: called as `sink(values, step)`: a tracker's `log`, a `JsonlSink`, or a function of your own. Pass none on
            workers other than the main one.

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
        """Pass later records to `sink` as well."""
        self.sinks.append(sink)

    def log(self, values: Mapping[str, Any], step: int | None) -> dict[str, Any]:
        """Pass `values` and the latest consensus metrics to every sink.

        Tensors of one element are passed as numbers. The host waits for a GPU once, for all of them.

        Args:
            values: what to log. A value wins over a consensus metric of the same name.
            step: the optimizer step, passed to the sinks.

        Returns:
            The merged record.
        """
        copies = {name: HostCopy(value) for name, value in values.items() if _is_number(value)}
        # The last copy first: when it has arrived, the others have, too.
        numbers = {name: copy.read().item() for name, copy in reversed(copies.items())}
        merged = {name: numbers.get(name, value) for name, value in values.items()}
        merged |= {name: value for name, value in self.metrics().items() if name not in values}
        for sink in self.sinks:
            sink(merged, step)
        return merged


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _plain(value: Any) -> Any:
    """Convert tensors and NumPy scalars to numbers, and NaN and infinity to None."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
