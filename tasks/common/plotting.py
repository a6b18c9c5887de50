"""Plots of a run, and of several runs side by side, from the metrics that they logged."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgdac_accel.plotting import (
    BLUE,
    DPI,
    FEW_POINTS,
    PALETTE,
    VERMILION,
    add_legend,
    finish_axes,
    new_figure,
    positive,
    set_logarithmic,
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
    runs = [Run("", BLUE, read_metrics(output_dir / "metrics.jsonl"))]
    written = []
    for file_name, panel in PANELS.items():
        if panel.has_data(runs):
            figure, (axes,) = new_figure()
            panel.draw(axes, runs)
            figure.suptitle(_described(output_dir), fontsize="medium")
            lines = [line for drawn in figure.axes for line in drawn.lines]
            if len(lines) > 1:
                add_legend(figure, lines, [line.get_label() for line in lines])
            written.append(output_dir / file_name)
            figure.savefig(written[-1], dpi=DPI)
    return written


def compare_runs(output_dirs: Iterable[Path | str], output: Path | str) -> Path:
    """Plot several runs into one PNG file with the panels of `plot_run`, one color per run, and return its path.

    The legend names each run by the algorithm in its summary.json. If several runs have the same algorithm or there is
    no summary, it adds the folder.

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
    runs = [
        Run(label, PALETTE[number % len(PALETTE)], read_metrics(folder / "metrics.jsonl"))
        for number, (label, folder) in enumerate(zip(run_labels(folders), folders, strict=True))
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
        panel.draw(panel_axes, runs)
        missing = [run.label for run in runs if run.color not in _shown_colors(figure, panel_axes)]
        if len(missing) == len(runs):
            panel_axes.text(0.5, 0.5, "not logged", ha="center", transform=panel_axes.transAxes, color="0.5")
        elif missing and len(runs) <= len(PALETTE):
            note_missing(panel_axes, missing)
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=run.color, linewidth=2) for run in runs]
    add_legend(figure, handles, [run.label for run in runs])
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DPI)
    return output


def note_missing(axes: Any, labels: Sequence[str]) -> None:
    """Say below the title which runs the axes do not show."""
    shown = ", ".join(labels[:4]) + (f", .. ({len(labels)} in all)" if len(labels) > 4 else "")
    axes.set_title(f"{axes.get_title()}\nnot logged, or not positive: {shown}".strip(), fontsize="small")


def _shown_colors(figure: Any, axes: Any) -> set[str]:
    """Return the colors of the lines with a finite value in these axes and in their twin."""
    place = axes.get_subplotspec()
    twins = [other for other in figure.axes if other.get_subplotspec() == place]
    lines = [line for other in twins for line in other.lines]
    return {line.get_color() for line in lines if any(map(math.isfinite, line.get_ydata()))}


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
    algorithms = [_summary(folder).get("algorithm") for folder in folders]
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


def _described(folder: Path) -> str:
    """Describe a run for the title of its plots."""
    summary, parts = _summary(folder), [folder.resolve().name]
    for key, text in (("algorithm", "{}"), ("workers", "{} workers"), ("topology", "{}"), ("seed", "seed {}")):
        value = summary.get(key)
        if isinstance(value, str | int):
            parts.append("1 worker" if (key, value) == ("workers", 1) else text.format(value))
    return ", ".join(parts)


def _summary(folder: Path) -> dict[str, Any]:
    """Return summary.json of a run; {} if there is none that can be read."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


# ---- panels


@dataclass(frozen=True)
class Run:
    """One run in a panel."""

    label: str
    """Name in the legend; "" for a run that is plotted alone."""
    color: str
    records: Records


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the metrics that it shows, and the function that draws them."""

    keys: tuple[str, ...]
    draw: Callable[[Any, Sequence[Run]], None]

    def has_data(self, runs: Sequence[Run]) -> bool:
        """Return whether any run has logged any of the metrics."""
        return any(key in record for run in runs for record in run.records for key in self.keys)


