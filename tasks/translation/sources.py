"""Opens parallel text from the grammar, the Hub or local files as data sets with the columns source and target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset, Features, Value
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher

from tasks.common.sources import TRAIN_NAMES, find_split_files, open_hub, saved_splits
from tasks.translation.grammar import grammar_splits

HUB_NAMES = {"wmt14": ("wmt/wmt14", "de-en")}
"""Short names of data sets on the Hub, with the configuration to load."""

FILES_OF_PAIRS = (".parquet", ".jsonl", ".json")
SIDES = Features({"source": Value("string"), "target": Value("string")})
BOM = b"\xef\xbb\xbf"
VERSION = 2
"""Version of how texts are read. Raise it with any change, so that older cached ones are not used."""

Row = tuple[str, Any]
"""A place, for error messages, and the row there: a dictionary, or the pair of its texts."""

Rows = Callable[[str], Iterator[Row]]
"""Reads the rows of a split, given "strict" or "replace" for bytes that are not UTF-8."""


@dataclass(frozen=True)
class Direction:
    """Source and target language, and their columns if these are not named after the languages."""

    source: str = "en"
    target: str = "de"
    source_column: str | None = None
    target_column: str | None = None

    def columns(self, row: Mapping[str, Any], where: str) -> list[tuple[str, ...]]:
        """Choose the columns of the two sides: ("en",), or ("translation", "en") in a column of structs.

        >>> Direction("en", "de").columns({"id": 3, "translation": {"de": "ja", "en": "yes"}}, "train.parquet")
        [('translation', 'en'), ('translation', 'de')]

        Raises ValueError, listing the columns and the keys to set, if a side has no column.
        """
        return [
            self._column(row, "source", self.source, self.source_column, where),
            self._column(row, "target", self.target, self.target_column, where),
        ]

    def _column(
        self, row: Mapping[str, Any], side: str, language: str, wanted: str | None, where: str
    ) -> tuple[str, ...]:
        name, languages = wanted or language, row.get("translation", "")
        if wanted is None and "translation" in row and (languages is None or language in languages):
            return ("translation", language)  # a null does not tell its languages
        if name in row:
            return (name,)
        inner = f" (translation has {', '.join(languages)})" if isinstance(languages, Mapping) else ""
        raise ValueError(
            f"The {side} text needs a column; none is named {name!r} in {where}: {', '.join(row) or 'nothing'}{inner}. "
            f"Set data.{side}, or data.{side}_column, to one of them."
        )


@dataclass(frozen=True)
class Split:
    """A split that is not read yet."""

    read: Rows
    digest: Callable[[], str]
    """Computes a hex digest of its content."""


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs in splits."""

    splits: dict[str, Dataset]
    """Splits by name. The columns are "source" and "target", text without nulls; memory-mapped unless embedded."""
    origin: str
    """Description of where the pairs came from."""
    fingerprint: str
    """Hex digest of content and direction: equal in every process, and for copies of the files elsewhere."""


