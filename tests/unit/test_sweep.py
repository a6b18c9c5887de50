"""Sweep files: what they may say, which runs they make, and the commands that start those."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dsgdac_accel.cli import main
from tasks.common.config import ConfigError
from tasks.studies.config import load_sweep
from tasks.studies.plan import planned_runs, settings_of
from tasks.studies.preflight import require_startable, require_valid
from tasks.studies.smoke import small

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


CHOOSE_NOTHING = {"choose": {}}
CROSSED = {"variants": {"a": {}, "b": {}}, "grid": {"gossip.power": [1, 2]}}


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
        (
            CROSSED | {"report": {"baselines": {"power=1": "a"}}},
            "baselines: power=1 is compared with a in rows .* none",
        ),
        (CROSSED | {"report": {"baselines": {"a": "a"}}}, "baselines: a is compared with a in rows .* none"),
        ({"variants": {"a": {}}, "report": {"baselines": ["a"]}}, "a setting is compared with a in rows .* none"),
        (
            {"variants": {"a": {}, "b": {}}, "grid": {"c": {"a": {}, "b": {}}}, "report": {"baselines": ["a"]}},
            "baselines: 'a' must be one label; 2 axes have it. Rename one",
        ),
        ({"report": {"figures": ["raduis"]}}, "figures must be one of radius"),
        ({"report": {"columns": []}}, "columns must name at least one"),
        ({"report": {"columns": ["test_loss@max"]}}, "columns: test_loss@max: only a metric"),
        ({"settings": {"resume_from_checkpoint": "never"}}, "resume_from_checkpoint is set by the sweep. Unfinished"),
        ({"launch": {"processes": 2}}, "kind python starts one process; got processes = 2. Use torchrun"),
        ({"launch": {"kind": "accelerate", "config_file": "no.yaml"}}, r"no\.yaml does not exist"),
        ({"launch": {"kind": "torchrun", "config_file": "base.yaml"}}, "config_file is for kind accelerate"),
        ({"launch": {"kind": "mpirun"}}, "launch.kind must be one of 'python', 'accelerate', 'torchrun'"),
        ({"launch": {"nodes": 2}}, "kind python starts one process; got nodes = 2. Use torchrun"),
        ({"variants": {"a": {"launch.node": 2}}}, r"a: unknown key launch\.node\. Did you mean 'nodes'"),
        ({"variants": {"a": {"launch.nodes": "two"}}}, r"a: launch: nodes must be an integer"),
        ({"paper": {"bas": {"test_loss": 1}}}, "paper: no setting is called 'bas'. Did you mean 'base'"),
        ({"paper": {"base": {"test_los": 1}}}, "paper.base: the column must be one of .* Did you mean 'test_loss'"),
        ({"paper": {"base": {"test_loss": "about 1"}}}, "paper: a value must be like 79.71 ± 0.13, '79.71' or 96; got"),
        ({"paper": {"base": {"test_loss": 80.0}}}, r"paper: a value with a point must be quoted.* got 80\.0"),
        ({"paper": {"base": {"test_loss": 1}}, "report": CHOOSE_NOTHING}, "paper: .*report.choose shows methods. Drop"),
        ({"variants": {"a": {"launch.kind": "fast"}}}, "a: launch: kind must be one of python, .* got 'fast'"),
        ({"settings": {"launch.kind": None}}, "base: launch: kind must be one of .* got None"),
        ({"grid": {"gossip.power": [1, 2, 1.0]}}, r"grid\.gossip\.power: 1 and 1\.0 are the same value"),
        ({"smoke": {"only": ["dsgd"]}}, "smoke.only: no variant or grid value is called 'dsgd'"),
        ({"smoke": {"seeds": []}}, "smoke.seeds must be one or more, each once"),
        ({"smoke": {"file": "none.yaml"}}, r"smoke.file must be settings of the task; .*none\.yaml does not exist"),
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


# ---- what this machine cannot start, or no machine could


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"launch": {"kind": "torchrun", "processes": 4}, "settings": {"global_batch_size": 30}},
            "base: global_batch_size must divide evenly: 30 over 4 workers .* Use a multiple of 4",
        ),
        (
            {"grid": {"gossip.workers_per_process": [4, 6]}, "settings": {"gossip.topology": "one_peer_exponential"}},
            "workers_per_process=6: .*one_peer_exponential needs",
        ),
    ],
)
def test_a_grid_that_no_number_of_workers_can_run_is_found_in_the_plan(tmp_path, keys, message):
    file = real_sweep(tmp_path, **{"settings": {"global_batch_size": 48}} | keys)
    with pytest.raises(ConfigError, match=message):
        require_valid(load_sweep(file), plan(file))


def test_synchronous_algorithms_have_no_topology(tmp_path):
    settings = {"algorithm": "sgd", "gossip.topology": "one_peer_exponential", "gossip.workers_per_process": 6}
    file = real_sweep(tmp_path, settings=settings | {"global_batch_size": 48})
    require_valid(load_sweep(file), plan(file))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"launch": {"kind": "torchrun", "gpus": 99}},
            r"base: a run takes 99 GPUs and this machine has \d+: .* --smoke",
        ),
        (
            {"launch": {"kind": "torchrun", "nodes": 2}},
            "base: a run takes 2 machines and this is one: .* --print-commands or --slurm",
        ),
        (
            {"settings": {"data.path": "./base.yaml"}},
            r"base: A file as data\.path must be \*\.parquet; got .*base\.yaml",
        ),
        ({"settings": {"data.path": "./data"}}, "base: Evaluation needs a split named 'test'.*; found only 'train'"),
        (
            {"settings": {"data.path": "./data", "data.test_split": "dev"}},
            "base: test_split must be a split other than 'train'; got 'dev'",
        ),
        ({"settings": {"data.path": "./none"}}, r"base: data\.path must exist; got .*none\. .* --set data\.path=PATH"),
    ],
)
def test_what_this_machine_cannot_start_is_refused_but_can_be_printed(tmp_path, capsys, keys, message):
    file = real_sweep(tmp_path, **keys)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").touch()
    with pytest.raises(ConfigError, match=message):
        require_startable(load_sweep(file), plan(file))
    assert main(["sweep", str(file)]) == 2
    assert not (tmp_path / "runs").exists()
    assert main(["sweep", str(file), "--print-commands"]) == 0
    assert "cifar.py" in capsys.readouterr().out


def test_local_text_without_a_split_is_found_in_the_plan_and_its_files_are_not_read(tmp_path):
    file = write_sweep(tmp_path, task=str(ROOT / "tasks" / "wmt14.py"), settings={"data.path": "./data"})
    (tmp_path / "base.yaml").write_text("batch_tokens: 100")
    (tmp_path / "data").mkdir()
    for kind, message in [("train", "no split named 'test'; found 'train'"), ("test", "no split named 'validation'")]:
        (tmp_path / "data" / f"{kind}.parquet").touch()
        with pytest.raises(ConfigError, match=rf"base: The corpus \(files in .*data\) has {message}"):
            require_startable(load_sweep(file), plan(file))
    (tmp_path / "data" / "dev.parquet").touch()
    require_startable(load_sweep(file), plan(file))


# ---- several machines


def test_a_line_for_several_machines_reads_rank_and_address_and_stops_without_them(tmp_path):
    launch = {"kind": "torchrun", "processes": 8}
    grid = {"nodes": {"1 node": {"learning_rate": 1}, "2 nodes": {"launch.nodes": 2}}}
    one, two = plan(write_sweep(tmp_path, launch=launch, grid=grid))
    assert "--standalone" in one.shell_line()
    assert "launch.nodes" not in two.expected
    assert two.shell_line().startswith(
        'torchrun --nnodes=2 "--node_rank=${NODE_RANK:?}" "--master_addr=${MASTER_ADDR:?}" '
        '"--master_port=${MASTER_PORT:-29500}" --nproc_per_node=8 '
    )
    two = plan(write_sweep(tmp_path, launch=launch | {"kind": "accelerate", "nodes": 2}))[0]
    assert two.shell_line().startswith(
        "accelerate launch --multi_gpu --num_processes=16 --num_machines=2 "
        '"--machine_rank=${NODE_RANK:?}" "--main_process_ip=${MASTER_ADDR:?}" '
        '"--main_process_port=${MASTER_PORT:-29500}" '
    )
    done = subprocess.run(["/bin/sh", "-c", two.shell_line()], capture_output=True, text=True, env={})
    assert done.returncode != 0
    assert "NODE_RANK" in done.stderr


# ---- small runs


SMALL = {
    "variants": {"plain": {"algorithm": "dsgd"}, "ours": {"learning_rate": 2}},
    "grid": {"gossip.power": [0, 3], "nodes": {"one": {}, "two": {"launch.nodes": 2}}},
    "launch": {"kind": "torchrun", "processes": 8},
    "seeds": [0, 1, 2],
    "report": {"columns": ["test_loss"], "baselines": ["plain", "power=0"]},
    "paper": {"ours, power=3, two": {"test_loss": "1.0"}, "plain, power=0, two": {"test_loss": "1.0"}},
}


def small_plan(file):
    sweep = small(load_sweep(file))
    return sweep, planned_runs(sweep, file.parent, rules=sweep.smoke)


def test_small_runs_follow_the_rules_of_the_study_and_have_a_folder_of_their_own(tmp_path):
    (tmp_path / "tiny.yaml").write_text("momentum: 0\nsize: 9\n")
    smoke = {
        "file": "tiny.yaml",
        "settings": {"size": 8},
        "replace": {"learning_rate": {0.5: 0.25, 2: 1}, "gossip.power": {3: 1}, "set.nowhere": {5: 1}},
        "only": ["power=3", "two"],
        "seeds": [7],
    }
    file = write_sweep(tmp_path, **SMALL, smoke=smoke)
    sweep, runs = small_plan(file)
    assert sweep.title.startswith("Small scale (smoke run)")
    assert [run.name for run in runs] == ["plain,power=3,two/seed_7", "ours,power=3,two/seed_7"]
    assert [run.expected["learning_rate"] for run in runs] == [0.25, 1]
    for run in runs:
        assert run.folder.parent.parent == tmp_path / "runs_smoke"
        assert (run.expected["gossip.power"], run.expected["size"], run.expected["momentum"]) == (1, 8, 0)
        assert "set.nowhere" not in run.expected
        assert (run.launch.kind, run.launch.nodes, run.launch.threads) == ("python", 1, 1)
    assert sweep.report.baselines == ["plain"]
    assert list(sweep.paper) == ["ours, power=3, two"]


def test_a_value_without_a_rule_and_a_study_without_rules_are_refused(tmp_path):
    file = write_sweep(tmp_path, **SMALL, smoke={"replace": {"learning_rate": {2: 1}}})
    with pytest.raises(
        ConfigError, match=r"smoke.replace.learning_rate: there is nothing for the value 0.5, only for 2"
    ):
        small_plan(file)
    with pytest.raises(ConfigError, match="smoke: there are no rules for small runs"):
        small(load_sweep(write_sweep(tmp_path)))


def test_a_study_of_the_runs_of_another_one_reports_them_in_its_own_folder(tmp_path):
    write_sweep(tmp_path, **SMALL, smoke={"settings": {"gossip.power": 1}})
    view = tmp_path / "view.yaml"
    view.write_text("title: Curves\nruns_of: sweep.yaml\noutput_dir: seen\nreport: {columns: [radius]}\n")
    assert [run.folder for run in plan(view)] == [run.folder for run in plan(tmp_path / "sweep.yaml")]
    sweep = load_sweep(view)
    assert (sweep.title, sweep.output_dir, sweep.report.columns, sweep.paper) == (
        "Curves",
        tmp_path / "seen",
        ["radius"],
        {},
    )
    sweep, runs = small_plan(view)
    assert sweep.output_dir == tmp_path / "seen_smoke"
    assert [run.folder for run in runs] == [run.folder for run in small_plan(tmp_path / "sweep.yaml")[1]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("runs_of: none.yaml", r"view\.yaml: runs_of: .*none\.yaml is no sweep file in the folder"),
        ("runs_of: view.yaml", r"view\.yaml: runs_of: .*view\.yaml shows the runs of another file itself"),
        ("runs_of: sweep.yaml\nreport: {baselines: [zzz]}", r"view\.yaml: report\.baselines: no row .* called 'zzz'"),
    ],
)
def test_a_study_of_the_runs_of_no_sweep_is_refused_by_name(tmp_path, keys, message):
    write_sweep(tmp_path, **SMALL)
    view = tmp_path / "view.yaml"
    view.write_text(f"title: Curves\noutput_dir: seen\n{keys}\n")
    with pytest.raises(ConfigError, match=message):
        load_sweep(view)


@pytest.mark.parametrize(
    ("key", "message"), [("gossip.start_epok", "Did you mean gossip.start_epoch"), ("gossip", "unknown key gossip")]
)
def test_a_rule_for_a_key_that_the_task_does_not_have_is_refused(tmp_path, key, message):
    file = real_sweep(tmp_path, smoke={"replace": {key: {"5": 1}}})
    with pytest.raises(ConfigError, match=rf"smoke\.replace: .*{message}"):
        small(load_sweep(file))


def test_a_launcher_given_on_the_command_line_is_checked(tmp_path, capsys):
    assert main(["sweep", str(write_sweep(tmp_path)), "--list", "--set", "launch.kind=fast"]) == 2
    assert "launch: kind must be one of python" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["sweep", "--list"], ["report", "--no-figures"]])
def test_a_misspelt_key_on_the_command_line_is_refused_with_the_right_one(tmp_path, capsys, command):
    file = real_sweep(tmp_path)
    assert main([command[0], str(file), "--set", "learning_rte=1", *command[1:]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "learning_rte" in captured.err
    assert "learning_rate" in captured.err
