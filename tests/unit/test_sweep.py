"""Sweep files: what they may say, which runs they make, and the commands that start those."""

import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tasks.common.config import ConfigError
from tasks.studies.config import load_sweep
from tasks.studies.plan import planned_runs, require_valid, settings_of

ROOT = Path(__file__).resolve().parents[2]
TASK = Path(__file__).with_name("fake_task.py")
BASE = {"algorithm": "dsgd_ac", "learning_rate": 0.5, "gossip": {"power": 3}, "output_dir": "../elsewhere"}


def write_sweep(folder, **keys):
    """A sweep file over the fake task, and its base."""
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    values = {"task": str(TASK), "base": "base.yaml", "output_dir": "runs"} | keys
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def plan(file):
    return planned_runs(load_sweep(file), file.parent)


def arguments(run):
    """The keys that a command sets, as written."""
    words = run.command[run.command.index(str(TASK)) + 1 :]
    assert words[:1] == ("--config",)
    return dict(word.removeprefix("--").split("=", 1) for word in words[2:])


def test_a_run_is_a_variant_times_the_grid_times_a_seed_in_the_order_of_the_file(tmp_path):
    file = write_sweep(
        tmp_path,
        seeds=[4, 7],
        variants={"plain": {"algorithm": "dsgd"}, "ours": {}},
        grid={"gossip.power": [0, 2.5], "size": {"big": {"batch_size": 8}}},
    )
    names = [run.name for run in plan(file)]
    settings = [
        "plain,power=0,big", "plain,power=2.5,big", "ours,power=0,big", "ours,power=2.5,big",
    ]  # fmt: skip
    assert names == [f"{setting}/seed_{seed}" for seed in (4, 7) for setting in settings]
    assert arguments(plan(file)[1]) == {
        "algorithm": "dsgd",
        "gossip.power": "2.5",
        "batch_size": "8",
        "seed": "4",
        "output_dir": str(tmp_path / "runs" / "plain,power=2.5,big" / "seed_4"),
    }


def test_without_variants_and_grid_the_base_runs_with_every_seed(tmp_path):
    assert [run.name for run in plan(write_sweep(tmp_path, seeds=[0, 1]))] == ["base/seed_0", "base/seed_1"]


def test_the_grid_wins_over_variants_and_they_over_settings(tmp_path):
    file = write_sweep(
        tmp_path,
        settings={"learning_rate": 1, "gossip": {"power": 1, "floor": 0.1}, "momentum": 0},
        variants={"v": {"gossip.power": 2, "learning_rate": 2}},
        grid={"learning_rate": [3]},
    )
    (run,) = plan(file)
    assert {key: arguments(run)[key] for key in ("learning_rate", "gossip.power", "gossip.floor", "momentum")} == {
        "learning_rate": "3", "gossip.power": "2", "gossip.floor": "0.1", "momentum": "0",
    }  # fmt: skip
    assert run.expected == {"algorithm": "dsgd_ac"} | {
        "learning_rate": 3, "gossip.power": 2, "gossip.floor": 0.1, "momentum": 0, "seed": 0,
    }  # fmt: skip


def test_a_section_that_is_nulled_drops_its_keys_and_a_key_revives_it(tmp_path):
    file = write_sweep(tmp_path, variants={"off": {"gossip": None}, "on": {"gossip.power": 1}})
    off, on = plan(file)
    assert {key for key in off.expected if key.startswith("gossip")} == {"gossip"}
    assert on.expected["gossip.power"] == 1


def test_values_are_spelled_as_a_task_reads_them(tmp_path):
    from dataclasses import dataclass

    from tasks.common.config import parse_config

    @dataclass(frozen=True)
    class Task:
        betas: tuple[float, float] = (0.0, 0.0)
        flag: bool = False
        limit: int | None = 3
        word: str = ""
        tiny: float = 0.0
        trackers: tuple[str, ...] = ("tensorboard",)

    values = {"betas": [0.9, 0.98], "flag": True, "limit": None, "word": "a b", "tiny": 1e-9, "trackers": []}
    (run,) = plan(write_sweep(tmp_path, settings=values))
    words = [word for word in run.command if word.startswith("--") and word.split("=")[0][2:] in values]
    assert parse_config(Task, words) == Task((0.9, 0.98), True, None, "a b", 1e-9, ())


