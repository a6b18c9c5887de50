"""Configurations from a YAML file and the command line, for any tree of frozen dataclasses.

A dataclass inside another one is a section of the file; `--section.key VALUE` sets one of its keys. The command line
wins over the file, and the file over the defaults. An unknown key, a value of another type or a key given twice is an
error that says where, what, and what to write instead.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import re
import sys
import textwrap
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from jsonargparse import ArgumentParser
from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from dsgdac_accel.checks import absolute_path
from dsgdac_accel.config import config_to_dict
from tasks.common.config_hints import hint
from tasks.common.config_types import convert, is_supported, label_of, shown, strict_type
from tasks.common.strict_yaml import ConfigError, Text, plain_value, read_yaml

__all__ = [
    "ConfigError",
    "config_fingerprint",
    "config_from_command_line",
    "convert",
    "dump_config",
    "join_path",
    "keys_of",
    "load_config",
    "parse_config",
    "plain_value",
    "read_yaml",
    "write_config",
]

Config = TypeVar("Config")

_COMMAND_LINE = "command line"
_RESERVED = frozenset({"config", "help", "print_config"})
_FILE_NAME = "config.yaml"
_SAFE_TEXT = re.compile(r"[A-Za-z/][\w/.+-]*", re.ASCII)
# Words that this module, or another YAML reader, takes for null or a boolean.
_QUOTED_WORDS = frozenset({"none", "null", "true", "false", "yes", "no", "on", "off", "y", "n"})
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

    A relative path in a file starts from the folder of that file; on the command line, or in a default, from the
    working directory. `--help` prints every key, `--print_config` prints the configuration as YAML; both exit with
    status 0.

    Args:
        cls: the class of the configuration, a frozen dataclass.
        argv: the command line; None takes `sys.argv[1:]`.
        default_file: the file that is read without `--config`.
        prog: the name of the program for `--help`; None takes that of the script.
        description: what the program does, for `--help`; None takes the docstring of the class.

    Raises:
        ConfigError: the configuration is not valid. The message is one line.

    >>> @dataclass(frozen=True)
    ... class Run:
    ...     learning_rate: float = 0.1
    ...     num_train_epochs: int = 3
    >>> parse_config(Run, ["--learning_rate", "1e-3", "--num_train_epochs=5"])
    Run(learning_rate=0.001, num_train_epochs=5)
    >>> parse_config(Run, ["--lr", "1e-3"])
    Traceback (most recent call last):
    tasks.common.strict_yaml.ConfigError: command line: unknown key lr. Did you mean learning_rate?
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"}.intersection(words):
        _print_once(help_text(cls, prog or Path(sys.argv[0]).name, description, default_file))
        raise SystemExit(0)
    settings = _read_words([word for word in words if word != "--print_config"])
    file = settings.pop("config", None)
    path = default_file if file is None else _config_file(file)
    tree = {} if path is None else read_yaml(path)
    config = _build(cls, _overridden(tree, settings, keys_of(cls)), "", cls)
    if "--print_config" in words:
        _print_once(dump_config(config))
        raise SystemExit(0)
    return config


def load_config(cls: type[Config], file: Path | str) -> Config:
    """Read a configuration from a YAML file alone.

    Raises:
        ConfigError: the configuration is not valid. The message is one line.
    """
    return _build(cls, read_yaml(Path(file)), "", cls)


def config_from_command_line(
    cls: type[Config],
    argv: Sequence[str] | None = None,
    *,
    default_file: Path | None = None,
    prog: str | None = None,
    description: str | None = None,
) -> Config:
    """`parse_config` for scripts: a mistake prints one line on stderr and exits with status 2.

    All launched workers make the same mistake; only the first one prints it.
    """
    try:
        return parse_config(cls, argv, default_file=default_file, prog=prog, description=description)
    except ConfigError as error:
        _print_once(f"error: {' '.join(str(error).split())}\n", sys.stderr)
        raise SystemExit(2) from None


def _print_once(text: str, stream: Any = None) -> None:
    """Print on the first of several launched workers."""
    if os.environ.get("RANK", "0") == "0":
        print(text, end="", file=stream or sys.stdout)


def _read_words(words: Sequence[str]) -> dict[str, Text]:
    """`--key value` and `--key=value` by key, without the dashes."""
    values: dict[str, Text] = {}
    rest = iter(words)
    for word in rest:
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            is_file = word.endswith((".yaml", ".yml"))
            way_out = f"Name the file with --config {word}." if is_file else "Write settings as --key VALUE."
            raise ConfigError(f"{_COMMAND_LINE}: {word!r} is not a setting. {way_out}")
        if key in values:
            raise ConfigError(f"{_COMMAND_LINE}: {key} is given twice; got {str(values[key])!r} first. Keep one.")
        if not equals:
            text = next(rest, "--")
        if not equals and text.startswith("--"):
            raise ConfigError(f"{_COMMAND_LINE}: {key} needs a value. Write --{key} VALUE or --{key}=VALUE.")
        values[key] = Text(text, "argument", _COMMAND_LINE, Path.cwd())
    clash = next(((key, other) for key in values for other in values if other.startswith(f"{key}.")), None)
    if clash:
        raise ConfigError(f"{_COMMAND_LINE}: {clash[1]} contradicts --{clash[0]}. Keep one.")
    return values


def _config_file(text: str) -> Path:
    if not text:
        raise ConfigError(f"{_COMMAND_LINE}: config needs the name of a YAML file. Write --config FILE.yaml.")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)  # ~nobody/run.yaml: reported as a file that does not exist


def _overridden(tree: dict[str, Any], settings: Mapping[str, Text], known: Mapping[str, Field]) -> dict[str, Any]:
    """Merge the settings of the command line into those of a file; they revive a section that is null in the file."""
    for key, text in settings.items():
        if key not in known:
            raise ConfigError(f"{_COMMAND_LINE}: unknown key {key}. {hint(key, known)}")
        section = tree
        *parents, name = key.split(".")
        for parent in parents:
            below = section.get(parent, Text(""))
            is_null = isinstance(below, Text) and below.lower() in ("", "~", "null", "none")
            # A copy, since aliases share the sections of a file.
            section[parent] = {} if is_null else dict(below) if isinstance(below, dict) else below
            section = section[parent] if isinstance(section[parent], dict) else {}  # refused when it is built
        section[name] = text
    return tree


def _build(cls: type[Config], tree: Any, path: str, root: type, default: Any = MISSING) -> Config:
    """Build a section, and the sections in it, from what was written.

    Args:
        cls: its class.
        tree: what was written: a dict of `Text`, lists and dicts.
        path: its dotted key; "" for the whole configuration.
        root: the class of the whole configuration.
        default: an instance that holds the defaults; MISSING takes those of the class.
    """
    fields = _fields(cls)  # type: ignore[arg-type]
    if not isinstance(tree, dict):
        names = ", ".join(list(fields)[:4]) + (", ..." if len(fields) > 4 else "")
        raise ConfigError(f"{label_of(tree)}{path} must be a section (keys {names}); got {shown(tree)}.")
    for name in tree:
        if name not in fields:
            raise ConfigError(f"{label_of(name)}{_unknown_key(join_path(path, name), root)}")
    values = {
        name: _value(field, tree.get(name), join_path(path, name), root, default) for name, field in fields.items()
    }
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        names_key = str(error).split(" ", 1)[0].rstrip(":") in fields
        raise ConfigError(f"{path}{'.' if names_key else ': '}{error}" if path else str(error)) from error


def _value(field: Field, node: Any, path: str, root: type, parent: Any) -> Any:
    """The value of one field: as written, or else as in the instance that holds the defaults of its section."""
    default = field.default if parent is MISSING else getattr(parent, field.name)
    if field.section is not None:
        if isinstance(node, Text) and not node and node.style == "plain":
            node = None  # an empty heading keeps the defaults of its keys
        is_null = isinstance(node, Text) and (node.value is None or node == "none")
        if (field.may_be_none and is_null) or (node is None and default is None):
            return None
        return _build(field.section, {} if node is None else node, path, root, MISSING if default is None else default)
    if node is not None:
        return convert(node, field.hint, path)
    if default is MISSING:
        raise ConfigError(f"{path} must be given. Set it in the file or with --{path} VALUE.")
    return _anchored(default)


def _unknown_key(path: str, root: type) -> str:
    known = keys_of(root)
    if path in known:  # a dotted key in a file
        way_out = f"Write {' under '.join(f'{part}:' for part in reversed(path.split('.')))} instead of the dots."
    else:
        way_out = hint(path, known)
    return f"unknown key {path}. {way_out}"


def _anchored(default: Any) -> Any:
    """A copy of a default, with relative paths made absolute before the working directory can change."""
    if isinstance(default, Path):
        return absolute_path(default, Path.cwd())
    if type(default) in (list, tuple):
        return type(default)(map(_anchored, default))
    return dict(default) if isinstance(default, dict) else default


# The fields of configuration classes


@dataclass(frozen=True)
class Field:
    """A value, or a section with fields of its own."""

    name: str
    hint: Any
    """Type."""
    default: Any
    """MISSING if a value must be given."""
    owner: type
    """Class that has the field."""
    section: type | None
    """Class of a section; None for a value."""
    may_be_none: bool
    """Whether null is accepted."""

    @property
    def doc(self) -> str:
        """The text below the field in the source of its class, or ""."""
        return _docs(self.owner).get(self.name, "")


@functools.cache
def _fields(cls: Any) -> dict[str, Field]:
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"a configuration class must be a dataclass; got {cls!r}. Decorate it with @dataclass.")
    found: dict[str, Field] = {}
    kinds = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.init:
            kind = kinds[field.name]
            may_be_none = NoneType in get_args(kind)
            rest = [member for member in get_args(kind) if member is not NoneType] if may_be_none else [kind]
            section: Any = rest[0] if len(rest) == 1 and dataclasses.is_dataclass(rest[0]) else None
            if section is None and not is_supported(kind):
                raise TypeError(f"{cls.__name__}.{field.name}: {kind} cannot be written in a file. Use a simpler type.")
            default = field.default if field.default_factory is MISSING else field.default_factory()
            found[field.name] = Field(field.name, kind, default, cls, section, may_be_none)
    return found


def keys_of(cls: type) -> dict[str, Field]:
    """The fields of a configuration class and of its sections by dotted key, each section before its keys.

    Raises:
        TypeError: the class cannot be configured from text.

    >>> @dataclass(frozen=True)
    ... class Optimizer:
    ...     lr: float = 0.1
    >>> list(keys_of(dataclasses.make_dataclass("Run", [("optimizer", Optimizer), ("epochs", int, 3)])))
    ['optimizer', 'optimizer.lr', 'epochs']
    """
    taken = _RESERVED.intersection(_fields(cls))
    if taken:
        raise TypeError(f"{cls.__name__}.{min(taken)} would hide the option --{min(taken)}. Choose another name.")
    return dict(_walk(cls, "", MISSING))


def _walk(cls: type, parent: str, instance: Any) -> Iterable[tuple[str, Field]]:
    for name, field in _fields(cls).items():
        path = join_path(parent, name)
        default = field.default if instance is MISSING else getattr(instance, name)
        yield path, dataclasses.replace(field, default=default)
        if field.section is not None:
            yield from _walk(field.section, path, MISSING if default is None else default)


def join_path(parent: str, name: str) -> str:
    """The dotted path of a key.

    >>> join_path("gossip", "power"), join_path("", "seed")
    ('gossip.power', 'seed')
    """
    return f"{parent}.{name}" if parent else name


@functools.cache  # finding a class in its source takes a tenth of a second
def _docs(cls: type) -> dict[str, str]:
    """The text below each field of a class, by name; empty without source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


