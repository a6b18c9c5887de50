"""Corpus scores of translations: sacreBLEU's BLEU and chrF2, and the tokenized BLEU of two papers."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF
from transformers import PreTrainedTokenizerFast

from tasks.translation.tokenized_bleu import paper_bleu, tokenized_bleu

SCORES = ("bleu", "chrf", "bleu_tokenized", "bleu_paper")
"""Names of the scores. Each has a signature of the name with `_signature` behind it."""

_LINE_BREAK = re.compile(r"\r\n|\n|\r")
_TOKENIZED_END = re.compile(r""" [.!?](?: (?:["'”“»]|&quot;|&apos;))?$""")


def translation_scores(hypotheses: Sequence[str], references: Sequence[str], language: str = "de") -> dict[str, Any]:
    """Score a corpus from 0 to 100 by sacreBLEU's defaults, equal to its command line, and by tokenized BLEU.

    A line break inside a text counts as a space, so scores equal those of files with one sentence per line.

    Args:
        hypotheses: translations as plain text, not tokenized; "" for a missing one.
        references: one for each, in the same order.
        language: two- or three-letter code of the target language for the Moses tokenizer.

    Returns:
        "bleu" and "chrf" (Post 2018; BLEU by tokenizer 13a, which is useless for text without spaces),
        "bleu_tokenized" (see `tokenized_bleu`) and "bleu_paper" (see `paper_bleu`), their signatures, and the number of
        "sentences". The BLEU scores are not comparable with each other.

    Raises ValueError for no sentences, counts that differ, anything but texts, and another kind of `language`.

    >>> scores = translation_scores(["The old mill was sold again."], ["The old mill was sold last year."], "en")
    >>> round(scores["bleu"], 2), scores["bleu_signature"]  # doctest: +ELLIPSIS
    (55.78, 'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...')
    """
    check_language(language)
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(
            f"Scores need at least one hypothesis, and one reference for each; got {len(hypotheses)} hypotheses and "
            f"{len(references)} references. Pass them in the same order."
        )
    for text in (*hypotheses, *references):
        if not isinstance(text, str):
            raise ValueError(
                f"Hypotheses and references must be texts; got {type(text).__name__}. Decode or unpack it."
            )
    hypotheses, references = list(map(one_line, hypotheses)), list(map(one_line, references))
    if _looks_tokenized(hypotheses) and not _looks_tokenized(references):
        warnings.warn(
            "Most hypotheses end in a space and a period or the like, unlike the references: they look tokenized, "
            "which makes the scores too low and not comparable. Detokenize them.",
            stacklevel=2,
        )
    scores: dict[str, Any] = {}
    # `force` only silences sacreBLEU's own warning about tokenized text, which needs 100 of them.
    for name, metric in (("bleu", BLEU(force=True)), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(hypotheses, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())  # known only after scoring
    for name, compute in (("bleu_tokenized", tokenized_bleu), ("bleu_paper", paper_bleu)):
        scores[name], scores[f"{name}_signature"] = compute(hypotheses, references, language)
    return scores | {"sentences": len(hypotheses)}


class TranslationScores(evaluate.Metric):
    """`translation_scores` as a metric of the Evaluate library, which needs no network and writes no file.

    >>> metric = TranslationScores("en")
    >>> metric.add(prediction="The old mill was sold again.", reference="The old mill was sold last year.")
    >>> round(metric.compute()["bleu"], 2)
    55.78

    Args:
        language: as of `translation_scores`.
        **options: of `evaluate.Metric`.
    """

    def __init__(self, language: str = "de", **options: Any) -> None:
        check_language(language)
        self.language = language
        super().__init__(keep_in_memory=True, **options)

    def _info(self) -> evaluate.MetricInfo:
        texts = datasets.Value("string")
        return evaluate.MetricInfo(
            description="BLEU and chrF2 of sacreBLEU and tokenized BLEU, each with its signature.",
            citation="Post (2018), A Call for Clarity in Reporting BLEU Scores, https://aclanthology.org/W18-6319",
            features=datasets.Features({"predictions": texts, "references": texts}),
        )

    def _build_data_dir(self) -> str:
        return ""  # nothing is written, and the home folder may be read-only

    def _compute(self, *, predictions: list[str], references: list[str]) -> dict[str, Any]:
        return translation_scores(predictions, references, self.language)


def check_language(language: str) -> None:
    """Raise ValueError unless this is the code of a language."""
    if not re.fullmatch("[a-z]{2,3}", language):
        raise ValueError(
            f"data.target_language must be a code of two or three lowercase letters, such as 'de'; got {language!r}."
        )


def one_line(text: str) -> str:
    r"""Replace each line break (`\r\n`, `\n` or `\r`) by one space; everything else stays, including U+2028.

    >>> one_line("one\r\ntwo\n\nthree\u2028four")
    'one two  three\u2028four'
    """
    return _LINE_BREAK.sub(" ", text)


def _looks_tokenized(texts: Sequence[str]) -> bool:
    written = [text.strip() for text in texts if text.strip()]
    return 2 * sum(_TOKENIZED_END.search(text) is not None for text in written) > len(written)


def decode_ids(tokenizer: PreTrainedTokenizerFast, ids: Any) -> list[str]:
    """Decode token ids (B, T), an array, a tensor or lists, without special tokens and -100, the label of padding."""
    kept = [[token for token in map(operator.index, row) if token >= 0] for row in ids]
    return tokenizer.batch_decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def compute_metrics(tokenizer: PreTrainedTokenizerFast, language: str = "de") -> Callable[[Any], dict[str, float]]:
    """Make the `compute_metrics` of Transformers' Seq2SeqTrainer: a function that returns the `SCORES`.

    The function raises ValueError for logits in place of generated ids.
    """
    metric = TranslationScores(language)

    def scores_of(evaluated: Any) -> dict[str, float]:
        predictions, labels = evaluated[0], evaluated[1]
        if isinstance(predictions, tuple) or getattr(predictions, "ndim", 2) == 3:
            raise ValueError(
                "Scores need generated token ids (B, T); got the model's logits. Set predict_with_generate=True in "
                "Seq2SeqTrainingArguments."
            )
        texts = {"predictions": decode_ids(tokenizer, predictions), "references": decode_ids(tokenizer, labels)}
        scores = metric.compute(**texts)
        return {name: scores[name] for name in SCORES}

    return scores_of
