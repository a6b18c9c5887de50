"""From the command line to the end of a run, the same for all tasks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tasks.common.algorithms import SYNCHRONOUS
from tasks.common.cli_errors import leave, starting_up, training
from tasks.common.config import parse_config
from tasks.common.output_dir import AnyAccelerator

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

Config = TypeVar("Config")


class Run(Protocol):
    """What a task is: built from its configuration, it says what it is about to do, and does it."""

    config: Any
    accelerator: AnyAccelerator

    def described(self) -> str:
        """Algorithm, data, workers and steps, in words."""

    def train(self) -> None:
        """Train, evaluate, and write everything into the output folder."""


def run_task(
    make_run: Callable[[Config], Run],
    config_class: type[Config],
    demo: str,
    patterns: Sequence[str],
    description: str | None,
) -> None:
    """Read the configuration, train, and say where the results are.

    Args:
        make_run: builds the run.
        config_class: of its settings.
        demo: name of the configuration in `configs/` that runs where none is given.
        patterns: names of the task's configurations, as globs.
        description: for `--help`.
    """
    default = CONFIGS / f"{demo}.yaml"
    announce_demo(default, patterns)
    with starting_up():
        run = make_run(parse_config(config_class, default_file=default, description=description))
    run.accelerator.print(run.described())
    if run.accelerator.num_workers == 1 and run.config.algorithm not in SYNCHRONOUS:
        print(
            "1 worker: there is nobody to gossip with. Start several with torchrun --nproc_per_node N or "
            "accelerate launch --multi_gpu --num_processes N (the flag starts CPU workers, too), or let this process "
            "hold several: --gossip.workers_per_process N.",
            file=sys.stderr,
        )
    several = run.accelerator.num_processes > 1  # some may be lost on the way
    with training(run.accelerator.group.report), run.accelerator.stop_on_signals():
        run.train()
        run.accelerator.print(f"results in {run.config.output_dir}")
        run.accelerator.group.barrier("ending the run")  # nobody leaves while another still writes
        run.accelerator.end_training()
    if several:
        leave()


def announce_demo(demo: Path, patterns: Sequence[str]) -> None:
    """Say, on the first worker, that `demo` is run because no --config was given, and name the task's other configs."""
    asked = any(word.split("=")[0] in ("--config", "--print_config", "--help", "-h") for word in sys.argv[1:])
    if asked or os.environ.get("RANK", "0") != "0":
        return
    files = sorted(file for pattern in patterns for file in CONFIGS.glob(f"{pattern}.yaml") if file != demo)
    others = ", ".join(str(file.relative_to(CONFIGS.parent)) for file in files)
    shown = demo.relative_to(CONFIGS.parent)
    print(f"No --config given: running the embedded demo {shown}. Others: {others}.", flush=True)
