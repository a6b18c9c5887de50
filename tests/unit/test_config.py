"""Configurations: every value means what a person means by it, and every mistake is refused by name.

Evidence: hypothesis round trips (what is dumped loads back equal), values typed by hand, and one row per refusal.
"""

from __future__ import annotations

import dataclasses
import string
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dsgdac_accel.checks import check_writable
from dsgdac_accel.config import GossipConfig, config_to_dict
from dsgdac_accel.doctor import flat_settings
from dsgdac_accel.topology import TOPOLOGIES, Topology, build_topology
from tasks.benchmarks.config import BenchmarkConfig
from tasks.common.config import (
    ConfigError,
    docs_of,
    dump_config,
    keys_of,
    load_config,
    parse_config,
)
from tasks.common.config_hints import MEANT, USE, hint
from tasks.common.output_dir import OutputDir
from tasks.images.config import CifarConfig
from tasks.translation.commands import TranslateConfig
from tasks.translation.config import TranslationConfig


@dataclass(frozen=True, kw_only=True)
class Data:
    path: Path = Path("data")
    files: tuple[str, ...] = ()
    cache: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 0.1
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    milestones: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train a small model."""

    seed: int = 0
    """Seeds everything."""
    name: str = "run"
    mixed_precision: Literal["no", "bf16"] = "no"
    tracker: str | None = None
    resume: bool = False
    limit: int | None = None
    weights: dict[str, float] = field(default_factory=dict)
    extra: Any = None
    data: Data = field(default_factory=Data)
    """Where the samples come from."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=0.05))
    gossip: GossipConfig | None = None


