"""Corpus scores of translations: sacreBLEU's BLEU and chrF2, and the tokenized BLEU of two papers."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from importlib.metadata import version
from typing import Any

import datasets
import evaluate
import numpy as np
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from transformers import PreTrainedTokenizerFast

from tasks.translation.batches import IGNORED

SCORES = ("bleu", "chrf", "bleu_tokenized", "bleu_paper")
"""Names of the scores. Each has a signature of the name with `_signature` behind it."""

_LINE_BREAK = re.compile(r"\r\n|\n|\r")
_HYPHEN = re.compile(rb"(\S)-(\S)")
_TOKENIZED_END = re.compile(r""" [.!?](?: (?:["'”“»]|&quot;|&apos;))?$""")

_DESCRIPTION = """
Corpus scores of translations: BLEU (Papineni et al. 2002) on plain text as sacreBLEU defines it (Post 2018), chrF2
(Popović 2015), the tokenized, compound-split BLEU of Vaswani et al. (2017), and the tokenized BLEU of arXiv:2602.02899,
each with its signature.
"""
_CITATION = "Post (2018), A Call for Clarity in Reporting BLEU Scores, https://aclanthology.org/W18-6319"
_INPUTS = """
Args:
    predictions (list of str): translations as plain text, not tokenized; "" for a missing one.
    references (list of str, or list of lists of str): one or more references per sentence, the same number for all.
"""


class TranslationScores(evaluate.Metric):
    """Corpus scores from 0 to 100, as a metric of the Evaluate library that needs no network.

    `compute` returns

    - "bleu", "chrf": BLEU and chrF2 on plain text with sacreBLEU's defaults, and "bleu_signature", "chrf_signature".
      BLEU splits words with tokenizer 13a for every language, which is useless for text without spaces;
    - "bleu_tokenized", "bleu_tokenized_signature": see `tokenized_bleu`. Comparable with papers that report this
      variant, but not with "bleu";
    - "bleu_paper", "bleu_paper_signature": see `paper_bleu`. Comparable with arXiv:2602.02899 only;
    - "sentences": the number of sentences.

    A line break inside a text counts as a space, so scores equal those of files with one sentence per line.

    In one process, everything stays in memory and no file is written. Evaluate's distributed mode works as Evaluate
    documents it: every process passes `num_process`, its `process_id` and an `experiment_id`, and adds its share, which
    may be empty; process 0 gets the scores of all, the others get None. Use each `experiment_id` once: the other
    processes return before process 0 has read their shares, and would overwrite them.

    >>> scores = TranslationScores(target_language="en").compute(
    ...     predictions=["The old mill was sold again."], references=["The old mill was sold last year."]
    ... )
    >>> round(scores["bleu"], 2), scores["bleu_signature"]  # doctest: +ELLIPSIS
    (55.78, 'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...')

    Args:
        target_language: code of two or three letters for the Moses tokenizer, which treats unknown ones like English.
        keep_in_memory: None keeps everything in memory if there is one process.

    Raises ValueError for another `target_language`.
    """

    def __init__(
        self,
        target_language: str = "de",
        *,
        keep_in_memory: bool | None = None,
        num_process: int = 1,
        **options: Any,
    ) -> None:
        self.target_language = _checked_language(target_language)
        if keep_in_memory is None:
            keep_in_memory = num_process == 1
        super().__init__(keep_in_memory=keep_in_memory, num_process=num_process, **options)

    def _info(self) -> evaluate.MetricInfo:
        texts = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": texts, "references": datasets.Sequence(texts)}),
            reference_urls=["https://github.com/mjpost/sacrebleu", "https://arxiv.org/abs/1706.03762"],
        )

    def _build_data_dir(self) -> str:
        # Evaluate would create a cache folder that is not needed, and fail if the home folder is read-only.
        return "" if self.keep_in_memory else super()._build_data_dir()

    # Arrow accepts much wrong input, so check it in `add_batch`, through which all input passes. Evaluate appends to
    # these docstrings, so each method needs one.

    def add(self, *, prediction: Any = None, reference: Any = None) -> None:
        """Add one sentence with its reference or list of references."""
        self.add_batch(predictions=[prediction], references=[reference])

    def add_batch(self, *, predictions: Any = None, references: Any = None) -> None:
        """Add sentences. Raises ValueError for what `paired_texts` refuses."""
        # A process without sentences still has to take part.
        hypotheses, rows = paired_texts(predictions, references, allow_none=self.num_process > 1)
        super().add_batch(predictions=hypotheses, references=rows)

    def compute(self, *, predictions: Any = None, references: Any = None) -> Any:
        """Score these sentences and those added before. Returns a dict in process 0, None in the others.

        Raises ValueError without sentences, and for what `paired_texts` refuses.
        """
        if predictions is None and references is None and self.writer is None:
            raise ValueError(
                "Scores need at least one sentence; got none. Pass predictions and references, or add them."
            )
        return super().compute(predictions=predictions, references=references)

    def _compute(self, *, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        if not predictions:
            raise ValueError("Scores need at least one sentence; no process added any. Check the data set.")
        _check_same_number(references)
        streams = [list(stream) for stream in zip(*references, strict=True)]
        _warn_if_tokenized(predictions, streams)
        return {
            **plain_scores(predictions, streams),
            **tokenized_bleu(predictions, streams, self.target_language),
            **paper_bleu(predictions, streams, self.target_language),
            "sentences": len(predictions),
        }


def plain_scores(hypotheses: Sequence[str], streams: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The scores "bleu" and "chrf" with their signatures, by sacreBLEU's defaults and equal to its command line.

    Args:
        hypotheses: translations.
        streams: each has one reference per sentence, in the order of the hypotheses.
    """
    # `force` only silences sacreBLEU's warning about tokenized text, which `_warn_if_tokenized` replaces.
    bleu, chrf = BLEU(force=True), CHRF()
    scores: dict[str, Any] = {
        "bleu": bleu.corpus_score(hypotheses, streams).score,
        "chrf": chrf.corpus_score(hypotheses, streams).score,
    }
    # Signatures include the number of references, which is known only after scoring.
    return scores | {"bleu_signature": str(bleu.get_signature()), "chrf_signature": str(chrf.get_signature())}


def tokenized_bleu(hypotheses: Sequence[str], streams: Sequence[Sequence[str]], language: str) -> dict[str, Any]:
    """The score "bleu_tokenized" and its signature: BLEU as in Vaswani et al. (2017), case-sensitive, not smoothed.

    Hypotheses and references are tokenized by `moses_tokens`. n-grams up to 4 are counted over all sentences as by
    multi-bleu.perl, with the closest reference length, or the shorter of two equally close ones. The score is 0 if
    some n-gram order has no match.
    """
    # This tokenizer only splits at spaces; `force` allows tokenized input.
    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    tokens = functools.partial(moses_tokens, language=language)
    score = bleu.corpus_score(list(map(tokens, hypotheses)), [list(map(tokens, stream)) for stream in streams]).score
    signature = (
        f"nrefs:{len(streams)}|case:mixed|punctuation:replace-unicode|tok:moses-{language}-before-9fc964da7"
        f"|compounds:split|smooth:none|sacremoses:{version('sacremoses')}|sacrebleu:{version('sacrebleu')}"
    )
    return {"bleu_tokenized": score, "bleu_tokenized_signature": signature}


def paper_bleu(hypotheses: Sequence[str], streams: Sequence[Sequence[str]], language: str) -> dict[str, Any]:
    """The score "bleu_paper" and its signature: `evaluate.load("bleu")` on Moses-tokenized text, times 100.

    It is the BLEU of arXiv:2602.02899, by its authors' code. That metric tokenizes once more, by 13a, and n-grams up to
    4 are counted over all sentences, case-sensitive and not smoothed. Among several references the shortest gives the
    reference length.
    """
    tokens = functools.partial(paper_tokens, language=language)
    tokenized, references = list(map(tokens, hypotheses)), [list(map(tokens, stream)) for stream in streams]
    counted = BLEU(tokenize="none", smooth_method="none", force=True).corpus_score(tokenized, references)
    lengths = ([len(text.split()) for text in stream] for stream in references)
    shortest = sum(map(min, zip(*lengths, strict=True)))
    score = BLEU.compute_bleu(counted.counts, counted.totals, counted.sys_len, shortest, smooth_method="none").score
    signature = (
        f"nrefs:{len(streams)}|case:mixed|punctuation:replace-unicode|tok:moses-{language}-a+13a|smooth:none"
        f"|length:shortest|sacremoses:{version('sacremoses')}|sacrebleu:{version('sacrebleu')}"
    )
    return {"bleu_paper": score, "bleu_paper_signature": signature}


def paper_tokens(text: str, language: str = "de") -> str:
    """Tokenize for `paper_bleu`, with spaces between the tokens: Moses' tokenizer.perl -a, then 13a.

    Unicode punctuation becomes ASCII first. The second tokenizer splits what the first one marks, and every final dot,
    so the version of tokenizer.perl (see `moses_tokens`) does not matter.

    >>> paper_tokens("Der E-Mail-Dienst der „Post“ ruht's, z. B. heute…")
    'Der E @ - @ Mail @ - @ Dienst der „ Post " ruht & apos ; s , z . B . heute . . .'
    """
    normalizer, tokenizer = _moses(language)
    plain = normalizer.replace_unicode_punct(text)
    return _tokenizer_13a()(tokenizer.tokenize(plain, aggressive_dash_splits=True, escape=True, return_str=True))


@functools.cache
def _tokenizer_13a() -> Tokenizer13a:
    return Tokenizer13a()


def moses_tokens(text: str, language: str = "de") -> str:
    """Tokenize as tensor2tensor's get_ende_bleu.sh did in 2017, with spaces between the tokens.

    Unicode punctuation becomes ASCII (replace-unicode-punctuation.perl), Moses' tokenizer.perl splits and escapes, and
    words with hyphens are split: s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g.

    The tokenizer.perl is that of the published scores, before mosesdecoder's commit 9fc964da7 (November 2018), as
    sacremoses ports it: the dot of an abbreviation stays at the end of a sentence, too ("Heute usw."). Since then the
    script splits every final dot.

    >>> moses_tokens("Der E-Mail-Dienst der „Post“ ruht, z. B. heute…")
    'Der E ##AT##-##AT## Mail ##AT##-##AT## Dienst der „ Post &quot; ruht , z. B. heute ...'
    """
    normalizer, tokenizer = _moses(language)
    # Escaping follows the script. It renames tokens, so no count changes.
    tokens = tokenizer.tokenize(normalizer.replace_unicode_punct(text), escape=True, return_str=True)
    # The script matches bytes. Matches do not overlap: in "a-b-c" the first match consumes "b", so the second hyphen
    # stays; in "vis-à-vis" it consumes only the first of the two bytes of "à", so both hyphens are split.
    return _HYPHEN.sub(rb"\1 ##AT##-##AT## \2", tokens.encode()).decode()


@functools.cache
def _moses(language: str) -> tuple[MosesPunctNormalizer, MosesTokenizer]:
    return MosesPunctNormalizer(language), MosesTokenizer(language)


def one_line(text: str) -> str:
    r"""Replace each line break (`\r\n`, `\n` or `\r`) by one space; everything else stays, including U+2028.

    >>> one_line("one\r\ntwo\n\nthree\u2028four")
    'one two  three\u2028four'
    """
    return _LINE_BREAK.sub(" ", text)


def paired_texts(predictions: Any, references: Any, *, allow_none: bool = False) -> tuple[list[str], list[list[str]]]:
    """Check a corpus. Returns the hypotheses and, for each, the list of its references, every text on one line.

    Args:
        predictions: list of texts.
        references: for each prediction a text or a list of texts. Streams, each with a reference of all sentences, are
            read as lists per sentence if there are as many streams as sentences.
        allow_none: accept empty lists.

    >>> paired_texts(["Hello."], ["Hi."]) == paired_texts(["Hello."], [["Hi."]]) == (["Hello."], [["Hi."]])
    True

    Raises ValueError, naming the first offender, for input that is no list, empty lists, counts that differ, a text
    that is no `str` or not valid Unicode, and sentences that differ in their number of references or have none.
    """
    hypotheses = [_text(text, f"predictions[{i}]") for i, text in enumerate(_listed(predictions, "predictions"))]
    listed = _listed(references, "references")
    if not hypotheses and not allow_none:
        raise ValueError("Scores need at least one sentence; got an empty list of predictions. Check the data set.")
    if len(hypotheses) != len(listed):
        nested = any(not isinstance(row, str) for row in listed)
        streams = (
            " If these are sacreBLEU's streams, each with a reference of all sentences, pass "
            "[list(texts) for texts in zip(*references)]."
        )
        raise ValueError(
            f"Every prediction needs a reference or a list of references; got {len(hypotheses)} predictions and "
            f"{len(listed)} references.{streams if nested else ' Pass one reference per prediction, in order.'}"
        )
    rows = [_references_of(row, f"references[{i}]") for i, row in enumerate(listed)]
    _check_same_number(rows)
    return hypotheses, rows


def _references_of(row: Any, where: str) -> list[str]:
    if isinstance(row, Sequence | np.ndarray) and not isinstance(row, str | bytes):
        return [_text(text, f"{where}[{i}]") for i, text in enumerate(row)]
    return [_text(row, where)]


def _check_same_number(rows: Sequence[Sequence[str]]) -> None:
    for i, row in enumerate(rows):
        if not row or len(row) != len(rows[0]):
            raise ValueError(
                f"Every sentence needs the same number of references, at least one; references[0] has {len(rows[0])} "
                f"and references[{i}] has {len(row)}. Keep as many as all sentences have."
            )


def _listed(values: Any, name: str) -> list[Any]:
    # A string is a sequence of strings, and mappings and sets have no order to pair by.
    if not isinstance(values, str | bytes | Mapping | Set):
        try:
            iterator = iter(values)
        except TypeError:
            pass
        else:
            return list(iterator)
    raise ValueError(
        f"{name} must be a list with one entry per sentence; got {_shown(values)}. Put a single sentence in a list."
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"Every text must be a str; {where} is {_shown(value)}. Decode token ids first, with decode_ids; an empty "
            'translation is "".'
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Every text must be valid Unicode; {where} has a lone surrogate at position {error.start}. Read its file "
            "as UTF-8."
        ) from None
    return one_line(value)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


def _checked_language(language: Any) -> str:
    if not isinstance(language, str) or not re.fullmatch("[a-z]{2,3}", language):
        raise ValueError(
            f"target_language must be a code of two or three lowercase letters, such as 'de'; got {language!r}."
        )
    return language


def _warn_if_tokenized(hypotheses: Sequence[str], streams: Sequence[Sequence[str]]) -> None:
    if _looks_tokenized(hypotheses) and not any(map(_looks_tokenized, streams)):
        warnings.warn(
            "Most predictions end in a space and a period or the like, unlike the references: they look tokenized, "
            "which makes the scores too low and not comparable. Detokenize them.",
            stacklevel=2,
        )


def _looks_tokenized(texts: Sequence[str]) -> bool:
    written = [text.strip() for text in texts if text.strip()]
    return 2 * sum(_TOKENIZED_END.search(text) is not None for text in written) > len(written)


def decode_ids(tokenizer: PreTrainedTokenizerFast, ids: Any) -> list[str]:
    """Decode token ids (B, T), given as an array, a tensor, or a list of lists that may differ in length.

    Special tokens are left out, and so is -100, the label of padding.

    Raises ValueError unless `ids` are integers in two dimensions, at least 0 or -100.
    """
    rows = _unpacked(ids)
    rows = [_unpacked(row) for row in rows] if isinstance(rows, list | tuple) else [rows]
    if not all(map(_are_ids, rows)):
        raise ValueError(
            f"Token ids must be whole numbers from 0, or {IGNORED} for padding, in two dimensions (B, T); got "
            f"{_shown(ids)}. Pass generated ids or labels, not logits."
        )
    kept = [[token for token in row if token != IGNORED] for row in rows]
    return tokenizer.batch_decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _unpacked(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _are_ids(row: Any) -> bool:
    return isinstance(row, list | tuple) and all(
        isinstance(token, int | np.integer) and (token >= 0 or token == IGNORED) for token in row
    )


def compute_metrics(
    tokenizer: PreTrainedTokenizerFast, target_language: str = "de"
) -> Callable[[Any], dict[str, float]]:
    """Make the `compute_metrics` of Transformers' Seq2SeqTrainer: a function that returns the `SCORES`.

    The function takes an EvalPrediction, or a pair of predictions and labels: ids (B, T), with -100 for padding. It
    raises ValueError for logits in place of ids.

    Raises ValueError for a `target_language` that `TranslationScores` refuses.
    """
    metric = TranslationScores(target_language)

    def scores_of(evaluated: Any) -> dict[str, float]:
        predictions, labels = evaluated[0], evaluated[1]
        if isinstance(predictions, tuple) or getattr(predictions, "ndim", 2) == 3:
            raise ValueError(
                "Scores need generated token ids (B, T); got the model's logits. Set predict_with_generate=True in "
                "Seq2SeqTrainingArguments."
            )
        scores = metric.compute(
            predictions=decode_ids(tokenizer, predictions), references=decode_ids(tokenizer, labels)
        )
        assert scores is not None  # there is one process
        return {name: scores[name] for name in SCORES}

    return scores_of
