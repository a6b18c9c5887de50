"""Translation scores against sacreBLEU's command line, multi-bleu's counting written out, and themselves."""

import json
import math
import random
import subprocess
import sys
import time
import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import EvalPrediction, PreTrainedTokenizerFast

from tasks.translation.scores import (
    SCORES,
    TranslationScores,
    compute_metrics,
    decode_ids,
    moses_tokens,
    one_line,
    paper_tokens,
)
from tests.selection import real_data
from tests.workers import run_workers

REFERENCES = [
    "The ferry leaves at nine from the north pier.",
    "She lost her blue umbrella again.",
    "Nobody in this village remembers the old water mill.",
]
HYPOTHESES = [
    "The ferry leaves at nine from the north pier.",
    "She has lost her blue umbrella again.",
    "Nobody in the village remembers the old mill.",
]
OTHER_REFERENCES = [
    "The boat departs at nine from the northern pier.",
    "Again she has lost her blue umbrella!",
    "In the village, nobody remembers the old mill.",
]

# What tokenizers and readers of files disagree about: separators that are no line breaks, dots, quotation marks.
ODD_REFERENCES = [
    "Zeilen\u2028trenner und\u0085andere Zeichen stehen mitten im Satz.",
    "Tab\tund geschütztes\u00a0Leerzeichen ... sie zählen wie Leerzeichen, oder?",
    "„Rich-Text-Dateien“ kosten 5,99 € – z. B. bei „A&B“ [neu]…",
    "",
    "日本語の文です。 Und 😀 dazu, e\u0301 aus zwei Zeichen.",
    "Der letzte Satz ist ganz gewöhnlich und lang genug.",
]
ODD_HYPOTHESES = [
    "Zeilen\u2028trenner und andere Zeichen stehen im\u0085Satz.",
    "Tab\tund geschütztes Leerzeichen... sie zählen wie Leerzeichen, oder?",
    '"Rich-Text-Dateien" kosten 5,99 € - z. B. bei "A&B" [neu]...',
    "Hier sollte nichts stehen.",
    "",
    "Der letzte Satz ist ganz gewöhnlich und lang.",
]


def scores(predictions, references, target_language="de", **options):
    return TranslationScores(target_language, **options).compute(predictions=predictions, references=references)


def command_line(folder, hypotheses, *streams):
    """Scores and signatures by `python -m sacrebleu`, from files with one sentence per line."""
    files = []
    for name, texts in zip(["hypotheses", *map(str, range(len(streams)))], [hypotheses, *streams], strict=True):
        (folder / name).write_bytes("".join(f"{text}\n" for text in texts).encode())
        files.append(str(folder / name))
    # 20 decimals, so that nothing of a float is lost.
    words = [*files[1:], "-i", files[0], "-m", "bleu", "chrf", "-f", "json", "-w", "20"]
    answer = subprocess.run([sys.executable, "-m", "sacrebleu", *words], capture_output=True, text=True, check=True)
    bleu, chrf = json.loads(answer.stdout)
    return {
        "bleu": bleu["score"],
        "bleu_signature": bleu["signature"],
        "chrf": chrf["score"],
        "chrf_signature": chrf["signature"],
    }


def multi_bleu(hypotheses, *streams, shortest=False):
    """Clipped n-gram counts over the corpus, no smoothing: 100 bp (p1 p2 p3 p4)^(1/4).

    The reference length is that of the closest reference or, as for `evaluate.load("bleu")`, of the shortest one.
    """
    correct, total, length, reference_length = [0] * 4, [0] * 4, 0, 0
    for hypothesis, *references in zip(hypotheses, *streams, strict=True):
        words = hypothesis.split(" ") if hypothesis else []
        references = [reference.split(" ") if reference else [] for reference in references]
        length += len(words)
        reference_length += min((0 if shortest else abs(len(r) - len(words)), len(r)) for r in references)[1]
        for n in range(4):
            grams, *allowed = (
                Counter(tuple(w[i : i + n + 1]) for i in range(len(w) - n)) for w in [words, *references]
            )
            total[n] += sum(grams.values())
            correct[n] += sum(min(count, max(a[gram] for a in allowed)) for gram, count in grams.items())
    if 0 in correct:
        return 0.0
    brevity = math.exp(1 - reference_length / length) if length < reference_length else 1.0
    return 100 * brevity * math.prod(c / t for c, t in zip(correct, total, strict=True)) ** 0.25