@dataclass(frozen=True, kw_only=True)
class Needy:
    path: Path
    data: Data


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write run.yaml into a folder that is also the working directory."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str | bytes) -> str:
        Path("run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return "run.yaml"

    return write_file


def from_yaml(text: str, folder: Path) -> Run:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(Run, file)


def at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


# GossipConfig


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"topology": "one_peer_rng"}, ["topology", "one_peer_rng", "base_graph", "Did you mean 'one_peer_ring'?"]),
        ({"topology": 3}, ["topology must be a name or a Topology", "3 (int)"]),
        ({"power": -1.0}, ["power must be a finite number >= 0; got -1.0", "plain DSGD"]),
        ({"power": float("nan")}, ["power", "finite", "nan"]),
        ({"power": True}, ["power", "True"]),
        ({"power": "3"}, ["power", "'3'"]),
        ({"start_step": -1}, ["start_step must be an integer >= 0; got -1"]),
        ({"start_step": 2.0}, ["start_step", "2.0"]),
        ({"start_epoch": True}, ["start_epoch", "True"]),
        ({"start_step": 1, "start_epoch": 1}, ["start_step=1 and start_epoch=1", "Keep one"]),
        ({"start_step": 11, "total_steps": 10}, ["start_step must be <= total_steps = 10", "11"]),
        ({"max_lr": "actve"}, ["max_lr", "'actve'", "Did you mean 'active'?"]),
        ({"max_lr": 0}, ["max_lr must be a finite number > 0; got 0"]),
        ({"max_lr": float("inf")}, ["max_lr", "inf"]),
        ({"floor": 1.5}, ["floor must be a number in [0, 1]; got 1.5"]),
        ({"constant": -0.1}, ["constant must be a number in [0, 1]; got -0.1"]),
        ({"constant": 0.1, "floor": 0.5}, ["constant must be a number in [0.5, 1]; got 0.1", "floor = 0.5"]),
        ({"order": "mix"}, ["order must be one of local_first, mix_first; got 'mix'"]),
        ({"comm_dtype": "int1"}, ["comm_dtype must be one of full, bf16", "got 'int1'. Did you mean 'int8'?"]),
        ({"overlap": 1}, ["overlap must be True or False; got 1"]),
        ({"total_steps": 0}, ["total_steps must be an integer >= 1; got 0"]),
        ({"log_every": -1}, ["log_every must be an integer >= 0; got -1", "evaluations"]),
        ({"timeout": 0}, ["timeout must be a finite number > 0; got 0", "seconds"]),
        ({"timeout": 1e10}, ["timeout must be a number > 0 and <= 1e+09; got 10000000000.0", "seconds"]),
        ({"power": 10**400}, ["power must be a finite number >= 0; got 1000"]),
        ({"log_every": 2**63}, [f"log_every must be an integer from 0 to {2**63 - 1}; got {2**63}"]),
        ({"max_consecutive_nonfinite": 0}, ["max_consecutive_nonfinite must be an integer >= 1; got 0"]),
    ],
)
def test_gossip_config_refuses_nonsense(values, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        GossipConfig(**values)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_gossip_config_takes_every_registered_topology_and_one_of_your_own():
    assert [GossipConfig(topology=name).topology for name in TOPOLOGIES] == list(TOPOLOGIES)
    mine = Topology.from_matrices([[[0.5, 0.5], [0.5, 0.5]]])
    assert GossipConfig(topology=mine).topology is mine


def test_gossip_config_is_frozen_and_stores_plain_numbers():
    gossip = GossipConfig(
        power=3, floor=1, max_lr=np.float32(1), timeout=5, start_step=np.int64(0), total_steps=np.int64(1)
    )
    assert repr((gossip.power, gossip.floor, gossip.max_lr, gossip.timeout)) == "(3.0, 1.0, 1.0, 5.0)"
    assert repr((gossip.start_step, gossip.total_steps)) == "(0, 1)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        gossip.power = 2.0  # type: ignore[misc]


def test_gossip_config_takes_the_ends_of_its_ranges():
    smallest = {"power": 0, "floor": 0, "constant": 0, "log_every": 0, "start_epoch": 0, "mix_every": 1}
    largest = {"floor": 1, "constant": 1, "start_step": 10, "total_steps": 10, "max_consecutive_nonfinite": 1}
    for values in (smallest, largest):
        assert config_to_dict(GossipConfig(**values)).items() >= values.items()


def test_every_field_of_gossip_config_explains_itself():
    assert docs_of(GossipConfig).keys() == keys_of(GossipConfig).keys()


# Hints

TASKS = (CifarConfig, TranslationConfig)
HINTS = [(setting, name, f"Did you mean {setting}?") for setting, names in MEANT.items() for name in names.split()]
HINTS += [(setting, name, sentence) for setting, names, sentence in USE for name in names.split()]


@pytest.mark.parametrize("dashed", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_every_usual_name_is_refused_with_a_setting_of_this_very_task(task, dashed):
    known = keys_of(task)
    for name in {name for _, name, _ in HINTS} - set(known):
        asked = name.replace("_", "-") if dashed else name
        own = [words for setting, other, words in HINTS if other == name and setting in known]
        assert hint(asked, known) == own[0] if own else "?" in hint(asked, known) or hint(asked, known).endswith(".")
        with pytest.raises(ConfigError) as caught:
            parse_config(task, [f"--{asked}", "1"])
        assert str(caught.value) == f"command line: unknown key {asked}. {hint(asked, known)}"


def test_hints_name_settings_that_exist():
    for setting, _, words in HINTS:
        assert any(setting in keys_of(task) for task in (*TASKS, BenchmarkConfig)), setting
        assert setting in words


@pytest.mark.parametrize(
    ("task", "name", "words"),
    [
        (CifarConfig, "report-to", "Did you mean report_to?"),
        (CifarConfig, "gradient-accumulation-steps", "Did you mean gradient_accumulation_steps?"),
        (CifarConfig, "output-dir", "Did you mean output_dir?"),
        (CifarConfig, "num_epochs", "Did you mean num_train_epochs?"),
        (CifarConfig, "num_workers", "Did you mean dataloader_num_workers?"),
        (CifarConfig, "resume_from", "Did you mean resume_from_checkpoint?"),
        (CifarConfig, "adam_betas", "Did you mean betas?"),
        (CifarConfig, "torch_compile", "Did you mean compile?"),
        (TranslationConfig, "max_norm", "Did you mean max_grad_norm?"),
        (TranslationConfig, "num_warmup_steps", "Did you mean warmup_steps?"),
        (TranslationConfig, "label_smoothing_factor", "Did you mean label_smoothing?"),
        (TranslationConfig, "num_beams", "Did you mean decoding.beams?"),
        (TranslationConfig, "lenpen", "Did you mean decoding.length_penalty?"),
        (TranslationConfig, "decoding.length_penalty_kin", "Did you mean decoding.length_penalty_kind?"),
        (TranslationConfig, "model.norms", "Did you mean model.norm?"),
        (CifarConfig, "no_decays", "Did you mean no_decay?"),
        (TranslationConfig, "dropout", "It belongs at model.dropout."),
        (CifarConfig, "num_train_epoch", "Did you mean num_train_epochs?"),
    ],
)
def test_the_right_key_is_named_for_one_that_is_nearly_right(task, name, words):
    with pytest.raises(ConfigError) as caught:
        parse_config(task, [f"--{name}=1"])
    assert str(caught.value) == f"command line: unknown key {name}. {words}"


# Settings that cannot be meant


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        (
            CifarConfig,
            ["--num_train_epochs=4", "--warmup_epochs=50"],
            "at most num_train_epochs = 4, or the learning rate",
        ),
        (CifarConfig, ["--num_train_epochs=12", "--warmup_epochs=12.1"], "warmup_epochs must be at most"),
        (CifarConfig, ["--warmup_epochs=1e308"], "warmup_epochs must be at most num_train_epochs = 200"),
        (CifarConfig, ["--data.image_size=100000"], "data.image_size must be an integer from 1 to 4096; got 100000."),
        (CifarConfig, ["--model=wrn-10-100000"], "width of model 'wrn-10-100000' must be an integer from 1 to 10000"),
        (CifarConfig, ["--model=wrn-10-1000"], "model must have at most 2,147,483,648 parameters"),
        (CifarConfig, ["--model=cnn-16-0"], "width of model 'cnn-16-0' must be an integer >= 1"),
        (CifarConfig, ["--model=resnet18"], "model must be one of wrn-<depth>-<width>"),
        (CifarConfig, ["--model=wrn-11-2"], "depth of a wide ResNet must be 6 m + 4"),
        (CifarConfig, ["--model=transformer-2-30"], "a multiple of its 4 heads; got 30."),
        (CifarConfig, ["--model=mlp", "--dropout=0.1"], "dropout must be 0 for model 'mlp', which has none; got 0.1."),
        (CifarConfig, ["--dropout=1"], "dropout must be in [0, 1), below 1; got 1.0."),
        (CifarConfig, ["--data.image_size=4", "--crop_padding=4"], "crop_padding must be below data.image_size = 4"),
        (
            CifarConfig,
            ["--gossip.start_epoch=201"],
            "gossip.start_epoch must be at most num_train_epochs = 200; got 201",
        ),
        (CifarConfig, ["--betas=0.9,1"], "betas must be two numbers in [0, 1), below 1; got (0.9, 1.0)."),
        (CifarConfig, ["--report_to=tensorbord"], "Did you mean 'tensorboard'?"),
        (TranslationConfig, ["--max_steps=3999"], "warmup_steps must be at most max_steps = 3999"),
        (TranslationConfig, ["--max_steps=10"], "warmup_steps must be at most max_steps = 10"),
        (
            TranslationConfig,
            ["--max_steps=9", "--warmup_steps=1", "--gossip.start_step=10"],
            "gossip.start_step must be at most max_steps = 9; got 10, so that adaptive consensus would never start.",
        ),
        (
            TranslationConfig,
            ["--decoding.length_penalty=1e300"],
            "decoding.length_penalty must be a number in [-10, 10]",
        ),
        (TranslationConfig, ["--decoding.length_penalty_kind=wu"], "one of 'power', 'gnmt'; got 'wu'"),
        (TranslationConfig, ["--model.norm=sandwich"], "one of 'pre', 'post'; got 'sandwich'"),
        (TranslationConfig, ["--warmup_learning_rate=0"], "warmup_learning_rate must be a finite number > 0; got 0.0."),
        (
            TranslationConfig,
            ["--data.validation_fraction=0.6"],
            "validation_fraction must be a number > 0 and <= 0.5; got 0.6.",
        ),
        (TranslationConfig, ["--model.heads=3"], "model.d_model must be a multiple of 2 x heads"),
        (
            TranslationConfig,
            ["--model.d_model=1000000"],
            "model.d_model must be an integer from 1 to 65536; got 1000000.",
        ),
        (TranslationConfig, ["--model.dropout=1"], "model.dropout must be in [0, 1), below 1; got 1.0."),
        (TranslateConfig, ["--model=x", "--length_penalty=-1e300"], "length_penalty must be a number in [-10, 10]"),
        (TranslateConfig, ["--model=x", "--beams=0"], "beams must be an integer >= 1; got 0."),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_before_anything_runs(task, words, message):
    with pytest.raises(ConfigError) as caught:
        parse_config(task, words)
    assert message in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


def test_a_warm_up_may_last_the_whole_run():
    assert CifarConfig(num_train_epochs=3, warmup_epochs=3).warmup_epochs == 3
    assert TranslationConfig(max_steps=5, warmup_steps=5).warmup_steps == 5


# Values


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("optimizer: {lr: 1e-3}", "optimizer.lr", 0.001),
        ("optimizer: {lr: 1E-3}", "optimizer.lr", 0.001),
        ("optimizer: {lr: 1e5}", "optimizer.lr", 100000.0),
        ("optimizer: {lr: .5}", "optimizer.lr", 0.5),
        ("optimizer: {lr: +1.e-2}", "optimizer.lr", 0.01),
        ("optimizer: {lr: 3}", "optimizer.lr", 3.0),
        ("seed: 1e5", "seed", 100000),
        ("seed: 1.5e3", "seed", 1500),
        ("seed: 1e23", "seed", 10**23),  # float("1e23") is another integer
        ("seed: -7", "seed", -7),
        ("mixed_precision: no", "mixed_precision", "no"),
        ("name: no", "name", "no"),
        ("name: 1:30", "name", "1:30"),
        ("name: 2024-01-01", "name", "2024-01-01"),
        ("name: '3'", "name", "3"),
        ("name: 010", "name", "010"),
        ("name: 1_000", "name", "1_000"),
        ("tracker: none", "tracker", None),
        ("tracker: ~", "tracker", None),
        ("tracker: 'none'", "tracker", "none"),
        ("resume: true", "resume", True),
        ("resume: False", "resume", False),
        ("limit: 3", "limit", 3),
        ("limit:", "limit", None),
        ("weights: {a: 1, no: 2e-1}", "weights", {"a": 1.0, "no": 0.2}),
        ("extra: {a: [1, no, null]}", "extra", {"a": [1, "no", None]}),
        ("optimizer: {betas: [0.9, 98e-2]}", "optimizer.betas", (0.9, 0.98)),
        ("optimizer: {milestones: [60, 120]}", "optimizer.milestones", [60, 120]),
        ("data: {files: [a, b]}", "data.files", ("a", "b")),
        ("gossip: {max_lr: run}", "gossip.max_lr", "run"),
        ("gossip: {topology: ring}", "gossip.topology", "ring"),
        ("gossip: {}", "gossip", GossipConfig()),
        ("gossip: null", "gossip", None),
        ("gossip:", "gossip", None),
        ("", "optimizer.lr", 0.05),
        ("# nothing\n---\n", "optimizer.lr", 0.05),
        ("optimizer:\n", "optimizer.lr", 0.05),
        ("\ufeffseed: 1", "seed", 1),
        ("extra: &base {lr: 1.0}\noptimizer: {<<: *base, betas: [0, 0]}", "optimizer.lr", 1.0),
        ("extra: &base {lr: 1.0}\noptimizer: {lr: 2.0, <<: *base}", "optimizer.lr", 2.0),
        ("extra: [&first {lr: 1.0}, &second {lr: 2.0}]\noptimizer: {<<: [*first, *second]}", "optimizer.lr", 1.0),
        ("extra: &lr 1e-3\noptimizer: {lr: *lr}", "optimizer.lr", 0.001),
        ("%YAML 1.1\n---\nname: yes", "name", "yes"),
        ("seed: 3\r\nname: a\r\n", "name", "a"),
        ('{"seed": 3, "name": "a"}', "seed", 3),
        ("tracker: !!null ''", "tracker", None),
        (
            "extra: [1:30, 2024-01-01, 1_000, 0x1F, '3', NULL]",
            "extra",
            ["1:30", "2024-01-01", "1_000", "0x1F", "3", None],
        ),
    ],
)
def test_yaml_values_read_as_a_person_means_them(text, path, value, tmp_path):
    read = at(from_yaml(text, tmp_path), path)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 0.001),
        (["--optimizer.lr=-1"], "optimizer.lr", -1.0),
        (["--optimizer.lr", "-1"], "optimizer.lr", -1.0),
        (["--name", "3"], "name", "3"),
        (["--name=--weird=x"], "name", "--weird=x"),
        (["--name="], "name", ""),
        (["--tracker", "none"], "tracker", None),
        (["--mixed_precision", "no"], "mixed_precision", "no"),
        (["--resume", "true"], "resume", True),
        (["--optimizer.betas", "0.9,0.98"], "optimizer.betas", (0.9, 0.98)),
        (["--optimizer.milestones", "[60, 120]"], "optimizer.milestones", [60, 120]),
        (["--data.files="], "data.files", ()),
        (["--weights", "{a: 1, b: 2}"], "weights", {"a": 1.0, "b": 2.0}),
        (["--gossip.power", "2"], "gossip", GossipConfig(power=2)),
        (["--gossip", "null"], "gossip", None),
    ],
)
def test_command_line_values(argument, path, value):
    read = at(parse_config(Run, argument), path)
    assert read == value
    assert type(read) is type(value)


