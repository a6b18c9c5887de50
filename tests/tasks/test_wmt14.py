"""The translation task end to end, as its user starts it: launched, averaged, put to use, broken."""

import json
import shutil
import subprocess

import pandas
import pytest
import sacrebleu
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from dsgdac_accel.checkpoint import worker_parameters
from tasks.common.config import load_config, parse_config
from tasks.translation.commands import COMMANDS
from tasks.translation.config import TranslationConfig
from tasks.translation.decoding import translate
from tasks.translation.grammar import grammar_splits
from tasks.translation.model import load_translator
from tasks.translation.run import TranslationRun
from tasks.translation.tokenizer import encode
from tests.launching import ACCELERATE, PLAIN, ROOT, error_lines, finish, forked, records, start, summary, torchrun
from tests.selection import real_data

pytestmark = [pytest.mark.task, pytest.mark.timeout(200)]

SCRIPT = str(ROOT / "tasks" / "wmt14.py")
PAIRS = {"train": 240, "validation": 6, "test": 11}
SETTINGS = """
gossip:
  log_every: 3
  start_step: 2
data:
  path: text
  vocab_size: 400
  cache_dir: cache
model:
  size: tiny
  norm: pre
  dropout: 0.0
decoding:
  beams: 2
  length_penalty_kind: gnmt
num_train_epochs: 2
batch_tokens: 1600
learning_rate: 5e-3
warmup_steps: 3
betas: [0.9, 0.98]
logging_steps: 1
"""


