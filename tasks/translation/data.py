"""Turns a corpus into the data of a run: its splits, a vocabulary, and token ids on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from tasks.common.sources import TEST_NAMES, TRAIN_NAMES, VALIDATION_NAMES
from tasks.translation.batches import Lengths, TokenizedPairs
from tasks.translation.cache import build_once, digest_of
from tasks.translation.config import TextConfig
from tasks.translation.sources import Corpus, find_local, open_corpus
from tasks.translation.text_files import Direction
from tasks.translation.tokenizer import (
    VERSION,
    encode,
    encode_sources,
    load_tokenizer,
    texts_of,
    train_tokenizer,
    vocabulary_digest,
)

_ROWS_AT_A_TIME = 10_000
_IDS = pa.list_(pa.int32())
_PAIRS_VERSION = 1
"""Version of how training pairs are chosen and written."""

_SCHEMA = pa.schema({"source_ids": _IDS, "target_ids": _IDS})


@dataclass(frozen=True)
class TrainingPairs:
    """Training pairs as memory-mapped token ids, and counts of those left out of the corpus."""

    pairs: TokenizedPairs
    source_lengths: Lengths
    target_lengths: Lengths
    """Tokens of each sentence (N,), its end included."""
    read: int
    """Pairs in the training split, after `train_limit` and without those held out."""
    empty: int
    """Pairs left out because a side has no text."""
    too_long: int
    """Pairs with a side longer than `max_length` tokens, which are left out or, with `truncation`, cut."""
    truncation: bool = False

    def described(self) -> str:
        """How many pairs there are and how many were left out or cut, in words."""
        longer = f"{self.too_long} longer than max_length" if self.too_long else ""
        left_out = [f"{self.empty} with an empty side"] if self.empty else []
        left_out += [longer] if longer and not self.truncation else []
        rest = f" (left out of {self.read}: {' and '.join(left_out)})" if left_out else ""
        cut = f" (cut: {longer})" if longer and self.truncation else ""
        return f"{len(self.pairs)} training pairs{rest}{cut}"


@dataclass(frozen=True)
class EvaluationPairs:
    """A complete split for evaluation: no pair is left out, and none is cut."""

    name: str
    sources: list[str]
    references: list[str]
    source_ids: list[list[int]]
    target_ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class TranslationData:
    """The data of a run."""

    tokenizer: PreTrainedTokenizerFast
    train: TrainingPairs
    validation: EvaluationPairs
    test: EvaluationPairs
    origin: str
    """Description of where the data came from."""


def load_translation_data(config: TextConfig) -> TranslationData:
    """Open the corpus, train or load the vocabulary, and tokenize. The result is the same in every process.

    Each part is done once and cached by its content: the first process of a machine does it, the others wait.

    Raises ValueError, FileNotFoundError, OSError or RuntimeError for data that cannot be used.
    """
    cache = default_cache_dir() if config.cache_dir is None else config.cache_dir.expanduser()
    corpus = open_text(config, cache)
    train_name, validation_name, test_name = _chosen_splits(config, corpus.splits, corpus.origin)
    train = corpus.splits[train_name]
    if config.train_limit is not None:
        train = train.select(range(min(config.train_limit, len(train))))
    if config.validation_fraction is None:
        validation = corpus.splits[validation_name]
    else:
        train, validation = hold_out(train, config.validation_fraction)
    tokenizer = _tokenizer(config, corpus, train, cache)
    return TranslationData(
        tokenizer=tokenizer,
        train=_training_pairs(config, corpus, train, tokenizer, cache),
        validation=evaluation_pairs(validation_name, validation, tokenizer),
        test=evaluation_pairs(test_name, corpus.splits[test_name], tokenizer),
        origin=corpus.origin,
    )


def require_local_splits(config: TextConfig) -> None:
    """Raise the errors of `load_translation_data` for local data without the splits of a run. Reads no texts."""
    if config.path is not None:
        direction = Direction(config.source, config.target, config.source_column, config.target_column)
        _chosen_splits(config, *find_local(config.path.expanduser(), direction))


def hold_out(train: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """Split into two parts; the second has floor(fraction * N) rows, evenly spaced: with 0.01 every 100th.

    Raises ValueError if the second part would be empty.
    """
    rows = np.arange(len(train) + 1)
    held_out = np.diff(np.floor(rows * fraction + 1e-9)) > 0  # 0.01 * 100 may be below 1
    if not held_out.any():
        raise ValueError(
            f"data.validation_fraction must hold out at least one pair; {fraction} of {len(train)} training pairs is "
            f"none. Raise it, or leave it out to use the validation split of the data."
        )
    return train.select(np.flatnonzero(~held_out)), train.select(np.flatnonzero(held_out))


def open_text(config: TextConfig, cache: Path) -> Corpus:
    """Open all splits of the corpus that `config` names."""
    return open_corpus(
        config.name,
        config.path,
        source=config.source,
        target=config.target,
        subset=config.subset,
        source_column=config.source_column,
        target_column=config.target_column,
        invalid_utf8=config.invalid_utf8,
        cache_dir=cache,
    )


def default_cache_dir() -> Path:
    """The default cache folder, in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsgdac_accel"


