"""Every shipped configuration loads through the real parser and holds what its name says."""

import re
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tasks import cifar, wmt14
from tasks.common.config import parse_config
from tasks.common.diagnostics import CurvatureConfig
from tasks.common.limits import check_steps
from tasks.images.config import CifarConfig
from tasks.images.models import parse_model_name
from tasks.translation.config import DecodingConfig, ModelConfig, TextConfig, TranslationConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TASK_OF_PREFIX = {
    "cifar10": CifarConfig,
    "cifar100": CifarConfig,
    "digits": CifarConfig,
    "multi30k": TranslationConfig,
    "wmt14": TranslationConfig,
}
PAPER_NAME = re.compile(r"(cifar100?)_wrn(\d+)_(\d+)")


def load(name, *overrides):
    prefix = name.partition("_")[0]
    assert prefix in TASK_OF_PREFIX, f"{name}.yaml belongs to no known task; add its prefix to this test"
    return parse_config(TASK_OF_PREFIX[prefix], ["--config", str(CONFIGS / f"{name}.yaml"), *overrides])


def parts(pattern, text):
    match = re.fullmatch(pattern, text)
    assert match, f"{text!r} is not of the form {pattern}"
    return match.groups()


@pytest.fixture(params=sorted(file.stem for file in CONFIGS.glob("*.yaml")))
def name(request):
    return request.param


def test_every_config_loads_and_writes_below_runs_under_its_own_name(name):
    assert load(name).output_dir == CONFIGS.parent / "runs" / name


def test_every_comment_that_names_a_setting_override_is_accepted(name):
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    for key, value in re.findall(r"--([a-z_.]+) (\w+)", text):
        config = load(name, f"--{key}", value)
        assert Path(str(attrgetter(key)(config))).name == value  # paths come out absolute


@pytest.mark.parametrize(("task", "config_class"), [(cifar, CifarConfig), (wmt14, TranslationConfig)])
def test_a_task_prints_the_config_that_it_would_run_and_nothing_else(task, config_class, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["task", "--print_config", "--gossip.power=1", "--output_dir=here"])
    with pytest.raises(SystemExit) as stopped:
        task.main()
    assert stopped.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out, encoding="utf-8")
    config = parse_config(config_class, ["--config", str(printed)])
    assert (config.gossip.power, config.output_dir) == (1, tmp_path / "here")
    assert list(tmp_path.iterdir()) == [printed]


@pytest.fixture(params=sorted(file.stem for file in CONFIGS.glob("*.yaml") if PAPER_NAME.fullmatch(file.stem)))
def paper_name(request):
    return request.param


def test_a_config_named_after_a_run_of_the_paper_has_its_data_and_model(paper_name):
    data, depth, width = parts(PAPER_NAME, paper_name)
    config = load(paper_name)
    assert (config.data.name, config.data.path) == (data, None)
    assert parse_model_name(config.model) == ("wrn-<depth>-<width>", [int(depth), int(width)])


def test_a_config_named_after_a_run_of_the_paper_has_its_hyperparameters(paper_name):
    # arXiv:2602.02899v2, CIFAR experiments, 8 workers: 200 epochs, global batch 128, learning rate 0.1 at 128, linear
    # warm-up of 10 epochs and then a cosine, momentum 0.9, weight decay 5e-4, mixed precision, one-peer ring, p = 3,
    # E_start 10, BatchNorm calibrated before evaluation; the usual augmentation of crops by 4 pixels and flips.
    config = load(paper_name)
    assert (
        config.algorithm,
        config.num_train_epochs,
        config.global_batch_size,
        config.gradient_accumulation_steps,
    ) == (
        "dsgd_ac",
        200,
        128,
        1,
    )
    assert (config.learning_rate, config.warmup_epochs) == (0.1, 10)
    assert (config.momentum, config.weight_decay, config.dropout, config.label_noise) == (0.9, 5e-4, 0, 0)
    assert (config.mixed_precision, config.calibrate, config.eval_every) == ("fp16", True, 1)
    assert not config.no_decay
    assert (config.crop_padding, config.flip) == (4, True)
    gossip = config.gossip
    assert (gossip.topology, gossip.power, gossip.start_epoch) == ("one_peer_ring", 3, 10)
    assert (gossip.max_lr, gossip.floor, gossip.constant, gossip.order) == ("active", 0, None, "local_first")


def test_the_four_runs_of_the_paper_are_shipped():
    shipped = {file.stem for file in CONFIGS.glob("*.yaml")}
    assert shipped >= {f"{data}_{model}" for data in ("cifar10", "cifar100") for model in ("wrn28_10", "wrn16_8")}


