"""The joint vocabulary of both languages: byte-level BPE, lossless on any text."""

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
"""Version of how tokenizers are trained. Raise it with any change, so that older cached ones are not used."""

_ROWS_AT_A_TIME = 10_000
_LONGEST_WORD = 10_000
_WORD_TOO_LONG = re.compile(rf"\S{{{_LONGEST_WORD}}}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE of at most `vocab_size` tokens, including two special ones and the 256 bytes.

    Any text can be encoded, and decoding restores it exactly: nothing is normalized, and no space is added or removed.
    Special tokens inside a text are treated as text.

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
    """Yield sources and targets of a split, with a few thousand in memory at a time.

    Texts with 10,000 characters without a space are left out: training time grows with the square of the longest word.
    """
    for rows in pairs.iter(_ROWS_AT_A_TIME):
        for text in (*rows["source"], *rows["target"]):
            if len(text) < _LONGEST_WORD or not _WORD_TOO_LONG.search(text):
                yield text


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer for Transformers from a tokenizer.json, or from a folder with one and perhaps its settings.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, lacks tokens for padding and sentence ends (`<pad>` and `</s>` in a file), or
            does not end sentences.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"tokenizer must be a tokenizer.json or a folder with one; {file} does not exist.")
    try:
        if path.is_dir() and (path / "tokenizer_config.json").exists():
            loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(path)  # type: ignore[assignment]
        else:
            backend = Tokenizer.from_file(str(file))
            # Transformers would silently add missing tokens, so pass only those that are in the file.
            pad, end = (token if backend.token_to_id(token) is not None else None for token in (PAD, END))
            loaded = PreTrainedTokenizerFast(
                tokenizer_object=backend,
                pad_token=pad,
                eos_token=end,
                split_special_tokens=True,  # treat "</s>" inside a text as text
                clean_up_tokenization_spaces=False,
            )
    except Exception as error:  # the tokenizers library raises bare Exception for a broken file
        raise ValueError(
            f"tokenizer must be a tokenizer.json of the tokenizers library, or a folder with one; {path} cannot be "
            f"read ({type(error).__name__}: {error})."
        ) from error
    ends = loaded("a")["input_ids"][-1:] == [loaded.eos_token_id]
    if loaded.pad_token_id in (None, loaded.eos_token_id) or loaded.eos_token_id is None or not ends:
        raise ValueError(
            f"tokenizer must end every sentence with one token and pad with another ({END} and {PAD} in a file without "
            f"settings); {path} has {loaded.eos_token!r}{'' if ends else ', which it does not append,'} and "
            f"{loaded.pad_token!r}. Leave data.tokenizer out to train one."
        )
    return loaded


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, including the sentence end; nothing is cut."""
    return [encoded.ids for encoded in _whole_texts(tokenizer).encode_batch_fast(list(texts))]


def encode_sources(tokenizer: PreTrainedTokenizerFast, lines: Sequence[str]) -> list[list[int]]:
    """Like `encode`, but a blank line has no token besides its end, since there is nothing to translate."""
    return encode(tokenizer, [line if line.strip() else "" for line in lines])


def vocabulary_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hex digest of everything that decides how texts are encoded."""
    backend = _whole_texts(tokenizer)
    state = f"{backend.encode_special_tokens} {backend.to_str()}"  # to_str omits the flag
    return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()


def _whole_texts(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """The backend, set to neither cut nor pad; the last call of the Transformers tokenizer may have set both."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend
