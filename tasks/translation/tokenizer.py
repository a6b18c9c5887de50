"""The joint vocabulary: byte-level BPE over both languages, lossless on any text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

PAD, END = "<pad>", "</s>"
VERSION = 1
"""Of the way tokenizers are trained; a change makes cached ones of the old way unused."""

_ROWS_AT_A_TIME = 10_000
_LONGEST_WORD = 10_000
_WORD_TOO_LONG = re.compile(rf"\S{{{_LONGEST_WORD}}}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE of at most `vocab_size` tokens, two special ones and the 256 bytes among them.

    Every text is a sequence of bytes, so nothing is unknown, and decoding gives back exactly what was encoded:
    no normalisation, no space added or taken. Special tokens are never read out of a text.

    >>> tokenizer = train_tokenizer(["low lower lowest"], vocab_size=264)
    >>> encoded = tokenizer.encode("slow </s> 🐌")
    >>> encoded.tokens[-1], tokenizer.decode(encoded.ids)
    ('</s>', 'slow </s> 🐌')
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    tokenizer.encode_special_tokens = True
    return tokenizer


def texts_of(pairs: Dataset) -> Iterator[str]:
    """Sources and targets of a split, a few thousand in memory at a time.

    Those with 10,000 characters without a space are left out: no language writes so, and training takes time with the
    square of the longest word.
    """
    for rows in pairs.iter(_ROWS_AT_A_TIME):
        for text in (*rows["source"], *rows["target"]):
            if len(text) < _LONGEST_WORD or not _WORD_TOO_LONG.search(text):
                yield text


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """A tokenizer for Transformers, from a tokenizer.json or from a folder with one.

    A folder that Transformers saved is read with its settings.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot serve: it lacks the tokens `<pad>` and `</s>`, or does not end sentences with `</s>`.
    """
    if path.is_dir() and not (path / "tokenizer_config.json").exists():
        path = path / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"tokenizer must be a tokenizer.json or a folder with one; {path} does not exist.")
    try:
        if path.is_dir():
            loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(path)  # type: ignore[assignment]
        else:
            loaded = _from_file(path)
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        raise ValueError(
            f"tokenizer must be a tokenizer.json of the tokenizers library, or a folder with one; {path} cannot be "
            f"read as such ({type(error).__name__}: {error})."
        ) from error
    _check(loaded, path)
    return loaded


def _from_file(path: Path) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_file(str(path))
    # Transformers would add a token that is not there, and nothing would say that the file is of another kind.
    pad, end = (token if backend.token_to_id(token) is not None else None for token in (PAD, END))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        eos_token=end,
        split_special_tokens=True,  # "</s>" in a text is text
        clean_up_tokenization_spaces=False,
    )


def _check(tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"tokenizer must be one of the tokenizers library; {path} holds a {type(tokenizer).__name__}. "
            f"Leave `tokenizer` out to train one."
        )
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    if pad is None or end is None or max(pad, end) >= len(tokenizer) or pad == end:
        raise ValueError(
            f"the tokenizer needs different tokens for padding and sentence ends, {PAD} and {END} in a file alone; "
            f"{path} has {tokenizer.pad_token!r} and {tokenizer.eos_token!r}. Leave `tokenizer` out to train one."
        )
    if tokenizer("a")["input_ids"][-1:] != [end]:
        raise ValueError(
            f"the tokenizer must end every sentence with {tokenizer.eos_token}; {path} does not. Give it a "
            f"post-processor that does, or leave `tokenizer` out to train one."
        )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, its end included; nothing is cut."""
    return [encoded.ids for encoded in _whole_texts(tokenizer).encode_batch_fast(list(texts))]


def encode_sources(tokenizer: PreTrainedTokenizerFast, lines: Sequence[str]) -> list[list[int]]:
    """As `encode`, but a line of nothing but space has no token beside its end: there is nothing to translate."""
    return encode(tokenizer, [line if line.strip() else "" for line in lines])


def vocabulary_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Changes with anything that changes how texts are encoded."""
    backend = _whole_texts(tokenizer)
    state = f"{backend.encode_special_tokens} {backend.to_str()}"  # to_str leaves the flag out
    return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()


def _whole_texts(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """The tokenizer below, neither cutting nor padding: both stay set from the last call of the one above."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend
