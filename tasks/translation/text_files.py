r"""Reads parallel text from pairs of text files, whose lines end at "\n" only, and from JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

Errors = Literal["strict", "replace"]
"""Treatment of bytes that are not UTF-8: raise an error, or replace them by U+FFFD."""

Column = tuple[str, ...]
"""Path of a side in a row: ("en",), or ("translation", "en") in a column of structs."""

Pair = tuple[str | None, str | None]

BOM = b"\xef\xbb\xbf"
UTF_16_BOMS = (b"\xff\xfe", b"\xfe\xff")
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Direction:
    """Source and target language, and their columns if these are not named after the languages."""

    source: str = "en"
    target: str = "de"
    source_column: str | None = None
    target_column: str | None = None

    def choose_columns(self, found: Mapping[str, Sequence[str] | str], where: str) -> tuple[Column, Column]:
        """Choose the columns of the two sides.

        Args:
            found: for each column its fields if it holds structs, else its type.
            where: place in the data, for error messages.

        >>> Direction("en", "de").choose_columns({"id": "int64", "translation": ["de", "en"]}, "train.parquet")
        (('translation', 'en'), ('translation', 'de'))

        Raises ValueError, listing the columns and the keys to set, if a side has no column.
        """
        source = _choose_column(found, self.source, self.source_column, "source", where)
        target = _choose_column(found, self.target, self.target_column, "target", where)
        return source, target


def read_lines(path: Path, errors: Errors = "strict") -> Iterator[str]:
    r"""Yield the lines of a UTF-8 file without their "\n" or "\r\n", and without a byte order mark at the start.

    Unlike with `str.splitlines`, no other character ends a line, and no character is changed.

    Raises ValueError for UTF-16 and, with errors="strict", for other bytes that are not UTF-8.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            # A file with only a byte order mark has no lines.
            if number > 1 or line != BOM:
                yield decode_line(line, path, number, errors)


def decode_line(line: bytes, file: Path | str, number: int, errors: Errors = "strict") -> str:
    r"""Decode line `number` (from 1) of `file`, which may end in "\n", as `read_lines` does."""
    if number == 1:
        if line.startswith(UTF_16_BOMS):
            raise ValueError(f"{file} must be UTF-8, but starts like UTF-16. Convert it (iconv -f UTF-16 -t UTF-8).")
        line = line.removeprefix(BOM)
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} must be UTF-8; line {number} has byte 0x{error.object[error.start]:02x} at position {error.start} "
            "of the line. Convert it (iconv -t UTF-8), or set data.invalid_utf8: replace for training files."
        ) from error


def read_pairs(source: Path, target: Path, errors: Errors = "strict") -> Iterator[tuple[str, str]]:
    """Yield pairs of lines of two files.

    Raises ValueError, with both line counts, at the end of the shorter file.
    """
    for source_line, target_line in zip_longest(read_lines(source, errors), read_lines(target, errors)):
        if source_line is None or target_line is None:
            counts = [sum(1 for _ in read_lines(path, "replace")) for path in (source, target)]
            raise ValueError(
                f"Parallel files must have equally many lines; {source} has {counts[0]}, {target} has {counts[1]}. "
                r'Align them: a line ends at "\n" only, and empty lines count.'
            )
        yield source_line, target_line


def read_json_lines(path: Path, errors: Errors = "strict") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and JSON object of each line of a file; blank lines are skipped.

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
            raise _not_an_object(path, number, f"has a {type(row).__name__}")
        yield number, row


def read_json_pairs(path: Path, direction: Direction, errors: Errors = "strict") -> Iterator[Pair]:
    """Yield the two sides of each object in a file of JSON lines. The first object decides their columns.

    Raises ValueError, naming file and line, if a side is absent or is neither text nor null.
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
    # A null translation does not tell its languages; assume those of the direction, which later lines may have.
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
                f"{where} must have {'.'.join(column)!r} like the first line; it has {', '.join(row) or 'nothing'}. "
                "Add it (or null), or change data.source_column and data.target_column."
            )
        value = value[key]
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(
            f"{where} must have text or null as {'.'.join(column)!r}; got {type(value).__name__}. "
            "Fix it, or set data.source_column and data.target_column to columns of text."
        )
    try:
        value.encode()  # much faster than searching for SURROGATE, and fails for the same texts
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ValueError(
                f"{where} must be Unicode; {'.'.join(column)!r} has half of a surrogate pair. "
                "Fix it, or set data.invalid_utf8: replace."
            ) from error
        return SURROGATE.sub("\ufffd", value)
    return value


def _not_an_object(path: Path, number: int, problem: str) -> ValueError:
    return ValueError(
        f"{path} must have one JSON object per line; line {number} {problem}. Write it as JSON lines (jq -c '.[]')."
    )