def test_relative_paths_start_from_the_folder_of_the_sweep_file(tmp_path, monkeypatch):
    file = write_sweep(tmp_path, settings={"data.path": "../images", "data.cache": "./here", "data.name": "a/../b"})
    monkeypatch.chdir("/")
    (run,) = plan(file)
    assert arguments(run)["data.path"] == str(tmp_path.parent / "images")
    assert arguments(run)["data.cache"] == str(tmp_path / "here")
    assert arguments(run)["data.name"] == "a/../b"
    assert run.folder == tmp_path / "runs" / "base" / "seed_0"


@pytest.mark.parametrize(
    ("launch", "start"),
    [
        ({}, ["python"]),
        ({"threads": 2}, ["OMP_NUM_THREADS=2", "python"]),
        ({"kind": "torchrun", "processes": 4}, ["torchrun", "--standalone", "--nproc_per_node=4"]),
        ({"kind": "accelerate", "processes": 8}, ["accelerate", "launch", "--multi_gpu", "--num_processes=8"]),
    ],
)
def test_a_shell_line_starts_what_the_command_starts(tmp_path, launch, start):
    (run,) = plan(write_sweep(tmp_path, launch=launch, settings={"word": "it's; a $trap"}))
    words = shlex.split(run.shell_line())
    assert words[: len(start)] == start
    assert run.command[0] == sys.executable
    assert tuple(words[words.index(str(TASK)) :]) == run.command[run.command.index(str(TASK)) :]


def test_what_a_shell_line_or_a_list_cannot_hold_is_refused(tmp_path):
    (run,) = plan(write_sweep(tmp_path, settings={"word": "begin\n$(touch here)"}))
    with pytest.raises(ConfigError, match=r"base/seed_0: a shell line cannot hold the line break in '--word=begin"):
        run.shell_line()
    with pytest.raises(ValueError, match="'a,b' holds one"):
        plan(write_sweep(tmp_path, settings={"trackers": ["a,b", "c"]}))


