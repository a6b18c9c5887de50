"""The figures of a report, as PNG and PDF: curves over epochs, and results against a swept number.

Every panel is as wide as a column of a paper, 3.3 inches, with text of 8 points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tasks.common.plotting import (
    FEW_POINTS,
    PanelNotes,
    add_legend,
    add_title,
    finish_axes,
    line_colors,
    new_figure,
    positive,
    require_matplotlib,
    set_logarithmic,
    workers_in_words,
)
from tasks.studies.choice import chosen_rows
from tasks.studies.columns import Column, columns_of
from tasks.studies.config import FIGURES, SweepConfig, value_label
from tasks.studies.curves import Curve, curve_of, interval_factor
from tasks.studies.plan import Setting
from tasks.studies.table import Row, Spread

PANEL = (3.3, 2.4)
"""Width and height of a panel in inches."""

DPI = 300

_STYLE: Any = {
    "font.size": 8, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "pdf.fonttype": 42,
}  # fmt: skip

INTERVAL = "95 % confidence interval of the mean (Student's t)"

MOST_LINES = 8
"""More settings than this are drawn in several figures."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes over epochs."""

    keys: tuple[str, ...]
    """Metrics, of which the first that a setting has logged is drawn."""
    label: str
    """Label of the y axis."""
    logarithmic: bool = False
    scale: float = 1.0
    reference: str | None = None
    """A second metric, drawn dashed."""
    magnitude: bool = False
    """Draw absolute values."""


_RADIUS = Panel(("gossip/radius",), "consensus radius", logarithmic=True)

PANELS: dict[str, tuple[Panel, ...]] = {
    "radius": (Panel(("gossip/lr",), "learning rate"), _RADIUS),
    "curves": (
        Panel(("train/loss",), "workers' training loss\n(smoothed)"),
        Panel(("validation/loss", "test/loss"), "held-out loss\nof the deployed model"),
        Panel(("test/accuracy",), "test accuracy (%)", scale=100),
        Panel(("validation/bleu", "test/bleu"), "BLEU"),
        _RADIUS,
    ),
    "curvature": (
        Panel(("curvature/lambda_1",), "Hessian eigenvalue, magnitude\n(solid: largest, dashed: smallest)",
              logarithmic=True, reference="curvature/lambda_min", magnitude=True),
        Panel(("curvature/Q",), "curvature exposure Q\n(dashed: penalty E, not normalized)", logarithmic=True,
              reference="curvature/penalty"),
        Panel(("curvature/A",), "alignment A\n(dashed: B, random directions)", reference="curvature/B"),
        Panel(("curvature/A_grad_raw",), "gradient-noise alignment"),
    ),
}  # fmt: skip
"""Figures over epochs. A panel is left out if no run has logged its metrics."""

_RESULTS = ("test_accuracy", "bleu", "test_loss", "worker_train_loss", "train_loss", "curvature.lambda_1", "radius")
"""Results that a sensitivity figure shows, if the runs have them."""