# Help


def help_text(cls: type, prog: str, description: str | None = None, default_file: Path | None = None) -> str:
    """The page of --help: every key with its type, default and meaning."""
    parser = ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE.yaml] [--key VALUE | --section.key=VALUE ...]",
        description=description or _summary(cls),
        epilog=_one_line(_EPILOG),
    )
    file = default_file or SUPPRESS
    parser.add_argument("--config", metavar="FILE.yaml", help="YAML file with the keys below.", default=file)
    about = "Print the configuration, file and command line included, as YAML and exit."
    parser.add_argument("--print_config", action="store_true", help=about, default=SUPPRESS)
    groups: dict[str, Any] = {"": parser}
    for path, field in keys_of(cls).items():
        if field.section is not None:
            off = "null switches it off. " if field.may_be_none else ""
            groups[path] = parser.add_argument_group(path, _one_line(off + (field.doc or _summary(field.section))))
        else:
            is_required = field.default is MISSING
            groups[path.rpartition(".")[0]].add_argument(
                f"--{path}",
                metavar="VALUE",
                type=strict_type(field.hint),
                default=None if is_required else field.default,
                required=is_required,
                help=_one_line(field.doc) or None,
            )
    return parser.format_help()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _summary(cls: type) -> str:
    """The first paragraph of a class's own docstring; a dataclass without one has its signature instead."""
    doc = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    return "" if doc.startswith(f"{cls.__name__}(") else doc


