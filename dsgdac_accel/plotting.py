"""Plots of a run, and of several runs side by side, from the metrics they wrote."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]
Series = tuple[list[int], list[float]]
"""Steps, ascending, and a value at each."""

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
COLOURS = (BLUE, VERMILION, GREEN, "#CC79A7", ORANGE, "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart with any colour vision."""

STEP_LABEL = "optimizer step"
FEW_POINTS = 30
"""Up to so many points carry markers: one alone would not show as a line."""

DPI = 150


def plot_run(output_dir: Path | str) -> list[Path]:
    """Plot the metrics.jsonl of a run as PNG files beside it, and return those written.

    lr_gamma.png               learning rate (left) and gamma (right)
    consensus.png                consensus radius and disagreement with the neighbours, logarithmic where positive
    loss.png                     training loss of the workers, validation or test loss of the deployed model
    accuracy.png, bleu.png       of the deployed model, on the split evaluated during training

    A plot whose metrics the run has not logged is left out.

    Raises FileNotFoundError without metrics.jsonl, and ImportError without matplotlib.
    """
    output_dir = Path(output_dir)
    records = read_metrics(output_dir / "metrics.jsonl")
    written = []
    runs = [("", BLUE, records)]
    for file_name, panel in PANELS.items():
        if panel.has_data(runs):
            figure, axes = new_figure(1, 1)
            panel.draw(axes[0], runs)
            written.append(output_dir / file_name)
            figure.savefig(written[-1], dpi=DPI)
    return written


