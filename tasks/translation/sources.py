"""Opens parallel text from the grammar, the Hub or local files, and finds its splits, sides and languages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from datasets import Dataset

from tasks.common.sources import TRAIN_NAMES, find_split_files, open_hub, saved_splits
from tasks.translation.cache import build_once, digest_of
from tasks.translation.text_files import Column, Direction, Errors, Pair, read_json_pairs, read_pairs

HUB_NAMES = {"wmt14": ("wmt/wmt14", "de-en")}
"""Short names of data sets on the Hub, with the configuration to load."""

SIDES = pa.schema({"source": pa.string(), "target": pa.string()})

VERSION = 1
"""Version of the format of the cached files."""

ROWS_AT_A_TIME = 10_000

Batches = Iterator[pa.RecordBatch]
"""Rows of `SIDES`, in which a text may be null."""

Shard = tuple[Path, ...]
"""A file of pairs, or the two files of the sides."""


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs in splits."""

    splits: dict[str, Dataset]
    """Splits by name. The columns are "source" and "target", text without nulls; memory-mapped unless embedded."""

    origin: str
    """Description of where the pairs came from."""

    fingerprint: str
    """Hex digest of content and direction: equal in every process, and for copies of the files elsewhere."""


@dataclass(frozen=True)
class _Split:
    """A split before its conversion to an Arrow file."""

    digest: str
    """Hex digest of everything that decides its rows."""

    read: Callable[[], Batches]


Found = Mapping[str, Callable[[Errors], _Split]]
"""What opens each split, given what to do with bytes that are not UTF-8."""


def open_corpus(
    name: str | None,
    path: Path | None,
    *,
    source: str = "en",
    target: str = "de",
    subset: str | None = None,
    source_column: str | None = None,
    target_column: str | None = None,
    invalid_utf8: Literal["error", "replace"] = "error",
    cache_dir: Path,
) -> Corpus:
    """Open all splits of a corpus. Rows are kept one for one; a null becomes an empty text.

    Data of any size is converted to Arrow files in `cache_dir`, once and in constant memory.

    Args:
        name: "grammar", "wmt14", or a data set of the Hub.
        path: local data, used instead of `name`.
        source, target: languages: keys of the translation column, names of the columns, or endings of the text files.
        subset: configuration of a data set of the Hub.
        source_column, target_column: columns that are not named after the languages.
        invalid_utf8: what to do with invalid bytes in local training data.
        cache_dir: folder of the Arrow files.

    Raises:
        ValueError: the data is no parallel text.
        FileNotFoundError: `path` does not exist.
        RuntimeError: the Hub cannot be reached or has no such data set.
        OSError: `cache_dir` cannot be written.
    """
    direction = Direction(source, target, source_column, target_column)
    errors: Errors = "replace" if invalid_utf8 == "replace" else "strict"
    if path is not None:
        found, origin = find_local(Path(path).expanduser(), direction)
    elif not name:
        raise ValueError("Parallel text needs a name ('grammar', 'wmt14', a Hub name) or a path; got neither.")
    elif name.lower() == "grammar":
        return _open_grammar(direction)
    else:
        found, origin = _find_on_hub(name, subset, direction)
    # Text that is scored must not change, so bytes are replaced in training data only.
    splits = {split: read(errors if split in TRAIN_NAMES else "strict") for split, read in found.items()}
    cache = Path(cache_dir).expanduser()
    opened = {name: _convert(split, f"split '{name}' of {origin}", cache) for name, split in splits.items()}
    return Corpus(opened, origin, _fingerprint(direction, {name: split.digest for name, split in splits.items()}))


# ---- the grammar and the Hub


def _open_grammar(direction: Direction) -> Corpus:
    from tasks.translation.grammar import grammar_splits

    if {direction.source, direction.target} != {"en", "de"}:
        raise ValueError(
            f"The grammar translates between 'en' and 'de'; got data.source={direction.source!r} and "
            f"data.target={direction.target!r}. Set them to these two, or use other data."
        )
    forth = direction.source == "en"
    tables = {
        name: pa.Table.from_batches(_batches((en, de) if forth else (de, en) for en, de in pairs), SIDES)
        for name, pairs in grammar_splits().items()
    }
    digests = {name: _digest_of_rows(table.to_batches()) for name, table in tables.items()}
    splits = {name: Dataset(table) for name, table in tables.items()}
    return Corpus(splits, "the embedded grammar", _fingerprint(direction, digests))


