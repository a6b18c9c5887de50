"""Plots of a run, and of several runs side by side, from the metrics that they logged."""

from __future__ import annotations

import json
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.common.config import ConfigError
from tasks.common.known_tasks import base_values
from tasks.common.plot_style import (
    BLUE,
    DPI,
    FEW_POINTS,
    VERMILION,
    add_legend,
    add_title,
    finish_axes,
    line_colors,
    new_figure,
    set_logarithmic,
    wrapped,
)

Records = list[dict[str, Any]]
Series = tuple[list[int], list[float]]
"""Ascending steps, and a value at each."""


def plot_run(output_dir: Path | str) -> list[Path]:
    """Plot the metrics.jsonl of a run as PNG files beside it, and return the files written.

    lr_gamma.png                 learning rate (left axis) and gamma (right axis)
    consensus.png                consensus radius and disagreement with the neighbors; logarithmic if positive
    loss.png                     training loss of the workers, validation or test loss of the deployed model
    accuracy.png, bleu.png       accuracy or BLEU of the deployed model, on the split evaluated during training

    A plot is left out if the run has logged none of its metrics.

    Raises:
        FileNotFoundError: there is no metrics.jsonl.
        ImportError: matplotlib is not installed.
    """
    output_dir = Path(output_dir)
    run = _read_run(output_dir, "", BLUE)
    runs, described = [run], f"{output_dir.resolve().name}: {', '.join(facts_of(output_dir, run.records).values())}"
    written = []
    for file_name, panel in PANELS.items():
        if panel.has_data(runs):
            figure, (axes,) = new_figure()
            notes = PanelNotes()
            panel.draw(axes, runs, notes)
            notes.write(axes)
            add_title(figure, described.removesuffix(": "))
            lines = [line for drawn in figure.axes for line in drawn.lines]
            if len(panel.keys) > 1:
                add_legend(figure, lines, [line.get_label() for line in lines])
            written.append(output_dir / file_name)
            figure.savefig(written[-1], dpi=DPI)
    return written


def compare_runs(output_dirs: Iterable[Path | str], output: Path | str) -> Path:
    """Plot several runs into one PNG file with the panels of `plot_run`, one color per run, and return its path.

    The title has what all runs share. The legend names each run by its algorithm, adds the folder if several runs have
    the same one, and the number of workers, the data and the seed where they differ.

    Raises:
        ValueError: there are no runs, no run has metrics to plot, or `output` does not end in .png.
        FileNotFoundError: a run has no metrics.jsonl.
        ImportError: matplotlib is not installed.
    """
    folders, output = [Path(folder) for folder in output_dirs], Path(output)
    if output.suffix != ".png":
        raise ValueError(f"output must be a file that ends in .png; got {output}.")
    if not folders:
        raise ValueError("compare_runs needs at least one output_dir; got none.")
    colors = line_colors(len(folders))
    runs = [
        _read_run(folder, name, color) for folder, name, color in zip(folders, run_labels(folders), colors, strict=True)
    ]
    facts = [facts_of(folder, run.records) for folder, run in zip(folders, runs, strict=True)]
    shared = [value for key, value in facts[0].items() if all(other.get(key) == value for other in facts)]
    named = [
        replace(run, label=", ".join([run.label, *_differing(own, facts)]))
        for run, own in zip(runs, facts, strict=True)
    ]
    scores = [name for name in ("accuracy.png", "bleu.png") if PANELS[name].has_data(runs)] or ["accuracy.png"]
    panels = [PANELS[name] for name in ("lr_gamma.png", "consensus.png", "loss.png", *scores)]
    if not any(panel.has_data(runs) for panel in panels):
        keys = ", ".join(key for panel in PANELS.values() for key in panel.keys)
        raise ValueError(
            f"Runs to compare need logged metrics; found none of {keys} in {', '.join(map(str, folders))}."
        )
    figure, axes = new_figure(2, -(-len(panels) // 2))
    for blank in axes[len(panels) :]:
        blank.set_visible(False)
    for panel, panel_axes in zip(panels, axes, strict=False):
        notes = PanelNotes()
        panel.draw(panel_axes, runs, notes)
        if panel.has_data(runs):
            notes.write(panel_axes)
        else:
            panel_axes.text(0.5, 0.5, "not logged", ha="center", transform=panel_axes.transAxes, color="0.5")
    add_title(figure, ", ".join([f"{len(runs)} run{'s' * (len(runs) > 1)}", *shared]))
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=run.color, linewidth=2) for run in named]
    add_legend(figure, handles, [run.label for run in named])
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DPI)
    return output


