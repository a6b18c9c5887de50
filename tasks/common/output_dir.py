"""The output folder of a run: config.yaml, metrics.jsonl, tracker files, summary.json, plots and the deployed model."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from dsgdac_accel import GossipAccelerator, JsonlSink
from dsgdac_accel.checkpoint.serialization import write_whole
from dsgdac_accel.config import config_to_dict
from dsgdac_accel.doctor import check_equal, errors_of, flat_settings
from tasks.common.algorithms import SynchronousAccelerator
from tasks.common.config import dump_config
from tasks.common.known_tasks import flat_values
from tasks.common.plotting import PANELS, plot_run

TRACKER = "tracker"
"""Folder of the tracker files, for trackers that write any."""

AnyAccelerator = SynchronousAccelerator | GossipAccelerator


class OutputDir:
    """The output folder of one run. The main worker writes it; all workers use this class.

    Creating the object changes nothing on disk. `begin` replaces what an earlier run left in the folder, so call it
    when nothing can be refused any more.

    Args:
        config: settings of the run, with `output_dir` and `report_to`.
        accelerator: accelerator of the run.

    Raises ValueError on all workers if their configurations differ; it names each key and its values.
    """

    def __init__(self, config: Any, accelerator: AnyAccelerator) -> None:
        self.config = config
        self.accelerator = accelerator
        self.folder: Path = config.output_dir
        self._lock = FileLock(self.folder / ".lock", blocking=False)
        self._log = self.folder / "metrics.jsonl"
        everyone = accelerator.group.all_gather_object(flat_settings(config), "comparing the configurations")
        advice = "Start all workers with the same file and arguments."
        if wrong := errors_of(check_equal("configuration", everyone, advice)):
            raise ValueError(f"configuration: {'; '.join(finding.text for finding in wrong)}. {advice}")

    def begin(self, resumed_at: int | None = None, log_bytes: int | None = None) -> None:
        """Lock the folder for this process, remove the files of an earlier run and start the log. Collective.

        Args:
            resumed_at: step at which the run of this folder goes on; its log and trackers then stay. None: a new run.
            log_bytes: length of that log at `resumed_at`; the rest is cut off.

        Raises OSError on all workers, naming the folder, if it cannot be written, another run writes into it, or it
        holds a finished run that `overwrite_output_dir` does not give up.
        """
        problem = None
        try:
            if self.accelerator.is_main_process:
                problem = self._begin_files(resumed_at, log_bytes)
            if self.config.report_to and problem is None:
                # With purge_step, TensorBoard hides what the interrupted run wrote after the checkpoint.
                purge = {} if resumed_at is None else {"tensorboard": {"purge_step": resumed_at + 1}}
                settings = flat_config(config_to_dict(self.config))
                self.accelerator.init_trackers(TRACKER, config=settings, init_kwargs=purge)
        except OSError as error:
            problem = (
                f"output_dir must be a folder that can be written; {self.folder} is not ({error.strerror or error}). "
                "Choose another output_dir."
            )
        for found in filter(None, self.accelerator.group.all_gather_object(problem, "opening the output folder")):
            raise OSError(found)

    def _begin_files(self, resumed_at: int | None, log_bytes: int | None) -> str | None:
        if resumed_at is None and not self.config.overwrite_output_dir and (self.folder / "summary.json").exists():
            return (
                f"output_dir must be new; {self.folder} holds a finished run. Choose another output_dir, or replace "
                f"that run by --overwrite_output_dir true."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()  # held until the process ends: two runs would mix their logs
        except Timeout:
            raise BlockingIOError(f"another run is writing into it: {self.folder}") from None
        if resumed_at is None and self._log.exists():
            print(f"{self.folder} holds a run that did not finish; this one replaces it", flush=True)
        stale = [self.folder / name for name in ("summary.json", "curvature.json", *PANELS)]
        patterns = ["*.hypotheses.txt", "*.sources.txt", "*.references.txt", "deployed/*"]
        if resumed_at is None:
            trackers = [f"{TRACKER}/**/events.out.tfevents.*", f"{TRACKER}/**/hparams.yml"]
            patterns += ["metrics.jsonl", *trackers]
        for pattern in patterns:
            stale += self.folder.glob(pattern)
        for file in stale:
            if not file.is_dir():
                file.unlink(missing_ok=True)
        if log_bytes is not None and self._log.exists() and self._log.stat().st_size > log_bytes:
            os.truncate(self._log, log_bytes)
        write_whole(self.folder / "config.yaml", [dump_config(self.config).encode()])
        self.accelerator.consensus_logger.add_sink(JsonlSink(self._log))
        return None

    def logged_bytes(self) -> int:
        """Length of the log on the main worker; 0 on the others."""
        return self._log.stat().st_size if self.accelerator.is_main_process else 0

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json whole or not at all, then the plots. Only the main worker calls it.

        Without matplotlib there are no plots, and a message says so.
        """
        write_json(self.folder / "summary.json", summary)
        try:
            plot_run(self.folder)
        except ImportError as error:  # the run is complete; dsgdac plot draws them later
            print(f"no plots: {error}", file=sys.stderr, flush=True)


@contextmanager
def writing_model(folder: Path) -> Iterator[None]:
    """Turn a failure to write a model, such as a full disk, into an OSError that names `folder`.

    safetensors raises an error type of its own for it, tokenizers a bare Exception.
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
    """Write a JSON file whole or not at all, with null for NaN and infinity."""
    write_whole(path, [(json.dumps(without_nan(values), indent=2) + "\n").encode()])


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON does not have, by None; nested dicts included."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        broken = isinstance(value, float) and not math.isfinite(value)
        plain[key] = without_nan(value) if isinstance(value, dict) else None if broken else value
    return plain


def flat_config(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested sections to dotted keys with plain values, as trackers take them.

    >>> flat_config({"seed": 0, "data": {"name": "digits", "path": None}})
    {'seed': 0, 'data.name': 'digits', 'data.path': 'None'}
    """
    flat = flat_values(values)
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in flat.items()}
