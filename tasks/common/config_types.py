"""The types of settings: which text each accepts, and the message for other text.

A type is one of the scalars below, a Literal of words, list[T], tuple[T, ...], tuple[A, B], dict[str, T], or a union. A
union may also name a class that no file can spell, which only Python code can set.
"""

from __future__ import annotations

import math
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from dsgdac_accel.checks import absolute_path, did_you_mean
from tasks.common.strict_yaml import ConfigError, Text, parse_yaml, plain_value


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
    holds_parts = any(get_origin(member) in (list, tuple, dict) for member in _members(hint))
    if holds_parts and isinstance(node, Text) and node.style == "argument" and not is_null(node):
        text = node if node.startswith(("[", "{")) else f"[{node}]"
        node = parse_yaml(text, node.label, node.folder, "argument")
    try:
        return _converted(node, hint)
    except ValueError as way_out:
        message = f"{label_of(node)}{path} must be {describe(hint)}; got {shown(node)}. {way_out}"
        raise ConfigError(message.rstrip()) from None


def _converted(node: Any, hint: Any) -> Any:
    """The value; a ValueError holds the way out, or nothing where the rule alone tells it."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return _first_accepted(node, _members(hint))
    if hint is Any:
        return _as_read(node)
    if kind is Literal:
        if isinstance(node, Text) and node in inner:
            return str(node)
        raise ValueError(did_you_mean(node, inner).strip() if isinstance(node, Text) else "")
    if kind is dict and isinstance(node, dict):
        return {str(name): _converted(value, inner[1]) for name, value in node.items()}
    if kind in (list, tuple) and isinstance(node, list):
        each = inner if kind is tuple and Ellipsis not in inner else inner[:1] * len(node)
        if len(each) == len(node):
            return kind(map(_converted, node, each))
    if isinstance(node, Text):
        return _scalar(node, kind or hint)
    raise ValueError


def _first_accepted(node: Any, hints: list[Any]) -> Any:
    advice = ""
    for hint in hints:
        try:
            return _converted(node, hint)
        except ValueError as way_out:
            advice = advice or str(way_out)
    raise ValueError(advice)


def _scalar(text: Text, hint: Any) -> Any:
    value = text.value
    if hint is NoneType and is_null(text):
        return None
    if hint in (bool, int) and type(value) is hint:
        return value
    if hint is int and isinstance(value, float) and value.is_integer() and "e" in text.lower():
        return int(Decimal(text))  # 1e5 steps; exact where a float would round
    if hint is float and type(value) in (int, float) and math.isfinite(float(text)):
        return float(text)
    if hint is str and (text.style == "argument" or isinstance(value, str)):
        return str(text)
    if hint is Path and text and (text.style == "argument" or isinstance(value, str)):
        with suppress(RuntimeError):  # ~nobody/data
            return absolute_path(Path(text), text.folder)
    raise ValueError(_advice(text, value, hint))


def _advice(text: Text, value: Any, hint: Any) -> str:
    """The way out where the rule alone does not tell it."""
    digits = text.strip().lower().lstrip("+-.")
    if hint in (list, tuple, dict):
        return "Write it as {name: value}." if hint is dict else "Write it as [a, b]."
    if hint in (str, Path) and not isinstance(value, str | None):
        return f'To give it as text, put it in quotes: "{text}".'
    if hint is Path and isinstance(value, str):
        return "Its home folder is unknown." if text else "Use . for the folder itself."
    if hint not in (int, float):
        return ""
    if text.style == "quoted":
        return "Remove the quotes." if isinstance(plain_value(text), int | float) else ""
    if digits in ("inf", "infinity", "nan") or value in (math.inf, -math.inf):
        return "It must be finite."
    if isinstance(value, float) and value.is_integer():
        return "Write it without a decimal point."
    is_odd = isinstance(value, str) and digits[:1].isdigit()
    return "Write it like 12 or 1.5e-3, without leading zeros, underscores or colons." if is_odd else ""


def _as_read(node: Any) -> Any:
    """The node as plain values, by their looks alone."""
    if isinstance(node, dict):
        return {str(name): _as_read(value) for name, value in node.items()}
    return list(map(_as_read, node)) if isinstance(node, list) else node.value


def is_null(text: Text) -> bool:
    """Whether the text unsets a value that may be null."""
    return text.value is None or (text.style != "quoted" and text.lower() == "none")


def _members(hint: Any) -> list[Any]:
    """The types in a union that a file can spell, null first; the type itself if it is no union."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return sorted((kind for kind in types if get_origin(kind) or kind in _NAMES), key=lambda kind: kind is not NoneType)


# Messages

_NAMES = {
    NoneType: "null", bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path",
    Any: "any value",
}  # fmt: skip


def describe(hint: Any) -> str:
    """The accepted values in words.

    >>> describe(Literal["active", "run"] | float)
    "'active', 'run' or a number"
    >>> describe(tuple[float, ...])
    'a list (each a number)'
    """
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        null_last = sorted(_members(hint), key=lambda member: member is NoneType)
        *words, last = [describe(member).removeprefix("one of ") for member in null_last]
        return f"{', '.join(words)} or {last}" if words else last
    if kind is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if kind is dict:
        return f"named values (each {describe(inner[1])})"
    if kind is tuple and Ellipsis not in inner:
        return f"a list of {len(inner)} ({', '.join(map(describe, inner))})"
    return f"a list (each {describe(inner[0])})" if inner else _NAMES[hint]


def shown(node: Any) -> str:
    """Return the written node for "got ...", cut short.

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
    if isinstance(node, Text):
        return f"{node.label}: " if node.label else ""
    return next(filter(None, map(label_of, node.values() if isinstance(node, dict) else node)), "")