def digest_of(*parts: Any) -> str:
    """Hex digest of JSON values, for the names of files that depend on them."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def open_corpus(
    name: str | None,
    path: Path | None,
    direction: Direction,
    *,
    cache_dir: Path,
    subset: str | None = None,
    invalid_utf8: str = "error",
) -> Corpus:
    """Open all splits of a corpus. Rows are kept one for one; a null becomes an empty text.

    Args:
        name: "grammar", "wmt14", or a data set of the Hub.
        path: local data, used instead of `name`.
        direction: languages and columns of the sides.
        cache_dir: folder in which `datasets` keeps the texts as Arrow files, by their content.
        subset: configuration of a data set of the Hub.
        invalid_utf8: "error", or "replace" for invalid bytes in local training text.

    Raises:
        ValueError: the data is no parallel text.
        FileNotFoundError: `path` does not exist.
        RuntimeError: the Hub cannot be reached or has no such data set.
        OSError: `cache_dir` cannot be written.
    """
    if path is not None:
        found, origin = find_local(path, direction)
    elif not name:
        raise ValueError("Parallel text needs data.name ('grammar', 'wmt14', a Hub name) or data.path; got neither.")
    elif name.lower() == "grammar":
        found, origin = _grammar(direction), "the embedded grammar"
    else:
        hub_name, usual_subset = HUB_NAMES.get(name.lower(), (name, None))
        way_out = "set data.path to local files, or use 'grammar', which needs no download"
        loaded, origin = open_hub(hub_name, subset or usual_subset, way_out=way_out)
        found = _loaded(loaded, origin)
    digests = {split: digest_of(VERSION, astuple(direction), rows.digest()) for split, rows in found.items()}
    # Text that is scored must not change, so bytes are replaced in training data only.
    replaced = {split: invalid_utf8 if split in TRAIN_NAMES else "error" for split in found}
    splits = {
        split: _build(
            partial(_pairs, rows.read, direction, replaced[split].replace("error", "strict"), f"{split!r} of {origin}"),
            digest_of(digests[split], replaced[split]),
            cache_dir,
        )
        for split, rows in found.items()
    }
    return Corpus(splits, origin, digest_of(sorted(digests.items()), sorted(replaced.items())))


def _build(pairs: Callable[[], Iterator[dict[str, str]]], digest: str, cache: Path) -> Dataset:
    """Write the pairs to an Arrow file of the cache, unless it is there. One process writes, others wait."""
    try:
        return Dataset.from_generator(pairs, features=SIDES, cache_dir=str(cache), fingerprint=digest)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None


def _pairs(read: Rows, direction: Direction, errors: str, what: str) -> Iterator[dict[str, str]]:
    """The texts of all rows. The first row decides the columns."""
    columns: list[tuple[str, ...]] | None = None
    written = [False, False]
    for where, row in read(errors):
        if isinstance(row, Mapping):
            columns = columns or direction.columns(row, where)
            row = [_text(row, column, where, errors) for column in columns]
        written = [some or text != "" for some, text in zip(written, row, strict=True)]
        yield dict(zip(SIDES, row, strict=True))
    for side, some in zip(SIDES, written, strict=True):
        if not some:
            raise ValueError(
                f"A split must have rows with text; the {side} has none in split {what}. Fill it, remove the split, or "
                f"set data.{side}_column."
            )


def _text(row: Mapping[str, Any], column: tuple[str, ...], where: str, errors: str) -> str:
    value: Any = row
    for key in column:
        if isinstance(value, Mapping) and key not in value:
            raise ValueError(
                f"{where} must have {'.'.join(column)!r} like the first row; it has {', '.join(row)}. Add it (or null)."
            )
        value = value and value[key]
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"Column {'.'.join(column)!r} must hold text or null; got {type(value).__name__} in {where}. "
            "Set data.source_column and data.target_column to columns of text."
        )
    value = value or ""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ValueError(
                f"{where} must be Unicode; {'.'.join(column)!r} has half of a surrogate pair. "
                "Fix it, or set data.invalid_utf8: replace."
            ) from error
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


# ---- the grammar and loaded data sets


def _grammar(direction: Direction) -> dict[str, Split]:
    if {direction.source, direction.target} != {"en", "de"}:
        raise ValueError(
            f"The grammar translates between 'en' and 'de'; got data.source={direction.source!r} and "
            f"data.target={direction.target!r}. Set them to these two, or use other data."
        )

    def rows(pairs: list[tuple[str, str]], errors: str) -> Iterator[Row]:
        return (("the grammar", pair if direction.source == "en" else pair[::-1]) for pair in pairs)

    return {split: Split(partial(rows, pairs), partial(digest_of, pairs)) for split, pairs in grammar_splits().items()}


def _loaded(loaded: Mapping[str, Dataset], origin: str) -> dict[str, Split]:
    def rows(data: Dataset, where: str, errors: str) -> Iterator[Row]:
        tables = data.with_format("arrow").iter(1000)
        return _table_rows((batch for table in tables for batch in table.to_batches()), where, errors)

    return {
        split: Split(partial(rows, data, f"split {split!r} of {origin}"), partial(Hasher.hash, data))
        for split, data in loaded.items()
    }


def _table_rows(batches: Iterable[pa.RecordBatch], where: str, errors: str) -> Iterator[Row]:
    for batch in batches:
        if errors == "replace":
            batch = pa.record_batch([_valid(column) for column in batch.columns], batch.schema.names)
        try:
            yield from ((where, row) for row in batch.to_pylist())
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} must be UTF-8 ({error}). Fix it, or set data.invalid_utf8: replace.") from error


def _valid(column: pa.Array) -> pa.Array:
    if not pa.types.is_string(column.type):
        return column
    texts = column.cast(pa.binary()).to_pylist()
    return pa.array([None if text is None else text.decode(errors="replace") for text in texts])


# ---- local files


def find_local(path: Path, direction: Direction) -> tuple[dict[str, Split], str]:
    """Find the splits of local data by names of files, without reading them. Returns them with a description.

    Raises ValueError or FileNotFoundError if there are none, or if they are not clear.
    """
    path = path.expanduser()
    expected = (
        f"Expected train*.parquet, train*.jsonl, or train*.{direction.source} and train*.{direction.target}, likewise "
        "for validation* and test*; or what `save_to_disk` of `datasets` wrote."
    )
    if not path.exists():
        raise FileNotFoundError(f"data.path must exist; got {path}. {expected}")
    if path.is_file():
        if path.suffix not in FILES_OF_PAIRS:
            raise ValueError(f"A file as data.path must end in {', '.join(FILES_OF_PAIRS)}; got {path}. {expected}")
        return {"train": _of_files([(path,)])}, f"file {path}"
    if saved := saved_splits(path):
        origin = f"data set saved in {path}"
        return _loaded(saved, origin), origin
    kinds = [_find_text_files(path, direction)]
    for suffix in FILES_OF_PAIRS:
        kinds.append({split: [(file,) for file in files] for split, files in find_split_files(path, suffix).items()})
    found: dict[str, list[tuple[Path, ...]]] = {}
    for split, shards in ((split, shards) for kind in kinds for split, shards in kind.items()):
        if split in found:
            raise ValueError(
                f"A split must come in one kind of file; '{split}' in {path} is both {shards[0][0].name} and "
                f"{found[split][0][0].name}. Remove one of them, or set data.path to a single file."
            )
        found[split] = shards
    if not found:
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
        raise ValueError(f"No splits in {path}; found {entries}. {expected}")
    return {split: _of_files(shards) for split, shards in found.items()}, f"files in {path}"


def _find_text_files(path: Path, direction: Direction) -> dict[str, list[tuple[Path, ...]]]:
    sources, targets = (find_split_files(path, f".{language}") for language in (direction.source, direction.target))
    pairs: dict[str, list[tuple[Path, ...]]] = {}
    for split in sources | targets:
        stems = {file.with_suffix("") for file in [*sources.get(split, []), *targets.get(split, [])]}
        pairs[split] = [
            tuple(stem.with_name(f"{stem.name}.{language}") for language in (direction.source, direction.target))
            for stem in sorted(stems)
        ]
        for file in (file for pair in pairs[split] for file in pair if not file.exists()):
            raise ValueError(
                f"Text files must come in pairs, such as train.{direction.source} and train.{direction.target}; there "
                f"is no {file}. Add it, or set data.source and data.target to the languages in data.path."
            )
    return pairs


def _of_files(shards: list[tuple[Path, ...]]) -> Split:
    def digest() -> str:
        return digest_of([[file.suffix, _digest_of_file(file)] for shard in shards for file in shard])

    def read(errors: str) -> Iterator[Row]:
        for shard in shards:
            if len(shard) == 2:
                yield from (("", pair) for pair in read_pairs(*shard, errors))
            elif shard[0].suffix == ".parquet":
                yield from _read_parquet(shard[0], errors)
            else:
                yield from _read_json(shard[0], errors)

    return Split(read, digest)


def _digest_of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _read_parquet(file: Path, errors: str) -> Iterator[Row]:
    try:
        with pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as parquet:  # both are needed to stream
            yield from _table_rows(parquet.iter_batches(1000), str(file), errors)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{file} must be a readable parquet file: {error}. Write or download it again.") from error


def _read_json(file: Path, errors: str) -> Iterator[Row]:
    for number, line in enumerate(read_lines(file, errors), start=1):
        if not line.strip(" \t\r"):
            continue
        try:
            row = json.loads(line)
            problem = "" if isinstance(row, dict) else f"has a {type(row).__name__}"
        except (ValueError, RecursionError) as error:
            problem = f"is not JSON ({error})"
        if problem:
            raise ValueError(
                f"{file} must have one JSON object per line; line {number} {problem}. "
                "Write it as JSON lines (jq -c '.[]')."
            )
        yield f"{file}, line {number}", row


def read_pairs(source: Path, target: Path, errors: str = "strict") -> Iterator[tuple[str, str]]:
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


def read_lines(path: Path, errors: str = "strict") -> Iterator[str]:
    r"""Yield the lines of a UTF-8 file without their "\n" or "\r\n", and without a byte order mark at the start.

    Unlike with `str.splitlines`, no other character ends a line, and no character is changed.

    Raises ValueError for UTF-16 and, with errors="strict", for other bytes that are not UTF-8.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number > 1 or line != BOM:  # a file with only a byte order mark has no lines
                yield decode_line(line, path, number, errors)


def decode_line(line: bytes, file: Path | str, number: int, errors: str = "strict") -> str:
    r"""Decode line `number` (from 1) of `file`, which may end in "\n", as `read_lines` does."""
    if number == 1:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError(f"{file} must be UTF-8, but starts like UTF-16. Convert it (iconv -f UTF-16 -t UTF-8).")
        line = line.removeprefix(BOM)
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} must be UTF-8; line {number} has byte 0x{error.object[error.start]:02x} at position {error.start} "
            "of the line. Convert it (iconv -t UTF-8), or set data.invalid_utf8: replace for training files."
        ) from error
