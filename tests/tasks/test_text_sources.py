"""Parallel text as it is met in the field: ends of lines, encodings, pairs, columns and splits."""

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.translation import sources as module
from tasks.translation.grammar import grammar_splits
from tasks.translation.sources import Direction, decode_line, open_corpus, read_lines, read_pairs
from tests.selection import real_data

# All that str.splitlines takes for the end of a line, with "\n" left out.
OTHER_BREAKS = "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"

EN = ["The ferry leaves at nine.", "", "A mill\u2028by the water.", "She lost it.\x85"]
DE = ["Die Fähre geht um neun.", "Nichts.", "Eine Mühle\x0b am Wasser.", "Sie verlor ihn."]


def write_bytes(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_lines(path, lines):
    return write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


def write_text_split(folder, split="train", sources=EN, targets=DE):
    write_lines(folder / f"{split}.en", sources)
    write_lines(folder / f"{split}.de", targets)
    return folder


def write_json(path, rows):
    return write_lines(path, [json.dumps(row, ensure_ascii=False) for row in rows])


def write_parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def translations(sources=EN, targets=DE):
    return [{"en": source, "de": target} for source, target in zip(sources, targets, strict=True)]


def pairs_of(corpus, split="train"):
    rows = corpus.splits[split]
    return list(zip(rows["source"], rows["target"], strict=True))


PAIRS = list(zip(EN, DE, strict=True))


@pytest.fixture
def opened(tmp_path):
    """Open a path, or a name, with a cache of the test's own."""

    def open_(path=None, name=None, subset=None, invalid_utf8="error", **direction):
        return open_corpus(
            name, path, Direction(**direction), cache_dir=tmp_path / "cache", subset=subset, invalid_utf8=invalid_utf8
        )

    return open_


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("lines") / "lines.txt"


texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\n") | st.sampled_from(OTHER_BREAKS + "\0")
)


