"""From a sweep to its runs: their names, the keys of the task that they set, and the commands that start them."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dsgdac_accel.checks import did_you_mean
from tasks.common.config import ConfigError
from tasks.common.known_tasks import base_values, flat_values
from tasks.studies.config import (
    LaunchConfig,
    SmokeConfig,
    SweepConfig,
    refuse_reserved,
    setting_name,
    spelled,
    value_label,
)
from tasks.studies.smoke import shrunk

Overrides = dict[str, Any]
"""Values of a task's keys, by dotted key."""

_UNSAFE = re.compile(r"[^\w.=+-]+")
_MODULES = {"accelerate": ["-m", "accelerate.commands.launch"], "torchrun": ["-m", "torch.distributed.run"]}

RANK, ADDRESS, PORT = "${NODE_RANK:?}", "${MASTER_ADDR:?}", "${MASTER_PORT:-29500}"
"""A shell fills these in on each of several machines: its number from 0, and address and port of the first one."""

_LAUNCH = "launch."
"""Keys that a variant or a grid value sets for the launcher begin with it."""


@dataclass(frozen=True)
class Setting:
    """One row of a report: a combination of a variant and a value from every list of the grid."""

    labels: tuple[str, ...]
    """One label per axis: the variant first, then the grid in the order of the file; () without either."""

    overrides: Overrides
    """Keys of the task that differ from base."""

    @property
    def name(self) -> str:
        """All labels.

        >>> Setting(("dsgd_ac", "power=3"), {}).name
        'dsgd_ac, power=3'
        """
        return setting_name(self.labels)

    @property
    def folder(self) -> str:
        """The name of its folder.

        >>> Setting(("DSGD-AC ring", "power=3"), {}).folder
        'DSGD-AC_ring,power=3'
        """
        return ",".join(_UNSAFE.sub("_", label).strip("_.") or "_" for label in self.labels) or "base"


@dataclass(frozen=True)
class PlannedRun:
    """A setting with one seed."""

    setting: Setting
    seed: int
    folder: Path
    """Output folder."""
    command: tuple[str, ...]
    """Command that starts it, with this interpreter. On several machines, a shell has to fill in rank and address."""
    arguments: tuple[str, ...]
    """The part of the command that the task reads."""
    expected: dict[str, Any]
    """Keys of the task that base or the sweep set, without output_dir."""
    launch: LaunchConfig
    """How it is started."""

    @property
    def name(self) -> str:
        """Setting and seed, like its folder below the sweep's."""
        return f"{self.setting.folder}/{self.folder.name}"

    def shell_line(self) -> str:
        """Return the command as one line for a shell on another machine, without this interpreter's path.

        A run on several machines has one line for all of them, which reads NODE_RANK, MASTER_ADDR and MASTER_PORT.

        Raises ConfigError for a value with a line break, because a job array picks single lines.
        """
        words = list(self.command)
        for word in words:
            if len(word.splitlines()) > 1 or word.endswith("\n"):
                raise ConfigError(f"{self.name}: a shell line cannot hold the line break in {word!r}. Take it out.")
        for program, module in _MODULES.items():
            if words[1:3] == module:
                words[:3] = [program, *(["launch"] if program == "accelerate" else [])]
        words[0] = "python" if words[0] == sys.executable else words[0]
        threads = self.launch.threads
        quoted = [f'"{word}"' if word.endswith((RANK, ADDRESS, PORT)) else shlex.quote(word) for word in words]
        return f"{f'OMP_NUM_THREADS={threads} ' if threads else ''}{' '.join(quoted)}"


def settings_of(
    sweep: SweepConfig, folder: Path, extra: Mapping[str, Any] | None = None, rules: SmokeConfig | None = None
) -> list[Setting]:
    """Return all settings of a sweep, in the order of the file.

    Args:
        sweep: the sweep.
        folder: folder of the sweep file, from which relative paths start.
        extra: keys of the task that win over all others.
        rules: rules for small runs, which win over all but `extra`.

    Raises:
        ConfigError: a key is set by the sweep itself, or two settings have the same name.
    """
    shared = flat_overrides(sweep.settings, "settings", folder)
    base = base_values(sweep.base)
    forced = forced_by(rules, folder) if rules else {}
    settings = []
    for choice in itertools.product(*_axes(sweep, folder)):
        overrides = shared
        for _, own in choice:
            overrides = _merged(overrides, own)
        if rules is not None:
            overrides = _merged(_without_launch(shrunk(overrides, base, rules)), forced)
        overrides = _merged(overrides, dict(extra or {}))
        settings.append(Setting(tuple(label for label, _ in choice), overrides))
    folders = [setting.folder.lower() for setting in settings]  # some file systems ignore case
    for setting, name in zip(settings, folders, strict=True):
        if folders.count(name) > 1:
            raise ConfigError(f"two settings would share the folder {setting.folder!r}. Give them other labels.")
    return settings


