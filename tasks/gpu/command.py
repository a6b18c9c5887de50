"""The command `tasks/gpu_check.py`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing

import torch

from dsgdac_accel.distributed.launcher_variables import launched_processes
from tasks.common.cli_errors import quiet_ends, starting_up
from tasks.common.config import parse_config
from tasks.gpu.catalog import CHECKS
from tasks.gpu.check import Check
from tasks.gpu.config import GpuCheckConfig
from tasks.gpu.launching import Machine, outcomes
from tasks.gpu.report import counts_of, line_of, machine_facts, show_details, write_json

DEADLINE_SECONDS = 465.0
"""For all checks together: under eight minutes with the start of this program."""
_DESCRIPTION = """Check the GPU path in under eight minutes: part 1 on one GPU, part 2 on two or more. Without a GPU,
what a CPU can tell. The exit status is 0 only if no check fails."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the checks that the command line asks for, print a line for each, and exit."""
    with starting_up():
        options = parse_config(GpuCheckConfig, argv, prog="gpu_check.py", description=_DESCRIPTION)
        machine = _machine(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the processes on its way out
    with quiet_ends():
        wanted = [check for check in CHECKS if options.part in (check.part, "all")]
        wanted = [check for check in wanted if check.name in options.only or not options.only]
        sys.exit(run(wanted, machine, options, "tasks.gpu.catalog"))


def _machine(options: GpuCheckConfig) -> Machine:
    count, variable = launched_processes()
    if "RANK" in os.environ or count > 1:
        raise ValueError(
            f"gpu_check.py starts its own processes; a launcher has started {count} of it ({variable}). Start it with "
            f"python alone."
        )
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cuda" and not cards:
        raise ValueError("device cuda needs a GPU that torch sees; it sees none. Use --device cpu, or a CUDA build.")
    return Machine(cuda=bool(cards) if options.device is None else options.device == "cuda", cards=cards)


def run(
    checks: Sequence[Check],
    machine: Machine,
    options: GpuCheckConfig,
    module: str,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> int:
    """Make the checks and print the report. Return the exit status: 1 after a FAIL, or else 0."""
    started = time.monotonic()
    facts = machine_facts(machine)
    for name, fact in facts.items():
        print(f"{name}: {fact}", flush=True)
    found = []
    try:
        with closing(outcomes(checks, machine, module, started + deadline_seconds)) as results:
            for outcome in results:
                found.append(outcome)
                print(line_of(outcome), flush=True)
                show_details(outcome)
    finally:  # also what was found before an interrupt
        seconds = time.monotonic() - started
        if options.json is not None:
            write_json(options.json, facts, found, seconds)
        print(counts_of(found, seconds), flush=True)
    return int(any(outcome.status == "FAIL" for outcome in found))