def _find_on_hub(name: str, subset: str | None, direction: Direction) -> tuple[Found, str]:
    hub_name, usual_subset = HUB_NAMES.get(name.lower(), (name, None))
    way_out = "set data.path to local files, or use 'grammar', which needs no download"
    loaded, origin = open_hub(hub_name, subset or usual_subset, way_out=way_out)
    return _found(loaded, origin, direction), origin


def _found(loaded: Mapping[str, Dataset], origin: str, direction: Direction) -> Found:
    return {
        split: partial(_loaded_split, data, direction, f"split '{split}' of {origin}") for split, data in loaded.items()
    }


def _loaded_split(data: Dataset, direction: Direction, where: str, errors: Errors) -> _Split:
    read = partial(_read_loaded, data, direction, errors, where)
    return _Split(_digest_of_rows(read()), read)


def _read_loaded(data: Dataset, direction: Direction, errors: Errors, where: str) -> Batches:
    columns = direction.choose_columns(_described(data.features.arrow_schema), where)
    for table in data.select_columns(_top_level(columns)).with_format("arrow").iter(ROWS_AT_A_TIME):
        for batch in table.combine_chunks().to_batches():
            yield _sides(batch, columns, where, errors)


# ---- local files


def find_local(path: Path, direction: Direction) -> tuple[Found, str]:
    """Find the splits of local data by names of files, and return what opens each, with a description.

    Raises ValueError or FileNotFoundError if there are none, or if they are not clear.
    """
    expected = (
        f"Expected train*.parquet, train*.jsonl, or train*.{direction.source} and train*.{direction.target}, likewise "
        "for validation* and test*; or what `save_to_disk` of `datasets` wrote."
    )
    if not path.exists():
        raise FileNotFoundError(f"data.path must exist; got {path}. {expected}")
    if path.is_file():
        if path.suffix not in FILES_OF_PAIRS:
            kinds = ", ".join(FILES_OF_PAIRS)
            raise ValueError(f"A file as data.path must end in one of {kinds}; got {path}. {expected}")
        return {"train": partial(_split, [(path,)], direction)}, f"file {path}"
    if saved := saved_splits(path):
        origin = f"data set saved in {path}"
        return _found(saved, origin, direction), origin
    found = [_find_text_files(path, direction), *(_find_files_of_pairs(path, suffix) for suffix in FILES_OF_PAIRS)]
    shards: dict[str, list[Shard]] = {}
    for split, files in ((split, files) for kind in found for split, files in kind.items()):
        if split in shards:
            raise ValueError(
                f"A split must come in one kind of file; '{split}' in {path} is both {files[0][0].name} and "
                f"{shards[split][0][0].name}. Remove one of them, or set data.path to a single file."
            )
        shards[split] = files
    if not shards:
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
        raise ValueError(f"No splits in {path}; found {entries}. {expected}")
    return {split: partial(_split, files, direction) for split, files in shards.items()}, f"files in {path}"


def _find_files_of_pairs(path: Path, suffix: str) -> dict[str, list[Shard]]:
    return {split: [(file,) for file in files] for split, files in find_split_files(path, suffix).items()}


def _find_text_files(path: Path, direction: Direction) -> dict[str, list[Shard]]:
    sources = find_split_files(path, f".{direction.source}")
    targets = find_split_files(path, f".{direction.target}")
    pairs: dict[str, list[Shard]] = {}
    for split in sources | targets:
        forth = [_partner(file, direction.source, direction.target) for file in sources.get(split, [])]
        back = [_partner(file, direction.target, direction.source) for file in targets.get(split, [])]
        lacking = ({*forth} - {*targets.get(split, [])}) | ({*back} - {*sources.get(split, [])})
        if lacking:
            raise ValueError(
                f"Text files must come in pairs, such as train.{direction.source} and train.{direction.target}; there "
                f"is no {min(lacking)}. Add it, or set data.source and data.target to the languages in data.path."
            )
        pairs[split] = list(zip(sources[split], forth, strict=True))
    return pairs


def _partner(file: Path, language: str, other: str) -> Path:
    return file.with_name(file.name.removesuffix(language) + other)


def _split(shards: Sequence[Shard], direction: Direction, errors: Errors) -> _Split:
    files = [[(file.suffix, _digest_of_file(file)) for file in shard] for shard in shards]
    return _Split(digest_of(astuple(direction), errors, files), partial(_read_shards, shards, direction, errors))


def _read_shards(shards: Sequence[Shard], direction: Direction, errors: Errors) -> Batches:
    for shard in shards:
        if len(shard) == 2:
            yield from _batches(read_pairs(*shard, errors))
        else:
            yield from FILES_OF_PAIRS[shard[0].suffix](shard[0], direction, errors)


def _read_json(file: Path, direction: Direction, errors: Errors) -> Batches:
    return _batches(read_json_pairs(file, direction, errors))


