"""Checks of a sweep before its first run, for mistakes that would show only later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dsgdac_accel import build_topology
from tasks.common.algorithms import SYNCHRONOUS
from tasks.common.config import ConfigError, parse_config
from tasks.common.known_tasks import base_values, config_class_of, split_check_of
from tasks.studies.config import LaunchConfig, SweepConfig
from tasks.studies.plan import PlannedRun


def require_valid(sweep: SweepConfig, runs: Sequence[PlannedRun]) -> None:
    """Raise ConfigError if the task would refuse the settings of a run, such as a misspelt key.

    The settings of a script that is not one of this package are not known here, and are left to the script.
    """
    config_class = config_class_of(sweep.task)
    if config_class is None:
        return
    for run in _one_per_setting(runs):
        try:
            config: Any = parse_config(config_class, run.arguments)
            _check_workers(config, workers_of(run.launch, config))
        except ValueError as error:
            raise ConfigError(f"{run.setting.name}: {error}") from None


def require_startable(sweep: SweepConfig, runs: Sequence[PlannedRun]) -> None:
    """Raise ConfigError if this machine cannot start a run: too few GPUs or machines, or no such data."""
    config_class, gpus = config_class_of(sweep.task), torch.accelerator.device_count()
    sources: dict[Any, str] = {}
    for run in _one_per_setting(runs):
        name, launch = run.setting.name, run.launch
        elsewhere = "start it by --print-commands or --slurm, or try --smoke"
        if launch.nodes > 1:
            raise ConfigError(f"{name}: a run takes {launch.nodes} machines and this is one: {elsewhere}.")
        if launch.gpus > gpus:
            raise ConfigError(f"{name}: a run takes {launch.gpus} GPUs and this machine has {gpus}: {elsewhere}.")
        if config_class is not None:
            config: Any = parse_config(config_class, run.arguments)
            _require_inputs(config, name)
            sources.setdefault(getattr(config, "data", None), name)
    check = split_check_of(sweep.task)
    for data, name in sources.items():
        try:
            if check is not None and data is not None:
                check(data)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{name}: {error}") from None


def workers_of(launch: LaunchConfig, config: Any) -> int:
    """Return the number of workers of a run: machines x processes x workers in each process."""
    processes = launch.processes
    if processes is None and launch.config_file is not None:
        processes = int(base_values(launch.config_file).get("num_processes") or 1)
    return launch.nodes * (processes or 1) * config.gossip.workers_per_process


def _one_per_setting(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    return list({run.setting.labels: run for run in runs}.values())  # seeds differ in nothing else


def _check_workers(config: Any, workers: int) -> None:
    """Check what depends on the number of workers, which a task learns when it is started."""
    if config.algorithm not in SYNCHRONOUS and isinstance(config.gossip.topology, str):
        build_topology(config.gossip.topology, workers)
    batch = getattr(config, "global_batch_size", None)
    shares = workers * getattr(config, "gradient_accumulation_steps", 1)
    if batch is not None and batch % shares:
        raise ConfigError(
            f"global_batch_size must divide evenly: {batch} over {workers} workers and their accumulation steps. "
            f"Use a multiple of {shares}."
        )


def _require_inputs(config: Any, name: str) -> None:
    """Check that the files and folders that a run reads are there."""
    data = getattr(config, "data", None)
    inputs = {"data.path": getattr(data, "path", None), "data.tokenizer": getattr(data, "tokenizer", None)}
    if not isinstance(config.model, str):
        inputs["model"] = config.model
    for key, path in inputs.items():
        if isinstance(path, Path) and not path.exists():
            raise ConfigError(f"{name}: {key} must exist; got {path}. Give the right one with --set {key}=PATH.")
