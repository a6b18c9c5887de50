"""The tokenized BLEU of two papers: compound-split (Vaswani et al. 2017), and that of arXiv:2602.02899."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib.metadata import version

from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
from sacremoses import MosesPunctNormalizer, MosesTokenizer

_HYPHEN = re.compile(rb"(\S)-(\S)")


def tokenized_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> tuple[float, str]:
    """BLEU as in Vaswani et al. (2017), case-sensitive and not smoothed, with its signature.

    Texts are tokenized by `moses_tokens`. n-grams up to 4 are counted over all sentences as by multi-bleu.perl. The
    score is 0 if some n-gram order has no match.
    """
    score = _bleu_of_tokens(
        [moses_tokens(text, language) for text in hypotheses], [moses_tokens(text, language) for text in references]
    )
    return score, _signature(f"moses-{language}-before-9fc964da7|compounds:split")


def paper_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> tuple[float, str]:
    """The BLEU of arXiv:2602.02899 by its authors' code, with its signature.

    It is `evaluate.load("bleu")` on Moses-tokenized text, times 100. That metric tokenizes once more, by 13a, and
    counts n-grams up to 4 over all sentences, case-sensitive and not smoothed.
    """
    score = _bleu_of_tokens(
        [paper_tokens(text, language) for text in hypotheses], [paper_tokens(text, language) for text in references]
    )
    return score, _signature(f"moses-{language}-a+13a")


def _bleu_of_tokens(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    # This tokenizer only splits at spaces; `force` allows tokenized input.
    return BLEU(tokenize="none", smooth_method="none", force=True).corpus_score(hypotheses, [references]).score


def _signature(tokenizer: str) -> str:
    versions = f"sacremoses:{version('sacremoses')}|sacrebleu:{version('sacrebleu')}"
    return f"nrefs:1|case:mixed|punctuation:replace-unicode|tok:{tokenizer}|smooth:none|{versions}"


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


def paper_tokens(text: str, language: str = "de") -> str:
    """Tokenize for `paper_bleu`, with spaces between the tokens: Moses' tokenizer.perl -a, then 13a.

    Unicode punctuation becomes ASCII first. The second tokenizer splits what the first one marks, and every final dot,
    so the version of tokenizer.perl (see `moses_tokens`) does not matter.

    >>> paper_tokens("Der E-Mail-Dienst der „Post“ ruht's, z. B. heute…")
    'Der E @ - @ Mail @ - @ Dienst der „ Post " ruht & apos ; s , z . B . heute . . .'
    """
    normalizer, tokenizer = _moses(language)
    plain = normalizer.replace_unicode_punct(text)
    return Tokenizer13a()(tokenizer.tokenize(plain, aggressive_dash_splits=True, escape=True, return_str=True))


@functools.cache
def _moses(language: str) -> tuple[MosesPunctNormalizer, MosesTokenizer]:
    return MosesPunctNormalizer(language), MosesTokenizer(language)
