"""The sweep file: which runs there are, how they are launched, and what the report shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from dsgdac_accel.checks import LARGEST_SEED, check_choice, check_integer, check_number, did_you_mean
from tasks.common.config import ConfigError, load_config
from tasks.common.strict_yaml import read_yaml
from tasks.studies.columns import KNOWN, Column, columns_of
from tasks.studies.published import published

FIGURES = ("radius", "curves", "curvature", "sensitivity")
"""Figures of a report, in the order in which it shows them."""

RESERVED = {
    "config": "Name the file as base.",
    "seed": "List the seeds as seeds.",
    "output_dir": "Every run has its own folder below the sweep's output_dir.",
    "resume_from_checkpoint": "Unfinished runs resume from their newest checkpoint by themselves.",
}
"""Keys of a task that the sweep sets itself, each with what to write instead."""

Kind = Literal["python", "accelerate", "torchrun"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How a run is started."""

    kind: Kind = "python"
    """python starts one process; accelerate and torchrun start several, with a GPU each or on the CPU."""

    nodes: int = 1
    """Machines per run. Runs on several are started by the lines of --print-commands or by --slurm."""

    processes: int | None = None
    """Processes on each machine; null takes one, or as many as config_file says."""

    gpus: int = 0
    """GPUs that each machine must have; 0 for runs that may also be on the CPU."""

    config_file: Path | None = None
    """Launch file for accelerate."""

    threads: int | None = None
    """OMP_NUM_THREADS of each process; null leaves it as it is."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        for name in ("nodes", "processes", "threads"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        check_integer("gpus", self.gpus, minimum=0)
        for name in ("processes", "nodes"):
            if self.kind == "python" and (getattr(self, name) or 1) > 1:
                got = f"{name} = {getattr(self, name)}"
                raise ValueError(f"kind {self.kind} starts one process; got {got}. Use torchrun.")
        if self.config_file is not None and self.nodes > 1:
            raise ValueError(f"config_file is for one machine; got nodes = {self.nodes}. Give processes instead.")
        if self.config_file is not None and self.kind != "accelerate":
            raise ValueError(f"config_file is for kind accelerate; got kind {self.kind}. Leave it out.")
        if self.config_file is not None and not self.config_file.is_file():
            raise ValueError(f"config_file must be a launch file for accelerate; {self.config_file} does not exist.")


@dataclass(frozen=True, kw_only=True)
class ChooseConfig:
    """Which of a method's settings the report shows."""

    by: str = "validation_loss"
    """Column to choose by, such as a loss: the setting with the smallest mean over the seeds is shown."""

    over: list[str] = field(default_factory=list)
    """Keys of the grid whose values are chosen, such as learning_rate."""

    methods: dict[str, list[str]] = field(default_factory=dict)
    """Method: [variants that are settings of it]. A variant that no method names is a method of its own."""

    def __post_init__(self) -> None:
        (column,) = columns_of([self.by])  # raises for an invalid place
        if any(score in column.key for score in ("accuracy", "bleu", "chrf")):
            raise ValueError(
                f"by must be a column whose smallest value is the best; got {self.by}. Choose by a loss, such as "
                "validation_loss."
            )
        variants = [variant for of in self.methods.values() for variant in of]
        for variant in variants:
            if variants.count(variant) > 1:
                raise ValueError(f"methods must name each variant once; {variant!r} is there more often. Drop one.")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Columns, comparisons and figures of the report."""

    columns: list[str] | dict[str, str] = field(
        default_factory=lambda: ["test_accuracy", "bleu", "test_loss", "train_loss", "curvature.lambda_1", "radius"]
    )
    """Columns of the table, or column: heading. A key of summary.json (test_loss, curvature.lambda_1), or a key of
    metrics.jsonl with the place to read it at: gossip/radius@max, @min, @last, or @48 for the end of the 48th epoch."""

    baselines: list[str] | dict[str, str] = field(default_factory=list)
    """Labels of variants or grid values to compare with, seed by seed. A list compares all others with each label in
    it; a mapping `label: baseline` compares only those labels."""

    compare: list[str] | None = None
    """Columns of the comparison; null compares in all of them."""

    choose: ChooseConfig | None = None
    """Show only the best setting of each method; null shows all settings."""

    figures: list[str] | None = None
    """radius (with the learning rate), curves (losses, accuracy, BLEU, radius), curvature, sensitivity; null draws
    those with data."""

    def __post_init__(self) -> None:
        for figure in self.figures or ():
            check_choice("figures", figure, FIGURES)
        for column in self.compare or ():
            check_choice("compare", column, list(self.columns))
        if not self.columns:
            raise ValueError("columns must name at least one column; got none. Leave it out for the usual ones.")
        own = columns_of(self.columns)  # raises for an invalid place
        if self.choose is not None:
            _check_known(self.choose.by, own)

    def wanted_pairs(self) -> list[tuple[str | None, str]]:
        """Return the pairs (label, baseline); None stands for all other labels."""
        if isinstance(self.baselines, dict):
            return list(self.baselines.items())
        return [(None, baseline) for baseline in self.baselines]


def _check_known(by: str, own: Sequence[Column]) -> None:
    """Raise ValueError for a column to choose by that is neither one of the tasks nor one of the report."""
    (column,) = columns_of([by])
    known = {*KNOWN, *(other.name for other in own)}
    if column.key not in known and column.name not in known:
        raise ValueError(
            f"choose must be by a column of the tasks or of the report; got {by}.{did_you_mean(by, known)} Name one of "
            "report.columns, or validation_loss."
        )


@dataclass(frozen=True, kw_only=True)
class SmokeConfig:
    """Rules that make every run small enough for two CPU cores, so that the whole study can be tried."""

    file: Path | None = None
    """File of the task with keys for all runs, over all others."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of the task for all runs, over those of the file."""

    replace: dict[str, dict[str, Any]] = field(default_factory=dict)
    """key: {value in the study: value here}, for keys that differ between runs. Every value that occurs needs one; runs
    that do not set the key are left as they are."""

    only: list[str] = field(default_factory=list)
    """Labels to keep of the variants and of each grid entry; an entry that none of them names is kept whole."""

    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds of the small runs."""

    launch: LaunchConfig = field(default_factory=lambda: LaunchConfig(threads=1))
    """How a small run is started."""

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        if self.file is not None and not self.file.is_file():
            raise ValueError(f"file must be settings of the task; {self.file} does not exist. Leave it out for none.")


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep. Every variant, with every value of the grid and every seed, is a run."""

    title: str = ""
    """Heading of the report."""

    source: str = ""
    """Table or figure of a paper that the sweep is to reproduce."""

    hardware: str = ""
    """Hardware of a run."""

    gpu_hours: float | None = None
    """Estimate for all runs, in hours of one GPU of that hardware."""

    task: Path
    """Script that a run starts, such as ../../tasks/cifar.py; relative paths start from the folder of this file."""

    base: Path
    """Configuration of the task that all runs share."""

    output_dir: Path
    """Folder for the runs, each in VARIANT/seed_SEED, and for report.md, report.csv and the figures."""

    runs_dir: Path | None = None
    """Folder for the runs, if it is not output_dir."""

    seeds: list[int] = field(default_factory=lambda: [0])
    """Every setting runs once with each seed."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """How a run is started."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of the task for all runs, over those of base: dotted keys or sections. Text that begins with ./ or ../ is a
    path from the folder of this file."""

    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Label: {keys of the task}; {} is base as it is."""

    grid: dict[str, list[Any] | dict[str, dict[str, Any]]] = field(default_factory=dict)
    """All combinations of these: `key: [values]`, or `name: {label: {keys of the task}}`. Later entries win over
    earlier ones, the grid over variants, variants over settings. Keys here and in variants may begin with launch."""

    report: ReportConfig = field(default_factory=ReportConfig)
    """Columns, comparisons and figures."""

    paper: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Published values: {labels of a setting, with commas between them: {column: mean ± standard deviation}}, in the
    unit of the column's heading."""

    smoke: SmokeConfig | None = None
    """Rules of `--smoke`; null has no small runs."""

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        for name, values in self.grid.items():
            if not values:
                raise ValueError(f"grid.{name}: must list at least one value; got none. Leave the key out.")
            if isinstance(values, list):
                refuse_reserved([name], "grid")
                _refuse_equal(name, values)
        if not self.task.is_file():
            raise ValueError(f"task: {self.task} does not exist. Name the task's script, such as tasks/cifar.py.")
        if self.gpu_hours is not None:
            check_number("gpu_hours", self.gpu_hours, above=0)
        known = self.labels()
        for label in self.smoke.only if self.smoke else ():
            if label not in known:
                raise ValueError(
                    f"smoke.only: no variant or grid value is called {label!r}.{did_you_mean(label, known)} "
                    f"There are {', '.join(known) or 'none'}."
                )
        self._check_paper()
        choose = self.report.choose
        if choose is not None:
            for key in choose.over:
                _check_among("report.choose.over", key, self.grid, "grid")
            for variant in (variant for of in choose.methods.values() for variant in of):
                _check_among("report.choose.methods: the variant", variant, self.variants, "variants")
        self._check_baselines()

    def labels(self) -> list[str]:
        """Return all labels in order: variants, then `key=value` or the labels of a mapping for each grid entry."""
        return [label for axis in self.axes() for label in axis]

    def shown_axes(self) -> list[list[str]]:
        """Return the labels of the report's rows by axis: those of `axes` or, with `report.choose`, of the methods."""
        choose = self.report.choose
        if choose is None:
            return list(self.axes())
        settings = {variant for of in choose.methods.values() for variant in of}
        methods = [*choose.methods, *(variant for variant in self.variants if variant not in settings)]
        grid = [grid_labels(key, values) for key, values in self.grid.items() if key not in choose.over]
        return [methods, *grid] if methods else grid

    def axes(self) -> Iterator[list[str]]:
        """Yield the labels of the variants, if there are any, then those of each grid entry."""
        if self.variants:
            yield list(self.variants)
        for key, values in self.grid.items():
            yield grid_labels(key, values)

    def setting_names(self) -> list[str]:
        """Return the names of all settings."""
        return [setting_name(labels) for labels in itertools.product(*self.axes())]

    def _check_baselines(self) -> None:
        """Raise ValueError for a baseline that no row of the report can be compared with."""
        axes = self.shown_axes()
        known = [label for axis in axes for label in axis]
        for label, baseline in self.report.wanted_pairs():
            named = [name for name in (label, baseline) if name is not None]
            for name in named:
                if name not in known:
                    raise ValueError(
                        f"report.baselines: no row of the report is called {name!r}.{did_you_mean(name, known)} "
                        f"There are {', '.join(known) or 'none'}."
                    )
                if known.count(name) > 1:
                    raise ValueError(
                        f"report.baselines: {name!r} must be one label; {known.count(name)} axes have it. Rename one."
                    )
            if not comparable(axes, label, baseline):
                raise ValueError(
                    f"report.baselines: {label or 'a setting'} is compared with {baseline} in rows that otherwise have "
                    f"the same labels, and there are none. Name two variants, or two values of one grid entry."
                )

    def _check_paper(self) -> None:
        if self.paper and self.report.choose is not None:
            raise ValueError("paper: its values are for single settings, and report.choose shows methods. Drop one.")
        settings = self.setting_names()
        columns = {column.name for column in columns_of(self.report.columns)}
        for setting, values in self.paper.items():
            if setting not in settings:
                raise ValueError(
                    f"paper: no setting is called {setting!r}.{did_you_mean(setting, settings)} Settings are the "
                    f"labels with commas between them, such as {settings[0]!r}."
                )
            for column, value in values.items():
                check_choice(f"paper.{setting}: the column", column, sorted(columns))
                published(value)  # raises for anything else than numbers


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """A study of the runs of another one: its own title and report."""

    title: str
    """Heading of the report."""

    source: str = ""
    """Table or figure of a paper that the study is to reproduce."""

    runs_of: Path
    """Sweep file in the same folder, whose runs are launched and reported; no study of other runs itself."""

    output_dir: Path
    """Folder for report.md, report.csv and the figures."""

    report: ReportConfig = field(default_factory=ReportConfig)
    """Columns, comparisons and figures."""


