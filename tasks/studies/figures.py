"""The figures of a report, as PNG: the paper's curves over epochs, and how results depend on a swept number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgdac_accel.plotting import COLOURS, DPI, FEW_POINTS, new_figure, set_logarithmic
from tasks.studies.columns import Column, Spread, columns_of
from tasks.studies.config import FIGURES, ReportConfig, SweepConfig, value_label
from tasks.studies.curves import Curve, curve_of
from tasks.studies.plan import Setting
from tasks.studies.table import Row

MOST_LINES = 8
"""More settings than that are drawn in several figures."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes over epochs."""

    keys: tuple[str, ...]
    """Metric to draw: the first that a setting has logged."""
    label: str
    """Of the vertical axis."""
    logarithmic: bool = False
    scale: float = 1.0
    reference: str | None = None
    """A second metric, dashed."""


PANELS: dict[str, tuple[Panel, ...]] = {
    "rate_radius": (
        Panel(("gossip/lr",), "learning rate"),
        Panel(("gossip/radius",), "consensus radius", logarithmic=True),
    ),
    "lambda_1": (Panel(("curvature/lambda_1",), "top Hessian eigenvalue", logarithmic=True),),
    "accuracy": (Panel(("test/accuracy",), "test accuracy (%)", scale=100),),
    "bleu": (Panel(("validation/bleu", "test/bleu"), "BLEU"),),
    "loss": (
        Panel(("train/loss",), "workers' training loss"),
        Panel(("test/loss", "validation/loss"), "held-out loss of the deployed model"),
    ),
    "q": (Panel(("curvature/Q",), "curvature exposure Q", logarithmic=True),),
    "alignment": (
        Panel(("curvature/A",), "alignment A (dashed: B, random directions)", True, reference="curvature/B"),
    ),
}

_RESULTS = ("test_accuracy", "bleu", "test_loss", "train_loss", "curvature.lambda_1", "radius")
"""What a sensitivity figure shows, of what the runs have."""


