"""What a step costs: ways to train the same model, interleaved in one launch, compared by medians.

    torchrun --nproc_per_node 2 tasks/benchmark.py --config configs/benchmark/wrn.yaml
    python tasks/benchmark.py --config configs/benchmark/network_100mbit.yaml

Rounds take the variants in turn, so that a noisy machine disturbs all alike. Where the configuration gives `workers`,
the script starts them itself; `network` puts them on a slower network than this machine's own.
"""

from __future__ import annotations

import contextlib
import os
import sys

from tasks.benchmarks.config import BenchmarkConfig
from tasks.benchmarks.launching import check_workers, joined, launch_command, launch_workers, must_launch
from tasks.benchmarks.measurement import measure
from tasks.benchmarks.report import check_output, report
from tasks.common.cli_errors import quiet_ends, starting_up, training
from tasks.common.config import config_from_command_line


def main() -> None:
    """Start the workers, or be one: measure, print the table, write the files."""
    config = config_from_command_line(BenchmarkConfig, description=__doc__)
    with starting_up(), quiet_ends():
        check_workers(config)
        if config.output is not None and os.environ.get("RANK", "0") == "0":
            check_output(config.output)
        if must_launch(config):
            sys.exit(launch_workers(config, launch_command()))
    with contextlib.ExitStack() as ended:
        with starting_up():
            here = ended.enter_context(joined(config))
        with training(here.group.report), here.relay_is_blamed():
            measured = measure(config, here.group, here.carried)
            if here.group.rank == 0:
                report(config, measured, here.group.size, here.lines())
            here.group.barrier("ending the benchmark")


if __name__ == "__main__":
    main()