def corrupted(sentences):
    """The same on every machine: words dropped and swapped, some lines empty, some with unusual characters."""
    draw = random.Random(14).random
    broken = []
    for row, sentence in enumerate(sentences):
        words = [word for word in sentence.split() if draw() > 0.1]
        for i in range(1, len(words)):
            if draw() < 0.15:
                words[i - 1], words[i] = words[i], words[i - 1]
        if row % 50 == 7:
            words.insert(len(words) // 2, "„Öl\u2028-\u0085\u00a0… 油😀“")
        broken.append("" if row % 200 == 3 else " ".join(words))
    return broken


@pytest.fixture(scope="module")
def newstest():
    """German side of newstest2014, and a corruption of it."""
    pairs = pd.read_parquet(real_data("newstest") / "test.parquet")["translation"]
    references = [pair["de"] for pair in pairs]
    return corrupted(references), references


@pytest.fixture(scope="module")
def newstest_scores(newstest):
    """Its scores, and the seconds that they took."""
    started = time.perf_counter()
    result = scores(*newstest)
    return result, time.perf_counter() - started


@pytest.fixture(scope="module")
def newstest_tokens(newstest):
    """Its tokens by Moses."""
    return [[moses_tokens(text) for text in texts] for texts in newstest]


class TestPlainScores:
    @pytest.mark.parametrize("references", [REFERENCES, [[text] for text in REFERENCES]], ids=["plain", "nested"])
    def test_known_score(self, references):
        result = scores(HYPOTHESES, references, "en")
        assert result["bleu"] == pytest.approx(73.9242, abs=5e-5)
        assert result["sentences"] == 3

    def test_raw_sacrebleu_calls_the_same_nested_references_perfect(self):
        """The trap that lists per sentence are to other libraries, here so that it is noticed if it goes away."""
        assert sacrebleu.corpus_bleu(HYPOTHESES, [[text] for text in REFERENCES]).score == pytest.approx(100)

    @pytest.mark.parametrize(
        ("hypotheses", "references"), [(HYPOTHESES, REFERENCES), (ODD_HYPOTHESES, ODD_REFERENCES)], ids=["plain", "odd"]
    )
    def test_equal_to_the_command_line(self, tmp_path, hypotheses, references):
        expected = command_line(tmp_path, hypotheses, references)
        assert expected.items() <= scores(hypotheses, references).items()
        assert expected["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
        assert expected["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")

    @pytest.mark.data
    def test_equal_to_the_command_line_on_newstest2014(self, tmp_path, newstest, newstest_scores):
        result, seconds = newstest_scores
        assert seconds < 60  # 2 to 4 s on one core
        assert command_line(tmp_path, *newstest).items() <= result.items()
        assert result["sentences"] == 3003

    def test_several_references_equal_sacrebleu_with_transposed_streams(self, tmp_path):
        streams = [REFERENCES, OTHER_REFERENCES]
        result = scores(HYPOTHESES, [list(texts) for texts in zip(*streams, strict=True)], "en")
        assert result["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, streams).score
        assert result["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, streams).score
        assert command_line(tmp_path, HYPOTHESES, *streams).items() <= result.items()
        assert result["bleu_signature"].startswith("nrefs:2|")
        assert result["bleu_tokenized_signature"].startswith("nrefs:2|")

    def test_line_breaks_count_as_a_space(self, tmp_path):
        broken = [text.replace(" ", end, 2) for text, end in zip(HYPOTHESES, ("\r\n", "\n", "\r"), strict=True)]
        expected = scores(HYPOTHESES, REFERENCES)
        assert scores([f"{text}\n" for text in broken], REFERENCES) == expected
        assert scores(HYPOTHESES, [f"{text}\r\n" for text in REFERENCES]) == expected
        assert command_line(tmp_path, [one_line(text) for text in broken], REFERENCES).items() <= expected.items()

    def test_only_line_breaks_of_files_are_replaced(self):
        others = "\u2028\u2029\u0085\v\f\x1c\t"
        assert one_line(f"a\r\nb\nc\rd{others}e\n\r") == f"a b c d{others}e  "

    def test_empty_hypotheses_count(self):
        result = scores(["", *HYPOTHESES[1:]], REFERENCES)
        assert result["sentences"] == 3
        assert result["bleu"] < scores(HYPOTHESES[1:], REFERENCES[1:])["bleu"]

    def test_only_empty_hypotheses_score_zero(self):
        result = scores([""] * 3, REFERENCES)
        assert [result[name] for name in SCORES] == [0, 0, 0, 0]

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            st.lists(st.text(st.characters(categories=["L"]), min_size=1), min_size=4).map(" ".join),
            min_size=1,
            max_size=5,
        )
    )
    def test_identical_sentences_score_100(self, sentences):
        result = scores(sentences, sentences)
        for name in SCORES:
            assert result[name] == pytest.approx(100)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5))
    def test_any_text_is_scored_and_nesting_changes_nothing(self, pairs):
        hypotheses, references = map(list, zip(*pairs, strict=True))
        result = scores(hypotheses, references)
        assert result == scores(hypotheses, [[text] for text in references])
        lines = [one_line(text) for text in hypotheses], [[one_line(text) for text in references]]
        assert result["bleu"] == sacrebleu.corpus_bleu(*lines, force=True).score
        assert result["chrf"] == sacrebleu.corpus_chrf(*lines).score


