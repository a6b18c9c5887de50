"""The tasks of this package, found by a configuration file or by the path of their script."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.config import join_path
from tasks.common.config_types import convert
from tasks.common.strict_yaml import read_yaml

FOLDER = Path(__file__).resolve().parents[1]
"""Folder of the scripts."""


@dataclass(frozen=True)
class KnownTask:
    """A task, with the names `module:object` of its parts, which are imported when they are asked for."""

    script: str
    """File name of its script."""
    config: str
    """Class of its configuration."""
    run: str | None = None
    """Class of its runs, built from a configuration; None for a task with a Trainer."""
    split_check: str | None = None
    """What raises ValueError or OSError for the section data if its local data lack a split."""
    key: str | None = None
    """A key of every configuration of this task and of no other; None for the task of configurations without one."""


TASKS = (
    KnownTask(
        "cifar.py",
        config="tasks.images.config:CifarConfig",
        run="tasks.images.run:ImageRun",
        split_check="tasks.images.sources:require_local_splits",
    ),
    KnownTask("trainer_language.py", config="tasks.language.config:LanguageConfig", key="text"),
    KnownTask(
        "wmt14.py",
        config="tasks.translation.config:TranslationConfig",
        run="tasks.translation.run:TranslationRun",
        split_check="tasks.translation.data:require_local_splits",
        key="batch_tokens",
    ),
)


def task_for(config: Path) -> KnownTask:
    """Return the task that a configuration file is for. Raises ConfigError if the file cannot be read."""
    values = base_values(config)
    return next((task for task in TASKS if task.key in values), TASKS[0])


def script_for(config: Path) -> Path:
    """Return the script of the task that a configuration file is for; raises like `task_for`."""
    return FOLDER / task_for(config).script


def config_class_of(script: Path) -> type | None:
    """Return the configuration class of a task; None for a script that is not one of this package."""
    task = _task_of(script)
    return None if task is None else pkgutil.resolve_name(task.config)


def split_check_of(script: Path) -> Callable[[Any], None] | None:
    """Return `KnownTask.split_check` of a script; None for one that is not of this package, or has none."""
    task = _task_of(script)
    return None if task is None or task.split_check is None else pkgutil.resolve_name(task.split_check)


def _task_of(script: Path) -> KnownTask | None:
    script = script.resolve()
    return next((task for task in TASKS if script == FOLDER / task.script), None)


def base_values(file: Path) -> dict[str, Any]:
    """Return the values of a configuration file by dotted key, as written.

    Raises ConfigError if the file cannot be read.
    """
    return flat_values(convert(read_yaml(file), dict[str, Any], str(file)))


def flat_values(values: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Return nested sections as dotted keys; an empty section is a value.

    >>> flat_values({"gossip": {"power": 3}, "data": {}})
    {'gossip.power': 3, 'data': {}}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = join_path(parent, key)
        flat |= flat_values(value, path) if isinstance(value, Mapping) and value else {path: value}
    return flat
