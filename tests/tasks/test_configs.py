"""Every shipped configuration loads through the real parser and holds what its name says."""

import re
from operator import attrgetter
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from cifar import CifarConfig
from images.models import WIDE_RESNET_NAME

from dsgdac_accel.config import parse_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TASK_OF_PREFIX = {"cifar10": CifarConfig, "cifar100": CifarConfig, "digits": CifarConfig}
PAPER_NAME = re.compile(r"(cifar100?)_wrn(\d+)_(\d+)")


def load(name):
    prefix = name.partition("_")[0]
    assert prefix in TASK_OF_PREFIX, f"{name}.yaml belongs to no known task; add its prefix to this test"
    return parse_config(TASK_OF_PREFIX[prefix], ["--config", str(CONFIGS / f"{name}.yaml")])


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
        config = parse_config(CifarConfig, ["--config", str(CONFIGS / f"{name}.yaml"), f"--{key}", value])
        assert Path(str(attrgetter(key)(config))).name == value  # paths come out absolute


@pytest.fixture(params=sorted(file.stem for file in CONFIGS.glob("*.yaml") if PAPER_NAME.fullmatch(file.stem)))
def paper_name(request):
    return request.param


def test_a_config_named_after_a_run_of_the_paper_has_its_data_and_model(paper_name):
    data, depth, width = parts(PAPER_NAME, paper_name)
    config = load(paper_name)
    assert (config.data.name, config.data.path) == (data, None)
    assert parts(WIDE_RESNET_NAME, config.model) == (depth, width)


def test_a_config_named_after_a_run_of_the_paper_has_its_hyperparameters(paper_name):
    # arXiv:2602.02899v2, CIFAR experiments, 8 workers: 200 epochs, global batch 128, rate 0.1 at 128, 10 epochs of
    # linear warm-up then cosine, momentum 0.9, weight decay 5e-4, mixed precision, one-peer ring, p = 3, E_start 10,
    # BatchNorm calibrated before evaluation; the usual augmentation of crops by 4 pixels and flips.
    config = load(paper_name)
    assert (config.algorithm, config.epochs, config.batch_size, config.accumulation_steps) == ("dsgd_ac", 200, 128, 1)
    assert (config.rate, config.warmup_epochs) == (0.1, 10)
    assert (config.momentum, config.weight_decay, config.dropout, config.label_noise) == (0.9, 5e-4, 0, 0)
    assert (config.mixed_precision, config.calibrate) == ("bf16", True)
    assert (config.crop_padding, config.flip) == (4, True)
    gossip = config.gossip
    assert (gossip.topology, gossip.power, gossip.start_epoch) == ("one_peer_ring", 3, 10)
    assert (gossip.max_rate, gossip.floor, gossip.constant, gossip.order) == ("active", 0, None, "local_first")


def test_the_four_runs_of_the_paper_are_shipped():
    shipped = {file.stem for file in CONFIGS.glob("*.yaml")}
    assert shipped >= {f"{data}_{model}" for data in ("cifar10", "cifar100") for model in ("wrn28_10", "wrn16_8")}


def test_the_demo_uses_embedded_data_and_keeps_mirror_images_apart():
    config = load("digits")
    assert (config.data.name, config.data.path) == ("digits", None)
    assert not config.flip
    assert config.batch_size % 4 == 0  # the four workers of the shipped launch file


def test_the_local_config_finds_its_data_from_its_own_folder_whatever_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("cifar10_local").data.path == CONFIGS.parent / "data" / "cifar10"
    here = parse_config(CifarConfig, ["--config", str(CONFIGS / "cifar10_local.yaml"), "--data.path", "mine"])
    assert here.data.path == tmp_path / "mine"


@pytest.mark.parametrize("file", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_reads_its_launch_files_and_they_ask_for_the_workers_they_name(file):
    launch = load_config_from_file(str(file))
    device, workers = parts(r"(\w+)_(\d+)_workers", file.stem)
    assert launch.num_processes == int(workers)
    assert (launch.num_machines, launch.distributed_type) == (1, "MULTI_GPU")  # MULTI_CPU would start one process
    assert launch.mixed_precision == "no"  # the task's own setting decides
    assert device in ("cpu", "gpu")