class TestTokenizedBleu:
    @pytest.mark.parametrize(
        ("text", "tokens"),
        [
            ("Ein Test.", "Ein Test ."),
            ("rich-text format", "rich ##AT##-##AT## text format"),
            ("E-Mail-Adresse", "E ##AT##-##AT## Mail ##AT##-##AT## Adresse"),
            # Matches do not overlap: b was used up, but of à, two bytes, only the first.
            ("a-b-c", "a ##AT##-##AT## b-c"),
            ("vis-à-vis", "vis ##AT##-##AT## à ##AT##-##AT## vis"),
            ("a--b", "a ##AT##-##AT## -b"),
            ("Ein- und Ausgang", "Ein- und Ausgang"),
            ("Es kostet 5,99 €, oder?", "Es kostet 5,99 € , oder ?"),
            ("z. B. am 3. Mai", "z. B. am 3. Mai"),
            ("Ja... nein.", "Ja ... nein ."),
            ("Ja … ‚nein‘ – „gut“", "Ja ... ‚ nein ‘ – „ gut &quot;"),
            ("A&B [neu] | <x>", "A &amp; B &#91; neu &#93; &#124; &lt; x &gt;"),
            ("Peter’s Hut", "Peter &apos; s Hut"),
            ("  zwei \t Lücken\u2028hier ", "zwei Lücken hier"),
            ("", ""),
        ],
    )
    def test_tokens_as_the_script_makes_them(self, text, tokens):
        assert moses_tokens(text, "de") == tokens

    @pytest.mark.parametrize(
        ("language", "text", "tokens"),
        [
            # The version of 2017 keeps the final dot of an abbreviation, of letters with dots between them, and in
            # German of a number up to 31 or a Roman one; later versions split all of these.
            ("en", "He says vs.", "He says vs."),
            ("en", "in the U.S.", "in the U.S."),
            ("en", "at 5 p.m.", "at 5 p.m."),
            ("en", "I met Dr.", "I met Dr."),
            ("de", "Heute usw.", "Heute usw."),
            ("de", "schwer wie ein iPhone 5.", "schwer wie ein iPhone 5."),
            ("de", "am 31.", "am 31."),
            ("de", "im XX.", "im XX."),
            ("de", "in den U.S.A.", "in den U.S.A."),
            # All versions split that of other words and numbers, keep several dots together, and keep the dot of what
            # is an abbreviation before a number only there.
            ("en", "See No.", "See No ."),
            ("en", "No. 5.", "No. 5 ."),
            ("en", "pp. 3 and 4", "pp. 3 and 4"),
            ("en", "It is 3.5.", "It is 3.5 ."),
            ("en", "e.g. this.", "e.g. this ."),
            ("de", "Im Jahr 1990.", "Im Jahr 1990 ."),
            ("de", "So bin ich...", "So bin ich ..."),
        ],
    )
    def test_final_dots_as_before_they_were_split_unconditionally(self, language, text, tokens):
        assert moses_tokens(text, language) == tokens
        split = f"{text[:-1]} ." if text[-1] == "." and text[-2] != "." else text
        assert paper_tokens(text, language) == paper_tokens(split, language), "the paper's score has one version"

    def test_rules_of_the_language_apply(self):
        assert moses_tokens("Peter's z. B.", "en") == "Peter &apos;s z . B."
        assert moses_tokens("l'eau", "fr") == "l&apos; eau"

    @pytest.mark.parametrize(
        ("hypotheses", "streams"),
        [
            (HYPOTHESES, [REFERENCES]),
            (HYPOTHESES, [REFERENCES, OTHER_REFERENCES]),
            (ODD_HYPOTHESES, [ODD_REFERENCES]),
        ],
        ids=["plain", "two references", "odd"],
    )
    def test_counts_as_multi_bleu(self, hypotheses, streams):
        result = scores(hypotheses, [list(texts) for texts in zip(*streams, strict=True)])
        tokens = [[moses_tokens(text) for text in texts] for texts in (hypotheses, *streams)]
        assert result["bleu_tokenized"] == pytest.approx(multi_bleu(*tokens), abs=1e-9)
        assert result["bleu_tokenized"] > 0

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.integers(1, 3))
    def test_counts_as_multi_bleu_on_any_words(self, data, num_references):
        sentence = st.lists(st.sampled_from(["a", "b", "A", "a-b"]), max_size=9).map(" ".join)
        corpus = data.draw(st.lists(st.tuples(*[sentence] * (1 + num_references)), min_size=1, max_size=6))
        result = scores([row[0] for row in corpus], [row[1:] for row in corpus])
        tokens = [[moses_tokens(text) for text in texts] for texts in zip(*corpus, strict=True)]
        assert result["bleu_tokenized"] == pytest.approx(multi_bleu(*tokens), abs=1e-9)

    @pytest.mark.data
    def test_equal_to_the_perl_scripts_on_newstest2014(self, newstest_scores, newstest_tokens):
        result = newstest_scores[0]["bleu_tokenized"]
        assert result == pytest.approx(multi_bleu(*newstest_tokens), abs=1e-9)
        # By replace-unicode-punctuation.perl, tokenizer.perl 1.1, the Perl one-liner and multi-bleu.perl.
        assert result == pytest.approx(52.737482053048936, abs=1e-9)

    @pytest.mark.data
    def test_escaping_changes_no_count_on_newstest2014(self, newstest_tokens):
        names = {"&apos;": "'", "&quot;": '"', "&lt;": "<", "&gt;": ">", "&#124;": "|", "&#91;": "[", "&#93;": "]"}

        def plain(text):
            for escaped, mark in (names | {"&amp;": "&"}).items():
                text = text.replace(escaped, mark)
            return text

        plainly = [[plain(text) for text in texts] for texts in newstest_tokens]
        assert multi_bleu(*newstest_tokens) == multi_bleu(*plainly)

    def test_signature_says_what_it_is(self):
        signature = scores(HYPOTHESES, REFERENCES, "fr")["bleu_tokenized_signature"]
        assert signature.startswith(
            "nrefs:1|case:mixed|punctuation:replace-unicode|tok:moses-fr-before-9fc964da7|compounds:split|smooth:none"
            "|sacremoses:"
        )

    def test_no_smoothing(self):
        result = scores(["Das ist gut"], ["Das ist gut"])
        assert result["bleu_tokenized"] == 0  # three words have no 4-gram


