"""The vocabulary and the token ids: lossless, made once for each content, nothing lost in silence."""

import hashlib
import json
import multiprocessing
import resource
import time
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer

from tasks.translation import data as module
from tasks.translation import tokenizer as tokenizer_module
from tasks.translation.config import TextConfig
from tasks.translation.data import load_translation_data
from tasks.translation.tokenizer import (
    END,
    PAD,
    encode,
    encode_sources,
    load_tokenizer,
    texts_of,
    train_tokenizer,
    vocabulary_digest,
)

ODD_TEXTS = [
    "", " ", "  two  before and after ", "\n", "\r\n\t", "\0", "a\u2028b\x85", "\ufeffa", END, PAD, f"a{PAD}{END}b",
    f" {END} ", "🐌👩‍🚀", "e\u0301 é ﬁ İ", "do n't , it 's .", "Ġ Ċ â", "\U0010ffff",
]  # fmt: skip

WORDS = [
    "low", "lower", "lowest", "new", "newer", "newest", "wide", "wider", "widest", "tief", "tiefer", "neu", "neuer",
]  # fmt: skip
TRAIN = [(f"{a} {b} {a}.", f"{b} {a} {b}!") for a in WORDS for b in WORDS[:4]]
VALIDATION = [("lower low", "tiefer tief"), ("new", "neu")]
TEST = [("widest", "weit"), ("newest low", "neuer tief"), ("low", "tief")]


def write_split(folder, split, pairs):
    folder.mkdir(parents=True, exist_ok=True)
    for language, side in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        (folder / f"{split}.{language}").write_bytes("".join(f"{text}\n" for text in side).encode())


def write_corpus(folder, train=TRAIN, validation=VALIDATION, test=TEST):
    for split, pairs in (("train", train), ("validation", validation), ("test", test)):
        if pairs is not None:
            write_split(folder, split, pairs)
    return folder


def load(folder, **changes):
    options = {"path": folder / "text", "cache_dir": folder / "cache", "vocab_size": 300} | changes
    return load_translation_data(TextConfig(**options))


def ids_of(pairs, tokenizer):
    return [tuple(ids) for ids in zip(*(encode(tokenizer, side) for side in zip(*pairs, strict=True)), strict=True)]


def rows_of(train):
    rows = train.pairs.rows.with_format(None)
    return list(zip(rows["source_ids"], rows["target_ids"], strict=True))


def long_text(tokens):
    """A text of exactly so many tokens, its end among them: digits and letters are never merged with each other."""
    return ("7x" * tokens)[: tokens - 1]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    file = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    train_tokenizer((text for pair in TRAIN for text in pair), 300).save(str(file))
    return file


@pytest.fixture(scope="module")
def saved_folder(vocabulary, tmp_path_factory):
    """A folder as a run deploys it."""
    folder = tmp_path_factory.mktemp("saved")
    load_tokenizer(vocabulary).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizers(vocabulary, saved_folder):
    return {"as trained": load_tokenizer(vocabulary), "as deployed": load_tokenizer(saved_folder)}


@pytest.fixture
def trainings(monkeypatch):
    """Every call of train_tokenizer, by the texts it was given."""
    calls = []

    def counting(texts, vocab_size):
        calls.append(list(texts))
        return train_tokenizer(calls[-1], vocab_size)

    monkeypatch.setattr(module, "train_tokenizer", counting)
    return calls


@pytest.fixture
def tokenizations(tmp_path):
    """Finds every file of token ids in the cache."""
    return lambda: list((tmp_path / "cache").glob("pairs-*.arrow"))