def _read_parquet(file: Path, direction: Direction, errors: Errors) -> Batches:
    try:
        # Both options are needed to stream: otherwise a row group is read in one piece, and some files have only one.
        with pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as parquet:
            columns = direction.choose_columns(_described(parquet.schema_arrow), str(file))
            for batch in parquet.iter_batches(ROWS_AT_A_TIME, columns=_top_level(columns)):
                yield _sides(batch, columns, str(file), errors)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{file} must be a readable parquet file: {error}. Write or download it again.") from error


FILES_OF_PAIRS: dict[str, Callable[[Path, Direction, Errors], Batches]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json,
    ".json": _read_json,
}


# ---- columns of text


def _described(schema: pa.Schema) -> dict[str, list[str] | str]:
    return {
        field.name: [child.name for child in field.type] if pa.types.is_struct(field.type) else str(field.type)
        for field in schema
    }


def _top_level(columns: Iterable[Column]) -> list[str]:
    return list(dict.fromkeys(column[0] for column in columns))


def _sides(batch: pa.RecordBatch, columns: Iterable[Column], where: str, errors: Errors) -> pa.RecordBatch:
    return pa.record_batch([_strings(batch, column, where, errors) for column in columns], schema=SIDES)


def _strings(batch: pa.RecordBatch, column: Column, where: str, errors: Errors) -> pa.Array:
    cells = batch.column(column[0])
    for field in column[1:]:
        cells = pc.struct_field(cells, field)
    kind = cells.type.value_type if pa.types.is_dictionary(cells.type) else cells.type
    if kind not in (pa.string(), pa.large_string(), pa.string_view(), pa.null()):
        raise ValueError(
            f"Column {'.'.join(column)!r} must hold text, but has {kind} in {where}. "
            "Set data.source_column and data.target_column to columns of text."
        )
    strings = cells.cast(pa.string())
    try:
        strings.validate(full=True)
    except pa.ArrowInvalid as error:
        if errors == "strict":
            raise ValueError(
                f"Column {'.'.join(column)!r} must be UTF-8; it is not in {where} ({error}). "
                "Fix it, or set data.invalid_utf8: replace."
            ) from error
        cells = strings.cast(pa.binary()).to_pylist()
        strings = pa.array([None if cell is None else cell.decode(errors="replace") for cell in cells], pa.string())
    return strings


# ---- Arrow files


def _convert(split: _Split, what: str, cache: Path) -> Dataset:
    name = f"text-{VERSION}-{split.digest}.arrow"
    return Dataset.from_file(str(build_once(cache, name, lambda file: _write(file, split.read(), what))))


def _write(file: Path, batches: Batches, what: str) -> None:
    rows = 0
    nulls = [0, 0]
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, SIDES) as writer:
        for batch in batches:
            rows += len(batch)
            nulls = [count + side.null_count for count, side in zip(nulls, batch.columns, strict=True)]
            writer.write_batch(_without_nulls(batch))
    if rows == 0:
        raise ValueError(f"A split must have rows; {what} has none. Fill it, or remove it from data.path.")
    for side, count in zip(SIDES.names, nulls, strict=True):
        if count == rows:
            raise ValueError(
                f"A split must have text on both sides; the {side} of all {rows} rows is null in {what}. "
                f"Set data.{side}_column to another column, or remove the split from data.path."
            )


def _batches(pairs: Iterable[Pair]) -> Batches:
    pairs = iter(pairs)
    while chunk := list(islice(pairs, ROWS_AT_A_TIME)):
        yield pa.record_batch([pa.array(side, pa.string()) for side in zip(*chunk, strict=True)], schema=SIDES)


def _without_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch([side.fill_null("") for side in batch.columns], schema=SIDES)


# ---- digests


def _fingerprint(direction: Direction, digests: Mapping[str, str]) -> str:
    return digest_of(direction.source, direction.target, sorted(digests.items()))


def _digest_of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_of_rows(batches: Iterable[pa.RecordBatch]) -> str:
    """Hex digest of the texts and their lengths, which does not depend on how rows are batched."""
    hashes = [hashlib.blake2b(digest_size=16) for _ in range(4)]
    for batch in map(_without_nulls, batches):
        for side, text, lengths in zip(batch.columns, hashes[:2], hashes[2:], strict=True):
            _, ends, characters = side.buffers()
            ends = np.frombuffer(ends, np.int32)[side.offset : side.offset + len(side) + 1]
            lengths.update(np.diff(ends).tobytes())
            text.update(memoryview(characters or b"")[ends[0] : ends[-1]])
    return digest_of([part.hexdigest() for part in hashes])