@dataclass
class PanelNotes:
    """Notes on lines that a panel cannot show, or not apart from others: without them a reader would miss these."""

    missing: dict[str, list[str]] = field(default_factory=dict)
    """Names of runs by what is not shown of them, and why."""
    drawn: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Names of the runs whose lines of a metric go through the same points."""

    def shown(
        self, metric: str, run: str, x: Sequence[float], values: Sequence[float], logarithmic: bool = False
    ) -> list[float]:
        """Return the values with NaN for those that the axis cannot show, and note them. [] if nothing was logged."""
        if not values:
            self.add(f"{metric} not logged", run)
            return []
        kept = [value if math.isfinite(value) and (value > 0 or not logarithmic) else math.nan for value in values]
        infinite = sum(not math.isfinite(value) for value in values)
        lost = sum(math.isnan(value) for value in kept)
        for count, reason in ((infinite, "not finite"), (lost - infinite, "not positive, so not on this axis")):
            if count:
                points = "" if count == len(values) else f" in {count} of {len(values)} points"
                self.add(f"{metric} {reason}{points}", run)
        if lost < len(values):
            self.drawn.setdefault((metric, repr((list(x), kept))), []).append(run)
        return kept

    def add(self, problem: str, run: str) -> None:
        """Note a line that is missing; `run` is "" if there is only one."""
        self.missing.setdefault(problem, []).append(run)

    def lines(self) -> list[str]:
        """Return the notes, one per problem."""
        notes = [f"{problem}: {_listed(runs)}".removesuffix(": ") for problem, runs in self.missing.items()]
        same = [f"{metric} identical: {_listed(runs)}" for (metric, _), runs in self.drawn.items() if len(runs) > 1]
        return [note.strip() for note in (*notes, *same)]

    def write(self, axes: Any) -> None:
        """Write the notes below the title of the axes, and make the figure higher by as much."""
        if notes := self.lines():
            figure = axes.figure
            inches = 1.6 * axes.get_position().width * figure.get_figwidth()  # the font is smaller
            text = "\n".join(wrapped(note, inches) for note in notes)
            axes.set_title(f"{axes.get_title()}\n{text}".strip(), fontsize="small")
            figure.set_figheight(figure.get_figheight() + 0.16 * text.count("\n"))


def _listed(names: Sequence[str]) -> str:
    short = [textwrap.shorten(name, 40, placeholder="..") if " " in name else name[:40] for name in names[:3]]
    return "; ".join([*short, *([f".. ({len(names)} in all)"] if len(names) > 3 else [])])


# ---- metrics of a run


def read_metrics(path: Path | str) -> Records:
    """Read the records of a metrics.jsonl, one mapping per line.

    Skips a line that is not a JSON object, with a warning: a run that was killed leaves its last line truncated, and a
    resumed run appends to it.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} must exist; a run writes it into its output_dir. Pass the folder of a run.")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif line.strip():
            warnings.warn(f"{path}: line {number} is truncated or not a record; skipped.", stacklevel=2)
    return records


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def series(records: Iterable[Mapping[str, Any]], key: str) -> Series:
    """Return the steps and values of one metric, in order of steps.

    A value that is not a number is NaN. If a step was logged twice, as in a resumed run, the last record counts. A
    record that repeats an earlier measurement holds the step of that measurement under "<key>_step".

    >>> series([{"step": 2, "train/loss": 0.5}, {"step": 1, "train/loss": None}, {"step": 3}], "train/loss")
    ([1, 2], [nan, 0.5])
    """
    logged = [(record.get(f"{key}_step", record.get("step")), record[key]) for record in records if key in record]
    values = {step: value for step, value in logged if math.isfinite(number(step))}
    steps = sorted(values)
    return steps, [number(values[step]) for step in steps]