class TestLines:
    @given(lines=st.lists(texts.filter(lambda line: not line.endswith("\r"))))
    def test_lines_written_with_newlines_come_back(self, scratch, lines):
        # A byte order mark at the very start is the file's, so it takes one to keep a first character that is one.
        scratch.write_bytes("\ufeff".encode() + "".join(f"{line}\n" for line in lines).encode())
        assert list(read_lines(scratch)) == lines

    @given(lines=st.lists(texts))
    def test_with_crlf_too(self, scratch, lines):
        scratch.write_bytes("\ufeff".encode() + "".join(f"{line}\r\n" for line in lines).encode())
        assert list(read_lines(scratch)) == lines

    @pytest.mark.parametrize(
        ("content", "lines"),
        [
            (b"", []),
            (b"\n", [""]),
            (b"a", ["a"]),
            (b"a\nb", ["a", "b"]),
            (b"a\n\n", ["a", ""]),
            (b"a\r\nb\r", ["a", "b"]),
            (b"a\r\r\n", ["a\r"]),
            (b"a\rb\n", ["a\rb"]),
            (b" a\t\n", [" a\t"]),
            (b"a\0b\n\0\n", ["a\0b", "\0"]),
            (b"\xef\xbb\xbf", []),
            (b"\xef\xbb\xbf\n", [""]),
            (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        ],
    )
    def test_ends_and_marks(self, tmp_path, content, lines):
        assert list(read_lines(write_bytes(tmp_path / "train.en", content))) == lines

    def test_bytes_that_are_not_utf8(self, tmp_path):
        file = write_bytes(tmp_path / "train.de", "gut\nM\xfchle\n".encode("latin-1"))
        with pytest.raises(
            ValueError, match=r"train\.de must be UTF-8; line 2 has byte 0xfc at position 1.*invalid_utf8"
        ):
            list(read_lines(file))
        assert list(read_lines(file, "replace")) == ["gut", "M\ufffdhle"]

    @pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
    @pytest.mark.parametrize("errors", ["strict", "replace"])
    def test_utf16(self, tmp_path, encoding, errors):
        file = write_bytes(tmp_path / "train.en", "\ufeffa\n".encode(encoding))
        with pytest.raises(ValueError, match=r"train\.en must be UTF-8, but starts like UTF-16"):
            list(read_lines(file, errors))

    def test_lines_of_a_stream(self):
        assert decode_line("\ufeffä\u2028\r\n".encode(), "standard input", 1) == "ä\u2028"
        assert decode_line("\ufeffä".encode(), "standard input", 2) == "\ufeffä"
        with pytest.raises(ValueError, match="standard input must be UTF-8; line 7 has byte 0xff"):
            decode_line(b"\xff\n", "standard input", 7)

    def test_memory_does_not_grow_with_the_file(self, tmp_path):
        file = write_lines(tmp_path / "train.en", ["x" * 200] * 20_000)
        tracemalloc.start()
        try:
            assert sum(1 for _ in read_pairs(file, file)) == 20_000
            assert tracemalloc.get_traced_memory()[1] < 500_000
        finally:
            tracemalloc.stop()


class TestPairs:
    @pytest.mark.parametrize(("english", "german"), [(5, 6), (6, 5), (0, 1)])
    def test_unequal_counts(self, tmp_path, english, german):
        write_text_split(tmp_path, "train", ["a"] * english, ["b"] * german)
        with pytest.raises(ValueError, match=rf"train\.en has {english}, .*train\.de has {german}\."):
            list(read_pairs(tmp_path / "train.en", tmp_path / "train.de"))


class TestJsonLines:
    @pytest.fixture
    def read(self, tmp_path, opened):
        """The pairs of a file with these bytes."""
        return lambda content, **options: pairs_of(opened(write_bytes(tmp_path / "a.jsonl", content), **options))

    def test_only_newlines_end_an_object_and_blank_lines_hold_nothing(self, read):
        content = '\ufeff{"en": "a\u2028b\x85c", "de": "d"}\r\n\n \t\r\n{"en": "\\n", "de": "e"}\n\n'.encode()
        assert read(content) == [("a\u2028b\x85c", "d"), ("\n", "e")]

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ('{"en": "a"', r"line 3 is not JSON"),
            ('{"en": "a"} {"en": "b"}', r"line 3 is not JSON"),
            ("\xa0", r"line 3 is not JSON"),
            ('[{"en": "a"}]', "line 3 has a list"),
            ("null", "line 3 has a NoneType"),
            ('{"en": 3, "de": "b"}', "'en' must hold text or null; got int in .*line 3"),
            ('{"en": "b"}', "line 3 must have 'de' like the first row; it has en"),
            (r'{"en": "a", "de": "a\ud83db"}', "line 3 must be Unicode; 'de' .*invalid_utf8"),
        ],
    )
    def test_what_a_line_must_hold(self, read, line, problem):
        with pytest.raises(ValueError, match=problem):
            read(f'{{"en": "a", "de": "b"}}\n\n{line}\n'.encode())

    def test_half_a_surrogate_pair_is_replaced_on_demand(self, read):
        content = rb'{"en": "\ud83d\ude00", "de": "a\ud83db"}'
        assert read(content, invalid_utf8="replace") == [("\U0001f600", "a\ufffdb")]

    def test_null_is_an_empty_text(self, read):
        rows = [
            {"translation": None},
            {"translation": {"en": None, "de": "b"}},
            {"translation": {"en": "c", "de": "d"}},
        ]
        assert read("\n".join(map(json.dumps, rows)).encode()) == [("", ""), ("", "b"), ("c", "d")]


