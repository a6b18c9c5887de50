"""`dsgdac scaling`: cost of a training step against the number of workers, by formulas."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgdac_accel.cli.parsing import amount

if TYPE_CHECKING:
    from dsgdac_accel.scaling import Cluster


MOST_MILLISECONDS = 1e9
"""Longest latency and computation: eleven days."""


def add_commands(commands: Any) -> None:
    """Add the parser of `dsgdac scaling`."""
    scaling = commands.add_parser(
        "scaling",
        help="bytes, messages and time of a step with n workers, for DDP and gossip",
        description="Print the data that a worker sends and the time of a step with 1, 2, 4, .. workers, for DDP (ring "
        "and tree all-reduce), one-peer gossip and complete gossip, by the formulas of dsgdac_accel.scaling. Every "
        "worker has one full-duplex line to a network without other bottlenecks.",
        epilog="examples:\n  dsgdac scaling --parameters 1M --bandwidth 100M --latency 10 --compute 180\n"
        "  dsgdac scaling --parameters 25M --bandwidth 10G --latency 0.05 --compute 100 --plot scaling.png\n"
        "  dsgdac scaling --parameters 1M --bandwidth 100M --latency 10 --compute 180 --bits int8 --workers 64",
    )
    add = scaling.add_argument
    add("--parameters", metavar="N", type=amount, default=25e6, help="parameters of the model (default: 25M)")
    add("--bandwidth", metavar="BITS", type=amount, default=1e9, help="bits per second of a line (default: 1G)")
    add("--latency", metavar="MS", type=float, default=1.0, help="one way, in milliseconds (default: 1)")
    add("--compute", metavar="MS", type=float, default=100.0, help="milliseconds of computation (default: 100)")
    add(
        "--bits",
        metavar="B",
        type=bits_per_parameter,
        default=32.0,
        help="bits per parameter in gossip, or its comm_dtype: full, bf16, int8, int4, int2 (default: 32)",
    )
    add("--gradient-bits", metavar="B", type=float, default=32.0, help="bits per gradient entry in DDP (default: 32)")
    add("--no-overlap", action="store_true", help="do not hide gossip behind computation")
    add("--workers", metavar="N", type=int, default=10_000, help="largest number of workers (default: 10000)")
    add("--plot", metavar="FILE", type=Path, help="also draw the table as a PNG file")
    scaling.set_defaults(run=_scaling)


def bits_per_parameter(text: str) -> float:
    """Read a number of bits, or the name of a `comm_dtype`.

    >>> bits_per_parameter("int2"), bits_per_parameter("16")
    (2.125, 16.0)
    """
    from dsgdac_accel.core.formats import FORMATS

    bits = {"full": 32.0} | {name: number_format.bits for name, number_format in FORMATS.items()}
    try:
        return bits[text] if text in bits else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or one of {', '.join(bits)}; got {text!r}") from None


def _scaling(options: argparse.Namespace) -> int:
    from dsgdac_accel.plotting import check_plot_file
    from dsgdac_accel.scaling import Cluster, worker_counts

    _check(options)
    cluster = Cluster(
        parameters=options.parameters,
        compute_seconds=options.compute / 1e3,
        bandwidth=options.bandwidth / 8,
        latency=options.latency / 1e3,
        bits=options.bits,
        gradient_bits=options.gradient_bits,
        overlap=not options.no_overlap,
    )
    counts = worker_counts(options.workers)
    if options.plot is not None:
        check_plot_file("--plot", options.plot)
    print(_described(cluster))
    print("\n".join(table_lines(cluster, counts)))
    if options.plot is not None:
        _plot(cluster, options.workers, options.plot)
        print(options.plot)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError with the names and units of the command line, which differ from the library's."""
    from dsgdac_accel.checks import check_integer, check_number
    from dsgdac_accel.scaling import FEWEST_BITS, MOST_BITS, MOST_PARAMETERS, MOST_WORKERS

    check_number("--parameters", options.parameters, minimum=1, maximum=MOST_PARAMETERS)
    check_number("--bandwidth", options.bandwidth, above=0, advice="It is in bits per second.")
    for flag, milliseconds in (("--latency", options.latency), ("--compute", options.compute)):
        check_number(flag, milliseconds, minimum=0, maximum=MOST_MILLISECONDS, advice="It is in milliseconds.")
    for flag, bits in (("--bits", options.bits), ("--gradient-bits", options.gradient_bits)):
        check_number(flag, bits, minimum=FEWEST_BITS, maximum=MOST_BITS)
    check_integer("--workers", options.workers, minimum=1, maximum=MOST_WORKERS)