def draw_figures(sweep: SweepConfig, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the figures that the sweep asks for into a folder, and return the files.

    A figure whose metrics no run has logged is left out. Raises ImportError without matplotlib.
    """
    written: list[Path] = []
    wanted = FIGURES if sweep.report.figures is None else sweep.report.figures
    for name in wanted:
        if name == "sensitivity":
            written += _sensitivity_figures(sweep, rows, folder)
            continue
        for group, members in _groups(rows):
            figure = _curves_figure(PANELS[name], members, group)
            if figure is not None:
                suffix = f"_{Setting(group, {}).folder}" if group else ""
                written.append(folder / f"{name}{suffix}.png")
                figure.savefig(written[-1], dpi=DPI)
    return written


def _groups(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Rows that share a figure: all, or, where they are many, those that differ in their first label only."""
    if len(rows) <= MOST_LINES or len(rows[0].setting.labels) < 2:
        yield (), list(rows)
        return
    for group in dict.fromkeys(row.setting.labels[1:] for row in rows):
        yield group, [row for row in rows if row.setting.labels[1:] == group]


def _curves_figure(panels: Sequence[Panel], rows: Sequence[Row], group: tuple[str, ...]) -> Any:
    """A panel beside the other, one colour per setting; None where nothing is to be drawn."""
    curves = [[curve_of(row, panel.keys, panel.scale) for row in rows] for panel in panels]
    if not any(curve is not None and curve.epochs for panel_curves in curves for curve in panel_curves):
        return None
    figure, axes = _figure(len(panels))
    colours = _colours(len(rows))
    handles: dict[str, Any] = {}
    for panel, panel_axes, panel_curves in zip(panels, axes, curves, strict=True):
        shown = [value for curve in panel_curves if curve is not None for value in curve.mean]
        logarithmic = panel.logarithmic and not any(value < 0 for value in shown)
        for row, colour, curve in zip(rows, colours, panel_curves, strict=True):
            if curve is None or not curve.epochs:
                continue
            if logarithmic and not any(value > 0 for value in curve.mean):
                continue  # such as the radius of a baseline: nothing to see, so nothing in the legend
            line = _draw(panel_axes, curve, colour, logarithmic)
            handles.setdefault(_name_in_group(row, group), line)
            reference = curve_of(row, (panel.reference,), panel.scale) if panel.reference else None
            if reference is not None:
                _draw(panel_axes, reference, colour, logarithmic, dashed=True)
        _finish(panel_axes, "epoch", panel.label, logarithmic and bool(panel_axes.lines))
    _legend(figure, handles, ", ".join(group))
    return figure


def _name_in_group(row: Row, group: tuple[str, ...]) -> str:
    return row.setting.labels[0] if group else row.setting.name


def _draw(axes: Any, curve: Curve, colour: Any, logarithmic: bool, dashed: bool = False) -> Any:
    def shown(values: Sequence[float]) -> list[float]:
        return [value if value > 0 or not logarithmic else math.nan for value in values]

    marker = "o" if len(curve.epochs) <= FEW_POINTS else None
    style = "--" if dashed else "-"
    (line,) = axes.plot(
        curve.epochs, shown(curve.mean), style, color=colour, marker=marker, markersize=3, linewidth=1.5
    )
    if curve.low != curve.high:
        axes.fill_between(curve.epochs, shown(curve.low), shown(curve.high), color=colour, alpha=0.15, linewidth=0)
    return line


# ---- how results depend on a number


def swept_numbers(sweep: SweepConfig) -> dict[str, list[float]]:
    """Keys of the grid that take two or more numbers, each with its values."""
    swept = {}
    for key, values in sweep.grid.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if isinstance(values, list) and len(numbers) == len(values) >= 2:
            swept[key] = [float(number) for number in numbers]
    return swept


def _sensitivity_figures(sweep: SweepConfig, rows: Sequence[Row], folder: Path) -> Iterator[Path]:
    results = columns_of(ReportConfig(columns=list(_RESULTS)))
    results = [column for column in results if any(math.isfinite(x) for row in rows for x in row.values(column))]
    for key, numbers in swept_numbers(sweep).items():
        labels = [value_label(key, value) for value in sweep.grid[key]]
        if not results:
            continue
        axis = next(row.setting.labels.index(labels[0]) for row in rows if labels[0] in row.setting.labels)
        lines: dict[tuple[str, ...], list[tuple[float, Row]]] = {}
        for row in rows:
            own = row.setting.labels
            number = numbers[labels.index(own[axis])]
            lines.setdefault((*own[:axis], *own[axis + 1 :]), []).append((number, row))
        path = folder / f"sensitivity_{key}.png"
        _sensitivity_figure(key, results, lines).savefig(path, dpi=DPI)
        yield path


def _sensitivity_figure(
    key: str, results: Sequence[Column], lines: dict[tuple[str, ...], list[tuple[float, Row]]]
) -> Any:
    figure, axes = _figure(len(results))
    handles = {}
    for panel_axes, column in zip(axes, results, strict=True):
        for (labels, points), colour in zip(lines.items(), _colours(len(lines)), strict=True):
            spreads = [(number, Spread.of(row.values(column))) for number, row in sorted(points, key=lambda p: p[0])]
            spreads = [(number, spread) for number, spread in spreads if spread.count]
            if not spreads:
                continue
            bars = [spread.std if math.isfinite(spread.std) else 0.0 for _, spread in spreads]
            numbers, means = [number for number, _ in spreads], [spread.mean for _, spread in spreads]
            handles[", ".join(labels)] = panel_axes.errorbar(
                numbers, means, bars, color=colour, marker="o", markersize=4, linewidth=1.5, capsize=3
            )
        _finish(panel_axes, key, column.heading, False)
    _legend(figure, handles if len(lines) > 1 else {}, "")
    return figure


# ---- shared looks


def _figure(panels: int) -> tuple[Any, list[Any]]:
    """Panels side by side, at most three in a row; the cells left over are blank."""
    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    figure, axes = new_figure(rows, columns)
    figure.set_size_inches((5.2 * columns + 0.6, 3.8 * rows + 0.5))
    for blank in axes[panels:]:
        blank.set_visible(False)
    return figure, axes[:panels]


def _colours(count: int) -> list[Any]:
    """Okabe and Ito's palette; for more lines than it has, shades in order."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib import colormaps

    return [colormaps["viridis"](0.95 * number / (count - 1)) for number in range(count)]


def _finish(axes: Any, xlabel: str, ylabel: str, logarithmic: bool) -> None:
    if logarithmic and any(value > 0 for line in axes.lines for value in line.get_ydata()):
        set_logarithmic(axes)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any, handles: dict[str, Any], title: str) -> None:
    if title:
        figure.suptitle(title, fontsize="medium")
    if handles and list(handles) != ["base"]:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 4), frameon=False
        )
