"""Plots of a run, and of several runs side by side, from the metrics that they logged; the look of all plots."""

from __future__ import annotations

import json
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.common.config import ConfigError
from tasks.common.known_tasks import base_values

BLUE, ORANGE, VERMILION = "#0072B2", "#E69F00", "#D55E00"
PALETTE = (BLUE, VERMILION, "#009E73", "#CC79A7", ORANGE, "#56B4E9", "#000000")
"""The palette of Okabe and Ito, which readers with any color vision can tell apart."""

DPI = 150
FEW_POINTS = 30
"""Lines with at most this many points get markers; a single point would not show as a line."""


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
    run = Run("", BLUE, read_metrics(output_dir / "metrics.jsonl"))
    runs, described = [run], f"{output_dir.resolve().name}: {', '.join(facts_of(output_dir, run.records).values())}"
    written = []
    for file_name, panel in PANELS.items():
        if panel.has_data(runs):
            figure, (axes,) = new_figure()
            panel.draw_with_notes(axes, runs)
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
        Run(name, color, read_metrics(folder / "metrics.jsonl"))
        for folder, name, color in zip(folders, run_labels(folders), colors, strict=True)
    ]
    facts = [facts_of(folder, run.records) for folder, run in zip(folders, runs, strict=True)]
    shared = [value for key, value in facts[0].items() if all(other.get(key) == value for other in facts)]
    # The facts that tell runs apart, besides the names of algorithms and folders.
    telling = [key for key in ("data", "workers", "seed", "state") if len({own.get(key) for own in facts}) > 1]
    labels = [
        ", ".join([run.label, *(own[key] for key in telling if key in own)])
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
        panel.draw_with_notes(panel_axes, runs)
    add_title(figure, ", ".join([f"{len(runs)} run{'s' * (len(runs) > 1)}", *shared]))
    from matplotlib.lines import Line2D

    add_legend(figure, [Line2D([], [], color=run.color, linewidth=2) for run in runs], labels)
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
        same = [(f"{metric} identical", runs) for (metric, _), runs in self.drawn.items() if len(runs) > 1]
        return [f"{note}: {_listed(runs)}".removesuffix(": ").strip() for note, runs in (*self.missing.items(), *same)]

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
        try:
            record = json.loads(line or "{}")
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records += [record] if record else []
        elif line.strip():
            warnings.warn(f"{path}: line {number} is truncated or not a record; skipped.", stacklevel=2)
    return records


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
    paths = [folder.resolve() for folder in folders]
    # As many parts of the paths as tell all folders apart: in a sweep all end in seed_0.
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    algorithms = [
        json_object(folder / "summary.json").get("algorithm", _config(folder).get("algorithm")) for folder in folders
    ]
    labels = []
    for algorithm, name in zip(algorithms, names, strict=True):
        if isinstance(algorithm, str):
            labels.append(algorithm if algorithms.count(algorithm) == 1 else f"{algorithm} ({name})")
        else:
            labels.append(name)
    return labels


def facts_of(folder: Path, records: Records) -> dict[str, str]:
    """Return what the title of a run says, by name, from its configuration, summary and log: what is known of
    algorithm, data, workers, topology and seed, and whether it is unfinished."""
    summary, config = json_object(folder / "summary.json"), _config(folder)
    seed = summary.get("seed", config.get("seed"))
    known = {
        "algorithm": summary.get("algorithm", config.get("algorithm")),
        "data": Path(path).name if (path := config.get("data.path")) else config.get("data.name", summary.get("data")),
        "workers": workers_in_words(summary, records),
        "topology": summary.get("topology"),
        "seed": f"seed {seed}" if isinstance(seed, int) else None,
    }
    facts = {name: value for name, value in known.items() if isinstance(value, str)}
    if not summary and (steps := [record["step"] for record in records if isinstance(record.get("step"), int)]):
        facts["state"] = f"unfinished, step {max(steps)}"
    return facts


def workers_in_words(summary: Mapping[str, Any], records: Records) -> str | None:
    """Return the number of workers in words; of a run resumed with fewer, also the number at the end."""
    counts = [number(record.get("workers")) for record in records] + [number(summary.get("workers"))]
    counts = [int(count) for count in counts if math.isfinite(count)]
    if not counts:
        return None
    first, last = max(counts), counts[-1]
    return f"{first} worker{'s' * (first != 1)}{f', {last} at the end' if last != first else ''}"


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


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the metrics that it shows, and the function that draws them and notes what it cannot draw."""

    keys: tuple[str, ...]
    draw: Callable[[Any, Sequence[Run], PanelNotes], None]

    def has_data(self, runs: Sequence[Run]) -> bool:
        """Return whether any run has logged any of the metrics."""
        return any(key in record for run in runs for record in run.records for key in self.keys)

    def draw_with_notes(self, axes: Any, runs: Sequence[Run]) -> None:
        """Draw the metrics, and write below the title what cannot be drawn."""
        notes = PanelNotes()
        self.draw(axes, runs, notes)
        if self.has_data(runs):
            notes.write(axes)
        else:
            axes.text(0.5, 0.5, "not logged", ha="center", transform=axes.transAxes, color="0.5")


def _draw_lr_and_gamma(axes: Any, runs: Sequence[Run], notes: PanelNotes) -> None:
    right = axes.twinx()
    alone = runs[0].label == ""
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
    _finish(axes, "distance (parameter norm)", "distance of the workers" if runs[0].label == "" else title)


def _draw_loss(axes: Any, runs: Sequence[Run], notes: PanelNotes) -> None:
    alone = runs[0].label == ""
    splits = list(dict.fromkeys(_evaluated_split(run.records, "loss") for run in runs))
    for run in runs:
        split = _evaluated_split(run.records, "loss")
        # Each logged training loss is a mean over the steps since the one before.
        look: Any = {} if alone else {"dashed": True, "faint": True}
        _line(axes, run, "train/loss", "training loss", notes, label="train (workers, smoothed)", **look)
        _line(axes, run, f"{split}/loss", f"{split} loss", notes, VERMILION, label=f"{split} (deployed model)")
    _finish(axes, "loss (nats)", "loss" if alone else f"loss: {' or '.join(splits)} (solid), smoothed train (dashed)")


def _draw_accuracy(axes: Any, runs: Sequence[Run], notes: PanelNotes) -> None:
    for run in runs:
        _line(axes, run, "test/accuracy", "test accuracy", notes, scale=100)
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


# ---- the look of all plots


def new_figure(rows: int = 1, columns: int = 1, size: tuple[float, float] | None = None) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, row by row.

    Does not use pyplot, whose global state and choice of backend belong to the user.

    Args:
        rows, columns: grid of axes.
        size: width and height in inches; by default it follows from the grid.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    if size is None:
        size = (6.8, 4.6) if rows * columns == 1 else (5.5 * columns, 4.0 * rows)
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def plain(text: str) -> str:
    """Return text as matplotlib shows it: dollars are no formula, and bytes that are no text are question marks.

    >>> plain("runs/$HOME")
    'runs/\\\\$HOME'
    """
    return text.encode("utf-8", errors="replace").decode().replace("$", r"\$")


def wrapped(text: str, inches: float) -> str:
    """Return text as `plain` does, in lines that fit into a width at the default font size."""
    lines = [textwrap.wrap(line, max(20, int(inches / _letter())), drop_whitespace=False) for line in text.split("\n")]
    return "\n".join(plain(part) for parts in lines for part in parts or [""])


def _letter() -> float:
    """Return the width of a letter in inches, roughly."""
    from matplotlib import rcParams

    return 0.009 * rcParams["font.size"]


def add_title(figure: Any, text: str) -> None:
    """Title the figure, in as many lines as its width needs."""
    figure.suptitle(wrapped(text, figure.get_figwidth()), fontsize="medium")


def line_colors(count: int) -> list[Any]:
    """Return `count` colors: the palette, or shades in order where it has too few."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    from matplotlib import colormaps

    return [colormaps["viridis"](0.95 * number / (count - 1)) for number in range(count)]


def finish_axes(axes: Any, xlabel: str, ylabel: str, title: str = "", *, integer_ticks: bool = False) -> None:
    """Label the axes and draw the grid behind the data.

    With `integer_ticks`, for steps and epochs, the x axis begins at 0 and has whole numbers only.
    """
    axes.set_xlabel(plain(xlabel))
    axes.set_ylabel(plain(ylabel))
    axes.set_title(plain(title), fontsize="medium")
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if integer_ticks:
        from matplotlib.ticker import MaxNLocator

        # A range without two whole numbers in it would get fractions.
        axes.set_xlim(min(0.0, axes.get_xlim()[0]), max(1.0, axes.get_xlim()[1]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def add_legend(figure: Any, handles: Iterable[Any], labels: Iterable[str], caption: str = "") -> None:
    """Add one legend below all axes, where it cannot cover data, with a caption above it.

    It has as many columns as fit into the width of the figure, at most five. Long labels are broken into lines, and
    the figure becomes higher by the rows beyond the second.
    """
    room = figure.get_figwidth()
    # matplotlib leaves out labels that begin with an underscore.
    labels = [wrapped(f" {label}" if label.startswith("_") else label, room - 1.2) for label in labels]
    handles, caption = list(handles), wrapped(caption, 1.2 * room)
    if not handles:
        if caption:
            figure.supxlabel(caption, fontsize="small")
        return
    width = 0.7 + _letter() * max(len(line) for label in labels for line in label.split("\n"))  # inches of an entry
    columns = max(1, min(5, len(handles), int(room / width)))
    rows = max(sum(label.count("\n") + 1 for label in labels[k::columns]) for k in range(columns))
    figure.set_figheight(figure.get_figheight() + 0.22 * max(0, rows - 2))
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False,
        title=caption or None, title_fontsize="small",
    )  # fmt: skip
    legend.get_title().set_multialignment("center")


def set_logarithmic(axes: Any) -> None:
    """Make the y axis logarithmic. Call it after the lines are drawn.

    Ticks are plain numbers and close enough to read values within a single decade.
    """
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if high < 1.2 * low:  # a single value, which would have no tick
        axes.set_ylim(low / 1.5, high * 1.5)
        low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))


def positive(values: Iterable[float]) -> list[float]:
    """Replace values that a logarithmic axis cannot show by NaN.

    >>> positive([0.0, 0.5, -1.0])
    [nan, 0.5, nan]
    """
    return [value if value > 0 else math.nan for value in values]


def require_matplotlib() -> None:
    """Raise ImportError, naming the extra to install, if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install dsgdac-accel[tasks]") from error
