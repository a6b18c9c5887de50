"""Translation scores against sacreBLEU's command line, multi-bleu's counting written out, and known values."""

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
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import EvalPrediction, PreTrainedTokenizerFast

from tasks.translation.scores import SCORES, compute_metrics, decode_ids, one_line
from tasks.translation.scores import translation_scores as scores
from tasks.translation.tokenized_bleu import moses_tokens, paper_tokens
from tests.selection import real_data

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


def command_line(folder, hypotheses, references):
    """Scores and signatures by `python -m sacrebleu`, from files with one sentence per line."""
    for name, texts in (("hypotheses", hypotheses), ("references", references)):
        (folder / name).write_bytes("".join(f"{text}\n" for text in texts).encode())
    # 20 decimals, so that nothing of a float is lost.
    words = [
        str(folder / "references"),
        "-i",
        str(folder / "hypotheses"),
        "-m",
        "bleu",
        "chrf",
        "-f",
        "json",
        "-w",
        "20",
    ]
    answer = subprocess.run([sys.executable, "-m", "sacrebleu", *words], capture_output=True, text=True, check=True)
    bleu, chrf = json.loads(answer.stdout)
    return {
        "bleu": bleu["score"],
        "bleu_signature": bleu["signature"],
        "chrf": chrf["score"],
        "chrf_signature": chrf["signature"],
    }


def multi_bleu(hypotheses, references):
    """Clipped n-gram counts over the corpus, no smoothing: 100 bp (p1 p2 p3 p4)^(1/4)."""
    correct, total, length, reference_length = [0] * 4, [0] * 4, 0, 0
    for pair in zip(hypotheses, references, strict=True):
        words, reference = (text.split(" ") if text else [] for text in pair)
        length, reference_length = length + len(words), reference_length + len(reference)
        for n in range(4):
            grams, allowed = (Counter(tuple(w[i : i + n + 1]) for i in range(len(w) - n)) for w in (words, reference))
            total[n] += sum(grams.values())
            correct[n] += sum(min(count, allowed[gram]) for gram, count in grams.items())
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


class TestPlainScores:
    def test_known_score(self):
        result = scores(HYPOTHESES, REFERENCES, "en")
        assert result["bleu"] == pytest.approx(73.9242, abs=5e-5)
        assert result["sentences"] == 3

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

    def test_line_breaks_count_as_a_space(self):
        broken = [text.replace(" ", end, 2) for text, end in zip(HYPOTHESES, ("\r\n", "\n", "\r"), strict=True)]
        expected = scores(HYPOTHESES, REFERENCES)
        assert scores([f"{text}\n" for text in broken], [f"{text}\r\n" for text in REFERENCES]) == expected
        assert scores(["a b c d-\ne"], ["a b c d- e"])["bleu"] == pytest.approx(100)  # 13a would join "d-\ne"
        others = "\u2028\u2029\u0085\v\f\x1c\t"
        assert one_line(f"a\r\nb\nc\rd{others}e\n\r") == f"a b c d{others}e  "

    def test_empty_hypotheses_count(self):
        assert scores(["", *HYPOTHESES[1:]], REFERENCES)["bleu"] < scores(HYPOTHESES[1:], REFERENCES[1:])["bleu"]
        nothing = scores([""] * 3, REFERENCES)
        assert [nothing[name] for name in SCORES] == [0, 0, 0, 0]


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

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_both_count_as_multi_bleu_on_any_words(self, data):
        sentence = st.lists(st.sampled_from(["a", "b", "A", "a-b", "c."]), max_size=9).map(" ".join)
        corpus = data.draw(st.lists(st.tuples(sentence, sentence), min_size=1, max_size=6))
        sides = list(zip(*corpus, strict=True))
        result = scores(*sides)
        for name, tokens in (("bleu_tokenized", moses_tokens), ("bleu_paper", paper_tokens)):
            assert result[name] == pytest.approx(multi_bleu(*(map(tokens, side) for side in sides)), abs=1e-9)

    def test_moses_splits_hyphens_and_13a_splits_what_moses_marks(self):
        found = paper_tokens("Die U-Bahn 's \u201d1,5 & 3-4\u2026")
        assert found == 'Die U @ - @ Bahn & apos ; s " 1,5 & 3 @ - @ 4 . . .'

    @pytest.mark.data
    def test_equal_to_the_perl_scripts_and_to_evaluates_metric_on_newstest2014(self, newstest_scores):
        result, _ = newstest_scores
        # By replace-unicode-punctuation.perl, tokenizer.perl 1.1, the Perl one-liner and multi-bleu.perl.
        assert result["bleu_tokenized"] == pytest.approx(52.737482053048936, abs=1e-9)
        # By the file of evaluate.load("bleu"), with its tokenizer, on the texts that Moses tokenized.
        assert result["bleu_paper"] == pytest.approx(54.079512484084816, abs=1e-9)
        assert result["bleu_paper"] > result["bleu_tokenized"] + 1 > result["bleu"] + 1, "three different scores"

    def test_signatures_say_what_was_counted(self):
        result = scores(HYPOTHESES, REFERENCES, "fr")
        start = "nrefs:1|case:mixed|punctuation:replace-unicode|tok:moses-fr-"
        split = f"{start}before-9fc964da7|compounds:split|smooth:none|sacremoses:"
        assert result["bleu_tokenized_signature"].startswith(split)
        assert result["bleu_paper_signature"].startswith(f"{start}a+13a|smooth:none|sacremoses:")
        assert scores(["Das ist gut"], ["Das ist gut"])["bleu_tokenized"] == 0  # three words have no 4-gram