# Writing


def dump_config(config: Any) -> str:
    """A configuration as YAML. Loading it gives an equal configuration, to the last digit.

    >>> @dataclass(frozen=True)
    ... class Run:
    ...     lr: float = 1e-3
    ...     mixed_precision: str = "no"
    >>> print(dump_config(Run()), end="")
    lr: 0.001
    mixed_precision: "no"
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode = True
    yaml.width = math.inf  # type: ignore[assignment]
    target = io.StringIO()
    yaml.dump(config_to_dict(config), target)
    return target.getvalue()


class _Representer(SafeRepresenter):
    """Quotes every text that this package, or another YAML reader, could take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        is_safe = _SAFE_TEXT.fullmatch(data) and data.lower() not in _QUOTED_WORDS
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if is_safe else '"')


_Representer.add_representer(str, _Representer.represent_str)


def write_config(config: Any, output_dir: Path | str) -> Path:
    """Write `config.yaml` into a folder, complete or not at all. The folder is created if needed.

    Returns:
        The path of the file.
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
    """SHA-256 of the values: equal on all workers with the same configuration.

    Args:
        config: any tree of dataclasses.
        ignore: keys or sections that may differ between workers, such as `output_dir`.

    Returns:
        64 hexadecimal digits.

    Raises:
        ValueError: an ignored key does not exist.

    >>> @dataclass(frozen=True)
    ... class Run:
    ...     lr: float = 1e-3
    ...     output_dir: Path = Path("runs")
    >>> here, there = Run(), Run(output_dir=Path("elsewhere"))
    >>> config_fingerprint(here) == config_fingerprint(there)
    False
    >>> config_fingerprint(here, ignore=["output_dir"]) == config_fingerprint(there, ignore=["output_dir"])
    True
    """
    # Topologies of one name can differ in their rounds, which the fingerprint of a topology tells apart.
    values = config_to_dict(config, spell=attrgetter("fingerprint"))
    for path in ignore:
        _remove(values, path, type(config))
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _remove(values: dict[str, Any], path: str, cls: type) -> None:
    known = keys_of(cls)
    if path not in known:
        raise ValueError(f"ignore must name keys of {cls.__name__}; got {path!r}. {hint(path, known)}")
    section: Any = values
    *parents, name = path.split(".")
    for parent in parents:
        section = section.get(parent) or {}  # a section may be None
    section.pop(name, None)
