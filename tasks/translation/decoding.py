"""Greedy and beam search, with results that do not depend on batches, padding or the number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, MarianMTModel, PreTrainedTokenizerFast

from dsgdac_accel import WorkerGroup
from tasks.translation.batches import pad_rows
from tasks.translation.config import DecodingConfig
from tasks.translation.model import allow_positions
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
    model: MarianMTModel,
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
    model: MarianMTModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[int],
    source_ids: Sequence[Sequence[int]],
    decoding: DecodingConfig,
) -> list[tuple[int, str, bool]]:
    limits = torch.tensor([len(ids) + decoding.extra_length for ids in source_ids], device="cpu")
    allow_positions(model, int(limits.max()) + 1)
    device = next(model.parameters()).device
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    mask = pad_rows([[1] * len(ids) for ids in source_ids], 0)
    output = model.generate(
        input_ids=pad_rows(source_ids, pad).to(device),
        attention_mask=mask.to(device),
        generation_config=GenerationConfig(
            num_beams=decoding.beams,
            length_penalty=decoding.length_penalty if decoding.beams > 1 else None,
            do_sample=False,
            max_new_tokens=int(limits.max()),
            pad_token_id=pad,
            eos_token_id=end,
            decoder_start_token_id=model.config.decoder_start_token_id,
            suppress_tokens=[pad],
        ),
        logits_processor=LogitsProcessorList([_EndAtLimit(limits.to(device), end)]),
    )[:, 1:]
    lengths = (output == end).int().argmax(1).cpu() + 1
    texts = [one_line(text) for text in decode_ids(tokenizer, output)]
    return list(zip(rows, texts, (lengths >= limits).tolist(), strict=True))


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


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Undo the autocast that Accelerate wrapped around the model's forward, inside the context.

    bf16 rounds differently in batches of other shapes, which may change the result of a search.
    """
    wrapped = vars(model).pop("forward", None)
    try:
        yield
    finally:
        if wrapped is not None:
            model.forward = wrapped
