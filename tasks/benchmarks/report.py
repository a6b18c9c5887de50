"""Prints and writes the result of a benchmark: table, targets, JSON file and plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsgdac_accel.checks import check_writable
from dsgdac_accel.config import config_to_dict
from tasks.benchmarks.config import BenchmarkConfig
from tasks.benchmarks.measurement import Measured, quartiles_of, summarize
from tasks.benchmarks.targets import Target, Verdict
from tasks.common.plotting import BLUE, DPI, ORANGE, add_title, new_figure, plain, require_matplotlib, wrapped

REFERENCES = ("local", "local+bytes", "ddp", "decent_dp", "fsdp", "fsdp+bytes", "hsdp")
"""Variants that the others are compared with, if they are measured."""


def report(config: BenchmarkConfig, measured: Measured, workers: int, lines: Sequence[str] = ()) -> dict[str, Any]:
    """Print the result and write the files. Returns the content of the JSON file.

    Args:
        config: settings of the benchmark.
        measured: its measurements.
        workers: number of workers.
        lines: lines about the network, to print and to keep in the file.
    """
    table = summarize(measured.turns)
    verdicts = [Target.parse(text).judge(table) for text in config.targets]
    print("\n".join([headline(config, measured, workers), *lines, *table_lines(table)]))
    for name, reason in measured.left_out.items():
        print(f"{name} is left out: {reason}")
    for verdict in verdicts:
        print(verdict.line(), flush=True)
    result = {
        "config": config_to_dict(config),
        "workers": workers,
        "parameters": measured.parameters,
        "torch": torch.__version__,
        "notes": list(lines),
        "variants": table,
        "left_out": measured.left_out,
        "targets": [
            {"target": text, "measured": verdict.measured, "met": verdict.met}
            for text, verdict in zip(config.targets, verdicts, strict=True)
        ],
    }
    if config.output is not None:
        write_result(config.output, result)
        file = config.output.with_suffix(".png")
        plot(table, verdicts, file, headline(config, measured, workers), tuple(measured.left_out))
    return result


def write_result(file: Path, result: Mapping[str, Any]) -> None:
    """Write a JSON file and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def check_output(output: Path) -> None:
    """Check before the measurement that the files can be written, and create their folder.

    Raises ValueError if they cannot, RuntimeError without matplotlib.
    """
    for file in (output, output.with_suffix(".png")):
        check_writable("output", file)
    try:
        require_matplotlib()
    except ImportError as error:
        raise RuntimeError(f"{error}. Or leave out output, which needs no plot.") from None


def headline(config: BenchmarkConfig, measured: Measured, workers: int) -> str:
    """Return the measured case in one line."""
    what = f"{config.model}, {measured.parameters / 1e6:.2f} M parameters, {config.batch_size} samples per process"
    threads = torch.get_num_threads()
    each = f" of {config.shards} processes" if config.shards > 1 else ""
    return f"{what}; {workers} workers{each}, {threads} thread(s) each, {config.kernel} SGD, torch {torch.__version__}"


def table_lines(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of the table."""
    if not table:
        return []
    width = max(len(name) for name in table)
    references = [name for name in REFERENCES if name in table]
    head = f"{'':{width}}  {'ms/step':>9}"
    head += "".join(f"  {f'of {name} (quartiles)':>22}" for name in references)
    head += f"  {'cpu ms':>8}" + "".join(f"  {f'cpu of {name}':>16}" for name in references)
    head += f"  {'MB sent':>8}  {'ms waited':>9}  {'copies':>6}"
    lines = [head]
    for name, row in table.items():
        line = f"{name:{width}}  {1e3 * row['seconds']:9.2f}"
        for reference in references:
            ratio = row["ratios"][reference]
            line += f"  {ratio['median']:6.3f} ({ratio['q1']:.3f}-{ratio['q3']:.3f})"
        line += f"  {1e3 * row['cpu_seconds']:8.2f}"
        line += "".join(f"  {row['cpu_ratios'][reference]['median']:16.3f}" for reference in references)
        sent = row["bytes_sent"] if row["bytes_carried"] is None else row["bytes_carried"]
        waited = "-" if row["waited"] is None else f"{1e3 * row['waited']:.2f}"
        lines.append(f"{line}  {sent / 1e6:8.3f}  {waited:>9}  {row['extra_copies']:6.3f}")
    return lines


def plot(
    table: Mapping[str, Mapping[str, Any]],
    verdicts: Sequence[Verdict],
    path: Path,
    title: str,
    left_out: Sequence[str] = (),
) -> None:
    """Plot the step time of each variant as a bar, with the quartiles of its rounds and its target, to a PNG file.

    A note names the variants that were left out. Raises ImportError without matplotlib.
    """
    names = list(table)
    figure, (axes,) = new_figure(size=(8.0, 2.0 + 0.42 * len(names)))
    medians: list[float] = []
    spread: list[list[float]] = [[], []]
    for name in names:
        q1, median, q3 = (1e3 * seconds for seconds in quartiles_of(table[name]["rounds"]["seconds"]))
        medians.append(median)
        spread[0].append(median - q1)
        spread[1].append(q3 - median)
    colors = [BLUE if name.startswith("gossip") else "0.6" for name in names]
    places = list(range(len(names)))
    axes.barh(places, medians, xerr=spread, color=colors, height=0.65, error_kw={"ecolor": "0.25", "capsize": 2})
    limits = _limits(table, verdicts)
    for name, limit in limits.items():
        place = names.index(name)
        axes.plot([1e3 * limit] * 2, [place - 0.42, place + 0.42], color=ORANGE, linewidth=2.5)
    furthest = [max(medians[k] + spread[1][k], 1e3 * limits.get(name, 0.0)) for k, name in enumerate(names)]
    for place, (median, right) in enumerate(zip(medians, furthest, strict=True)):
        axes.annotate(f" {median:.4g}", (right, place), va="center", fontsize="small")
    axes.set_yticks(places, [plain(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(furthest, default=1.0))
    marks = "bars: medians, gossip in blue; lines: quartiles of the rounds" + ("; orange: target" if limits else "")
    axes.set_xlabel(f"milliseconds per step ({marks})")
    head, _, rest = title.partition("; ")
    add_title(figure, f"{head}\n{rest}")
    if left_out:
        axes.set_title(wrapped(f"left out: {', '.join(left_out)}", 8.0), fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI)


def _limits(table: Mapping[str, Mapping[str, Any]], verdicts: Sequence[Verdict]) -> dict[str, float]:
    """For each variant, the step time of its strictest target."""
    limits: dict[str, float] = {}
    for verdict in verdicts:
        target = verdict.target
        if target.what == "time" and verdict.measured is not None and target.reference is not None:
            limit = target.limit * table[target.reference]["seconds"]
            limits[target.variant] = min(limit, limits.get(target.variant, limit))
    return limits
