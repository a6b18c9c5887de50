"""The types of settings: which text each accepts, and the message for other text.

jsonargparse combines them in unions, Literal, list[T], tuple[T, ...], tuple[A, B] and dict[str, T]. A union may also
name a class that no file can spell, which only Python code can set.
"""

from __future__ import annotations

import functools
import math
from argparse import ArgumentError
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type

from dsgdac_accel.checks import absolute_path, did_you_mean
from tasks.common.strict_yaml import ConfigError, Text, parse_yaml, plain_value

# The strictest member of a union is tried first, so that text takes only what nothing else accepts.
_UNION_ORDER = (Literal, NoneType, bool, int, float, dict, list, tuple, Path, str, Any)


def convert(node: Any, hint: Any, path: str) -> Any:
    """The value of a setting.

    Args:
        node: what was written: `Text`, or a list or dict of it.
        hint: the type of the setting.
        path: its dotted key, for the message.

    Raises:
        ConfigError: what was written is of another type.

    >>> convert(Text("1e-3"), float, "learning_rate")
    0.001
    >>> convert(Text("abc"), float, "gossip.power")
    Traceback (most recent call last):
    tasks.common.strict_yaml.ConfigError: gossip.power must be a number; got 'abc'.
    """
    if isinstance(node, Text) and node.style == "argument" and _holds_parts(hint) and not _is_null(node):
        text = node if node.startswith(("[", "{")) else f"[{node}]"
        node = parse_yaml(text, node.label, node.folder, "argument")
    try:
        return _without_text(_parser(hint).parse_object({"value": node}, defaults=False)["value"])
    except ArgumentError:
        advice = next(filter(None, (_advice(node, member) for member in members(hint))), "")
        message = f"{label_of(node)}{path} must be {describe(hint)}; got {shown(node)}. {advice}"
        raise ConfigError(message.rstrip()) from None


@functools.cache
def _parser(hint: Any) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--value", type=strict_type(hint))
    return parser


def strict_type(hint: Any) -> Any:
    """The type as jsonargparse is to see it: our own strict types in place of int, bool, str and the like."""
    if _is_union(hint):
        return Union[tuple(map(strict_type, members(hint)))]  # noqa: UP007
    if get_origin(hint) in (list, tuple, dict):
        inner = [argument if argument is Ellipsis else strict_type(argument) for argument in get_args(hint)]
        return get_origin(hint)[tuple(inner)]
    return _STRICT_TYPES.get(hint, hint)


def is_supported(hint: Any) -> bool:
    """Whether a value of this type can be written in a file.

    >>> is_supported(int | None), is_supported(dict[str, float]), is_supported(complex)
    (True, True, False)
    """
    inner = [argument for argument in get_args(hint) if argument is not Ellipsis]
    if _is_union(hint):
        return any(map(is_supported, inner))
    if get_origin(hint) in (list, tuple, dict):
        return all(map(is_supported, inner))
    return get_origin(hint) is Literal or hint in _SCALARS


def members(hint: Any) -> list[Any]:
    """The types in a union that a file can spell, strictest first; the type itself if it is no union."""
    found = [member for member in (get_args(hint) if _is_union(hint) else (hint,)) if is_supported(member)]
    return sorted(found, key=lambda member: _UNION_ORDER.index(get_origin(member) or member))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _holds_parts(hint: Any) -> bool:
    return any(get_origin(member) in (list, tuple, dict) for member in members(hint))


def _without_text(value: Any) -> Any:
    """Plain str in place of the words of a Literal, which jsonargparse returns as they were written."""
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _without_text(item) for name, item in value.items()}
    return type(value)(map(_without_text, value)) if isinstance(value, list | tuple) else value


# Messages


def describe(hint: Any) -> str:
    """The accepted values in words.

    >>> describe(Literal["active", "run"] | float)
    "'active', 'run' or a number"
    >>> describe(tuple[float, ...])
    'a list (each a number)'
    """
    arguments = get_args(hint)
    if _is_union(hint):
        in_order = sorted(members(hint), key=lambda member: member is NoneType)  # null last
        words = [describe(member).removeprefix("one of ") for member in in_order]
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if get_origin(hint) is dict:
        return f"named values (each {describe(arguments[1])})"
    if get_origin(hint) is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} ({', '.join(map(describe, arguments))})"
    return f"a list (each {describe(arguments[0])})" if arguments else _WORDS[hint]