class TestVocabulary:
    @settings(deadline=None)
    @given(st.text())
    def test_any_text_comes_back_as_it_was_with_one_end_and_no_padding(self, tokenizers, text):
        self.check_round_trip(tokenizers, text)

    def check_round_trip(self, tokenizers, text):
        for tokenizer in tokenizers.values():
            (ids,) = encode(tokenizer, [text])
            assert ids[-1] == tokenizer.eos_token_id
            assert ids.count(tokenizer.eos_token_id) == 1
            assert tokenizer.pad_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            assert tokenizer.backend_tokenizer.decode(ids) == text

    @pytest.mark.parametrize("text", ODD_TEXTS)
    def test_so_does_an_odd_one(self, tokenizers, text):
        self.check_round_trip(tokenizers, text)

    @pytest.mark.parametrize("source", ["as trained", "as deployed"])
    def test_a_call_that_pads_and_cuts_leaves_encode_as_it_was(self, tokenizers, source):
        tokenizer = tokenizers[source]
        texts = ["low", "lower new widest low", f"{END}{PAD}"]
        before, digest = encode(tokenizer, texts), vocabulary_digest(tokenizer)
        called = tokenizer(texts, padding=True, truncation=True, max_length=3)["input_ids"]
        assert {len(ids) for ids in called} == {3}
        assert vocabulary_digest(tokenizer) == digest
        tokenizer(texts, padding=True, truncation=True, max_length=3)
        assert encode(tokenizer, texts) == before
        assert len({len(ids) for ids in before}) == 3

    def test_a_source_of_nothing_but_space_has_only_its_end(self, tokenizers):
        tokenizer = tokenizers["as trained"]
        assert encode_sources(tokenizer, ["", " ", "\t\u2028\xa0"]) == [[tokenizer.eos_token_id]] * 3
        assert encode_sources(tokenizer, [" low"]) == encode(tokenizer, [" low"])

    def test_the_size_is_an_upper_bound_that_little_text_does_not_reach(self):
        texts = [text for pair in TRAIN for text in pair]
        assert train_tokenizer(texts, 280).get_vocab_size() == 280
        few = train_tokenizer(texts, 100_000).get_vocab_size()
        assert 280 < few < 1000
        assert train_tokenizer([], 300).get_vocab_size() == 258
        assert train_tokenizer(texts, 258).get_vocab_size() == 258

    def test_special_tokens_come_first_and_bytes_after_them(self, vocabulary):
        ids = Tokenizer.from_file(str(vocabulary)).get_vocab()
        assert (ids[PAD], ids[END]) == (0, 1)
        assert all(len(token) == 1 for token, number in ids.items() if 2 <= number < 258)

    def test_the_digest_tells_apart_what_encodes_differently(self, vocabulary, saved_folder, tmp_path):
        other = tmp_path / "other.json"
        train_tokenizer(["entirely other text"] * 3, 300).save(str(other))
        reads_special_tokens = load_tokenizer(saved_folder)
        reads_special_tokens.split_special_tokens = False
        digests = [
            vocabulary_digest(tokenizer)
            for tokenizer in (load_tokenizer(vocabulary), load_tokenizer(other), reads_special_tokens)
        ]
        assert len(set(digests)) == 3
        assert digests[0] == vocabulary_digest(load_tokenizer(saved_folder))


