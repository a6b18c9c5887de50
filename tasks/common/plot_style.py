"""The common look of all plots: colors, figures and axes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from typing import Any

BLUE, ORANGE, VERMILION = "#0072B2", "#E69F00", "#D55E00"
PALETTE = (BLUE, VERMILION, "#009E73", "#CC79A7", ORANGE, "#56B4E9", "#000000")
"""The palette of Okabe and Ito, which readers with any color vision can tell apart."""

DPI = 150
_LETTER = 0.009
"""Width of a letter in inches per point of the font size, roughly."""

FEW_POINTS = 30
"""Lines with at most this many points get markers; a single point would not show as a line."""


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
    letters = max(20, int(inches / _letter()))
    lines = [textwrap.wrap(line, letters, drop_whitespace=False) for line in text.split("\n")]
    return "\n".join(plain(part) for parts in lines for part in parts or [""])


def _letter() -> float:
    """Return the inches of a letter."""
    from matplotlib import rcParams

    return _LETTER * rcParams["font.size"]


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
    if handles:
        lines = [line for label in labels for line in label.split("\n")]
        width = 0.7 + _letter() * max(map(len, lines))  # inches of an entry
        columns = max(1, min(5, len(handles), int(room / width)))
        rows = max(sum(label.count("\n") + 1 for label in labels[k::columns]) for k in range(columns))
        figure.set_figheight(figure.get_figheight() + 0.22 * max(0, rows - 2))
        legend = figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False,
            title=caption or None, title_fontsize="small",
        )  # fmt: skip
        legend.get_title().set_multialignment("center")
    elif caption:
        figure.supxlabel(caption, fontsize="small")


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
