r"""Parallel text in files: lines that end at "\n" only, pairs of files, JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

Errors = Literal["strict", "replace"]
"""What happens to bytes that are not UTF-8: an error, or U+FFFD in their place."""

Column = tuple[str, ...]
"""Where a side is found: ("en",), or ("translation", "en") in a column of structs."""

Pair = tuple[str | None, str | None]

BOM = b"\xef\xbb\xbf"
UTF_16_BOMS = (b"\xff\xfe", b"\xfe\xff")
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Direction:
    """What is translated into what: two languages, and their columns where these are not named after them."""

    source: str = "en"
    target: str = "de"
    source_column: str | None = None
    target_column: str | None = None

    def choose_columns(self, found: Mapping[str, Sequence[str] | str], where: str) -> tuple[Column, Column]:
        """Columns of the two sides among those `found`: the fields of a column of structs, the type of any other.

        >>> Direction("en", "de").choose_columns({"id": "int64", "translation": ["de", "en"]}, "train.parquet")
        (('translation', 'en'), ('translation', 'de'))

        Raises ValueError, listing the columns and the keys to set, if a side has none.
        """
        source = _choose_column(found, self.source, self.source_column, "source", where)
        target = _choose_column(found, self.target, self.target_column, "target", where)
        return source, target


def read_lines(path: Path, errors: Errors = "strict") -> Iterator[str]:
    r"""Lines of a UTF-8 file, one at a time, without their "\n" or "\r\n" and without a byte order mark at the start.

    No other character ends a line, whatever `str.splitlines` thinks of it, and none is changed.

    Raises ValueError for UTF-16 and, unless they are to be replaced, for other bytes that are not UTF-8.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            # A mark and nothing after it is an empty file, not a file with an empty line.
            if number > 1 or line != BOM:
                yield decode_line(line, path, number, errors)


def decode_line(line: bytes, file: Path | str, number: int, errors: Errors = "strict") -> str:
    r"""Text of line `number` (from 1) of `file`, as `read_lines` gives it; only "\n" may have ended the line."""
    if number == 1:
        if line.startswith(UTF_16_BOMS):
            raise ValueError(f"{file} must be UTF-8; it starts as UTF-16 does. Convert it (iconv -f UTF-16 -t UTF-8).")
        line = line.removeprefix(BOM)
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} must be UTF-8; line {number} has byte 0x{error.object[error.start]:02x} at position {error.start} "
            "of the line. Mend or convert it (iconv -t UTF-8); data.invalid_utf8: replace reads training files anyway."
        ) from error


def read_pairs(source: Path, target: Path, errors: Errors = "strict") -> Iterator[tuple[str, str]]:
    """Lines of two files side by side.

    Raises ValueError, with both counts, at the end of the shorter file if the other goes on.
    """
    for source_line, target_line in zip_longest(read_lines(source, errors), read_lines(target, errors)):
        if source_line is None or target_line is None:
            counts = [sum(1 for _ in read_lines(path, "replace")) for path in (source, target)]
            raise ValueError(
                f"Parallel files must have equally many lines; {source} has {counts[0]}, {target} has {counts[1]}. "
                r'Align them again: a line ends at "\n" only, and an empty one counts.'
            )
        yield source_line, target_line


def read_json_lines(path: Path, errors: Errors = "strict") -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a file that holds one in each line, with the numbers of the lines. Blank lines hold none.

    Raises ValueError, naming file and line, for anything else.
    """
    for number, line in enumerate(read_lines(path, errors), start=1):
        if not line.strip(" \t\r"):
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _not_an_object(path, number, f"is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise _not_an_object(path, number, f"holds a {type(row).__name__}")
        yield number, row


def read_json_pairs(path: Path, direction: Direction, errors: Errors = "strict") -> Iterator[Pair]:
    """The two sides of each object of a file of JSON lines; the first object says where they are found.

    Raises ValueError, naming file and line, where a side is absent or is neither text nor null.
    """
    columns: tuple[Column, Column] | None = None
    for number, row in read_json_lines(path, errors):
        where = f"{path}, line {number}"
        columns = columns or direction.choose_columns(_describe(row, direction), where)
        source, target = (_text_in(row, column, where, errors) for column in columns)
        yield source, target


def _choose_column(
    found: Mapping[str, Sequence[str] | str], language: str, wanted: str | None, side: str, where: str
) -> Column:
    if wanted is not None and wanted in found:
        return (wanted,)
    languages = found.get("translation", "")
    if wanted is None and not isinstance(languages, str) and language in languages:
        return ("translation", language)
    if wanted is None and language in found:
        return (language,)
    if wanted is None and not isinstance(languages, str):
        raise ValueError(
            f"data.{side} must be one of the languages of column 'translation' ({', '.join(languages)}) in {where}; "
            f"got {language!r}. Set data.source and data.target to two of them."
        )
    columns = ", ".join(f"{name}: {kind if isinstance(kind, str) else 'struct'}" for name, kind in found.items())
    problem = f"data.{side}_column={wanted!r} is not one" if wanted is not None else f"none is named {language!r}"
    raise ValueError(
        f"The {side} text needs a column; {problem} in {where}. "
        f"Set data.source_column and data.target_column to two of the columns: {columns or 'there are none'}."
    )


def _describe(row: dict[str, Any], direction: Direction) -> dict[str, Sequence[str] | str]:
    # A null does not say which languages it lacks: those that we look for, if later lines have them.
    if row.get("translation", "") is None:
        row = {**row, "translation": {direction.source: None, direction.target: None}}
    return {name: list(value) if isinstance(value, dict) else type(value).__name__ for name, value in row.items()}


def _text_in(row: dict[str, Any], column: Column, where: str, errors: Errors) -> str | None:
    value: Any = row
    for key in column:
        if value is None:
            return None
        if not isinstance(value, dict) or key not in value:
            raise ValueError(
                f"{where} must have {'.'.join(column)!r} as the first one has; it has {', '.join(row) or 'nothing'}. "
                "Add it (null for none), or mend data.source_column and data.target_column."
            )
        value = value[key]
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(
            f"{where} must have text or null as {'.'.join(column)!r}; got {type(value).__name__}. "
            "Mend it, or set data.source_column and data.target_column to columns of text."
        )
    try:
        value.encode()  # Fails where SURROGATE would match, and is much faster than searching.
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ValueError(
                f"{where} must be Unicode; {'.'.join(column)!r} has half of a surrogate pair. "
                "Mend it, or set data.invalid_utf8: replace."
            ) from error
        return SURROGATE.sub("\ufffd", value)
    return value


def _not_an_object(path: Path, number: int, problem: str) -> ValueError:
    return ValueError(
        f"{path} must hold one JSON object in each line; line {number} {problem}. Write it as JSON lines (jq -c '.[]')."
    )
