"""`dsgdac scaling`: what a step costs with more and more workers, by formulas."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def add_commands(commands: Any) -> None:
    """Add the parser of the command."""
    scaling = commands.add_parser(
        "scaling",
        help="bytes, messages and time of a step with n workers, for DDP and gossip",
        description="Print what a worker sends and how long a step takes with 1, 2, 4, .. workers, for DDP (ring and "
        "tree all-reduce), one-peer gossip and complete gossip, by the formulas of dsgdac_accel.scaling. Every worker "
        "has one full-duplex line to a network without other bottlenecks.",
        epilog="examples:\n  dsgdac scaling --parameters 1M --bandwidth 100M --latency 10 --compute 180\n"
        "  dsgdac scaling --parameters 25M --bandwidth 10G --latency 0.05 --compute 100 --plot scaling.png\n"
        "  dsgdac scaling --parameters 1M --bandwidth 100M --latency 10 --compute 180 --bits 8.125 --workers 64",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scaling.add_argument("--parameters", metavar="N", type=_amount, default=25e6, help="of the model (default: 25M)")
    scaling.add_argument(
        "--bandwidth", metavar="BITS", type=_amount, default=1e9, help="bits per second of a line (default: 1G)"
    )
    scaling.add_argument("--latency", metavar="MS", type=float, default=1.0, help="one way (default: 1)")
    scaling.add_argument("--compute", metavar="MS", type=float, default=100.0, help="of a step (default: 100)")
    scaling.add_argument("--bits", metavar="B", type=float, default=32.0, help="of a number in gossip (default: 32)")
    scaling.add_argument("--gradient-bits", metavar="B", type=float, default=32.0, help="the same in DDP (default: 32)")
    scaling.add_argument("--no-overlap", action="store_true", help="gossip that is not hidden behind computation")
    scaling.add_argument("--workers", metavar="N", type=int, default=10_000, help="the most (default: 10000)")
    scaling.add_argument("--plot", metavar="FILE", type=Path, help="draw a PNG file (.png) as well")
    scaling.set_defaults(run=_scaling)


def _scaling(options: argparse.Namespace) -> int:
    from dsgdac_accel.scaling import Cluster, check_plot, described, plot, table_lines, worker_counts

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
        check_plot(options.plot, "--plot")
    print(described(cluster))
    print("\n".join(table_lines(cluster, counts)))
    if options.plot is not None:
        print(plot(cluster, options.workers, options.plot))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError by the names and in the units of the command line; the library has others."""
    from dsgdac_accel.checks import check_integer, check_number
    from dsgdac_accel.scaling import FEWEST_BITS, MOST_BITS, MOST_PARAMETERS, MOST_WORKERS

    check_number("--parameters", options.parameters, minimum=1, maximum=MOST_PARAMETERS)
    check_number("--bandwidth", options.bandwidth, above=0, advice="It is in bits per second.")
    for flag, milliseconds in (("--latency", options.latency), ("--compute", options.compute)):
        check_number(flag, milliseconds, minimum=0, advice="It is in milliseconds.")
    for flag, bits in (("--bits", options.bits), ("--gradient-bits", options.gradient_bits)):
        check_number(flag, bits, minimum=FEWEST_BITS, maximum=MOST_BITS)
    check_integer("--workers", options.workers, minimum=1)
    if options.workers > MOST_WORKERS:
        raise ValueError(f"--workers must be at most {MOST_WORKERS:,}; got {options.workers:,}.")


def _amount(text: str) -> float:
    """A number such as 25M, in powers of ten.

    >>> _amount("25M"), _amount("1.5g"), _amount("1e6"), _amount("0.5T")
    (25000000.0, 1500000000.0, 1000000.0, 500000000000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmgt]?)", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a number such as 25M or 1e6; got {text!r}")
    return float(found[1]) * _UNITS[found[2]]
