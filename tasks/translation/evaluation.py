"""Evaluates a translation model: loss and perplexity over real tokens, translations and their scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from dsgdac_accel import WorkerGroup
from tasks.common.precision import full_precision
from tasks.translation.batches import Collate
from tasks.translation.config import DecodingConfig
from tasks.translation.data import EvaluationPairs
from tasks.translation.decoding import Translations, length_batches, translate
from tasks.translation.loss import losses_and_tokens
from tasks.translation.model import Translator, allow_positions, decoder_start
from tasks.translation.scores import one_line, translation_scores


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model in eval mode. Each sentence is computed by one worker, and all workers get the results.

    Batches and results are the same for any number of workers. All methods are collective.
    """

    tokenizer: PreTrainedTokenizerFast
    group: WorkerGroup
    decoding: DecodingConfig
    smoothing: float
    """Label smoothing of the loss."""
    target_language: str
    """Code of the language of the translations, for `translation_scores`."""

    def losses(self, model: Translator, source_ids: Sequence[Sequence[int]], target_ids: Sequence[Any]) -> dict:
        """Mean over real tokens of the smoothed training loss ("loss") and of the references' "nll"; "perplexity"."""
        sizes = [max(len(source), len(target)) for source, target in zip(source_ids, target_ids, strict=True)]
        allow_positions(model, max(sizes))
        collate = Collate(self.tokenizer.pad_token_id, decoder_start(model))
        device = next(model.parameters()).device
        batches = length_batches(sizes, self.decoding.batch_tokens)
        mine = []
        with torch.no_grad(), full_precision(model):
            for number in range(self.group.rank, len(batches), self.group.size):
                rows = batches[number]
                batch = collate(
                    {"source_ids": [source_ids[r] for r in rows], "target_ids": [target_ids[r] for r in rows]}
                )
                batch = {name: tensor.to(device) for name, tensor in batch.items()}
                labels = batch.pop("labels")
                mine.append((number, losses_and_tokens(model(**batch).logits, labels, self.smoothing)))
        shares = self.group.all_gather_object(mine, "evaluating the loss")
        # Summed in the order of the batches, which is the same for any number of workers.
        sums = [sums for _, sums in sorted(part for share in shares for part in share)]
        smoothed, plain, tokens = (math.fsum(values) for values in zip(*sums, strict=True))
        return {"loss": smoothed / tokens, "nll": plain / tokens, "perplexity": math.exp(min(plain / tokens, 700.0))}

    def translations(self, model: Translator, pairs: EvaluationPairs, greedy: bool = False) -> Translations:
        """Translate all sources, in order."""
        decoding = replace(self.decoding, beams=1) if greedy else self.decoding
        return translate(model, self.tokenizer, pairs.source_ids, decoding, self.group)

    def scores(self, hypotheses: Sequence[str], pairs: EvaluationPairs) -> dict[str, Any]:
        """Corpus scores with their signatures; worker 0 computes them for all."""
        mine: dict[str, Any] | None = None
        if self.group.rank == 0:
            mine = translation_scores(hypotheses, pairs.references, self.target_language)
        scores = self.group.all_gather_object(mine, "scoring translations")[0]
        assert scores is not None
        return scores


def write_translations(folder: Path, pairs: EvaluationPairs, hypotheses: Sequence[str]) -> None:
    """Write sources, references and hypotheses to three text files with one sentence per line."""
    for kind, texts in (("sources", pairs.sources), ("references", pairs.references), ("hypotheses", hypotheses)):
        lines = "".join(f"{one_line(text)}\n" for text in texts)
        (folder / f"{pairs.name}.{kind}.txt").write_text(lines, encoding="utf-8", newline="\n")