def compare_runs(output_dirs: Iterable[Path | str], output: Path | str) -> Path:
    """Plot several runs into one PNG file of four panels, one colour per run, and return its path.

    The panels are those of `plot_run`; the legend names each run by the algorithm in its summary.json and, where
    runs would share a name or there is no summary, by its folder.

    Raises ValueError without runs, if no run has metrics to plot or `output` does not end in .png, and the errors of
    `plot_run`.
    """
    folders, output = [Path(folder) for folder in output_dirs], Path(output)
    if output.suffix != ".png":
        raise ValueError(f"output must be a file that ends in .png; got {output}.")
    if not folders:
        raise ValueError("compare_runs needs at least one output_dir; got none.")
    runs = [
        (label, COLOURS[number % len(COLOURS)], read_metrics(folder / "metrics.jsonl"))
        for number, (label, folder) in enumerate(zip(run_labels(folders), folders, strict=True))
    ]
    scores = [name for name in ("accuracy.png", "bleu.png") if PANELS[name].has_data(runs)] or ["accuracy.png"]
    panels = [PANELS[name] for name in ("lr_gamma.png", "consensus.png", "loss.png", *scores)]
    if not any(panel.has_data(runs) for panel in panels):
        keys = ", ".join(key for panel in PANELS.values() for key in panel.keys)
        raise ValueError(f"Runs to compare need logged metrics; found none of {keys} in {_listed(folders)}.")
    figure, axes = new_figure(2, -(-len(panels) // 2))
    for blank in axes[len(panels) :]:
        blank.set_visible(False)
    for panel, panel_axes in zip(panels, axes, strict=False):
        panel.draw(panel_axes, runs)
        if not panel.has_data(runs):
            panel_axes.text(0.5, 0.5, "not logged", ha="center", transform=panel_axes.transAxes, color="0.5")
    _add_run_legend(figure, runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DPI)
    return output


def read_metrics(path: Path | str) -> Records:
    """Read the records of a metrics.jsonl, one mapping per line.

    A line that is not a JSON object is skipped with a warning: a run that was killed leaves its last one truncated,
    and more follow it if the run was resumed.

    Raises FileNotFoundError, saying where it comes from, if there is no such file.
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
            warnings.warn(f"{path}: line {number} is truncated or no record; skipped.", stacklevel=2)
    return records


def series(records: Iterable[Mapping[str, Any]], key: str) -> Series:
    """Steps and values of one metric, by step; null, and what is no number, is NaN. Of a step logged twice (a resumed
    run) the last counts. A record that repeats an earlier measurement says when that was, under "<key>_step".

    >>> series([{"step": 2, "train/loss": 0.5}, {"step": 1, "train/loss": None}, {"step": 3}], "train/loss")
    ([1, 2], [nan, 0.5])
    """
    logged = [(record.get(f"{key}_step", record.get("step")), record[key]) for record in records if key in record]
    values = {step: value for step, value in logged if math.isfinite(_number(step))}
    steps = sorted(values)
    return steps, [_number(values[step]) for step in steps]


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def run_labels(folders: Sequence[Path]) -> list[str]:
    """Name each run by its algorithm, adding its folder where names would coincide."""
    algorithms = [_algorithm(folder) for folder in folders]
    return [
        name if not algorithm else algorithm if algorithms.count(algorithm) == 1 else f"{algorithm} ({name})"
        for algorithm, name in zip(algorithms, _folder_names(folders), strict=True)
    ]


def _folder_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many as tell all folders apart: those of a sweep all end in seed_0."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


Run = tuple[str, str, Records]
"""Label ("" for a run by itself), colour and records."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the metrics that it shows and the function that draws them."""

    keys: tuple[str, ...]
    draw: Callable[[Any, Sequence[Run]], None]

    def has_data(self, runs: Sequence[Run]) -> bool:
        """Whether any run has logged any of the metrics."""
        return any(key in record for *_, records in runs for record in records for key in self.keys)


def _draw_lr_and_gamma(axes: Any, runs: Sequence[Run]) -> None:
    right = axes.twinx()
    alone = _is_alone(runs)
    for _, colour, records in runs:
        _line(axes, series(records, "gossip/lr"), "learning rate", colour, dashed=not alone)
        _line(right, series(records, "gossip/gamma"), "gamma", VERMILION if alone else colour)
    title = "learning rate and gamma" if right.lines else "learning rate"
    _finish(axes, "learning rate" if alone else "learning rate (dashed)", title)
    right.set_ylabel("consensus factor gamma" if alone else "consensus factor gamma (solid)")
    # Gamma is in [0, 1]: one scale for all plots, and both axes have their zero at one height.
    right.set_ylim(-0.03, 1.03)
    if peak := max((lr for line in axes.lines for lr in line.get_ydata() if math.isfinite(lr)), default=0.0):
        axes.set_ylim(-0.03 * peak, 1.03 * peak)
    _add_legend([axes, right], runs)
    right.set_visible(bool(right.lines))


def _draw_consensus(axes: Any, runs: Sequence[Run]) -> None:
    alone = _is_alone(runs)
    for _, colour, records in runs:
        _line(axes, series(records, "gossip/radius"), "consensus radius", colour)
        disagreement = series(records, "gossip/neighbor_disagreement")
        _line(axes, disagreement, "neighbour disagreement", VERMILION if alone else colour, dashed=True)
    if _hide_what_is_not_positive(axes):
        set_logarithmic(axes)
    title = "consensus" if alone else "consensus radius (solid), neighbour disagreement (dashed)"
    _finish(axes, "distance (parameter norm)", title)
    _add_legend([axes], runs)


def _draw_loss(axes: Any, runs: Sequence[Run]) -> None:
    alone = _is_alone(runs)
    splits = list(dict.fromkeys(_evaluated_split(records, "loss") for *_, records in runs))
    for _, colour, records in runs:
        split = _evaluated_split(records, "loss")
        train, evaluated = series(records, "train/loss"), series(records, f"{split}/loss")
        _line(axes, train, "train (workers)", colour, dashed=not alone, faint=not alone)
        _line(axes, evaluated, f"{split} (deployed model)", VERMILION if alone else colour)
    _finish(axes, "loss (nats)", "loss" if alone else f"loss: {' or '.join(splits)} (solid), train (dashed)")
    _add_legend([axes], runs)


def _draw_accuracy(axes: Any, runs: Sequence[Run]) -> None:
    for _, colour, records in runs:
        steps, values = series(records, "test/accuracy")
        # Logged as a fraction; a log in per cent is left as it is.
        scale = 100 if all(not value > 1 for value in values) else 1
        _line(axes, (steps, [scale * value for value in values]), "test accuracy", colour)
    _finish(axes, "test accuracy (%)", "accuracy of the deployed model")


def _draw_bleu(axes: Any, runs: Sequence[Run]) -> None:
    for _, colour, records in runs:
        split = _evaluated_split(records, "bleu")
        _line(axes, series(records, f"{split}/bleu"), f"{split} BLEU", colour)
    _finish(axes, f"{split} BLEU (0 to 100)", "BLEU of the deployed model")


PANELS = {
    "lr_gamma.png": Panel(("gossip/lr", "gossip/gamma"), _draw_lr_and_gamma),
    "consensus.png": Panel(("gossip/radius", "gossip/neighbor_disagreement"), _draw_consensus),
    "loss.png": Panel(("train/loss", "validation/loss", "test/loss"), _draw_loss),
    "accuracy.png": Panel(("test/accuracy",), _draw_accuracy),
    "bleu.png": Panel(("validation/bleu", "test/bleu"), _draw_bleu),
}


def _evaluated_split(records: Records, name: str) -> str:
    """The split that a metric was measured on during training: validation if there is one, else test."""
    return "validation" if any(f"validation/{name}" in record for record in records) else "test"


def new_figure(rows: int, columns: int) -> tuple[Any, list[Any]]:
    """A figure without pyplot, whose global state and choice of backend belong to the user."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install dsgdac-accel[tasks]") from error
    size = (6.4, 4.0) if rows * columns == 1 else (5.5 * columns, 3.8 * rows)
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _line(axes: Any, points: Series, label: str, colour: str, dashed: bool = False, faint: bool = False) -> None:
    steps, values = points
    if not steps:
        return
    marker = "o" if len(steps) <= FEW_POINTS else None
    style = "--" if dashed else "-"
    alpha = 0.55 if faint else 1.0
    axes.plot(
        steps, values, style, color=colour, label=label, marker=marker, markersize=3.5, linewidth=1.5, alpha=alpha
    )


def _finish(axes: Any, ylabel: str, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(STEP_LABEL)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(ylabel)
    axes.set_title(title, fontsize="medium")
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)


def _is_alone(runs: Sequence[Run]) -> bool:
    return runs[0][0] == ""


def _add_legend(panels: Sequence[Any], runs: Sequence[Run]) -> None:
    """Name the lines of a single run; with several, one legend for the figure names the runs."""
    lines = [line for axes in panels for line in axes.lines]
    if lines and _is_alone(runs):
        panels[-1].legend(lines, [line.get_label() for line in lines], framealpha=0.9)


def _add_run_legend(figure: Any, runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, label=label, linewidth=2) for label, colour, _ in runs]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 4), frameon=False)


def set_logarithmic(axes: Any) -> None:
    """Scale y by its logarithm, once the lines are drawn, with enough ticks in plain numbers also within a decade."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))


def _hide_what_is_not_positive(axes: Any) -> bool:
    """A radius of 0 has no logarithm. Whether anything is left to show."""
    positive = [[value if value > 0 else math.nan for value in line.get_ydata()] for line in axes.lines]
    if not any(value > 0 for values in positive for value in values):
        return False
    for line, values in zip(axes.lines, positive, strict=True):
        line.set_ydata(values)
    return True


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _algorithm(folder: Path) -> str | None:
    """By the run's summary; None where there is none that can be read."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    algorithm = summary.get("algorithm") if isinstance(summary, dict) else None
    return algorithm if isinstance(algorithm, str) else None


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(str(folder) for folder in folders)
