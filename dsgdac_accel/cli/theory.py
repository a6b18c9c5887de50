"""`dsgdac topology` and `dsgdac schedule`: what can be known before any training."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsgdac_accel.topology import Topology

MOST_ROUNDS = 8
"""Of a longer period only the first rounds are printed."""

MOST_MATRIX_WORKERS = 16


def add_commands(commands: Any) -> None:
    """Add the parsers of both commands."""
    topology = commands.add_parser(
        "topology",
        help="who averages with whom, and how fast that mixes",
        description="Print a topology's rounds with their weights, its period, its spectral gap, and how many steps at "
        "gamma 1 it takes to mix. Without NAME, list the topologies.",
        epilog="examples:\n  dsgdac topology\n  dsgdac topology one_peer_ring 8\n"
        "  dsgdac topology base_graph 6 --matrices",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    topology.add_argument("name", metavar="NAME", nargs="?", help="of a topology")
    topology.add_argument("workers", metavar="N", nargs="?", type=int, help="number of workers")
    topology.add_argument("--matrices", action="store_true", help="print the rounds as matrices")
    topology.set_defaults(run=_topology)
    schedule = commands.add_parser(
        "schedule",
        help="gamma over a run",
        description="Print gamma = (rate / max_lr)^p over a run with linear warm-up and cosine decay, as the image "
        "task has it, or with warm-up and inverse square root, as the translation task has it.",
        epilog="examples:\n  dsgdac schedule --power 0,1,2,3 --epochs 200 --warmup 10 --start 10\n"
        "  dsgdac schedule --rate inverse_sqrt --power 2 --epochs 20 --warmup 1 --plot gamma.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    schedule.add_argument("--power", metavar="P,P,..", type=_numbers, default=[3.0], help="exponents (default: 3)")
    schedule.add_argument("--epochs", metavar="E", type=int, default=200, help="of the run (default: 200)")
    schedule.add_argument("--warmup", metavar="E", type=float, default=10.0, help="epochs of warm-up (default: 10)")
    schedule.add_argument("--start", metavar="E", type=int, default=0, help="epoch at which gamma begins (default: 0)")
    schedule.add_argument("--lr", choices=("cosine", "inverse_sqrt"), default="cosine", help="shape of the decay")
    schedule.add_argument("--max-rate", choices=("active", "run"), default="active", help="rate at which gamma is 1")
    schedule.add_argument("--floor", metavar="G", type=float, default=0.0, help="smallest gamma (default: 0)")
    schedule.add_argument("--lines", metavar="N", type=int, default=20, help="epochs to print (default: about 20)")
    schedule.add_argument("--plot", metavar="FILE", type=Path, help="draw a PNG file as well")
    schedule.set_defaults(run=_schedule)


# ---- topology


def steps_to_mix(topology: Topology, tolerance: float) -> int:
    """Steps at gamma 1 after which every disagreement has shrunk to `tolerance` of what it was, at most.

    ||W(t) .. W(1) - 11'/n||_2 <= tolerance; it never grows with t, so t is found by doubling and then by halving.

    >>> from dsgdac_accel.topology import build_topology
    >>> steps_to_mix(build_topology("one_peer_exponential", 8), 1e-12)
    3
    """
    import numpy as np

    workers, period = topology.num_workers, topology.period
    mean = np.full((workers, workers), 1 / workers)

    def left(product: Any) -> float:
        return float(np.linalg.norm(product - mean, ord=2))

    done = np.eye(workers)
    if left(done) <= tolerance:
        return 0
    powers = [topology.period_matrix().numpy()]  # of whole periods: 1, 2, 4, ..
    while left(powers[-1]) > tolerance:
        powers.append(powers[-1] @ powers[-1])
    periods = 0
    for exponent, power in reversed(list(enumerate(powers))):
        if left(power @ done) > tolerance:
            done, periods = power @ done, periods + 2**exponent
    for extra in range(period):
        done = topology.rounds[extra] @ done
        if left(done) <= tolerance:
            return periods * period + extra + 1
    return (periods + 1) * period  # rounding in the powers: a period more is enough


def _topology(options: argparse.Namespace) -> int:
    from dsgdac_accel.topology import TOPOLOGIES, build_topology

    if options.name is None:
        for name, build in TOPOLOGIES.items():
            print(f"{name:21} {(build.__doc__ or '').strip().splitlines()[0]}")
        return 0
    if options.workers is None:
        raise ValueError("topology needs the number of workers, as in `dsgdac topology one_peer_ring 8`.")
    if options.matrices and options.workers > MOST_MATRIX_WORKERS:
        raise ValueError(f"--matrices is for up to {MOST_MATRIX_WORKERS} workers; got {options.workers}.")
    topology = build_topology(options.name, options.workers)
    print(
        f"{topology.name}, {topology.num_workers} worker{'s' * (topology.num_workers != 1)}, period {topology.period}"
    )
    print(f"spectral gap of a period   {topology.spectral_gap():.6g}")
    print(f"steps to mix to 1e-3       {steps_to_mix(topology, 1e-3)}")
    # Some reach the exact average within one period; others only ever come nearer.
    exact = topology.spectral_gap() > 1 - 1e-9
    print(f"steps to mix exactly       {steps_to_mix(topology, 1e-9) if exact else 'never, only ever nearer'}")
    print("\nat gamma 1, each worker's own weight and those of its peers:")
    for number in range(min(topology.period, MOST_ROUNDS)):
        _print_round(topology, number, options.matrices)
    if topology.period > MOST_ROUNDS:
        print(f"\n.. and {topology.period - MOST_ROUNDS} more rounds")
    return 0


def _print_round(topology: Topology, number: int, as_matrix: bool) -> None:
    print(f"\nround {number}")
    if as_matrix:
        for row in topology.rounds[number]:
            print("  " + " ".join(f"{weight:6.4f}" if weight else "     ." for weight in row))
        return
    for worker in range(topology.num_workers):
        own = float(topology.rounds[number][worker, worker])
        peers = topology.neighbors(number, worker)
        shown = ", ".join(f"{peer}: {weight:.4g}" for peer, weight in peers.items()) or "sits out"
        print(f"  worker {worker:<3} own {own:.4g}   {shown}")


# ---- schedule


def _schedule(options: argparse.Namespace) -> int:
    from dsgdac_accel.checks import check_writable

    if options.epochs < 1:
        raise ValueError(f"--epochs must be at least 1; got {options.epochs}.")
    if not 0 <= options.warmup < math.inf:
        raise ValueError(f"--warmup must be a finite number >= 0; got {options.warmup}.")
    if not 0 <= options.start <= options.epochs:
        raise ValueError(f"--start must be an epoch from 0 to {options.epochs}; got {options.start}.")
    if options.lines < 1:
        raise ValueError(f"--lines must be at least 1; got {options.lines}.")
    if options.plot is not None:
        if options.plot.is_dir() or options.plot.suffix != ".png":
            raise ValueError(f"--plot must be a file that ends in .png; got {options.plot}.")
        check_writable("--plot", options.plot)
    steps = 100  # an epoch
    lrs = [_rate(options)(step, options.warmup * steps) for step in range(options.epochs * steps)]
    gammas = {power: _gammas(lrs, power, options.start * steps, options) for power in options.power}
    print(f"{'epoch':>6} {'lr':>8} " + " ".join(f"{f'p = {power:g}':>10}" for power in gammas))
    every = max(1, round(options.epochs / options.lines))
    for epoch in [*range(0, options.epochs, every), options.epochs]:
        step = min(epoch * steps, len(lrs) - 1)
        shown = " ".join(f"{values[step]:>10.4g}" for values in gammas.values())
        print(f"{epoch:>6} {lrs[step]:>8.4f} {shown}")
    print("\nrate as a fraction of its peak; gamma of the first step of each epoch, at the end of the last step")
    if options.plot is not None:
        print(_plot_schedule(options.plot, lrs, gammas, steps))
    return 0


def _rate(options: argparse.Namespace) -> Callable[[int, float], float]:
    total = options.epochs * 100

    def cosine(step: int, warmup: float) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, total - warmup)))

    def inverse_sqrt(step: int, warmup: float) -> float:
        if step + 1 < warmup:
            return (step + 1) / warmup
        return math.sqrt(max(1.0, warmup) / (step + 1))

    return cosine if options.lr == "cosine" else inverse_sqrt


def _gammas(lrs: list[float], power: float, start: int, options: argparse.Namespace) -> list[float]:
    from dsgdac_accel.schedule import AdaptiveConsensus

    consensus = AdaptiveConsensus(
        power=power, start_step=start, max_lr=options.max_lr, floor=options.floor, planned_lrs=lrs
    )
    return [consensus.gamma(step, lr) for step, lr in enumerate(lrs)]


def _plot_schedule(file: Path, lrs: list[float], gammas: dict[float, list[float]], steps: int) -> Path:
    from dsgdac_accel.plotting import COLOURS, DPI, new_figure

    figure, (axes,) = new_figure(1, 1)
    epochs = [step / steps for step in range(len(lrs))]
    axes.plot(epochs, lrs, "--", color="0.5", label="rate / peak")
    for number, (power, values) in enumerate(gammas.items()):
        axes.plot(epochs, values, color=COLOURS[number % len(COLOURS)], label=f"p = {power:g}")
    axes.set_xlabel("epoch")
    axes.set_ylabel("consensus factor gamma")
    axes.grid(True, color="0.9")
    axes.legend(framealpha=0.9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)
    return file


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.replace(",", " ").split()] or [math.nan]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers such as 0,1,2,3; got {text!r}") from None