def _draw_lr_and_gamma(axes: Any, runs: Sequence[Run]) -> None:
    right = axes.twinx()
    alone = _is_alone(runs)
    for run in runs:
        _line(axes, series(run.records, "gossip/lr"), "learning rate", run.color, dashed=not alone)
        _line(right, series(run.records, "gossip/gamma"), "gamma", VERMILION if alone else run.color)
    title = "learning rate and gamma" if right.lines else "learning rate"
    _finish(axes, "learning rate" if alone else "learning rate (dashed)", title)
    right.set_ylabel("consensus factor gamma" if alone else "consensus factor gamma (solid)")
    right.spines["top"].set_visible(False)
    # gamma is in [0, 1]: the same scale in all plots, and both axes have their zero at the same height.
    right.set_ylim(-0.03, 1.03)
    if peak := max((lr for line in axes.lines for lr in line.get_ydata() if math.isfinite(lr)), default=0.0):
        axes.set_ylim(-0.03 * peak, 1.03 * peak)
    right.set_visible(bool(right.lines))


def _draw_consensus(axes: Any, runs: Sequence[Run]) -> None:
    alone = _is_alone(runs)
    for run in runs:
        _line(axes, series(run.records, "gossip/radius"), "consensus radius", run.color)
        disagreement = series(run.records, "gossip/neighbor_disagreement")
        _line(axes, disagreement, "neighbor disagreement", VERMILION if alone else run.color, dashed=True)
    if any(value > 0 for line in axes.lines for value in line.get_ydata()):
        for line in axes.lines:
            line.set_ydata(positive(line.get_ydata()))
        set_logarithmic(axes)
    title = "consensus" if alone else "consensus radius (solid), neighbor disagreement (dashed)"
    _finish(axes, "distance (parameter norm)", title)


def _draw_loss(axes: Any, runs: Sequence[Run]) -> None:
    alone = _is_alone(runs)
    splits = list(dict.fromkeys(_evaluated_split(run.records, "loss") for run in runs))
    for run in runs:
        split = _evaluated_split(run.records, "loss")
        train, evaluated = series(run.records, "train/loss"), series(run.records, f"{split}/loss")
        # Each logged training loss is a mean over the steps since the one before.
        _line(axes, train, "train (workers, mean since the last point)", run.color, dashed=not alone, faint=not alone)
        _line(axes, evaluated, f"{split} (deployed model)", VERMILION if alone else run.color)
    _finish(axes, "loss (nats)", "loss" if alone else f"loss: {' or '.join(splits)} (solid), smoothed train (dashed)")


def _draw_accuracy(axes: Any, runs: Sequence[Run]) -> None:
    for run in runs:
        steps, values = series(run.records, "test/accuracy")
        # Logged as a fraction; a log in percent stays as it is.
        scale = 100 if all(not value > 1 for value in values) else 1
        _line(axes, (steps, [scale * value for value in values]), "test accuracy", run.color)
    _finish(axes, "test accuracy (%)", "accuracy of the deployed model")


def _draw_bleu(axes: Any, runs: Sequence[Run]) -> None:
    for run in runs:
        split = _evaluated_split(run.records, "bleu")
        _line(axes, series(run.records, f"{split}/bleu"), f"{split} BLEU", run.color)
    _finish(axes, f"{split} BLEU (0 to 100)", "BLEU of the deployed model")


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


def _line(axes: Any, points: Series, label: str, color: str, dashed: bool = False, faint: bool = False) -> None:
    steps, values = points
    if steps:
        marker = "o" if len(steps) <= FEW_POINTS else None
        style, alpha = "--" if dashed else "-", 0.55 if faint else 1.0
        axes.plot(
            steps, values, style, color=color, label=label, marker=marker, markersize=3.5, linewidth=1.5, alpha=alpha
        )


def _finish(axes: Any, ylabel: str, title: str) -> None:
    finish_axes(axes, "optimizer step", ylabel, title, integer_ticks=True)


def _is_alone(runs: Sequence[Run]) -> bool:
    return runs[0].label == ""
