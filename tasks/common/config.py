"""Configurations from a YAML file and the command line, for any tree of frozen dataclasses.

A dataclass inside another one is a section of the file; `--section.key VALUE` sets one of its keys. The command line
wins over the file, and the file over the defaults. An unknown key, a value of another type or a key given twice is an
error that says where, what, and what to write instead.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from dsgdac_accel.checks import absolute_path
from dsgdac_accel.config import config_to_dict
from tasks.common.config_hints import hint
from tasks.common.config_types import convert, describe, label_of, shown
from tasks.common.strict_yaml import ConfigError, Text, read_yaml

Config = TypeVar("Config")

_EPILOG = """Precedence: defaults, then the file, then the command line. On the command line, lists are written a,b or
[a, b]. A relative path in a file starts from the folder of that file; on the command line, and in a default, from the
working directory. ~ is the home folder. null (or none) unsets a value that may be null."""


def parse_config(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    *,
    default_file: Path | None = None,
    prog: str | None = None,
    description: str | None = None,
) -> Config:
    """Read a configuration from the command line: `--config FILE.yaml` and settings such as `--gossip.power 2`.

    `--help` prints every key, `--print_config` prints the configuration as YAML; both exit with status 0. Of several
    launched workers, only the first one prints.

    Args:
        cls: the class of the configuration, a frozen dataclass.
        argv: the command line; None takes `sys.argv[1:]`.
        default_file: the file that is read without `--config`.
        prog: the name of the program for `--help`; None takes that of the script.
        description: what the program does, for `--help`.

    Raises:
        ConfigError: the configuration is not valid. The message is one line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        _print_and_exit(_help_text(cls, prog or Path(sys.argv[0]).name, description, default_file))
    given = _read_words([word for word in words if word != "--print_config"], keys_of(cls))
    file = given.pop(Text("config"), None)
    config = _config_from(cls, default_file if file is None else Path(os.path.expanduser(file)), given)
    if "--print_config" in words:
        _print_and_exit(dump_config(config))
    return config


def load_config(cls: type[Config], file: Path | str) -> Config:
    """Read a configuration from a YAML file alone; raises like `parse_config`."""
    return _config_from(cls, Path(file), {})


def _print_and_exit(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, end="")
    raise SystemExit(0)


def _read_words(words: Sequence[str], known: Mapping[str, Key]) -> dict[Text, Text]:
    """`--key value` and `--key=value` by key, without the dashes."""
    given: dict[Text, Text] = {}
    as_written = functools.partial(Text, style="argument", label="command line: ", folder=Path.cwd())
    if broken := [word for word in words if word.encode(errors="replace").decode() != word]:
        raise ConfigError(f"command line: {broken[0]!r} is not UTF-8 text. Retype it.")
    rest = iter(words)
    for word in rest:
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            is_file = word.endswith((".yaml", ".yml"))
            way_out = f"Name the file with --config {word}." if is_file else "Write settings as --key VALUE."
            raise ConfigError(f"command line: {word!r} is not a setting. {way_out}")
        if key not in ("config", *known):
            raise _unknown(as_written(key), key, known)
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise ConfigError(f"command line: {key} needs a value. Write --{key} VALUE or --{key}=VALUE.")
        for other, value in given.items():
            if f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}."):
                raise ConfigError(f"command line: --{other} {value} and --{key} {text} are both given. Keep one.")
        given[as_written(key)] = as_written(text)
    return given


def _config_from(cls: type[Config], file: Path | None, given: Mapping[Text, Text]) -> Config:
    known = keys_of(cls)
    tree: dict[Any, Any] = read_yaml(file) if file is not None else {}
    for path, text in given.items():
        *parents, name = path.split(".")
        section = tree
        for parent in parents:
            # A copy, since an alias may share it. A key also brings back a section that is null in the file.
            below = section.get(parent)
            section[parent] = dict(below) if isinstance(below, dict) else {}
            section = section[parent]
        section[name] = text
    return _built(cls, "", tree, known)


def _unknown(name: Text, path: str, known: Mapping[str, Key]) -> ConfigError:
    way_out = "Indent it below its section." if path in known else hint(path, known)
    return ConfigError(f"{name.label}unknown key {path}. {way_out}")