def number(value: Any) -> float:
    """Return a logged value as a float; NaN if it is not a number.

    >>> number(3), number("3"), number(True)
    (3.0, nan, nan)
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


# ---- names of runs


def run_labels(folders: Sequence[Path]) -> list[str]:
    """Name each run by its algorithm, and add its folder if several runs have the same one."""
    algorithms = [
        json_object(folder / "summary.json").get("algorithm", _config(folder).get("algorithm")) for folder in folders
    ]
    return [
        name
        if not isinstance(algorithm, str)
        else algorithm
        if algorithms.count(algorithm) == 1
        else f"{algorithm} ({name})"
        for algorithm, name in zip(algorithms, _folder_names(folders), strict=True)
    ]


def _folder_names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or as many parts as tell all folders apart: in a sweep all end in seed_0."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def facts_of(folder: Path, records: Records) -> dict[str, str]:
    """Return what the title of a run says, by name, from its configuration, summary and log: what is known of
    algorithm, data, workers, topology and seed, and whether it is unfinished."""
    summary, config = json_object(folder / "summary.json"), _config(folder)
    known = {
        "algorithm": summary.get("algorithm", config.get("algorithm")),
        "data": Path(path).name if (path := config.get("data.path")) else config.get("data.name", summary.get("data")),
        "workers": workers_in_words(summary, records),
        "topology": summary.get("topology"),
        "seed": summary.get("seed", config.get("seed")),
    }
    facts = {name: str(value) for name, value in known.items() if isinstance(value, str | int)}
    if "seed" in facts:
        facts["seed"] = f"seed {facts['seed']}"
    if not summary and (steps := [record["step"] for record in records if isinstance(record.get("step"), int)]):
        facts["state"] = f"unfinished, step {max(steps)}"
    return facts


def workers_in_words(summary: Mapping[str, Any], records: Records) -> str | None:
    """Return the number of workers in words; of a run that lost some, also the number at the end."""
    counts = [int(number(record["workers"])) for record in records if math.isfinite(number(record.get("workers")))]
    if isinstance(summary.get("workers"), int):
        counts.append(summary["workers"])
    if not counts:
        return None
    first, last = max(counts), counts[-1]
    return f"{first} worker{'s' * (first != 1)}{f', {last} at the end' if last != first else ''}"


def _differing(own: Mapping[str, str], facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the facts of a run that tell it from the others, and that the names of algorithms and folders do not."""
    return [
        own[key]
        for key in ("data", "workers", "seed", "state")
        if key in own and any(other.get(key) != own[key] for other in facts)
    ]


def _config(folder: Path) -> dict[str, Any]:
    """Return the keys of config.yaml of a run; {} if there is none that can be read."""
    file = folder / "config.yaml"
    try:
        return base_values(file) if file.is_file() else {}
    except ConfigError:
        return {}


def json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is none that can be read."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


# ---- panels


@dataclass(frozen=True)
class Run:
    """One run in a panel."""

    label: str
    """Name in the legend; "" for a run that is plotted alone."""
    color: Any
    records: Records
    window: int | None = None
    """Optimizer steps that a logged training loss averages, if known."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the metrics that it shows, and the function that draws them and notes what it cannot draw."""

    keys: tuple[str, ...]
    draw: Callable[[Any, Sequence[Run], PanelNotes], None]

    def has_data(self, runs: Sequence[Run]) -> bool:
        """Return whether any run has logged any of the metrics."""
        return any(key in record for run in runs for record in run.records for key in self.keys)


def _read_run(folder: Path, label: str, color: Any) -> Run:
    window = _config(folder).get("logging_steps")
    return Run(label, color, read_metrics(folder / "metrics.jsonl"), window if isinstance(window, int) else None)


def _draw_lr_and_gamma(axes: Any, runs: Sequence[Run], notes: PanelNotes) -> None:
    right = axes.twinx()
    alone = _is_alone(runs)
    for run in runs:
        _line(axes, run, "gossip/lr", "learning rate", notes, dashed=not alone)
        _line(right, run, "gossip/gamma", "gamma", notes, VERMILION)
    title = "learning rate and gamma" if right.lines else "learning rate"
    _finish(axes, "learning rate" if alone else "learning rate (dashed)", title)
    right.set_ylabel("consensus factor gamma" if alone else "consensus factor gamma (solid)")
    right.spines["top"].set_visible(False)
    # gamma is in [0, 1]: the same scale in all plots, and both axes have their zero at the same height.
    right.set_ylim(-0.03, 1.03)
    if peak := max((lr for line in axes.lines for lr in line.get_ydata() if math.isfinite(lr)), default=0.0):
        axes.set_ylim(-0.03 * peak, 1.03 * peak)
    right.set_visible(bool(right.lines))


