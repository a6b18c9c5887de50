"""Measures what a step costs: ways to train the same model, interleaved in one launch, compared by medians.

    torchrun --nproc_per_node 2 tasks/benchmark.py --config configs/benchmark/wrn.yaml
    python tasks/benchmark.py --config configs/benchmark/network_100mbit.yaml

Variants take turns, so that other load on the machine affects all alike. With `workers` in the configuration, the
script starts its workers itself; `network` emulates a slower network between them. Other benchmarks are the
subcommands mixing and trainer, each with its own --help.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from tasks.benchmarks.config import BenchmarkConfig
from tasks.benchmarks.launching import check_workers, joined, launch_workers, must_launch
from tasks.benchmarks.measurement import measure
from tasks.benchmarks.report import check_output, report
from tasks.common.cli_errors import quiet_ends, starting_up, training
from tasks.common.config import parse_config


def main(arguments: Sequence[str]) -> None:
    """Start the workers, or be one of them: measure, print the table and write the files."""
    with starting_up(), quiet_ends():
        config = parse_config(BenchmarkConfig, arguments, description=__doc__)
        check_workers(config)
        if config.output is not None and os.environ.get("RANK", "0") == "0":
            check_output(config.output)
        if must_launch(config):
            sys.exit(launch_workers(config, main, arguments))
    with contextlib.ExitStack() as ended:
        with starting_up():
            here = ended.enter_context(joined(config))
        with training(here.group.everyone.report), here.relay_is_blamed():
            measured = measure(config, here.group, here.bytes_carried)
            if here.group.everyone.rank == 0:
                report(config, measured, here.group.size, here.lines())
            here.group.everyone.barrier("ending the benchmark")