def _built(cls: type[Config], path: str, node: Mapping[Any, Any], known: Mapping[str, Key]) -> Config:
    """A section, and the sections in it; path "" is the whole configuration."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for name in node:
        if name not in names:
            raise _unknown(name, join_path(path, name), known)
    values = {name: _value(join_path(path, name), node.get(name), known) for name in names}
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        names_key = str(error).split(" ", 1)[0].rstrip(":") in names
        raise ConfigError(f"{path}{'.' if names_key else ': '}{error}" if path else str(error)) from error


def _value(path: str, node: Any, known: Mapping[str, Key]) -> Any:
    """The value of a key from what was written, None where nothing was."""
    key = known[path]
    if key.section is not None:
        if (node is None and key.default is None) or (key.may_be_none and isinstance(node, Text) and node.is_null):
            return None
        if node is None or (node == "" and node.style == "plain"):
            node = {}  # an empty heading keeps the defaults of its keys
        if not isinstance(node, dict):
            first = dataclasses.fields(key.section)[0].name
            raise ConfigError(f"{label_of(node)}{path} must be a section with keys such as {first}; got {shown(node)}.")
        return _built(key.section, path, node, known)
    if node is not None:
        return convert(node, key.hint, path)
    if key.default is MISSING:
        raise ConfigError(f"{path} must be given. Set it in the file or with --{path} VALUE.")
    # Absolute before the working directory can change.
    return absolute_path(key.default, Path.cwd()) if isinstance(key.default, Path) else key.default


# The keys of configuration classes


@dataclass(frozen=True)
class Key:
    """A value, or a section with keys of its own."""

    hint: Any
    """Type."""
    default: Any
    """MISSING if a value must be given."""
    section: type | None
    """Class of a section; None for a value."""
    owner: type
    """Class that has the key as a field."""

    @property
    def may_be_none(self) -> bool:
        """Whether null is accepted."""
        return NoneType in get_args(self.hint)


def keys_of(cls: type, path: str = "", instance: Any = None) -> dict[str, Key]:
    """The keys of a configuration class and of its sections by dotted key, each section before its keys.

    Args:
        cls: a dataclass.
        path: dotted key of its section.
        instance: holds the defaults; None takes those of the class.

    >>> @dataclass(frozen=True)
    ... class Optimizer:
    ...     lr: float = 0.1
    >>> list(keys_of(dataclasses.make_dataclass("Run", [("optimizer", Optimizer), ("epochs", int, 3)])))
    ['optimizer', 'optimizer.lr', 'epochs']
    """
    keys: dict[str, Key] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        default = default if instance is None else getattr(instance, field.name)
        members = [member for member in get_args(hints[field.name]) if member is not NoneType] or [hints[field.name]]
        section: Any = members[0] if len(members) == 1 and dataclasses.is_dataclass(members[0]) else None
        name = join_path(path, field.name)
        keys[name] = Key(hints[field.name], default, section, cls)
        if section is not None:
            keys |= keys_of(section, name, None if default is MISSING else default)
    return keys


def join_path(parent: str, name: str) -> str:
    """The dotted path of a key."""
    return f"{parent}.{name}" if parent else name


# Help


def _help_text(cls: type, prog: str, description: str | None, default_file: Path | None) -> str:
    """The page of --help: every key with its type, default and meaning."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE.yaml] [--key VALUE | --section.key=VALUE ...]",
        description=description,
        epilog=_EPILOG,
    )
    file = f" (default: {default_file})" if default_file else ""
    parser.add_argument("--config", metavar="FILE.yaml", help=f"YAML file with the keys below.{file}")
    about = "Print the configuration, file and command line included, as YAML and exit."
    parser.add_argument("--print_config", action="store_true", help=about)
    groups: dict[str, Any] = {"": parser}
    for path, key in keys_of(cls).items():
        about = docs_of(key.owner).get(path.rpartition(".")[2], "")
        if key.section is not None:
            off = "null switches it off. " if key.may_be_none else ""
            groups[path] = parser.add_argument_group(path, off + about)
        else:
            default = str(key.default) if isinstance(key.default, Path) else key.default
            default = "required" if default is MISSING else f"default: {_as_yaml(default)}"
            about = f"{about} ({describe(key.hint)}; {default})"
            groups[path.rpartition(".")[0]].add_argument(f"--{path}", metavar="VALUE", help=about.replace("%", "%%"))
    return parser.format_help()


@functools.cache
def docs_of(cls: type) -> dict[str, str]:
    """The text below each field of a class, by name; empty without source."""
    try:
        tree: Any = ast.parse(inspect.getsource(cls)).body[0]
    except (OSError, TypeError):
        return {}
    return {
        ast.unparse(field.target): inspect.cleandoc(ast.literal_eval(below.value))
        for field, below in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


# Writing

# Plain for this package and for other YAML readers; everything else is quoted.
_PLAIN = re.compile(r"(?!(?:none|null|true|false|yes|no|on|off|y|n)$)[a-z/][\w/.+-]*", re.ASCII | re.IGNORECASE)
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def dump_config(config: Any) -> str:
    """A configuration as YAML. Loading it gives an equal configuration, to the last digit.

    >>> @dataclass(frozen=True)
    ... class Run:
    ...     betas: tuple[float, float] = (0.9, 0.999)
    ...     mixed_precision: str = "no"
    >>> print(dump_config(Run()), end="")
    betas: [0.9, 0.999]
    mixed_precision: "no"
    """
    return "".join(f"{line}\n" for line in _lines(config_to_dict(config)))


def _lines(section: Mapping[str, Any]) -> Iterator[str]:
    for name, value in section.items():
        key = _as_yaml(name)
        if isinstance(value, dict) and value:
            yield f"{key}:"
            yield from (f"  {line}" for line in _lines(value))
        else:
            yield f"{key}: {_as_yaml(value)}"


def _as_yaml(value: Any) -> str:
    """A value in one line: JSON, which is YAML, without the quotes that are not needed."""
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