WITH_STDIN = """
import os, runpy, sys
os.dup2(os.open("stdin", os.O_RDONLY), 0)
sys.stdin = open(0, encoding="utf-8")
script, sys.argv = sys.argv[1], sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


def run(launcher, cwd, *arguments, stdin=None, timeout=150):
    command = [*launcher, SCRIPT, *arguments]
    if stdin is None:
        return finish(start(command, cwd), timeout=timeout)
    (cwd / "stdin").write_bytes(stdin)
    (cwd / "with_stdin.py").write_text(WITH_STDIN, encoding="utf-8")
    return finish(start([*launcher, "with_stdin.py", *command[len(launcher) :]], cwd), timeout=timeout)


def succeed(launcher, cwd, *arguments, stdin=None):
    status, out, err = run(launcher, cwd, *arguments, stdin=stdin)
    assert status == 0, f"{out}\n{err}"
    return out


def train(launcher, work, name, *arguments):
    out = succeed(launcher, work, "--config", "settings.yaml", "--output_dir", name, *arguments)
    return work / name, out


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Settings and pairs of text files: Windows line ends, a byte order mark, a pair without a source."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "settings.yaml").write_text(SETTINGS, encoding="utf-8")
    (folder / "text").mkdir()
    for split, pairs in grammar_splits().items():
        english, german = zip(*pairs[: PAIRS[split]], strict=True)
        if split == "train":
            english = ("", *english[1:])
        (folder / "text" / f"{split}.en").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(english).encode())
        (folder / "text" / f"{split}.de").write_text("".join(f"{line}\n" for line in german), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def first_run(work):
    """DAdam-AC on four workers, into a folder where an earlier run was."""
    (work / "first").mkdir()
    (work / "first" / "test.hypotheses.txt").write_text("of an earlier run\n", encoding="utf-8")
    return train(forked(4), work, "first")


def lines(file):
    return file.read_text(encoding="utf-8").split("\n")[:-1]


def test_the_summary_says_what_ran_and_how_well(first_run):
    folder, out = first_run
    said = summary(folder)
    assert (said["algorithm"], said["workers"], said["topology"], said["seed"]) == ("dadam_ac", 4, "one_peer_ring", 0)
    assert said["steps"] == len(records(folder, "train/loss")) > 4
    assert 0 < said["gamma"] < 1
    assert said["radius"] > 0
    assert said["bleu_paper_signature"].startswith("nrefs:1|case:mixed|punctuation:replace-unicode|tok:moses-de-a+13a|")
    assert said.keys() >= {"train_loss", "test_loss", "test_perplexity", "bleu", "bleu_signature", "chrf", "seconds"}
    assert "239 training pairs (left out of 240: 1 with an empty side)" in out
    assert said["bleu_signature"] in out
    assert "reference:" in out


@pytest.mark.slow
def test_the_launch_file_starts_the_same_run(work, first_run):
    (launched, _), (first, _) = train(ACCELERATE, work, "launched"), first_run
    assert records(launched, "train/loss") == records(first, "train/loss")
    for key in ("workers", "bleu", "radius"):
        assert summary(launched)[key] == summary(first)[key]


def test_a_run_folder_holds_all_that_a_run_writes(first_run):
    folder, _ = first_run
    assert {file.name for file in folder.glob("*.png")} == {
        "bleu.png", "consensus.png", "loss.png", "lr_gamma.png",
    }  # fmt: skip
    assert len(records(folder, "validation/bleu")) == 2
    assert list(folder.rglob("events.out.tfevents.*"))
    assert load_config(TranslationConfig, folder / "config.yaml").output_dir == folder
    pairs = grammar_splits()["test"][: PAIRS["test"]]
    assert lines(folder / "test.sources.txt") == [english for english, _ in pairs]
    assert lines(folder / "test.references.txt") == [german for _, german in pairs]
    assert len(lines(folder / "test.hypotheses.txt")) == PAIRS["test"]


def test_training_lowers_the_loss_and_the_rate_follows_the_schedule(first_run):
    folder, _ = first_run
    losses, rates = records(folder, "train/loss"), records(folder, "gossip/lr")
    assert losses[max(losses)] < 0.9 * losses[1]
    for step, rate in rates.items():
        assert rate == pytest.approx(5e-3 * min(step / 3, (3 / step) ** 0.5))


def test_the_scores_are_those_of_the_files_beside_them(first_run, work):
    folder, _ = first_run
    files = ["--hypotheses", "first/test.hypotheses.txt", "--references", "first/test.references.txt"]
    out = succeed(forked(), work, "score", *files)
    bleu = sacrebleu.corpus_bleu(lines(folder / "test.hypotheses.txt"), [lines(folder / "test.references.txt")])
    assert bleu.score == pytest.approx(summary(folder)["bleu"], abs=1e-12)
    assert out.startswith(f"bleu           {bleu.score:.4f}  nrefs:1|case:mixed")
    by_split = succeed(forked(), work, "score", *files[:2], "--data.path", "text", "--data.cache_dir", "cache")
    assert by_split == out


def test_the_deployed_folder_is_a_normal_transformers_model(first_run):
    folder, _ = first_run
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "deployed").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "deployed")
    assert model.generation_config.num_beams == 2
    ids = encode(tokenizer, lines(folder / "test.sources.txt"))
    search = load_translator(folder / "deployed")[2]
    assert (search.beams, search.length_penalty_kind) == (2, "gnmt")
    assert translate(model, tokenizer, ids, search).texts == lines(folder / "test.hypotheses.txt")
    batch = tokenizer(["A word."], text_target=["Ein Wort."], return_tensors="pt")
    assert torch.isfinite(model(**batch).loss)


def test_translate_reads_lines_and_writes_as_many(first_run, work):
    folder, _ = first_run
    sources = lines(folder / "test.sources.txt")
    text = "\n".join([sources[0], "", sources[1] + "\r", "one\u2028line"]).encode()
    arguments = ["translate", "--model", "first/deployed", "--lines_at_once", "3"]  # beams as saved
    found = succeed(forked(), work, *arguments, stdin=text).split("\n")
    hypotheses = lines(folder / "test.hypotheses.txt")
    assert len(found) == 5
    assert (found[0], found[1], found[2]) == (hypotheses[0], "", hypotheses[1])


@pytest.mark.slow
def test_a_step_is_the_same_however_it_is_split_over_workers_and_micro_batches(work):
    split, _ = train(forked(2), work, "split", "--algorithm", "adam", "--gradient_accumulation_steps", "2")
    alone, _ = train(forked(), work, "alone", "--algorithm", "adam", "--gradient_accumulation_steps", "4")
    assert summary(split)["topology"] == "all-reduce"
    assert records(split, "train/loss") == pytest.approx(records(alone, "train/loss"), rel=1e-4)
    assert records(split, "validation/loss") == pytest.approx(records(alone, "validation/loss"), rel=1e-4)


def test_dadam_starts_from_the_weights_and_the_batches_of_adam(work):
    runs = {}
    for algorithm in ("adam", "dadam"):
        still = f"--algorithm {algorithm} --learning_rate 1e-9 --num_train_epochs 1 --report_to [] --max_steps 4"
        runs[algorithm], _ = train(forked(2), work, f"still_{algorithm}", *still.split())
    first, second = (records(folder, "train/loss") for folder in runs.values())
    assert first == pytest.approx(second, rel=1e-6)
    assert len({round(loss, 4) for loss in first.values()}) == 4
    assert set(records(runs["dadam"], "gossip/gamma").values()) == {1.0}
    assert not (runs["dadam"] / "tracker").exists()


def test_the_average_over_steps_is_deployed(work):
    every = ["--weight_average.kind", "lawa", "--weight_average.last", "1", "--weight_average.every", "3"]
    folder, _ = train(
        forked(2), work, "averaged", *every, "--max_steps", "4", "--save_steps", "3", "--max_grad_norm", "1"
    )
    workers = worker_parameters(folder / "checkpoints" / "step-00000003")
    deployed = load_file(folder / "deployed" / "model.safetensors")
    for name in set(deployed) & set(workers[0]):
        torch.testing.assert_close(deployed[name], (workers[0][name] + workers[1][name]) / 2)
    assert "model.encoder.layers.0.fc1.weight" in set(deployed) & set(workers[0])


@pytest.mark.slow
def test_bf16_autocast_and_loader_processes_train_one_worker(work):
    folder, _ = train(
        forked(), work, "bf16", "--mixed_precision", "bf16", "--dataloader_num_workers", "1", "--max_steps", "4"
    )
    assert (summary(folder)["steps"], summary(folder)["workers"], summary(folder)["radius"]) == (4, 1, 0)


@pytest.mark.parametrize(
    ("script", "demo", "others"),
    [
        ("wmt14", "wmt14_demo", ("multi30k_small", "wmt14_base_adam", "wmt14_big_dadam_ac")),
        ("cifar", "digits", ("cifar100_wrn28_10",)),
    ],
)
def test_without_a_configuration_the_first_line_names_the_demo_and_the_others(tmp_path, script, demo, others):
    status, out, err = finish(
        start([*forked(), str(ROOT / "tasks" / f"{script}.py"), "--num_train_epochs", "0"], tmp_path)
    )
    assert status == 2
    assert "num_train_epochs must be an integer >= 1" in error_lines(err)[0]
    first = out.split("\n")[0]
    assert f"running the embedded demo configs/{demo}.yaml" in first
    assert all(f"configs/{other}.yaml" in first for other in others)


# ---- what goes wrong


@pytest.fixture(scope="module")
def broken(work):
    """Corpora that cannot be used, beside the good one."""
    good = {split: (work / "text" / f"{split}.de").read_text(encoding="utf-8") for split in PAIRS}
    for name in ("unequal", "empty", "no_test", "latin1", "columns"):
        (work / name).mkdir()
        for split, text in good.items():
            for language in ("en", "de"):
                if (name, split) != ("no_test", "test") and name != "columns":
                    (work / name / f"{split}.{language}").write_text(text, encoding="utf-8")
    with (work / "unequal" / "train.en").open("a", encoding="utf-8") as file:
        file.write("One more.\n")
    for language in ("en", "de"):
        (work / "empty" / f"validation.{language}").write_text("", encoding="utf-8")
    (work / "latin1" / "train.de").write_bytes("Gr\u00fc\u00dfe\n".encode("latin-1") * 240)
    (work / "columns" / "train.jsonl").write_text(json.dumps({"english": "a", "german": "b"}) + "\n", encoding="utf-8")
    return work


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--data.path absent", ["data.path must exist", "absent"]),
        ("--data.path unequal", ["240", "241", "train.en"]),
        ("--data.path empty", ["validation", "empty"]),
        ("--data.path no_test", ["no split named 'test'", "data.test_split"]),
        ("--data.path latin1", ["UTF-8", "train.de", "line 1", "data.invalid_utf8"]),
        ("--data.path columns", ["english", "data.source_column"]),
        ("--data.target fr", ["fr"]),
        ("--data.vocab_size 200", ["vocab_size must be an integer >= 258"]),
        ("--batch_tokens 20", ["batch_tokens must have room for the longest pair", "data.max_length"]),
        (
            "--batch_tokens 1000000 --gradient_accumulation_steps 4",
            ["one optimizer step needs", "Use a smaller batch_tokens"],
        ),
        ("--data.tokenizer settings.yaml", ["tokenizer", "settings.yaml"]),
        ("--algorithm sgd", ["'adam', 'dadam'"]),
        ("--mixed_precision fp16 --data.path absent", ["fp16 needs a GPU"]),
        ("--label_smoothing 1", ["label_smoothing must be in [0, 1), below 1"]),
        ("--data.target german", ["target_language", "german"]),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_begins(broken, monkeypatch, arguments, words):
    monkeypatch.chdir(broken)
    with pytest.raises((ValueError, OSError)) as caught:
        TranslationRun(parse_config(TranslationConfig, ["--config", "settings.yaml", *arguments.split()]))
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (broken / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--data.path unequal", ["240", "241", "train.en"]),
        ("--gossip.start_step 1000", ["start_step must be <= total_steps"]),
    ],
)
def test_a_refusal_is_one_line_and_status_2(broken, arguments, words):
    status, _, err = run(forked(), broken, "--config", "settings.yaml", "--output_dir", "never", *arguments.split())
    assert status == 2, err
    (line,) = error_lines(err)
    assert all(word in line for word in words), line


def test_a_refused_command_leaves_the_results_of_an_earlier_run(broken):
    folder = broken / "finished"
    kept = [folder / name for name in ("summary.json", "test.hypotheses.txt", "deployed/model.safetensors")]
    for file in kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("of an earlier run", encoding="utf-8")
    arguments = ["--output_dir", "finished", "--model.heads", "3"]
    status, _, err = run(forked(), broken, "--config", "settings.yaml", *arguments)
    assert status == 2, err
    assert "multiple of 2 x heads" in error_lines(err)[0]
    assert [file.read_text(encoding="utf-8") for file in kept] == ["of an earlier run"] * 3


@pytest.mark.slow
def test_a_checkpoint_beyond_the_last_step_is_refused_and_nothing_is_deleted(work):
    saved = ["--max_steps", "4", "--save_steps", "2", "--report_to", "[]"]
    folder, _ = train(forked(), work, "shortened", *saved)
    before = sorted(file.name for file in folder.rglob("*"))
    shorter = ["--config", "settings.yaml", "--output_dir", "shortened", *saved, "--max_steps=3"]
    status, _, err = run(forked(), work, *[word for word in shorter if word not in ("--max_steps", "4")])
    assert status == 2, err
    assert "the checkpoint is of step 4, but this run has only 3 steps" in error_lines(err)[0]
    assert sorted(file.name for file in folder.rglob("*")) == before


def test_the_deployed_model_is_written_before_it_is_scored(work):
    (work / "no_search.py").write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tasks.translation.evaluation import Evaluator\n"
        "search = Evaluator.translations\n"
        "def translations(self, model, pairs, greedy=False):\n"
        "    if not greedy: raise OSError('no beam search today')\n"
        "    return search(self, model, pairs, greedy)\n"
        "Evaluator.translations = translations\n"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    arguments = ["--config", "settings.yaml", "--report_to", "[]", "--max_steps", "3", "--output_dir", "unscored"]
    status, _, err = finish(start([*forked(), "no_search.py", *arguments], work))
    assert status == 1, err
    assert "no beam search today" in error_lines(err)[0]
    load_translator(work / "unscored" / "deployed")


def test_a_synchronous_run_that_diverges_ends_with_one_line(work):
    arguments = ["--algorithm", "adam", "--learning_rate", "1e30", "--warmup_steps", "1", "--output_dir", "diverged"]
    status, _, err = run(forked(), work, "--config", "settings.yaml", *arguments)
    (line,) = error_lines(err)
    assert status == 1, err
    assert "the training loss is nan at step" in line


def test_one_gossip_worker_is_told_that_it_is_alone(work):
    alone = ["--max_steps", "3", "--report_to", "[]", "--output_dir", "lonely"]
    status, _, err = run(forked(), work, "--config", "settings.yaml", *alone)
    assert status == 0, err
    assert "1 worker: there is nobody to gossip with" in err


@pytest.mark.slow
def test_translate_ends_quietly_where_its_reader_does(first_run, work):
    options = ["--model", "first/deployed", "--beams", "1", "--lines_at_once", "1"]
    command = [*PLAIN, SCRIPT, "translate", *options]
    with subprocess.Popen(
        command, cwd=work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as filter_:
        filter_.stdin.write("A book.\n" * 30)
        filter_.stdin.flush()
        filter_.stdout.readline()
        filter_.stdout.close()
        filter_.stdin.close()
        assert error_lines(filter_.stderr.read()) == []
        assert filter_.wait(timeout=60) == 0


def test_broken_model_folders_are_one_error(first_run, work):
    folder, _ = first_run
    shutil.copytree(folder / "deployed", work / "cut")
    weights = (work / "cut" / "model.safetensors").read_bytes()
    (work / "cut" / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ValueError, match="Marian or Pegasus model that can be read"):
        load_translator(work / "cut")
    (work / "cut" / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        load_translator(work / "cut")


@pytest.mark.slow
def test_one_of_several_workers_says_what_is_wrong_and_none_waits(broken):
    status, _, err = run(torchrun(2), broken, "--config", "settings.yaml", "--data.path", "unequal")
    (line,) = error_lines(err)
    assert status != 0
    assert "240" in line


def test_subcommands_say_what_they_miss(first_run, work, monkeypatch):
    monkeypatch.chdir(work)
    for (command, *arguments), word in (
        (["translate"], "model must be given"),
        (["translate", "--model", "text"], "has no config.json"),
        (["score", "--hypotheses", "absent.txt", "--references", "absent.txt"], "absent.txt"),
        (["score", "--hypotheses", "first/test.hypotheses.txt", "--references", "text/train.de"], "240"),
    ):
        with pytest.raises((ValueError, OSError), match=word):
            COMMANDS[command](arguments)


# ---- real text


SHRUNK = """
--gossip.workers_per_process 8 --gossip.start_step 29 --data.path data --data.cache_dir cache --data.vocab_size 1000
--data.validation_fraction 0.01 --data.train_limit 4000 --data.max_length 64 --model.d_model 64 --model.heads 4
--model.ffn 128 --model.encoder_layers 2 --model.decoder_layers 2 --decoding.beams 1 --decoding.extra_length 1
--batch_tokens 2400 --warmup_steps 30 --max_steps 60 --mixed_precision no --logging_steps 10 --save_steps null
--report_to []
"""


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("algorithm", ["adam", "dadam", "dadam_ac"])
def test_the_papers_configurations_learn_on_a_slice_of_wmt14_at_their_learning_rates(tmp_path, algorithm):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").symlink_to(real_data("wmt14_10k") / "train.parquet")
    pandas.read_parquet(real_data("newstest") / "test.parquet").head(20).to_parquet(tmp_path / "data" / "test.parquet")
    config = ROOT / "configs" / f"wmt14_big_{algorithm}.yaml"
    succeed(forked(), tmp_path, "--config", str(config), "--output_dir", "run", *SHRUNK.split())
    losses = records(tmp_path / "run", "train/loss")
    assert sorted(losses) == [10, 20, 30, 40, 50, 60]
    assert losses[60] < losses[10] - 0.3
    assert records(tmp_path / "run", "gossip/lr")[30] == pytest.approx(5e-4 if algorithm == "adam" else 1.3e-3)