class TestLocalFiles:
    def test_pairs_of_text_files(self, tmp_path, opened):
        write_text_split(tmp_path / "data")
        write_text_split(tmp_path / "data", "valid", ["a"], ["b"])
        write_text_split(tmp_path / "data", "test_2016", ["c"], ["d"])
        write_lines(tmp_path / "data" / "train.fr", ["une ligne"])
        write_lines(tmp_path / "data" / "newstest.en", ["no split's name"])
        corpus = opened(tmp_path / "data")
        assert set(corpus.splits) == {"train", "valid", "test"}
        assert pairs_of(corpus) == PAIRS
        assert pairs_of(corpus, "test") == [("c", "d")]
        assert corpus.splits["train"].column_names == ["source", "target"]
        assert corpus.splits["train"].features == datasets.Features(
            source=datasets.Value("string"), target=datasets.Value("string")
        )
        assert str(tmp_path / "data") in corpus.origin

    def test_the_other_direction(self, tmp_path, opened):
        write_text_split(tmp_path / "data")
        assert pairs_of(opened(tmp_path / "data", source="de", target="en")) == list(zip(DE, EN, strict=True))

    def test_a_path_wins_over_a_name(self, tmp_path, opened):
        write_text_split(tmp_path / "data")
        assert pairs_of(opened(tmp_path / "data", "grammar")) == PAIRS

    def test_shards_are_paired_by_name_and_joined_in_order(self, tmp_path, opened):
        write_text_split(tmp_path / "data", "train.b.clean", ["3"], ["drei"])
        write_text_split(tmp_path / "data", "train.a.clean", ["1", "2"], ["eins", "zwei"])
        assert pairs_of(opened(tmp_path / "data")) == [("1", "eins"), ("2", "zwei"), ("3", "drei")]

    def test_a_folder_per_split(self, tmp_path, opened):
        write_text_split(tmp_path / "data" / "train", "europarl")
        write_text_split(tmp_path / "data" / "test", "news", ["a"], ["b"])
        assert pairs_of(opened(tmp_path / "data"), "test") == [("a", "b")]

    @pytest.mark.parametrize("nested", [False, True])
    def test_what_datasets_saved(self, tmp_path, opened, nested):
        cells = {"translation": [{"en": en, "de": de} for en, de in PAIRS]} if nested else {"en": EN, "de": DE}
        saved = datasets.DatasetDict(train=datasets.Dataset.from_dict(cells), test=datasets.Dataset.from_dict(cells))
        saved.save_to_disk(tmp_path / "data")
        corpus = opened(tmp_path / "data")
        assert set(corpus.splits) == {"train", "test"}
        assert pairs_of(corpus, "test") == pairs_of(corpus) == PAIRS

    def test_a_tokenised_copy_beside_the_text_is_no_shard_of_it(self, tmp_path, opened):
        write_text_split(tmp_path / "data")
        write_text_split(tmp_path / "data", "train.tok")
        with pytest.raises(
            ValueError,
            match=r"train\.en is named like a whole split, but train\.tok\.en of the",
        ):
            opened(tmp_path / "data")

    def test_a_folder_of_parts_and_a_hidden_copy(self, tmp_path, opened):
        (tmp_path / "data" / "train.parquet").mkdir(parents=True)
        pq.write_table(pa.table({"en": EN, "de": DE}), tmp_path / "data" / "train.parquet" / "part-00000.parquet")
        write_text_split(tmp_path / "data" / ".ipynb_checkpoints", "train-checkpoint")
        assert pairs_of(opened(tmp_path / "data")) == PAIRS

    @pytest.mark.parametrize("lacking", ["train.b.de", "train.b.en"])
    def test_a_missing_partner(self, tmp_path, opened, lacking):
        write_text_split(tmp_path / "data", "train.a")
        write_text_split(tmp_path / "data", "train.b")
        (tmp_path / "data" / lacking).unlink()
        with pytest.raises(ValueError, match=rf"must come in pairs.*there is no .*/{lacking}\. .*data\.source"):
            opened(tmp_path / "data")

    def test_a_missing_language(self, tmp_path, opened):
        write_text_split(tmp_path / "data")
        with pytest.raises(ValueError, match=r"there is no .*/train\.fr\."):
            opened(tmp_path / "data", target="fr")

    def test_bytes_that_are_not_utf8(self, tmp_path, opened):
        write_text_split(tmp_path / "data", sources=["a", "b"], targets=["c", "d"])
        (tmp_path / "data" / "train.de").write_bytes(b"\xfc\nd\n")
        with pytest.raises(ValueError, match=r"train\.de must be UTF-8; line 1 has"):
            opened(tmp_path / "data")
        replaced = opened(tmp_path / "data", invalid_utf8="replace")
        assert pairs_of(replaced) == [("a", "\ufffd"), ("b", "d")]
        with pytest.raises(ValueError, match=r"train\.de must be UTF-8"):  # not what was cached
            opened(tmp_path / "data")
        shutil.copy(tmp_path / "data" / "train.en", tmp_path / "data" / "test.en")
        shutil.copy(tmp_path / "data" / "train.de", tmp_path / "data" / "test.de")
        with pytest.raises(ValueError, match=r"test\.de must be UTF-8"):  # text that is scored must not change
            opened(tmp_path / "data", invalid_utf8="replace")

    @pytest.mark.parametrize("file", ["train.jsonl", "train.json"])
    def test_json_lines(self, tmp_path, opened, file):
        write_json(tmp_path / "data" / file, [{"translation": row} for row in translations()])
        assert pairs_of(opened(tmp_path / "data")) == PAIRS
        assert pairs_of(opened(tmp_path / "data" / file)) == PAIRS

    def test_parquet_with_translations(self, tmp_path, opened):
        write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", translation=translations()[:1])
        write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", translation=translations()[1:])
        write_parquet(tmp_path / "data" / "test.parquet", translation=translations(["a"], ["b"]))
        corpus = opened(tmp_path / "data")
        assert pairs_of(corpus) == PAIRS
        assert pairs_of(corpus, "test") == [("a", "b")]
        assert pairs_of(opened(tmp_path / "data" / "test.parquet")) == [("a", "b")]

    @pytest.mark.parametrize(
        "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
    )
    def test_every_kind_of_text_column(self, tmp_path, opened, kind):
        write_parquet(tmp_path / "data" / "train.parquet", id=[1, 2, 3, 4], en=pa.array(EN, kind), de=pa.array(DE))
        write_parquet(
            tmp_path / "data" / "test.parquet",
            translation=pa.StructArray.from_arrays([pa.array(DE, kind), pa.array(EN, kind)], ["de", "en"]),
        )
        corpus = opened(tmp_path / "data")
        assert pairs_of(corpus) == pairs_of(corpus, "test") == PAIRS

    def test_rows_are_kept_one_for_one(self, tmp_path, opened):
        sources = ["", "a\nb", None, " ", "a\nb"] * 5000
        write_parquet(tmp_path / "data" / "train.parquet", en=sources, de=[str(i) for i in range(25_000)])
        expected = [(source or "", str(row)) for row, source in enumerate(sources)]
        assert pairs_of(opened(tmp_path / "data")) == expected

    def test_parquet_text_that_is_not_utf8(self, tmp_path, opened):
        write_parquet(
            tmp_path / "data" / "train.parquet", en=pa.array([b"\xfcb", None, b"c"]).view(pa.string()), de=["d"] * 3
        )
        with pytest.raises(ValueError, match=r"train\.parquet must be UTF-8.*invalid_utf8"):
            opened(tmp_path / "data")
        replaced = opened(tmp_path / "data", invalid_utf8="replace")
        assert replaced.splits["train"]["source"][:] == ["\ufffdb", "", "c"]

    def test_memory_does_not_grow_with_the_parquet_file(self, tmp_path):
        text = pa.array([os.urandom(100).hex() for _ in range(50_000)])
        file = write_parquet(tmp_path / "train.parquet", en=text, de=text)
        before = pa.total_allocated_bytes()
        rows = module.find_local(file, Direction())[0]["train"].read("strict")
        assert max(pa.total_allocated_bytes() for _ in rows) - before < 8_000_000 < text.nbytes

    def test_several_kinds_for_one_split(self, tmp_path, opened):
        write_text_split(tmp_path / "data")
        write_parquet(tmp_path / "data" / "test.parquet", en=["a"], de=["b"])
        assert set(opened(tmp_path / "data").splits) == {"train", "test"}
        write_parquet(tmp_path / "data" / "train.parquet", en=["a"], de=["b"])
        with pytest.raises(ValueError, match=r"one kind of file; 'train' in .* is both train\.parquet and train\.en\."):
            opened(tmp_path / "data")

    def test_nothing_to_open(self, tmp_path, opened):
        with pytest.raises(FileNotFoundError, match=r"data\.path must exist; got .*absent\. Expected train\*\.parquet"):
            opened(tmp_path / "absent")
        (tmp_path / "data").mkdir()
        with pytest.raises(
            ValueError, match=r"No splits in .*data; found nothing\. Expected.*train\*\.en and train\*\.de"
        ):
            opened(tmp_path / "data")
        write_lines(tmp_path / "data" / "newstest.en", EN)
        with pytest.raises(ValueError, match=r"found newstest\.en\. Expected"):
            opened(tmp_path / "data")
        with pytest.raises(ValueError, match=r"must end in \.parquet, \.jsonl, \.json; got .*newstest\.en"):
            opened(tmp_path / "data" / "newstest.en")
        with pytest.raises(ValueError, match=r"data\.name .* or data\.path; got neither"):
            opened()

    @pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
    def test_an_empty_split(self, tmp_path, opened, kind):
        write_text_split(tmp_path / "data")
        if kind == "text":
            write_text_split(tmp_path / "data", "test", [], [])
        elif kind == "jsonl":
            write_lines(tmp_path / "data" / "test.jsonl", [""])
        else:
            write_parquet(
                tmp_path / "data" / "test.parquet", en=pa.array([], pa.string()), de=pa.array([], pa.string())
            )
        with pytest.raises(ValueError, match=r"must have rows .* in split 'test' of files in .*data"):
            opened(tmp_path / "data")

    def test_unreadable_parquet(self, tmp_path, opened):
        write_bytes(tmp_path / "data" / "train.parquet", b"version https://git-lfs.github.com/spec/v1")
        with pytest.raises(ValueError, match=r"train\.parquet must be a readable parquet file"):
            opened(tmp_path / "data")

    def test_splits_are_mapped_from_the_cache_and_converted_once(self, tmp_path, opened, monkeypatch):
        write_text_split(tmp_path / "data")
        (file,) = opened(tmp_path / "data").splits["train"].cache_files
        assert tmp_path / "cache" in Path(file["filename"]).parents
        monkeypatch.setattr(module, "read_pairs", None)
        assert pairs_of(opened(tmp_path / "data")) == PAIRS


