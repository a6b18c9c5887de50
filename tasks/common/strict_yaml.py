"""Strict YAML: every value is text that remembers where it was written, until the type of its setting is known.

None of YAML's guesses applies then: `no` is not False, 012 is not ten and 1:30 is not ninety. Equal keys are refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError


class ConfigError(ValueError):
    """A configuration that cannot be used. The message is for the person who wrote it."""


class Text(str):
    """A single value as written."""

    style: Literal["plain", "quoted", "argument"]
    """plain and quoted come from a file, argument from the command line."""
    label: str
    """Where it was written, such as `run.yaml:3: `: the start of an error message."""
    folder: Path
    """Folder that a relative path starts from."""

    def __new__(cls, text: str, style: str = "plain", label: str = "", folder: Path = Path()) -> Text:
        self = super().__new__(cls, text)
        self.__dict__.update(style=style, label=label, folder=folder)
        return self

    @property
    def value(self) -> bool | int | float | str | None:
        """The meaning of the text before the type of its setting is known."""
        is_literal = self.style == "quoted" or (self.style == "argument" and not self)
        return str(self) if is_literal else plain_value(self)

    @property
    def is_null(self) -> bool:
        """Whether the text unsets a value that may be null."""
        return self.value is None or (self.style != "quoted" and self.lower() == "none")


_WORDS = dict.fromkeys(["", "~", "null", "Null", "NULL"]) | {
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False
}  # fmt: skip
_INTEGER = re.compile("[-+]?(?:0|[1-9][0-9]{0,999})")  # Python refuses to read more than 4300 digits
_EXPONENT = "[eE][-+]?[0-9]+"
_FLOAT = re.compile(rf"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:{_EXPONENT})?|[0-9]+{_EXPONENT})")


def plain_value(text: str) -> bool | int | float | str | None:
    """Read unquoted text as null, a boolean, a number, or text.

    >>> [plain_value(text) for text in ("1e-3", "5E4", ".5", "1000", "true", "~")]
    [0.001, 50000.0, 0.5, 1000, True, None]
    >>> [plain_value(text) for text in ("no", "012", "1_000", "1:30", "nan")]  # text here, unlike in YAML 1.1
    ['no', '012', '1_000', '1:30', 'nan']
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else str(text)


def read_yaml(path: Path) -> dict[Text, Any]:
    """Read a YAML file as nested dicts and lists of `Text`. An empty file is an empty dict.

    Raises:
        ConfigError: the file cannot be read or is not valid. The message names the file and, where known, the line.
    """
    try:
        source = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"config file {path.absolute()} does not exist. Name a YAML file.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"config file {path.absolute()} cannot be read: {reason}. Name a YAML file.") from None
    tree = parse_yaml(source, str(path), path.absolute().parent)
    if tree and not isinstance(tree, dict):
        got = "a list" if isinstance(tree, list) else repr(str(tree))
        raise ConfigError(f"{path} must hold keys such as `seed: 1` at the top level; got {got}.")
    return tree or {}


_TAG = "tag:yaml.org,2002:"
_SCALARS = [f"{_TAG}{kind}" for kind in ("str", "null", "bool", "int", "float", "timestamp", "value")]
_COLLECTIONS = {tag: SafeConstructor.yaml_constructors[tag] for tag in (f"{_TAG}map", f"{_TAG}seq", None)}
_MOST_VALUES = 100_000
_MOST_LEVELS = 100


def parse_yaml(source: str, label: str, folder: Path, style: Literal["plain", "argument"] = "plain") -> Any:
    """Parse YAML as nested dicts and lists of `Text`; arguments as for `Text`, the label without line and colon.

    Raises:
        ConfigError: the text is not valid YAML.
    """

    def construct_text(_: SafeConstructor, node: Any) -> Text:
        is_placed = style == "plain" and node.value  # the mark of an empty value is that of the next one
        place = f"{label}:{node.start_mark.line + 1}: " if is_placed else f"{label}: "
        is_text = node.style and node.tag == f"{_TAG}str"
        return Text(node.value, "quoted" if is_text else style, place, folder)

    class Constructor(SafeConstructor):
        yaml_constructors = _COLLECTIONS | dict.fromkeys(_SCALARS, construct_text)  # any other tag is an error

    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = Constructor
    try:
        tree = yaml.load(source)
    except RecursionError:
        raise ConfigError(f"{label} has too many levels. Use fewer.") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line if mark else source.count("\n", 0, getattr(error, "position", 0))
        problem = " ".join((getattr(error, "problem", None) or str(error).splitlines()[0]).split())
        if twice := re.match('found duplicate key "(.*?)"', problem):
            raise ConfigError(f"{label}:{line + 1}: {twice[1]} is given twice. Keep one.") from None
        advice = " Indent with spaces, not tabs." if r"'\t'" in problem else ""
        raise ConfigError(f"{label}:{line + 1}: invalid YAML: {problem}.{advice}") from None
    # An alias counts like what it stands for, and can stand for itself.
    nodes = [(tree, 0)]
    for node, level in nodes:
        if len(nodes) > _MOST_VALUES or level > _MOST_LEVELS:
            raise ConfigError(f"{label} has too many values or levels, counting what aliases stand for. Use fewer.")
        if isinstance(node, tuple):
            raise ConfigError(f"{label}: keys must be text; got a list or section as a key. Change it.")
        parts = [*node, *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []
        nodes += [(part, level + 1) for part in parts]
    return tree