def test_the_command_line_beats_the_file_and_the_file_the_defaults(write):
    file = write("seed: 1\noptimizer: {lr: 0.3}\ngossip: {power: 2, floor: 0.1}\n")
    run = parse_config(Run, ["--gossip.power", "1", f"--config={file}", "--seed", "5"])
    assert (run.seed, run.optimizer.lr, run.name) == (5, 0.3, "run")
    assert run.gossip == GossipConfig(power=1, floor=0.1)


def test_a_section_can_be_switched_off_and_on_from_the_command_line(write):
    assert parse_config(Run, []).gossip is None
    assert parse_config(Run, ["--config", write("gossip: {power: 2}"), "--gossip", "null"]).gossip is None
    assert parse_config(Run, ["--config", write("gossip: null"), "--gossip.power", "2"]).gossip == GossipConfig(power=2)


def test_an_override_leaves_alone_what_shares_its_section_by_an_alias(write):
    run = parse_config(Run, ["--config", write("optimizer: &shared {lr: 1.0}\nextra: *shared\n"), "--optimizer.lr=2"])
    assert (run.optimizer.lr, run.extra) == (2.0, {"lr": 1.0})


def test_the_default_file_serves_until_another_is_named(write, tmp_path):
    (tmp_path / "default.yaml").write_text("seed: 1\nname: default\n")
    default = tmp_path / "default.yaml"
    assert parse_config(Run, [], default_file=default).name == "default"
    other = parse_config(Run, ["--config", write("seed: 2")], default_file=default)
    assert (other.seed, other.name) == (2, "run")


