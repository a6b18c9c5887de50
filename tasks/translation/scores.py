"""Corpus scores of translations: sacreBLEU's BLEU and chrF2, and the tokenised BLEU of the Transformer papers."""

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
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from transformers import PreTrainedTokenizerFast

from tasks.translation.batches import IGNORED

_LINE_BREAK = re.compile(r"\r\n|\n|\r")
_HYPHEN = re.compile(rb"(\S)-(\S)")
_TOKENIZED_END = re.compile(r""" [.!?](?: (?:["'”“»]|&quot;|&apos;))?$""")

_DESCRIPTION = """
Corpus scores of translations: BLEU (Papineni et al. 2002) on plain text as sacreBLEU defines it (Post 2018), chrF2
(Popović 2015), and the tokenised, compound-split BLEU of Vaswani et al. (2017), each with a line saying what it is.
"""
_CITATION = "Post (2018), A Call for Clarity in Reporting BLEU Scores, https://aclanthology.org/W18-6319"
_INPUTS = """
Args:
    predictions (list of str): translations as plain text, not tokenised; "" where there is none.
    references (list of str, or list of lists of str): one or more references of each sentence, the same number for all.
"""


class TranslationScores(evaluate.Metric):
    """Scores of a whole corpus, 0 to 100, as a metric of the Evaluate library that needs no network.

    `compute` returns

    - "bleu", "chrf": BLEU and chrF2 on plain text with sacreBLEU's defaults, and "bleu_signature", "chrf_signature".
      BLEU counts words as split by 13a for every language: useless for one written without spaces;
    - "bleu_tokenized", "bleu_tokenized_signature": see `tokenized_bleu`. Comparable with papers that report this
      variant, never with "bleu";
    - "sentences": how many were scored.

    A line break inside a text counts as a space, so the scores are those of files with one sentence per line.

    Alone, it keeps everything in memory and touches no file. Evaluate's distributed mode works as Evaluate documents
    it: every process gives `num_process`, its `process_id` and an `experiment_id`, and adds its share, which may be
    empty; process 0 gets the scores of all, the others None. Use each `experiment_id` once: the others return before
    process 0 has read their share, and would overwrite it.

    >>> scores = TranslationScores(target_language="en").compute(
    ...     predictions=["The old mill was sold again."], references=["The old mill was sold last year."]
    ... )
    >>> round(scores["bleu"], 2), scores["bleu_signature"]  # doctest: +ELLIPSIS
    (55.78, 'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...')

    Args:
        target_language: code of two or three letters, for the Moses tokenizer, which treats one it does not know like
            English.
        keep_in_memory: None for whenever possible, that is, with one process.

    Raises ValueError unless `target_language` is such a code.
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
        # Evaluate makes its cache folder even for a metric that never writes, and fails where the home is read-only.
        return "" if self.keep_in_memory else super()._build_data_dir()

    # Evaluate reports bad input only once Arrow chokes on it, and Arrow takes much that is wrong. All ways in lead
    # through `add_batch`, which checks first. Evaluate appends to these docstrings, so each needs one.

    def add(self, *, prediction: Any = None, reference: Any = None) -> None:
        """Add one sentence with its reference, or list of references."""
        self.add_batch(predictions=[prediction], references=[reference])

    def add_batch(self, *, predictions: Any = None, references: Any = None) -> None:
        """Add some sentences. Raises ValueError for what `paired_texts` refuses."""
        # With few sentences and many processes some have none, and must take part all the same.
        hypotheses, rows = paired_texts(predictions, references, allow_none=self.num_process > 1)
        super().add_batch(predictions=hypotheses, references=rows)

    def compute(self, *, predictions: Any = None, references: Any = None) -> Any:
        """Scores of these sentences and those added before, as a dict; None in a process other than 0.

        Raises ValueError if there are no sentences, and for what `paired_texts` refuses.
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
            "sentences": len(predictions),
        }