def load_sweep(file: Path | str) -> SweepConfig:
    """Read a sweep file.

    Raises ConfigError, in one line that names the file, if it or its base cannot be used.
    """
    file = Path(file)
    if "runs_of" in naming(file, lambda: read_yaml(file)):
        return naming(file, lambda: _view(load_config(ViewConfig, file), file))
    sweep = naming(file, lambda: load_config(SweepConfig, file))
    if not sweep.base.is_file():
        problem = "is a folder" if sweep.base.is_dir() else "does not exist"
        raise ConfigError(f"{file}: base: {sweep.base} {problem}. Name the configuration that the runs share.")
    naming(file, lambda: read_yaml(sweep.base))
    return sweep


def _view(view: ViewConfig, file: Path) -> SweepConfig:
    if not view.runs_of.is_file() or view.runs_of.resolve().parent != file.resolve().parent:
        raise ConfigError(f"runs_of: {view.runs_of} is no sweep file in the folder of this one. Name one there.")
    if "runs_of" in read_yaml(view.runs_of):
        raise ConfigError(
            f"runs_of: {view.runs_of} shows the runs of another file itself. Name the file with the runs."
        )
    own = {key.name: getattr(view, key.name) for key in fields(view) if key.name != "runs_of"}
    sweep = load_sweep(view.runs_of)
    try:
        return replace(sweep, runs_dir=sweep.runs_dir or sweep.output_dir, paper={}, **own)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def naming(file: Path, action: Callable[[], T]) -> T:
    """Return the result of `action`; name the sweep file in configuration errors that do not begin with a file."""
    try:
        return action()
    except ConfigError as error:
        named = str(error).startswith((str(file), "config file"))
        raise error if named else ConfigError(f"{file}: {error}") from None


