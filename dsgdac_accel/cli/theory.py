"""`dsgdac topology` and `dsgdac schedule`: what is known about a run before it trains."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsgdac_accel.topology import Topology

SHOWN_ROUNDS = 8
"""Number of rounds that are printed of a longer period."""

MOST_MATRIX_WORKERS = 16
MOST_MATRIX_BYTES = 2**26
"""Largest size of the mixing matrices of a period, n x n float64 per round: 2,048 workers on a one-peer ring."""

MOST_EPOCHS = 100_000
"""Epochs times exponents of a printed schedule, which takes some seconds."""

STEPS_PER_EPOCH = 100


def add_commands(commands: Any) -> None:
    """Add the parsers of both commands."""
    topology = commands.add_parser(
        "topology",
        help="who averages with whom, and how fast that mixes",
        description="Print the rounds of a topology with their weights, its period, its spectral gap, and the number "
        "of steps at gamma 1 that it takes to mix. Without NAME, list the topologies.",
        epilog="examples:\n  dsgdac topology\n  dsgdac topology one_peer_ring 8\n"
        "  dsgdac topology base_graph 6 --matrices",
    )
    topology.add_argument("name", metavar="NAME", nargs="?", help="name of the topology")
    topology.add_argument("workers", metavar="N", nargs="?", type=int, help="number of workers")
    topology.add_argument("--matrices", action="store_true", help="print the rounds as matrices")
    topology.set_defaults(run=_topology)
    schedule = commands.add_parser(
        "schedule",
        help="gamma over a run",
        description="Print gamma = (lr / max_lr)^p over a run with linear warm-up, followed by cosine decay as in the "
        "image task or by inverse square root decay as in the translation task.",
        epilog="examples:\n  dsgdac schedule --power 0,1,2,3 --epochs 200 --warmup 10 --start 10\n"
        "  dsgdac schedule --lr_scheduler_type inverse_sqrt --power 2 --epochs 20 --warmup 1 --plot gamma.png",
    )
    add = schedule.add_argument
    add("--power", metavar="P,P,..", type=_numbers, default=[3.0], help="exponents (default: 3)")
    add("--epochs", metavar="E", type=int, default=200, help="epochs of the run (default: 200)")
    add("--warmup", metavar="E", type=float, help="epochs of warm-up (default: 5 %% of the run)")
    add("--start", metavar="E", type=int, default=0, help="epoch at which adaptive consensus starts (default: 0)")
    add("--lr_scheduler_type", choices=("cosine", "inverse_sqrt"), default="cosine", help="decay after the warm-up")
    add("--max_lr", choices=("active", "run"), default="active",
        help="lr at which gamma is 1: the largest since the start, or of the whole run (default: active)")  # fmt: skip
    add("--floor", metavar="G", type=float, default=0.0, help="smallest gamma (default: 0)")
    add("--lines", metavar="N", type=int, default=20, help="number of epochs to print, roughly (default: 20)")
    add("--plot", metavar="FILE", type=Path, help="also draw the curves as a PNG file")
    schedule.set_defaults(run=_schedule)


# ---- topology


def _topology(options: argparse.Namespace) -> int:
    from dsgdac_accel.topology import TOPOLOGIES, build_topology, steps_to_mix

    if options.name is None:
        for name, build in TOPOLOGIES.items():
            print(f"{name:21} {(build.__doc__ or '').strip().splitlines()[0]}")
        return 0
    if options.workers is None:
        raise ValueError("topology needs the number of workers, as in `dsgdac topology one_peer_ring 8`.")
    if options.matrices and options.workers > MOST_MATRIX_WORKERS:
        raise ValueError(f"--matrices is for up to {MOST_MATRIX_WORKERS} workers; got {options.workers}.")
    check_matrix_size(options.name, options.workers)
    topology = build_topology(options.name, options.workers)
    print(
        f"{topology.name}, {topology.num_workers} worker{'s' * (topology.num_workers != 1)}, period {topology.period}"
    )
    print(f"spectral gap of a period   {topology.spectral_gap():.6g}")
    print(f"steps to mix to 1e-3       {steps_to_mix(topology, 1e-3)}")
    # Some topologies reach the exact average within one period, the others never do.
    exact = topology.spectral_gap() > 1 - 1e-9
    print(f"steps to mix exactly       {steps_to_mix(topology, 1e-9) if exact else 'never, the error only shrinks'}")
    print("\nat gamma 1, the weight of each worker for itself and for its neighbors:")
    for number in range(min(topology.period, SHOWN_ROUNDS)):
        _print_round(topology, number, options.matrices)
    if topology.period > SHOWN_ROUNDS:
        print(f"\n.. and {topology.period - SHOWN_ROUNDS} more rounds")
    return 0


def check_matrix_size(name: str, workers: int) -> None:
    """Raise ValueError if the mixing matrices of a period are too large, before memory is allocated for them.

    >>> check_matrix_size("one_peer_ring", 1024)
    >>> check_matrix_size("one_peer_ring", 1_000_000_000)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: one_peer_ring of 1,000,000,000 workers has 1.6e+10 GB of mixing matrices; the limit is 0.067 GB...
    """
    size = 8 * workers**2 * _most_rounds(name, workers)
    if size > MOST_MATRIX_BYTES:
        raise ValueError(
            f"{name} of {workers:,} workers has {size / 1e9:.3g} GB of mixing matrices; the limit is "
            f"{MOST_MATRIX_BYTES / 1e9:.2g} GB. Use fewer workers."
        )


def _most_rounds(name: str, workers: int) -> int:
    if name == "one_peer_ring":
        return workers if workers % 2 else 2
    return 2 * workers.bit_length() if name in ("one_peer_exponential", "base_graph") else 1


def _print_round(topology: Topology, number: int, as_matrix: bool) -> None:
    print(f"\nround {number}")
    if as_matrix:
        for row in topology.rounds[number]:
            print("  " + " ".join(f"{weight:6.4f}" if weight else "     ." for weight in row))
        return
    for worker in range(topology.num_workers):
        own = float(topology.rounds[number][worker, worker])
        neighbors = topology.neighbors(number, worker)
        shown = ", ".join(f"{neighbor}: {weight:.4g}" for neighbor, weight in neighbors.items()) or "sits out"
        print(f"  worker {worker:<3} own {own:.4g}   {shown}")


# ---- schedule


def _schedule(options: argparse.Namespace) -> int:
    from dsgdac_accel.checks import check_integer, check_number
    from dsgdac_accel.plotting import check_plot_file

    check_integer("--epochs", options.epochs, minimum=1, maximum=MOST_EPOCHS)
    if len(options.power) * options.epochs > MOST_EPOCHS:
        raise ValueError(
            f"--power must hold at most {MOST_EPOCHS // options.epochs} exponents for {options.epochs} epochs; got "
            f"{len(options.power)}. Use fewer exponents or epochs."
        )
    check_integer("--start", options.start, minimum=0, maximum=options.epochs)
    check_integer("--lines", options.lines, minimum=1)
    if options.warmup is None:
        options.warmup = options.epochs / 20
    # A longer warm-up would never reach the peak, so gamma would not be that of any real run.
    advice = f"The warm-up cannot be longer than the run, {options.epochs} epochs."
    check_number("--warmup", options.warmup, minimum=0, maximum=options.epochs, advice=advice)
    if options.plot is not None:
        check_plot_file("--plot", options.plot)
    lrs = _planned_lrs(options)
    gammas = {power: _gammas(lrs, power, options) for power in options.power}
    print(f"{'epoch':>6} {'lr':>8} " + " ".join(f"{f'p = {power:g}':>10}" for power in gammas))
    every = max(1, round(options.epochs / options.lines))
    for epoch in [*range(0, options.epochs, every), options.epochs]:
        step = min(epoch * STEPS_PER_EPOCH, len(lrs) - 1)
        shown = " ".join(f"{values[step]:>10.4g}" for values in gammas.values())
        print(f"{epoch:>6} {lrs[step]:>8.4f} {shown}")
    print("\nlr as a fraction of its peak; both at the first step of each epoch, at the end at the last step")
    if options.plot is not None:
        _plot_schedule(options, lrs, gammas)
        print(options.plot)
    return 0


def _planned_lrs(options: argparse.Namespace) -> list[float]:
    """Return the lr of each step as a fraction of its peak."""
    total, warmup = options.epochs * STEPS_PER_EPOCH, options.warmup * STEPS_PER_EPOCH

    def cosine(step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, total - warmup)))

    def inverse_sqrt(step: int) -> float:
        return math.sqrt(max(1.0, warmup) / (step + 1))

    decay = cosine if options.lr_scheduler_type == "cosine" else inverse_sqrt
    return [min(1.0, (step + 1) / warmup) if step < warmup else decay(step) for step in range(total)]


def _gammas(lrs: list[float], power: float, options: argparse.Namespace) -> list[float]:
    from dsgdac_accel.schedule import AdaptiveConsensus

    start = options.start * STEPS_PER_EPOCH
    consensus = AdaptiveConsensus(
        power=power, start_step=start, max_lr=options.max_lr, floor=options.floor, planned_lrs=lrs
    )
    return [consensus.gamma(step, lr) for step, lr in enumerate(lrs)]


def _plot_schedule(options: argparse.Namespace, lrs: list[float], gammas: dict[float, list[float]]) -> None:
    from dsgdac_accel.plotting import DPI, add_legend, add_title, finish_axes, line_colors, new_figure

    figure, (axes,) = new_figure()
    epochs = [step / STEPS_PER_EPOCH for step in range(len(lrs))]
    axes.plot(epochs, lrs, "--", color="0.5", label="lr / peak", zorder=3)  # p = 1 may coincide with it
    for color, (power, values) in zip(line_colors(len(gammas)), gammas.items(), strict=True):
        axes.plot(epochs, values, color=color, label=f"gamma, p = {power:g}")
    finish_axes(axes, "epoch", "lr / peak, gamma", "gamma = (lr / max_lr)^p", integer_ticks=True)
    add_legend(figure, *axes.get_legend_handles_labels())
    length = f"{options.epochs} epoch{'s' * (options.epochs > 1)}"
    floor = f", floor {options.floor:g}" if options.floor else ""
    planned = f"{options.lr_scheduler_type} decay over {length}, warm-up {options.warmup:g}"
    add_title(figure, f"{planned}, adaptive from epoch {options.start}, max_lr {options.max_lr}{floor}")
    figure.savefig(options.plot, dpi=DPI)


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.replace(",", " ").split()] or [math.nan]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers such as 0,1,2,3; got {text!r}") from None