class TestPaperBleu:
    def test_moses_splits_hyphens_and_13a_splits_what_moses_marks(self):
        found = paper_tokens("Die U-Bahn 's \u201d1,5 & 3-4\u2026")
        assert found == 'Die U @ - @ Bahn & apos ; s " 1,5 & 3 @ - @ 4 . . .'

    @settings(max_examples=60, deadline=None)
    @given(st.data(), st.integers(1, 3))
    def test_counts_as_the_metric_of_evaluate_on_any_words(self, data, num_references):
        sentence = st.lists(st.sampled_from(["a", "b", "A", "a-b", "c."]), max_size=9).map(" ".join)
        corpus = data.draw(st.lists(st.tuples(*[sentence] * (1 + num_references)), min_size=1, max_size=6))
        result = scores([row[0] for row in corpus], [row[1:] for row in corpus])
        tokens = [[paper_tokens(text) for text in texts] for texts in zip(*corpus, strict=True)]
        assert result["bleu_paper"] == pytest.approx(multi_bleu(*tokens, shortest=True), abs=1e-9)

    @pytest.mark.data
    def test_equal_to_evaluates_metric_on_newstest2014(self, newstest_scores):
        result, _ = newstest_scores
        # By the file of evaluate.load("bleu"), with its tokenizer, on the texts that Moses tokenized.
        assert result["bleu_paper"] == pytest.approx(54.079512484084816, abs=1e-9)
        assert result["bleu_paper"] > result["bleu_tokenized"] + 1 > result["bleu"] + 1, "three different scores"