@pytest.mark.parametrize(
    ("hypotheses", "references", "language", "words"),
    [
        (HYPOTHESES, REFERENCES[:2], "de", "3 hypotheses and 2 references"),
        (HYPOTHESES, [REFERENCES], "de", "3 hypotheses and 1 references"),
        ([], [], "de", "0 hypotheses"),
        (HYPOTHESES, [[text] for text in REFERENCES], "de", "got list"),  # sacreBLEU alone calls it perfect
        ([*HYPOTHESES[:2], None], REFERENCES, "de", "got NoneType"),
        ([[5, 6], [7], [8]], REFERENCES, "de", "got list"),
        (HYPOTHESES, REFERENCES, "German", "target_language .*'German'"),
    ],
)
def test_bad_input_is_refused(hypotheses, references, language, words):
    with pytest.raises(ValueError, match=words):
        scores(hypotheses, references, language)


TOKENIZED = [text.replace(".", " .") for text in HYPOTHESES]


@pytest.mark.parametrize("end", [" .", " ?", " !\n", " . &quot;", ' . "'])
def test_tokenized_hypotheses_are_warned_about(end):
    with pytest.warns(UserWarning, match="look tokenized"):
        scores([text.replace(".", end) for text in HYPOTHESES], REFERENCES)


@pytest.mark.parametrize(
    ("hypotheses", "references"),
    [(TOKENIZED, TOKENIZED), ([*TOKENIZED[:1], *HYPOTHESES[1:]], REFERENCES), ([""] * 3, REFERENCES)],
    ids=["references too", "a minority", "empty"],
)
def test_others_are_not(hypotheses, references):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scores(hypotheses, references)["sentences"] == 3


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
    @pytest.mark.parametrize("kind", [np.array, torch.tensor, np.ndarray.tolist])
    def test_padding_and_special_tokens_are_left_out(self, tokenizer, padding, kind):
        assert decode_ids(tokenizer, kind(padded(tokenizer, HYPOTHESES, padding))) == HYPOTHESES

    def test_rows_may_differ_in_length_and_be_empty(self, tokenizer):
        assert decode_ids(tokenizer, [[-100], [], [1, 3, 1], [-100, 3, -100, 4]]) == ["", "", "The", "The ferry"]

    def test_spaces_before_punctuation_stay(self):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, ".": 1}, "a")))
        assert decode_ids(tokenizer, [[0, 1, -100]]) == ["a ."]


class TestComputeMetrics:
    @pytest.mark.parametrize("logits", [np.zeros((3, 12, 30)), (np.zeros((3, 12, 30)), np.zeros((3, 12, 8)))])
    def test_logits_are_refused_with_the_way_out(self, tokenizer, logits):
        with pytest.raises(ValueError, match="predict_with_generate=True"):
            compute_metrics(tokenizer)(EvalPrediction(logits, padded(tokenizer, REFERENCES, -100)))

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
