"""From a sweep to its runs: what each is called, which keys of the task it sets, and the command that starts it."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgdac_accel.config import ConfigError
from dsgdac_accel.config.conversion import convert
from dsgdac_accel.config.strict_yaml import join_path, read_yaml
from tasks.studies.config import SweepConfig, refuse_reserved, spelled, value_label

Overrides = dict[str, Any]
"""Values of a task's keys, by dotted path."""

_UNSAFE = re.compile(r"[^\w.=+-]+")
_HARMLESS = {"accelerate": ["-m", "accelerate.commands.launch"], "torchrun": ["-m", "torch.distributed.run"]}


@dataclass(frozen=True)
class Setting:
    """One row of a report: a combination of a variant and of a value from every list of the grid."""

    labels: tuple[str, ...]
    """One from each axis: the variants first, then the grid in the order of the file; () without either."""

    overrides: Overrides
    """Keys of the task that differ from base."""

    @property
    def name(self) -> str:
        """The labels in one text.

        >>> Setting(("dsgd_ac", "power=3"), {}).name
        'dsgd_ac, power=3'
        """
        return ", ".join(self.labels) or "base"

    @property
    def folder(self) -> str:
        """The name as a folder.

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
    """Its output folder."""
    command: tuple[str, ...]
    """What starts it, with this interpreter."""
    expected: dict[str, Any]
    """Keys of the task that are given, by base or the sweep, without the folder."""
    launch: dict[str, Any]
    """How it is started, for the record."""

    @property
    def name(self) -> str:
        """Setting and seed, as the folder is called below the sweep's."""
        return f"{self.setting.folder}/{self.folder.name}"

    def shell_line(self) -> str:
        """The command as one line for a shell on another machine, without this interpreter's path.

        Raises ConfigError for a value with a line break: who picks one line of many would run a part of a value.
        """
        words = list(self.command)
        for word in words:
            if len(word.splitlines()) > 1 or word.endswith("\n"):
                raise ConfigError(f"{self.name}: a shell line cannot hold the line break in {word!r}. Take it out.")
        for program, module in _HARMLESS.items():
            if words[1:3] == module:
                words[:3] = [program, *(["launch"] if program == "accelerate" else [])]
        words[0] = "python" if words[0] == sys.executable else words[0]
        threads = self.launch["threads"]
        return f"{f'OMP_NUM_THREADS={threads} ' if threads else ''}{shlex.join(words)}"


def settings_of(sweep: SweepConfig, folder: Path, extra: Mapping[str, Any] | None = None) -> list[Setting]:
    """All settings of a sweep, in the order of the file.

    `folder` is that of the sweep file; `extra` holds keys of the task that win over all others.

    Raises ConfigError for a key that the sweep sets by itself, or two settings with one name.
    """
    shared = flat_overrides(sweep.settings, "settings", folder)
    axes = list(_axes(sweep, folder))
    settings = []
    for choice in itertools.product(*axes):
        overrides = dict(shared)
        for _, own in choice:
            overrides = _merged(overrides, own)
        overrides = _merged(overrides, dict(extra or {}))
        settings.append(Setting(tuple(label for label, _ in choice), overrides))
    folders = [setting.folder.lower() for setting in settings]  # some file systems see no difference
    for setting, name in zip(settings, folders, strict=True):
        if folders.count(name) > 1:
            raise ConfigError(f"two settings would share the folder {setting.folder!r}. Give them other labels.")
    return settings


def planned_runs(sweep: SweepConfig, folder: Path, extra: Mapping[str, Any] | None = None) -> list[PlannedRun]:
    """All runs: one setting after the other for the first seed, then for the next, so that comparisons fill evenly.

    Arguments and errors are those of `settings_of`; ConfigError also for a value that no command line can spell.
    """
    base = base_values(sweep.base)
    launch = {name: getattr(sweep.launch, name) for name in ("kind", "processes", "threads")}
    launch["config_file"] = str(sweep.launch.config_file) if sweep.launch.config_file else None
    runs = []
    for seed, setting in itertools.product(sweep.seeds, settings_of(sweep, folder, extra)):
        output = sweep.output_dir / setting.folder / f"seed_{seed}"
        given = setting.overrides | {"seed": seed}
        arguments = [_argument(key, value) for key, value in (given | {"output_dir": output}).items()]
        command = (*launcher(sweep), str(sweep.task), "--config", str(sweep.base), *arguments)
        expected = _merged({key: value for key, value in base.items() if key != "output_dir"}, given)
        runs.append(PlannedRun(setting, seed, output, command, expected, launch))
    return runs


def _argument(key: str, value: Any) -> str:
    try:
        return f"--{key}={spelled(value)}"
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def launcher(sweep: SweepConfig) -> list[str]:
    """The words before the task's script."""
    launch = sweep.launch
    if launch.kind == "python":
        return [sys.executable]
    words = [sys.executable, *_HARMLESS[launch.kind]]
    if launch.kind == "torchrun":
        return [*words, "--standalone", f"--nproc_per_node={launch.processes or 1}"]
    if launch.config_file:
        count = [f"--num_processes={launch.processes}"] if launch.processes else []
        return [*words, f"--config_file={launch.config_file}", *count]
    several = ["--multi_gpu"] if (launch.processes or 1) > 1 else []
    # Port 0: any that is free, so that several runs may share a machine.
    return [*words, *several, f"--num_processes={launch.processes or 1}", "--num_machines=1", "--main_process_port=0",
            "--mixed_precision=no", "--dynamo_backend=no"]  # fmt: skip


def base_values(file: Path) -> dict[str, Any]:
    """The keys of a task's configuration file by dotted path, as written."""
    return _flat(convert(read_yaml(file), dict[str, Any], str(file)))


def flat_overrides(values: Mapping[str, Any], where: str, folder: Path) -> Overrides:
    """Sections and dotted keys alike as dotted keys; text that begins with ./ or ../ becomes an absolute path.

    >>> flat_overrides({"gossip": {"power": 3}, "gossip.floor": 0.1}, "settings", Path("/sweeps"))
    {'gossip.power': 3, 'gossip.floor': 0.1}
    """
    flat = _flat(values)
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


def _flat(values: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = join_path(parent, key)
        flat |= _flat(value, path) if isinstance(value, Mapping) and value else {path: value}
    return flat


def _merged(lower: Overrides, upper: Overrides) -> Overrides:
    """Both, the upper winning, also where one nulls a section and the other sets a key in it."""
    clash = {key for key in lower for other in upper if key.startswith(f"{other}.") or other.startswith(f"{key}.")}
    return {key: value for key, value in lower.items() if key not in clash} | upper


def _anchored(value: Any, folder: Path) -> Any:
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    return value