def check_seeds(seeds: list[int]) -> None:
    """Raise ValueError unless these are one or more seeds, each once."""
    for seed in seeds:
        check_integer("seeds", seed, minimum=0, maximum=LARGEST_SEED)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be one or more, each once; got {seeds}.")


def setting_name(labels: Sequence[str]) -> str:
    """Return the name of a setting: its labels with commas between them.

    >>> setting_name(["dsgd_ac", "power=3"]), setting_name([])
    ('dsgd_ac, power=3', 'base')
    """
    return ", ".join(labels) or "base"


def comparable(axes: Iterable[Collection[str]], label: str | None, baseline: str) -> bool:
    """Return whether a label, or any other one for None, and a baseline are different labels of one axis.

    >>> comparable([["dsgd", "dsgd_ac"], ["power=1"]], "dsgd_ac", "dsgd")
    True
    >>> comparable([["dsgd", "dsgd_ac"], ["power=1"]], "power=1", "dsgd")
    False
    """
    others = next(({*axis} - {baseline} for axis in axes if baseline in axis), set())
    return bool(others) if label is None else label in others


def grid_labels(key: str, values: list[Any] | dict[str, dict[str, Any]]) -> list[str]:
    """Return the labels of a grid entry: `key=value`, or those of a mapping."""
    return [value_label(key, value) for value in values] if isinstance(values, list) else list(values)