class TestRefusals:
    @pytest.mark.parametrize(
        ("predictions", "references", "message"),
        [
            (HYPOTHESES, REFERENCES[:2], r"got 3 predictions and 2 references.* in order"),
            (HYPOTHESES[:1], REFERENCES, r"got 1 predictions and 3 references"),
            ([], [], r"at least one sentence; got an empty list of predictions"),
            ([], REFERENCES, r"at least one sentence; got an empty list of predictions"),
            ([*HYPOTHESES[:2], None], REFERENCES, r"must be a str; predictions\[2\] is None.*Decode token ids first"),
            ([[5, 6], [7], [8]], REFERENCES, r"must be a str; predictions\[0\] is \[5, 6\] \(list\).*Decode"),
            (np.ones((3, 4), dtype=int), REFERENCES, r"predictions\[0\] is array.*Decode"),
            (torch.ones(3, 4, dtype=int), REFERENCES, r"predictions\[0\] is tensor.*Decode"),
            ([1, 2, 3], REFERENCES, r"predictions\[0\] is 1 \(int\).*Decode"),
            ([b"a", "b", "c"], REFERENCES, r"predictions\[0\] is b'a' \(bytes\)"),
            (HYPOTHESES, [[5, 6], [7], [8]], r"must be a str; references\[0\]\[0\] is 5 \(int\).*Decode"),
            (HYPOTHESES, [*REFERENCES[:2], None], r"must be a str; references\[2\] is None"),
            (HYPOTHESES, [[*REFERENCES[:2], None]] * 3, r"must be a str; references\[0\]\[2\] is None"),
            (HYPOTHESES, [[[text]] for text in REFERENCES], r"must be a str; references\[0\]\[0\] is \["),
            ("Hello.", ["Hello."], r"predictions must be a list .* got 'Hello.' \(str\)\. Put a single sentence"),
            (["Hello."], "Hello.", r"references must be a list .* got 'Hello.' \(str\)"),
            (HYPOTHESES, None, r"references must be a list .* got None"),
            (None, REFERENCES, r"predictions must be a list .* got None"),
            ({"a": "b"}, ["c"], r"predictions must be a list .* got \{'a': 'b'\}"),
            ({"a"}, ["c"], r"predictions must be a list .* got \{'a'\}"),
            (7, ["c"], r"predictions must be a list .* got 7 \(int\)"),
            (HYPOTHESES, [["a"], ["b", "c"], ["d"]], r"references\[0\] has 1 and references\[1\] has 2\. Keep"),
            (HYPOTHESES, [["a"], [], ["d"]], r"references\[0\] has 1 and references\[1\] has 0"),
            (HYPOTHESES, [[], [], []], r"at least one; references\[0\] has 0"),
            (HYPOTHESES, ["a", ["b", "c"], "d"], r"references\[0\] has 1 and references\[1\] has 2"),
            (["a\ud800"], ["b"], r"valid Unicode; predictions\[0\] has a lone surrogate at position 1"),
        ],
    )  # fmt: skip
    def test_bad_input_is_refused_on_every_path(self, predictions, references, message):
        metric = TranslationScores()
        with pytest.raises(ValueError, match=message):
            metric.compute(predictions=predictions, references=references)
        with pytest.raises(ValueError, match=message):
            metric.add_batch(predictions=predictions, references=references)
        assert len(metric) == 0
        assert metric.compute(predictions=HYPOTHESES, references=REFERENCES)["sentences"] == 3

    @pytest.mark.parametrize("streams", [[REFERENCES], [REFERENCES, OTHER_REFERENCES]])
    def test_sacrebleus_own_orientation_is_refused_with_the_way_out(self, streams):
        with pytest.raises(ValueError, match=r"3 predictions and \d references.*pass \[list\(texts\) for texts in zip"):
            scores(HYPOTHESES, streams)
        assert scores(HYPOTHESES, [list(texts) for texts in zip(*streams, strict=True)])["sentences"] == 3

    def test_single_additions_are_checked(self):
        metric = TranslationScores()
        with pytest.raises(ValueError, match=r"predictions\[0\] is \[1, 2\] \(list\)"):
            metric.add(prediction=[1, 2], reference="a")
        with pytest.raises(ValueError, match=r"references\[0\] is None"):
            metric.add(prediction="a")

    def test_nothing_to_score_is_refused(self):
        with pytest.raises(ValueError, match="at least one sentence; got none"):
            TranslationScores().compute()

    def test_batches_with_different_numbers_of_references_are_refused(self):
        metric = TranslationScores()
        metric.add_batch(predictions=["a"], references=["b"])
        metric.add_batch(predictions=["a"], references=[["b", "c"]])
        with pytest.raises(ValueError, match=r"references\[0\] has 1 and references\[1\] has 2"):
            metric.compute()
        assert metric.compute(predictions=HYPOTHESES, references=REFERENCES)["sentences"] == 3

    @pytest.mark.parametrize("language", ["German", "de-DE", "", None, "DE"])
    def test_anything_but_a_language_code_is_refused(self, language):
        with pytest.raises(ValueError, match=r"target_language must be a code .*, such as 'de'; got"):
            TranslationScores(language)


