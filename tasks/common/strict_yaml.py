"""Strict YAML: every value is text that remembers where it was written, until the type of its setting is known.

None of YAML's guesses applies then: `no` is not False, 012 is not ten and 1:30 is not ninety. Equal keys are refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag


class ConfigError(ValueError):
    """A configuration that cannot be used. The message is for the person who wrote it."""


class Text(str):
    """A single value as written.

    jsonargparse interprets every plain `str` by the rules of YAML 1.1, but leaves a subclass alone.
    """

    style: Literal["plain", "quoted", "argument"]
    """plain and quoted come from a file, argument from the command line."""
    label: str
    """Where it was written, such as `run.yaml:3`: the start of an error message."""
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


_WORDS = dict.fromkeys(["", "~", "null", "Null", "NULL"]) | {
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False
}  # fmt: skip
_EXPONENT = "[eE][-+]?[0-9]+"
_INTEGER = re.compile("[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(rf"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:{_EXPONENT})?|[0-9]+{_EXPONENT})")
_MOST_DIGITS = 1000  # Python refuses to read integers of more than 4300 digits
_MOST_VALUES = 100_000
_DEEPEST = 100
_TOO_DEEP = "sections or lists are nested too deeply, or contain themselves. Use fewer levels."


def plain_value(text: str) -> bool | int | float | str | None:
    """Read unquoted text as null, a boolean, a number, or text.

    >>> [plain_value(text) for text in ("1e-3", "5E4", ".5", "1000", "true", "~")]
    [0.001, 50000.0, 0.5, 1000, True, None]
    >>> [plain_value(text) for text in ("no", "012", "1_000", "1:30", "nan")]  # text here, unlike in YAML 1.1
    ['no', '012', '1_000', '1:30', 'nan']
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) < _MOST_DIGITS:
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else str(text)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file as nested dicts and lists of `Text`. An empty file is an empty dict.

    Raises:
        ConfigError: the file cannot be read or is not valid. The message names the file and, where known, the line.
    """
    root = parse_yaml(_source(path), str(path), path.absolute().parent)
    if root == "":
        return {}
    if not isinstance(root, dict):
        got = "a list" if isinstance(root, list) else repr(str(root))
        raise ConfigError(f"{path} must hold keys such as `seed: 1` at the top level; got {got}.")
    return root


def parse_yaml(source: str, label: str, folder: Path, style: str = "plain") -> Any:
    """Parse YAML as nested dicts and lists of `Text`; arguments as for `Text`, the label without a line.

    Raises:
        ConfigError: the text is not valid YAML.
    """

    class Constructor(SafeConstructor):
        """Keeps scalars as text, with the line that they were written in."""

        def construct_yaml_str(self, node: Any) -> Text:
            has_line = style == "plain" and node.value  # the mark of an empty value is that of the next one
            place = f"{label}:{node.start_mark.line + 1}" if has_line else label
            return Text(node.value, "quoted" if node.style else style, place, folder)

    Constructor.add_constructor("tag:yaml.org,2002:str", Constructor.construct_yaml_str)
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.Resolver = Constructor, _TextResolver
    try:
        root = yaml.load(source)
    except YAMLError as error:
        raise ConfigError(_syntax_message(label, source, error)) from error
    except RecursionError:
        raise ConfigError(f"{label}: {_TOO_DEEP}") from None
    _check_tree(root, label, {})
    return "" if root is None else root


class _TextResolver(VersionedResolver):
    """Takes every scalar without a tag of its own for text."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0]:
            return Tag(suffix=f"tag:yaml.org,2002:{'merge' if value == '<<' else 'str'}")
        return super().resolve(kind, value, implicit)


def _check_tree(node: Any, label: str, sizes: dict[int, int], depth: int = 0) -> int:
    """Refuse what no setting takes, and return the number of values, counting an alias like what it stands for."""
    if id(node) in sizes:
        return sizes[id(node)]
    if depth > _DEEPEST:
        raise ConfigError(f"{label}: {_TOO_DEEP}")
    parts = [*node, *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []
    if not parts and not isinstance(node, Text | dict | list | NoneType):
        raise ConfigError(f"{label}: keys and values must have no tag, and keys must be text; got {node!r}. Change it.")
    size = sizes[id(node)] = 1 + sum(_check_tree(part, label, sizes, depth + 1) for part in parts)
    if size > _MOST_VALUES:  # a few lines of aliases can stand for more values than fit into memory
        raise ConfigError(f"{label}: more than {_MOST_VALUES:,} values, counting aliases. Use fewer.")
    return size


def _source(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path.absolute()} does not exist.") from error
    except IsADirectoryError as error:
        raise ConfigError(f"config file {path.absolute()} is a folder. Name a YAML file in it.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config file {path.absolute()} is not UTF-8 text (byte {error.start}). Convert it."
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"config file {path.absolute()} cannot be read: {reason}.") from error


def _syntax_message(label: str, source: str, error: YAMLError) -> str:
    """The report of ruamel.yaml in one line, with the usual cause where it is known."""
    if isinstance(error, ReaderError):
        line = source.count("\n", 0, error.position) + 1
        return f"{label}:{line}: invalid YAML: the character #x{ord(source[error.position]):04x} is not allowed."
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    place = f"{label}:{mark.line + 1}" if mark else label
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    if twice := re.match('found duplicate key "(.*?)"', problem):
        return f"{place}: {twice[1]} is given twice. Keep one."
    advice = " Indent with spaces, not tabs." if r"'\t'" in problem else ""
    return f"{place}: invalid YAML: {problem}.{advice}"