def draw_figures(sweep: SweepConfig, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the figures that the sweep asks for into a folder, and return the files.

    Curves are those of the chosen settings, and sensitivity shows all. A figure is left out if no run has logged its
    metrics. Raises ImportError without matplotlib.
    """
    require_matplotlib()
    from matplotlib import rc_context

    wanted = FIGURES if sweep.report.figures is None else sweep.report.figures
    written = []
    with rc_context(_STYLE):
        for name in wanted:
            for stem, figure in _sensitivity(sweep, rows) if name == "sensitivity" else _curves(name, sweep, rows):
                for suffix in ("png", "pdf"):
                    written.append(folder / f"{stem}.{suffix}")
                    figure.savefig(written[-1], dpi=DPI)
    return written


# ---- curves over epochs


def _groups(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Yield the rows that share a figure: all, or, if they are many, those that differ in their first label only."""
    if len(rows) <= MOST_LINES or len(rows[0].setting.labels) < 2:
        yield (), list(rows)
        return
    for group in dict.fromkeys(row.setting.labels[1:] for row in rows):
        yield group, [row for row in rows if row.setting.labels[1:] == group]


def _curves(name: str, sweep: SweepConfig, rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    """Yield the names and figures of some panels: one, or one for each group of settings."""
    for group, members in _groups(chosen_rows(sweep, rows)):
        figure = _curves_figure(PANELS[name], members, group, described(sweep, members))
        if figure is not None:
            yield f"{name}_{Setting(group, {}).folder}" if group else name, figure


def _curves_figure(panels: Sequence[Panel], rows: Sequence[Row], group: tuple[str, ...], title: str) -> Any:
    """Draw the panels side by side, one color per setting, with notes on what they cannot show.

    Returns None if there is nothing to draw.
    """
    drawn = [(panel, [_curve(row, panel, panel.keys) for row in rows]) for panel in panels]
    drawn = [(panel, curves) for panel, curves in drawn if any(curve is not None and curve.epochs for curve in curves)]
    if not drawn:
        return None
    figure, axes = _figure(len(drawn))
    handles: dict[str, Any] = {}
    for (panel, panel_curves), panel_axes in zip(drawn, axes, strict=True):
        names = [row.setting.labels[0] if group else row.setting.name for row in rows]
        references = [_curve(row, panel, (panel.reference,)) if panel.reference else None for row in rows]
        shown = [value for curve in (*panel_curves, *references) if curve is not None for value in curve.mean]
        logarithmic = panel.logarithmic and any(value > 0 for value in shown) and not any(value < 0 for value in shown)
        notes = PanelNotes()
        for name, row, color, curve, reference in zip(
            names, rows, line_colors(len(rows)), panel_curves, references, strict=True
        ):
            mean = [] if curve is None else curve.mean
            if curve is None or not any(map(math.isfinite, notes.shown("", name, curve.epochs, mean, logarithmic))):
                if curve is None:
                    notes.add("not logged", name)
                continue
            if not curve.finished:
                notes.add("of runs that are not finished", name)
            if curve.seeds < len(row.states):
                notes.add(f"{curve.seeds} of {len(row.states)} seeds", name)
            handles.setdefault(name, _draw(panel_axes, curve, color, logarithmic))
            if reference is not None and reference.epochs:
                _draw(panel_axes, reference, color, logarithmic, dashed=True)
            elif panel.reference:
                notes.add(f"{panel.reference.rpartition('/')[2]} not logged", name)
        if logarithmic:
            both = [curve for curve in (*panel_curves, *references) if curve is not None]
            ends = [value for curve in both for value in (*curve.low, *curve.mean, *curve.high) if value > 0]
            panel_axes.set_ylim(min(ends) / 1.5, max(ends) * 1.5)
            set_logarithmic(panel_axes)
        finish_axes(panel_axes, "epoch", panel.label, integer_ticks=True)
        notes.write(panel_axes)
    end = max(panel_axes.get_xlim()[1] for panel_axes in axes)
    for panel_axes in axes:
        panel_axes.set_xlim(right=end)
    has_bands = any(panel_axes.collections for panel_axes in axes)
    most = max(curve.seeds for _, panel_curves in drawn for curve in panel_curves if curve is not None)
    caption = f"mean of {most} runs" + (f"; band: {INTERVAL}" if has_bands else "")
    _finish_figure(figure, handles, ", ".join((title, *group)), caption if most > 1 else "")
    return figure


def _curve(row: Row, panel: Panel, keys: Sequence[str]) -> Curve | None:
    curve = curve_of(row, keys, panel.scale)
    return curve.magnitude() if curve is not None and panel.magnitude else curve


def _draw(axes: Any, curve: Curve, color: Any, logarithmic: bool, dashed: bool = False) -> Any:
    shown = positive if logarithmic else list
    marker = "o" if len(curve.epochs) <= FEW_POINTS else None
    look = {"linestyle": "--", "markerfacecolor": "white"} if dashed else {}  # a single point shows no dashes
    (line,) = axes.plot(
        curve.epochs, shown(curve.mean), color=color, marker=marker, markersize=2.5, linewidth=1.2, **look
    )
    if curve.low != curve.high:
        # An interval that reaches 0 ends below a logarithmic axis.
        low = [value if value > 0 else 1e-3 * mean for value, mean in zip(curve.low, curve.mean, strict=True)]
        low = shown(low if logarithmic else curve.low)
        axes.fill_between(curve.epochs, low, shown(curve.high), color=color, alpha=0.15, linewidth=0)
    return line


def described(sweep: SweepConfig, rows: Sequence[Row]) -> str:
    """Return the title of a figure: that of the sweep, then task, algorithm, base, workers and seeds."""
    states = [state for row in rows for state in row.states]
    algorithms = {str(state.run.expected.get("algorithm")) for state in states}
    workers = {words for state in states if (words := workers_in_words(state.summary, state.records))}
    seeds = ", ".join(map(str, sweep.seeds)) if len(sweep.seeds) <= 6 else f"{len(sweep.seeds)} in all"
    facts = [
        sweep.task.stem,
        *(algorithms - {"None"} if len(algorithms) == 1 else ()),  # several are in the legend
        f"base {sweep.base.stem}",
        " or ".join(sorted(workers, key=lambda words: int(words.split()[0]))),
        f"seed{'s' * (len(sweep.seeds) > 1)} {seeds}",
    ]
    return "\n".join(filter(None, (sweep.title, ", ".join(filter(None, facts)))))


# ---- results against a swept number


def swept_numbers(sweep: SweepConfig) -> dict[str, list[float]]:
    """Return the keys of the grid that take two or more numbers, each with its values."""
    swept = {}
    for key, values in sweep.grid.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if isinstance(values, list) and len(numbers) == len(values) >= 2:
            swept[key] = [float(number) for number in numbers]
    return swept


def _sensitivity(sweep: SweepConfig, rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the figure of each swept number."""
    results = [column for column in columns_of(_RESULTS) if any(Spread.of(row.values(column)).count for row in rows)]
    for key, numbers in swept_numbers(sweep).items() if results else ():
        labels = [value_label(key, value) for value in sweep.grid[key]]
        axis = next(row.setting.labels.index(labels[0]) for row in rows if labels[0] in row.setting.labels)
        lines: dict[tuple[str, ...], list[tuple[float, Row]]] = {}
        for row in rows:
            own = row.setting.labels
            number = numbers[labels.index(own[axis])]
            lines.setdefault((*own[:axis], *own[axis + 1 :]), []).append((number, row))
        yield f"sensitivity_{key}", _sensitivity_figure(key, results, lines, described(sweep, rows))


def _sensitivity_figure(
    key: str, results: Sequence[Column], lines: dict[tuple[str, ...], list[tuple[float, Row]]], title: str
) -> Any:
    figure, axes = _figure(len(results))
    handles, most = {}, 1
    for panel_axes, column in zip(axes, results, strict=True):
        notes = PanelNotes()
        for (labels, points), color in zip(lines.items(), line_colors(len(lines)), strict=True):
            name = ", ".join(labels)
            spreads = [(number, Spread.of(row.values(column))) for number, row in sorted(points, key=lambda p: p[0])]
            for number, spread in spreads:
                if not spread.count:
                    notes.add(f"no value at {number:g}", name)
            spreads = [(number, spread) for number, spread in spreads if spread.count]
            if not spreads:
                continue
            most = max(most, *(spread.count for _, spread in spreads))
            bars = [spread.std * interval_factor(spread.count) if spread.count > 1 else 0.0 for _, spread in spreads]
            numbers, means = [number for number, _ in spreads], [spread.mean for _, spread in spreads]
            handles[name] = panel_axes.errorbar(
                numbers, means, bars, color=color, marker="o", markersize=3, linewidth=1.2, capsize=2
            )
        finish_axes(panel_axes, key, column.heading)
        _tick_values(panel_axes, sorted({number for points in lines.values() for number, _ in points}))
        notes.write(panel_axes)
    caption = f"mean of up to {most} runs; bar: {INTERVAL}" if most > 1 else ""
    _finish_figure(figure, handles if len(lines) > 1 else {}, title, caption)
    return figure


def _tick_values(axes: Any, numbers: Sequence[float]) -> None:
    """Put the ticks of the x axis at the values of the sweep, if they are few, on the scale that parts them more."""
    if numbers[0] > 0 and _closest([math.log(number) for number in numbers]) > _closest(numbers):
        axes.set_xscale("log")
    if len(numbers) <= 8:
        axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
        axes.set_xticks([], minor=True)


def _closest(numbers: Sequence[float]) -> float:
    """Return the smallest gap between neighbors in ascending order, as a part of their range.

    >>> _closest([0, 1, 4])
    0.25
    """
    return min(high - low for low, high in pairwise(numbers)) / (numbers[-1] - numbers[0])


# ---- common look


def _figure(panels: int) -> tuple[Any, list[Any]]:
    """Return panels, at most two in a row, and hide the cells that are left over."""
    columns = min(panels, 2)
    rows = -(-panels // columns)
    figure, axes = new_figure(rows, columns, size=(PANEL[0] * columns, PANEL[1] * rows + 0.7))
    for blank in axes[panels:]:
        blank.set_visible(False)
    return figure, axes[:panels]


def _finish_figure(figure: Any, handles: dict[str, Any], title: str, caption: str) -> None:
    add_title(figure, title)
    if list(handles) == ["base"]:
        handles = {}
    add_legend(figure, handles.values(), handles.keys(), caption=caption)
