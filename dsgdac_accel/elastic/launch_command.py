"""The command `dsgdac launch`."""

from __future__ import annotations

import argparse
from typing import Any


def add_commands(commands: Any) -> None:
    """Add the parser of the command."""
    launch = commands.add_parser(
        "launch",
        help="start the workers of this machine, and let the others continue when one is lost",
        usage="dsgdac launch -n N SCRIPT ... | -n N -m MODULE ...",
        description="Start N processes of `python SCRIPT ...` on this machine that find each other as with torchrun, "
        "on GPUs if there are any. When one fails, the others continue; with torchrun they end. This command keeps the "
        "rendezvous store, so any worker may be lost once all are connected. Exit status: 0 if the workers that ended "
        "last finished, 75 if a signal stopped them with a checkpoint, else that of the first that failed. SIGTERM, "
        "SIGINT and SIGUSR1 go to all workers; workers that still run 300 s after SIGTERM are killed. For several "
        "machines, restarts and log files use torchrun.",
        epilog="example: dsgdac launch -n 4 tasks/cifar.py --config configs/digits.yaml --gossip.on_worker_loss "
        "continue",
    )
    launch.add_argument("-n", "--workers", metavar="N", type=int, required=True, help="number of processes")
    launch.add_argument("-m", "--module", action="store_true", help="start a module instead of a script")
    launch.add_argument("command", metavar="SCRIPT", nargs=argparse.REMAINDER, help="script or module, its arguments")
    launch.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    from dsgdac_accel.elastic.launch import launch  # imports torch, which takes seconds

    return launch(options.command, options.workers, module=options.module)
