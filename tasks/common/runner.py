"""Runs a task from its command line to its exit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dsgdac_accel import join_slurm_step
from tasks.common.algorithms import SYNCHRONOUS
from tasks.common.cli_errors import leave, starting_up, training
from tasks.common.config import parse_config
from tasks.common.output_dir import AnyAccelerator

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

Config = TypeVar("Config")


class Run(Protocol):
    """A training run, built from its configuration."""

    config: Any
    accelerator: AnyAccelerator

    def described(self) -> str:
        """Algorithm, data, workers and steps in one line."""

    def train(self) -> None:
        """Train, evaluate, and write the output folder."""


def run_task(
    make_run: Callable[[Config], Run],
    config_class: type[Config],
    demo: str,
    patterns: Sequence[str],
    description: str | None,
) -> None:
    """Read the configuration, train, and print where the results are.

    Args:
        make_run: builds the run from its configuration.
        config_class: class of the configuration.
        demo: name of the configuration in `configs/` to run without `--config`.
        patterns: globs for the names of the task's configurations.
        description: text for `--help`.
    """
    default = CONFIGS / f"{demo}.yaml"
    with starting_up():
        join_slurm_step()
        announce_demo(default, patterns)
        run = make_run(parse_config(config_class, default_file=default, description=description))
    run.accelerator.print(run.described())
    if run.accelerator.num_workers == 1 and run.config.algorithm not in SYNCHRONOUS:
        print(
            "1 worker: there is nobody to gossip with. Start several with torchrun --nproc_per_node N or "
            "accelerate launch --multi_gpu --num_processes N (the flag also starts CPU workers), or run several in "
            "this process with --gossip.workers_per_process N.",
            file=sys.stderr,
        )
    several = run.accelerator.num_processes > 1  # before training, in which some may be lost
    with training(run.accelerator.group.report), run.accelerator.stop_on_signals():
        run.train()
        run.accelerator.print(_last_words(run.config.algorithm, os.path.relpath(run.config.output_dir)))
        run.accelerator.group.barrier("ending the run")  # no worker leaves while another one writes
        run.accelerator.end_training()
    if several:
        leave()


def _last_words(algorithm: str, folder: str) -> str:
    """Name the folder of a finished run, the picture to open, and how to compare the run with a baseline."""
    words = f"results in {folder}; open {folder}/loss.png, or show all: dsgdac show {folder}"
    if algorithm in SYNCHRONOUS:
        return words
    baseline = "adam" if "adam" in algorithm else "sgd"
    return (
        f"{words}\nbaseline: the same command with --algorithm {baseline} --output_dir {folder}_{baseline}, then "
        f"dsgdac plot {folder} {folder}_{baseline}"
    )


def announce_demo(demo: Path, patterns: Sequence[str]) -> None:
    """Without `--config`, print on the first worker that `demo` runs, and which other configurations there are."""
    asked = any(word.split("=")[0] in ("--config", "--print_config", "--help", "-h") for word in sys.argv[1:])
    if asked or os.environ.get("RANK", "0") != "0":
        return
    files = sorted(file for pattern in patterns for file in CONFIGS.glob(f"{pattern}.yaml") if file != demo)
    others = ", ".join(str(file.relative_to(CONFIGS.parent)) for file in files)
    shown = demo.relative_to(CONFIGS.parent)
    print(f"No --config given: running the embedded demo {shown}. Others: {others}.", flush=True)
