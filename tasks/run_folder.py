"""What a run leaves behind: config.yaml, metrics.jsonl, tracker files, summary.json and plots in its output_dir."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from algorithms import SynchronousAccelerator

from dsgdac_accel import GossipAccelerator, JsonlSink
from dsgdac_accel.config import config_fingerprint, config_to_dict, write_config
from dsgdac_accel.plotting import PANELS, plot_run

TRACKER = "tracker"
"""Folder of the tracker files, where the tracker writes any."""

AnyAccelerator = SynchronousAccelerator | GossipAccelerator


class RunFolder:
    """The output folder of one run, opened on all workers and written by the main one.

    Raises:
        ValueError: the workers have different configurations.
        OSError: the folder cannot be written; the message names it.
    """

    def __init__(self, folder: Path, config: Any, accelerator: AnyAccelerator, trackers: bool) -> None:
        self.folder = folder
        self.accelerator = accelerator
        accelerator.group.require_equal(config_fingerprint(config), "configuration")
        # The main worker alone writes; all of them stop if it cannot.
        problems = accelerator.group.gather(self._try_to_open(config, trackers), "opening the output folder")
        for problem in filter(None, problems):
            raise OSError(problem)

    def _try_to_open(self, config: Any, trackers: bool) -> str | None:
        """Begin the files of the run; what went wrong, in words, if something did."""
        try:
            if self.accelerator.is_main_process:
                self._begin_files(config)
            if trackers:
                self.accelerator.init_trackers(TRACKER, config=_flat(config_to_dict(config)))
        except OSError as error:
            return (
                f"output_dir must be a folder that can be written; {self.folder} is not ({error.strerror or error}). "
                "Choose another output_dir."
            )
        return None

    def _begin_files(self, config: Any) -> None:
        """The configuration and an empty log; nothing that an earlier run logged or plotted in this folder stays."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stale = [self.folder / name for name in ("metrics.jsonl", "summary.json", *PANELS)]
        stale += self.folder.glob(f"{TRACKER}/**/events.out.tfevents.*")
        for pattern in ("*.hypotheses.txt", "*.sources.txt", "*.references.txt", "deployed/*", "averages/*"):
            stale += self.folder.glob(pattern)
        for file in stale:
            if not file.is_dir():
                file.unlink(missing_ok=True)
        write_config(config, self.folder)
        self.accelerator.consensus_logger.add_sink(JsonlSink(self.folder / "metrics.jsonl"))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json whole or not at all, then the plots. Call it on the main process."""
        path = self.folder / "summary.json"
        partial = path.with_suffix(".partial")
        values = {key: None if _is_not_finite(value) else value for key, value in summary.items()}
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
        plot_run(self.folder)


def _is_not_finite(value: Any) -> bool:
    """NaN and infinity, which JSON does not have."""
    return isinstance(value, float) and not math.isfinite(value)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys with plain values, which is what trackers take."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
