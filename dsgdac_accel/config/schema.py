"""The keys of a tree of configuration classes: paths, types, defaults, explanations and suggestions."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from dsgdac_accel.config.conversion import is_supported
from dsgdac_accel.config.strict_yaml import join_path

_RESERVED = frozenset({"config", "help"})


@dataclass(frozen=True)
class Key:
    """One field of the tree: a value, or a section that holds more keys."""

    path: str
    hint: Any
    default: Any
    """MISSING where a value must be given."""
    owner: type
    """The class that has the field."""
    section: type | None
    """The configuration class of a section; None for a value."""
    may_be_none: bool

    @property
    def doc(self) -> str:
        """The text below the field in the source of its class, or ""."""
        return field_docs(self.owner).get(_last(self.path), "")


def keys_of(cls: type) -> dict[str, Key]:
    """All keys of a configuration class by dotted path, sections before what they hold.

    Raises TypeError for a class that cannot be configured from text.

    >>> @dataclass(frozen=True)
    ... class Optimizer:
    ...     lr: float = 0.1
    >>> list(keys_of(dataclasses.make_dataclass("Run", [("optimizer", Optimizer), ("epochs", int, 3)])))
    ['optimizer', 'optimizer.lr', 'epochs']
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"a configuration class must be a dataclass; got {cls!r}. Decorate it with @dataclass.")
    taken = _RESERVED.intersection(field.name for field in dataclasses.fields(cls))
    if taken:
        raise TypeError(f"{cls.__name__}.{min(taken)} would hide the option --{min(taken)}. Choose another name.")
    return dict(_walk(cls, "", MISSING))


def _walk(cls: type, parent: str, instance: Any) -> Iterable[tuple[str, Key]]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        path, hint = join_path(parent, field.name), hints[field.name]
        default = _default(field) if instance is MISSING else getattr(instance, field.name)
        section, may_be_none = section_of(hint)
        if section is None and not is_supported(hint):
            raise TypeError(f"{cls.__name__}.{field.name}: {hint} cannot be written in a file. Use a simpler type.")
        yield path, Key(path, hint, default, cls, section, may_be_none)
        if section is not None:
            yield from _walk(section, path, default if isinstance(default, section) else MISSING)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def section_of(hint: Any) -> tuple[type | None, bool]:
    """The class of a section, and whether `Section | None` was written."""
    members = get_args(hint) if NoneType in get_args(hint) else (hint,)
    sections = [member for member in members if isinstance(member, type) and dataclasses.is_dataclass(member)]
    is_section = len(sections) == 1 and all(member in (NoneType, sections[0]) for member in members)
    return (sections[0], len(members) > 1) if is_section else (None, NoneType in members)


@functools.cache  # finding a class in its source takes a tenth of a second
def field_docs(cls: type) -> dict[str, str]:
    """The text below each field of a class, by name; empty where there is no source to read."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs_in_source(base)
    return docs


def _docs_in_source(cls: type) -> dict[str, str]:
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


def suggestion(path: str, known: Collection[str]) -> str:
    """What the writer of an unknown key may have meant.

    >>> suggestion("gossip.gama_power", ["gossip", "gossip.power", "seed"])
    'Did you mean gossip.power?'
    >>> suggestion("power", ["gossip", "gossip.power", "seed"])
    'It belongs at gossip.power.'
    >>> suggestion("gossip.x", ["gossip", "gossip.power", "seed"])
    'The keys of gossip are power.'
    """
    parent, _, name = path.rpartition(".")
    elsewhere = [candidate for candidate in known if _last(candidate) == name]
    if elsewhere:
        return f"It belongs at {' or '.join(elsewhere)}."
    siblings = [candidate for candidate in known if candidate.rpartition(".")[0] == parent]
    alike = [candidate for candidate in known if candidate.count(".") == path.count(".")]
    near = _nearest(name, siblings, _last) or _nearest(path, alike, str, 0.8) or _nearest(name, known, _last)
    if near:
        return f"Did you mean {near}?"
    names = ", ".join(map(_last, siblings))
    place = f"The keys of {parent} are" if parent else "The keys are"
    return f"{place} {names}." if names else "See --help for all keys."


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _nearest(word: str, paths: Iterable[str], spelling: Callable[[str], str], cutoff: float = 0.6) -> str:
    """The path spelt most like the word, or "" when none is near; case and dashes do not count."""
    plain = {spelling(path).lower(): path for path in paths}
    matches = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else ""