def value_label(key: str, value: Any) -> str:
    """Return the label of a grid value: the last part of its key, and the value as on the command line.

    >>> value_label("gossip.power", 3)
    'power=3'
    """
    return f"{key.rpartition('.')[2]}={spelled(value)}"


def spelled(value: Any) -> str:
    """Spell a value for the command line of a task.

    >>> [spelled(value) for value in (None, True, 0.5, [0.9, 0.98], "ring", [])]
    ['null', 'true', '0.5', '0.9,0.98', 'ring', '[]']
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        raise ValueError(f"a section cannot be one value on the command line; got {value}. Name the keys in it.")
    if isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, list | tuple | dict):
                raise ValueError(f"a list on the command line holds plain values; got {item} in one. Use the base.")
            if isinstance(item, str) and "," in item:
                raise ValueError(f"a list on the command line is cut at its commas; {item!r} holds one. Use the base.")
        return ",".join(map(spelled, value)) or "[]"
    return str(value)


def _check_among(where: str, label: str, known: Collection[str], section: str) -> None:
    """Raise ValueError for a label that a section of the sweep does not have, or if there is no such section."""
    if not known:
        raise ValueError(f"{where}: the sweep has no {section}; got {label!r}. Add a {section} section or drop it.")
    check_choice(where, label, known)


def _refuse_equal(key: str, values: list[Any]) -> None:
    """Raise ValueError for a number that is listed twice, such as 1 and 1.0; true and 1 are two values."""
    for number, value in enumerate(values):
        for other in values[:number]:
            if value == other and isinstance(value, bool) == isinstance(other, bool):
                raise ValueError(f"grid.{key}: {other!r} and {value!r} are the same value. Drop one.")


def refuse_reserved(keys: Collection[str], where: str) -> None:
    """Raise ValueError for a key that the sweep sets itself."""
    for key in keys:
        if key in RESERVED:
            raise ValueError(f"{where}: {key} is set by the sweep. {RESERVED[key]}")
