"""Strict YAML: the text of a file as nodes that remember where they were written.

YAML 1.1, which PyYAML reads, takes 1e-3 for text, `no` for False, 012 for ten and 1:30 for ninety, and keeps the
last of two equal keys. Here unquoted scalars stay text until their field's type is known, numbers are what a person
means, and equal keys are an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is for the person who wrote it."""


@dataclass(frozen=True)
class Origin:
    """Where a value was written, and the folder its relative paths start from."""

    label: str
    """What an error message begins with, such as `run.yaml:3` or `command line`."""
    folder: Path


@dataclass(frozen=True)
class Scalar:
    """One value as written."""

    text: str
    style: Literal["plain", "quoted", "argument"]
    """`plain` and `quoted` come from a file; an `argument` from the command line, where quotes are the shell's."""
    origin: Origin

    @property
    def value(self) -> bool | int | float | str | None:
        """The text as a person means it, before its field's type is known."""
        is_text = self.style == "quoted" or (self.style == "argument" and not self.text)
        return self.text if is_text else plain_value(self.text)

    @property
    def is_null(self) -> bool:
        """True for null, ~, nothing, and an unquoted `none`, for fields that may be None."""
        return self.value is None or (self.style != "quoted" and self.text.lower() == "none")


@dataclass(frozen=True)
class Items:
    """A list as written."""

    nodes: tuple[Node, ...]
    origin: Origin


@dataclass(frozen=True)
class Section:
    """A mapping as written."""

    nodes: dict[str, Node]
    origin: Origin


