"""What a run leaves behind: config.yaml, metrics.jsonl, tracker files, summary.json and plots in its output_dir."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from dsgdac_accel import GossipAccelerator, JsonlSink
from dsgdac_accel.config import config_to_dict
from tasks.common.algorithms import SynchronousAccelerator
from tasks.common.config import config_fingerprint, write_config
from tasks.common.plotting import PANELS, plot_run

TRACKER = "tracker"
"""Folder of the tracker files, where the tracker writes any."""

AnyAccelerator = SynchronousAccelerator | GossipAccelerator


class RunFolder:
    """The output folder of one run, opened on all workers and written by the main one.

    Args:
        folder: its path.
        config: of the run.
        accelerator: of the run.
        trackers: whether the run has any.
        resumed_at: the step at which the run that is in this folder goes on; then its log stays.

    Raises:
        ValueError: the workers have different configurations.
        OSError: the folder cannot be written; the message names it.
    """

    def __init__(
        self, folder: Path, config: Any, accelerator: AnyAccelerator, trackers: bool, resumed_at: int | None = None
    ) -> None:
        self.folder = folder
        self.accelerator = accelerator
        self.resumed_at = resumed_at
        self._lock = FileLock(folder / ".lock", blocking=False)
        self._log = folder / "metrics.jsonl"
        accelerator.group.require_equal(config_fingerprint(config), "configuration")
        # The main worker alone writes; all of them stop if it cannot.
        problems = accelerator.group.all_gather_object(self._try_to_open(config, trackers), "opening the output folder")
        for problem in filter(None, problems):
            raise OSError(problem)
        self._writes = accelerator.is_main_process
        accelerator.group.when_workers_change(self._take_over)

    def _take_over(self) -> None:
        """Write on where the main worker that was lost has stopped, unless that was another one."""
        if self._writes or not self.accelerator.is_main_process:
            return
        self._writes = True
        with suppress(Timeout):  # a worker that is silent still holds it
            self._lock.acquire()
        text = self._log.read_bytes()
        os.truncate(self._log, text.rfind(b"\n") + 1)  # of a line that was cut off, nothing stays
        self.accelerator.consensus_logger.add_sink(JsonlSink(self._log))

    def _try_to_open(self, config: Any, trackers: bool) -> str | None:
        """Begin the files of the run; what went wrong, in words, if something did."""
        try:
            if self.accelerator.is_main_process:
                self._begin_files(config)
            if trackers:
                # TensorBoard then hides what the earlier run wrote after the step that is gone on from.
                purge = {} if self.resumed_at is None else {"tensorboard": {"purge_step": self.resumed_at + 1}}
                self.accelerator.init_trackers(TRACKER, config=flat_config(config_to_dict(config)), init_kwargs=purge)
        except OSError as error:
            return (
                f"output_dir must be a folder that can be written; {self.folder} is not ({error.strerror or error}). "
                "Choose another output_dir."
            )
        return None

    def _begin_files(self, config: Any) -> None:
        """The configuration and an empty log; nothing that an earlier run logged or plotted in this folder stays.

        The folder belongs to this run until its process ends: two that write into one would spoil each other's log.
        Of a run that is gone on with, what it had logged stays, and so do the models it wants to average.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise BlockingIOError(f"another run is writing into it: {self.folder}") from None
        if self.resumed_at is None and self._log.exists():
            print(f"{self.folder} holds an earlier run, whose logs, plots and models this one replaces", flush=True)
        stale = [self.folder / name for name in ("summary.json", "curvature.json", *PANELS)]
        patterns = ["*.hypotheses.txt", "*.sources.txt", "*.references.txt", "deployed/*"]
        if self.resumed_at is None:
            patterns += [
                "metrics.jsonl",
                f"{TRACKER}/**/events.out.tfevents.*",
                f"{TRACKER}/**/hparams.yml",
                "averages/*",
            ]
        for pattern in patterns:
            stale += self.folder.glob(pattern)
        for file in stale:
            if not file.is_dir():
                file.unlink(missing_ok=True)
        write_config(config, self.folder)
        self.accelerator.consensus_logger.add_sink(JsonlSink(self._log))

    def logged_bytes(self) -> int:
        """How long the log is, on the main process; 0 on others."""
        return self._log.stat().st_size if self.accelerator.is_main_process else 0

    def cut_log_back(self, size: int) -> None:
        """Drop what the earlier run logged after the checkpoint that is gone on from."""
        if self.accelerator.is_main_process and self._log.stat().st_size > size:
            os.truncate(self._log, size)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json whole or not at all, then the plots. Call it on the main process."""
        write_json(self.folder / "summary.json", summary)
        plot_run(self.folder)


def lost_workers(accelerator: AnyAccelerator) -> dict[str, Any]:
    """For the summary: which workers the others went on without; nothing if there are none."""
    return {"lost_workers": accelerator.group.lost} if accelerator.group.lost else {}


@contextmanager
def writing_model(folder: Path) -> Iterator[None]:
    """Inside, a model is written into `folder`; a full disk is an OSError that names it.

    The libraries below raise errors of their own for that, tokenizers a bare Exception.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, SafetensorError | OSError) and type(error) is not Exception:
            raise
        raise OSError(
            f"the model cannot be written to {folder}: {error}. Free space, or choose another output_dir."
        ) from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(without_nan(values), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """The same with None for NaN and infinity, which JSON does not have, also in sections."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        broken = isinstance(value, float) and not math.isfinite(value)
        plain[key] = without_nan(value) if isinstance(value, dict) else None if broken else value
    return plain


def flat_config(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys with plain values, which is what trackers take."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flat_config(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
