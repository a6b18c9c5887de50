"""Greedy and beam search, with results that do not depend on batches, padding or the number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from dsgdac_accel import WorkerGroup
from tasks.common.precision import full_precision
from tasks.translation.batches import pad_rows
from tasks.translation.config import DecodingConfig
from tasks.translation.model import Translator, allow_positions
from tasks.translation.scores import decode_ids, one_line


@dataclass(frozen=True)
class Translations:
    """Hypotheses in the order of their sources, each on one line."""

    texts: list[str]
    at_limit: int
    """Number of hypotheses with as many tokens as `extra_length` allows, which may be cut off."""

    def warning(self) -> str:
        """A sentence that says how many hypotheses may be cut off."""
        return (
            f"{self.at_limit} of {len(self.texts)} translations are as long as decoding.extra_length allows and may "
            f"be cut off."
        )


@torch.no_grad()
def translate(
    model: Translator,
    tokenizer: PreTrainedTokenizerFast,
    source_ids: Sequence[Sequence[int]],
    decoding: DecodingConfig,
    group: WorkerGroup | None = None,
) -> Translations:
    """Translate token ids. Workers share the batches, and all get all hypotheses. Collective if `group` is given.

    A batch has sentences of similar length; batches are the same for any number of workers. The length of a hypothesis
    is limited by its own source, to source length plus `extra_length`. A source without tokens besides its end becomes
    an empty line.

    Args:
        model: translator in eval mode.
        tokenizer: its tokenizer.
        source_ids: token ids of each source, its end included.
        decoding: how to search.
        group: the workers; None for one process alone.
    """
    batches = length_batches([len(ids) * decoding.beams for ids in source_ids], decoding.batch_tokens)
    full = [[row for row in batch if len(source_ids[row]) > 1] for batch in batches]
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    mine: list[tuple[int, str, bool]] = []
    with full_precision(model):
        for batch in full[rank::size]:
            if batch:
                mine += _translate_batch(model, tokenizer, batch, [source_ids[row] for row in batch], decoding)
    shares = [mine] if group is None else group.all_gather_object(mine, "collecting translations")
    found = {row: (text, limited) for share in shares for row, text, limited in share}
    assert len(found) == sum(map(len, full)) == sum(map(len, shares)), "a sentence was lost or translated twice"
    texts = [found[row][0] if row in found else "" for row in range(len(source_ids))]
    return Translations(texts, sum(limited for _, limited in found.values()))


def length_batches(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Group rows of similar size, largest first, so that rows times the largest size stays within the budget.

    A row larger than the budget gets a batch of its own.

    >>> length_batches([5, 1, 2, 9], budget=6)
    [[3], [0], [2, 1]]
    """
    order = sorted(range(len(sizes)), key=lambda row: -sizes[row])
    batches: list[list[int]] = []
    for row in order:
        if not batches or (len(batches[-1]) + 1) * sizes[batches[-1][0]] > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def _translate_batch(
    model: Translator,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[int],
    source_ids: Sequence[Sequence[int]],
    decoding: DecodingConfig,
) -> list[tuple[int, str, bool]]:
    limits = torch.tensor([len(ids) + decoding.extra_length for ids in source_ids])
    allow_positions(model, int(limits.max()) + 1)
    device = next(model.parameters()).device
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    mask = pad_rows([[1] * len(ids) for ids in source_ids], 0)
    penalty = None if decoding.beams == 1 else _length_penalty(decoding)
    output = model.generate(
        input_ids=pad_rows(source_ids, pad).to(device),
        attention_mask=mask.to(device),
        generation_config=GenerationConfig(
            num_beams=decoding.beams,
            length_penalty=penalty,
            do_sample=False,
            max_new_tokens=int(limits.max()),
            pad_token_id=pad,
            eos_token_id=end,
            decoder_start_token_id=model.config.decoder_start_token_id,
            suppress_tokens=[pad],
        ),
        logits_processor=LogitsProcessorList([_EndAtLimit(limits.to(device), end)]),
    )[:, 1:]
    if isinstance(penalty, GnmtLengthPenalty):
        penalty.require_used()
    lengths = (output == end).int().argmax(1).cpu() + 1
    texts = [one_line(text) for text in decode_ids(tokenizer, output)]
    return list(zip(rows, texts, (lengths >= limits).tolist(), strict=True))


def _length_penalty(decoding: DecodingConfig) -> float:
    if decoding.length_penalty_kind == "gnmt":
        return GnmtLengthPenalty(decoding.length_penalty)
    return decoding.length_penalty


class GnmtLengthPenalty(float):
    """Exponent a for which `L ** a` is ((5 + L) / 6)^a (Wu et al. 2016, arXiv 1609.08144, equation 14).

    The beam search of Transformers computes `L ** length_penalty` wherever it uses the length L of a hypothesis.

    >>> 7 ** GnmtLengthPenalty(2), 7 ** 2.0
    (4.0, 49.0)
    """

    used = False

    def __rpow__(self, length: Any, modulus: None = None) -> Any:
        self.used = True
        return ((5 + length) / 6) ** float(self)

    def __deepcopy__(self, memo: dict) -> GnmtLengthPenalty:
        return self  # `generate` copies its settings

    def require_used(self) -> None:
        """Raise RuntimeError unless a search has used the penalty: another version may compute it differently."""
        if not self.used:
            raise RuntimeError(
                f"decoding.length_penalty_kind: gnmt does not reach the search of Transformers "
                f"{transformers.__version__}. Use power."
            )


class _EndAtLimit(LogitsProcessor):
    """Makes each sentence end at its own limit of generated tokens, whatever else is in its batch."""

    def __init__(self, limits: Tensor, end: int) -> None:
        self.limits = limits
        self.end = end

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        beams = len(scores) // len(self.limits)
        last = input_ids.shape[1] >= self.limits.repeat_interleave(beams)  # input_ids has the start token, too
        if not bool(last.any()):
            return scores
        ending = torch.full_like(scores, -torch.inf)
        ending[:, self.end] = scores[:, self.end]
        return torch.where(last[:, None], ending, scores)