def planned_runs(
    sweep: SweepConfig, folder: Path, extra: Mapping[str, Any] | None = None, rules: SmokeConfig | None = None
) -> list[PlannedRun]:
    """Return all runs: all settings with the first seed, then with the next, so that comparisons fill up evenly.

    Takes the arguments of `settings_of` and raises its errors, and ConfigError for a value that a command line cannot
    hold.
    """
    base = base_values(sweep.base)
    runs = []
    for seed, setting in itertools.product(sweep.seeds, settings_of(sweep, folder, extra, rules)):
        output = (sweep.runs_dir or sweep.output_dir) / setting.folder / f"seed_{seed}"
        launch = _launch_of(sweep.launch, setting)
        given = _without_launch(setting.overrides) | {"seed": seed}
        options = [_option(key, value) for key, value in (given | {"output_dir": output}).items()]
        arguments = ("--config", str(sweep.base), *options)
        command = (*launcher(launch), str(sweep.task), *arguments)
        expected = _merged({key: value for key, value in base.items() if key != "output_dir"}, given)
        runs.append(PlannedRun(setting, seed, output, command, arguments, expected, launch))
    return runs


def _option(key: str, value: Any) -> str:
    try:
        return f"--{key}={spelled(value)}"
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _without_launch(overrides: Overrides) -> Overrides:
    return {key: value for key, value in overrides.items() if not key.startswith(_LAUNCH)}


def _launch_of(shared: LaunchConfig, setting: Setting) -> LaunchConfig:
    """Return how a setting is started: as all are, but for its own keys that begin with launch."""
    own = {key.removeprefix(_LAUNCH): value for key, value in setting.overrides.items() if key.startswith(_LAUNCH)}
    known = [field.name for field in fields(LaunchConfig) if field.name != "config_file"]
    for key in own:
        if key not in known:
            raise ConfigError(f"{setting.name}: unknown key launch.{key}.{did_you_mean(key, known)}")
    try:
        return replace(shared, **own)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting.name}: launch: {error}") from None


def launcher(launch: LaunchConfig) -> list[str]:
    """Return the words before the task's script."""
    if launch.kind == "python":
        return [sys.executable]
    words, processes = [sys.executable, *_MODULES[launch.kind]], launch.processes or 1
    if launch.kind == "torchrun":
        place = ["--standalone"]
        if launch.nodes > 1:
            first = [f"--master_addr={ADDRESS}", f"--master_port={PORT}"]
            place = [f"--nnodes={launch.nodes}", f"--node_rank={RANK}", *first]
        return [*words, *place, f"--nproc_per_node={processes}"]
    if launch.config_file:
        count = [f"--num_processes={launch.processes}"] if launch.processes else []
        return [*words, f"--config_file={launch.config_file}", *count]
    total = processes * launch.nodes
    several = ["--multi_gpu"] if total > 1 else []
    # Port 0 is any free port, so several runs can share a machine.
    place = ["--main_process_port=0"]
    if launch.nodes > 1:
        place = [f"--machine_rank={RANK}", f"--main_process_ip={ADDRESS}", f"--main_process_port={PORT}"]
    return [*words, *several, f"--num_processes={total}", f"--num_machines={launch.nodes}", *place,
            "--mixed_precision=no", "--dynamo_backend=no"]  # fmt: skip


def forced_by(rules: SmokeConfig, folder: Path) -> Overrides:
    """Return the keys of the task that rules for small runs set in all of them."""
    shared = flat_overrides(base_values(rules.file), "smoke.file", rules.file.parent) if rules.file else {}
    return _merged(shared, flat_overrides(rules.settings, "smoke.settings", folder))


def flat_overrides(values: Mapping[str, Any], where: str, folder: Path) -> Overrides:
    """Return sections and dotted keys as dotted keys; text that begins with ./ or ../ becomes an absolute path.

    >>> flat_overrides({"gossip": {"power": 3}, "gossip.floor": 0.1}, "settings", Path("/sweeps"))
    {'gossip.power': 3, 'gossip.floor': 0.1}
    """
    flat = flat_values(values)
    try:
        refuse_reserved(flat, where)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return {key: _anchored(value, folder) for key, value in flat.items()}


def _axes(sweep: SweepConfig, folder: Path) -> Iterable[list[tuple[str, Overrides]]]:
    if sweep.variants:
        yield _bundles(sweep.variants, "variants", folder)
    for key, values in sweep.grid.items():
        if isinstance(values, list):
            yield [(value_label(key, value), {key: _anchored(value, folder)}) for value in values]
        else:
            yield _bundles(values, f"grid.{key}", folder)


def _bundles(bundles: Mapping[str, Mapping[str, Any]], where: str, folder: Path) -> list[tuple[str, Overrides]]:
    return [(label, flat_overrides(values, f"{where}.{label}", folder)) for label, values in bundles.items()]


def _merged(lower: Overrides, upper: Overrides) -> Overrides:
    """Merge; `upper` wins, also if one sets a section to null and the other sets a key in it."""
    clash = {key for key in lower for other in upper if key.startswith(f"{other}.") or other.startswith(f"{key}.")}
    return {key: value for key, value in lower.items() if key not in clash} | upper


def _anchored(value: Any, folder: Path) -> Any:
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    return value