class TestColumns:
    def test_named_columns(self, tmp_path, opened):
        file = write_parquet(tmp_path / "train.parquet", text=EN, label=DE, en=DE, de=DE)
        assert pairs_of(opened(file, source_column="text", target_column="label")) == PAIRS
        assert pairs_of(opened(file, source_column="text")) == PAIRS

    @pytest.mark.parametrize(
        ("columns", "direction", "words"),
        [
            ({"text": EN, "label": DE}, {}, r"source .* none is named 'en' in .*train\.parquet: text, label\. Set"),
            (
                {"text": EN, "label": DE},
                {"source_column": "text", "target_column": "no"},
                "target .* none is named 'no'",
            ),
            ({"translation": translations()}, {"target": "fr"}, r"'fr' .*translation has en, de\)\. Set data\.target"),
        ],
    )
    def test_no_column_by_this_name(self, tmp_path, opened, columns, direction, words):
        with pytest.raises(ValueError, match=words):
            opened(write_parquet(tmp_path / "train.parquet", **columns), **direction)

    @pytest.mark.parametrize("cells", [[1, 2], [b"a", b"b"], [["a"], ["b"]], [{"text": "a"}, {"text": "b"}]], ids=str)
    def test_columns_that_are_not_text(self, tmp_path, opened, cells):
        file = write_parquet(tmp_path / "train.parquet", en=cells, de=["a", "b"])
        with pytest.raises(
            ValueError, match=r"Column 'en' must hold text or null; got .* in .*train\.parquet\. Set data"
        ):
            opened(file)

    def test_translations_that_are_not_text(self, tmp_path, opened):
        file = write_parquet(tmp_path / "train.parquet", translation=[{"en": 1, "de": "a"}])
        with pytest.raises(ValueError, match=r"Column 'translation\.en' must hold text or null; got int"):
            opened(file)

    def test_null_translations_are_empty(self, tmp_path, opened):
        file = write_parquet(tmp_path / "train.parquet", translation=[None, {"en": "a", "de": None}, *translations()])
        assert pairs_of(opened(file)) == [("", ""), ("a", ""), *PAIRS]

    @pytest.mark.parametrize("nulls", [pa.nulls(3), pa.nulls(3, pa.string())], ids=lambda nulls: str(nulls.type))
    def test_a_side_that_is_all_null(self, tmp_path, opened, nulls):
        file = write_parquet(tmp_path / "train.parquet", en=["a", "b", "c"], de=nulls)
        with pytest.raises(ValueError, match=r"the target has none in split 'train' of .*target_column"):
            opened(file)


