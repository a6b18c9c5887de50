"""English texts that are installed with Python and NumPy, cut into sequences of tokens."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<end>"
"""Token between two sections."""


def sections(text: str) -> list[str]:
    """Return the sections of a text, in a fixed order.

    Args:
        text: `python`, the topics of the language reference that `help()` shows, or `numpy`, the docstrings of NumPy's
            modules, classes and functions.
    """
    return [topics[name] for name in sorted(topics)] if text == "python" else sorted(set(_docstrings()))


def split(found: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Return the training sections, and a tenth that is held out, drawn by the seed.

    >>> [len(part) for part in split([str(number) for number in range(40)], seed=0)]
    [36, 4]
    """
    drawn = random.Random(seed).sample(list(found), len(found))
    held_out = len(found) // 10
    return drawn[held_out:], drawn[:held_out]


def train_tokenizer(texts: Sequence[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Return a tokenizer of byte pairs."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token=END, pad_token=END)


def sequences(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, block_size: int) -> Dataset:
    """Join all texts and cut them into sequences of `block_size` tokens; what is left over is dropped."""
    ids = [token for text in texts for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    rows = np.array(ids[: len(ids) // block_size * block_size]).reshape(-1, block_size)
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def _docstrings() -> Iterator[str]:
    for file in Path(np.__file__).parent.rglob("*.py"):
        if "tests" not in file.parts:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    yield ast.get_docstring(node) or ""