class TestGivenTokenizer:
    @pytest.mark.parametrize("kind", ["a file", "a folder with that file", "a folder as deployed"])
    def test_a_given_one_is_used_and_none_is_trained(self, tmp_path, vocabulary, saved_folder, trainings, kind):
        given_file = tmp_path / "given" / "tokenizer.json"
        given_file.parent.mkdir()
        given_file.write_bytes(vocabulary.read_bytes())
        given = {
            "a file": given_file, "a folder with that file": given_file.parent, "a folder as deployed": saved_folder,
        }[kind]  # fmt: skip
        write_corpus(tmp_path / "text", [*TRAIN, (f"low {END}", f"{PAD}neu")])
        data = load(tmp_path, tokenizer=given, vocab_size=258)
        assert trainings == []
        assert vocabulary_digest(data.tokenizer) == vocabulary_digest(load_tokenizer(vocabulary))
        assert rows_of(data.train)[-1] == ids_of([(f"low {END}", f"{PAD}neu")], load_tokenizer(vocabulary))[0]
        assert not list((tmp_path / "cache").glob("bpe-*"))

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe\0", b'{"model": 3}'])
    def test_a_broken_file_is_refused_with_its_name(self, tmp_path, content):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"tokenizer must be a tokenizer\.json .*bad\.json cannot be read"):
            load_tokenizer(tmp_path / "bad.json")

    def test_a_missing_file_or_a_folder_without_one_is_refused(self, tmp_path):
        ByT5Tokenizer().save_pretrained(tmp_path / "slow")
        for name, missing in (("none.json", "none.json"), ("slow", "slow/tokenizer.json")):
            with pytest.raises(FileNotFoundError, match=f"tokenizer must be .*{missing} does not exist"):
                load_tokenizer(tmp_path / name)

    @pytest.mark.parametrize(
        ("lacking", "found"),
        [(PAD, f"'{END}' and None"), (END, "None.* and '<pad>'"), ("", f"'{END}', which it does not append, and")],
    )
    def test_a_file_must_have_both_tokens_and_end_sentences(self, tmp_path, vocabulary, lacking, found):
        content = json.loads(vocabulary.read_text(encoding="utf-8"))
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != lacking]
        if lacking:
            content["model"]["vocab"]["other"] = content["model"]["vocab"].pop(lacking)
        if lacking != PAD:
            content["post_processor"] = None
        (tmp_path / "edited.json").write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"must end every sentence .*edited\.json has {found}"):
            load_tokenizer(tmp_path / "edited.json")

    def test_one_whose_padding_is_its_end_is_refused(self, tmp_path, vocabulary):
        tokenizer = load_tokenizer(vocabulary)
        tokenizer.pad_token = END
        tokenizer.save_pretrained(tmp_path / "same")
        with pytest.raises(ValueError, match=r"must end every sentence .*has '</s>' and '</s>'"):
            load_tokenizer(tmp_path / "same")


