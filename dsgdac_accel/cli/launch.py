"""`dsgdac launch`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dsgdac_accel.elastic.launch import STOP_SECONDS


def add_commands(commands: Any) -> None:
    """Add the parser of the command."""
    launch = commands.add_parser(
        "launch",
        help="start the workers of this machine, and let the others go on when one is lost",
        usage="dsgdac launch [OPTIONS] SCRIPT ... | -m MODULE ...",
        description="Start N processes of `python SCRIPT ...` that meet as with torchrun, on GPUs if there are any. "
        "When one fails, the others go on; the store they meet in is kept by this command, so that any worker can be "
        "lost, once all have met. Exit status: 0 where those that ended last finished well, 75 where a signal stopped "
        "them, with a checkpoint, else that of the first that failed. SIGTERM, SIGINT and SIGUSR1 go to all workers, "
        f"and {STOP_SECONDS:g} s after SIGTERM those that are left are killed.",
        epilog="examples:\n  dsgdac launch -n 4 tasks/cifar.py --config configs/digits.yaml\n"
        "  dsgdac launch -n 8 --machines 2 --machine-index 0 --address node0:29500 train.py\n"
        "  dsgdac launch -n 4 --max-restarts 3 --log-dir logs -m package.train --epochs 10",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    launch.add_argument("-n", "--workers", metavar="N", type=int, required=True, help="processes on this machine")
    launch.add_argument("-m", "--module", action="store_true", help="start a module instead of a script")
    launch.add_argument(
        "--on-failure",
        choices=("wait", "stop"),
        default="wait",
        help="when a worker fails, wait for the others, or end them with SIGTERM (default: wait)",
    )
    launch.add_argument(
        "--grace", metavar="SECONDS", type=float, default=30.0, help="from SIGTERM to SIGKILL (default: 30)"
    )
    launch.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="start all anew when the run failed or was stopped with a checkpoint, unless this command got the signal",
    )
    launch.add_argument(
        "--log-dir",
        metavar="DIR",
        type=Path,
        help="add what each worker prints to DIR/worker-RANK.log, with only worker 0 on the console",
    )
    launch.add_argument("--machines", metavar="M", type=int, default=1, help="machines, each with N workers")
    launch.add_argument("--machine-index", metavar="K", type=int, default=0, help="of this machine, from 0")
    launch.add_argument("--address", metavar="HOST:PORT", help="of machine 0, the same on all machines")
    launch.add_argument("command", metavar="SCRIPT", nargs=argparse.REMAINDER, help="script or module, its arguments")
    launch.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    from dsgdac_accel.elastic.launch import launch
    from dsgdac_accel.elastic.launch_plan import Launch

    return launch(
        Launch(
            command=options.command, module=options.module, workers=options.workers, machines=options.machines,
            machine_index=options.machine_index, address=options.address, grace=options.grace,
            stop_on_failure=options.on_failure == "stop", max_restarts=options.max_restarts, log_dir=options.log_dir,
        )
    )  # fmt: skip
