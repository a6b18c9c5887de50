"""Configurations from a YAML file and the command line, for any tree of frozen dataclasses.

A class nested in another is a section of the file; `--section.key VALUE` sets one of its keys. The defaults of the
classes give way to the file, and the file to the command line. Nothing is ignored: a key that no class has, a value
of another type or a key given twice is an error that says where, what and what instead.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dsgdac_accel.config.conversion import absolute_path, convert, shown
from dsgdac_accel.config.help import help_text
from dsgdac_accel.config.schema import Key, keys_of, suggestion
from dsgdac_accel.config.strict_yaml import ConfigError, Node, Origin, Scalar, Section, join_path, read_yaml

Config = TypeVar("Config")
Settings = dict[str, Node]  # what was written, by dotted path

_COMMAND_LINE = "command line"


def parse_config(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    *,
    default_file: Path | None = None,
    prog: str | None = None,
    description: str | None = None,
) -> Config:
    """The configuration that `--config FILE.yaml` and overrides such as `--gossip.power 2` describe.

    Precedence: the defaults of the classes, then the file, then the command line. `argv` defaults to `sys.argv[1:]`;
    `default_file` is read when no `--config` is given. A relative path in a file starts from the folder of that file;
    one on the command line, or a default, from the working directory; `~` is the home folder.
    `--help` prints every key and exits with status 0.

    Raises ConfigError, with a one-line message, for whatever is not a valid configuration.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Run:
    ...     lr: float = 0.1
    ...     epochs: int = 3
    >>> parse_config(Run, ["--lr", "1e-3", "--epochs=5"])
    Run(lr=0.001, epochs=5)
    >>> parse_config(Run, ["--epoch", "5"])
    Traceback (most recent call last):
    dsgdac_accel.config.strict_yaml.ConfigError: command line: epoch: unknown key. Did you mean epochs?
    """
    words = list(sys.argv[1:] if argv is None else argv)
    keys = keys_of(cls)
    if {"-h", "--help"}.intersection(words):
        if os.environ.get("RANK", "0") == "0":  # once, not by every launched worker
            print(help_text(cls, keys, prog or Path(sys.argv[0]).name, description, default_file))
        raise SystemExit(0)
    overrides = _read_words(words)
    file = overrides.pop("config", None)
    upper = _settings_from_arguments(overrides, keys)
    path = _config_file(file.text) if file else default_file
    lower = dict(_settings_from_section(read_yaml(path), keys)) if path is not None else {}
    return _build(cls, keys, _overridden(lower, upper))


def load_config(cls: type[Config], file: Path | str) -> Config:
    """The configuration in a YAML file, whatever the command line of this process says."""
    keys = keys_of(cls)
    return _build(cls, keys, dict(_settings_from_section(read_yaml(Path(file)), keys)))


def config_from_command_line(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    *,
    default_file: Path | None = None,
    prog: str | None = None,
    description: str | None = None,
) -> Config:
    """`parse_config` for scripts: a mistake prints one line on stderr and exits with status 2.

    Of several launched workers, which all make the same mistake, the first one prints it.
    """
    try:
        return parse_config(cls, argv, default_file=default_file, prog=prog, description=description)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def _config_file(text: str) -> Path:
    if not text:
        raise ConfigError(f"{_COMMAND_LINE}: --config needs the name of a YAML file.")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)  # ~nobody/run.yaml: reported as a file that does not exist


def _read_words(words: Sequence[str]) -> dict[str, Scalar]:
    """`--key value` and `--key=value` by key, without the dashes."""
    origin = Origin(_COMMAND_LINE, Path.cwd())
    values: dict[str, Scalar] = {}
    rest = iter(words)
    for word in rest:
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ConfigError(f"{_COMMAND_LINE}: {word!r} is not understood. {_word_advice(word)}")
        if key in values:
            raise ConfigError(f"{_COMMAND_LINE}: {key}: given twice ({values[key].text!r} and again). Keep one.")
        if not equals:
            text = next(rest, "--")
        if not equals and text.startswith("--"):
            raise ConfigError(f"{_COMMAND_LINE}: {key}: no value given. Write --{key} VALUE or --{key}=VALUE.")
        values[key] = Scalar(text, "argument", origin)
    return values


def _word_advice(word: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return f"Name the file with --config {word}."
    return "Settings are written --key VALUE."


def _settings_from_arguments(values: Mapping[str, Scalar], keys: Mapping[str, Key]) -> Settings:
    settings: Settings = {}
    for path, scalar in values.items():
        if path not in keys:
            _refuse_unknown(path, keys, scalar)
        if keys[path].section is not None:
            _require_null(scalar, keys[path], keys)
        clash = next((other for other in settings if _is_within(path, other) or _is_within(other, path)), None)
        if clash:
            raise ConfigError(f"{_COMMAND_LINE}: {path}: contradicts --{clash}. Keep one.")
        settings[path] = scalar
    return settings


def _settings_from_section(section: Section, keys: Mapping[str, Key], parent: str = "") -> Iterable[tuple[str, Node]]:
    """The values in a file by dotted path; a section stands before what it holds."""
    for name, node in section.nodes.items():
        path = join_path(parent, name)
        if path not in keys or "." in name:
            _refuse_unknown(path, keys, node)
        if keys[path].section is None:
            yield path, node
        elif isinstance(node, Section):
            yield path, node
            yield from _settings_from_section(node, keys, path)
        elif not _is_left_empty(node):
            _require_null(node, keys[path], keys)
            yield path, node


def _is_left_empty(node: Node) -> bool:
    """A section heading with nothing below: its keys keep their defaults, as in an empty file."""
    return isinstance(node, Scalar) and node.style == "plain" and not node.text


def _require_null(node: Node, key: Key, keys: Mapping[str, Key]) -> None:
    """A section can be switched off with null where its type allows None; it takes no other value."""
    if key.may_be_none and isinstance(node, Scalar) and node.is_null:
        return
    inside = [path.rpartition(".")[2] for path in keys if path.rpartition(".")[0] == key.path]
    names = ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "")
    raise ConfigError(f"{node.origin.label}: {key.path}: expected a section (keys {names}), got {shown(node)}.")


def _refuse_unknown(path: str, keys: Mapping[str, Key], node: Node) -> NoReturn:
    if path in keys:  # a dotted key in a file
        advice = f"Write {' under '.join(f'{part}:' for part in reversed(path.split('.')))} instead of the dots."
    else:
        advice = suggestion(path, keys)
    raise ConfigError(f"{node.origin.label}: {path}: unknown key. {advice}")


def _is_within(path: str, section: str) -> bool:
    return path.startswith(f"{section}.")


def _overridden(lower: Settings, upper: Settings) -> Settings:
    """Both settings, the upper winning: nulling a section drops its keys, setting a key revives a nulled section."""

    def survives(path: str) -> bool:
        return not any(_is_within(path, other) or _is_within(other, path) for other in upper)

    return {path: node for path, node in lower.items() if survives(path)} | upper


def _build(cls: type[Config], keys: Mapping[str, Key], settings: Settings, parent: str = "") -> Config:
    names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    values = {name: _value(keys[join_path(parent, name)], keys, settings) for name in names}
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{parent}: {error}" if parent else str(error)) from error


def _value(key: Key, keys: Mapping[str, Key], settings: Settings) -> Any:
    node = settings.get(key.path)
    if key.section is not None:
        is_given = isinstance(node, Section) or any(_is_within(path, key.path) for path in settings)
        is_none = isinstance(node, Scalar) or (key.default is None and not is_given)
        return None if is_none else _build(key.section, keys, settings, key.path)
    if node is not None:
        return convert(node, key.hint, key.path)
    if key.default is MISSING:
        raise ConfigError(f"{key.path}: a value is required. Set it in the file or with --{key.path} VALUE.")
    return _anchored(key.default)


def _anchored(default: Any) -> Any:
    """A default with its relative paths made absolute, before the working directory can change."""
    if isinstance(default, Path):
        return absolute_path(default, Path.cwd())
    if type(default) in (list, tuple):
        return type(default)(map(_anchored, default))
    return default