def plain_scores(hypotheses: Sequence[str], streams: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The scores "bleu" and "chrf" with their signatures: sacreBLEU's defaults, equal to its command line.

    A stream holds one reference of every sentence, in order: sacreBLEU's own orientation.
    """
    # `force` only silences sacreBLEU's own warning about tokenised text, which `_warn_if_tokenized` replaces.
    bleu, chrf = BLEU(force=True), CHRF()
    scores: dict[str, Any] = {
        "bleu": bleu.corpus_score(hypotheses, streams).score,
        "chrf": chrf.corpus_score(hypotheses, streams).score,
    }
    # Signatures know the number of references only after scoring.
    return scores | {"bleu_signature": str(bleu.get_signature()), "chrf_signature": str(chrf.get_signature())}


def tokenized_bleu(hypotheses: Sequence[str], streams: Sequence[Sequence[str]], language: str) -> dict[str, Any]:
    """The score "bleu_tokenized" and its signature: BLEU as in Vaswani et al. (2017), case-sensitive, not smoothed.

    Hypotheses and references both pass through `moses_tokens`; n-grams up to 4 are then counted over all sentences as
    multi-bleu.perl does, taking the reference length that is closest, the shorter of two equally close. Where some
    order has no match, the score is 0.
    """
    # This tokenizer only splits at spaces, and `force` allows input that is tokenised already, as here it should be.
    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    tokens = functools.partial(moses_tokens, language=language)
    score = bleu.corpus_score(list(map(tokens, hypotheses)), [list(map(tokens, stream)) for stream in streams]).score
    signature = (
        f"nrefs:{len(streams)}|case:mixed|punctuation:replace-unicode|tok:moses-{language}|compounds:split|smooth:none"
        f"|sacremoses:{version('sacremoses')}|sacrebleu:{version('sacrebleu')}"
    )
    return {"bleu_tokenized": score, "bleu_tokenized_signature": signature}


def moses_tokens(text: str, language: str = "de") -> str:
    """Tokens with spaces between them, as tensor2tensor's get_ende_bleu.sh makes them before counting.

    Unicode punctuation becomes ASCII (replace-unicode-punctuation.perl), Moses' tokenizer.perl for the language splits
    and escapes, and words with hyphens are taken apart: s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g.

    >>> moses_tokens("Der E-Mail-Dienst der „Post“ ruht, z. B. heute…")
    'Der E ##AT##-##AT## Mail ##AT##-##AT## Dienst der „ Post &quot; ruht , z. B. heute ...'
    """
    normalizer, tokenizer = _moses(language)
    # Escaped like the script. It changes no count: the marks that are escaped become other names of the same tokens.
    tokens = tokenizer.tokenize(normalizer.replace_unicode_punct(text), escape=True, return_str=True)
    # Bytes, since Perl reads bytes there: matches do not overlap, so a match that has used up "b" leaves the second
    # hyphen of "a-b-c" alone, but of "à" it has used the first byte only, and "vis-à-vis" is split twice.
    return _HYPHEN.sub(rb"\1 ##AT##-##AT## \2", tokens.encode()).decode()


@functools.cache
def _moses(language: str) -> tuple[MosesPunctNormalizer, MosesTokenizer]:
    return MosesPunctNormalizer(language), MosesTokenizer(language)


def one_line(text: str) -> str:
    r"""The text with each line break, `\r\n`, `\n` or `\r`, replaced by one space; all else stays, U+2028 too.

    >>> one_line("one\r\ntwo\n\nthree\u2028four")
    'one two  three\u2028four'
    """
    return _LINE_BREAK.sub(" ", text)


def paired_texts(predictions: Any, references: Any, *, allow_none: bool = False) -> tuple[list[str], list[list[str]]]:
    """Check a corpus: its hypotheses, and for each of them the list of its references, every text on one line.

    `references` has one text, or a list of texts, for each prediction. As many streams as sentences, each as long, are
    indistinguishable from that and read as lists per sentence.

    >>> paired_texts(["Hello."], ["Hi."]) == paired_texts(["Hello."], [["Hi."]]) == (["Hello."], [["Hi."]])
    True

    Raises ValueError, naming the first offender, if predictions or references are no list, there are none (unless
    `allow_none`) or their counts differ, if a text is not a `str` or is not valid Unicode, or if sentences differ in
    how many references they have or have none.
    """
    hypotheses = [_text(text, f"predictions[{i}]") for i, text in enumerate(_listed(predictions, "predictions"))]
    listed = _listed(references, "references")
    if not hypotheses and not allow_none:
        raise ValueError("Scores need at least one sentence; got an empty list of predictions. Check the data set.")
    if len(hypotheses) != len(listed):
        nested = any(not isinstance(row, str) for row in listed)
        streams = (
            " If these are lists of references as sacreBLEU takes them, each for all sentences, pass "
            "[list(texts) for texts in zip(*references)]."
        )
        raise ValueError(
            f"Every prediction needs its reference, or its list of references; got {len(hypotheses)} predictions and "
            f"{len(listed)} references.{streams if nested else ' Pass one reference for each prediction, in order.'}"
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
                f"and references[{i}] {len(row)}. Keep as many as all sentences have."
            )


def _listed(values: Any, name: str) -> list[Any]:
    # A string is a sequence of strings, and a mapping or set has no order that pairs would keep.
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
            f"Every text must be valid Unicode; {where} has a lone surrogate at position {error.start}. Read the file "
            "it came from as UTF-8."
        ) from None
    return one_line(value)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


def _checked_language(language: Any) -> str:
    if not isinstance(language, str) or not re.fullmatch("[a-z]{2,3}", language):
        raise ValueError(
            f"target_language must be a code of two or three small letters; got {language!r}. Write 'de' for German."
        )
    return language


def _warn_if_tokenized(hypotheses: Sequence[str], streams: Sequence[Sequence[str]]) -> None:
    if _looks_tokenized(hypotheses) and not any(map(_looks_tokenized, streams)):
        warnings.warn(
            "Most predictions end in a space and a full stop or the like, unlike the references: they look tokenised, "
            "and the scores are then too low and comparable with nothing. Detokenise them.",
            stacklevel=2,
        )


def _looks_tokenized(texts: Sequence[str]) -> bool:
    written = [text.strip() for text in texts if text.strip()]
    return 2 * sum(_TOKENIZED_END.search(text) is not None for text in written) > len(written)


def decode_ids(tokenizer: PreTrainedTokenizerFast, ids: Any) -> list[str]:
    """Texts of token ids (B, T): an array, a tensor, or a list of lists, which may differ in length.

    Special tokens are left out, and so is -100, which stands for padding in labels.

    Raises ValueError unless `ids` are whole numbers in two dimensions, none negative but -100.
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
    """The `compute_metrics` for Transformers' Seq2SeqTrainer: "bleu", "chrf" and "bleu_tokenized" as numbers.

    What it returns takes an EvalPrediction, or a pair of predictions and labels, ids (B, T) with -100 for padding in
    either, and raises ValueError for logits in place of ids.

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
        return {name: scores[name] for name in ("bleu", "chrf", "bleu_tokenized")}

    return scores_of