class TestTokenizedText:
    TOKENIZED = [text.replace(".", " .") for text in HYPOTHESES]

    @pytest.mark.parametrize("end", [" .", " ?", " !\n", " . &quot;", ' . "'])
    def test_tokenised_hypotheses_are_warned_about(self, end):
        with pytest.warns(UserWarning, match=r"look tokenized.*Detokenize them"):
            scores([text.replace(".", end) for text in HYPOTHESES], REFERENCES)

    @pytest.mark.parametrize(
        ("hypotheses", "references"),
        [
            (HYPOTHESES, REFERENCES),
            (TOKENIZED, TOKENIZED),
            ([*TOKENIZED[:1], *HYPOTHESES[1:]], REFERENCES),
            (["", "", ""], REFERENCES),
            ([".", ".", "."], REFERENCES),
        ],
        ids=["plain", "references too", "a minority", "empty", "only dots"],
    )
    def test_others_are_not(self, hypotheses, references):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert scores(hypotheses, references)["sentences"] == 3


class TestMetricObject:
    def test_batches_add_up_and_the_object_can_be_used_again(self):
        metric, expected = TranslationScores(), scores(HYPOTHESES, REFERENCES)
        for _ in range(2):
            metric.add(prediction=HYPOTHESES[0], reference=REFERENCES[0])
            metric.add(prediction=HYPOTHESES[1], reference=[REFERENCES[1]])
            metric.add_batch(predictions=HYPOTHESES[2:], references=REFERENCES[2:])
            assert len(metric) == 3
            assert metric.compute() == expected

    def test_a_single_process_touches_no_file(self, tmp_path):
        (tmp_path / "file").touch()
        impossible = tmp_path / "file" / "cache"
        assert scores(HYPOTHESES, REFERENCES, cache_dir=str(impossible)) == scores(HYPOTHESES, REFERENCES)
        with pytest.raises(NotADirectoryError):
            scores(HYPOTHESES, REFERENCES, cache_dir=str(impossible), keep_in_memory=False)

    def test_random_numbers_go_on_as_if_nothing_had_happened(self):
        np.random.seed(3)
        expected = np.random.rand(5)
        np.random.seed(3)
        scores(HYPOTHESES, REFERENCES)
        assert np.array_equal(np.random.rand(5), expected)

    @pytest.mark.parametrize("kind", [tuple, np.array, pd.Series, iter])
    def test_any_ordered_collection_of_texts_will_do(self, kind):
        assert scores(kind(HYPOTHESES), kind(REFERENCES)) == scores(HYPOTHESES, REFERENCES)

    def test_columns_of_datasets_will_do(self):
        import datasets

        columns = datasets.Dataset.from_dict({"h": HYPOTHESES, "r": [[text] for text in REFERENCES]})
        assert scores(columns["h"], columns["r"]) == scores(HYPOTHESES, REFERENCES)