def _draw_consensus(axes: Any, runs: Sequence[Run], notes: PanelNotes) -> None:
    keys = {"gossip/radius": "consensus radius", "gossip/neighbor_disagreement": "neighbor disagreement"}
    logarithmic = any(value > 0 for run in runs for key in keys for value in series(run.records, key)[1])
    for run in runs:
        for key, label in keys.items():
            second = key != "gossip/radius"
            _line(axes, run, key, label, notes, VERMILION if second else None, dashed=second, logarithmic=logarithmic)
    if logarithmic:
        set_logarithmic(axes)
    title = "consensus radius (solid), neighbor disagreement (dashed)"
    _finish(axes, "distance (parameter norm)", "distance of the workers" if _is_alone(runs) else title)


def _draw_loss(axes: Any, runs: Sequence[Run], notes: PanelNotes) -> None:
    alone = _is_alone(runs)
    splits = list(dict.fromkeys(_evaluated_split(run.records, "loss") for run in runs))
    for run in runs:
        split = _evaluated_split(run.records, "loss")
        _line(
            axes, run, "train/loss", "training loss", notes, label=_train_label(run), dashed=not alone, faint=not alone
        )
        _line(axes, run, f"{split}/loss", f"{split} loss", notes, VERMILION, label=f"{split} (deployed model)")
    _finish(axes, "loss (nats)", "loss" if alone else f"loss: {' or '.join(splits)} (solid), smoothed train (dashed)")


def _train_label(run: Run) -> str:
    """Say how a training loss is smoothed: each logged value is a mean over the steps since the one before."""
    if run.window == 1:
        return "train (workers)"
    steps = series(run.records, "train/loss")[0]
    window = "since the last point" if run.window is None else f"of {min([run.window, *steps[-1:]])} steps"
    return f"train (workers, smoothed: mean {window})"


def _draw_accuracy(axes: Any, runs: Sequence[Run], notes: PanelNotes) -> None:
    for run in runs:
        values = series(run.records, "test/accuracy")[1]
        # Logged as a fraction; a log in percent stays as it is.
        scale = 100 if all(not value > 1 for value in values) else 1
        _line(axes, run, "test/accuracy", "test accuracy", notes, scale=scale)
    _finish(axes, "test accuracy (%)", "accuracy of the deployed model")


def _draw_bleu(axes: Any, runs: Sequence[Run], notes: PanelNotes) -> None:
    for run in runs:
        split = _evaluated_split(run.records, "bleu")
        # Validation during training translates by greedy search, the test at the end by beam search.
        name = "validation BLEU (greedy)" if split == "validation" else "test BLEU"
        _line(axes, run, f"{split}/bleu", name, notes)
    shown = dict.fromkeys(line.get_label() for line in axes.lines)
    _finish(axes, f"{' or '.join(shown) or 'BLEU'}, 0 to 100", "BLEU of the deployed model")


PANELS = {
    "lr_gamma.png": Panel(("gossip/lr", "gossip/gamma"), _draw_lr_and_gamma),
    "consensus.png": Panel(("gossip/radius", "gossip/neighbor_disagreement"), _draw_consensus),
    "loss.png": Panel(("train/loss", "validation/loss", "test/loss"), _draw_loss),
    "accuracy.png": Panel(("test/accuracy",), _draw_accuracy),
    "bleu.png": Panel(("validation/bleu", "test/bleu"), _draw_bleu),
}


def _evaluated_split(records: Records, name: str) -> str:
    """Return the split that a metric was measured on during training: validation if there is one, else test."""
    return "validation" if any(f"validation/{name}" in record for record in records) else "test"


def _line(
    axes: Any, run: Run, key: str, name: str, notes: PanelNotes, color: Any = None, *,
    label: str = "", dashed: bool = False, faint: bool = False, logarithmic: bool = False, scale: float = 1.0,
) -> None:  # fmt: skip
    """Draw a metric of a run in the color of the run or, of a run that is plotted alone, in `color` if given."""
    steps, values = series(run.records, key)
    values = notes.shown(name, run.label, steps, [scale * value for value in values], logarithmic)
    if values:
        axes.plot(
            steps,
            values,
            "--" if dashed else "-",
            color=run.color if color is None or run.label else color,
            label=label or name,
            marker="o" if len(steps) <= FEW_POINTS else None,
            markersize=3.5,
            linewidth=1.5,
            alpha=0.55 if faint else 1.0,
        )


def _finish(axes: Any, ylabel: str, title: str) -> None:
    finish_axes(axes, "optimizer step", ylabel, title, integer_ticks=True)


def _is_alone(runs: Sequence[Run]) -> bool:
    return runs[0].label == ""