def test_relative_paths_start_from_the_file_or_from_the_working_directory(tmp_path, monkeypatch):
    project, elsewhere, home = (tmp_path / name for name in ("project", "elsewhere", "home"))
    for folder in (project, elsewhere, home):
        folder.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(home))
    (project / "run.yaml").write_text("data: {path: ../shards, cache: ~/cache}\n")
    for file in (str(project / "run.yaml"), "../project/run.yaml"):
        data = parse_config(Run, ["--config", file]).data
        assert data == Data(path=tmp_path / "shards", cache=home / "cache")
    overridden = parse_config(Run, ["--config", "../project/run.yaml", "--data.path", "shards"]).data
    assert overridden.path == elsewhere / "shards"
    assert parse_config(Run, []).data.path == elsewhere / "data"


def test_dotdot_follows_a_linked_folder_as_the_file_system_does(tmp_path):
    real = tmp_path / "disk" / "project"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    assert from_yaml("data: {path: link/../shards}", tmp_path).data.path == tmp_path / "disk" / "shards"


# Mistakes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gossip: {gama_power: 3}", ["run.yaml:1: unknown key gossip.gama_power. Did you mean gossip.power?"]),
        ("\ngama_power: 3", ["run.yaml:2: unknown key gama_power.", "gossip.power"]),
        ("Seed: 3", ["unknown key Seed. Did you mean seed?"]),
        ("gosip: {power: 3}", ["unknown key gosip. Did you mean gossip?"]),
        ("power: 3", ["run.yaml:1: unknown key power. It belongs at gossip.power."]),
        ("gossip: {seed: 3}", ["unknown key gossip.seed. It belongs at seed."]),
        ("gossip.power: 3", ["unknown key gossip.power. Indent it below its section."]),
        ("data: {zzz: 3}", ["unknown key data.zzz. The keys of data are path, files, cache."]),
        ("seed: 1\nname: a\nseed: 2", ["run.yaml:3: seed is given twice. Keep one."]),
        ("gossip:\n  power: 1\n  'power': 2", ["run.yaml:3: power is given twice. Keep one."]),
        ("gossip: 3", ["gossip must be a section with keys such as power; got 3."]),
        ("optimizer: null", ["optimizer must be a section with keys such as lr; got nothing (null)."]),
        ("seed: {a: 1}", ["seed must be an integer; got {a: 1}."]),
        ("seed: [1]", ["seed must be an integer; got [1]."]),
        ("- seed", ["run.yaml must hold keys such as `seed: 1` at the top level; got a list."]),
        ("seed", ["run.yaml must hold keys such as `seed: 1` at the top level; got 'seed'."]),
        ("1: 2", ["run.yaml:1: unknown key 1."]),
        ("gossip: {null: 2}", ["run.yaml:1: unknown key gossip.null."]),
        ("? [a]\n: 2", ["run.yaml: keys must be text; got a list or section as a key."]),
        ("seed:\n\t- 1", ["run.yaml:2: invalid YAML", "spaces, not tabs"]),
        ("seed: [1", ["run.yaml:1: invalid YAML"]),
        ("seed: 1\nname: a: b", ["run.yaml:2: invalid YAML: mapping values are not allowed here."]),
        ("seed: 1\n---\nseed: 2", ["run.yaml:2: invalid YAML"]),
        ("seed: 1\nname: \x01", ["run.yaml:2: invalid YAML", "#x0001"]),
        ("seed: *missing", ["run.yaml:1: invalid YAML", "missing"]),
        ("extra: &me [*me]", ["run.yaml has too many values or levels, counting what aliases stand for. Use fewer."]),
        ("seed: !!python/name:os.system", ["run.yaml:1: invalid YAML", "tag", "python/name"]),
        ("extra: !!set {a, b}", ["run.yaml:1: invalid YAML", "tag", "set"]),
        ("name: !!binary aGk=", ["run.yaml:1: invalid YAML", "tag", "binary"]),
        ("!!python/object/apply:os.system {seed: 1}", ["run.yaml:1: invalid YAML", "tag", "os.system"]),
        ("optimizer: {<<: 3}", ["run.yaml:1: invalid YAML", "merging"]),
        ("extra: " + "[" * 700, ["run.yaml has too many levels. Use fewer."]),
        ("extra: " + "[" * 150 + "]" * 150, ["run.yaml has too many values or levels"]),
        ("extra: " + "{a: " * 150 + "}" * 150, ["run.yaml has too many values or levels"]),
        ("gossip: {power: abc}", ["run.yaml:1: gossip.power must be a number; got 'abc'."]),
        ("gossip: {power: '3'}", ["gossip.power must be a number; got '3'. Remove the quotes."]),
        ("gossip: {power: true}", ["gossip.power must be a number; got true."]),
        ("gossip: {power: }", ["gossip.power must be a number; got nothing (null)."]),
        ("gossip: {power: .nan}", ["gossip.power must be a number; got '.nan'. It must be finite."]),
        ("gossip: {power: 1e999}", ["gossip.power must be a number; got 1e999. It must be finite."]),
        ("gossip: {power: -1}", ["gossip.power must be a finite number >= 0; got -1.0. Use 0 for plain DSGD"]),
        ("gossip: {topology: one_peer_rng}", ["gossip.topology must be one of", "Did you mean 'one_peer_ring'?"]),
        ("gossip: {max_lr: actve}", ["must be 'active', 'run' or a number; got 'actve'. Did you mean 'active'?"]),
        ("seed: 3.5", ["seed must be an integer; got 3.5."]),
        ("seed: 3.0", ["seed must be an integer; got 3.0. Write it without a decimal point."]),
        ("seed: true", ["seed must be an integer; got true."]),
        ("seed: 012", ["seed must be an integer; got '012'. ", "without leading zeros"]),
        ("seed: 1_000", ["seed must be an integer; got '1_000'. Write it like 12 or 1.5e-3"]),
        ("optimizer: {lr: 1_000.5}", ["optimizer.lr must be a number; got '1_000.5'. Write it like 12 or 1.5e-3"]),
        ("seed: 1:30", ["seed must be an integer; got '1:30'."]),
        ("seed: 0x1F", ["seed must be an integer; got '0x1F'."]),
        (f"seed: {'1' * 5000}", ["seed must be an integer; got '111"]),
        ("seed: ٣", ["seed must be an integer; got '٣'."]),
        ("resume: yes", ["resume must be true or false; got 'yes'."]),
        ("resume: 'true'", ["resume must be true or false; got 'true'."]),
        ("name: 3", ["name must be text; got 3.", 'put it in quotes: "3"']),
        ("name: null", ["name must be text; got nothing (null)."]),
        ("mixed_precision: bf61", ["must be one of 'no', 'bf16'; got 'bf61'. Did you mean 'bf16'?"]),
        ("limit: abc", ["limit must be an integer or null; got 'abc'."]),
        ("optimizer: {betas: [0.9]}", ["optimizer.betas must be a list of 2 (a number, a number); got [0.9]."]),
        ("optimizer: {betas: [0.9, x]}", ["optimizer.betas must be a list of 2 (a number, a number); got [0.9, 'x']."]),
        (
            "optimizer: {betas: [0.9, null]}",
            ["optimizer.betas must be a list of 2 (a number, a number); got [0.9, nothing (null)]."],
        ),
        ("data: {files: a}", ["data.files must be a list (each text); got 'a'. Write it as [a, b]."]),
        ("data: {path: ''}", ["data.path must be a path; got ''. Use . for the folder itself."]),
        ("data: {path: ~nobody-at-all/x}", ["data.path must be a path", "home folder"]),
        (
            "optimizer: {milestones: [1, x]}",
            ["run.yaml:1: optimizer.milestones must be a list (each an integer); got"],
        ),
        ("optimizer: {milestones: [1, 2.0]}", ["got [1, 2.0]. Write it without a decimal point."]),
        ("optimizer: ''", ["optimizer must be a section with keys such as lr; got ''."]),
        ("optimizer: {lr: 1,5}", ["unknown key optimizer.5."]),
        ("weights: {a: x}", ["weights must be named values (each a number); got {a: 'x'}."]),
        ("weights: [1]", ["weights must be named values (each a number); got [1]."]),
    ],
)
def test_mistakes_in_a_file_are_refused_by_name(text, words, write):
    with pytest.raises(ConfigError) as caught:
        parse_config(Run, ["--config", write(text)])
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gossip.gama_power", "3"], ["command line: unknown key gossip.gama_power. Did you mean gossip.power?"]),
        (["--gossip.log-every", "3"], ["Did you mean gossip.log_every?"]),
        (["--power", "3"], ["It belongs at gossip.power."]),
        (["--gosip.power", "3"], ["It belongs at gossip.power."]),
        (["--gosip.pwer", "3"], ["Did you mean gossip.power?"]),
        (["--see", "3"], ["unknown key see. Did you mean seed?"]),
        (["--see"], ["unknown key see. Did you mean seed?"]),
        (["--gossip.power", "abc"], ["command line: gossip.power must be a number; got 'abc'."]),
        (["--gossip.power", "-1"], ["gossip.power must be a finite number >= 0; got -1.0"]),
        (["--seed", "1", "--seed=2"], ["command line: --seed 1 and --seed 2 are both given. Keep one."]),
        (
            ["--config", "a.yaml", "--config", "b.yaml"],
            ["--config a.yaml and --config b.yaml are both given. Keep one."],
        ),
        (["--seed"], ["seed needs a value. Write --seed VALUE or --seed=VALUE."]),
        (["--resume", "--seed", "1"], ["resume needs a value."]),
        (["--seed="], ["seed must be an integer; got ''."]),
        (["--seed", "010"], ["seed must be an integer; ", "without leading zeros"]),
        (["--seed", "1_000"], ["seed must be an integer; got '1_000'. Write it like 12 or 1.5e-3"]),
        (["--config="], ["cannot be read: Is a directory. Name a YAML file."]),
        (["run.yaml"], ["'run.yaml' is not a setting. Name the file with --config run.yaml."]),
        (["--seed", "1", "2"], ["'2' is not a setting. Write settings as --key VALUE."]),
        (["-s", "1"], ["'-s' is not a setting."]),
        (["--"], ["'--' is not a setting."]),
        (["--gossip", "3"], ["gossip must be a section with keys such as power; got 3."]),
        (["--gossip", "null", "--gossip.power", "3"], ["--gossip null and --gossip.power 3 are both given. Keep one."]),
        (["--gossip.power", "3", "--gossip", "null"], ["--gossip.power 3 and --gossip null are both given. Keep one."]),
        (["--name", "\udcff"], ["'\\udcff' is not UTF-8 text. Retype it."]),
        (["--optimizer", "{lr: 3}"], ["optimizer must be a section with keys such as lr; got '{lr: 3}'."]),
        (["--print_config=1"], ["unknown key print_config"]),
        (["--resume", "yes"], ["resume must be true or false; got 'yes'."]),
        (["--weights", "{a: 1, a: 2}"], ["command line:1: a is given twice. Keep one."]),
        (["--weights", "a"], ["command line: weights must be named values (each a number); got ['a']."]),
        (["--optimizer.betas", "[0.9"], ["command line:1: invalid YAML"]),
        (["--optimizer.betas", "[0.9, '1']"], ["got [0.9, '1']. Remove the quotes."]),
    ],
)
def test_mistakes_on_the_command_line_are_refused_by_name(argv, words):
    with pytest.raises(ConfigError) as caught:
        parse_config(Run, argv)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unreadable_files_are_refused_with_their_absolute_path(write, tmp_path, monkeypatch):
    def refusal(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            parse_config(Run, ["--config", name])
        return str(caught.value)

    write(b"name: \xff")
    (tmp_path / "folder").mkdir()
    assert f"{tmp_path / 'absent.yaml'} does not exist." in refusal("absent.yaml")
    assert "does not exist." in refusal("~nobody-at-all/run.yaml")
    assert f"{tmp_path / 'folder'} cannot be read: Is a directory. Name a YAML file." in refusal("folder")
    assert f"{tmp_path / 'run.yaml'} cannot be read: 'utf-8' codec can't decode byte 0xff in position 6" in refusal(
        "run.yaml"
    )

    def denied(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert (
        refusal("run.yaml") == f"config file {tmp_path}/run.yaml cannot be read: Permission denied. Name a YAML file."
    )


def test_a_file_to_write_is_tried_and_left_as_it_was(tmp_path):
    report = tmp_path / "made" / "report.json"
    assert check_writable("--json", report) == report
    assert list(report.parent.iterdir()) == []
    report.write_text("earlier")
    check_writable("--json", report)
    assert report.read_text() == "earlier"
    for place in (report / "below_a_file", tmp_path, Path("/proc/nobody/can/write/here"), Path("/proc/nor_here")):
        with pytest.raises(ValueError, match=f"--json must be a file that can be written; {place} is not"):
            check_writable("--json", place)


def test_values_without_a_default_are_required(tmp_path):
    with pytest.raises(ConfigError, match=r"^path must be given\. Set it in the file or with --path VALUE\."):
        parse_config(Needy, [])
    assert parse_config(Needy, ["--path", str(tmp_path)]).path == tmp_path


def test_an_alias_bomb_is_refused_quickly(write):
    levels = [f"  - &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 30)]
    with pytest.raises(ConfigError, match=r"run.yaml has too many values"):
        parse_config(Run, ["--config", write("\n".join(["seed:", "  - &a0 [x]", *levels]))])


NAMES = [path for path in keys_of(Run) if len(path.rpartition(".")[2]) >= 4]


@settings(deadline=None)
@given(path=st.sampled_from(NAMES), position=st.integers(0, 30), is_doubled=st.booleans())
def test_misspelt_keys_are_refused_with_the_right_suggestion(path, position, is_doubled):
    section, dot, name = path.rpartition(".")
    place = position % len(name)
    misspelt = f"{section}{dot}{name[:place]}{name[place] * 2 if is_doubled else ''}{name[place + 1 :]}"
    with pytest.raises(ConfigError) as caught:
        parse_config(Run, [f"--{misspelt}", "1"])
    assert str(caught.value) == f"command line: unknown key {misspelt}. Did you mean {path}?"


def test_configs_do_not_share_their_mutable_defaults():
    first, second = parse_config(Run, []), parse_config(Run, [])
    first.weights["a"] = 1.0
    first.optimizer.milestones.append(3)
    assert (second.weights, second.optimizer.milestones) == ({}, [])
    assert (parse_config(Run, []).weights, Run().weights) == ({}, {})


# Help and exit codes


def test_help_lists_every_key_with_type_default_and_meaning(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stopped:
        parse_config(Run, ["--seed", "abc", "--help"], prog="train.py", description="Train it.")
    page = capsys.readouterr().out
    assert stopped.value.code == 0
    assert [path for path, key in keys_of(Run).items() if not key.section and f"--{path} " not in page] == []
    for text in (
        "usage: train.py [--config FILE.yaml]",
        "Train it.",
        "--optimizer.lr VALUE Peak learning rate. (a number; default: 0.05)",
        "data: Where the samples come from.",
        "--optimizer.betas VALUE (a list of 2 (a number, a number); default: [0.9, 0.999])",
        "--tracker VALUE (text or null; default: null)",
        "earlier steps mix with gamma 1",
        "starts from the folder of that file",
    ):
        assert text in " ".join(page.split())


@pytest.mark.parametrize("words", [[], ["--seed=3", "--gossip.power=2", "--data.path=shards", "--tracker=none"]])
def test_a_printed_config_runs_and_gives_an_equal_one(words, write, capsys, tmp_path):
    given_words = ["--config", write("name: 'no'\noptimizer: {betas: [0.9, 0.98]}\n"), *words]
    with pytest.raises(SystemExit) as stopped:
        parse_config(Run, [*given_words, "--print_config"])
    assert stopped.value.code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert parse_config(Run, ["--config", str(printed)]) == parse_config(Run, given_words)


def test_a_config_is_checked_before_it_is_printed(capsys):
    with pytest.raises(ConfigError, match=r"gossip\.power must be"):
        parse_config(Run, ["--print_config", "--gossip.power=-1"])
    assert capsys.readouterr().out == ""


def test_of_several_launched_workers_only_the_first_one_prints(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for words in (["--help"], ["--print_config"]):
        with pytest.raises(SystemExit) as stopped:
            parse_config(Run, words)
        assert stopped.value.code == 0
    assert capsys.readouterr() == ("", "")


def test_help_does_without_source_text(capsys):
    made = dataclasses.make_dataclass("Made", [("size", int), ("name", str, "x")], frozen=True)
    with pytest.raises(SystemExit):
        parse_config(made, ["-h"])
    assert "(an integer; required)" in capsys.readouterr().out


def test_the_command_line_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "4"])
    assert parse_config(Run).seed == 4


# Writing

finite = st.floats(allow_nan=False, allow_infinity=False)
unit = st.floats(0, 1)
words = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from([
    "none", "null", "~", "true", "no", "off", "1e-3", "012", "1:30", ".nan", "<<", "=",
    "a: b", "#x", "- a", "'", '"', " ",
])  # fmt: skip
paths = st.text(string.ascii_letters + " #:'~é", min_size=1, max_size=8).map(lambda name: Path("/data") / name)
gossips = st.builds(
    GossipConfig,
    topology=st.sampled_from(sorted(TOPOLOGIES)),
    power=st.floats(0, 1e300),
    start_step=st.none() | st.integers(0, 10**9),
    max_lr=st.sampled_from(["active", "run"]) | st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    floor=st.floats(0, 0.5),
    constant=st.none() | st.floats(0.5, 1),
    order=st.sampled_from(["local_first", "mix_first"]),
    overlap=st.booleans(),
    log_every=st.integers(0, 10**9),
    timeout=st.floats(1e-300, 1e9),
)
runs = st.builds(
    Run,
    seed=st.integers(-(10**30), 10**30),
    name=words,
    mixed_precision=st.sampled_from(["no", "bf16"]),
    tracker=st.none() | words,
    resume=st.booleans(),
    limit=st.none() | st.integers(),
    weights=st.dictionaries(words, finite, max_size=3),
    data=st.builds(Data, path=paths, files=st.lists(words, max_size=3).map(tuple), cache=st.none() | paths),
    optimizer=st.builds(
        Optimizer, lr=finite, betas=st.tuples(unit, unit), milestones=st.lists(st.integers(), max_size=3)
    ),
    gossip=st.none() | gossips,
)


@settings(deadline=None)
@given(run=runs)
def test_a_dumped_config_loads_back_equal(run, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    loaded = from_yaml(dump_config(run), folder)
    assert loaded == run
    assert repr(loaded) == repr(run)  # 3 and 3.0, 0.0 and -0.0 are told apart


@settings(deadline=None, max_examples=25)
@given(
    algorithm=st.sampled_from(["sgd", "dsgd_ac", "dadam_ac"]),
    learning_rate=st.floats(1e-300, 1e30),
    epochs=st.integers(1, 10**9),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    gossip=gossips,
    resume=st.sampled_from(["auto", "never"]) | paths,
)
def test_the_config_that_a_run_writes_loads_back_equal(
    algorithm, learning_rate, epochs, betas, gossip, resume, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("run")
    config = CifarConfig(
        algorithm=algorithm,
        learning_rate=learning_rate,
        num_train_epochs=epochs,
        warmup_epochs=0.0,
        betas=betas,
        gossip=gossip,
        resume_from_checkpoint=resume,
        report_to=(),
        output_dir=folder,
    )
    file = folder / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    loaded = load_config(CifarConfig, file)
    assert loaded == config
    assert repr(loaded) == repr(config)


@settings(deadline=None)
@given(run=runs)
def test_other_yaml_readers_see_the_same_text(run):
    assert yaml.safe_load(dump_config(run))["name"] == run.name


@settings(deadline=None)
@given(value=finite, count=st.integers(), word=words.filter(bool))
def test_command_line_values_keep_every_digit_and_letter(value, count, word):
    run = parse_config(Run, [f"--optimizer.lr={value!r}", f"--seed={count}", f"--name={word}"])
    assert (repr(run.optimizer.lr), run.seed, run.name) == (repr(value), count, word)


def test_a_topology_is_written_as_its_name():
    assert config_to_dict(GossipConfig(topology=build_topology("ring", 4)))["topology"] == "ring"


def test_every_value_has_one_line_and_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = dump_config(Data(path=Path("shards"), files=("a word " * 30,))).splitlines()
    assert lines[0] == f"path: {tmp_path}/shards"
    assert len(lines) == 3


def test_what_a_class_computes_by_itself_is_no_setting():
    derived = dataclasses.make_dataclass("Derived", [("size", int, 1), ("area", int, field(init=False, default=1))])
    assert list(keys_of(derived)) == ["size"]
    assert config_to_dict(derived()) == {"size": 1}


def test_a_section_with_a_name_is_written_in_full():
    assert config_to_dict(Outer()) == {"model": {"name": "wrn", "depth": 16}}


@dataclass(frozen=True)
class Model:
    name: str = "wrn"
    depth: int = 16


@dataclass(frozen=True)
class Outer:
    model: Model = Model()


def test_what_yaml_cannot_hold_is_refused_by_path():
    with pytest.raises(TypeError, match=r"optimizer\.milestones: .*cannot be written to a file"):
        dump_config(Run(optimizer=Optimizer(milestones=[1j])))  # type: ignore[list-item]


def test_workers_with_other_settings_are_told_each_key_and_both_values(tmp_path):
    ours = CifarConfig(output_dir=tmp_path, gossip=GossipConfig(topology=build_topology("ring", 4)))
    other = dataclasses.replace(ours, seed=3, gossip=GossipConfig(topology=build_topology("ring", 5)))
    for theirs, words in (
        (ours, []),
        (other, ["worker 1: seed = 3, but worker 0: seed = 0", "worker 1: gossip.topology = ring "]),
    ):
        everyone = [flat_settings(ours), flat_settings(theirs)]
        accelerator: Any = SimpleNamespace(group=SimpleNamespace(all_gather_object=lambda *_, all_=everyone: all_))
        with pytest.raises(ValueError, match=r"^configuration: ") if words else nullcontext() as caught:
            OutputDir(ours, accelerator)
        assert all(word in str(caught and caught.value) for word in words)