def score_shares(rank, cache, hypotheses, references):
    """Uneven shares, then an empty one, then alone but on disk beside the other."""
    results = []
    for name, shares in (("uneven", [slice(0, 1), slice(1, None)]), ("empty", [slice(None), slice(0, 0)])):
        metric = TranslationScores(num_process=2, process_id=rank, experiment_id=name, cache_dir=cache)
        mine = shares[rank]
        results.append(metric.compute(predictions=hypotheses[mine], references=references[mine]))
    alone = [
        scores(hypotheses, references, cache_dir=cache, keep_in_memory=False, experiment_id="alone") for _ in range(20)
    ]
    return results, alone


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory):
    cache = tmp_path_factory.mktemp("metrics")
    return run_workers(score_shares, 2, str(cache), ODD_HYPOTHESES, ODD_REFERENCES), cache


@pytest.mark.multiprocess
@pytest.mark.slow
class TestSeveralProcesses:
    def test_shares_give_the_scores_of_the_whole_on_process_0(self, shared_out):
        (on_0, _), (on_1, _) = shared_out[0]
        assert on_0 == [scores(ODD_HYPOTHESES, ODD_REFERENCES)] * 2
        assert on_1 == [None, None]

    def test_runs_at_the_same_time_do_not_disturb_each_other(self, shared_out):
        expected = scores(ODD_HYPOTHESES, ODD_REFERENCES)
        assert all(alone == [expected] * 20 for _, alone in shared_out[0])

    def test_no_data_stay_behind(self, shared_out):
        assert not list(shared_out[1].rglob("*.arrow"))

    def test_keeping_shares_in_memory_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="keep_in_memory"):
            TranslationScores(num_process=2, keep_in_memory=True, cache_dir=str(tmp_path))


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    for text in REFERENCES + HYPOTHESES:
        for word in text.split():
            words.setdefault(word, len(words))
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def padded(tokenizer, texts, padding):
    rows = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    return np.array([row + [padding] * (12 - len(row)) for row in rows])


