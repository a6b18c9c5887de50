"""From what was written to what a field's annotation asks for.

Understood: int, float, bool, str, Path, Any, Literal, T | None and other unions, list[T], tuple[T, ...], tuple[A, B]
and dict[str, T]. A union may also name a class that no file can spell; only Python code can set that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from dsgdac_accel.checks import did_you_mean
from dsgdac_accel.config.strict_yaml import ConfigError, Items, Node, Scalar, Section

# Most particular first: `Literal["none"] | None` keeps its word, and text takes only what nothing else wants.
_UNION_ORDER = (Literal, NoneType, bool, int, float, dict, list, tuple, Path, str, Any)
_SWITCH_WORDS = frozenset({"yes", "no", "on", "off", "y", "n", "0", "1"})


class _Mismatch(Exception):
    """A scalar that is not of the wanted type; the text is advice to add to the message."""


def is_supported(hint: Any) -> bool:
    """Whether a value of this annotation can be written in a file.

    >>> is_supported(int | None), is_supported(dict[str, float]), is_supported(complex)
    (True, True, False)
    """
    if _is_union(hint):
        return bool(_members(hint))
    inner = [argument for argument in get_args(hint) if argument is not Ellipsis]
    if get_origin(hint) is dict:
        return inner[0] is str and is_supported(inner[1])
    if get_origin(hint) in (list, tuple):
        return all(is_supported(argument) for argument in inner)
    return get_origin(hint) is Literal or hint is Any or hint in _SCALARS


def describe(hint: Any) -> str:
    """The wanted values in words, for messages and --help.

    >>> describe(Literal["active", "run"] | float)
    "'active', 'run' or a number"
    >>> describe(tuple[float, ...])
    'a list (each a number)'
    """
    if _is_union(hint):
        members = sorted(_members(hint), key=lambda member: member is NoneType)  # null last
        words = [describe(member).removeprefix("one of ") for member in members]
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if get_origin(hint) is dict:
        return f"named values (each {describe(arguments[1])})"
    if get_origin(hint) is list or (get_origin(hint) is tuple and Ellipsis in arguments):
        return f"a list (each {describe(arguments[0])})"
    if get_origin(hint) is tuple:
        return f"a list of {len(arguments)} ({', '.join(map(describe, arguments))})"
    return _WORDS.get(hint, "any value")


def convert(node: Node, hint: Any, path: str) -> Any:
    """The value of the annotated type; `path` is the key that messages name.

    Raises ConfigError when what was written is of another type.

    >>> from dsgdac_accel.config.strict_yaml import Origin
    >>> here = Origin("run.yaml:3", Path("/runs"))
    >>> convert(Scalar("1e-3", "plain", here), float, "lr")
    0.001
    >>> convert(Scalar("abc", "plain", here), float, "gossip.power")
    Traceback (most recent call last):
    dsgdac_accel.config.strict_yaml.ConfigError: run.yaml:3: gossip.power: expected a number, got 'abc' (str).
    """
    if _is_union(hint):
        return _convert_union(node, hint, path)
    if hint is Any:
        return _plain_python(node)
    if get_origin(hint) in (list, tuple):
        return _convert_list(node, hint, path)
    if get_origin(hint) is dict:
        return _convert_dict(node, hint, path)
    if not isinstance(node, Scalar):
        raise _type_error(node, hint, path)
    try:
        return _convert_literal(node, hint) if get_origin(hint) is Literal else _SCALARS[hint](node)
    except _Mismatch as mismatch:
        raise _type_error(node, hint, path, str(mismatch)) from None


def shown(node: Node) -> str:
    """What was written, for "got ...".

    >>> from dsgdac_accel.config.strict_yaml import Origin
    >>> shown(Scalar("012", "plain", Origin("run.yaml:3", Path("/runs"))))
    "'012' (str)"
    """
    if isinstance(node, Section):
        return f"a section ({', '.join(node.nodes) or 'empty'})"
    if isinstance(node, Items):
        return f"a list of {len(node.nodes)}"
    if node.value is None:
        return "nothing (null)"
    return f"{node.value!r} ({type(node.value).__name__})"


def _type_error(node: Node, hint: Any, path: str, advice: str = "") -> ConfigError:
    message = f"{node.origin.label}: {path}: expected {describe(hint)}, got {shown(node)}. {advice}"
    return ConfigError(message.rstrip())


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _members(hint: Any) -> list[Any]:
    """The members of a union that a file can spell, most particular first."""
    members = [member for member in get_args(hint) if is_supported(member)]
    return sorted(members, key=lambda member: _UNION_ORDER.index(get_origin(member) or member))


def _convert_union(node: Node, hint: Any, path: str) -> Any:
    members = [member for member in _members(hint) if _may_hold(member, node)]
    if float in members and isinstance(node, Scalar) and isinstance(node.value, float):
        members = [member for member in members if member is not int]  # 1e5 is an integer only where no float may be
    if len(members) == 1:  # its own message can say more: which item of a list is wrong
        return convert(node, members[0], path)
    for member in members:
        try:
            return convert(node, member, path)
        except ConfigError:
            continue
    raise _type_error(node, hint, path, _union_advice(node, members))


def _may_hold(member: Any, node: Node) -> bool:
    if member is Any:
        return True
    if isinstance(node, Scalar):
        is_container = get_origin(member) in (list, tuple, dict)
        return node.is_null if member is NoneType else not is_container or node.style == "argument"
    return get_origin(member) in ((dict,) if isinstance(node, Section) else (list, tuple))


def _union_advice(node: Node, members: list[Any]) -> str:
    """The advice of the first member that has any."""
    for member in members:
        try:
            if isinstance(node, Scalar) and get_origin(member) is Literal:
                _convert_literal(node, member)
            elif isinstance(node, Scalar) and member in _SCALARS:
                _SCALARS[member](node)
        except _Mismatch as mismatch:
            if str(mismatch):
                return str(mismatch)
    return ""


def _convert_list(node: Node, hint: Any, path: str) -> list[Any] | tuple[Any, ...]:
    if isinstance(node, Scalar) and node.style == "argument":
        node = _items_from_argument(node)
    if not isinstance(node, Items):
        raise _type_error(node, hint, path, "Write it as [a, b].")
    kind, arguments = get_origin(hint), get_args(hint)
    is_fixed = kind is tuple and Ellipsis not in arguments
    if is_fixed and len(arguments) != len(node.nodes):
        raise _type_error(node, hint, path)
    hints = arguments if is_fixed else (arguments[0],) * len(node.nodes)
    return kind(
        convert(item, item_hint, f"{path}[{index}]")
        for index, (item, item_hint) in enumerate(zip(node.nodes, hints, strict=True))
    )


def _convert_dict(node: Node, hint: Any, path: str) -> dict[str, Any]:
    if isinstance(node, Scalar) and node.style == "argument":
        node = _section_from_argument(node, path)
    if not isinstance(node, Section):
        raise _type_error(node, hint, path, "Write it as {name: value}.")
    value_hint = get_args(hint)[1]
    return {name: convert(value, value_hint, f"{path}.{name}") for name, value in node.nodes.items()}


def _items_from_argument(node: Scalar) -> Items:
    """`0.9,0.99` or `[0.9, 0.99]` on the command line."""
    text = node.text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1].strip()
    words = text.split(",") if text else []
    return Items(tuple(Scalar(word.strip(), "argument", node.origin) for word in words), node.origin)


def _section_from_argument(node: Scalar, path: str) -> Section:
    """`a=1,b=2` on the command line."""
    values: dict[str, Node] = {}
    for word in node.text.split(",") if node.text.strip() else []:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals) or name in values:
            raise ConfigError(f"{node.origin.label}: {path}: expected name=value,name=value; got {node.text!r}.")
        values[name] = Scalar(value, "argument", node.origin)
    return Section(values, node.origin)


def _convert_literal(scalar: Scalar, hint: Any) -> Any:
    choices = get_args(hint)
    for choice in choices:
        # A list of words leaves no doubt that `no` or 2014 is meant as text.
        same_text = isinstance(choice, str) and choice == scalar.text
        if same_text or (type(choice) is type(scalar.value) and choice == scalar.value):
            return choice
    raise _Mismatch(did_you_mean(scalar.text, [choice for choice in choices if isinstance(choice, str)]).strip())


def _null(scalar: Scalar) -> None:
    if not scalar.is_null:
        raise _Mismatch


def _switch(scalar: Scalar) -> bool:
    if isinstance(scalar.value, bool):
        return scalar.value
    raise _Mismatch("Write true or false." if scalar.text.lower() in _SWITCH_WORDS else "")


def _integer(scalar: Scalar) -> int:
    value = scalar.value
    if type(value) is int:
        return value
    if not isinstance(value, float):
        raise _Mismatch(_number_advice(scalar))
    if "e" in scalar.text.lower() and value.is_integer():
        return int(Decimal(scalar.text))  # 1e5 steps; exact where a float would round
    raise _Mismatch("Write it without a decimal point." if value.is_integer() else "")


def _number(scalar: Scalar) -> float:
    if type(scalar.value) not in (int, float):
        raise _Mismatch(_number_advice(scalar))
    number = float(scalar.text)
    if not math.isfinite(number):
        raise _Mismatch("It must be finite.")
    return number


def _number_advice(scalar: Scalar) -> str:
    """Why a text that looks like a number is none."""
    text = scalar.text.strip().lower().lstrip("+-")
    if scalar.style == "quoted" and isinstance(Scalar(scalar.text, "plain", scalar.origin).value, int | float):
        return "Remove the quotes."
    if text.lstrip(".") in ("inf", "infinity", "nan"):
        return "It must be finite."
    is_ambiguous = text.startswith("0") and text[1:].isdigit()
    return "Leading zeros are ambiguous (octal in YAML); remove them." if is_ambiguous else ""


def _text(scalar: Scalar) -> str:
    if scalar.style == "argument" or isinstance(scalar.value, str):
        return scalar.text
    raise _Mismatch("" if scalar.value is None else f'To give it as text, put it in quotes: "{scalar.text}".')


def _path(scalar: Scalar) -> Path:
    text = _text(scalar)
    if not text:
        raise _Mismatch("Use . for the folder itself.")
    try:
        return absolute_path(Path(text), scalar.origin.folder)
    except RuntimeError:  # ~nobody/data
        raise _Mismatch("Its home folder is unknown.") from None


def absolute_path(path: Path, folder: Path) -> Path:
    """A path as seen from a folder, with ~ expanded.

    >>> absolute_path(Path("data/train"), Path("/runs"))
    PosixPath('/runs/data/train')
    """
    result = (folder / path.expanduser()).absolute()
    # `link/..` is not the link's own parent: only the file system knows where it leads.
    return result.resolve() if ".." in result.parts else result


def _plain_python(node: Node) -> Any:
    if isinstance(node, Section):
        return {name: _plain_python(value) for name, value in node.nodes.items()}
    if isinstance(node, Items):
        return [_plain_python(item) for item in node.nodes]
    return node.value


_SCALARS: dict[Any, Callable[[Scalar], Any]] = {
    NoneType: _null,
    bool: _switch,
    int: _integer,
    float: _number,
    str: _text,
    Path: _path,
}
_WORDS = {
    NoneType: "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
}
