"""The tasks of this package, found by a configuration file or by the path of their script."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.common.config import join_path
from tasks.common.config_types import convert
from tasks.common.strict_yaml import read_yaml

FOLDER = Path(__file__).resolve().parents[1]
"""Folder of the scripts."""

_CONFIG_CLASSES = {
    "cifar.py": ("tasks.images.config", "CifarConfig"),
    "trainer_language.py": ("tasks.language.config", "LanguageConfig"),
    "wmt14.py": ("tasks.translation.config", "TranslationConfig"),
}
_SPLIT_CHECKS = {"cifar.py": "tasks.images.sources", "wmt14.py": "tasks.translation.data"}


def script_for(config: Path) -> Path:
    """Return the script of the task that a configuration file is for.

    Raises ConfigError if the file cannot be read.
    """
    values = base_values(config)
    if "text" in values:  # a key of the language task alone
        return FOLDER / "trainer_language.py"
    # Only the translation task counts its batches in tokens.
    return FOLDER / ("wmt14.py" if "batch_tokens" in values else "cifar.py")


def config_class_of(script: Path) -> type | None:
    """Return the configuration class of a task; None for a script that is not one of this package."""
    script = script.resolve()
    if script.parent != FOLDER or script.name not in _CONFIG_CLASSES:
        return None
    module, name = _CONFIG_CLASSES[script.name]
    return getattr(importlib.import_module(module), name)


def split_check_of(script: Path) -> Callable[[Any], None] | None:
    """Return what raises ValueError or OSError for the section data of a task if its local data lack a split.

    None for a script that is not one of this package, and for a task without local data.
    """
    if config_class_of(script) is None or script.name not in _SPLIT_CHECKS:
        return None
    check: Callable[[Any], None] = importlib.import_module(_SPLIT_CHECKS[script.name]).require_local_splits
    return check


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
