"""Checks of single values: numbers, integers, words, flags and files.

Each check returns the value in its plain Python type, so that equal settings compare and print alike, or raises a
ValueError that names the rule, the value and the way out.
"""

from __future__ import annotations

import difflib
import math
import numbers
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

LARGEST_INTEGER = 2**63 - 1
"""Largest integer that torch and the file formats can hold."""

LARGEST_FLOAT32 = 3.4e38
"""Largest value of a setting that is combined with float32 parameters."""

LONGEST_TIMEOUT = 1e9
"""Longest timeout in seconds (31 years): every clock involved can count it in milliseconds."""

LARGEST_SEED = 2**32 - 1
"""Largest seed that NumPy accepts."""


def did_you_mean(word: str, known: Collection[str], other_names: Mapping[str, str] | None = None) -> str:
    """A sentence that suggests the known word nearest to a misspelled one, or "" if none is near.

    Case and dashes are ignored: both are common slips for lower_case names. `other_names` maps words that are used
    elsewhere to known ones.

    >>> did_you_mean("one-peer-rng", ["one_peer_ring", "complete"])
    " Did you mean 'one_peer_ring'?"
    >>> did_you_mean("zebra", ["one_peer_ring", "complete"])
    ''
    """
    plain = {_plain(candidate): candidate for candidate in known}
    if other_names and _plain(word) in other_names:
        return f" Did you mean {other_names[_plain(word)]!r}?"
    nearest = difflib.get_close_matches(_plain(word), plain, n=1)
    return f" Did you mean {plain[nearest[0]]!r}?" if nearest else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


def check_number(
    name: str,
    value: object,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    above: float = -math.inf,
    advice: str = "",
) -> float:
    """Require a finite number in [minimum, maximum] that is greater than `above`.

    Args:
        name: the setting, for the message.
        value: anything; True and False are not numbers.
        minimum: smallest allowed number.
        maximum: largest allowed number.
        above: the number must be strictly greater than this.
        advice: the way out, appended to the message.

    Returns:
        The number as a float.

    Raises:
        ValueError: the value is anything else.

    >>> check_number("power", 3, minimum=0)
    3.0
    >>> check_number("floor", 1.5, minimum=0, maximum=1)
    Traceback (most recent call last):
    ValueError: floor must be a number in [0, 1]; got 1.5.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:  # an integer with hundreds of digits
        number = math.inf
    # Mention the upper bound only when it was exceeded or is part of a small range.
    is_mentioned = number > maximum or (maximum < LARGEST_FLOAT32 and not math.isfinite(above))
    mentioned = maximum if is_mentioned else math.inf
    rule = f"{name} must be {_range_text(minimum, mentioned, above)}; got {value!r}."
    if not (math.isfinite(number) and minimum <= number <= maximum and number > above):
        raise ValueError(_with_advice(rule, advice))
    return number


def check_integer(name: str, value: object, *, minimum: int, maximum: int = LARGEST_INTEGER, advice: str = "") -> int:
    """Require an integer in [minimum, maximum]; True, False and 3.0 are not integers.

    Args:
        name: the setting, for the message.
        value: anything.
        minimum: smallest allowed integer.
        maximum: largest allowed integer.
        advice: the way out, appended to the message.

    Returns:
        The integer as an int.

    Raises:
        ValueError: the value is anything else.

    >>> check_integer("log_every", 50, minimum=0)
    50
    >>> check_integer("log_every", -1, minimum=0, advice="Use 0 to measure at evaluations only.")
    Traceback (most recent call last):
    ValueError: log_every must be an integer >= 0; got -1. Use 0 to measure at evaluations only.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    is_too_large = is_integer and value > maximum  # type: ignore[operator]
    bounds = f"from {minimum} to {maximum}" if is_too_large else f">= {minimum}"
    if not is_integer or not minimum <= value <= maximum:  # type: ignore[operator]
        raise ValueError(_with_advice(f"{name} must be an integer {bounds}; got {value!r}.", advice))
    return int(value)  # type: ignore[call-overload]


def check_choice(
    name: str, value: object, choices: Collection[str], other_names: Mapping[str, str] | None = None
) -> str:
    """Require one of a few words, and suggest its entry in `other_names`, or the nearest word, otherwise.

    >>> check_choice("order", "mix_frist", ["local_first", "mix_first"])
    Traceback (most recent call last):
    ValueError: order must be one of local_first, mix_first; got 'mix_frist'. Did you mean 'mix_first'?
    """
    if isinstance(value, str) and value in choices:
        return value
    suggestion = did_you_mean(value, choices, other_names) if isinstance(value, str) else ""
    raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.{suggestion}")


def check_flag(name: str, value: object) -> bool:
    """Require True or False; 0, 1 and words are neither.

    >>> check_flag("overlap", 1)
    Traceback (most recent call last):
    ValueError: overlap must be True or False; got 1.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {value!r}.")
    return value


def check_writable(name: str, path: Path) -> Path:
    """Require a file that can be written. Its folder is created if needed; its content stays.

    >>> check_writable("output", Path("/"))
    Traceback (most recent call last):
    ValueError: output must be a file that can be written; / is not (Is a directory). Choose another one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            open(path, "ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"{name} must be a file that can be written; {path} is not ({reason}). Choose another one."
        ) from None
    return path


def absolute_path(path: Path, folder: Path) -> Path:
    """A path relative to a folder, with ~ expanded, as an absolute path.

    >>> absolute_path(Path("data/train"), Path("/runs"))
    PosixPath('/runs/data/train')
    """
    result = (folder / path.expanduser()).absolute()
    # The parent of a symbolic link's target is not the link's own parent: only the file system can resolve `..`.
    return result.resolve() if ".." in result.parts else result


def _range_text(minimum: float, maximum: float, above: float) -> str:
    if math.isfinite(maximum) and math.isfinite(above):
        return f"a number > {above:g} and <= {maximum:g}"
    if math.isfinite(maximum):
        return f"a number in [{minimum:g}, {maximum:g}]"
    if math.isfinite(above):
        return f"a finite number > {above:g}"
    return f"a finite number >= {minimum:g}" if math.isfinite(minimum) else "a finite number"


def _with_advice(rule: str, advice: str) -> str:
    return f"{rule} {advice}".rstrip()
