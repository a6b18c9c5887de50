"""Subcommands of `tasks/wmt14.py`: translate lines, score a file of translations, measure the curvature of a run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from dsgdac_accel.checks import check_integer
from dsgdac_accel.devices import default_device
from tasks.common.config import parse_config
from tasks.common.diagnostics import measure_run
from tasks.translation.config import DecodingConfig, LengthPenaltyKind, TextConfig, check_length_penalty
from tasks.translation.curvature import to_measure
from tasks.translation.data import open_text
from tasks.translation.decoding import translate
from tasks.translation.model import load_translator
from tasks.translation.scores import SCORES, translation_scores
from tasks.translation.sources import decode_line, read_lines
from tasks.translation.tokenizer import encode_sources


@dataclass(frozen=True, kw_only=True)
class TranslateConfig:
    """Settings of `translate`."""

    model: Path
    """Folder of a trained model, such as `deployed/` of a run."""

    beams: int | None = None
    """Hypotheses kept per sentence. null takes the number that was saved with the model."""

    length_penalty: float | None = None
    """Exponent in [-10, 10] of the length by which log-probabilities are divided to rank hypotheses. null takes the
    exponent that was saved with the model."""

    length_penalty_kind: LengthPenaltyKind | None = None
    """The divisor for a hypothesis of L tokens: power is L^length_penalty, gnmt is ((5 + L) / 6)^length_penalty. null
    takes the kind that was saved with the model."""

    extra_length: int = DecodingConfig.extra_length
    """How many tokens longer than its source a translation can be."""

    batch_tokens: int = DecodingConfig.batch_tokens
    """Padded source tokens per batch, times beams."""

    lines_at_once: int = 512
    """Lines to read before translating them; at a terminal every line is translated immediately."""

    def __post_init__(self) -> None:
        for name in ("extra_length", "batch_tokens", "lines_at_once"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.beams is not None:
            check_integer("beams", self.beams, minimum=1, advice="Use 1 for greedy search.")
        if self.length_penalty is not None:
            check_length_penalty(self.length_penalty)


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """Settings of `score`."""

    hypotheses: Path
    """Text file of translations, one sentence per line."""

    references: Path | None = None
    """Text file of references, one sentence per line; null takes those of `data`."""

    data: TextConfig = field(default_factory=TextConfig)
    """Corpus with the references."""

    split: str = "test"
    """Split of the corpus."""


def translate_stdin(arguments: Sequence[str]) -> None:
    """Translate standard input to standard output, line by line. An empty line stays empty."""
    config = parse_config(TranslateConfig, arguments, prog="wmt14.py translate", description=translate_stdin.__doc__)
    model, tokenizer, decoding = load_translator(config.model)
    names = ("beams", "length_penalty", "length_penalty_kind")
    chosen: dict[str, Any] = {name: value for name in names if (value := getattr(config, name)) is not None}
    decoding = replace(decoding, extra_length=config.extra_length, batch_tokens=config.batch_tokens, **chosen)
    nn.Module.to(model, default_device())
    numbered = enumerate(sys.stdin.buffer, start=1)
    at_once = 1 if sys.stdin.isatty() else config.lines_at_once
    while chunk := list(itertools.islice(numbered, at_once)):
        lines = [decode_line(line, "standard input", number) for number, line in chunk]
        found = translate(model, tokenizer, encode_sources(tokenizer, lines), decoding)
        sys.stdout.buffer.write("".join(f"{text}\n" for text in found.texts).encode())
        sys.stdout.buffer.flush()
        if found.at_limit:
            print(found.warning(), file=sys.stderr)


def score_file(arguments: Sequence[str]) -> None:
    """Score a file of translations as the sacrebleu command line does, and by the tokenized BLEU of two papers."""
    config = parse_config(ScoreConfig, arguments, prog="wmt14.py score", description=score_file.__doc__)
    hypotheses = _lines("hypotheses", config.hypotheses)
    references = _lines("references", config.references) if config.references else _references(config)
    if len(hypotheses) != len(references):
        raise ValueError(
            f"every hypothesis needs a reference on the same line; {config.hypotheses} has {len(hypotheses)} lines and "
            f"{config.references or f'split {config.split!r} of the data'} {len(references)}. Align the two."
        )
    scores = translation_scores(hypotheses, references, config.data.target_language or config.data.target)
    for name in SCORES:
        print(f"{name:14} {scores[name]:.4f}  {scores[f'{name}_signature']}")


def _lines(key: str, file: Path) -> list[str]:
    if not file.is_file():
        raise FileNotFoundError(f"{key} must be a text file with one sentence per line; {file} is no file.")
    return list(read_lines(file))


def _references(config: ScoreConfig) -> list[str]:
    corpus = open_text(config.data)
    if config.split not in corpus.splits:
        raise ValueError(f"split must be one of {', '.join(corpus.splits)} of {corpus.origin}; got {config.split!r}.")
    return list(corpus.splits[config.split]["target"])


def measure_curvature_of_run(arguments: Sequence[str]) -> None:
    """Measure the curvature of a run of this task."""
    measure_run(arguments, to_measure, "wmt14.py curvature")


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "translate": translate_stdin,
    "score": score_file,
    "curvature": measure_curvature_of_run,
}
"""Subcommands of `tasks/wmt14.py` by their first argument."""