def table_lines(cluster: Cluster, counts: Sequence[int]) -> list[str]:
    """Format bytes, messages and milliseconds of each scheme as text, one line per number of workers."""
    from dsgdac_accel.scaling import SCHEMES

    lines = [f"{'':>9}  " + "  ".join(f"{name:^27}" for name in SCHEMES)]
    lines.append(f"{'workers':>9}  " + "  ".join(f"{'MB':>8} {'messages':>8} {'ms':>9}" for _ in SCHEMES))
    for workers in counts:
        steps = [scheme(cluster, workers) for scheme in SCHEMES.values()]
        cells = [f"{step.bytes_sent / 1e6:8.4g} {step.messages:8d} {1e3 * step.seconds:9.5g}" for step in steps]
        lines.append(f"{workers:9d}  " + "  ".join(cells))
    return lines


def _plot(cluster: Cluster, largest: int, file: Path) -> None:
    from dsgdac_accel import plotting
    from dsgdac_accel.scaling import SCHEMES

    # About twenty counts a decade, evenly spaced on a logarithmic axis.
    points = max(1, math.ceil(20 * math.log10(largest)))
    counts = sorted({round(largest ** (point / points)) for point in range(points + 1)})
    figure, (time, traffic) = plotting.new_figure(1, 2, size=(11.0, 4.6))
    colors = (plotting.VERMILION, plotting.ORANGE, plotting.BLUE, plotting.GREEN)
    styles = zip(SCHEMES.items(), colors, ("-", "--", "-", "--"), strict=True)
    for (name, scheme), color, dashes in styles:
        steps = [scheme(cluster, workers) for workers in counts]
        marker = "o" if len(counts) <= plotting.FEW_POINTS else None
        look = {"color": color, "marker": marker, "markersize": 3.5}
        time.plot(counts, plotting.positive([step.seconds for step in steps]), dashes, label=name, **look)
        traffic.plot(counts, [step.bytes_sent / 1e6 for step in steps], dashes, **look)
    note = ""
    if cluster.compute_seconds:
        time.axhline(cluster.compute_seconds, color="0.5", linewidth=1, linestyle=":", label="computation alone")
    else:
        note = "times of 0 are not on this axis"
    if any(math.isfinite(seconds) for line in time.lines for seconds in line.get_ydata()):
        plotting.set_logarithmic(time)
    traffic.set_ylim(bottom=0)
    for panel, label, title in (
        (time, "seconds per step", note),
        (traffic, "MB sent per worker and step", ""),
    ):
        plotting.set_whole_logarithmic(panel, largest)
        plotting.finish_axes(panel, "workers", label, title)
    plotting.add_legend(figure, *time.get_legend_handles_labels())
    plotting.add_title(figure, f"time and traffic of a training step by formula: {_described(cluster)}")
    figure.savefig(file, dpi=plotting.DPI)


def _described(cluster: Cluster) -> str:
    bits = f"{cluster.bits:g} bits"
    if cluster.bits != cluster.gradient_bits:
        bits += f" (gradients {cluster.gradient_bits:g})"
    return (
        f"{cluster.parameters / 1e6:g} M parameters of {bits}, {8 * cluster.bandwidth / 1e6:g} Mb/s, "
        f"{1e3 * cluster.latency:g} ms, {1e3 * cluster.compute_seconds:g} ms of computation, "
        f"gossip {'hidden behind it' if cluster.overlap else 'not hidden behind it'}"
    )