def test_a_launch_file_decides_on_the_processes_unless_they_are_given(tmp_path):
    (tmp_path / "launch.yaml").write_text("num_processes: 4\n")
    given = {"kind": "accelerate", "config_file": "launch.yaml"}
    (run,) = plan(write_sweep(tmp_path, launch=given))
    assert f"--config_file={tmp_path / 'launch.yaml'}" in run.command
    assert not any(word.startswith("--num_processes") for word in run.command)
    (run,) = plan(write_sweep(tmp_path, launch=given | {"processes": 2}))
    assert "--num_processes=2" in run.command


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"base": "none.yaml"}, r"sweep\.yaml: base: .*none\.yaml does not exist\. Name the configuration"),
        ({"task": "none.py"}, r"sweep\.yaml: task: .*none\.py does not exist"),
        ({"seed": [1]}, r"unknown key seed\. Did you mean seeds\?"),
        ({"seeds": []}, r"seeds must be one or more, each once; got \[\]"),
        ({"seeds": [1, 1]}, "each once"),
        ({"seeds": [-1]}, "seeds must be an integer >= 0; got -1"),
        ({"settings": {"seed": 3}}, r"settings: seed is set by the sweep\. List the seeds as seeds"),
        ({"variants": {"a": {"output_dir": "x"}}}, r"variants\.a: output_dir is set by the sweep"),
        ({"grid": {"seed": [1, 2]}}, "grid: seed is set by the sweep"),
        ({"seeds": [2**32]}, "seeds must be an integer from 0 to 4294967295; got 4294967296"),
        ({"settings": {"betas": [[0.9], 0.99]}}, r"betas: a list .* holds plain values; got \[0\.9\] in"),
        ({"settings": {"curvature": {}}}, "curvature: a section cannot be one value"),
        ({"grid": {"data": [{"name": "digits"}]}}, "a section cannot be one value .* Name the keys in it"),
        ({"grid": {"learning_rate": []}}, "grid.learning_rate: must list at least one value"),
        ({"variants": {"a b": {}, "a_b": {}}}, "two settings would share the folder"),
        ({"variants": {"dsgd": {}}, "report": {"baselines": ["sgdd"]}}, r"called 'sgdd'\. Did you mean 'dsgd'\?"),
        ({"report": {"figures": ["raduis"]}}, "figures must be one of lr_radius"),
        ({"report": {"columns": []}}, "columns must name at least one"),
        ({"report": {"columns": ["test_loss@max"]}}, "columns: test_loss@max: only a metric"),
        ({"settings": {"resume_from_checkpoint": "never"}}, "resume_from_checkpoint is set by the sweep. Unfinished"),
        ({"launch": {"processes": 2}}, "kind python starts one process; got processes = 2. Use torchrun"),
        ({"launch": {"kind": "accelerate", "config_file": "no.yaml"}}, r"no\.yaml does not exist"),
        ({"launch": {"kind": "torchrun", "config_file": "base.yaml"}}, "config_file is for kind accelerate"),
        ({"launch": {"kind": "mpirun"}}, "launch.kind must be one of 'python', 'accelerate', 'torchrun'"),
    ],
)
def test_a_mistake_is_one_clear_error(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message) as caught:
        plan(write_sweep(tmp_path, **keys))
    assert "\n" not in str(caught.value)


def test_a_base_that_is_no_yaml_and_a_sweep_that_is_not_there_are_named(tmp_path):
    file = write_sweep(tmp_path)
    (tmp_path / "base.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"sweep\.yaml: .*base\.yaml:1: invalid YAML"):
        load_sweep(file)
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist"):
        load_sweep(tmp_path / "none.yaml")


def test_labels_of_any_kind_become_folders_that_stay_inside(tmp_path):
    labels = ["../up", "a/b", ".hidden", "ünïcode ok", "p|q"]
    file = write_sweep(tmp_path, variants={label: {} for label in labels})
    for setting in settings_of(load_sweep(file), tmp_path):
        assert (tmp_path / setting.folder).resolve().parent == tmp_path
        assert not setting.folder.startswith(".")


# ---- a task of the package refuses settings before any run starts


def real_sweep(folder, **keys):
    base = {"algorithm": "dsgd_ac", "data": {"name": "digits"}, "model": "mlp"}
    file = write_sweep(folder, task=str(ROOT / "tasks" / "cifar.py"), **keys)
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    return file


def test_settings_that_the_task_knows_are_valid(tmp_path):
    file = real_sweep(tmp_path, variants={"plain": {"algorithm": "dsgd"}, "ours": {}}, grid={"gossip.power": [1, 2]})
    require_valid(load_sweep(file), plan(file))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"settings": {"learning_rat": 0.1}}, "base: .*learning_rat"),
        ({"variants": {"ours": {}, "plain": {"gossip.powr": 0}}}, "plain: .*powr"),
        ({"grid": {"gossip.power": [1, -1]}}, "power=-1: .*power must be"),
    ],
)
def test_a_setting_that_the_task_refuses_is_found_in_the_plan(tmp_path, keys, message):
    file = real_sweep(tmp_path, **keys)
    with pytest.raises(ConfigError, match=message):
        require_valid(load_sweep(file), plan(file))


def test_settings_of_another_script_are_left_to_it(tmp_path):
    file = write_sweep(tmp_path, settings={"learning_rat": 0.1})
    require_valid(load_sweep(file), plan(file))
