"""The types of settings: which text each accepts, and the message for other text.

A type is one of the scalars below, a Literal of words, list[T], tuple[T, ...], tuple[A, B], dict[str, T], or a union. A
union may also name a class that no file can spell, which only Python code can set.
"""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from dsgdac_accel.checks import absolute_path, did_you_mean
from tasks.common.strict_yaml import ConfigError, Text, parse_yaml, plain_value

_NAMES = {
    NoneType: "null", bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path",
    Any: "any value",
}  # fmt: skip


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
    if holds_parts and isinstance(node, Text) and node.style == "argument" and not node.is_null:
        text = node if node.startswith(("[", "{")) else f"[{node}]"
        node = parse_yaml(text, node.label.removesuffix(": "), node.folder, "argument")
    try:
        return _converted(node, hint)
    except ValueError as way_out:
        message = f"{label_of(node)}{path} must be {describe(hint)}; got {shown(node)}. {way_out}"
        raise ConfigError(message.rstrip()) from None


def _converted(node: Any, hint: Any) -> Any:
    """The value; a ValueError holds the way out, or nothing where the rule alone tells it."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        advice = ""
        for member in _members(hint):
            try:
                return _converted(node, member)
            except ValueError as way_out:
                advice = advice or str(way_out)
        raise ValueError(advice)
    if hint is Any and not isinstance(node, Text):
        is_section = isinstance(node, dict)
        return _converted(node, dict[str, Any] if is_section else list[Any])
    if kind is dict and isinstance(node, dict):
        return {str(name): _converted(value, inner[1]) for name, value in node.items()}
    if kind in (list, tuple) and isinstance(node, list):
        each = inner if kind is tuple and Ellipsis not in inner else inner[:1] * len(node)
        if len(each) == len(node):
            return kind(map(_converted, node, each))
    if isinstance(node, Text):
        return _scalar(node, kind or hint, inner)
    raise ValueError


def _scalar(text: Text, hint: Any, words: tuple[str, ...]) -> Any:
    value = text.value
    is_text = text.style == "argument" or isinstance(value, str)
    if hint is Any:
        return value
    if hint is Literal and text in words:
        return str(text)
    if hint is NoneType and text.is_null:
        return None
    if hint in (bool, int) and type(value) is hint:
        return value
    if hint is int and isinstance(value, float) and value.is_integer() and "e" in text.lower():
        return int(Decimal(text))  # 1e5 steps; exact where a float would round
    if hint is float and type(value) in (int, float) and math.isfinite(float(text)):
        return float(text)
    if hint is str and is_text:
        return str(text)
    if hint is Path and is_text and text:
        try:
            return absolute_path(Path(text), text.folder)
        except RuntimeError:  # ~nobody/data
            raise ValueError("Its home folder is unknown.") from None
    raise ValueError(_advice(text, value, hint, words))


def _advice(text: Text, value: Any, hint: Any, words: tuple[str, ...]) -> str:
    """The way out where the rule alone does not tell it."""
    if hint is Literal:
        return did_you_mean(text, words).strip()
    if hint in (list, tuple, dict):
        return "Write it as {name: value}." if hint is dict else "Write it as [a, b]."
    if hint is Path and value == "":
        return "Use . for the folder itself."
    if hint in (str, Path):
        return "" if value is None else f'To give it as text, put it in quotes: "{text}".'
    if hint not in (int, float):
        return ""
    if text.style == "quoted":
        return "Remove the quotes." if isinstance(plain_value(text), int | float) else ""
    digits = text.strip().lower().lstrip("+-.")
    if digits in ("inf", "infinity", "nan") or value in (math.inf, -math.inf):
        return "It must be finite."
    if isinstance(value, float):
        return "Write it without a decimal point." if value.is_integer() else ""
    is_odd = isinstance(value, str) and digits[:1].isdigit()
    return "Write it like 12 or 1.5e-3, without leading zeros, underscores or colons." if is_odd else ""


def _members(hint: Any) -> list[Any]:
    """The types in a union that a file can spell, null first; the type itself if it is no union."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return sorted((kind for kind in types if get_origin(kind) or kind in _NAMES), key=lambda kind: kind is not NoneType)


def describe(hint: Any) -> str:
    """The accepted values in words.

    >>> describe(Literal["active", "run"] | float)
    "'active', 'run' or a number"
    >>> describe(tuple[float, ...])
    'a list (each a number)'
    """
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        members = sorted(_members(hint), key=lambda member: member is NoneType)
        *words, last = [describe(member).removeprefix("one of ") for member in members]
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
    """Where a value was written; "" where that is not known."""
    if isinstance(node, Text):
        return node.label
    return next(filter(None, map(label_of, node.values() if isinstance(node, dict) else node)), "")