def evaluation_pairs(name: str, split: Dataset, tokenizer: PreTrainedTokenizerFast) -> EvaluationPairs:
    """Tokenize all rows of `split`."""
    sources, references = list(split["source"]), list(split["target"])
    return EvaluationPairs(name, sources, references, encode_sources(tokenizer, sources), encode(tokenizer, references))


def _chosen_splits(config: TextConfig, splits: Collection[str], origin: str) -> tuple[str, str, str]:
    """Names of the splits to train, validate and test on. Held-out pairs are called "validation".

    Raises ValueError for a split that is not there.
    """
    train = _choose(splits, origin, None, TRAIN_NAMES, "train")
    test = _choose(splits, origin, config.test_split, TEST_NAMES, "test")
    if config.validation_fraction is not None:
        return train, "validation", test
    return train, _choose(splits, origin, config.validation_split, VALIDATION_NAMES, "validation"), test


def _choose(splits: Collection[str], origin: str, wanted: str | None, names: tuple[str, ...], kind: str) -> str:
    """Choose a split of this kind: the wanted one, or the first of the usual names, but never training data."""
    found = ", ".join(repr(name) for name in splits)
    if wanted is not None:
        if wanted not in splits or wanted in TRAIN_NAMES:
            raise ValueError(
                f"data.{kind}_split must be a split other than the training one; got {wanted!r}, found {found}."
            )
        return wanted
    chosen = next((name for name in names if name in splits), None)
    if chosen is None:
        way_out = "Training needs one." if kind == "train" else f"Add one, or set data.{kind}_split to another split."
        raise ValueError(f"The corpus ({origin}) has no split named {kind!r}; found {found}. {way_out}")
    return chosen


def _tokenizer(config: TextConfig, corpus: Corpus, train: Dataset, cache: Path) -> PreTrainedTokenizerFast:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    chosen = (config.train_limit, config.validation_fraction, config.vocab_size)
    name = f"bpe-{digest_of(VERSION, corpus.fingerprint, *chosen)}.json"

    def build(path: Path) -> None:
        # Tokenizer.save raises a bare Exception for a full disk; write_text raises OSError.
        path.write_text(train_tokenizer(texts_of(train), config.vocab_size).to_str(pretty=True), encoding="utf-8")

    return load_tokenizer(build_once(cache, name, build))


# ---- training pairs


def _training_pairs(
    config: TextConfig, corpus: Corpus, train: Dataset, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> TrainingPairs:
    chosen = (config.train_limit, config.validation_fraction, config.max_length, config.truncation)
    name = f"pairs-{digest_of(_PAIRS_VERSION, corpus.fingerprint, vocabulary_digest(tokenizer), *chosen)}"
    folder = build_once(cache, name, lambda folder: _write_pairs(folder, train, tokenizer, config))
    rows = Dataset.from_file(str(folder / "pairs.arrow"))
    counts = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
    pairs = TrainingPairs(
        TokenizedPairs(rows),
        row_lengths(rows, "source_ids"),
        row_lengths(rows, "target_ids"),
        **counts,
        truncation=config.truncation,
    )
    if not len(rows):
        raise ValueError(
            f"Training needs at least one pair; the corpus ({corpus.origin}) has {pairs.described()}. "
            f"Fill the empty sides, or raise data.max_length = {config.max_length}."
        )
    return pairs


def _write_pairs(folder: Path, train: Dataset, tokenizer: PreTrainedTokenizerFast, config: TextConfig) -> None:
    folder.mkdir()
    counts = {"read": len(train), "empty": 0, "too_long": 0}
    with pa.OSFile(str(folder / "pairs.arrow"), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for batch in _tokenised(train, tokenizer, config, counts):
            writer.write_batch(pa.record_batch(batch, schema=_SCHEMA))
    (folder / "counts.json").write_text(json.dumps(counts), encoding="utf-8")


def _tokenised(
    train: Dataset, tokenizer: PreTrainedTokenizerFast, config: TextConfig, counts: dict[str, int]
) -> Iterator[list[Any]]:
    """Yield columns of ids of the pairs to keep, and count the empty and the long ones in `counts`."""
    for rows in train.iter(_ROWS_AT_A_TIME):
        pairs = list(zip(rows["source"], rows["target"], strict=True))
        full = [(source, target) for source, target in pairs if source.strip() and target.strip()]
        counts["empty"] += len(pairs) - len(full)
        sources = encode(tokenizer, [source for source, _ in full])
        targets = encode(tokenizer, [target for _, target in full])
        both = list(zip(sources, targets, strict=True))
        kept = [ids for ids in both if max(map(len, ids)) <= config.max_length]
        counts["too_long"] += len(full) - len(kept)
        if config.truncation:
            kept = [(_cut(source, config.max_length), _cut(target, config.max_length)) for source, target in both]
        if kept:
            yield [pa.array([source for source, _ in kept], _IDS), pa.array([target for _, target in kept], _IDS)]


def _cut(ids: list[int], length: int) -> list[int]:
    """The first tokens of a sentence and its end, at most `length` in all."""
    return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]


def row_lengths(rows: Dataset, column: str) -> Lengths:
    """Length of each row of a column of lists (N,), without reading its values."""
    chunks = rows.data.column(column).chunks
    parts = [np.asarray(pa.compute.list_value_length(chunk)) for chunk in chunks]
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
