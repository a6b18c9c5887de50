"""The command `dsgdac launch`."""

from __future__ import annotations

import argparse
from typing import Any


def add_commands(commands: Any) -> None:
    """Add the parser of the command."""
    launch = commands.add_parser(
        "launch",
        help="start the workers of this machine, and let the others continue when one is lost",
        usage="dsgdac launch [OPTIONS] SCRIPT ... | -m MODULE ...",
        description="Start N processes of `python SCRIPT ...` that find each other as with torchrun, on GPUs if there "
        "are any. When one fails, the others continue; with torchrun they end. This command keeps the rendezvous "
        "store, so any worker may be lost once all are connected. Exit status: 0 if the workers that ended last "
        "finished, 75 if a signal stopped them with a checkpoint, else that of the first that failed. SIGTERM, SIGINT "
        "and SIGUSR1 go to all workers; workers that still run 300 s after SIGTERM are killed. For restarts and log "
        "files use torchrun.",
        epilog="examples:\n  dsgdac launch -n 4 tasks/cifar.py --config configs/digits.yaml "
        "--gossip.on_worker_loss continue\n"
        "  dsgdac launch -n 8 --machines 2 --machine-index 0 --address node0:29500 -m package.train",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    launch.add_argument("-n", "--workers", metavar="N", type=int, required=True, help="processes on this machine")
    launch.add_argument("-m", "--module", action="store_true", help="start a module instead of a script")
    launch.add_argument("--machines", metavar="M", type=int, default=1, help="machines, each with N workers")
    launch.add_argument("--machine-index", metavar="K", type=int, default=0, help="index of this machine, from 0")
    launch.add_argument("--address", metavar="HOST:PORT", help="address of machine 0, the same on all machines")
    launch.add_argument("command", metavar="SCRIPT", nargs=argparse.REMAINDER, help="script or module, its arguments")
    launch.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    from dsgdac_accel.elastic.launch_plan import Launch  # checks what was asked for before torch is imported

    plan = Launch(
        command=options.command,
        module=options.module,
        workers=options.workers,
        machines=options.machines,
        machine_index=options.machine_index,
        address=options.address,
    )
    from dsgdac_accel.elastic.launch import launch

    return launch(plan)