def shown(node: Any) -> str:
    """Return the written value for "got ...", cut short.

    >>> shown({"a": Text("x"), "b": [Text("1"), Text("")]})
    "{a: 'x', b: [1, nothing (null)]}"
    """
    if isinstance(node, dict):
        text = f"{{{', '.join(f'{key}: {shown(value)}' for key, value in node.items())}}}"
    elif isinstance(node, list):
        text = f"[{', '.join(map(shown, node))}]"
    else:
        text = "nothing (null)" if node.value is None else repr(str(node)) if isinstance(node.value, str) else node
    return text if len(text) <= 100 else f"{text[:97]}..."


def label_of(node: Any) -> str:
    """Where a value was written, with a colon; "" where that is not known."""
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    label = node.label if isinstance(node, Text) else ""
    return f"{label}: " if label else next(filter(None, map(label_of, parts)), "")


def _advice(node: Any, member: Any) -> str:
    """The way out where the rule alone does not tell it."""
    if not isinstance(node, Text):
        parts = node.values() if isinstance(node, dict) else node
        return next(filter(None, (_advice(part, inner) for part in parts for inner in get_args(member))), "")
    if get_origin(member) is Literal:
        return did_you_mean(node, [word for word in get_args(member) if isinstance(word, str)]).strip()
    if get_origin(member) in (list, tuple, dict):
        return "Write it as {name: value}." if get_origin(member) is dict else "Write it as [a, b]."
    try:
        if member in _SCALARS:
            _SCALARS[member](node)
    except ValueError as error:
        return str(error)
    return ""


# Checks of each type. The text of an error is the way out, or "".


def _is_null(text: Text) -> bool:
    return text.value is None or (text.style != "quoted" and text.lower() == "none")


def _null(text: Text) -> None:
    if not _is_null(text):
        raise ValueError


def _flag(text: Text) -> bool:
    if isinstance(text.value, bool):
        return text.value
    raise ValueError


def _integer(text: Text) -> int:
    value = text.value
    if type(value) is int:
        return value
    if not isinstance(value, float):
        raise ValueError(_number_advice(text))
    if "e" in text.lower() and value.is_integer():
        return int(Decimal(text))  # 1e5 steps; exact where a float would round
    raise ValueError("Write it without a decimal point." if value.is_integer() else "")


def _number(text: Text) -> float:
    if type(text.value) not in (int, float):
        raise ValueError(_number_advice(text))
    if not math.isfinite(float(text)):
        raise ValueError("It must be finite.")
    return float(text)


def _number_advice(text: Text) -> str:
    """Why text that looks like a number is not one here."""
    digits = text.strip().lower().lstrip("+-")
    if text.style == "quoted" and isinstance(plain_value(text), int | float):
        return "Remove the quotes."
    if digits.lstrip(".") in ("inf", "infinity", "nan"):
        return "It must be finite."
    if digits.startswith("0") and digits[1:].isdigit():
        return "Remove the leading zeros, which mean octal in YAML 1.1."
    is_number = isinstance(plain_value(digits.replace("_", "")), int | float)
    return "Remove the underscores." if is_number and "_" in digits else ""


def _text(text: Text) -> str:
    if text.style == "argument" or isinstance(text.value, str):
        return str(text)
    raise ValueError("" if text.value is None else f'To give it as text, put it in quotes: "{text}".')


def _path(text: Text) -> Path:
    if not _text(text):
        raise ValueError("Use . for the folder itself.")
    try:
        return absolute_path(Path(text), text.folder)
    except RuntimeError:  # ~nobody/data
        raise ValueError("Its home folder is unknown.") from None


def _anything(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _anything(item) for name, item in value.items()}
    if isinstance(value, list):
        return list(map(_anything, value))
    return value.value if isinstance(value, Text) else value


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    NoneType: _null, bool: _flag, int: _integer, float: _number, str: _text, Path: _path, Any: _anything
}  # fmt: skip
_WORDS = {
    NoneType: "null", bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path",
    Any: "any value",
}  # fmt: skip


class _Named(type):
    """Classes that --help shows by their bare name."""

    def __repr__(cls) -> str:
        return cls.__name__


def _registered(hint: Any, accept: Callable[[Any], Any]) -> type:
    """A type of our own for jsonargparse, which would take `yes` for True and 010 for 10."""

    def deserialize(value: Any) -> Any:
        if hint is Any or isinstance(value, Text):
            return accept(value)
        if isinstance(value, dict | list):
            raise ValueError
        return value  # already converted

    marker = _Named("true|false" if hint is bool else _WORDS[hint].split()[-1], (), {})
    register_type(marker, deserializer=deserialize, type_check=lambda value, _: False)
    return marker


_STRICT_TYPES = {hint: _registered(hint, accept) for hint, accept in _SCALARS.items()}