Node = Scalar | Items | Section

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(["", "~", "null", "Null", "NULL"]),
    **dict.fromkeys(["true", "True", "TRUE"], True),
    **dict.fromkeys(["false", "False", "FALSE"], False),
}
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_EXPONENT = "[eE][-+]?[0-9]+"
_INTEGER = re.compile("[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
_FLOAT = re.compile(rf"[-+]?(?:(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:{_EXPONENT})?|{_DIGITS}{_EXPONENT})")
_MOST_DIGITS = 1000  # Python refuses to read integers beyond 4300 digits


def plain_value(text: str) -> bool | int | float | str | None:
    """What an unquoted scalar means: null, a boolean, a number, or text.

    >>> [plain_value(text) for text in ("1e-3", "5E4", ".5", "1_000", "true", "~")]
    [0.001, 50000.0, 0.5, 1000, True, None]
    >>> [plain_value(text) for text in ("no", "012", "1:30", "nan")]  # text here, unlike YAML 1.1
    ['no', '012', '1:30', 'nan']
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) < _MOST_DIGITS:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def join_path(parent: str, name: str) -> str:
    """The dotted path of a key.

    >>> join_path("gossip", "power"), join_path("", "seed")
    ('gossip.power', 'seed')
    """
    return f"{parent}.{name}" if parent else name


def read_yaml(path: Path) -> Section:
    """The sections and keys of a YAML file; an empty file is an empty section.

    Raises ConfigError, naming the file and line, for whatever cannot be read.
    """
    source = _read_text(path)
    try:
        return _read_source(path, source)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(path, source, error)) from error
    except RecursionError as error:
        raise ConfigError(f"{path}: the sections or lists are nested too deeply.") from error


def _read_source(path: Path, source: str) -> Section:
    root = yaml.compose(source, Loader=_StrictLoader)
    if root is None or (root.tag == _PLAIN_TAG and root.value == ""):
        return Section({}, _origin(path, 1))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected keys such as `seed: 1` at the top level; got {_kind(root)}.")
    section = _NodeReader(path).read(root, "")
    assert isinstance(section, Section)
    return section


_PLAIN_TAG = "!plain"
_TAGS = {
    yaml.ScalarNode: (_PLAIN_TAG, "tag:yaml.org,2002:str"),
    yaml.SequenceNode: ("tag:yaml.org,2002:seq",),
    yaml.MappingNode: ("tag:yaml.org,2002:map",),
}
_MOST_VALUES = 100_000


class _StrictLoader(yaml.SafeLoader):
    """Marks unquoted scalars with one tag instead of guessing at their types."""

    yaml_implicit_resolvers = {None: [(_PLAIN_TAG, re.compile(""))]}


class _NodeReader:
    """Turns PyYAML's nodes into ours, once each however many aliases point at them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._finished: dict[int, Node | None] = {}
        self._sizes: dict[int, int] = {}

    def read(self, node: yaml.Node, where: str) -> Node:
        origin = _origin(self._path, _line(node))
        if id(node) in self._finished:
            known = self._finished[id(node)]
            if known is None:
                raise ConfigError(f"{origin.label}: {where}: contains itself through an alias.")
            return known
        self._finished[id(node)] = None
        result = self._read_new(node, where, origin)
        self._finished[id(node)] = result
        self._sizes[id(node)] = size = 1 + sum(self._sizes[id(part)] for part in _parts(node))
        if size > _MOST_VALUES:  # aliases of aliases: a few lines can stand for more than any memory holds
            raise ConfigError(f"{origin.label}: {where}: aliases make more than {_MOST_VALUES:,} values. Use fewer.")
        return result

    def _read_new(self, node: yaml.Node, where: str, origin: Origin) -> Node:
        if node.tag not in _TAGS[type(node)]:
            place = f"{where}: " if where else ""
            raise ConfigError(f"{origin.label}: {place}the tag {node.tag} is not supported. Write the plain value.")
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, where, origin)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return Items(tuple(self.read(item, f"{where}[{index}]") for index, item in items), origin)
        return Scalar(node.value, "plain" if node.tag == _PLAIN_TAG else "quoted", origin)

    def _read_mapping(self, node: yaml.MappingNode, where: str, origin: Origin) -> Section:
        own: dict[str, Node] = {}
        inherited: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._read_key(key_node, where)
            path = join_path(where, key)
            if key in lines:
                first, second = lines[key], _line(key_node)
                raise ConfigError(f"{self._path}: {path}: given twice, in lines {first} and {second}. Keep one.")
            lines[key] = _line(key_node)
            value = self.read(value_node, path)
            if key == "<<" and key_node.tag == _PLAIN_TAG:
                inherited = _inherited(value, path)
            else:
                own[key] = value
        return Section(inherited | own, origin)

    def _read_key(self, node: yaml.Node, where: str) -> str:
        key = self.read(node, where)
        if isinstance(key, Scalar) and isinstance(key.value, str):
            return key.value
        written = key.text if isinstance(key, Scalar) else _kind(node)
        place = f" in {where}" if where else ""
        raise ConfigError(f"{key.origin.label}: the key {written!r}{place} is not text. Put it in quotes.")


def _inherited(value: Node, where: str) -> dict[str, Node]:
    """The keys that YAML's `<<: *anchor` brings in; of several sections the first wins."""
    sections = value.nodes if isinstance(value, Items) else (value,)
    result: dict[str, Node] = {}
    for section in sections:
        if not isinstance(section, Section):
            raise ConfigError(f"{value.origin.label}: {where}: merges sections only. Name one, as in `<<: *base`.")
        result = section.nodes | result
    return result


def _read_text(path: Path) -> str:
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


def _syntax_message(path: Path, source: str, error: yaml.YAMLError) -> str:
    """PyYAML's report in one line, with the usual cause where it is known."""
    if isinstance(error, yaml.reader.ReaderError):
        line = source.count("\n", 0, error.position) + 1
        return f"{path}:{line}: invalid YAML: the character #x{ord(source[error.position]):04x} is not allowed."
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}" if mark else f"{path}"
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    advice = " Indent with spaces, not tabs." if r"'\t'" in problem else ""
    return f"{place}: invalid YAML: {problem}.{advice}"


def _origin(path: Path, line: int) -> Origin:
    return Origin(f"{path}:{line}", path.absolute().parent)


def _parts(node: yaml.Node) -> list[yaml.Node]:
    """The values in a section or list."""
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a section"
    return "a list" if isinstance(node, yaml.SequenceNode) else repr(node.value)