@pytest.mark.parametrize("algorithm", ["adam", "dadam", "dadam_ac"])
@pytest.mark.parametrize("size", ["base", "big"])
def test_a_wmt14_config_has_the_settings_of_the_paper_or_says_that_it_is_not_in_it(size, algorithm):
    # arXiv:2602.02899v2, WMT14 experiments, 8 workers: 20 epochs, about 50k source and target tokens per step, warm-up
    # of 4000 steps, then a0 (4000 / t)^0.5; synchronous Adam 5e-4 and (0.9, 0.98), decentralized 1.3e-3 and
    # (0.974, 0.999); one-peer ring, p = 2, gamma 1 during the warm-up. Where it is silent, as in its authors' code:
    # pre-norm, dropout 0.3 everywhere for big, and the length penalty of GNMT.
    name = f"wmt14_{size}_{algorithm}"
    config = load(name)
    assert (config.algorithm, config.model.size) == (algorithm, size)
    assert (config.data.name, config.data.path, config.data.vocab_size) == ("wmt14", None, 37_000)
    assert (config.data.source, config.data.target) == ("en", "de")
    assert (config.num_train_epochs, config.batch_tokens, config.gradient_accumulation_steps) == (20, 50_000, 1)
    assert (config.warmup_steps, config.label_smoothing, config.mixed_precision) == (4000, 0.1, "bf16")
    assert config.betas == ((0.9, 0.98) if algorithm == "adam" else (0.974, 0.999))
    model, decoding = config.model, config.decoding
    assert model.norm == "pre"
    assert (model.dropout, model.attention_dropout, model.activation_dropout) == (
        (0.1, 0.0, 0.0) if size == "base" else (0.3, 0.3, 0.3)
    )
    assert (decoding.beams, decoding.length_penalty, decoding.extra_length) == (4, 0.6, 50)
    assert (decoding.length_penalty_kind, config.weight_average.kind) == ("gnmt", "none")
    assert config.warmup_learning_rate is None
    if size == "big":
        assert config.learning_rate == (5e-4 if algorithm == "adam" else 1.3e-3)
    else:
        assert "Not in the paper" in (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    if algorithm == "dadam_ac":
        gossip = config.gossip
        assert (gossip.topology, gossip.power, gossip.start_step) == ("one_peer_ring", 2, config.warmup_steps - 1)


def test_the_translation_demo_is_embedded():
    config = load("wmt14_demo")
    assert (config.algorithm, config.data.name, config.data.path) == ("dadam_ac", "grammar", None)


def test_the_demo_uses_embedded_data_and_keeps_mirror_images_apart():
    config = load("digits")
    assert (config.data.name, config.data.path) == ("digits", None)
    assert not config.flip
    assert config.global_batch_size % 4 == 0  # the four workers of the shipped launch file


def test_the_local_config_finds_its_data_from_its_own_folder_whatever_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("cifar10_local").data.path == CONFIGS.parent / "data" / "cifar10"
    assert load("multi30k_small").data.path == CONFIGS.parent / "data" / "multi30k"
    here = load("cifar10_local", "--data.path", "mine")
    assert here.data.path == tmp_path / "mine"


@pytest.mark.parametrize("file", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_reads_its_launch_files_and_they_ask_for_the_workers_they_name(file):
    launch = load_config_from_file(str(file))
    device, workers = parts(r"(\w+)_(\d+)_workers", file.stem)
    assert launch.num_processes == int(workers)
    assert (launch.num_machines, launch.distributed_type) == (1, "MULTI_GPU")  # MULTI_CPU would start one process
    assert launch.mixed_precision == "no"  # the task's own setting decides
    assert device in ("cpu", "gpu")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: parse_model_name("cnn-9999-9999-9999-9999", 0.0), "model must have at most 2,147,483,648 parameters"),
        (lambda: parse_model_name("wrn-1000-100", 0.0), "model must have at most 2,147,483,648 parameters"),
        (lambda: parse_model_name("transformer-10000-4", 0.0), "depth of model .* from 1 to 1000; got 10000"),
        (lambda: parse_model_name("transformer-1000-10000", 0.0), "model must have at most 2,147,483,648 parameters"),
        (lambda: ModelConfig(d_model=65536), "size must have at most 2,147,483,648 parameters"),
        (lambda: ModelConfig(ffn=262144), "size must have at most 2,147,483,648 parameters"),
        (lambda: TextConfig(vocab_size=10**9), "vocab_size must be an integer from 258 to 10000000; got 1000000000"),
        (lambda: DecodingConfig(beams=10**8), "beams must be an integer from 1 to 1000; got 100000000"),
        (lambda: DecodingConfig(extra_length=10**9), "extra_length must be an integer from 1 to 10000; got"),
        (lambda: CurvatureConfig(iterations=10**12), "iterations must be an integer from 1 to 10000; got"),
        (lambda: CurvatureConfig(probes=10**12), "probes must be an integer from 0 to 10000; got"),
        (lambda: CifarConfig(dataloader_num_workers=10**18), "dataloader_num_workers .* from 0 to 256; got 10000000"),
        (lambda: TranslationConfig(dataloader_num_workers=257), "dataloader_num_workers .* from 0 to 256; got 257"),
        (lambda: check_steps(10**18), "num_train_epochs must give at most 10,000,000 optimizer steps; got 1,000,0"),
    ],
)  # fmt: skip
def test_a_size_that_no_machine_has_is_refused_before_anything_is_built(make, words):
    with pytest.raises(ValueError, match=words):
        make()
