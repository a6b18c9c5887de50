"""Configurations written down: plain values, YAML that loads back equal, and a fingerprint to compare workers by."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from dsgdac_accel.config.conversion import absolute_path
from dsgdac_accel.config.schema import keys_of, section_of, suggestion
from dsgdac_accel.config.strict_yaml import join_path, plain_value

_FILE_NAME = "config.yaml"
_SAFE_TEXT = re.compile(r"[A-Za-z/][\w/.+-]*", re.ASCII)
# `none` is read as null where null is allowed; other YAML readers take the rest for booleans.
_QUOTED_WORDS = frozenset({"none", "yes", "no", "on", "off", "y", "n"})


def config_to_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested dicts, lists and plain values, in the order of the fields.

    Paths become absolute text. An object with a name, such as a Topology, is written as that name.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Run:
    ...     betas: tuple[float, float] = (0.9, 0.98)
    >>> config_to_dict(Run())
    {'betas': [0.9, 0.98]}
    """
    return _section_to_dict(config, "", lambda named: named.name)


def _section_to_dict(section: Any, parent: str, spell: Callable[[Any], str]) -> dict[str, Any]:
    hints = get_type_hints(type(section))
    result: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        if field.init:
            value, path = getattr(section, field.name), join_path(parent, field.name)
            is_section = section_of(hints[field.name])[0] is not None and value is not None
            result[field.name] = _section_to_dict(value, path, spell) if is_section else _plain(value, path, spell)
    return result


def _plain(value: Any, path: str, spell: Callable[[Any], str]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(absolute_path(value, Path.cwd()))
    if isinstance(value, list | tuple):
        return [_plain(item, path, spell) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, path, spell) for key, item in value.items()}
    if isinstance(getattr(value, "name", None), str):
        return spell(value)
    raise TypeError(f"{path}: {value!r} ({type(value).__name__}) cannot be written to YAML. Use a plain value.")


def dump_config(config: Any) -> str:
    """The configuration as YAML; loading it gives an equal one, to the last digit.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Run:
    ...     lr: float = 1e-3
    ...     tracker: str = "no"
    >>> print(dump_config(Run()), end="")
    lr: 0.001
    tracker: "no"
    """
    return yaml.dump(
        config_to_dict(config),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=math.inf,
    )


def write_config(config: Any, output_dir: Path | str) -> Path:
    """Write `config.yaml` into a folder, made if need be; returns the file's path.

    A reader, or a crash, never sees half a file.
    """
    target = Path(output_dir) / _FILE_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{_FILE_NAME}.{os.getpid()}")
    try:
        unfinished.write_text(dump_config(config), encoding="utf-8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def config_fingerprint(config: Any, ignore: Iterable[str] = ()) -> str:
    """SHA-256 of the values, 64 hexadecimal digits: equal on all workers that were given the same configuration.

    `ignore` names keys that may differ between workers, such as `output_dir`, or whole sections.

    Raises ValueError for an ignored key that does not exist.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Run:
    ...     lr: float = 1e-3
    ...     output_dir: Path = Path("runs")
    >>> here, there = Run(), Run(output_dir=Path("elsewhere"))
    >>> config_fingerprint(here) == config_fingerprint(there)
    False
    >>> config_fingerprint(here, ignore=["output_dir"]) == config_fingerprint(there, ignore=["output_dir"])
    True
    """
    # Topologies of one name can differ: those that have a fingerprint of their own are told apart by it.
    values = _section_to_dict(config, "", lambda named: getattr(named, "fingerprint", named.name))
    for path in ignore:
        _remove(values, path, type(config))
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _remove(values: dict[str, Any], path: str, cls: type) -> None:
    known = keys_of(cls)
    if path not in known:
        raise ValueError(f"ignore must name keys of {cls.__name__}; got {path!r}. {suggestion(path, known)}")
    section: Any = values
    *parents, name = path.split(".")
    for parent in parents:
        section = section.get(parent) or {}  # a section may be None
    section.pop(name, None)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that this package, or another YAML reader, might take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_safe = _SAFE_TEXT.fullmatch(text) and isinstance(plain_value(text), str) and text.lower() not in _QUOTED_WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_safe else '"')


_Dumper.add_representer(str, _represent_text)