class TestCacheByContent:
    def test_a_warm_cache_trains_and_tokenizes_nothing_and_gives_the_same(self, tmp_path, trainings, tokenizations):
        write_corpus(tmp_path / "text", [("", "neu"), *TRAIN, (long_text(20), "neu"), (" \u2028", " ")])
        cold = load(tmp_path, max_length=19)
        warm = load(tmp_path, max_length=19)
        assert (len(trainings), len(tokenizations())) == (1, 1)
        assert (cold.train.read, cold.train.empty, cold.train.too_long) == (len(TRAIN) + 3, 2, 1)
        assert (warm.train.read, warm.train.empty, warm.train.too_long) == (len(TRAIN) + 3, 2, 1)
        assert rows_of(warm.train) == rows_of(cold.train) == ids_of(TRAIN, cold.tokenizer)
        assert vocabulary_digest(warm.tokenizer) == vocabulary_digest(cold.tokenizer)
        assert (warm.validation, warm.test) == (cold.validation, cold.test)

    @pytest.mark.parametrize(
        "change", [{"vocab_size": 290}, {"train_limit": 30}, {"source": "de", "target": "en"}], ids=str
    )
    def test_a_setting_that_matters_trains_and_tokenizes_anew(self, tmp_path, trainings, tokenizations, change):
        write_corpus(tmp_path / "text")
        first = load(tmp_path)
        second = load(tmp_path, **change)
        assert (len(trainings), len(tokenizations())) == (2, 2)
        assert rows_of(first.train) != rows_of(second.train)
        assert rows_of(load(tmp_path).train) == rows_of(first.train)
        assert len(trainings) == 2

    def test_a_change_of_the_text_trains_and_tokenizes_anew(self, tmp_path, trainings, tokenizations):
        write_corpus(tmp_path / "text")
        load(tmp_path)
        changed = [*TRAIN[:-1], ("other words", "andere Worte")]
        write_corpus(tmp_path / "text", changed)
        data = load(tmp_path)
        assert (len(trainings), len(tokenizations())) == (2, 2)
        assert rows_of(data.train) == ids_of(changed, data.tokenizer)

    def test_an_unrelated_setting_or_another_place_of_the_text_does_not(self, tmp_path, trainings, tokenizations):
        write_corpus(tmp_path / "text")
        write_corpus(tmp_path / "moved" / "text")
        load(tmp_path)
        load(tmp_path, test_split="validation", validation_split="test", subset="any")
        load(tmp_path, path=tmp_path / "moved" / "text")
        assert (len(trainings), len(tokenizations())) == (1, 1)

    def test_another_max_length_tokenizes_anew_with_the_same_vocabulary(self, tmp_path, trainings, tokenizations):
        write_corpus(tmp_path / "text", [*TRAIN, (long_text(40), "neu")])
        assert load(tmp_path, max_length=40).train.too_long == 0
        assert load(tmp_path, max_length=39).train.too_long == 1
        assert (len(trainings), len(tokenizations())) == (1, 2)

    def test_another_reading_of_special_tokens_tokenizes_anew(self, tmp_path, vocabulary, saved_folder, tokenizations):
        write_corpus(tmp_path / "text", [(f"low {END}", "neu")])
        settings_file = tmp_path / "reads" / "tokenizer_config.json"
        settings_file.parent.mkdir()
        (tmp_path / "reads" / "tokenizer.json").write_bytes((saved_folder / "tokenizer.json").read_bytes())
        content = json.loads((saved_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings_file.write_text(json.dumps(content | {"split_special_tokens": False}), encoding="utf-8")
        as_text = rows_of(load(tmp_path, tokenizer=vocabulary).train)
        as_token = rows_of(load(tmp_path, tokenizer=settings_file.parent).train)
        assert as_text[0][0].count(1) == 1
        assert as_token[0][0].count(1) == 2
        assert len(tokenizations()) == 2

    def test_the_vocabulary_is_trained_on_both_sides_of_the_training_pairs_and_nothing_else(self, tmp_path, trainings):
        write_corpus(tmp_path / "text")
        load(tmp_path)
        assert sorted(trainings[0]) == sorted(text for pair in TRAIN for text in pair)


# ---- several processes


def load_in_a_process(rank, folder, barrier, results):
    """Report what this process trained, then what it sees in the shared cache and in one of its own."""
    trained = []
    real = module.train_tokenizer

    def noting(texts, vocab_size):
        trained.append(rank)
        time.sleep(0.5)  # long enough for the others to come along
        return real(texts, vocab_size)

    module.train_tokenizer = noting
    barrier.wait(120)
    shared, shared_trainings = load(folder, max_length=19), len(trained)
    own = load(folder, max_length=19, cache_dir=folder / f"cache_{rank}")
    seen = [
        (data.train.described(), hashlib.sha256(repr(rows_of(data.train)).encode()).hexdigest(),
         vocabulary_digest(data.tokenizer), data.test.source_ids)
        for data in (shared, own)
    ]  # fmt: skip
    results.put((rank, shared_trainings, seen))


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Fresh interpreters with different hash seeds, at once; what each of them reported."""
    folder = tmp_path_factory.mktemp("processes")
    write_corpus(folder / "text", [("", "neu"), *TRAIN, (long_text(20), "neu")])
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    started = [context.Process(target=load_in_a_process, args=(rank, folder, barrier, results)) for rank in range(2)]
    try:
        with pytest.MonkeyPatch.context() as environment:
            for rank, process in enumerate(started):
                environment.setenv("PYTHONHASHSEED", str(rank + 1))
                process.start()
        reports = sorted(results.get(timeout=150) for _ in started)
        for process in started:
            process.join(30)
            assert process.exitcode == 0
    finally:
        for process in started:
            process.kill()
    return reports


@pytest.mark.multiprocess
def test_of_several_processes_at_once_one_trains(processes):
    assert sum(trainings for _, trainings, _ in processes) == 1


@pytest.mark.multiprocess
def test_every_process_sees_the_same_pairs_counts_and_vocabulary(processes):
    first = processes[0][2][0]
    left_out = "1 with an empty side and 1 longer than max_length"
    assert first[0] == f"{len(TRAIN)} training pairs (left out of {len(TRAIN) + 2}: {left_out})"
    assert [seen for _, _, both in processes for seen in both] == [first] * 2 * len(processes)


# ---- what is left out


class TestLeftOut:
    @pytest.mark.parametrize("nothing", ["", " ", "\t \u2028\xa0", "\x0b"])
    @pytest.mark.parametrize("side", [0, 1])
    def test_a_pair_with_an_empty_side_is_left_out_whole_and_its_neighbors_stay_together(self, tmp_path, nothing, side):
        empty = [nothing, "full"] if side == 0 else ["full", nothing]
        write_corpus(tmp_path / "text", [TRAIN[0], tuple(empty), TRAIN[1], tuple(empty), *TRAIN[2:]])
        data = load(tmp_path)
        assert rows_of(data.train) == ids_of(TRAIN, data.tokenizer)
        assert data.train.empty == 2
        assert data.train.too_long == 0
        assert data.train.read == len(TRAIN) + 2
        assert data.train.described().endswith(f" pairs (left out of {len(TRAIN) + 2}: 2 with an empty side)")

    @pytest.mark.parametrize("side", [0, 1])
    def test_a_pair_of_300_tokens_is_left_out_whole_and_one_of_256_is_not(self, tmp_path, side):
        def pair(tokens):
            return (long_text(tokens), "neu") if side == 0 else ("new", long_text(tokens))

        write_corpus(tmp_path / "text", [TRAIN[0], pair(300), TRAIN[1], pair(256), pair(257), *TRAIN[2:]])
        data = load(tmp_path)
        assert rows_of(data.train) == ids_of([*TRAIN[:2], pair(256), *TRAIN[2:]], data.tokenizer)
        lengths = (data.train.source_lengths, data.train.target_lengths)[side]
        assert lengths.max() == 256
        assert (data.train.read, data.train.empty, data.train.too_long) == (len(TRAIN) + 3, 0, 2)
        assert data.train.described().endswith(f" pairs (left out of {len(TRAIN) + 3}: 2 longer than max_length)")

    def test_nothing_left_out_is_not_mentioned(self, tmp_path):
        write_corpus(tmp_path / "text")
        assert load(tmp_path).train.described() == f"{len(TRAIN)} training pairs"

    @pytest.mark.parametrize("split", ["validation", "test"])
    def test_an_evaluation_split_is_whole_in_order_and_uncut(self, tmp_path, split):
        pairs = [("", "neu"), ("low", ""), (long_text(300), long_text(400)), (" ", "\t"), ("low", "neu")] + TEST[:1] * 2
        write_corpus(tmp_path / "text", **{split: pairs})
        data = load(tmp_path)
        found = getattr(data, split)
        assert len(found) == 7
        assert found.name == split
        assert list(zip(found.sources, found.references, strict=True)) == pairs
        assert found.source_ids == encode_sources(data.tokenizer, [source for source, _ in pairs])
        assert found.target_ids == encode(data.tokenizer, [target for _, target in pairs])
        assert [len(found.source_ids[row]) for row in (0, 2, 3)] == [1, 300, 1]
        assert len(found.target_ids[2]) == 400
        assert data.train.described() == f"{len(TRAIN)} training pairs", "only training pairs are counted"

    @pytest.mark.parametrize(
        ("pairs", "left_out"),
        [
            ([("", "neu"), (" ", " ")], "left out of 2: 2 with an empty side"),
            (
                [("", "neu"), (long_text(300), "neu")],
                "left out of 2: 1 with an empty side and 1 longer than max_length",
            ),
        ],
    )
    def test_training_pairs_that_are_all_left_out_are_an_error_that_says_why(self, tmp_path, pairs, left_out):
        write_corpus(tmp_path / "text", pairs)
        for _ in ("cold", "warm"):
            with pytest.raises(ValueError, match=rf"needs at least one pair; .*text.* 0 training pairs \({left_out}\)"):
                load(tmp_path)

    def test_a_train_limit_takes_the_first_pairs_for_vocabulary_and_training(self, tmp_path, trainings):
        write_corpus(tmp_path / "text", [("", "neu"), *TRAIN])
        data = load(tmp_path, train_limit=5)
        assert rows_of(data.train) == ids_of(TRAIN[:4], data.tokenizer)
        assert (data.train.read, data.train.empty) == (5, 1)
        assert sorted(trainings[0]) == sorted(["", "neu", *(text for pair in TRAIN[:4] for text in pair)])
        assert len(load(tmp_path, train_limit=10_000).train.pairs) == len(TRAIN)


# ---- lengths, and where the ids are


class TestTokenIds:
    def test_more_rows_than_one_batch_keep_their_order_and_their_lengths(self, tmp_path):
        pairs = [(WORDS[row % 13] * (1 + row % 7), WORDS[row % 11] * (1 + row % 5)) for row in range(10_003)]
        write_corpus(tmp_path / "text", pairs)
        data = load(tmp_path)
        source, target = (encode(data.tokenizer, side) for side in zip(*pairs, strict=True))
        assert len(data.train.pairs) == 10_003
        assert data.train.source_lengths.tolist() == [len(ids) for ids in source]
        assert data.train.target_lengths.tolist() == [len(ids) for ids in target]
        chosen = [10_002, 0, 9_999, 10_000, 5]
        read = data.train.pairs.__getitems__(chosen)
        assert [ids.tolist() for ids in read["source_ids"]] == [source[row] for row in chosen]
        assert [ids.tolist() for ids in read["target_ids"]] == [target[row] for row in chosen]

    def test_ids_are_mapped_from_the_cache_folder(self, tmp_path):
        write_corpus(tmp_path / "text")
        (file,) = load(tmp_path).train.pairs.rows.cache_files
        assert Path(file["filename"]).parent == tmp_path / "cache"

    def test_a_word_that_no_language_has_does_not_hold_up_the_vocabulary(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tokenizer_module, "_ROWS_AT_A_TIME", 3)
        words, word = "ab " * 10_000, "ab" * 5_000
        write_corpus(tmp_path / "text", [*TRAIN, (words, f"a {word} b"), (word[:-1], "kurz")])
        rows = module.open_text(TextConfig(path=tmp_path / "text", cache_dir=tmp_path / "cache")).splits["train"]
        known = [text for pair in TRAIN for text in pair]
        assert sorted(texts_of(rows)) == sorted([*known, words, word[:-1], "kurz"])


# ---- which split is which


class TestSplits:
    def test_the_usual_other_names_are_found(self, tmp_path):
        for split, pairs in (("training", TRAIN), ("dev", VALIDATION), ("testing", TEST)):
            write_split(tmp_path / "text", split, pairs)
        data = load(tmp_path)
        assert len(data.train.pairs) == len(TRAIN)
        assert (data.validation.name, data.test.name) == ("dev", "testing")
        assert data.test.sources == [source for source, _ in TEST]

    def test_a_split_can_be_named(self, tmp_path):
        write_corpus(tmp_path / "text")
        write_split(tmp_path / "text", "dev", [("wide", "weit")])
        data = load(tmp_path, validation_split="dev", test_split="validation")
        assert (data.validation.name, data.test.name) == ("dev", "validation")
        assert data.validation.sources == ["wide"]
        assert data.test.sources == [source for source, _ in VALIDATION]

    @pytest.mark.parametrize(
        ("lacking", "way_out"),
        [
            ("validation", r"set data\.validation_split to another split"),
            ("test", r"set data\.test_split to another split"),
            ("train", "Training needs one"),
        ],
    )
    def test_a_lacking_split_is_named_with_those_that_are_there(self, tmp_path, lacking, way_out):
        write_corpus(tmp_path / "text", **{lacking: None})
        with pytest.raises(ValueError, match=rf"no split named '{lacking}'; found .*{way_out}") as raised:
            load(tmp_path)
        for name in {"train", "validation", "test"} - {lacking}:
            assert f"'{name}'" in str(raised.value)

    @pytest.mark.parametrize("kind", ["validation", "test"])
    @pytest.mark.parametrize("name", ["train", "newstest"])
    def test_neither_training_data_nor_an_absent_split_is_evaluated_on(self, tmp_path, kind, name):
        write_corpus(tmp_path / "text")
        words = rf"data\.{kind}_split must be .* other than the training one; got '{name}', found .*'train'"
        with pytest.raises(ValueError, match=words):
            load(tmp_path, **{f"{kind}_split": name})

    def test_training_data_by_its_other_name_is_not_evaluated_on(self, tmp_path):
        write_corpus(tmp_path / "text", train=None)
        write_split(tmp_path / "text", "training", TRAIN)
        with pytest.raises(ValueError, match="got 'training'"):
            load(tmp_path, test_split="training")


class TestErrorsOfTheCorpus:
    @pytest.mark.parametrize("folder", ["file", "file/below"])
    def test_a_cache_that_cannot_be_written(self, tmp_path, folder):
        write_corpus(tmp_path / "text")
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match=rf"must be written to .*/{folder}; .*data\.cache_dir"):
            load(tmp_path, cache_dir=tmp_path / folder)

    def test_a_disk_that_is_full_of_the_vocabulary(self, tmp_path):
        write_corpus(tmp_path / "text")
        load(tmp_path)  # from now on only the vocabulary is new
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
            with pytest.raises(OSError, match=r"must be written to .*/cache; .*data\.cache_dir"):
                load(tmp_path, train_limit=4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- held-out and cut pairs


@pytest.mark.parametrize(("fraction", "held_out"), [(0.25, range(3, 52, 4)), (0.01, None), (0.5, range(1, 52, 2))])
def test_evenly_spaced_training_pairs_are_held_out_for_validation(tmp_path, fraction, held_out):
    write_corpus(tmp_path / "text", validation=None)
    if held_out is None:
        with pytest.raises(
            ValueError, match=r"validation_fraction must hold out at least one pair; 0\.01 of 52 .*none"
        ):
            load(tmp_path, validation_fraction=fraction)
        return
    found = load(tmp_path, validation_fraction=fraction)
    assert list(zip(found.validation.sources, found.validation.references, strict=True)) == [TRAIN[i] for i in held_out]
    rest = [pair for row, pair in enumerate(TRAIN) if row not in held_out]
    assert rows_of(found.train) == ids_of(rest, found.tokenizer)
    assert found.train.read == len(rest)


def test_every_hundredth_of_many_pairs_is_held_out():
    _, held_out = module.hold_out(Dataset.from_dict({"row": list(range(20_050))}), 0.01)
    assert held_out["row"] == list(range(99, 20_050, 100))


def test_held_out_pairs_and_a_named_split_exclude_each_other():
    with pytest.raises(ValueError, match=r"validation_fraction holds out .* got both, 0\.01 and 'dev'\. Leave one out"):
        TextConfig(validation_fraction=0.01, validation_split="dev")


def test_long_sides_are_cut_to_their_first_tokens_and_their_end(tmp_path):
    pairs = [(long_text(12), "neu"), ("new", long_text(11)), (long_text(10), "neu"), ("", long_text(12))]
    write_corpus(tmp_path / "text", train=[*TRAIN, *pairs])
    left_out = load(tmp_path, max_length=10)
    cut = load(tmp_path, max_length=10, truncation=True)
    whole = ids_of([*TRAIN, *pairs[:3]], cut.tokenizer)
    expected = [tuple(ids if len(ids) <= 10 else [*ids[:9], ids[-1]] for ids in pair) for pair in whole]
    assert rows_of(cut.train) == expected
    assert (left_out.train.too_long, cut.train.too_long) == (2, 2)
    assert "(left out of 56: 1 with an empty side) (cut: 2 longer than max_length)" in cut.train.described()
    assert "(left out of 56: 1 with an empty side and 2 longer than max_length)" in left_out.train.described()
