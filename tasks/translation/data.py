"""Turns a corpus into the data of a run: its splits, a vocabulary, and token ids on disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset, Features, List, Value
from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from tasks.common.sources import TEST_NAMES, TRAIN_NAMES, VALIDATION_NAMES
from tasks.translation.batches import Lengths, TokenizedPairs
from tasks.translation.config import TextConfig
from tasks.translation.sources import Corpus, Direction, digest_of, find_local, open_corpus
from tasks.translation.tokenizer import (
    VERSION,
    encode,
    encode_sources,
    load_tokenizer,
    texts_of,
    train_tokenizer,
    vocabulary_digest,
)

IDS = Features(
    {
        "source_ids": List(Value("int32")),
        "target_ids": List(Value("int32")),
        "empty": Value("bool"),
        "long": Value("bool"),
    }
)


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
    cache = cache_folder(config)
    with _one_process(cache):
        corpus = open_text(config)
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
        _chosen_splits(config, *find_local(config.path, _direction(config)))


def open_text(config: TextConfig) -> Corpus:
    """Open all splits of the corpus that `config` names."""
    return open_corpus(
        config.name,
        config.path,
        _direction(config),
        cache_dir=cache_folder(config),
        subset=config.subset,
        invalid_utf8=config.invalid_utf8,
    )


def cache_folder(config: TextConfig) -> Path:
    """The folder of prepared data; by default in $XDG_CACHE_HOME or ~/.cache."""
    if config.cache_dir is not None:
        return config.cache_dir.expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsgdac_accel"


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


def evaluation_pairs(name: str, split: Dataset, tokenizer: PreTrainedTokenizerFast) -> EvaluationPairs:
    """Tokenize all rows of `split`."""
    sources, references = list(split["source"]), list(split["target"])
    return EvaluationPairs(name, sources, references, encode_sources(tokenizer, sources), encode(tokenizer, references))


@contextmanager
def _one_process(cache: Path) -> Iterator[None]:
    """Let one process of the machine prepare data in the cache while the others wait."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"):
            yield
    except OSError as error:
        denied = (errno.EACCES, errno.EROFS, errno.EEXIST, errno.ENOTDIR)
        full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if error.errno not in (*denied, *full):
            raise
        raise OSError(
            f"Prepared data must be written to {cache}; got: {error}. Set data.cache_dir elsewhere."
        ) from error


def _direction(config: TextConfig) -> Direction:
    return Direction(config.source, config.target, config.source_column, config.target_column)


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
    file = cache / f"bpe-{digest_of(VERSION, corpus.fingerprint, *chosen)}.json"
    if not file.exists():
        # Tokenizer.save raises a bare Exception for a full disk; write_text raises OSError.
        partial_file = file.with_suffix(".partial")
        partial_file.write_text(train_tokenizer(texts_of(train), config.vocab_size).to_str(), encoding="utf-8")
        partial_file.replace(file)  # a killed process leaves no half of a file under the name
    return load_tokenizer(file)


# ---- training pairs


def _training_pairs(
    config: TextConfig, corpus: Corpus, train: Dataset, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> TrainingPairs:
    chosen = (config.train_limit, config.validation_fraction, config.max_length, config.truncation)
    digest = digest_of(VERSION, corpus.fingerprint, vocabulary_digest(tokenizer), *chosen)
    rows = train.map(
        partial(_tokenized, tokenizer=tokenizer, max_length=config.max_length, truncation=config.truncation),
        batched=True,
        remove_columns=train.column_names,
        features=IDS,
        cache_file_name=str(cache / f"pairs-{digest}.arrow"),
        new_fingerprint=digest,
    )
    empty, long = (rows.data.column(name).to_numpy() for name in ("empty", "long"))
    kept = np.flatnonzero(~empty & (~long | config.truncation))
    pairs = TrainingPairs(
        TokenizedPairs(rows.select(kept)),
        _lengths(rows, "source_ids")[kept],
        _lengths(rows, "target_ids")[kept],
        read=len(rows),
        empty=int(empty.sum()),
        too_long=int((long & ~empty).sum()),
        truncation=config.truncation,
    )
    if not len(kept):
        raise ValueError(
            f"Training needs at least one pair; the corpus ({corpus.origin}) has {pairs.described()}. "
            f"Fill the empty sides, or raise data.max_length = {config.max_length}."
        )
    return pairs


def _tokenized(
    rows: dict[str, list[str]], tokenizer: PreTrainedTokenizerFast, max_length: int, truncation: bool
) -> dict[str, list[Any]]:
    """Token ids of pairs, which pairs have an empty side, and which are longer than `max_length`."""
    ids = [encode(tokenizer, rows[side]) for side in ("source", "target")]
    if truncation:  # the first tokens and the end
        cut = [[row if len(row) <= max_length else [*row[: max_length - 1], row[-1]] for row in side] for side in ids]
    else:
        cut = ids
    return {
        "source_ids": cut[0],
        "target_ids": cut[1],
        "empty": [not (one.strip() and two.strip()) for one, two in zip(rows["source"], rows["target"], strict=True)],
        "long": [max(len(one), len(two)) > max_length for one, two in zip(*ids, strict=True)],
    }


def _lengths(rows: Dataset, column: str) -> Lengths:
    """Length of each row of a column of lists (N,), without reading its values."""
    return pc.list_value_length(rows.data.column(column)).to_numpy().astype(np.int64)