class TestDecoding:
    @pytest.mark.parametrize("padding", [-100, 0])
    @pytest.mark.parametrize(
        "kind", [np.array, torch.tensor, list, np.ndarray.tolist, lambda ids: list(torch.tensor(ids))]
    )
    def test_padding_and_special_tokens_are_left_out(self, tokenizer, padding, kind):
        assert decode_ids(tokenizer, kind(padded(tokenizer, HYPOTHESES, padding))) == HYPOTHESES

    def test_rows_may_differ_in_length_and_be_empty(self, tokenizer):
        assert decode_ids(tokenizer, [[-100], [], [1, 3, 1], [-100, 3, -100, 4]]) == ["", "", "The", "The ferry"]
        assert decode_ids(tokenizer, []) == []

    def test_spaces_before_punctuation_stay(self, tokenizer):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, ".": 1}, "a")))
        assert decode_ids(tokenizer, [[0, 1, -100]]) == ["a ."]

    @pytest.mark.parametrize(
        "ids",
        [[1, 2], np.ones(3, dtype=int), torch.ones(2, 3, 4), torch.ones(2, 3), [[1.5]], [[-1]], None, 7, [["a"]]],
        ids=str,
    )  # fmt: skip
    def test_anything_but_ids_is_refused(self, tokenizer, ids):
        with pytest.raises(ValueError, match=r"whole numbers from 0.*two dimensions \(B, T\); got .* not logits"):
            decode_ids(tokenizer, ids)


class TestComputeMetrics:
    @pytest.mark.parametrize("kind", [tuple, lambda pair: EvalPrediction(*pair)], ids=["pair", "EvalPrediction"])
    def test_scores_of_padded_ids(self, tokenizer, kind):
        pair = padded(tokenizer, HYPOTHESES, -100), padded(tokenizer, REFERENCES, -100)
        expected = scores(HYPOTHESES, REFERENCES, "en")
        assert compute_metrics(tokenizer, "en")(kind(pair)) == {name: expected[name] for name in SCORES}

    @pytest.mark.parametrize("logits", [np.zeros((3, 12, 30)), (np.zeros((3, 12, 30)), np.zeros((3, 12, 8)))])
    def test_logits_are_refused_with_the_way_out(self, tokenizer, logits):
        labels = padded(tokenizer, REFERENCES, -100)
        with pytest.raises(ValueError, match="predict_with_generate=True"):
            compute_metrics(tokenizer)(EvalPrediction(logits, labels))

    def test_missing_labels_are_refused(self, tokenizer):
        with pytest.raises(ValueError, match="got None"):
            compute_metrics(tokenizer)((padded(tokenizer, HYPOTHESES, -100), None))

    def test_language_is_checked_before_training(self, tokenizer):
        with pytest.raises(ValueError, match="target_language"):
            compute_metrics(tokenizer, "german")

    def test_works_in_seq2seq_trainer(self, tokenizer, tmp_path):
        from transformers import DataCollatorForSeq2Seq, MarianConfig, MarianMTModel, Seq2SeqTrainer
        from transformers import Seq2SeqTrainingArguments as Arguments

        torch.manual_seed(0)
        config = MarianConfig(
            vocab_size=len(tokenizer), d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
            decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16,
            pad_token_id=0, eos_token_id=1, forced_eos_token_id=1, decoder_start_token_id=0,
        )  # fmt: skip
        model = MarianMTModel(config)
        rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer(REFERENCES).input_ids]

        def trainer(**options):
            return Seq2SeqTrainer(
                model,
                Arguments(str(tmp_path), report_to="none", use_cpu=True, per_device_eval_batch_size=2, **options),
                DataCollatorForSeq2Seq(tokenizer, model),
                eval_dataset=rows,
                processing_class=tokenizer,
                compute_metrics=compute_metrics(tokenizer, "en"),
            )

        generating = trainer(predict_with_generate=True, generation_max_length=10)
        metrics = generating.evaluate()
        texts = decode_ids(tokenizer, generating.predict(rows).predictions)
        expected = scores(texts, REFERENCES, "en")
        assert [metrics[f"eval_{name}"] for name in ("bleu", "chrf")] == [expected["bleu"], expected["chrf"]]
        with pytest.raises(ValueError, match="predict_with_generate=True"):
            trainer(predict_with_generate=False).evaluate()