class TestFingerprint:
    def test_a_copy_elsewhere_has_the_same_in_another_process(self, tmp_path, opened):
        first = write_text_split(tmp_path / "first")
        shutil.copytree(first, tmp_path / "second")
        fingerprint = opened(first).fingerprint
        assert int(fingerprint, 16) >= 0
        command = "import sys; from pathlib import Path; from tasks.translation.sources import *; "
        command += "print(open_corpus(None, Path(sys.argv[1]), Direction(), cache_dir=Path(sys.argv[2])).fingerprint)"
        arguments = [sys.executable, "-c", command, tmp_path / "second", tmp_path / "other_cache"]
        found = subprocess.run(arguments, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
        assert found.stdout.split() == [fingerprint]

    def test_whatever_changes_the_rows_changes_it(self, tmp_path, opened):
        folder = write_text_split(write_text_split(tmp_path / "data"), "test")
        seen = [opened(folder).fingerprint, opened(folder, source="de", target="en").fingerprint]
        write_text_split(folder, "test", EN, [*DE[:-1], "Sie verlor sie."])
        seen.append(opened(folder).fingerprint)
        write_text_split(folder, "test", EN, [*DE[:-1], "Sie verlor sie.\r"])
        seen.append(opened(folder).fingerprint)
        (folder / "test.en").rename(folder / "valid.en")
        (folder / "test.de").rename(folder / "valid.de")
        seen.append(opened(folder).fingerprint)
        for file in folder.glob("valid.*"):
            file.unlink()
        seen.append(opened(folder).fingerprint)
        assert len(set(seen)) == len(seen)

    def test_the_cut_between_shards_and_lines_counts(self, tmp_path, opened):
        one, two = tmp_path / "one", tmp_path / "two"
        write_text_split(one, "train", ["ab", "c"], ["x", "y"])
        write_text_split(two, "train", ["a", "bc"], ["x", "y"])
        assert opened(one).fingerprint != opened(two).fingerprint

    def test_of_the_hub_it_depends_on_the_rows(self, opened, monkeypatch):
        def fingerprint(sources, targets):
            hub = datasets.DatasetDict(train=datasets.Dataset.from_dict({"en": sources, "de": targets}))
            monkeypatch.setattr(datasets, "load_dataset", lambda name: hub)
            return opened(name="someone/pairs").fingerprint

        different = {fingerprint(EN, DE), fingerprint(EN, DE[::-1]), fingerprint(EN, EN)}
        assert len(different) == 3
        assert fingerprint(EN, DE) in different


class TestHub:
    def serve(self, monkeypatch, **splits):
        asked = []
        hub = datasets.DatasetDict(splits)
        monkeypatch.setattr(datasets, "load_dataset", lambda *arguments: asked.append(arguments) or hub)
        return asked

    def test_wmt14_by_its_short_name(self, opened, monkeypatch):
        features = datasets.Features(translation=datasets.Translation(languages=["de", "en"]))
        rows = datasets.Dataset.from_dict({"translation": translations()}, features=features)
        asked = self.serve(monkeypatch, train=rows.select([2, 0]), test=rows)
        corpus = opened(name="WMT14")
        assert asked == [("wmt/wmt14", "de-en")]
        assert pairs_of(corpus) == [PAIRS[2], PAIRS[0]]
        assert pairs_of(corpus, "test") == PAIRS
        assert corpus.origin == "wmt/wmt14 (de-en) from the Hugging Face Hub"
        assert corpus.splits["train"].column_names == ["source", "target"]

    def test_another_name_and_subset(self, opened, monkeypatch):
        asked = self.serve(monkeypatch, train=datasets.Dataset.from_dict({"id": range(4), "en": EN, "de": DE}))
        assert pairs_of(opened(name="someone/pairs", subset="small")) == PAIRS
        assert pairs_of(opened(name="someone/pairs")) == PAIRS
        opened(name="wmt14", subset="cs-en")
        assert asked == [("someone/pairs", "small"), ("someone/pairs",), ("wmt/wmt14", "cs-en")]

    def test_splits_that_are_not_parallel_text(self, opened, monkeypatch):
        pairs = datasets.Dataset.from_dict({"en": EN, "de": DE})
        self.serve(monkeypatch, train=pairs, test=datasets.Dataset.from_dict({"en": EN}))
        with pytest.raises(ValueError, match=r"none is named 'de' in split 'test' of someone/pairs from the Hugging"):
            opened(name="someone/pairs")
        self.serve(monkeypatch, train=pairs, test=pairs.select([]))
        with pytest.raises(ValueError, match=r"must have rows .*'test' of someone/pairs"):
            opened(name="someone/pairs")

    def test_out_of_reach(self, opened, monkeypatch):
        def unreachable(*arguments):
            raise ConnectionError("no network")

        monkeypatch.setattr(datasets, "load_dataset", unreachable)
        with pytest.raises(RuntimeError, match=r"'wmt/wmt14' could not be loaded.*set data\.path.*'grammar'"):
            opened(name="wmt14")


class TestGrammar:
    def test_both_directions(self, opened):
        corpus, backwards = opened(name="Grammar"), opened(name="grammar", source="de", target="en")
        for split, pairs in grammar_splits().items():
            assert pairs_of(corpus, split) == pairs
            assert pairs_of(backwards, split) == [(german, english) for english, german in pairs]
        assert corpus.fingerprint == opened(name="grammar").fingerprint != backwards.fingerprint

    def test_other_languages(self, opened):
        with pytest.raises(ValueError, match=r"between 'en' and 'de'; got data\.source='en' and data\.target='fr'"):
            opened(name="grammar", target="fr")


class TestRealData:
    @pytest.mark.data
    @pytest.mark.parametrize(
        ("name", "counts"),
        [
            ("multi30k", {"train": 29_000, "validation": 1014, "test": 1000}),
            ("newstest", {"validation": 3000, "test": 3003}),
            ("wmt14_10k", {"train": 10_000}),
        ],
    )
    def test_all_rows_in_order(self, opened, name, counts):
        folder = real_data(name)
        corpus = opened(folder)
        assert {split: len(rows) for split, rows in corpus.splits.items()} == counts
        for split in counts:
            table = pq.read_table(folder / f"{split}.parquet")["translation"].to_pylist()
            assert pairs_of(corpus, split) == [(row["en"], row["de"]) for row in table]
